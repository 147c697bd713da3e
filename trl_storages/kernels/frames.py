"""Frames stored as what changed: each as its difference from the frame of the entry before it.

Consecutive entries of a lane hold consecutive frames, which differ little. So an entry holds, in place
of its frame, one word that says where the *record* of the frame lies in the lane's ring of bytes, and
how many entries back its *keyframe* is. A keyframe needs no other frame: every K-th is one, the first of
a lane's entries, and one whose changes would take more. What it differs from is, byte by byte, the row of
pixels above. So an entry needs up to K - 1 entries more than in `kernels.entries`, and all else is as
there.

A record is the number of its bytes, in four of them, and runs `(skip, length, values)`: so many bytes
stay as they are, so many take these values. A skip of 255 and more is bytes of 255, and the rest.
Positions of records count on from the beginning of the lane; position p lies at p mod H, and no record
wraps. Whatever the bytes are, decoding reads and writes nothing outside of ring and frame: a reader may
decode what is being overwritten, and looks afterwards.

Letters as in `kernels.entries`, whose `sizes` are of rows as they are seen; C words of a frame, the first
F of which are those of stacks. A `store` is the tuple of

- `entries` `[E M, W]`, each `[word | observation O - C | step]`, and `records` `[E, H]` uint8;
- `tips` `[E, S]`, what streams end with, which is kept decoded; and `known` `[E, 3]`, for which
  generation and cursor of a lane, and the position behind its last record;
- sizes, k, C, K, and how many bytes a row of pixels has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CURSOR, LANES, SHARED, STEPS, WHERE
from trl_storages.kernels.checksums import (
    NUMBER,
    OF_OBSERVATION,
    OF_STEP,
    mark_steps,
    of_observation,
)
from trl_storages.kernels.compile import copy_words, inlined, loop
from trl_storages.kernels.entries import compare, enter, find_gaps, make_room, publish

__all__ = [
    "BACK",
    "END",
    "EVERY",
    "SHIFT",
    "are_records",
    "check_observations",
    "compare_with_tips",
    "copy_in",
    "end_of",
    "gather",
    "know_tips",
    "most_bytes",
    "move_in",
    "put",
    "take",
]

#: K of new storages.
EVERY = 16
#: The bits of an entry's word that say how many entries back its keyframe is; those above, the position.
BACK = 255
SHIFT = 8
_HEADER = 4
#: Of `known`.
_GENERATION, _CURSOR, END = range(3)


@inlined
def most_bytes(size: int) -> int:
    """Returns how many bytes a record of a frame of `size` bytes takes at most."""
    return _HEADER + size + 2 * (size // 255) + 3


# One frame


@loop
def _write_changes(before: Any, now: Any, record: Any, o: int) -> int:
    """Writes runs wherever `now` `[8 C]` differs from `before`; returns where they end in the record."""
    size, i = now.size, 0
    one, other = before.view(np.int64), now.view(np.int64)
    while True:
        start = i
        while i < size and now[i] == before[i]:
            i += 1
            if i % 8 == 0:
                w = i // 8
                while w < len(one) and one[w] == other[w]:
                    w += 1
                i = 8 * w
        if i == size:
            return o
        skip = i - start
        while skip >= 255:
            record[o] = 255
            o, skip = o + 1, skip - 255
        record[o], length_at, begin = skip, o + 1, i
        o += 2
        while i < size and i - begin < 255:
            # Two equal bytes inside of a run take less than another run.
            if now[i] == before[i] and (
                i + 2 >= size or (now[i + 1] == before[i + 1] and now[i + 2] == before[i + 2])
            ):
                break
            record[o] = now[i]
            o, i = o + 1, i + 1
        record[length_at] = i - begin


@loop
def _apply_changes(ring: Any, o: int, end: int, frame: Any) -> None:
    """Applies runs in bytes `o` to `end` of a ring to a frame `[8 C]`."""
    i = 0
    while o + 2 <= end:
        skip = np.int64(ring[o])
        while skip == 255 and o + 2 < end:
            i, o = i + 255, o + 1
            skip = np.int64(ring[o])
        i, length = i + skip, np.int64(ring[o + 1])
        o += 2
        length = min(length, end - o, frame.size - i)
        if length <= 0:
            continue
        # Slices of one size are copied by vectors.
        values, changed = ring[o : o + length], frame[i : i + length]
        for j in range(length):
            changed[j] = values[j]
        i, o = i + length, o + length


@inlined
def _size_of(ring: Any, at: int, most: int) -> int:
    """Returns the number of bytes of a record of at most `most`, with those that say so."""
    size = np.int64(0)
    for j in range(_HEADER):
        size |= np.int64(ring[min(at + j, ring.size - 1)]) << (8 * j)
    return min(_HEADER + size, most)


@inlined
def _place_of(head: int, most: int, H: int) -> int:
    """Returns the position of the next record, from `head` on, where it does not wrap."""
    return head if head % H + most <= H else head + H - head % H


@loop
def _encode(
    ring: Any, head: int, back: int, enough: int, width: int, frames: Any
) -> tuple[int, int]:
    """Stores a frame behind position `head`.

    Args:
        ring: `[H]`.
        head: where the last record ends.
        back: how far its keyframe would be back; 0 if it has to be one.
        enough: a record of at most so many bytes is taken though a keyframe might be shorter.
        width: bytes of a row of pixels.
        frames: `[4, 8 C]` uint8: the frame before, the frame, any, and zeros.

    Returns:
        the word of the entry, and where the record ends.
    """
    before, now, spare, zeros = frames[0], frames[1], frames[2], frames[3]
    size = now.size
    head = _place_of(head, most_bytes(size), ring.size)
    at = head % ring.size
    first = at + _HEADER
    end = _write_changes(before, now, ring, first) if back else first
    if back == 0 or end - at > enough:
        spare[:width] = now[:width]
        for j in range(width, size):
            spare[j] = now[j] - now[j - width]
        changes = end - first
        end = _write_changes(zeros, spare, ring, first)
        if back and end - first > changes:
            end = _write_changes(before, now, ring, first)
        else:
            back = 0
    for j in range(_HEADER):
        ring[at + j] = (end - first) >> (8 * j) & 255
    return head << SHIFT | back, head + end - at


@loop
def _decode(ring: Any, word: int, width: int, frame: Any) -> None:
    """Makes a frame `[8 C]` from the one before it, or of a keyframe from any."""
    at, size, is_key = (word >> SHIFT) % ring.size, frame.size, word & BACK == 0
    if is_key:
        frame[:] = 0
    end = min(at + _size_of(ring, at, most_bytes(size)), ring.size)
    _apply_changes(ring, at + _HEADER, end, frame)
    for start in range(width, size if is_key else 0, width):
        here = frame[start : start + width]
        above = frame[start - width : start - width + len(here)]
        for j in range(len(here)):
            here[j] += above[j]


@loop
def _seek(store: Any, p: int, decoded: int, frame: Any) -> int:
    """Makes a frame, that of entry `decoded` or, with -1, of none, that of entry p; returns p."""
    entries, records, _, _, _, _, _, K, width = store
    M = len(entries) // len(records)
    lane = p // M
    # Its keyframe, and all behind it.
    q = max(p - min(entries[p, 0] & BACK, K - 1), lane * M)
    if q <= decoded <= p:
        q = decoded + 1
    for each in range(q, p + 1):
        _decode(records[lane], entries[each, 0], width, frame)
    return p


@loop
def end_of(store: Any, p: int) -> int:
    """Returns the position behind the record of entry p."""
    entries, records, _, _, _, _, C, _, _ = store
    ring, position = records[p // (len(entries) // len(records))], entries[p, 0] >> SHIFT
    return position + _size_of(ring, position % ring.size, most_bytes(8 * C))


# Reads


@loop
def gather(store: Any, at: Any, last: Any, out: Any) -> None:
    """Copies whole rows `out` `[B, 2 S + ...]`, of entries `at`, what is next of entries `last`."""
    entries, _, _, _, (F, O, _, _, R), k, C, _, _ = store
    older, W, root, newest = (k - 1) * F, entries.shape[1], 1 + R - C, out.shape[1] - O
    now, decoded = np.empty((1, C), np.int64), -1
    frame = now.view(np.uint8).reshape(-1)
    for i in range(len(at)):
        first = at[i] - (k - 1)
        for j in range(k):
            decoded = _seek(store, first + j, decoded, frame)
            copy_words(out, i, j * F, now, 0, 0, F if j < k - 1 else C)
        copy_words(out, i, older + C, entries, at[i], 1, root - 1)
        copy_words(out, i, older + R, entries, last[i], root, W - root)
        for j in range(k):
            q, start = last[i] + 1 - (k - 1) + j, newest - older + j * F
            if j < k - 1 and first <= q <= at[i]:  # it is there already
                copy_words(out, i, start, out, i, (q - first) * F, F)
            else:
                decoded = _seek(store, q, decoded, frame)
                copy_words(out, i, start, now, 0, 0, F if j < k - 1 else C)
        copy_words(out, i, newest + C, entries, last[i] + 1, 1, O - C)


@loop
def take(store: Any, at: Any, ahead: int, start: int, out: Any) -> None:
    """Copies bytes from `start` on of the k frames up to each of `at + ahead`, `out` `[B, k, n]`."""
    k, now, decoded = out.shape[1], np.empty(store[6], np.int64), -1
    frame = now.view(np.uint8)
    for i in range(len(at)):
        for j in range(k):
            decoded = _seek(store, at[i] + ahead - (k - 1) + j, decoded, frame)
            values, copied = frame[start : start + out.shape[2]], out[i, j]
            for w in range(len(copied)):
                copied[w] = values[w]


@loop
def check_observations(store: Any, c: Any, at: Any, found: Any) -> None:
    """Finds the checksums of observations that the steps in entries `at` `[B]` need."""
    entries, _, _, _, (_, O, _, _, _), k, C, _, _ = store
    now, decoded, is_found = np.empty(C, np.int64), -1, np.zeros(len(entries), np.bool_)
    frame = now.view(np.uint8)
    for i in range(len(at)):
        for q in range(at[i] - (k - 1), at[i] + 2):
            if not is_found[q]:
                decoded, is_found[q] = _seek(store, q, decoded, frame), True
                found[q] = of_observation(now, entries, q, 1, 1 + O - C, c)


# Writes


@loop
def know_tips(index: Any, store: Any, generation: int, which: Any) -> None:
    """Decodes what some lanes' streams `[L]` end with, where another process or a load has changed it."""
    where, lanes, T = index[WHERE], index[LANES], index[STEPS]
    entries, _, tips, known, (_, O, _, _, _), _, C, _, _ = store
    S = tips.shape[1]
    row = np.empty((1, 2 * S + entries.shape[1] - 1 - (O - C)), np.int64)
    for m in range(len(which)):
        e, cursor = which[m], lanes[which[m], CURSOR]
        if known[e, _GENERATION] == generation and known[e, _CURSOR] == cursor:
            continue
        known[e, _GENERATION], known[e, _CURSOR], known[e, END] = generation, cursor, 0
        if cursor > 0:
            newest = e * T + (cursor - 1) % T
            at = where[newest : newest + 1]
            gather(store, at, at, row)
            copy_words(tips, e, 0, row, 0, row.shape[1] - S, S)
            known[e, END] = end_of(store, at[0] + 1)


