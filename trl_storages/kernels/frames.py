"""Compressed frames: each frame is stored as its difference from the frame of the entry before.

Consecutive entries of a lane hold consecutive frames, which differ little. Therefore an entry holds, in
place of its frame, one word: the position of the *record* of the frame in the lane's ring of bytes, and
how many entries back its *keyframe* is. A keyframe needs no other frame; each of its bytes is stored as
the difference from the byte above, in the row of pixels before. Keyframes are the first entry of a lane,
every K-th entry, and entries whose difference from the frame before would take more bytes. So a step
needs up to K - 1 entries more than in `kernels.entries`; all else is as in `kernels.entries`.

A record is the number of its bytes, in four bytes, and runs `(skip, length, values)`: `skip` bytes stay
as they are, the next `length` bytes take the values. A skip of 255 and more is written as bytes of 255
and a remainder. Positions count bytes since the beginning of the lane. Position p is byte p mod H of the
ring, and no record wraps. Decoding any bytes reads and writes nothing outside of the ring and the frame,
because a reader may decode a record while it is overwritten, and only afterwards checks the tail.

Letters as in `kernels.entries`; C words of a frame, of which the first F belong to stacks; H bytes of a
ring; K the interval of keyframes. The sizes O and R count the decoded frame.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trl_storages.kernels import CURSOR, SHARED, Index, Sizes
from trl_storages.kernels.checksums import (
    NUMBER,
    OBSERVATION,
    STEP,
    observation_checksum,
    write_step_checksums,
)
from trl_storages.kernels.compile import copy_words, inlined, loop
from trl_storages.kernels.entries import compare_with_tips, count_gaps, enter, make_room, publish

__all__ = [
    "BACK",
    "END",
    "EVERY",
    "SHIFT",
    "Store",
    "are_records",
    "compute_observation_checksums",
    "copy_in",
    "end_of",
    "gather",
    "most_bytes",
    "move_in",
    "put",
    "take",
    "update_tips",
]

#: K of new buffers.
EVERY = 16
#: The low bits of an entry's first word: how many entries back the keyframe is. The other bits, from bit
#: SHIFT on, are the position of the record.
BACK = 255
SHIFT = 8
_HEADER = 4
#: Columns of `Store.tip_states`.
_RESET_COUNT, _CURSOR, END = range(3)


class Store(NamedTuple):
    """Entries with their records. Loops receive its `members` as a plain tuple, see `kernels`."""

    entries: Any
    """`[E M, W]`, each `[word | observation O - C | step]`."""
    records: Any
    """`[E, H]` uint8, the rings."""
    tips: Any
    """`[E, S]` decoded copies of the last observations of the streams."""
    tip_states: Any
    """`[E, 3]` for which reset count and cursor of the lane a tip holds, and where its record ends."""
    reset_count: Any
    """`[1]` the reset count of the index."""
    sizes: Any
    """`kernels.Sizes` as a plain tuple."""
    stack: int
    """k."""
    record_words: int
    """C, words of a compressed frame."""
    keyframes: int
    """K."""
    pixel_row: int
    """Bytes of a row of pixels."""


@inlined
def most_bytes(size: int) -> int:
    """Returns the largest number of bytes of a record, for frames of `size` bytes."""
    return _HEADER + size + 2 * (size // 255) + 3


# One frame


@loop
def _write_changes(before: Any, now: Any, record: Any, o: int) -> int:
    """Writes runs where `now` `[8 C]` differs from `before`, from byte o of `record`; returns the end."""
    size, i = now.size, 0
    words_before, words = before.view(np.int64), now.view(np.int64)
    while True:
        start = i
        while i < size and now[i] == before[i]:
            i += 1
            if i % 8 == 0:
                w = i // 8
                while w < len(words) and words_before[w] == words[w]:
                    w += 1
                i = 8 * w
        if i == size:
            return o
        skip = i - start
        while skip >= 255:
            record[o] = 255
            o, skip = o + 1, skip - 255
        record[o] = skip
        length_byte, begin = o + 1, i
        o += 2
        while i < size and i - begin < 255:
            # Up to two equal bytes inside a run take less space than another run.
            if now[i] == before[i] and (
                i + 2 >= size or (now[i + 1] == before[i + 1] and now[i + 2] == before[i + 2])
            ):
                break
            record[o] = now[i]
            o, i = o + 1, i + 1
        record[length_byte] = i - begin


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
        # The compiler vectorises a copy between slices of one size.
        values, changed = ring[o : o + length], frame[i : i + length]
        for j in range(length):
            changed[j] = values[j]
        i, o = i + length, o + length


@inlined
def _record_size(ring: Any, start: int, max_bytes: int) -> int:
    """Returns the number of bytes of the record at byte `start`, header included; at most `max_bytes`."""
    size = np.int64(0)
    for j in range(_HEADER):
        size |= np.int64(ring[min(start + j, ring.size - 1)]) << (8 * j)
    return min(_HEADER + size, max_bytes)


@inlined
def _next_position(head: int, max_bytes: int, H: int) -> int:
    """Returns the first position from `head` on at which a record of `max_bytes` does not wrap."""
    return head if head % H + max_bytes <= H else head + H - head % H


@loop
def _encode(
    ring: Any, head: int, back: int, enough: int, width: int, frames: Any
) -> tuple[int, int]:
    """Stores the record of a frame after position `head`.

    Args:
        ring: `[H]`.
        head: where the last record ends.
        back: how many entries back the keyframe would be; 0 if the frame must be a keyframe.
        enough: a record of at most this many bytes is not compared with a keyframe.
        width: bytes of a row of pixels.
        frames: `[4, 8 C]` uint8: the frame before, the frame, a buffer, and zeros.

    Returns:
        the first word of the entry, and where the record ends.
    """
    before, now, differences, zeros = frames[0], frames[1], frames[2], frames[3]
    size = now.size
    head = _next_position(head, most_bytes(size), ring.size)
    start = head % ring.size
    first = start + _HEADER
    end = _write_changes(before, now, ring, first) if back else first
    if back == 0 or end - start > enough:
        differences[:width] = now[:width]
        for j in range(width, size):
            differences[j] = now[j] - now[j - width]
        num_changes = end - first
        end = _write_changes(zeros, differences, ring, first)
        if back and end - first > num_changes:
            end = _write_changes(before, now, ring, first)
        else:
            back = 0
    for j in range(_HEADER):
        ring[start + j] = (end - first) >> (8 * j) & 255
    return head << SHIFT | back, head + end - start


@loop
def _decode(ring: Any, word: int, width: int, frame: Any) -> None:
    """Replaces the frame before, `[8 C]`, by the frame of an entry, given its first word.

    If the frame of the entry is a keyframe, the frame before may be any.
    """
    begin, size = (word >> SHIFT) % ring.size, frame.size
    is_key = word & BACK == 0
    if is_key:
        frame[:] = 0
    end = min(begin + _record_size(ring, begin, most_bytes(size)), ring.size)
    _apply_changes(ring, begin + _HEADER, end, frame)
    for start in range(width, size if is_key else 0, width):
        pixels = frame[start : start + width]
        above = frame[start - width : start - width + len(pixels)]
        for j in range(len(pixels)):
            pixels[j] += above[j]


@loop
def _seek(members: Any, p: int, decoded: int, frame: Any) -> int:
    """Decodes the frame of entry p and returns p; `frame` holds that of entry `decoded`, -1 for none."""
    store = Store(*members)
    M = len(store.entries) // len(store.records)
    lane = p // M
    # Decode from the keyframe on, or from the next entry after the decoded one.
    first = max(p - min(store.entries[p, 0] & BACK, store.keyframes - 1), lane * M)
    if first <= decoded <= p:
        first = decoded + 1
    for q in range(first, p + 1):
        _decode(store.records[lane], store.entries[q, 0], store.pixel_row, frame)
    return p


@loop
def end_of(members: Any, p: int) -> int:
    """Returns the position at which the record of entry p ends."""
    store = Store(*members)
    ring = store.records[p // (len(store.entries) // len(store.records))]
    position = store.entries[p, 0] >> SHIFT
    return position + _record_size(ring, position % ring.size, most_bytes(8 * store.record_words))


# Reads


@loop
def gather(members: Any, entry: Any, last: Any, out: Any) -> None:
    """Copies rows `[B, 2 S + ...]` from entries `entry`, and their next values from entries `last`."""
    store = Store(*members)
    entries, k, C = store.entries, store.stack, store.record_words
    F, O, _, _, R = store.sizes
    W, newest = entries.shape[1], out.shape[1] - O
    older, root = (k - 1) * F, 1 + R - C
    words, decoded = np.empty((1, C), np.int64), -1
    frame = words.view(np.uint8).reshape(-1)
    for i in range(len(entry)):
        first = entry[i] - (k - 1)
        for j in range(k):
            decoded = _seek(members, first + j, decoded, frame)
            copy_words(out, i, j * F, words, 0, 0, F if j < k - 1 else C)
        copy_words(out, i, older + C, entries, entry[i], 1, root - 1)
        copy_words(out, i, older + R, entries, last[i], root, W - root)
        for j in range(k):
            q, start = last[i] + 1 - (k - 1) + j, newest - older + j * F
            if j < k - 1 and first <= q <= entry[i]:  # the row already contains this frame
                copy_words(out, i, start, out, i, (q - first) * F, F)
            else:
                decoded = _seek(members, q, decoded, frame)
                copy_words(out, i, start, words, 0, 0, F if j < k - 1 else C)
        copy_words(out, i, newest + C, entries, last[i] + 1, 1, O - C)


@loop
def take(members: Any, entry: Any, shift: int, start: int, out: Any) -> None:
    """Copies bytes from `start` on of the k frames up to `entry + shift` `[B]` to `out` `[B, k, n]`."""
    k, decoded = out.shape[1], -1
    words = np.empty(Store(*members).record_words, np.int64)
    frame = words.view(np.uint8)
    for i in range(len(entry)):
        for j in range(k):
            decoded = _seek(members, entry[i] + shift - (k - 1) + j, decoded, frame)
            values, copied = frame[start : start + out.shape[2]], out[i, j]
            for w in range(len(copied)):
                copied[w] = values[w]


@loop
def compute_observation_checksums(members: Any, c: Any, needed: Any, computed: Any) -> None:
    """Writes the OBSERVATION checksums of the entries `needed` `[n]` to `computed` `[E M]`."""
    store = Store(*members)
    C, decoded = store.record_words, -1
    words = np.empty(C, np.int64)
    size, frame = 1 + store.sizes[1] - C, words.view(np.uint8)
    for q in needed:
        decoded = _seek(members, q, decoded, frame)
        computed[q] = observation_checksum(words, store.entries, q, 1, size, c)


# Writes


@loop
def update_tips(tables: Any, members: Any, lanes: Any) -> None:
    """Decodes the last observations of some lanes' streams that another process or a load has changed."""
    index, store = Index(*tables), Store(*members)
    S, T = store.tips.shape[1], index.num_steps
    states, reset_count = store.tip_states, store.reset_count[0]
    num_step_words = store.entries.shape[1] - 1 - store.sizes[1] + store.record_words
    row = np.empty((1, 2 * S + num_step_words), np.int64)
    for m in range(len(lanes)):
        e, cursor = lanes[m], index.lane_bounds[lanes[m], CURSOR]
        if states[e, _RESET_COUNT] == reset_count and states[e, _CURSOR] == cursor:
            continue
        states[e, _RESET_COUNT] = reset_count
        states[e, _CURSOR] = cursor
        states[e, END] = 0
        if cursor > 0:
            newest = e * T + (cursor - 1) % T
            entry = index.where[newest : newest + 1]
            gather(members, entry, entry, row)
            copy_words(store.tips, e, 0, row, 0, row.shape[1] - S, S)
            states[e, END] = end_of(members, entry[0] + 1)


