"""Marked and checksummed rows, and words that are replaced atomically, in tensor operations.

Letters: W words of 8 bytes a row, M slots, n rows, L lanes and S steps written now, E lanes
(environments), K words of a table.

No fences here: where `orders_stores` is true, program order is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_storages.kernels.device.raw_priorities import RawPriorities
from trl_storages.kernels.device.ring import Ring
from trl_storages.kernels.marks import (
    FINISH,
    LOWER_HALF,
    MOST_STAMP,
    PRESENT,
    STAMP_BIT,
    STAMP_FACTOR,
    START,
    STEP_BIT,
    factors,
    hardware_orders_stores,
    is_of,
    pack_marks,
)
from trl_storages.kernels.sharing import CONTINUES, ENTRY_BIT, tips_of
from trl_storages.kernels.tables import ABSENT, FIRST, steps_between

__all__ = [
    "Commits",
    "MarkedRows",
    "PriorityWords",
    "checksums",
    "orders_stores",
]

# Rows per batch of checksums, so that intermediate results stay in the cache.
_BLOCK = 4096
_MOST_TRIES = 1000
_NO_NUMBERS = np.zeros(0, np.int64)


def orders_stores() -> bool:
    """Returns whether other processes see stores in order on this machine."""
    return hardware_orders_stores()


def checksums(rows: torch.Tensor, marks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the checksums `[n]` of rows `[n, W]`, all int64."""
    constants = torch.from_numpy(factors(rows.shape[1])).to(rows.device)
    total = START + constants[0] * _folded(marks) + constants[1] * _folded(slots)
    return _finished(total + (_folded(rows) * constants[2:]).sum(-1))


def _folded(words: torch.Tensor) -> torch.Tensor:
    shift, left, _ = FINISH[-1]
    return words ^ (words >> shift & left)


def _finished(total: torch.Tensor) -> torch.Tensor:
    for shift, left, factor in FINISH:
        total = (total ^ (total >> shift & left)) * factor
    return total


