"""Writes an episode index and draws from it in tensor operations.

Letters: T live steps per lane at most, R ring steps per lane, E lanes (environments), M = R * E slots,
L lanes and S steps written now, B batch, n rows of a window.

Nothing that changes with writes is read on the host, so a captured graph stays valid while the ring grows
and wraps around, and if a lane skips a step later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from trl_storages.kernels.device.rows import RowTable
from trl_storages.kernels.device.writing import NewRows
from trl_storages.kernels.memory import on_device
from trl_storages.kernels.tables import FINISHED, FIRST, GOAL_KINDS, LAST, Block, RingTables, take

__all__ = ["Ring"]

_NO_PAIRS = np.zeros((0, 2), np.int64)


class Ring(RingTables):
    """See `kernels.host.Ring`: what other parts call is the same, with bit-identical results."""

    def find_gaps(
        self,
        rows: NewRows,
        block: Block,
        pairs: np.ndarray,
        table: RowTable | None = None,
    ) -> torch.Tensor | None:
        """Finds rows that do not continue the row before them, bit for bit."""
        lanes, cut = self.named(block.lanes), block.cut
        words, done = rows.steps(block)
        now = words.view(torch.uint8)
        before = torch.zeros_like(now[:, 0])
        if table is not None:
            before = table.rows_at(self.newest_slots(lanes)).view(torch.uint8)
        led_to = torch.cat([before.unsqueeze(1), now[:, :-1]], 1)
        gaps = torch.zeros_like(done)
        for at, end in pairs.tolist():
            (start, size), (led_start, _) = rows.places[[at, end]].tolist()
            differs = now[..., start : start + size] != led_to[..., led_start : led_start + size]
            gaps |= differs.any(-1)
        gaps &= torch.cat([self.is_open[lanes].unsqueeze(1) != 0, ~done[:, :-1]], 1)
        return gaps if cut is None else gaps & ~on_device(cut, self.device)

    def append(
        self,
        rows: NewRows,
        block: Block,
        table: RowTable | None = None,
        pairs: np.ndarray = _NO_PAIRS,
    ) -> torch.Tensor | None:
        """Appends steps to some lanes, and copies their rows to their slots."""
        if len(pairs):
            # Waits for the device; see `RowTable.finds_gaps`.
            gaps = self.find_gaps(rows, block, pairs, table)
            if gaps is not None and bool(gaps.any()):
                return None
        lanes, (num_steps, _, order, cut) = self.named(block.lanes), block
        words, done = rows.steps(block)
        room, found, lane = (
            self.steps_per_lane,
            self.next_slots(lanes, num_steps),
            lanes.unsqueeze(1),
        )
        cursor, begun, is_open, tail = self.lanes[lane].unbind(-1)
        # A row begins an episode if the row before it ended one, or if it is cut off from that row.
        begins = torch.cat([is_open == 0, done[:, :-1]], 1)
        if cut is not None:
            begins = begins | on_device(cut, self.device)
        step = cursor + torch.arange(num_steps, device=self.device)
        if table is not None:
            # Of more than R steps, only the last R are kept.
            table.write(self, lanes, step, words[:, -self.ring_steps :])
        number = begun + begins.cumsum(1) - 1
        first_step = torch.where(begins, step, -1).cummax(1).values
        # Whether a row is the last of its episode so far, among those written now.
        last = torch.ones_like(begins)
        last[:, :-1] = begins[:, 1:]
        end = cursor[:, 0] + num_steps
        tail = torch.maximum(tail[:, 0], end - room)
        self.lanes[lanes] = torch.stack([end, number[:, -1] + 1, (~done[:, -1]).long(), tail], 1)

        entry = (lane * room + number % room)[:, -room:]
        first_step, done, step = first_step[:, -room:], done[:, -room:], step[:, -room:]
        self.episode[found[:, -room:]] = entry.to(self.episode.dtype)
        # Episodes that began before this write keep their first step.
        self.spans[:, FIRST][torch.where(first_step >= 0, entry, self.capacity)] = first_step
        newest = torch.where(last[:, -room:], entry, self.capacity)
        self.spans[:, LAST][newest] = step
        self.spans[:, FINISHED][newest] = done.long()
        if order is None:
            return found.reshape(-1)
        slots = found.new_full((rows.num_rows,), -1)
        slots[order] = found
        return slots

    def named(self, lanes: Sequence[int] | torch.Tensor | None) -> torch.Tensor:
        """Returns the lanes as a tensor `[L]`; None is all of them."""
        if lanes is None:
            return torch.arange(self.num_envs, device=self.device)
        return on_device(torch.as_tensor(lanes), self.device)

    def slots_by_age(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of live rows by their rank: 0 is the newest."""
        if self.num_envs == 1:
            return (self.cursors - 1 - ranks) % self.ring_steps
        fill, lanes = self.by_fill()
        # Level j holds the ages at which exactly the j emptiest lanes have no row left. Its first
        # rank is the number of rows younger than its first age.
        lane_ids = torch.arange(self.num_envs, device=self.device)
        first_age = torch.cat([fill.new_zeros(1), fill[:-1]])
        rows_in_level = (fill - first_age) * (self.num_envs - lane_ids)
        end_rank = rows_in_level.cumsum(0)
        level = torch.searchsorted(end_rank, ranks, right=True)
        offset = ranks - take(end_rank - rows_in_level, level)
        width = self.num_envs - level
        age = take(first_age, level) + offset // width
        lane = take(lanes, self.num_envs - 1 - offset % width)
        step = take(self.cursors, lane) - 1 - age
        return self.slots_at(step, lane)

    def draw(self, noise: torch.Tensor, window: torch.Tensor | None = None) -> torch.Tensor:
        """Draws live rows uniformly, from all or from the newest."""
        num_rows = self.fill.sum()
        if window is not None:
            num_rows = torch.minimum(num_rows, window)
        return self.slots_by_age(self._below(noise, num_rows))

    def goals(
        self,
        slots: torch.Tensor,
        noise: torch.Tensor,
        kinds: torch.Tensor,
        strategies: Collection[str],
        steps: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the rows whose achieved goals become the new goals."""
        behind, ahead = self.extent(slots)
        offset = torch.zeros_like(slots)
        for strategy in strategies:
            if strategy == "future":
                drawn = self._below(noise, ahead + 1)
            elif strategy == "final":
                drawn = ahead
            elif strategy == "episode":
                drawn = self._below(noise, behind + ahead + 1) - behind
            elif steps is not None and strategy == "geometric":
                drawn = torch.minimum(steps, ahead).long()
            else:
                continue
            offset = torch.where(kinds == GOAL_KINDS[strategy], drawn, offset)
        goals = self.shift(slots, offset)
        if "random" in strategies:
            goals = torch.where(kinds == GOAL_KINDS["random"], self.draw(noise), goals)
        return goals, kinds > 0

    def windows(self, slots: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each row with those that follow it in its episode."""
        ahead = self.extent(slots)[1]
        wanted = torch.arange(num_rows, device=self.device).unsqueeze(1)
        step = torch.minimum(ahead, wanted)
        return self.shift(slots, step), step[-1] + 1

    def sequences(
        self, slots: torch.Tensor, burn_in: int, num_steps: int, boundary: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the rows around each one, within its episode or its lane."""
        cursor, _, _, oldest = take(self.lanes, slots % self.num_envs).unbind(-1)
        back = (cursor - 1 - slots // self.num_envs) % self.ring_steps
        step = cursor - 1 - back
        first, last, _ = (self.span(slots) - step.unsqueeze(1)).unbind(-1)
        low, high = oldest - step, back
        if boundary != "cross":
            low, high = torch.maximum(first, low), last
        wanted = torch.arange(-burn_in, num_steps - burn_in, device=self.device)
        if boundary == "fit":
            moved = (low + burn_in).clamp_(min=0)
            moved = torch.clamp(high - (num_steps - burn_in - 1), low, moved)
            wanted = wanted + moved.unsqueeze(1)
        offset = torch.clamp(wanted, low.unsqueeze(1), high.unsqueeze(1))
        rows, valid = self.shift(slots.unsqueeze(1), offset), offset == wanted
        if boundary != "cross":
            return rows, valid, offset == first.unsqueeze(1)
        begun = take(self.spans[:, FIRST], take(self.episode, rows))
        return rows, valid, offset.add_(step.unsqueeze(1)) == begun

    def newest_ranges(self, window: torch.Tensor | int, lane_leaves: int) -> torch.Tensor:
        """Returns the leaf ranges of the newest rows in a `SumTree`, which is lane by lane."""
        lane_ids = torch.arange(self.num_envs, device=self.device)
        fill, lanes = self.by_fill()
        window = torch.as_tensor(window, device=self.device)
        # The window takes all rows of the `emptied` emptiest lanes; the other lanes share the rest of it.
        end = fill.cumsum(0) + fill * (self.num_envs - 1 - lane_ids)
        emptied = torch.searchsorted(end, window, right=True)
        # Not indexed: a 0-d index would be read on the host.
        whole = take(torch.cat([fill.new_zeros(1), fill.cumsum(0)]), emptied)
        sharing = (self.num_envs - emptied).clamp(min=1)
        left = window - whole
        # Of equally old rows, those of the fullest lanes come first.
        place = self.num_envs - 1 - lane_ids
        share = left // sharing + (place < left % sharing)
        length = torch.where(lane_ids < emptied, fill, share)
        length = torch.empty_like(length).scatter_(0, lanes, length)
        first, start = lane_ids * lane_leaves, (self.cursors - length) % self.ring_steps
        # The newest rows of a lane may wrap around the end of its ring.
        over = (start + length - self.ring_steps).clamp(min=0)
        starts, stops = [first + start, first], [first + start + length - over, first + over]
        return torch.cat(starts + stops).view(2, -1)

    def _below(self, noise: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """Returns floor(noise * bound / 2^63), or the remainder where that would overflow."""
        scaled = ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31
        if self.capacity < 2**31:
            return scaled
        return torch.where(bound < 2**31, scaled, noise % bound)
