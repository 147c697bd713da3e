"""Writes an episode index and draws from it in compiled loops.

Letters: T live steps per lane at most, R ring steps per lane, E lanes (environments), M = R * E slots,
L lanes and S steps written now, B batch, n rows of a window. In the loops `room` is R.

The loops are what the tables mean that `RingTables` describes. A slot is divided by E only where there
are several lanes, since a 64-bit division takes as long as all the rest of a sample; what wraps around is
compared and subtracted.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, inlined, prefetch
from trl_storages.kernels.host.memory import copy_bytes
from trl_storages.kernels.ring_tables import BOUNDARIES, GOAL_STRATEGIES, RingTables

if TYPE_CHECKING:
    from trl_storages.kernels.host.rows import RowTable

__all__ = ["Ring"]

# Columns of the tables.
_FIRST, _LAST, _FINISHED = 0, 1, 2
_CURSOR, _BEGUN, _OPEN, _TAIL = 0, 1, 2, 3
_SPAN_BYTES = 24
_FUTURE, _FINAL, _EPISODE, _RANDOM = range(len(GOAL_STRATEGIES))
_STRATEGIES = {name: number for number, name in enumerate(GOAL_STRATEGIES)}
_PAD, _FIT, _CROSS = range(len(BOUNDARIES))
_BOUNDARIES = {name: number for number, name in enumerate(BOUNDARIES)}
# About as far as memory is away.
_SAMPLES_AHEAD = 8
_NO_CUTS = np.zeros((0, 0), bool)
_NO_TABLE, _NO_ROWS = np.zeros((0, 0), np.int64), np.zeros((0, 0, 0), np.int64)


class Ring(RingTables):
    """An episode index on the CPU.

    Noise is int64, uniform from 0 to 2^63 - 1; bound n is drawn below as floor(x n / 2^63), exactly.
    """

    @cached_property
    def _all_lanes(self) -> np.ndarray:
        return np.arange(self.num_envs)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tables as the loops take them."""
        return self.episode.numpy(), self.spans.numpy(), self.lanes.numpy()

    def share_memory_(self) -> None:
        """Moves the tables to memory that other processes see."""
        super().share_memory_()
        self.__dict__.pop("_arrays", None)

    def __getstate__(self) -> dict[str, Any]:
        # They would be pickled as copies.
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    def append(
        self,
        done: torch.Tensor,
        cut: torch.Tensor | None,
        lanes: torch.Tensor | None = None,
        table: RowTable | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Takes S further steps of L lanes, and copies their rows to where they belong.

        Args:
            done: `[L, S]` bool, on any device: the episode ends with this row.
            cut: `[L, S]` bool: this row does not continue the row before it in its lane; or None.
            lanes: `[L]` int64, distinct; None is all of them.
            table: of M or more rows, where rows go; None if they are elsewhere.
            rows: `[L, S, W]` int64, contiguous.

        Returns:
            `[L, S]` int64 slots; -1 for steps that find no room, as more than T are written.
        """
        ends = (done if done.is_cpu else done.cpu()).contiguous().numpy()
        cuts = _NO_CUTS if cut is None else cut.cpu().contiguous().numpy()
        written = self._all_lanes if lanes is None else lanes.numpy()
        slots = np.empty(ends.shape, np.int64)
        to = _NO_TABLE if table is None else table.array
        new = _NO_ROWS if rows is None else rows.numpy()
        most_live, room = self.steps_per_lane, self.ring_steps
        _append(*self._arrays, most_live, room, written, ends, cuts, to, new, slots)
        return torch.from_numpy(slots)

    def counters(self) -> np.ndarray:
        """Returns a copy of all that a write goes on from."""
        return self._arrays[2].copy()

    def recount(self, counters: np.ndarray) -> None:
        """Puts back what `counters` returned."""
        self._arrays[2][:] = counters

    def newest_slots(self, lanes: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[L]` the slot of the newest row of each of L lanes; of an empty lane any slot.

        Args:
            lanes: `[L]` int64; None is all of them.
        """
        which = self._all_lanes if lanes is None else lanes.numpy()
        return torch.from_numpy(_newest_slots(self._arrays[2], self.ring_steps, which))

    def slots_by_age(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of live rows by their rank: 0 is the newest.

        Rows are ordered by how many steps they lie behind the cursor of their own lane, and in one
        such step by lane: those that hold more rows first, of equal ones the last lane first.

        Args:
            ranks: int64 below the number of live rows, any shape.
        """
        slots = np.empty(ranks.shape, np.int64)
        flat = ranks.contiguous().numpy().reshape(-1)
        _slots_by_age(self._arrays[2], self.ring_steps, flat, slots.reshape(-1))
        return torch.from_numpy(slots)

    def draw(self, noise: torch.Tensor, window: torch.Tensor | None = None) -> torch.Tensor:
        """Draws live rows uniformly, or the newest ones only.

        Args:
            noise: `[B]`.
            window: `[]` int64, how many of the newest rows to draw from; None is all.

        Returns:
            `[B]` int64 slots.
        """
        numbers = noise.contiguous().numpy()
        slots = np.empty(numbers.shape, np.int64)
        num_newest = self.capacity if window is None else int(window)
        _draw(self._arrays[2], self.ring_steps, numbers, num_newest, slots)
        return torch.from_numpy(slots)

    def goals(
        self, slots: torch.Tensor, noise: torch.Tensor, mask: torch.Tensor, strategy: str
    ) -> torch.Tensor:
        """Draws the rows that lend their goals.

        Args:
            slots: `[B]` the rows t that are given goals, of episodes first..last.
            noise: `[B]`.
            mask: `[B]` bool: whether a goal is drawn; otherwise the row is its own.
            strategy: "future" t..last, "final" last, "episode" first..last, or "random" any live row.

        Returns:
            `[B]` int64 slots.
        """
        anchors = slots.contiguous().numpy()
        goals = np.empty(anchors.shape, np.int64)
        _goals(
            *self._arrays,
            self.ring_steps,
            anchors,
            noise.contiguous().numpy(),
            mask.contiguous().numpy(),
            _STRATEGIES[strategy],
            goals,
        )
        return torch.from_numpy(goals)

    def windows(self, slots: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds each row and those that follow it in its episode.

        Args:
            slots: `[B]`.
            num_rows: n, at least 1.

        Returns:
            `[n, B]` int64 slots, the row itself first; where the episode ends before, its last row
            stands for the rest. And `[B]` int64: how many different rows there are, from 1 to n.
        """
        anchors = slots.contiguous().numpy()
        windows = np.empty((num_rows, len(anchors)), np.int64)
        lengths = np.empty(anchors.shape, np.int64)
        _windows(*self._arrays, self.ring_steps, anchors, windows, lengths)
        return torch.from_numpy(windows), torch.from_numpy(lengths)

    def sequences(
        self, slots: torch.Tensor, burn_in: int, num_steps: int, boundary: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Finds the rows around each one, within its episode or its lane.

        Args:
            slots: `[B]`.
            burn_in: how many rows before it.
            num_steps: S, how many rows altogether.
            boundary: "pad" takes the first or last surviving row of the episode for those beyond it;
                "fit" moves all S by as little as keeps them in the episode, the last ones if they are
                too many; "cross" goes on into the episodes before and after in the lane.

        Returns:
            `[B, S]` int64 slots, in time order; the first or last row there is stands for those beyond
            it. `[B, S]` bool: whether the row is the one asked for. And `[B, S]` bool: whether an episode
            begins with it.
        """
        anchors = slots.contiguous().numpy()
        rows = np.empty((len(anchors), num_steps), np.int64)
        valid, begins = np.empty(rows.shape, bool), np.empty(rows.shape, bool)
        _sequences(
            *self._arrays,
            self.ring_steps,
            anchors,
            burn_in,
            _BOUNDARIES[boundary],
            rows,
            valid,
            begins,
        )
        return torch.from_numpy(rows), torch.from_numpy(valid), torch.from_numpy(begins)

    def newest_per_lane(self, window: torch.Tensor) -> torch.Tensor:
        """Counts how many of the newest rows each lane holds.

        Args:
            window: `[]` int64, how many rows, by the order of `slots_by_age`.

        Returns:
            `[E]` int64: the newest so many rows of each lane make up the window.
        """
        lengths = np.empty(self.num_envs, np.int64)
        _newest_per_lane(self._arrays[2], int(window), lengths)
        return torch.from_numpy(lengths)


@compiled
def _append(
    episode: Any,
    spans: Any,
    lanes: Any,
    most_live: int,
    room: int,
    written: Any,
    done: Any,
    cut: Any,
    table: Any,
    rows: Any,
    slots: Any,
) -> None:
    num_steps, row_bytes = done.shape[1], rows.shape[2] * 8
    has_cuts = cut.size > 0
    for i in range(len(written)):
        lane = written[i]
        step = lanes[lane, _CURSOR]
        number = lanes[lane, _BEGUN]
        goes_on = lanes[lane, _OPEN] != 0
        place = step % room
        # The episode that was begun last.
        entry = lane * most_live + (number - 1) % most_live
        for s in range(num_steps):
            if not goes_on or (has_cuts and cut[i, s]):
                entry = lane * most_live + number % most_live
                number += 1
                spans[entry, _FIRST] = step
            slot = place * len(lanes) + lane
            episode[slot] = entry
            spans[entry, _LAST] = step
            spans[entry, _FINISHED] = done[i, s]
            goes_on = not done[i, s]
            if s + most_live < num_steps:
                slots[i, s] = -1
            else:
                slots[i, s] = slot
                at = rows.ctypes.data + (i * num_steps + s) * row_bytes
                copy_bytes(table.ctypes.data + slot * row_bytes, at, row_bytes)
            step += 1
            place = place + 1 if place + 1 < room else 0
        lanes[lane, _CURSOR] = step
        lanes[lane, _BEGUN] = number
        lanes[lane, _OPEN] = goes_on
        lanes[lane, _TAIL] = max(lanes[lane, _TAIL], step - most_live)


@inlined
def _below(noise: int, bound: int) -> int:
    """Returns floor(noise * bound / 2^63), or the remainder where that would overflow."""
    if bound >= 1 << 31:
        return noise % bound
    return ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31


@compiled
def _newest_slots(lanes: Any, room: int, which: Any) -> Any:
    slots = np.empty(len(which), np.int64)
    for i in range(len(which)):
        slots[i] = (lanes[which[i], _CURSOR] - 1) % room * len(lanes) + which[i]
    return slots


@compiled
def _newest_places(lanes: Any, room: int) -> Any:
    """Returns where the newest row of each lane lies in it."""
    places = np.empty(len(lanes), np.int64)
    for lane in range(len(lanes)):
        places[lane] = (lanes[lane, _CURSOR] - 1) % room
    return places


@compiled
def _by_age(lanes: Any) -> tuple[Any, Any, Any, Any, int]:
    """Returns how rows of any lanes are ordered by age.

    Level j holds the ages at which exactly the j emptiest lanes have no row left.

    Returns:
        `[E]` lanes by fill, `[E]` the first age and `[E]` the first rank of each level, `[E]` the fill of
        the lanes in that order, and the number of live rows.
    """
    num_lanes = len(lanes)
    fill, order = np.empty(num_lanes, np.int64), np.empty(num_lanes, np.int64)
    first_age, first_rank = np.empty(num_lanes, np.int64), np.empty(num_lanes, np.int64)
    for lane in range(num_lanes):
        # Sorted by insertion: lanes are nearly in order as a rule, and NumPy's sort takes seconds to
        # compile.
        rows, place = lanes[lane, _CURSOR] - lanes[lane, _TAIL], lane
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
    """Returns the last level that begins at a rank or before it."""
    low, high = 0, len(first_rank)
    while high - low > 1:
        middle = (low + high) // 2
        if first_rank[middle] <= rank:
            low = middle
        else:
            high = middle
    return low


@compiled
def _slots_by_age(lanes: Any, room: int, ranks: Any, slots: Any) -> None:
    num_lanes = len(lanes)
    newest = _newest_places(lanes, room)
    in_step = True
    for lane in range(num_lanes):
        in_step = in_step and lanes[lane, _CURSOR] == lanes[0, _CURSOR]
        in_step = in_step and lanes[lane, _TAIL] == lanes[0, _TAIL]
    if in_step:
        newest_slot = newest[0] * num_lanes + num_lanes - 1
        for i in range(len(ranks)):
            slot = newest_slot - ranks[i]
            slots[i] = slot if slot >= 0 else slot + room * num_lanes
        return
    order, first_age, first_rank, _, _ = _by_age(lanes)
    for i in range(len(ranks)):
        level = _level(first_rank, ranks[i])
        offset = ranks[i] - first_rank[level]
        age = first_age[level] + offset // (num_lanes - level)
        lane = order[num_lanes - 1 - offset % (num_lanes - level)]
        place = newest[lane] - age
        slots[i] = (place if place >= 0 else place + room) * num_lanes + lane


@compiled
def _draw(lanes: Any, room: int, noise: Any, num_newest: int, slots: Any) -> None:
    num_rows = 0
    for lane in range(len(lanes)):
        num_rows += lanes[lane, _CURSOR] - lanes[lane, _TAIL]
    num_rows = min(num_rows, num_newest)
    for i in range(len(noise)):
        slots[i] = _below(noise[i], num_rows)
    # Ranks become slots where they are.
    _slots_by_age(lanes, room, slots, slots)


@compiled
def _find_spans(episode: Any, spans: Any, slots: Any, entries: Any) -> None:
    """Finds the entry of each slot's episode, and asks for what it holds."""
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(episode):
            raise IndexError("slots must be those of the ring, from 0 to its capacity")
        if i + _SAMPLES_AHEAD < len(slots):
            prefetch(episode, slots[i + _SAMPLES_AHEAD] * episode.itemsize)
        entries[i] = episode[slots[i]]
        prefetch(spans, entries[i] * _SPAN_BYTES)


@inlined
def _lane_and_step(lanes: Any, room: int, newest: Any, slot: int) -> Any:
    """Returns the lane of a slot, and its step in it."""
    lane, place = 0, slot
    if len(lanes) > 1:
        place = slot // len(lanes)
        lane = slot - place * len(lanes)
    back = newest[lane] - place
    return lane, lanes[lane, _CURSOR] - 1 - (back if back >= 0 else back + room)


@inlined
def _extent(spans: Any, lanes: Any, room: int, newest: Any, slot: int, entry: int) -> Any:
    """Returns how many surviving rows of the same episode lie before and after a slot."""
    lane, step = _lane_and_step(lanes, room, newest, slot)
    first = max(spans[entry, _FIRST], lanes[lane, _TAIL])
    return step - first, spans[entry, _LAST] - step


@inlined
def _shift(slot: int, steps: int, num_lanes: int, capacity: int) -> int:
    """Returns the slot so many steps later, fewer than a whole ring."""
    slot += steps * num_lanes
    if slot >= capacity:
        slot -= capacity
    return slot + capacity if slot < 0 else slot


@compiled
def _goals(
    episode: Any,
    spans: Any,
    lanes: Any,
    room: int,
    slots: Any,
    noise: Any,
    mask: Any,
    strategy: int,
    goals: Any,
) -> None:
    num_lanes, capacity = len(lanes), len(episode)
    if strategy == _RANDOM:
        _draw(lanes, room, noise, capacity, goals)
    else:
        newest = _newest_places(lanes, room)
        _find_spans(episode, spans, slots, goals)
        for i in range(len(slots)):
            behind, ahead = _extent(spans, lanes, room, newest, slots[i], goals[i])
            earliest = 0
            if strategy == _FINAL:
                earliest = ahead
            elif strategy == _EPISODE:
                earliest = -behind
            offset = earliest + _below(noise[i], ahead - earliest + 1)
            goals[i] = _shift(slots[i], offset, num_lanes, capacity)
    for i in range(len(slots)):
        if not mask[i]:
            goals[i] = slots[i]


@compiled
def _windows(
    episode: Any, spans: Any, lanes: Any, room: int, slots: Any, windows: Any, lengths: Any
) -> None:
    num_lanes, capacity, num_rows = len(lanes), len(episode), len(windows)
    newest = _newest_places(lanes, room)
    _find_spans(episode, spans, slots, lengths)
    for i in range(len(slots)):
        _, ahead = _extent(spans, lanes, room, newest, slots[i], lengths[i])
        for j in range(num_rows):
            windows[j, i] = _shift(slots[i], min(j, ahead), num_lanes, capacity)
        lengths[i] = min(num_rows, ahead + 1)


@compiled
def _sequences(
    episode: Any,
    spans: Any,
    lanes: Any,
    room: int,
    slots: Any,
    burn_in: int,
    boundary: int,
    rows: Any,
    valid: Any,
    begins: Any,
) -> None:
    num_lanes, capacity, num_steps = len(lanes), len(episode), rows.shape[1]
    newest = _newest_places(lanes, room)
    entries = np.empty(len(slots), np.int64)
    _find_spans(episode, spans, slots, entries)
    for i in range(len(slots)):
        lane, step = _lane_and_step(lanes, room, newest, slots[i])
        first, last = spans[entries[i], _FIRST] - step, spans[entries[i], _LAST] - step
        oldest = lanes[lane, _TAIL] - step
        behind, ahead = -max(first, oldest), last
        moved = -burn_in
        if boundary == _CROSS:
            behind, ahead = -oldest, lanes[lane, _CURSOR] - 1 - step
        elif boundary == _FIT:
            # Room for the burn-in is made first, for the rows from the anchor on last.
            onward = num_steps - burn_in - 1
            moved += max(min(max(burn_in - behind, 0), ahead - onward), -behind)
        for s in range(num_steps):
            wanted = s + moved
            offset = min(max(wanted, -behind), ahead)
            rows[i, s] = _shift(slots[i], offset, num_lanes, capacity)
            valid[i, s] = offset == wanted
            begins[i, s] = offset == first
        if boundary != _CROSS:
            continue
        at, end = max(moved, -behind), min(moved + num_steps - 1, ahead)
        while at <= end:
            # From one episode to the next. At the ends of the lane a row stands for those beyond it too.
            entry = episode[_shift(slots[i], at, num_lanes, capacity)]
            first = spans[entry, _FIRST] - step
            start = 0 if first == -behind else max(first - moved, 0)
            stop = num_steps if first == ahead else first - moved + 1
            if first >= -behind:
                for s in range(start, stop):
                    begins[i, s] = True
            at = max(at, spans[entry, _LAST] - step) + 1


@compiled
def _newest_per_lane(lanes: Any, window: int, lengths: Any) -> None:
    num_lanes = len(lanes)
    order, first_age, first_rank, fill, num_rows = _by_age(lanes)
    level = _level(first_rank, window)
    sharing, left = num_lanes - level, window - first_rank[level]
    for place in range(num_lanes):
        if place < level or window >= num_rows:
            lengths[order[place]] = fill[place]
        else:
            # Of equally old rows, those of the fullest lanes come first.
            one_more = num_lanes - 1 - place < left % sharing
            lengths[order[place]] = first_age[level] + left // sharing + one_more