@loop
def copy_in(
    store: Any, which: Any, offsets: Any, block: Any, how: Any, at: Any, marked: Any
) -> None:
    """Copies the rows of a block into their entries, and marks the observations of these in a file."""
    entries, records, tips, known, (F, O, _, _, _), k, C, K, width = store
    M, W, rest = len(entries) // len(records), entries.shape[1], O - C
    older, last, (marks, c) = (k - 1) * F, block.shape[1] - O, marked
    frames = np.zeros((4, C), np.int64)
    now, as_bytes = frames[1:2], frames.view(np.uint8)
    for m in range(len(which)):
        e = which[m]
        end = known[e, END]
        copy_words(frames, 0, 0, tips, e, older, C)
        for i in range(offsets[m], offsets[m + 1]):
            p = at[i]
            for q in range(p - (k - 1) if how[i] != SHARED else p + 1, p + 2):
                # Of an older frame nothing else is known: there is what changes least.
                start = last if q > p else older
                copy_words(now, 0, 0, block, i, start, C)
                if q < p:
                    copy_words(now, 0, 0, block, i, (q - p + k - 1) * F, F)
                else:
                    copy_words(entries, q, 1, block, i, start + C, rest)
                back = (entries[q - 1, 0] & BACK) + 1 if q % M else K
                back = back if back < K else 0
                # As many bytes as its keyframe has.
                enough = end_of(store, q - back) - (entries[q - back, 0] >> SHIFT) if back else 0
                entries[q, 0], end = _encode(records[e], end, back, enough, width, as_bytes)
                if len(marks):
                    marks[q, NUMBER] = marks[q, OF_STEP] = 0
                    marks[q, OF_OBSERVATION] = of_observation(now[0], entries, q, 1, 1 + rest, c)
                copy_words(frames, 0, 0, now, 0, 0, C)
            copy_words(entries, p, 1 + rest, block, i, older + O, W - 1 - rest)


