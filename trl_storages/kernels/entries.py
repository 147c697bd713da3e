"""Streams of observations: where steps are written, how they are published, and how rows are read.

A lane is a stream of entries `[observation | step]`. A transition is the entry at `where[slot]` together
with the observation of the entry after it. A step whose observation is, bit for bit, what its lane's
stream ends with fills that last entry and adds one for its next observation; any other step adds its
own observation first, a stack of k frames k entries. So each observation is stored once, whatever is
written reads back as it was, and ends, gaps, wraps and the newest row need no case when rows are read.

A write stores, in this order, with a fence between:

1. the tail of each lane: the steps before it give way, as their slots or entries are needed;
2. index and entries of the new steps, whose numbers are the cursor and above: nobody looks at them yet;
3. the cursor of each lane: from this one store on its new steps count.

A write that is cut off before 3 leaves nothing but steps that are gone, and the next write begins where
it began. What it reads, the entry behind the last published step, is never among what is overwritten.

Letters: E lanes, T steps a lane, M entries a lane, k frames a stack, N rows of a block, L lanes that it
writes, B batch. In words of 8 bytes: W an entry, O its observation, the first F words of which are the
newest frame, S = O + (k - 1) F an observation as it is seen, with all its frames. A row as it is seen
is `[observation S | step W - O | next observation S]`, stacks before all else of an observation.

An `index` is that of `kernels`.
`sizes` are `(F, O, first, end, R)`: the words `first` to `end` of S tell whether a row continues another,
and from word R on the step of an entry holds what stands under `next`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import (
    CONTINUES,
    CURSOR,
    DISCONTINUITY,
    DONE,
    ENDS,
    FIRST,
    LANES,
    LAST,
    PRIORITIES,
    SEPARATE,
    SHARED,
    STACK,
    STEPS,
    TAIL,
)
from trl_storages.kernels.checksums import mark, number
from trl_storages.kernels.compile import copy_words, fence, inlined, loop, prefetch
from trl_storages.kernels.draws import after

__all__ = [
    "compare",
    "copy_in",
    "count_gaps",
    "enter",
    "find_gaps",
    "find_overwritten",
    "find_tips",
    "gather",
    "make_room",
    "paste",
    "publish",
    "put",
    "take",
]

# How many lanes are written together.
_TOGETHER = 256
# How many rows ahead memory is asked for: loops begin so many early, for that of their first rows.
_AHEAD = 32


@loop
def find_tips(index: Any, which: Any, tips: Any) -> None:
    """Finds the entry that each of some lanes' streams ends with, `[L]`; -1 if nothing was written."""
    where, episode, ends, spans, lanes, T = index[:6]
    for m in range(-_AHEAD, len(which)):
        if m + _AHEAD < len(which):
            e = which[m + _AHEAD]
            slot = e * T + (lanes[e, CURSOR] - 1) % T
            # A write goes on in these tables, at the next slot.
            prefetch(where, slot)
            prefetch(episode, slot)
            prefetch(ends, slot)
            prefetch(index[PRIORITIES], slot)
        if m >= 0:
            e = which[m]
            cursor = lanes[e, CURSOR]
            slot = e * T + (cursor - 1) % T
            tips[m] = where[slot] + 1 if cursor > 0 else -1
            prefetch(spans, e, episode[slot] * 16, episode[slot] * 16 + 32)


@inlined
def _are_same(one: Any, p: int, q: int, other: Any, i: int, j: int, size: int) -> bool:
    """Returns whether `one[p, q : q + size]` equals `other[i, j : j + size]`."""
    here, there, different = one[p, q : q + size], other[i, j : j + size], 0
    for w in range(size):
        different |= here[w] ^ there[w]
    return different == 0


@inlined
def _compared(before: Any, p: int, q: int, block: Any, i: int, S: int, sizes: Any) -> int:
    """Returns how row i of a block compares with an observation, `before[p, q : q + S]`."""
    _, _, first, end, _ = sizes
    if _are_same(before, p, q, block, i, 0, S):
        return SHARED
    return (
        SEPARATE if _are_same(before, p, q + first, block, i, first, end - first) else DISCONTINUITY
    )