@loop
def copy_in(
    members: Any, lanes: Any, offsets: Any, words: Any, continuity: Any, entry: Any, sums: Any
) -> None:
    """Copies the rows of a block into their entries, in a file with checksums of the observations."""
    store = Store(*members)
    entries, width = store.entries, store.pixel_row
    F, O = store.sizes[:2]
    k, C, K = store.stack, store.record_words, store.keyframes
    M, W = len(entries) // len(store.records), entries.shape[1]
    older, num_other, last = (k - 1) * F, O - C, words.shape[1] - O
    checksums, c = sums
    frames = np.zeros((4, C), np.int64)
    now, as_bytes = frames[1:2], frames.view(np.uint8)
    for m in range(len(lanes)):
        e = lanes[m]
        end = store.tip_states[e, END]
        copy_words(frames, 0, 0, store.tips, e, older, C)
        for i in range(offsets[m], offsets[m + 1]):
            p = entry[i]
            for q in range(p + 1 if continuity[i] == SHARED else p - (k - 1), p + 2):
                # A row holds only F words of an older frame. The other words of the newest frame fill
                # the rest, because they change least.
                start = last if q > p else older
                copy_words(now, 0, 0, words, i, start, C)
                if q < p:
                    copy_words(now, 0, 0, words, i, (q - p + k - 1) * F, F)
                else:
                    copy_words(entries, q, 1, words, i, start + C, num_other)
                back = (entries[q - 1, 0] & BACK) + 1 if q % M else K
                back = back if back < K else 0
                # A record is never compared with a keyframe if it is no larger than the last keyframe.
                enough = end_of(members, q - back) - (entries[q - back, 0] >> SHIFT) if back else 0
                entries[q, 0], end = _encode(store.records[e], end, back, enough, width, as_bytes)
                if len(checksums):
                    checksums[q, NUMBER] = checksums[q, STEP] = 0
                    checksums[q, OBSERVATION] = observation_checksum(
                        now[0], entries, q, 1, 1 + num_other, c
                    )
                copy_words(frames, 0, 0, now, 0, 0, C)
            copy_words(entries, p, 1 + num_other, words, i, older + O, W - 1 - num_other)


