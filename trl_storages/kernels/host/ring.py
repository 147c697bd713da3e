"""Writes an episode index and draws from it in compiled loops.

Letters: T live steps per lane at most, R ring steps per lane, E lanes (environments), M = R * E slots,
L lanes and S steps written now, B batch, n rows of a window. In the loops `room` is R.

The loops implement the tables that `RingTables` describes. A slot is divided by E only if there are
several lanes, since a 64-bit division takes as long as all the rest of a sample; positions are wrapped
around by comparing and subtracting.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, inlined, prefetch
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
_BOUNDARIES = {name: number for number, name in enumerate(BOUNDARIES)}
# Samples to prefetch ahead, about the latency of memory.
_SAMPLES_AHEAD = 8
_NO_CUTS, _NO_ORDER = np.zeros((0, 0), bool), np.zeros((0, 0), np.int64)
_NO_STEPS = np.zeros(0)
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
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tables as the loops take them."""
        return self.episode.numpy(), self.spans.numpy(), self.lanes.numpy()

    def share_memory_(self) -> None:
        """Moves the tables to memory shared with other processes."""
        super().share_memory_()
        self.__dict__.pop("_arrays", None)

    def __getstate__(self) -> dict[str, Any]:
        # The views would be pickled as copies.
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    def given(self, rows: NewRows, block: Block) -> Given:
        """Returns the steps to be written, as the loops take them."""
        _, lanes, order, cut = block
        return (
            self._all_lanes if lanes is None else np.asarray(lanes),
            block.num_steps,
            _NO_CUTS if cut is None else cut.numpy(),
            _NO_ORDER if order is None else order.numpy(),
            *rows.ends,
        )

    def find_gaps(
        self,
        rows: NewRows,
        block: Block,
        pairs: np.ndarray,
        table: RowTable | None = None,
        *,
        is_ring: bool = True,
    ) -> torch.Tensor | None:
        """Finds rows that do not continue the row before them, bit for bit.

        Rows that begin an episode are never among them.

        Args:
            rows: the rows to be written, as `append` takes them.
            block: as in `append`.
            pairs: `[p, 2]` int64, for each compared field: its index, and that of the field under `next`
                which it must equal in the row before.
            table: holds the rows before; None if no lane has an open episode.
            is_ring: whether the table is that of the ring; otherwise it holds the rows before, `[L, W]`.

        Returns:
            `[L, S]` bool; may be None if there are none.
        """
        given = self.given(rows, block)
        return self._find_gaps(rows, given, pairs, table, is_ring=is_ring)

    def _find_gaps(
        self,
        rows: NewRows,
        given: Given,
        pairs: np.ndarray,
        table: RowTable | None,
        *,
        is_ring: bool = True,
    ) -> torch.Tensor | None:
        gaps = np.empty((len(given[0]), given[1]), bool)
        before = _NO_ROWS if table is None else table.before
        known = self._arrays[2], self.ring_steps
        found = find_gaps(*known, *given, rows.sources, pairs, is_ring, *before, gaps)
        return torch.from_numpy(gaps) if found else None

    def append(
        self,
        rows: NewRows,
        block: Block,
        table: RowTable | None = None,
        slots: torch.Tensor | None = None,
        pairs: np.ndarray = _NO_PAIRS,
    ) -> torch.Tensor | None:
        """Appends steps to some lanes, and copies their rows to their slots.

        Args:
            rows: n of them.
            block: which of them are which steps.
            table: of M or more rows, which the rows go to; None if they are stored elsewhere.
            slots: `[n]` int64, filled in for the rows of this block; None returns a new tensor.
            pairs: as in `find_gaps`; if there is a gap, nothing is written. For tables with `finds_gaps`.

        Returns:
            `[n]` int64 slots; -1 for steps evicted at once, as more than T are written. None if there is
            a gap.
        """
        given, to, sources = self.given(rows, block), _NO_TABLE, rows.sources
        found = np.empty(rows.num_rows, np.int64) if slots is None else slots.numpy()
        if table is not None:
            if len(pairs) and not table.is_plain:
                # Before the rows are linked.
                if self._find_gaps(rows, given, pairs, table) is not None:
                    return None
                pairs = _NO_PAIRS
            to, sources = table.array, table.sources(rows, self, given)
        most_live, room = self.steps_per_lane, self.ring_steps
        if append_steps(*self._arrays, most_live, room, *given, sources, pairs, to, found):
            return None
        return torch.from_numpy(found) if slots is None else slots

    def counters(self) -> np.ndarray:
        """Returns a copy of the counters that a write advances."""
        found: np.ndarray = self._arrays[2].copy()
        return found

    def recount(self, counters: np.ndarray) -> None:
        """Restores what `counters` returned."""
        self._arrays[2][:] = counters

    def slots_by_age(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of live rows by their rank: 0 is the newest.

        Rows are ordered by how many steps they are behind the cursor of their lane; equally old ones by
        lane: the fullest lane first, and of equally full lanes the last one first.

        Args:
            ranks: int64 below the number of live rows, any shape.
        """
        slots = np.empty(ranks.shape, np.int64)
        flat = ranks.contiguous().numpy().reshape(-1)
        _slots_by_age(self._arrays[2], self.ring_steps, flat, slots.reshape(-1))
        return torch.from_numpy(slots)

    def draw(self, noise: torch.Tensor, window: torch.Tensor | None = None) -> torch.Tensor:
        """Draws live rows uniformly, from all or from the newest.

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
        anchors = slots.contiguous().numpy()
        goals, mask = np.empty(anchors.shape, np.int64), np.empty(anchors.shape, bool)
        numbers, drawn_as = noise.contiguous().numpy(), kinds.contiguous().numpy()
        onward = _NO_STEPS if steps is None else steps.numpy()
        _goals(*self._arrays, self.ring_steps, anchors, numbers, onward, drawn_as, goals, mask)
        return torch.from_numpy(goals), torch.from_numpy(mask)

    def windows(self, slots: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each row with those that follow it in its episode.

        Args:
            slots: `[B]`.
            num_rows: n, at least 1.

        Returns:
            `[n, B]` int64 slots, the row itself first; past the end of the episode, its last row is
            repeated. And `[B]` int64: how many different rows there are, from 1 to n.
        """
        anchors = slots.contiguous().numpy()
        windows = np.empty((num_rows, len(anchors)), np.int64)
        lengths = np.empty(anchors.shape, np.int64)
        _windows(*self._arrays, self.ring_steps, anchors, windows, lengths)
        return torch.from_numpy(windows), torch.from_numpy(lengths)

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

    def newest_ranges(
        self, window: torch.Tensor, lane_leaves: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the leaf ranges of the newest rows in a `SumTree`, which is lane by lane.

        Args:
            window: `[]` int64, how many rows, by the order of `slots_by_age`.
            lane_leaves: leaves per lane, at least R.

        Returns:
            `[2 E]` int64 first leaves and `[2 E]` ends of disjoint ranges, some of them empty.
        """
        starts, stops = np.empty((2, 2 * self.num_envs), np.int64)
        _newest_ranges(self._arrays[2], self.ring_steps, int(window), lane_leaves, starts, stops)
        return torch.from_numpy(starts), torch.from_numpy(stops)


@inlined
def _below(noise: int, bound: int) -> int:
    """Returns floor(noise * bound / 2^63), or the remainder where that would overflow."""
    if bound >= 1 << 31:
        return noise % bound
    return ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31


@compiled
def _newest_places(lanes: Any, room: int) -> Any:
    """Returns the position in the ring of the newest row of each lane."""
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
def _slots_by_age(lanes: Any, room: int, ranks: Any, slots: Any) -> None:
    num_lanes = len(lanes)
    newest = _newest_places(lanes, room)
    in_step = True
    for lane in range(num_lanes):
        in_step = in_step and lanes[lane, CURSOR] == lanes[0, CURSOR]
        in_step = in_step and lanes[lane, TAIL] == lanes[0, TAIL]
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
        num_rows += lanes[lane, CURSOR] - lanes[lane, TAIL]
    num_rows = min(num_rows, num_newest)
    for i in range(len(noise)):
        slots[i] = _below(noise[i], num_rows)
    # In place: ranks become slots.
    _slots_by_age(lanes, room, slots, slots)


@compiled
def _find_spans(episode: Any, spans: Any, slots: Any, entries: Any) -> None:
    """Finds the entry of each slot's episode, and prefetches it."""
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(episode):
            raise IndexError("slots must be those of the ring, from 0 to its capacity")
        if i + _SAMPLES_AHEAD < len(slots):
            prefetch(episode, slots[i + _SAMPLES_AHEAD] * episode.itemsize)
        entries[i] = episode[slots[i]]
        prefetch(spans, entries[i] * _SPAN_BYTES)


@inlined
def _lane_and_step(lanes: Any, room: int, newest: Any, slot: int) -> Any:
    """Returns the lane of a slot, and its newest step in it."""
    lane, place = 0, slot
    if len(lanes) > 1:
        place = slot // len(lanes)
        lane = slot - place * len(lanes)
    back = newest[lane] - place
    return lane, lanes[lane, CURSOR] - 1 - (back if back >= 0 else back + room)


@inlined
def _extent(spans: Any, lanes: Any, room: int, newest: Any, slot: int, entry: int) -> Any:
    """Returns how many surviving rows of the same episode lie before and after a slot."""
    lane, step = _lane_and_step(lanes, room, newest, slot)
    first = max(spans[entry, FIRST], lanes[lane, TAIL])
    return step - first, spans[entry, LAST] - step


@inlined
def _shift(slot: int, steps: int, num_lanes: int, capacity: int) -> int:
    """Returns the slot `steps` later, less than a whole ring."""
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
    steps: Any,
    kinds: Any,
    goals: Any,
    mask: Any,
) -> None:
    num_lanes, num_slots = len(lanes), len(episode)
    newest = _newest_places(lanes, room)
    entries = np.empty(len(slots), np.int64)
    _find_spans(episode, spans, slots, entries)
    any_random = False
    for i in range(len(slots)):
        mask[i] = kinds[i] > 0
        any_random |= kinds[i] == _RANDOM
    if any_random:
        _draw(lanes, room, noise, num_slots, goals)
    for i in range(len(slots)):
        kind = kinds[i]
        if kind == _RANDOM:
            continue
        behind, ahead = _extent(spans, lanes, room, newest, slots[i], entries[i])
        offset = 0
        if kind == _FUTURE:
            offset = _below(noise[i], ahead + 1)
        elif kind == _FINAL:
            offset = ahead
        elif kind == _EPISODE:
            offset = _below(noise[i], behind + ahead + 1) - behind
        elif kind == _GEOMETRIC:
            offset = int(min(steps[i], float(ahead)))
        goals[i] = _shift(slots[i], offset, num_lanes, num_slots)


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
    most_live = (len(spans) - 1) // num_lanes
    newest = _newest_places(lanes, room)
    entries = np.empty(len(slots), np.int64)
    _find_spans(episode, spans, slots, entries)
    for i in range(len(slots)):
        lane, step = _lane_and_step(lanes, room, newest, slots[i])
        first, last = spans[entries[i], FIRST] - step, spans[entries[i], LAST] - step
        oldest = lanes[lane, TAIL] - step
        behind, ahead = -max(first, oldest), last
        moved = -burn_in
        if boundary == _CROSS:
            behind, ahead = -oldest, lanes[lane, CURSOR] - 1 - step
        elif boundary == _FIT:
            # Forward to fit the burn-in, then back to fit the rows from the anchor on, which take
            # precedence.
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
        low, high = max(moved, oldest), min(moved + num_steps - 1, ahead)
        start, entry = last + 1, entries[i]
        while start <= high:
            # The last row of the lane is repeated for those beyond it.
            stop = num_steps if start == ahead else start - moved + 1
            begins[i, start - moved : stop] = True
            # Consecutive episodes of a lane have consecutive entries, which wrap around.
            entry = entry + 1 if entry + 1 < (lane + 1) * most_live else lane * most_live
            start = spans[entry, LAST] - step + 1
        start, entry = first, entries[i]
        while start > low:
            entry = entry - 1 if entry > lane * most_live else entry - 1 + most_live
            start = spans[entry, FIRST] - step
            if start >= low:
                begins[i, 0 if start == oldest else start - moved : start - moved + 1] = True


@compiled
def _newest_ranges(
    lanes: Any, room: int, window: int, lane_leaves: int, starts: Any, stops: Any
) -> None:
    num_lanes = len(lanes)
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
