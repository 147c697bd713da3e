"""Draws of rows, goals, windows and sequences: arithmetic of slots; and sums over windows.

An `index` is that of `kernels`; whatever lies beyond the cursors counts for nothing.
Random numbers are integers of 63 bits, uniform from 0 to 2^63 - 1.

Letters: B batch, E lanes, T steps a lane, n rows of a window, S rows of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CURSOR, FIRST, LANES, LAST, STEPS, TAIL, WHERE
from trl_storages.kernels.compile import inlined, loop, prefetch

__all__ = [
    "BEGIN",
    "BOUNDARIES",
    "END",
    "GOAL_KINDS",
    "NEWEST",
    "OLDEST",
    "after",
    "bounds",
    "changes",
    "draw",
    "fold",
    "goals",
    "lane_of",
    "num_live",
    "sequences",
    "slots_between",
    "window_of",
    "windows",
]

#: Strategy of goals -> its number; 0 draws none.
GOAL_KINDS = {"future": 1, "final": 2, "episode": 3, "random": 4, "geometric": 5, "current": 6}
_FUTURE, _FINAL, _EPISODE, _RANDOM, _GEOMETRIC, _ = GOAL_KINDS.values()
#: Ways in which a sequence is kept within an episode.
BOUNDARIES = ("pad", "fit", "cross")
_PAD, _FIT, _CROSS = range(3)

#: Columns of `bounds`.
BEGIN, END, OLDEST, NEWEST = range(4)
# How many samples ahead memory is asked for.
_AHEAD = 12


@inlined
def _below(noise: int, bound: int) -> int:
    """Returns floor(noise * bound / 2^63), or the remainder where that would overflow."""
    if bound >= 1 << 31:
        return noise % bound
    return ((noise >> 32) * bound + ((noise & 0xFFFFFFFF) * bound >> 32)) >> 31


@inlined
def lane_of(slot: int, E: int, T: int) -> int:
    """Returns the lane of a slot; a division takes longer than to ask whether there are several."""
    return slot // T if E > 1 else 0


@inlined
def after(place: int, size: int) -> int:
    """Returns the place behind one; the first of `size` follows the last."""
    return place + 1 if place + 1 < size else 0


@loop
def num_live(lanes: Any) -> int:
    """Returns how many steps of lanes `[E, 2]` are live."""
    live = 0
    for e in range(len(lanes)):
        live += max(lanes[e, CURSOR] - lanes[e, TAIL], 0)
    return live


@loop
def window_of(index: Any, count: int) -> int:
    """Returns the least w such that the newest w steps of each lane are at least `count`, or all."""
    lanes, T = index[LANES], index[STEPS]
    low, high = 1, T
    while low < high:
        middle, reached = (low + high) // 2, 0
        for e in range(len(lanes)):
            reached += min(lanes[e, CURSOR] - lanes[e, TAIL], middle)
        if reached >= count:
            high = middle
        else:
            low = middle + 1
    return low


@loop
def draw(index: Any, window: int, noise: Any, slots: Any) -> None:
    """Draws `[B]` live rows uniformly, from the newest `window` steps of each lane."""
    where, episode, _, _, lanes, T, _, _, _, _ = index
    E = len(lanes)
    # The first place of those that are drawn from, in its lane, and how many lie before it.
    oldest, starts, total = np.empty(E, np.int64), np.empty(E, np.int64), 0
    for e in range(E):
        cursor = lanes[e, CURSOR]
        # Another process may be writing: the tail may be beyond the cursor that was read.
        count = max(min(cursor - lanes[e, TAIL], window), 0)
        oldest[e], starts[e] = (cursor - count) % T, total
        total += count
    share = E / max(total, 1)
    for i in range(len(noise)):
        rank = _below(noise[i], total)
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
        place = oldest[e] + rank - starts[e]
        slots[i] = e * T + (place - T if place >= T else place)
        # What is asked for next.
        prefetch(episode, slots[i])
        prefetch(where, slots[i])


@loop
def bounds(index: Any, slots: Any) -> Any:
    """Returns where the episodes of rows begin and end, and their lanes.

    Returns:
        `[B, 4]` int64 steps from the row, 0 or negative ones back: `BEGIN`, to the first step of its
        episode, which may be evicted; `END`, to the last one so far; `OLDEST` and `NEWEST`, to those of
        its lane that are live.
    """
    _, episode, _, spans, lanes, T, _, _, _, _ = index
    E = len(lanes)
    newest, last_places = np.empty(E, np.int64), np.empty(E, np.int64)
    flat_spans = spans.reshape(-1, 2)
    found = np.empty((len(slots), 4), np.int64)
    for e in range(E):  # read once: another process may be writing
        newest[e] = lanes[e, CURSOR] - 1
        last_places[e] = newest[e] % T
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(episode):
            raise IndexError("slots must be at least 0 and below the number of slots")
        if i + _AHEAD < len(slots):
            prefetch(episode, slots[i + _AHEAD])
        e = lane_of(slots[i], E, T)
        found[i, BEGIN] = e * (T + 1) + episode[slots[i]]
        prefetch(flat_spans, found[i, BEGIN])
    for i in range(len(slots)):
        e = lane_of(slots[i], E, T)
        ahead = last_places[e] - (slots[i] - e * T)
        ahead = ahead if ahead >= 0 else ahead + T
        number, step = found[i, BEGIN] - e * (T + 1), newest[e] - ahead
        # Of a row that has just given way everything may be wrong, but nothing lies beyond its lane.
        found[i, BEGIN] = min(spans[e, number, FIRST] - step, 0)
        # A step that is written but not yet published is not there.
        found[i, END] = max(min(spans[e, number, LAST] - step, ahead), 0)
        found[i, OLDEST], found[i, NEWEST] = max(min(lanes[e, TAIL] - step, 0), 1 - T), ahead
    return found


@inlined
def _moved(slot: int, steps: int, E: int, T: int) -> int:
    """Returns the slot `steps` later in its lane, less than T."""
    first = lane_of(slot, E, T) * T
    place = slot - first + steps
    if place >= T:
        place -= T
    return first + (place + T if place < 0 else place)


@loop
def goals(index: Any, slots: Any, noise: Any, kinds: Any, steps: Any, out: Any) -> None:
    """Draws the rows whose achieved goals become the new goals.

    Args:
        index: the tables.
        slots: `[B]` the rows t to relabel, of episodes first..last.
        noise: `[B]`.
        kinds: `[B]` uint8 of `GOAL_KINDS`: "future" t..last, "final" last, "episode" first..last that
            survived, "random" any live row, "geometric" `steps` rows after t or last, "current" t. 0
            is the row itself.
        steps: `[B]` float64, rounded down; empty unless there are geometric ones.
        out: `[B]` slots.
    """
    where, E, T = index[WHERE], len(index[LANES]), index[STEPS]
    found, any_random = bounds(index, slots), False
    for i in range(len(slots)):
        any_random |= kinds[i] == _RANDOM
    if any_random:
        draw(index, T, noise, out)
    for i in range(len(slots)):
        kind, begin, end = kinds[i], max(found[i, BEGIN], found[i, OLDEST]), found[i, END]
        if kind == _RANDOM:
            continue
        offset = 0
        if kind == _FUTURE:
            offset = _below(noise[i], end + 1)
        elif kind == _FINAL:
            offset = end
        elif kind == _EPISODE:
            offset = begin + _below(noise[i], end - begin + 1)
        elif kind == _GEOMETRIC:
            offset = int(min(steps[i], float(end)))
        out[i] = _moved(slots[i], offset, E, T)
        prefetch(where, out[i])


@loop
def windows(index: Any, slots: Any, out: Any, lengths: Any) -> None:
    """Returns `[n, B]` each row and those after it in its episode, the last repeated; and how many."""
    E, T = len(index[LANES]), index[STEPS]
    found = bounds(index, slots)
    for j in range(len(out)):
        for i in range(len(slots)):
            out[j, i] = _moved(slots[i], min(j, found[i, END]), E, T)
    for i in range(len(slots)):
        lengths[i] = min(len(out), found[i, END] + 1)


@loop
def fold(rewards: Any, lengths: Any, weights: Any, out: Any) -> None:
    """Sums the first `lengths` `[B]` of `rewards` `[n, B, m]` by `weights` `[n]`, in float64.

    out_bj = Σ weights[i] · rewards[i, b, j]   over i < lengths[b]
    """
    for b in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = 0.0
            for i in range(lengths[b]):
                total += weights[i] * rewards[i, b, j]
            out[b, j] = total


@loop
def sequences(
    index: Any, slots: Any, burn_in: int, boundary: int, out: Any, valid: Any, begins: Any
) -> None:
    """Returns the rows around each one, `[B, S]`, in time order.

    Args:
        index: the tables.
        slots: `[B]`.
        burn_in: how many rows before each one.
        boundary: the place among `BOUNDARIES`: "pad" repeats the first or last row of the episode; "fit"
            moves all S by as little as keeps them within it, the rows from `slots` on before the burn-in;
            "cross" goes on into the episodes before and behind in the lane.
        out: `[B, S]` slots; the first or last row that is there is repeated beyond it.
        valid: `[B, S]` bool, whether a row is the one asked for.
        begins: `[B, S]` bool, whether an episode begins with it.
    """
    _, episode, _, spans, lanes, T, _, _, _, _ = index
    E, S = len(lanes), out.shape[1]
    found = bounds(index, slots)
    for i in range(len(slots)):
        first, oldest, begin = found[i, BEGIN], found[i, OLDEST], -burn_in
        low, high = max(first, oldest), found[i, END]
        e = lane_of(slots[i], E, T)
        step = lanes[e, TAIL] - oldest
        if boundary == _CROSS:
            low, high = oldest, found[i, NEWEST]
        elif boundary == _FIT:
            # Forward until the burn-in fits, but only while the last row does; back until the last row
            # fits, but only while the rows from the anchor on do, which matter more than the burn-in.
            begin += max(min(max(burn_in + low, 0), high - (S - burn_in - 1)), low)
        for s in range(S):
            wanted = begin + s
            offset = min(max(wanted, low), high)
            out[i, s] = _moved(slots[i], offset, E, T)
            valid[i, s] = offset == wanted
            begins[i, s] = spans[e, episode[out[i, s]], FIRST] == step + offset


@loop
def slots_between(index: Any, firsts: Any, ends: Any) -> Any:
    """Returns the slots of steps `firsts` to `ends` `[E]` of each lane, lane by lane."""
    T, i, slots = index[STEPS], 0, np.empty((ends - firsts).sum(), np.int64)
    for e in range(len(firsts)):
        place = firsts[e] % T
        for _ in range(firsts[e], ends[e]):
            slots[i] = e * T + place
            place = after(place, T)
            i += 1
    return slots


@loop
def changes(index: Any, before: Any, now: Any, began_anew: bool) -> Any:
    """Returns the slots of steps that gave way, and of those that were written, between two moments.

    Not more than the lanes hold: who was away for long need not go through what he missed.

    Args:
        index: the tables.
        before: `[E, 2]` cursors and tails.
        now: likewise.
        began_anew: whether all steps of before gave way.
    """
    firsts, ends = np.empty((2, len(now)), np.int64), np.empty((2, len(now)), np.int64)
    for e in range(len(now)):
        cursor, seen = now[e, CURSOR], before[e, CURSOR]
        # Another process may be writing: its tail may be beyond the cursor that was read.
        tail, oldest = min(now[e, TAIL], cursor), min(before[e, TAIL], seen)
        firsts[0, e], ends[0, e] = oldest, seen if began_anew else min(seen, tail)
        firsts[1, e], ends[1, e] = tail if began_anew else max(seen, tail), cursor
    gone = slots_between(index, firsts[0], ends[0])
    return gone, slots_between(index, firsts[1], ends[1])