class MarkedRows:
    """Rows with a mark and a checksum each; see `kernels.host.disk.MarkedRows`.

    Args:
        rows: `[M, W]` int64, contiguous.
        marks: `[M, 2]` int64.
        values: `[*, X + 1]` int64 (X shared words), or None.
        headers: `[M]`, or None.
        past_steps: how many preceding rows of its episode a row is read with.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        marks: torch.Tensor,
        values: torch.Tensor | None = None,
        headers: torch.Tensor | None = None,
        past_steps: int = 0,
    ) -> None:
        self._rows, self._marks, self._values = rows, marks, values
        self._headers: torch.Tensor = headers  # type: ignore[assignment]
        self._past_steps = past_steps

    def clear(
        self, ring: Ring, num_steps: int, lanes: Sequence[int] | None, commits: Commits
    ) -> None:
        """Clears the marks of the slots of the next S steps of lanes, unless these are committed."""
        committed = torch.from_numpy(commits._tables)[commits.number & 1, 1 : 1 + ring.num_envs]
        written = _written(ring, lanes)
        written = written[(committed <= ring.cursors)[written]]
        lane, num_cleared = written.unsqueeze(1), min(num_steps, ring.ring_steps)
        step = ring.cursors[lane] + torch.arange(num_steps - num_cleared, num_steps)
        self._marks[ring.slots_at(step, lane), 0] = 0

    def seal(
        self,
        ring: Ring,
        num_steps: int,
        lanes: Sequence[int] | None = None,
        priorities: PriorityWords | None = None,
        commits: Commits | None = None,
        write_count: int = 0,
        trajectories: np.ndarray = _NO_NUMBERS,
    ) -> None:
        """Seals the newest S steps of lanes, which were written, with checksums and marks."""
        lane = _written(ring, lanes).unsqueeze(1)
        num_marked = min(num_steps, ring.steps_per_lane + self._past_steps)
        step = ring.cursors[lane] - num_marked + torch.arange(num_marked)
        # Evicted rows belong to the episode of the oldest live row, or to none that is known.
        known = torch.maximum(step, ring.tails[lane])
        slots, known = (ring.slots_at(it, lane) for it in (step, known))
        first, last, is_finished = ring.span(known).unbind(-1)
        ends = (last == step) & (is_finished != 0)
        marks = pack_marks(step, first == step, ends)
        is_one = step >= first.clamp(min=0)
        newest, slots, marks = slots[:, -1], slots[is_one], marks[is_one]
        self._marks[slots, 1] = checksums(self._rows[slots], marks, slots)
        if self._values is not None:
            for tips, at in ((False, slots), (True, newest)):
                entries = self._named(at, ring.num_envs, tips=tips)
                at, entries = at[entries > 0], entries[entries > 0]
                found = checksums(self._values[entries, :-1], self._marks[at, 1], at)
                self._values[entries, -1] = found
        if priorities is not None:
            priorities.seal(slots, marks)
        self._marks[slots, 0] = marks
        if commits is not None:
            commits.publish_lanes(ring, write_count, trajectories)

    def check(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether the checksum of each slot is right, `[n]` bool; False if it has no row."""
        self._check_slots(slots)
        right = torch.empty_like(slots, dtype=torch.bool)
        for start in range(0, len(slots), _BLOCK):
            at = slots[start : start + _BLOCK]
            mark, check = self._marks[at].unbind(1)
            found = checksums(self._rows[at], mark, at)
            right[start : start + _BLOCK] = (found == check) & (mark & PRESENT != 0)
        return right

    def _named(self, slots: torch.Tensor, num_lanes: int, *, tips: bool) -> torch.Tensor:
        """Returns the side-table entries that rows name; see `check_next`."""
        headers = self._headers[slots].long()
        return tips_of(headers, slots % num_lanes, num_lanes) if tips else headers >> ENTRY_BIT

    def check_next(self, slots: torch.Tensor, num_lanes: int, *, tips: bool) -> torch.Tensor:
        """Returns whether the next values that rows name are intact, `[n]` bool.

        Args:
            slots: `[n]` int64.
            num_lanes: E.
            tips: whether to check the rows' own next values, in tips; otherwise those of the rows before.
        """
        values: torch.Tensor = self._values  # type: ignore[assignment]
        entries = self._named(slots, num_lanes, tips=tips)
        is_one, found = (entries > 0) & (entries < len(values)), []
        for start in range(0, len(slots), _BLOCK):
            at, some = (it[start : start + _BLOCK] for it in (slots, entries * is_one))
            found.append(checksums(values[some, :-1], self._marks[at, 1], at) == values[some, -1])
        right = torch.cat([is_one[:0], *found]) & is_one
        return right if tips else right | (self._headers[slots] & CONTINUES != 0) & ~is_one

    def hold(self, ring: Ring, slots: torch.Tensor) -> bool:
        """Returns whether slots of any shape hold the rows that an index expects there."""
        self._check_slots(slots)
        slots = slots.reshape(-1, 1)
        newest, first = ring.steps(slots), ring.span(slots)[..., FIRST]
        step = newest - torch.arange(self._past_steps + 1)
        is_read = (step == newest) | (step >= first) & (newest >= ring.oldest(slots))
        lane = slots % ring.num_envs
        marks = self._marks[ring.slots_at(step, lane), 0]
        return bool((is_of(marks, step) | ~is_read).all())

    def _check_slots(self, slots: torch.Tensor) -> None:
        if bool(((slots < 0) | (slots >= len(self._marks))).any()):
            raise IndexError("slots must be those of the ring, below the number of its slots")


def _written(ring: Ring, lanes: Sequence[int] | None) -> torch.Tensor:
    return torch.arange(ring.num_envs) if lanes is None else torch.tensor(lanes)


class Commits:
    """Words that are replaced atomically; see `kernels.host.disk.Commits`.

    Args:
        selector: `[1]` int64, on the CPU.
        tables: `[2, K + 1]` int64, on the CPU.
    """

    def __init__(self, selector: torch.Tensor, tables: torch.Tensor) -> None:
        self._selector, self._tables = selector.numpy(), tables.numpy()

    @property
    def number(self) -> int:
        """The number of the last commit."""
        found: int = self._selector.item()
        return found

    def cursors(self, num_lanes: int) -> np.ndarray:
        """Returns a view of the cursors `[E]` of the last commit, as written by `publish_lanes`."""
        return self._tables[self.number & 1, 1 : 1 + num_lanes]

    def publish(self, words: torch.Tensor) -> None:
        """Commits `[K]` int64 words."""
        # Wraps around at 64 bits: a damaged file may hold the largest number.
        number = (self.number + 1 + 2**63) % 2**64 - 2**63
        table = self._tables[number & 1]
        if len(words) != len(table) - 1:
            raise ValueError("as many words must be published as a table holds")
        table[:-1] = words.numpy()
        table[-1] = _table_check(words, number)
        self._selector[0] = number

    def publish_lanes(self, ring: Ring, write_count: int, trajectories: np.ndarray) -> None:
        """Commits a number, and the state of each lane."""
        lanes = ring.cursors, ring.tails, ring.is_open, torch.from_numpy(trajectories)
        self.publish(torch.cat([torch.tensor([write_count]), *lanes]))

    def read(self) -> torch.Tensor | None:
        """Returns a copy of the words `[K]` of the last commit, or None if its checksum is wrong."""
        for _ in range(_MOST_TRIES):
            number = self.number
            table = torch.from_numpy(np.copy(self._tables[number & 1]))
            if int(table[-1]) == _table_check(table[:-1], number):
                return table[:-1]
            # The writer may have moved on meanwhile, and reused this table.
            if self.number == number:
                break
        return None