@loop
def compare_with_tips(
    index: Any, store: Any, which: Any, offsets: Any, block: Any, how: Any
) -> None:
    """Compares the observations of a block with tips that are known; see `kernels.entries.compare`."""
    (_, _, first, end, _), tips, at = store[4], store[2], which.copy()
    for m in range(len(which)):
        if index[LANES][which[m], CURSOR] == 0:
            at[m] = -1
    # As if all that is seen lay in one entry.
    S = tips.shape[1]
    compare(tips, (S, S, first, end, S), 1, at, offsets, block, how)


@loop
def put(
    index: Any, store: Any, rows: Any, cuts_gaps: bool, stops_at_gaps: bool, slots: Any, marked: Any
) -> int:
    """Writes a block of lanes whose tips are known; see `kernels.entries.put`."""
    which, offsets, block, done, cut = rows
    entries, _, tips, known, (_, O, _, _, _), k, C, _, _ = store
    how, (at, numbers) = np.empty(len(block), np.uint8), np.empty((2, len(block)), np.int64)
    compare_with_tips(index, store, which, offsets, block, how)
    gaps = 0
    if cuts_gaps or stops_at_gaps:
        gaps = find_gaps(index, which, offsets, how, done, cut, not stops_at_gaps)
    if gaps and stops_at_gaps:
        return gaps
    make_room(index, which, offsets, how, at)
    enter(index, which, offsets, how, at, done, cut, slots, numbers)
    copy_in(store, which, offsets, block, how, at, marked)
    if len(marked[0]):
        mark_steps(entries, 1 + O - C, k, marked, at, numbers)
    publish(index, which, offsets)
    S = tips.shape[1]
    for m in range(len(which)):
        e, i = which[m], offsets[m + 1] - 1
        if i >= offsets[m]:
            copy_words(tips, e, 0, block, i, block.shape[1] - S, S)
            known[e, _CURSOR], known[e, END] = index[LANES][e, CURSOR], end_of(store, at[i] + 1)
    return gaps