@loop
def put(tables: Any, members: Any, block: Any, flags: Any, slots: Any, sums: Any) -> int:
    """Writes a block; see `kernels.entries.put`."""
    lanes, offsets, words, done, cut = block
    cuts_gaps, most_gaps = flags
    index, store = Index(*tables), Store(*members)
    size = len(words)
    update_tips(tables, members, lanes)
    continuity = np.empty(size, np.uint8)
    entry, numbers = np.empty((2, size), np.int64)
    compare_with_tips(tables, store.tips, store.sizes, lanes, offsets, words, continuity)
    gaps = 0
    if most_gaps < size:
        gaps = count_gaps(tables, lanes, offsets, continuity, done, cut)
        if gaps > most_gaps:
            return gaps
    make_room(tables, lanes, offsets, continuity, entry)
    enter(tables, lanes, offsets, continuity, entry, done, cut, cuts_gaps, slots, numbers)
    copy_in(members, lanes, offsets, words, continuity, entry, sums)
    if len(sums[0]):
        size = 1 + Sizes(*store.sizes).observation - store.record_words
        write_step_checksums(store.entries, size, store.stack, sums, entry, numbers)
    publish(tables, lanes, offsets)
    S, states = store.tips.shape[1], store.tip_states
    for m in range(len(lanes)):
        e, i = lanes[m], offsets[m + 1] - 1
        if i >= offsets[m]:
            copy_words(store.tips, e, 0, words, i, words.shape[1] - S, S)
            states[e, _CURSOR] = index.lane_bounds[e, CURSOR]
            states[e, END] = end_of(members, entry[i] + 1)
    return gaps