@loop
def compare(
    entries: Any, sizes: Any, k: int, tips: Any, offsets: Any, block: Any, how: Any
) -> None:
    """Compares the observations of a block with what their streams end with.

    Args:
        entries: `[*, W]`, or of observations alone.
        sizes: as above.
        k: frames a stack.
        tips: `[L]`, the entry with which the stream of each lane ends; -1 if there is none.
        offsets: `[L + 1]`, where the rows of each lane begin.
        block: `[N, 2 S + W - O]` rows, lane by lane.
        how: `[N]` uint8, the result.
    """
    F, O, _, _, _ = sizes
    S = O + (k - 1) * F
    next_word, last = block.shape[1] - S, np.empty((1, S), np.int64)
    for m in range(-_AHEAD, len(tips)):
        if m + _AHEAD < len(tips):
            # What a stream ends with, and the entry behind it, which is written to.
            prefetch(entries, max(tips[m + _AHEAD], 0), 0, 2 * entries.shape[1] * 8)
        if m < 0:
            continue
        for i in range(offsets[m], offsets[m + 1]):
            if i > offsets[m]:
                how[i] = _compared(block, i - 1, next_word, block, i, S, sizes)
            elif tips[m] < 0:
                how[i] = DISCONTINUITY
            else:
                for j in range(k - 1):
                    copy_words(last, 0, j * F, entries, tips[m] - (k - 1) + j, 0, F)
                copy_words(last, 0, (k - 1) * F, entries, tips[m], 0, O)
                how[i] = _compared(last, 0, 0, block, i, S, sizes)


@loop
def count_gaps(sizes: Any, next_word: int, block: Any, done: Any) -> int:
    """Returns how many rows of a block of one lane do not continue the row before, which is not done.

    The number is exact where it is more than half of the rows; else it may be too small.
    """
    _, _, first, end, _ = sizes
    gaps = 0
    for i in range(1, len(block)):
        if 2 * (i - gaps) > len(block):
            break  # most rows continue
        if not done[i - 1]:
            same = _are_same(block, i - 1, next_word + first, block, i, first, end - first)
            gaps += not same
    return gaps


@loop
def find_gaps(
    index: Any, which: Any, offsets: Any, how: Any, done: Any, cut: Any, cuts: bool
) -> int:
    """Returns how many gaps a block has; if it `cuts` them, `cut` `[N]` says so from then on.

    A gap is a row that does not continue the one before it, whose episode nobody ended.
    """
    ends, lanes, T, gaps = index[ENDS], index[LANES], index[STEPS], 0
    for m in range(len(which)):
        e, cursor = which[m], lanes[which[m], CURSOR]
        goes_on = cursor > 0 and ends[e * T + (cursor - 1) % T] == CONTINUES
        for i in range(offsets[m], offsets[m + 1]):
            if goes_on and not cut[i] and how[i] == DISCONTINUITY:
                cut[i] = cuts
                gaps += 1
            goes_on = not done[i]
    return gaps


@loop
def make_room(index: Any, which: Any, offsets: Any, how: Any, at: Any) -> None:
    """Finds an entry `at` `[N]` for each row; steps whose entries or slots it takes are no longer live.

    The rows of a lane must be few enough for its entries: see `EpisodeIndex.most_steps`. Where a row
    continues its stream but can't lie behind it, `how` says so from then on.
    """
    where, _, _, _, lanes, T, M, k, _, depth = index
    for m in range(len(which)):
        e, begin, end = which[m], offsets[m], offsets[m + 1]
        if begin == end:
            continue
        base, cursor, tail = e * M, lanes[e, CURSOR], lanes[e, TAIL]
        # The newest step is in entry p, its next observation in p + 1: p + 2 is free.
        head = where[e * T + (cursor - 1) % T] - base + 2 if cursor else 0
        slot = tail % T
        # A block goes on to the end of the lane's entries, or starts from their beginning.
        need = k + end - begin
        for i in range(begin, end):
            need += k * (how[i] != SHARED)
        if head + need > M:
            how[begin] = max(how[begin], SEPARATE)
            while tail < cursor and where[e * T + slot] - base >= head:
                tail += 1  # older than what lies at the beginning
                slot = after(slot, T)
            head = 0
        for i in range(begin, end):
            place = head - 1 if how[i] == SHARED else head + k - 1
            while tail < cursor:
                oldest = where[e * T + slot] - base
                # Steps before head came after the last return to the beginning and stay. Those behind
                # need entries from oldest - (depth - 1) on, the new row those to place + 1.
                if oldest < head or place + 1 < oldest - (depth - 1):
                    break
                tail += 1
                slot = after(slot, T)
            at[i] = base + place
            head = place + 2
        lanes[e, TAIL] = max(tail, cursor + end - begin - T)
    fence()