def _table_check(words: torch.Tensor, number: int) -> int:
    mark, slot = torch.tensor([[number], [number & 1]])
    return int(checksums(words.unsqueeze(0), mark, slot))


class PriorityWords:
    """Priorities of rows, each with a check of it and a mark; see `kernels.host.disk.PriorityWords`.

    Args:
        words: `[M + 1]` int64, for each slot, and for the largest priority.
        marks: `[M, 2]` int64.
    """

    def __init__(self, words: torch.Tensor, marks: torch.Tensor) -> None:
        self._words, self._marks = words, marks

    def seal(self, slots: torch.Tensor, marks: torch.Tensor) -> None:
        """Gives rows that are about to get these marks the largest priority; 1 if there is none yet."""
        largest = self.get(torch.tensor([len(self._marks)]))
        self._words[slots] = _sealed(torch.where(largest > 0, largest, 1.0), marks)

    @property
    def is_new(self) -> bool:
        """Whether the largest priority was never set: the file is all zeros there."""
        return not self._words[-1]

    def put(self, slots: torch.Tensor, priorities: torch.Tensor) -> None:
        """Stores priorities of rows: `[n]` int64 slots, M for the largest priority, and `[n]` float32."""
        self._words[slots] = _sealed(priorities, self._marks_of(slots))

    def get(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the stored priorities `[n]` float32 of slots; NaN where damaged or missing."""
        return _opened(self._words[slots], self._marks_of(slots))

    def _marks_of(self, slots: torch.Tensor) -> torch.Tensor:
        size = len(self._marks)
        return self._marks[slots.clamp(max=size - 1), 0] * (slots < size)

    def stamps(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns a number for the row in each slot, `[n]` int32; another row there has another one."""
        mixed = (self._marks[slots, 0] >> STEP_BIT) * STAMP_FACTOR >> STAMP_BIT
        return (mixed & MOST_STAMP | 1).int()

    def renew(
        self, table: RawPriorities, slots: torch.Tensor, ring: Ring, tails: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in rows that were sealed, and drops those evicted since `tails`."""
        priority = table.renew(slots)
        if priority < 0:
            return priority, slots[:0]
        written = slots[slots >= 0]
        table.stamps[written] = self.stamps(written)
        first = np.maximum(tails, ring.cursors.numpy() - ring.ring_steps)
        lane, step = steps_between(first, ring.tails.numpy())
        evicted = torch.from_numpy(ring.slots_at(step, lane))
        table.priorities[evicted] = ABSENT
        return priority, evicted

    def news(
        self, ring: Ring, known: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the live slots whose words differ from `known`, their words, and their priorities."""
        slots = torch.arange(len(self._marks))
        if known is not None:
            slots = slots[self._words[:-1] != known]
        words, marks = self._words[slots], self._marks[slots, 0]
        step = ring.steps(slots)
        is_live = is_of(marks, step) & (step >= ring.tails[slots % ring.num_envs])
        slots, words, marks = slots[is_live], words[is_live], marks[is_live]
        return slots, words, _opened(words, marks)


def _sealed(priorities: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Packs float32 priorities, each with a check of it and its mark, into words `[n]` int64."""
    bits = priorities.contiguous().view(torch.int32).long() & LOWER_HALF
    constants = torch.from_numpy(factors(1)).to(bits.device)
    total = START + constants[0] * _folded(bits) + constants[1] * _folded(marks)
    return _finished(total) & ~LOWER_HALF | bits


def _opened(words: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Unpacks `[n]` float32 priorities from words; NaN where the check does not match the mark."""
    # The lower half; the cast to int32 wraps around.
    found = (words & LOWER_HALF).to(torch.int32).view(torch.float32)
    is_one = (found >= 0) & found.isfinite() & (words == _sealed(found, marks))
    return torch.where(is_one, found, torch.nan)