# Saved records


@loop
def are_records(words: Any, position: int, saved: Any, K: int, C: int) -> bool:
    """Returns whether saved bytes hold the records of all entries.

    Args:
        words: `[n]` the first words of consecutive entries, which begin with a keyframe.
        position: of the first saved byte.
        saved: uint8.
        K: interval of keyframes.
        C: words of a frame.
    """
    max_bytes = most_bytes(8 * C)
    for i in range(len(words)):
        back, start = words[i] & BACK, (words[i] >> SHIFT) - position
        follows = i > 0 and back == (words[i - 1] & BACK) + 1 and back < K
        if not (back == 0 or follows) or start < 0 or start + _HEADER > len(saved):
            return False
        if start + _record_size(saved, start, max_bytes) > len(saved):
            return False
    return True


@loop
def move_in(members: Any, first: int, num: int, position: int, saved: Any) -> None:
    """Copies the saved records of a lane's first `num` entries into its ring; see `are_records`."""
    store = Store(*members)
    ring = store.records[first // (len(store.entries) // len(store.records))]
    max_bytes, head = most_bytes(8 * store.record_words), 0
    for q in range(first, first + num):
        start = (store.entries[q, 0] >> SHIFT) - position
        size = _record_size(saved, start, max_bytes)
        head = _next_position(head, max_bytes, len(ring))
        begin = head % len(ring)
        ring[begin : begin + size] = saved[start : start + size]
        store.entries[q, 0] = head << SHIFT | store.entries[q, 0] & BACK
        head += size