@loop
def enter(
    index: Any,
    which: Any,
    offsets: Any,
    how: Any,
    at: Any,
    done: Any,
    cut: Any,
    slots: Any,
    numbers: Any,
) -> None:
    """Enters rows beyond the cursors into the index, in `slots` `[N]`.

    `numbers` `[N]` gets the first words of their marks, see `checksums`.
    """
    where, episode, ends, spans, lanes, T, _, _, priorities, _ = index
    for m in range(len(which)):
        e = which[m]
        step = lanes[e, CURSOR]
        before = e * T + (step - 1) % T
        goes_on, running = False, T
        if step > 0:
            goes_on, running = ends[before] == CONTINUES, episode[before]
        slot = step % T
        for i in range(offsets[m], offsets[m + 1]):
            begins = cut[i] or not goes_on
            if begins:
                if step > 0:  # a write that was cut off may have gone on with it
                    spans[e, running, LAST] = step - 1
                running = after(running, T + 1)
                spans[e, running, FIRST] = step
            spans[e, running, LAST] = step
            slots[i], numbers[i] = e * T + slot, number(step, begins, done[i])
            where[slots[i]], episode[slots[i]] = at[i], running
            ends[slots[i]] = DONE if done[i] else CONTINUES
            if priorities[slots[i]] != 0:  # of the step that gave way
                priorities[slots[i]] = 0
            goes_on = not done[i]
            step += 1
            slot = after(slot, T)


@loop
def copy_in(entries: Any, sizes: Any, k: int, block: Any, how: Any, at: Any) -> None:
    """Copies the rows of a block into their entries."""
    F, O, _, _, _ = sizes
    older, last, W = (k - 1) * F, block.shape[1] - O, entries.shape[1]
    for i in range(len(at)):
        if i + _AHEAD < len(at):
            prefetch(entries, at[i + _AHEAD], 0, W * 8)
        if how[i] != SHARED:
            for j in range(k - 1):
                copy_words(entries, at[i] - (k - 1) + j, 0, block, i, j * F, F)
            # The newest frame and the rest of the observation lie side by side.
            copy_words(entries, at[i], 0, block, i, older, O)
        copy_words(entries, at[i], O, block, i, older + O, W - O)
        copy_words(entries, at[i] + 1, 0, block, i, last, O)


@loop
def publish(index: Any, which: Any, offsets: Any) -> None:
    """Makes the rows of a block count, lane by lane, each by one store."""
    lanes = index[LANES]
    fence()
    for m in range(len(which)):
        lanes[which[m], CURSOR] += offsets[m + 1] - offsets[m]
    fence()


@loop
def put(
    index: Any,
    entries: Any,
    sizes: Any,
    which: Any,
    offsets: Any,
    block: Any,
    done: Any,
    cut: Any,
    cuts_gaps: bool,
    stops_at_gaps: bool,
    slots: Any,
    marked: Any,
) -> int:
    """Writes a block whole, unless it stops at gaps and has some; returns how many it has cut.

    All lanes are compared before any is written. Then groups of lanes are written one after another, so
    that what one pass over a group reads is in the cache for the next pass. In memory the marks are none.
    """
    k, size, gaps = index[STACK], sizes[1], 0
    how, at = np.empty(len(block), np.uint8), np.empty(len(block), np.int64)
    tips, numbers = np.empty(len(which), np.int64), np.empty(len(block), np.int64)
    find_tips(index, which, tips)
    compare(entries, sizes, k, tips, offsets, block, how)
    if cuts_gaps or stops_at_gaps:
        gaps = find_gaps(index, which, offsets, how, done, cut, not stops_at_gaps)
    if gaps and stops_at_gaps:
        return gaps
    for m in range(0, len(which), _TOGETHER):
        lanes, some = which[m : m + _TOGETHER], offsets[m : m + _TOGETHER + 1]
        first, end = some[0], some[-1]
        make_room(index, lanes, some, how, at)
        enter(index, lanes, some, how, at, done, cut, slots, numbers)
        new = how[first:end], at[first:end]
        copy_in(entries, sizes, k, block[first:end], *new)
        if len(marked[0]):
            mark(entries, size, k, marked, *new, numbers[first:end])
        publish(index, lanes, some)
    return gaps


