"""Writes an episode index and draws from it in compiled loops.

Letters: T live steps per lane at most, R ring steps per lane, E lanes (environments), M = R * E slots,
L lanes and S steps written now, B batch, n rows of a window.

`ring` in the loops are the tables that `RingTables` describes: (episode, spans, lanes, R), and `room` is
R. A slot is divided by E only if there are several lanes, since a 64-bit division takes as long as all
the rest of a sample; positions are wrapped around by comparing and subtracting.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import (
    address,
    array_at,
    compiled,
    contiguous,
    inlined,
    prefetch,
)
from trl_storages.kernels.host.writing import Before, Given, NewRows, append_steps, find_gaps
from trl_storages.kernels.tables import (
    BOUNDARIES,
    CURSOR,
    FIRST,
    GOAL_KINDS,
    LAST,
    TAIL,
    Block,
    RingTables,
)

if TYPE_CHECKING:
    from trl_storages.kernels.host.rows import RowTable

__all__ = ["Ring"]

_SPAN_BYTES = 24
_FUTURE, _FINAL, _EPISODE, _RANDOM, _GEOMETRIC, _ = GOAL_KINDS.values()
_PAD, _FIT, _CROSS = range(len(BOUNDARIES))
# Samples to prefetch ahead, about the latency of memory.
_SAMPLES_AHEAD = 8
_NO_TABLE, _NO_PAIRS = np.zeros((0, 0), np.int64), np.zeros((0, 2), np.int64)
_NO_ROWS: Before = (_NO_TABLE, np.zeros(0, np.int64), _NO_TABLE, 0)


class Ring(RingTables):
    """An episode index on the CPU.

    Noise x is int64, uniform from 0 to 2^63 - 1; a draw below n is exactly floor(x n / 2^63).
    """

    @cached_property
    def _all_lanes(self) -> np.ndarray:
        return np.arange(self.num_envs)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The tables as the loops take them."""
        return self.episode.numpy(), self.spans.numpy(), self.lanes.numpy(), self.ring_steps

    def share_memory_(self) -> None:
        """Moves the tables to memory shared with other processes."""
        super().share_memory_()
        self.__dict__.pop("_arrays", None)

    def __getstate__(self) -> dict[str, Any]:
        # The views would be pickled as copies.
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    def given(self, rows: NewRows, block: Block) -> Given:
        """Returns the steps to be written, as the loops take them."""
        num_steps, lanes, order, cut = block
        which = self._all_lanes if lanes is None else np.asarray(lanes)
        cut_at = 0 if cut is None else address(cut)
        return which, num_steps, cut_at, 0 if order is None else address(order), *rows.ends

    def find_gaps(
        self,
        rows: NewRows,
        block: Block,
        pairs: np.ndarray,
        table: RowTable | None = None,
    ) -> torch.Tensor | None:
        """Finds rows that do not continue the row before them, bit for bit.

        Rows that begin an episode are never among them.

        Args:
            rows: the rows to be written, as `append` takes them.
            block: as in `append`.
            pairs: `[p, 2]` int64, for each compared field: its index, and that of the field under `next`
                which it must equal in the row before.
            table: holds the rows before; None if no lane has an open episode.

        Returns:
            `[L, S]` bool; may be None if there are none.
        """
        given = self.given(rows, block)
        gaps = torch.empty(len(given[0]), block.num_steps, dtype=torch.bool)
        before = _NO_ROWS if table is None else table.before
        is_any = find_gaps(self._arrays, given, rows.sources, pairs, before, address(gaps))
        return gaps if is_any else None

    def append(
        self,
        rows: NewRows,
        block: Block,
        table: RowTable | None = None,
        pairs: np.ndarray = _NO_PAIRS,
    ) -> torch.Tensor | None:
        """Appends steps to some lanes, and copies their rows to their slots.

        Args:
            rows: n of them.
            block: which of them are which steps.
            table: of M or more rows, which the rows go to; None if they are stored elsewhere.
            pairs: as in `find_gaps`; if there is a gap, nothing is written.

        Returns:
            `[n]` int64 slots; -1 for rows that are not of this block, and for steps evicted at once, as
            more than T are written. None if there is a gap.
        """
        given, to, sources = self.given(rows, block), _NO_TABLE, rows.sources
        slots = self.lanes.new_empty(rows.num_rows)
        if block.order is not None:
            slots.fill_(-1)
        if table is not None:
            to = table.array
            if not table.is_plain:
                # Before the rows are linked.
                if len(pairs) and self.find_gaps(rows, block, pairs, table) is not None:
                    return None
                pairs, sources = _NO_PAIRS, table.link(rows, self, given)  # type: ignore[attr-defined]
        new = given, sources, pairs, to, rows.num_rows, address(slots)
        return None if append_steps(self._arrays, self.steps_per_lane, *new) else slots

    def slots_by_age(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of live rows by their rank: 0 is the newest.

        Rows are ordered by how many steps they are behind the cursor of their lane; equally old ones by
        lane: the fullest lane first, and of equally full lanes the last one first.

        Args:
            ranks: int64 below the number of live rows, any shape.
        """
        ranks = contiguous(ranks)
        slots = torch.empty_like(ranks)
        _slots_by_age(self._arrays, ranks.numel(), address(ranks), address(slots))
        return slots

    def draw(self, noise: torch.Tensor, window: torch.Tensor | None = None) -> torch.Tensor:
        """Draws live rows uniformly, from all or from the newest.

        Args:
            noise: `[B]`.
            window: `[]` int64, how many of the newest rows to draw from; None is all.

        Returns:
            `[B]` int64 slots.
        """
        slots = torch.empty_like(noise)
        num_newest = self.capacity if window is None else int(window)
        _draw(self._arrays, noise.numel(), num_newest, address(noise), address(slots))
        return slots

    def goals(
        self,
        slots: torch.Tensor,
        noise: torch.Tensor,
        kinds: torch.Tensor,
        strategies: Collection[str],
        steps: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws the rows whose achieved goals become the new goals.

        Args:
            slots: `[B]` the rows t to relabel, of episodes first..last.
            noise: `[B]`.
            kinds: `[B]` uint8 of `GOAL_KINDS`, how each goal is drawn: "future" t..last, "final" last,
                "episode" first..last, "random" any live row, "geometric" `steps` rows after t or last,
                "current" t. Kind 0 returns the row itself.
            strategies: those among `kinds`.
            steps: `[B]` float64, rounded down; may be None unless "geometric" is among them.

        Returns:
            `[B]` int64 slots, and `[B]` bool whether a goal was drawn.
        """
        slots = contiguous(slots)
        goals, mask = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.bool)
        batch = map(address, (slots, noise, kinds, goals, mask))
        steps_at = 0 if steps is None else address(steps)
        _goals(self._arrays, slots.numel(), steps_at, *batch)
        return goals, mask

    def windows(self, slots: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each row with those that follow it in its episode.

        Args:
            slots: `[B]`.
            num_rows: n, at least 1.

        Returns:
            `[n, B]` int64 slots, the row itself first; past the end of the episode, its last row is
            repeated. And `[B]` int64: how many different rows there are, from 1 to n.
        """
        slots = contiguous(slots)
        windows, lengths = slots.new_empty(num_rows, slots.numel()), torch.empty_like(slots)
        batch = map(address, (slots, windows, lengths))
        _windows(self._arrays, slots.numel(), num_rows, *batch)
        return windows, lengths

    def sequences(
        self, slots: torch.Tensor, burn_in: int, num_steps: int, boundary: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the rows around each one, within its episode or its lane.

        Args:
            slots: `[B]`.
            burn_in: how many rows before it.
            num_steps: S, how many rows altogether.
            boundary: "pad" repeats the first or last surviving row of the episode for those beyond it;
                "fit" moves all S by as little as keeps them in the episode, where the last rows take
                precedence if not all fit; "cross" continues into the episodes before and after in the
                lane.

        Returns:
            `[B, S]` int64 slots, in time order; the first or last available row is repeated for those
            beyond it. `[B, S]` bool: whether the row is the one asked for. And `[B, S]` bool: whether an
            episode begins with it.
        """
        slots = contiguous(slots)
        rows = slots.new_empty(slots.numel(), num_steps)
        valid, begins = (torch.empty_like(rows, dtype=torch.bool) for _ in range(2))
        batch = map(address, (slots, rows, valid, begins))
        how = num_steps, burn_in, BOUNDARIES.index(boundary)
        _sequences(self._arrays, slots.numel(), *how, *batch)
        return rows, valid, begins

    def newest_ranges(self, window: torch.Tensor | int, lane_leaves: int) -> torch.Tensor:
        """Returns the leaf ranges of the newest rows in a `SumTree`, which is lane by lane.

        Args:
            window: a number or `[]` int64, how many rows, by the order of `slots_by_age`.
            lane_leaves: leaves per lane, at least R.

        Returns:
            `[2, 2 E]` int64, the first leaves and the ends of disjoint ranges, some of them empty.
        """
        ranges = self.lanes.new_empty(2, 2 * self.num_envs)
        _newest_ranges(self._arrays, int(window), lane_leaves, address(ranges))
        return ranges


@inlined
def _below(noise: int, bound: int) -> int:
    """Returns floor(noise * bound / 2^63), or the remainder where that would overflow."""
    if bound >= 1 << 31:
        return noise % bound
    return ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31


@compiled
def _newest_places(ring: Any) -> Any:
    """Returns the position in the ring of the newest row of each lane."""
    _, _, lanes, room = ring
    places = np.empty(len(lanes), np.int64)
    for lane in range(len(lanes)):
        places[lane] = (lanes[lane, CURSOR] - 1) % room
    return places


@compiled
def _by_age(lanes: Any) -> tuple[Any, Any, Any, Any, int]:
    """Returns how the rows of all lanes are ordered by age.

    Level j holds the ages at which exactly the j emptiest lanes have no row left.

    Returns:
        `[E]` lanes by fill, `[E]` the first age and `[E]` the first rank of each level, `[E]` the fill of
        the lanes in that order, and the number of live rows.
    """
    num_lanes = len(lanes)
    fill, order = np.empty(num_lanes, np.int64), np.empty(num_lanes, np.int64)
    first_age, first_rank = np.empty(num_lanes, np.int64), np.empty(num_lanes, np.int64)
    for lane in range(num_lanes):
        # Insertion sort: lanes are usually almost in order, and NumPy's sort takes seconds to compile.
        rows, place = lanes[lane, CURSOR] - lanes[lane, TAIL], lane
        while place > 0 and fill[place - 1] > rows:
            fill[place], order[place] = fill[place - 1], order[place - 1]
            place -= 1
        fill[place], order[place] = rows, lane
    age = rank = 0
    for level in range(num_lanes):
        first_age[level], first_rank[level] = age, rank
        rank += (fill[level] - age) * (num_lanes - level)
        age = fill[level]
    return order, first_age, first_rank, fill, rank


@inlined
def _level(first_rank: Any, rank: int) -> int:
    """Returns the last level that begins at or before a rank."""
    low, high = 0, len(first_rank)
    while high - low > 1:
        middle = (low + high) // 2
        if first_rank[middle] <= rank:
            low = middle
        else:
            high = middle
    return low


@compiled
def _slots_by_age(ring: Any, size: int, ranks_at: int, slots_at: int) -> None:
    _, _, lanes, room = ring
    ranks, slots = array_at(ranks_at, size, np.int64), array_at(slots_at, size, np.int64)
    num_lanes, num_slots = len(lanes), room * len(lanes)
    newest = _newest_places(ring)
    in_step = True
    for lane in range(num_lanes):
        in_step = in_step and lanes[lane, CURSOR] == lanes[0, CURSOR]
        in_step = in_step and lanes[lane, TAIL] == lanes[0, TAIL]
    if in_step:
        newest_slot = newest[0] * num_lanes + num_lanes - 1
        for i in range(len(ranks)):
            slot = newest_slot - ranks[i]
            slots[i] = slot if slot >= 0 else slot + num_slots
        return
    order, first_age, first_rank, _, _ = _by_age(lanes)
    for i in range(len(ranks)):
        level = _level(first_rank, ranks[i])
        offset = ranks[i] - first_rank[level]
        age = first_age[level] + offset // (num_lanes - level)
        lane = order[num_lanes - 1 - offset % (num_lanes - level)]
        slot = (newest[lane] - age) * num_lanes + lane
        slots[i] = slot if slot >= 0 else slot + num_slots


@compiled
def _draw(ring: Any, size: int, num_newest: int, noise_at: int, slots_at: int) -> None:
    noise, slots = array_at(noise_at, size, np.int64), array_at(slots_at, size, np.int64)
    num_rows, lanes = 0, ring[2]
    for lane in range(len(lanes)):
        num_rows += lanes[lane, CURSOR] - lanes[lane, TAIL]
    num_rows = min(num_rows, num_newest)
    for i in range(len(noise)):
        slots[i] = _below(noise[i], num_rows)
    # In place: ranks become slots.
    _slots_by_age(ring, size, slots_at, slots_at)


@compiled
def _bounds(ring: Any, slots: Any) -> tuple[Any, Any, Any]:
    """Returns the bounds of rows, each as the number of steps after the row.

    Returns:
        `[B]` the first step of its episode, whose row may be evicted; `[B]` the last step of its episode
        so far; and `[B]` the oldest live step of its lane.
    """
    episode, spans, lanes, room = ring
    num_lanes, newest = len(lanes), _newest_places(ring)
    first, last = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    oldest = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(episode):
            raise IndexError("slots must be those of the ring, below the number of its slots")
        if i + _SAMPLES_AHEAD < len(slots):
            prefetch(episode, slots[i + _SAMPLES_AHEAD] * episode.itemsize)
        # The entries of the episodes, at first.
        last[i] = episode[slots[i]]
        prefetch(spans, last[i] * _SPAN_BYTES)
    for i in range(len(slots)):
        lane, place = 0, slots[i]
        if num_lanes > 1:
            place = slots[i] // num_lanes
            lane = slots[i] - place * num_lanes
        back = newest[lane] - place
        step = lanes[lane, CURSOR] - 1 - (back if back >= 0 else back + room)
        first[i], oldest[i] = spans[last[i], FIRST] - step, lanes[lane, TAIL] - step
        last[i] = spans[last[i], LAST] - step
    return first, last, oldest


@inlined
def _shift(slot: int, steps: int, num_lanes: int, num_slots: int) -> int:
    """Returns the slot `steps` later, less than a whole ring."""
    slot += steps * num_lanes
    if slot >= num_slots:
        slot -= num_slots
    return slot + num_slots if slot < 0 else slot


@compiled
def _goals(
    ring: Any,
    size: int,
    steps_at: int,
    slots_at: int,
    noise_at: int,
    kinds_at: int,
    goals_at: int,
    mask_at: int,
) -> None:
    slots, noise = array_at(slots_at, size, np.int64), array_at(noise_at, size, np.int64)
    kinds, goals = array_at(kinds_at, size, np.uint8), array_at(goals_at, size, np.int64)
    mask, steps = array_at(mask_at, size, np.bool_), array_at(steps_at, size, np.float64)
    num_lanes, num_slots = len(ring[2]), len(ring[0])
    first, last, oldest = _bounds(ring, slots)
    any_random = False
    for i in range(len(slots)):
        mask[i] = kinds[i] > 0
        any_random |= kinds[i] == _RANDOM
    if any_random:
        _draw(ring, size, num_slots, noise_at, goals_at)
    for i in range(len(slots)):
        kind, begin, end = kinds[i], max(first[i], oldest[i]), last[i]
        if kind == _RANDOM:
            continue
        offset = 0
        if kind == _FUTURE:
            offset = _below(noise[i], end + 1)
        elif kind == _FINAL:
            offset = end
        elif kind == _EPISODE:
            offset = _below(noise[i], end - begin + 1) + begin
        elif kind == _GEOMETRIC:
            offset = int(min(steps[i], float(end)))
        goals[i] = _shift(slots[i], offset, num_lanes, num_slots)


@compiled
def _windows(
    ring: Any, size: int, num_rows: int, slots_at: int, windows_at: int, lengths_at: int
) -> None:
    slots, lengths = array_at(slots_at, size, np.int64), array_at(lengths_at, size, np.int64)
    windows = array_at(windows_at, num_rows * size, np.int64)
    num_lanes, num_slots = len(ring[2]), len(ring[0])
    _, last, _ = _bounds(ring, slots)
    for i in range(len(slots)):
        for j in range(num_rows):
            windows[j * size + i] = _shift(slots[i], min(j, last[i]), num_lanes, num_slots)
        lengths[i] = min(num_rows, last[i] + 1)


@compiled
def _sequences(
    ring: Any,
    size: int,
    num_steps: int,
    burn_in: int,
    boundary: int,
    slots_at: int,
    rows_at: int,
    valid_at: int,
    begins_at: int,
) -> None:
    episode, spans, lanes, _ = ring
    num_lanes, slots = len(lanes), array_at(slots_at, size, np.int64)
    rows = array_at(rows_at, size * num_steps, np.int64)
    valid = array_at(valid_at, size * num_steps, np.bool_)
    begins = array_at(begins_at, size * num_steps, np.bool_)
    first, last, oldest = _bounds(ring, slots)
    for i in range(len(slots)):
        lane, moved = slots[i] % num_lanes, -burn_in
        low, high = max(first[i], oldest[i]), last[i]
        if boundary == _CROSS:
            low, high = oldest[i], oldest[i] + lanes[lane, CURSOR] - lanes[lane, TAIL] - 1
        elif boundary == _FIT:
            # Forward to fit the burn-in, then back to fit the rows from the anchor on, which take
            # precedence.
            onward = num_steps - burn_in - 1
            moved += max(min(max(burn_in + low, 0), high - onward), low)
        step = lanes[lane, TAIL] - oldest[i]
        for s in range(num_steps):
            at, wanted = i * num_steps + s, s + moved
            offset = min(max(wanted, low), high)
            rows[at] = _shift(slots[i], offset, num_lanes, len(episode))
            valid[at] = offset == wanted
            if boundary == _CROSS:
                begins[at] = spans[episode[rows[at]], FIRST] == step + offset
            else:
                begins[at] = offset == first[i]


@compiled
def _newest_ranges(ring: Any, window: int, lane_leaves: int, ranges_at: int) -> None:
    _, _, lanes, room = ring
    num_lanes = len(lanes)
    ranges = array_at(ranges_at, 4 * num_lanes, np.int64)
    starts, stops = ranges[: 2 * num_lanes], ranges[2 * num_lanes :]
    order, first_age, first_rank, fill, num_rows = _by_age(lanes)
    level = _level(first_rank, window)
    sharing, left = num_lanes - level, window - first_rank[level]
    for place in range(num_lanes):
        lane, length = order[place], fill[place]
        if place >= level and window < num_rows:
            # Of equally old rows, those of the fullest lanes come first.
            one_more = num_lanes - 1 - place < left % sharing
            length = first_age[level] + left // sharing + one_more
        first, start = lane * lane_leaves, (lanes[lane, CURSOR] - length) % room
        # The newest rows of a lane may wrap around the end of its ring.
        over = max(start + length - room, 0)
        starts[lane], stops[lane] = first + start, first + start + length - over
        starts[num_lanes + lane], stops[num_lanes + lane] = first, first + over
