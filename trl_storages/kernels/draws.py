"""Draws of rows, goals, windows and sequences by arithmetic of slots; and sums over windows.

`tables` are those of `kernels.Index`; the loops ignore steps beyond the cursors.
Random numbers are integers of 63 bits, uniform from 0 to 2^63 - 1.

Letters: B batch, E lanes, T steps a lane, n rows of a window, S rows of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CURSOR, FIRST, LAST, TAIL, Index
from trl_storages.kernels.compile import inlined, loop, prefetch

__all__ = [
    "BEGIN",
    "BOUNDARIES",
    "END",
    "NEWEST",
    "OLDEST",
    "STRATEGIES",
    "changes",
    "distances_of",
    "draw",
    "goals",
    "increment",
    "lane_of",
    "num_live",
    "sequences",
    "slots_between",
    "steps_of",
    "sum_windows",
    "window_of",
    "windows",
]

#: Goal strategy -> its number; 0 draws no goal.
STRATEGIES = {"future": 1, "final": 2, "episode": 3, "random": 4, "geometric": 5, "current": 6}
_FUTURE, _FINAL, _EPISODE, _RANDOM, _GEOMETRIC, _ = STRATEGIES.values()
#: How a sequence is kept within an episode.
BOUNDARIES = ("pad", "fit", "cross")
_, _FIT, _CROSS = range(3)

#: Columns of `distances_of`.
BEGIN, END, OLDEST, NEWEST = range(4)
# Loops prefetch memory for the sample that is this many samples later.
_DISTANCE = 12


@inlined
def _random_below(noise: int, bound: int) -> int:
    """Returns floor(noise * bound / 2^63), or `noise % bound` where the product would overflow."""
    if bound >= 1 << 31:
        return noise % bound
    return ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31


@inlined
def lane_of(slot: int, E: int, T: int) -> int:
    """Returns the lane of a slot, without a division if there is one lane."""
    return slot // T if E > 1 else 0


@inlined
def increment(position: int, size: int) -> int:
    """Returns (position + 1) mod size."""
    return position + 1 if position + 1 < size else 0


@loop
def num_live(lane_bounds: Any) -> int:
    """Returns the number of valid steps, given `lane_bounds` `[E, 2]`."""
    live = 0
    for e in range(len(lane_bounds)):
        live += max(lane_bounds[e, CURSOR] - lane_bounds[e, TAIL], 0)
    return live


@loop
def window_of(tables: Any, count: int) -> int:
    """Returns the least w such that the newest w steps of each lane are `count` rows or more, or all."""
    index = Index(*tables)
    lane_bounds = index.lane_bounds
    low, high = 1, index.num_steps
    while low < high:
        middle, num_steps = (low + high) // 2, 0
        for e in range(len(lane_bounds)):
            num_steps += min(lane_bounds[e, CURSOR] - lane_bounds[e, TAIL], middle)
        if num_steps >= count:
            high = middle
        else:
            low = middle + 1
    return low


@loop
def draw(tables: Any, window: int, noise: Any) -> Any:
    """Returns slots `[B]` of valid rows, drawn uniformly from the newest `window` steps of each lane."""
    index, slots = Index(*tables), np.empty(len(noise), np.int64)
    lane_bounds, T = index.lane_bounds, index.num_steps
    E = len(lane_bounds)
    # By lane: the slot within the lane of its oldest step in the window, and how many rows come before.
    oldest, starts = np.empty(E, np.int64), np.empty(E, np.int64)
    total = 0
    for e in range(E):
        cursor = lane_bounds[e, CURSOR]
        # A concurrent writer may have moved the tail beyond the cursor that was read.
        count = max(min(cursor - lane_bounds[e, TAIL], window), 0)
        oldest[e], starts[e] = (cursor - count) % T, total
        total += count
    share = E / max(total, 1)
    for i in range(len(noise)):
        rank = _random_below(noise[i], total)
        e, high = 0, E
        if E > 1:
            # The lane that holds it if all lanes hold as many rows; else it is searched for.
            likely = min(int(rank * share), E - 1)
            if starts[likely] <= rank and (likely + 1 == E or rank < starts[likely + 1]):
                e, high = likely, likely + 1
        while high - e > 1:  # the last lane that begins at or before it
            middle = (e + high) >> 1
            if starts[middle] <= rank:
                e = middle
            else:
                high = middle
        position = oldest[e] + rank - starts[e]
        slots[i] = e * T + (position - T if position >= T else position)
        # The caller reads these tables next.
        prefetch(index.episode, slots[i])
        prefetch(index.where, slots[i])
    return slots


@loop
def steps_of(lane_bounds: Any, T: int, slots: Any, steps: Any) -> None:
    """Writes the number of the newest step, so far, in each slot `[B]`."""
    E = len(lane_bounds)
    for i in range(len(slots)):
        if not 0 <= slots[i] < E * T:
            raise IndexError("slots must be at least 0 and below the number of slots")
        newest = lane_bounds[lane_of(slots[i], E, T), CURSOR] - 1
        steps[i] = newest - (newest - slots[i]) % T


@loop
def distances_of(tables: Any, slots: Any) -> Any:
    """Returns the distances from rows to the bounds of their episodes and lanes.

    Returns:
        `[B, 4]` int64 numbers of steps, negative ones into the past: `BEGIN`, to the first step of the
        episode, which may be evicted; `END`, to the last step of the episode so far; `OLDEST` and
        `NEWEST`, to the oldest and the newest valid step of the lane.
    """
    index = Index(*tables)
    episode, spans = index.episode, index.spans
    lane_bounds, T = index.lane_bounds, index.num_steps
    E = len(lane_bounds)
    newest, newest_positions = np.empty(E, np.int64), np.empty(E, np.int64)
    flat_spans = spans.reshape(-1, 2)
    distances = np.empty((len(slots), 4), np.int64)
    for e in range(E):  # cursors are read once, because a concurrent writer moves them
        newest[e] = lane_bounds[e, CURSOR] - 1
        newest_positions[e] = newest[e] % T
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(episode):
            raise IndexError("slots must be at least 0 and below the number of slots")
        if i + _DISTANCE < len(slots):
            prefetch(episode, slots[i + _DISTANCE])
        e = lane_of(slots[i], E, T)
        distances[i, BEGIN] = e * (T + 1) + episode[slots[i]]
        prefetch(flat_spans, distances[i, BEGIN])
    for i in range(len(slots)):
        e = lane_of(slots[i], E, T)
        num_newer = newest_positions[e] - (slots[i] - e * T)
        num_newer = num_newer if num_newer >= 0 else num_newer + T
        number, step = distances[i, BEGIN] - e * (T + 1), newest[e] - num_newer
        # All values of a row that was just evicted may be wrong, so they are kept within its lane.
        distances[i, BEGIN] = min(spans[e, number, FIRST] - step, 0)
        # A step that is written but not yet published does not count.
        distances[i, END] = max(min(spans[e, number, LAST] - step, num_newer), 0)
        distances[i, OLDEST] = max(min(lane_bounds[e, TAIL] - step, 0), 1 - T)
        distances[i, NEWEST] = num_newer
    return distances


@inlined
def _shift(slot: int, steps: int, E: int, T: int) -> int:
    """Returns the slot that is `steps` steps, less than T, later in its lane."""
    first = lane_of(slot, E, T) * T
    position = slot - first + steps
    if position >= T:
        position -= T
    return first + (position + T if position < 0 else position)


@loop
def goals(tables: Any, slots: Any, noise: Any, strategies: Any, steps: Any) -> Any:
    """Returns the slots `[B]` of rows whose achieved goals become the new goals.

    Args:
        tables: of the index.
        slots: `[B]` the rows t to relabel, each in an episode first..last.
        noise: `[B]` random numbers.
        strategies: `[B]` uint8 numbers from `STRATEGIES`: "future" t..last, "final" last, "episode" all
            valid rows of first..last, "random" any valid row, "geometric" `steps` rows after t or last,
            "current" t. 0 is the row itself.
        steps: `[B]` float64, rounded down; may be empty if no strategy is "geometric".
    """
    index = Index(*tables)
    E, T = len(index.lane_bounds), index.num_steps
    distances, has_random = distances_of(tables, slots), False
    for i in range(len(slots)):
        has_random |= strategies[i] == _RANDOM
    out = draw(tables, T, noise) if has_random else np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        strategy, end, offset = strategies[i], distances[i, END], 0
        if strategy == _RANDOM:
            continue
        if strategy == _FUTURE:
            offset = _random_below(noise[i], end + 1)
        elif strategy == _FINAL:
            offset = end
        elif strategy == _EPISODE:
            begin = max(distances[i, BEGIN], distances[i, OLDEST])
            offset = begin + _random_below(noise[i], end - begin + 1)
        elif strategy == _GEOMETRIC:
            offset = int(min(steps[i], float(end)))
        out[i] = _shift(slots[i], offset, E, T)
        prefetch(index.where, out[i])
    return out


@loop
def windows(tables: Any, slots: Any, n: int) -> tuple[Any, Any]:
    """Returns the n-step windows `[n, B]` of rows, and their lengths `[B]`.

    A window is the row and the rows after it in its episode; the last row is repeated up to n rows.
    """
    index, distances = Index(*tables), distances_of(tables, slots)
    E, T = len(index.lane_bounds), index.num_steps
    out, lengths = np.empty((n, len(slots)), np.int64), np.empty(len(slots), np.int64)
    for j in range(len(out)):
        for i in range(len(slots)):
            out[j, i] = _shift(slots[i], min(j, distances[i, END]), E, T)
    for i in range(len(slots)):
        lengths[i] = min(n, distances[i, END] + 1)
    return out, lengths


@loop
def sum_windows(rewards: Any, lengths: Any, weights: Any, out: Any) -> None:
    """Computes weighted sums of the first `lengths` `[B]` of `rewards` `[n, B, m]`, in float64.

    out_bj = Σ weights[i] · rewards[i, b, j]   over i < lengths[b]
    """
    for b in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = 0.0
            for i in range(lengths[b]):
                total += weights[i] * rewards[i, b, j]
            out[b, j] = total


@loop
def sequences(tables: Any, slots: Any, burn_in: int, S: int, boundary: int) -> tuple[Any, Any, Any]:
    """Finds sequences of S consecutive rows, in time order, each around an anchor row.

    Args:
        tables: of the index.
        slots: `[B]` the anchors.
        burn_in: number of rows before each anchor.
        S: number of rows.
        boundary: position in `BOUNDARIES`: "pad" repeats the first or last row of the episode; "fit"
            shifts the sequence by the least number of steps that keeps it within the episode, where the
            rows from the anchor on take precedence over the burn-in; "cross" continues into the episodes
            before and after in the lane.

    Returns:
        `[B, S]` slots, in which the oldest or newest row within the bounds is repeated beyond them;
        `[B, S]` bool, whether a row is in its position and not a repeated one; and `[B, S]` bool, whether
        a row begins an episode.
    """
    index = Index(*tables)
    episode, spans = index.episode, index.spans
    lane_bounds, T = index.lane_bounds, index.num_steps
    E, distances = len(lane_bounds), distances_of(tables, slots)
    out = np.empty((len(slots), S), np.int64)
    valid, begins = np.empty(out.shape, np.bool_), np.empty(out.shape, np.bool_)
    for i in range(len(slots)):
        first, oldest, begin = distances[i, BEGIN], distances[i, OLDEST], -burn_in
        low, high = max(first, oldest), distances[i, END]
        e = lane_of(slots[i], E, T)
        step = lane_bounds[e, TAIL] - oldest
        if boundary == _CROSS:
            low, high = oldest, distances[i, NEWEST]
        elif boundary == _FIT:
            # Shift forward until the burn-in fits, but only while the last row fits. Shift back until
            # the last row fits, but only while the anchor does: it matters more than the burn-in.
            begin += max(min(max(burn_in + low, 0), high - (S - burn_in - 1)), low)
        for s in range(S):
            offset = min(max(begin + s, low), high)
            out[i, s] = _shift(slots[i], offset, E, T)
            valid[i, s] = offset == begin + s
            begins[i, s] = spans[e, episode[out[i, s]], FIRST] == step + offset
    return out, valid, begins


@loop
def slots_between(tables: Any, firsts: Any, ends: Any) -> Any:
    """Returns the slots of steps `firsts` to `ends` `[E]` of each lane, lane by lane."""
    T, i = Index(*tables).num_steps, 0
    slots = np.empty((ends - firsts).sum(), np.int64)
    for e in range(len(firsts)):
        position = firsts[e] % T
        for _ in range(firsts[e], ends[e]):
            slots[i] = e * T + position
            position = increment(position, T)
            i += 1
    return slots


@loop
def changes(tables: Any, before: Any, now: Any, is_reset: bool) -> Any:
    """Returns the slots of steps that were evicted, and of steps that were written, between two moments.

    The slots are at most as many as the lanes hold, however many steps were written in between.

    Args:
        tables: of the index.
        before: `[E, 2]` cursors and tails at the first moment.
        now: `[E, 2]` cursors and tails at the second moment.
        is_reset: whether all earlier steps were evicted at once.
    """
    firsts, ends = np.empty((2, len(now)), np.int64), np.empty((2, len(now)), np.int64)
    for e in range(len(now)):
        cursor, last_cursor = now[e, CURSOR], before[e, CURSOR]
        # A concurrent writer may have moved a tail beyond the cursor that was read.
        tail, oldest = min(now[e, TAIL], cursor), min(before[e, TAIL], last_cursor)
        firsts[0, e], ends[0, e] = oldest, last_cursor if is_reset else min(last_cursor, tail)
        firsts[1, e], ends[1, e] = tail if is_reset else max(last_cursor, tail), cursor
    evicted = slots_between(tables, firsts[0], ends[0])
    return evicted, slots_between(tables, firsts[1], ends[1])