@loop
def find_overwritten(index: Any, slots: Any, cursors: Any, stale: Any) -> None:
    """Says which rows, that were live when the lanes had these cursors, gave way since.

    It looks once: what is left of a lane has no holes.
    """
    T = index[STEPS]
    fence()
    tails = index[LANES][:, TAIL].copy()
    for i in range(len(slots)):
        lane = slots[i] // T
        newest = cursors[lane] - 1
        stale[i] = newest - (newest - slots[i]) % T < tails[lane]


@loop
def gather(entries: Any, sizes: Any, k: int, at: Any, last: Any, out: Any) -> None:
    """Copies whole rows `out` `[B, 2 S + W - O]`, of entries `at`, what is next of entries `last`."""
    F, O, _, _, R = sizes
    older, W, newest = (k - 1) * F, entries.shape[1], out.shape[1] - O
    for i in range(-_AHEAD, len(at)):
        if i + _AHEAD < len(at):
            prefetch(entries, at[i + _AHEAD], 0, W * 8)
            prefetch(entries, last[i + _AHEAD], R * 8, (W + O) * 8)
        if i < 0:
            continue
        for j in range(k - 1):
            copy_words(out, i, j * F, entries, at[i] - (k - 1) + j, 0, F)
            copy_words(out, i, newest - older + j * F, entries, last[i] + 1 - (k - 1) + j, 0, F)
        copy_words(out, i, older, entries, at[i], 0, R)
        copy_words(out, i, older + R, entries, last[i], R, W - R)
        copy_words(out, i, newest, entries, last[i] + 1, 0, O)


@loop
def take(elements: Any, at: Any, ahead: int, start: int, out: Any) -> None:
    """Copies elements from `start` on of the k entries up to each of `at + ahead`, `out` `[B, k, n]`.

    Entries are viewed as `elements` `[E M, *]`.
    """
    k, begin, size = out.shape[1], start * elements.itemsize, out.shape[2] * elements.itemsize
    for i in range(-_AHEAD, len(at)):
        if i + _AHEAD < len(at):
            prefetch(elements, at[i + _AHEAD] + ahead, begin, begin + size)
        if i < 0:
            continue
        for j in range(k):
            for w in range(out.shape[2]):
                out[i, j, w] = elements[at[i] + ahead - (k - 1) + j, start + w]


@loop
def paste(
    elements: Any, at: Any, ahead: int, start: int, size: int, mask: Any, rows: Any, firsts: Any
) -> None:
    """Copies a field of entries `at + ahead` `[B]` into some of gathered `rows`.

    Args:
        elements: entries, viewed as words of the field.
        at: the entries, but for `ahead`.
        ahead: 1 for what is next, else 0.
        start: where the field begins in an entry.
        size: its number of words.
        mask: `[B]` which rows.
        rows: `[B, *]` int64.
        firsts: where it goes in a row, in words of the field.
    """
    begin, end = start * elements.itemsize, (start + size) * elements.itemsize
    out = rows.view(elements.dtype)
    for i in range(-_AHEAD, len(at)):
        if i + _AHEAD < len(at):
            prefetch(elements, at[i + _AHEAD] + ahead, begin, end)
        if i >= 0 and mask[i]:
            p = at[i] + ahead
            for w in range(size):
                value = elements[p, start + w]
                for first in firsts:
                    out[i, first + w] = value