# What is saved


@loop
def are_records(words: Any, position: int, taken: Any, K: int, C: int) -> bool:
    """Returns whether bytes `taken`, the first of which has a `position`, hold the records of entries.

    Args:
        words: `[n]` of consecutive entries, the first of which is a keyframe.
        position: of the first byte.
        taken: uint8.
        K: as above.
        C: as above.
    """
    most = most_bytes(8 * C)
    for i in range(len(words)):
        back, at = words[i] & BACK, (words[i] >> SHIFT) - position
        follows = i > 0 and back == (words[i - 1] & BACK) + 1 and back < K
        if not (back == 0 or follows) or at < 0 or at + _HEADER > len(taken):
            return False
        if at + _size_of(taken, at, most) > len(taken):
            return False
    return True


@loop
def move_in(store: Any, first: int, num: int, position: int, taken: Any) -> None:
    """Copies the records of a lane's first entries into its ring; see `are_records`."""
    entries, records, _, _, _, _, C, _, _ = store
    ring = records[first // (len(entries) // len(records))]
    most, head = most_bytes(8 * C), 0
    for q in range(first, first + num):
        at = (entries[q, 0] >> SHIFT) - position
        size = _size_of(taken, at, most)
        head = _place_of(head, most, len(ring))
        start = head % len(ring)
        ring[start : start + size] = taken[at : at + size]
        entries[q, 0] = head << SHIFT | entries[q, 0] & BACK
        head += size
