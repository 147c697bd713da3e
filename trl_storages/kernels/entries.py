"""Streams of observations: loops that write steps, publish them, and read rows.

A lane is a stream of entries `[observation | step]`. A transition is the entry at `where[slot]` together
with the observation of the next entry. If the observation of a step is bitwise identical to the
observation at the end of its stream, the step is written to that last entry, and one entry is added for
its next observation. Any other step adds entries for its own observation first, k of them for a stack of
k frames. So each observation is stored once, every row reads back as it was written, and reading has no
special cases for ends of episodes, discontinuities, wraps or the newest row.

A write stores, in this order, with a fence between:

1. the tail of each lane: steps before the tail are evicted, because their slots or entries are needed;
2. entries and tables of the new steps, which readers ignore, because they lie beyond the cursor;
3. the cursor of each lane, which publishes its new steps by one store.

If a write is interrupted before 3, none of its steps is stored, the evicted steps are lost, and the next
write begins at the same cursor. The entry after the last published step is never overwritten, because
the next write compares its first row with the observation there.

Letters: E lanes, T steps a lane, M entries a lane, k frames a stack, N rows of a block, L lanes of the
block, B batch. In words of 8 bytes: W an entry, O its observation, whose first F words are the newest
frame, S = O + (k - 1) F an observation with all its frames. A row is
`[observation S | step W - O | next observation S]`, and stacks come first in an observation.

`tables` are those of `kernels.Index`. A `store` is the tuple of the entries `[E M, W]`, the
`kernels.Sizes` as a plain tuple, and k. `entry` `[N]` or `[B]` int64 are numbers of entries.
`continuity` `[N]` uint8 says how each row compares with the end of its stream: SHARED, SEPARATE or
DISCONTINUITY. The rows `offsets[m]` to `offsets[m + 1]` of a block belong to lane `lanes[m]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import (
    CONTINUES,
    CURSOR,
    DISCONTINUITY,
    DONE,
    FIRST,
    LAST,
    SEPARATE,
    SHARED,
    TAIL,
    Index,
    Sizes,
)
from trl_storages.kernels.checksums import step_number, write_checksums
from trl_storages.kernels.compile import copy_words, fence, inlined, loop, prefetch
from trl_storages.kernels.draws import increment

__all__ = [
    "are_overwritten",
    "compare",
    "compare_with_tips",
    "copy_in",
    "count_gaps",
    "enter",
    "find_unused",
    "gather",
    "make_room",
    "paste",
    "publish",
    "put",
    "take",
]

# Number of lanes that are written together.
_GROUP = 256
# Loops prefetch memory for the row that is this many rows later, and start so many turns early.
_DISTANCE = 32


@inlined
def _are_equal(left: Any, p: int, q: int, right: Any, i: int, j: int, size: int) -> bool:
    """Returns whether `left[p, q : q + size]` equals `right[i, j : j + size]`."""
    words, right_words = left[p, q : q + size], right[i, j : j + size]
    difference = 0
    for w in range(size):
        difference |= words[w] ^ right_words[w]
    return difference == 0


@inlined
def _compare_row(
    before: Any, p: int, q: int, words: Any, i: int, S: int, first: int, end: int
) -> int:
    """Returns the continuity of row i of a block after the observation `before[p, q : q + S]`."""
    if _are_equal(before, p, q, words, i, 0, S):
        return SHARED
    continues = _are_equal(before, p, q + first, words, i, first, end - first)
    return SEPARATE if continues else DISCONTINUITY


@loop
def compare(tables: Any, store: Any, lanes: Any, offsets: Any, words: Any, continuity: Any) -> None:
    """Compares the observations `words` `[N, 2 S + W - O]` of a block with those before them."""
    index = Index(*tables)
    entries, sizes, k = store
    F, O, first, end, _ = sizes
    cursors, T = index.lane_bounds[:, CURSOR], index.num_steps
    S = O + (k - 1) * F
    L, tip = len(lanes), np.empty((1, S), np.int64)
    # The entry at the end of each stream; -1 if the stream is empty.
    last_entries = np.empty(L, np.int64)
    distance, next_word = min(_DISTANCE, L), words.shape[1] - S
    for m in range(-distance, L):
        if m + distance < L:
            e = lanes[m + distance]
            slot = e * T + (cursors[e] - 1) % T
            # The write continues in these tables, at the next slot.
            prefetch(index.where, slot)
            prefetch(index.episode, slot)
            prefetch(index.ends, slot)
            prefetch(index.priorities, slot)
        if m >= 0:
            e = lanes[m]
            slot = e * T + (cursors[e] - 1) % T
            last_entries[m] = index.where[slot] + 1 if cursors[e] > 0 else -1
            prefetch(index.spans, e, index.episode[slot] * 16, index.episode[slot] * 16 + 32)
    for m in range(-distance, L):
        if m + distance < L:
            # The write fills the entry after the last one.
            prefetch(entries, max(last_entries[m + distance], 0), 0, 2 * entries.shape[1] * 8)
        if m >= 0:
            p = last_entries[m]
            if p >= 0:
                for j in range(k - 1):
                    copy_words(tip, 0, j * F, entries, p - (k - 1) + j, 0, F)
                copy_words(tip, 0, (k - 1) * F, entries, p, 0, O)
            for i in range(offsets[m], offsets[m + 1]):
                if i > offsets[m]:
                    continuity[i] = _compare_row(words, i - 1, next_word, words, i, S, first, end)
                elif p >= 0:
                    continuity[i] = _compare_row(tip, 0, 0, words, i, S, first, end)
                else:
                    continuity[i] = DISCONTINUITY


@loop
def compare_with_tips(
    tables: Any, tips: Any, sizes: Any, lanes: Any, offsets: Any, words: Any, continuity: Any
) -> None:
    """Compares a block with copies `tips` `[E, S]` of the last observations of streams; see `compare`."""
    index, size = Index(*tables), Sizes(*sizes)
    first, end = size.first, size.end
    S = tips.shape[1]
    next_word = words.shape[1] - S
    for m in range(len(lanes)):
        e = lanes[m]
        for i in range(offsets[m], offsets[m + 1]):
            if i > offsets[m]:
                continuity[i] = _compare_row(words, i - 1, next_word, words, i, S, first, end)
            elif index.lane_bounds[e, CURSOR] > 0:
                continuity[i] = _compare_row(tips, e, 0, words, i, S, first, end)
            else:
                continuity[i] = DISCONTINUITY


@loop
def count_gaps(tables: Any, lanes: Any, offsets: Any, continuity: Any, done: Any, cut: Any) -> int:
    """Returns the number of gaps of a block; `done` and `cut` `[N]` are its flags.

    A gap is a row that does not continue the row before although the episode has not ended.
    """
    index, gaps = Index(*tables), 0
    T = index.num_steps
    for m in range(len(lanes)):
        e, cursor = lanes[m], index.lane_bounds[lanes[m], CURSOR]
        is_open = cursor > 0 and index.ends[e * T + (cursor - 1) % T] == CONTINUES
        for i in range(offsets[m], offsets[m + 1]):
            gaps += is_open and not cut[i] and continuity[i] == DISCONTINUITY
            is_open = not done[i]
    return gaps


@loop
def make_room(tables: Any, lanes: Any, offsets: Any, continuity: Any, entry: Any) -> None:
    """Chooses the entry `[N]` of each row, and evicts the steps whose entries or slots are needed.

    The number of rows of a lane is at most `EpisodeIndex.most_steps`. A row that continues its stream but
    cannot lie after it becomes SEPARATE.
    """
    index = Index(*tables)
    where, lane_bounds, depth = index.where, index.lane_bounds, index.depth
    T, M, k = index.num_steps, index.num_entries, index.stack
    for m in range(len(lanes)):
        e, begin, end = lanes[m], offsets[m], offsets[m + 1]
        if begin == end:
            continue
        base, cursor, tail = e * M, lane_bounds[e, CURSOR], lane_bounds[e, TAIL]
        # The newest step is in entry p, its next observation in p + 1: p + 2 is free.
        head = where[e * T + (cursor - 1) % T] - base + 2 if cursor else 0
        slot = tail % T
        # The block fits between head and the end of the lane's entries, or starts at their beginning.
        need = k + end - begin
        for i in range(begin, end):
            need += k * (continuity[i] != SHARED)
        if head + need > M:
            continuity[begin] = max(continuity[begin], SEPARATE)
            while tail < cursor and where[e * T + slot] - base >= head:
                tail += 1  # older than the steps at the beginning of the entries
                slot = increment(slot, T)
            head = 0
        for i in range(begin, end):
            position = head - 1 if continuity[i] == SHARED else head + k - 1
            while tail < cursor:
                oldest = where[e * T + slot] - base
                # Steps before head came after the last return to the beginning and stay. Steps from
                # head on need entries from oldest - (depth - 1) on, the new row those to position + 1.
                if oldest < head or position + 1 < oldest - (depth - 1):
                    break
                tail += 1
                slot = increment(slot, T)
            entry[i] = base + position
            head = position + 2
        lane_bounds[e, TAIL] = max(tail, cursor + end - begin - T)
    fence()


@loop
def enter(
    tables: Any,
    lanes: Any,
    offsets: Any,
    continuity: Any,
    entry: Any,
    done: Any,
    cut: Any,
    cuts_gaps: bool,
    slots: Any,
    numbers: Any,
) -> None:
    """Writes the steps of a block beyond the cursors of the index.

    If `cuts_gaps`, gaps begin episodes; see `count_gaps`. The results are `slots` `[N]`, and `numbers`
    `[N]`, the word NUMBER of each step, see `checksums`.
    """
    index = Index(*tables)
    where, episode, spans = index.where, index.episode, index.spans
    lane_bounds, T = index.lane_bounds, index.num_steps
    priorities = index.priorities
    for m in range(len(lanes)):
        e = lanes[m]
        step = lane_bounds[e, CURSOR]
        newest = e * T + (step - 1) % T
        is_open, running = False, T
        if step > 0:
            is_open, running = index.ends[newest] == CONTINUES, episode[newest]
        slot = step % T
        for i in range(offsets[m], offsets[m + 1]):
            begins = cut[i] or not is_open or (cuts_gaps and continuity[i] == DISCONTINUITY)
            if begins:
                if step > 0:  # an interrupted write may have lengthened the episode
                    spans[e, running, LAST] = step - 1
                running = increment(running, T + 1)
                spans[e, running, FIRST] = step
            spans[e, running, LAST] = step
            slots[i], numbers[i] = e * T + slot, step_number(step, begins, done[i])
            where[slots[i]], episode[slots[i]] = entry[i], running
            index.ends[slots[i]] = DONE if done[i] else CONTINUES
            if priorities[slots[i]] != 0:  # the priority of the evicted step
                priorities[slots[i]] = 0
            is_open = not done[i]
            step += 1
            slot = increment(slot, T)


@loop
def copy_in(store: Any, words: Any, continuity: Any, entry: Any, begin: int, end: int) -> None:
    """Copies rows `begin` to `end` of a block into their entries."""
    entries, sizes, k = store
    F, O = sizes[:2]
    W, last = entries.shape[1], words.shape[1] - O
    older = (k - 1) * F
    for i in range(begin, end):
        if i + _DISTANCE < end:
            prefetch(entries, entry[i + _DISTANCE], 0, W * 8)
        if continuity[i] != SHARED:
            for j in range(k - 1):
                copy_words(entries, entry[i] - (k - 1) + j, 0, words, i, j * F, F)
            # The newest frame and the rest of the observation are consecutive words.
            copy_words(entries, entry[i], 0, words, i, older, O)
        copy_words(entries, entry[i], O, words, i, older + O, W - O)
        copy_words(entries, entry[i] + 1, 0, words, i, last, O)


@loop
def publish(tables: Any, lanes: Any, offsets: Any) -> None:
    """Publishes the steps of a block, lane by lane, each lane by one store."""
    index = Index(*tables)
    fence()
    for m in range(len(lanes)):
        index.lane_bounds[lanes[m], CURSOR] += offsets[m + 1] - offsets[m]
    fence()


@loop
def put(tables: Any, store: Any, block: Any, flags: Any, slots: Any, sums: Any) -> int:
    """Writes a block, unless it has more than `most_gaps` gaps.

    All lanes are compared before any lane is written. Then groups of lanes are written one after another,
    so that the memory of a group stays in the cache from one pass to the next.

    Args:
        tables: of the index.
        store: as above.
        block: the fields of a `Block`, as a plain tuple.
        flags: `(cuts_gaps, most_gaps)`: whether gaps begin episodes, and how many gaps a block that is
            written may have.
        slots: `[N]`, the result.
        sums: see `checksums`; without entries in memory.

    Returns:
        the number of gaps; 0 if any number is allowed.
    """
    lanes, offsets, words, done, cut = block
    cuts_gaps, most_gaps = flags
    entries, sizes, k = store
    continuity = np.empty(len(words), np.uint8)
    entry, numbers = np.empty((2, len(words)), np.int64)
    compare(tables, store, lanes, offsets, words, continuity)
    gaps = 0
    if most_gaps < len(words):
        gaps = count_gaps(tables, lanes, offsets, continuity, done, cut)
        if gaps > most_gaps:
            return gaps
    for m in range(0, len(lanes), _GROUP):
        group, group_offsets = lanes[m : m + _GROUP], offsets[m : m + _GROUP + 1]
        begin, end = group_offsets[0], group_offsets[-1]
        make_room(tables, group, group_offsets, continuity, entry)
        enter(tables, group, group_offsets, continuity, entry, done, cut, cuts_gaps, slots, numbers)
        copy_in(store, words, continuity, entry, begin, end)
        if len(sums[0]):
            new = continuity[begin:end], entry[begin:end], numbers[begin:end]
            write_checksums(entries, sizes[1], k, sums, *new)
        publish(tables, group, group_offsets)
    return gaps


@loop
def find_unused(tables: Any, first: int, last: int) -> Any:
    """Finds the entries of lanes `first` to `last` that neither a valid step nor the next write needs.

    Returns:
        `[n, 2]` ranges of entries, some of which are empty. A range may reach across lanes.
    """
    index = Index(*tables)
    where, lane_bounds = index.where, index.lane_bounds
    T, M = index.num_steps, index.num_entries
    edges, n = np.empty(4 * (last - first) + 2, np.int64), 1
    edges[0] = first * M
    for e in range(first, last):
        newest = lane_bounds[e, CURSOR] - 1
        if newest < 0:
            continue
        oldest = where[e * T + min(lane_bounds[e, TAIL], newest) % T]
        start, head = max(oldest - (index.depth - 1), e * M), where[e * T + newest % T] + 2
        if start >= head:  # the stream wraps around the end of its lane
            edges[n], edges[n + 1] = e * M, head
            n, head = n + 2, (e + 1) * M
        edges[n], edges[n + 1] = start, head
        n += 2
    edges[n] = last * M
    return edges[: n + 1].reshape(-1, 2)


@loop
def are_overwritten(tables: Any, slots: Any, cursors: Any) -> Any:
    """Returns which rows `[B]`, valid when the lanes had `cursors`, were overwritten or evicted since.

    One look at the tails is enough, because the valid steps of a lane are consecutive.
    """
    index, overwritten = Index(*tables), np.empty(len(slots), np.bool_)
    T = index.num_steps
    fence()
    tails = index.lane_bounds[:, TAIL].copy()
    for i in range(len(slots)):
        lane = slots[i] // T
        newest = cursors[lane] - 1
        overwritten[i] = newest - (newest - slots[i]) % T < tails[lane]
    return overwritten


@loop
def gather(store: Any, entry: Any, last: Any, out: Any) -> None:
    """Copies rows `[B, 2 S + W - O]` from entries `entry`, and their next values from entries `last`."""
    entries, sizes, k = store
    F, O, _, _, R = sizes
    W, newest = entries.shape[1], out.shape[1] - O
    older = (k - 1) * F
    for i in range(-_DISTANCE, len(entry)):
        if i + _DISTANCE < len(entry):
            prefetch(entries, entry[i + _DISTANCE], 0, W * 8)
            prefetch(entries, last[i + _DISTANCE], R * 8, (W + O) * 8)
        if i < 0:
            continue
        for j in range(k - 1):
            copy_words(out, i, j * F, entries, entry[i] - (k - 1) + j, 0, F)
            copy_words(out, i, newest - older + j * F, entries, last[i] + 1 - (k - 1) + j, 0, F)
        copy_words(out, i, older, entries, entry[i], 0, R)
        copy_words(out, i, older + R, entries, last[i], R, W - R)
        copy_words(out, i, newest, entries, last[i] + 1, 0, O)


@loop
def take(elements: Any, entry: Any, shift: int, start: int, out: Any) -> None:
    """Copies a field of the k entries up to `entry + shift` to `out` `[B, k, n]`.

    Args:
        elements: `[E M, *]`, the entries viewed as words of the field.
        entry: `[B]`.
        shift: 1 for a next value, else 0.
        start: where the field begins in an entry, in words of the field.
        out: the result; n is the number of words of the field.
    """
    k = out.shape[1]
    begin, size = start * elements.itemsize, out.shape[2] * elements.itemsize
    for i in range(-_DISTANCE, len(entry)):
        if i + _DISTANCE < len(entry):
            prefetch(elements, entry[i + _DISTANCE] + shift, begin, begin + size)
        if i < 0:
            continue
        for j in range(k):
            for w in range(out.shape[2]):
                out[i, j, w] = elements[entry[i] + shift - (k - 1) + j, start + w]


@loop
def paste(
    elements: Any, entry: Any, shift: int, start: int, size: int, mask: Any, rows: Any, firsts: Any
) -> None:
    """Copies a field of entries `entry + shift` `[B]` into some gathered rows.

    Args:
        elements: `[E M, *]`, the entries viewed as words of the field.
        entry: `[B]`.
        shift: 1 for a next value, else 0.
        start: where the field begins in an entry, in words of the field.
        size: number of words of the field.
        mask: `[B]` bool, which rows are written.
        rows: `[B, *]` int64.
        firsts: where the targets begin in a row, in words of the field.
    """
    begin, end = start * elements.itemsize, (start + size) * elements.itemsize
    out = rows.view(elements.dtype)
    for i in range(-_DISTANCE, len(entry)):
        if i + _DISTANCE < len(entry):
            prefetch(elements, entry[i + _DISTANCE] + shift, begin, end)
        if i >= 0 and mask[i]:
            p = entry[i] + shift
            for w in range(size):
                value = elements[p, start + w]
                for first in firsts:
                    out[i, first + w] = value
