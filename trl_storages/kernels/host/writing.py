"""The loops of a write: compare new rows with the rows before them, index them, and copy them.

Letters: T live steps per lane at most, R ring steps per lane, E lanes (environments), M = R * E slots,
n rows written now, f fields of a row, W words of 8 bytes a row, L lanes and S steps written now.

New rows are copied from their fields straight to their slots, without an intermediate block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import (
    address,
    are_same_bytes,
    array_at,
    compiled,
    copy_bytes,
    inlined,
    is_set,
)
from trl_storages.kernels.sharing import tips_of
from trl_storages.kernels.tables import BEGUN, CURSOR, FINISHED, FIRST, LAST, OPEN, TAIL

__all__ = [
    "Before",
    "Given",
    "NewRows",
    "append_steps",
    "find_gaps",
    "is_cut",
    "is_last",
    "put_rows",
    "row_of",
    "tip_of",
]

#: Steps to be written, as the loops take them: `[L]` the lanes; S; the address of `[L, S]` bool, rows
#: that begin an episode whatever came before, 0 if none does; the address of `[L, S]` the row of each
#: step, 0 if they are in order; the address of the first `done` flag; and bytes to the next one.
Given = tuple[np.ndarray, int, int, int, int, int]
#: The rows before, as the loops take them: `[*, *]` as they are stored; `[*]` their headers, if they
#: share next values; `[*, *]` the side table; and the offset in bytes of the stored fields in a row as
#: read, 0 if rows share nothing.
Before = tuple[Any, Any, Any, int]

_WORD = 8  # bytes
# Columns of the sources of rows: the address of a field in the first row, the bytes to that in the next
# row, the first byte of the field in a stored row, and how many bytes it takes.
_ADDRESS, _STRIDE, _START, _SIZE = range(4)
# The columns of `places` that these are taken from, but for the address: rows are usually contiguous.
_COLUMNS = np.array([0, 1, 0, 1])
# Rows per chunk that are copied field by field.
_CHUNK = 256

# Flags that are compared at once.
_FLAGS = 128


class NewRows:
    """n rows that are about to be written, each field wherever it is.

    Args:
        fields: of any leading shapes, contiguous, on the CPU, as they are read.
        places: `[f, 2]` int64, the first byte of each field in a row, and how many it takes.
        num_rows: n.
        num_words: W.
        done: n bool, contiguous, on the CPU, which rows end their episodes; None if the rows are not
            steps of lanes.
        device: where the rows are wanted, the CPU.
    """

    #: The same rows as they are read, if these are parts of them.
    seen: NewRows | None = None
    #: Whether fields are read when the rows are written, and not before.
    reads_fields = True

    def __init__(
        self,
        fields: Sequence[torch.Tensor],
        places: np.ndarray,
        num_rows: int,
        num_words: int,
        done: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        self.num_rows, self._num_words = num_rows, num_words
        # Keeps the tensors alive as long as their addresses are used.
        self._fields = fields if done is None else [*fields, done]
        addresses = [*map(address, self._fields)]
        #: n bool on the CPU, in any shape; None if the rows are not steps of lanes.
        self.done: torch.Tensor | None = None if done is None else self._fields[-1]
        #: The address of the first `done` flag, and bytes to the next one.
        self.ends = (0, 0) if done is None else (addresses.pop(), 1)
        #: `[f, 4]` int64, where each field is read from, and where it goes in a row.
        self.sources = places.take(_COLUMNS, 1)
        self.sources[:, _ADDRESS] = addresses

    @classmethod
    def of_block(
        cls, words: torch.Tensor, places: np.ndarray, done: torch.Tensor, device: torch.device
    ) -> NewRows:
        """Wraps rows that are laid out already.

        Args:
            words: `[n, W]` int64, not copied: later changes to it are what is stored.
            places: as above.
            done: `[n, 1]` bool, not copied either.
            device: as above.
        """
        rows = cls([], places[:0], len(words), words.shape[1], None, device)
        rows._fields, rows.done = [words], done
        rows.sources = places.take(_COLUMNS, 1)
        rows.sources[:, _ADDRESS] = words.data_ptr() + places[:, 0]
        rows.sources[:, _STRIDE] = words.shape[1] * _WORD
        rows.ends = done.data_ptr(), done.stride(0)
        return rows

    def words(self) -> torch.Tensor:
        """Returns a copy of the rows, `[n, W]` int64; bytes of no field are zero."""
        words = np.zeros((self.num_rows, self._num_words), np.int64)
        places = torch.arange(self.num_rows)
        put_rows(words, self.sources, self.num_rows, address(places))
        return torch.from_numpy(words)

    def parts(self, parts: np.ndarray, num_words: int) -> NewRows:
        """Returns rows made of some bytes of these, from the same memory.

        Args:
            parts: `[p, 4]` int64: the field, the first byte of it, the first byte in the new rows, and
                how many bytes.
            num_words: W of the new rows.
        """
        rows = NewRows([], parts[:0, 2:], self.num_rows, num_words, None, torch.device("cpu"))
        rows._fields, rows.done, rows.ends = self._fields, self.done, self.ends
        rows.sources = self.sources[parts[:, 0]]
        rows.sources[:, _ADDRESS] += parts[:, 1]
        rows.sources[:, _START:] = parts[:, 2:]
        return rows

    def first_violation(self, implied: np.ndarray) -> int:
        """Returns the first of some pairs of flags where one is true and the other is not, or -1.

        Args:
            implied: `[p, 2]` int64, the fields of a flag and of the flag that it implies.
        """
        first: int = _first_violation(self.sources, implied, self.num_rows)
        return first


@compiled
def _first_violation(sources: Any, implied: Any, num_rows: int) -> int:
    for i in range(len(implied)):
        one, other = sources[implied[i, 0]], sources[implied[i, 1]]
        size, num_stretches = one[_SIZE], num_rows
        if one[_STRIDE] == size and other[_STRIDE] == size:
            size, num_stretches = size * num_rows, 1
        for stretch in range(num_stretches):
            at = one[_ADDRESS] + stretch * one[_STRIDE]
            beside = other[_ADDRESS] + stretch * other[_STRIDE]
            for start in range(0, size, _FLAGS):
                num_flags = min(_FLAGS, size - start)
                # Skips flags that are all zero: the first one is, and each equals the next.
                if not is_set(at + start) and are_same_bytes(
                    at + start, at + start + 1, num_flags - 1
                ):
                    continue
                for byte in range(start, start + num_flags):
                    if is_set(at + byte) and not is_set(beside + byte):
                        return i
    return -1


_tips_of = inlined(tips_of)


@inlined
def tip_of(header: int, lane: int, num_lanes: int) -> int:
    """Returns the entry of the tip of a row; see `tips_of`."""
    # int64, as addresses are computed from it, which would overflow the 4 bytes of a header.
    return _tips_of(np.int64(header), lane, num_lanes)


@inlined
def row_of(given: Any, i: int, s: int) -> int:
    """Returns which row step s of lane i is."""
    written, num_steps, _, order_at, _, _ = given
    at = i * num_steps + s
    return array_at(order_at, len(written) * num_steps, np.int64)[at] if order_at else at


@inlined
def is_cut(given: Any, i: int, s: int) -> bool:
    """Returns whether step s of lane i begins an episode whatever came before."""
    _, num_steps, cut_at, _, _, _ = given
    return cut_at != 0 and is_set(cut_at + i * num_steps + s)


@inlined
def is_last(given: Any, row: int) -> bool:
    """Returns whether a row ends its episode."""
    _, _, _, _, first_end, end_stride = given
    return is_set(first_end + row * end_stride)


@compiled
def find_gaps(
    ring: Any,
    given: Any,
    sources: Any,
    pairs: Any,
    before: Any,
    gaps_at: int,
) -> bool:
    """Finds rows that continue an episode but not the row before them.

    Args:
        ring: the tables of the index.
        given: the steps.
        sources: `[f, 4]` of the rows.
        pairs: `[p, 2]` a field, and the field under `next` that it must equal in the row before.
        before: the rows of the ring; the header of the newest one is in a tip, if they share next values.
        gaps_at: the address of the output, `[L, S]` bool; 0 for none.

    Returns:
        whether there is a gap.
    """
    _, _, lanes, room = ring
    written, num_steps = given[0], given[1]
    table, headers, values, moved = before
    gaps = array_at(gaps_at, len(written) * num_steps if gaps_at else 0, np.bool_)
    gaps[:] = False
    found = False
    for i in range(len(written)):
        lane, previous = written[i], 0
        goes_on = lanes[lane, OPEN] != 0
        newest = (lanes[lane, CURSOR] - 1) % room * len(lanes) + lane
        own = table.ctypes.data + newest * table.shape[1] * _WORD - moved
        after = own
        if moved > 0:
            entry = tip_of(headers[newest], lane, len(lanes))
            after = values.ctypes.data + entry * values.shape[1] * _WORD
        for s in range(num_steps):
            row = row_of(given, i, s)
            if goes_on and not is_cut(given, i, s):
                for p in range(len(pairs)):
                    now, led_to = pairs[p, 0], pairs[p, 1]
                    start = sources[led_to, _START]
                    end = sources[led_to, _ADDRESS] + previous * sources[led_to, _STRIDE]
                    if s == 0:
                        end = start + (after if start < moved else own)
                    value = sources[now, _ADDRESS] + row * sources[now, _STRIDE]
                    if not are_same_bytes(value, end, sources[now, _SIZE]):
                        found = True
                        if gaps_at:
                            gaps[i * num_steps + s] = True
            goes_on = not is_last(given, row)
            previous = row
    return found


@compiled
def append_steps(
    ring: Any,
    most_live: int,
    given: Any,
    sources: Any,
    pairs: Any,
    table: Any,
    num_rows: int,
    slots_at: int,
) -> bool:
    """Adds steps to the index, and copies their rows to their slots, unless there is a gap.

    Args:
        ring: the tables of the index.
        most_live: T.
        given: the steps.
        sources: `[*, 4]` of the stored part of the rows.
        pairs: as in `find_gaps`, of rows that share nothing; empty to skip that check.
        table: `[*, W]` where rows go; empty if they are stored elsewhere.
        num_rows: n.
        slots_at: the address of the output, `[n]`, -1 for steps evicted at once.

    Returns:
        whether there is a gap, and so nothing was written.
    """
    episode, spans, lanes, room = ring
    written, num_steps = given[0], given[1]
    slots = array_at(slots_at, num_rows, np.int64)
    if len(pairs) > 0 and find_gaps(ring, given, sources, pairs, (table, slots, table, 0), 0):
        return True
    for i in range(len(written)):
        lane = written[i]
        step = lanes[lane, CURSOR]
        number = lanes[lane, BEGUN]
        goes_on = lanes[lane, OPEN] != 0
        place = step % room
        # The newest episode.
        entry = lane * most_live + (number - 1) % most_live
        for s in range(num_steps):
            row = row_of(given, i, s)
            if not goes_on or is_cut(given, i, s):
                entry = lane * most_live + number % most_live
                number += 1
                spans[entry, FIRST] = step
            slot = place * len(lanes) + lane
            is_end = is_last(given, row)
            episode[slot] = entry
            spans[entry, LAST] = step
            spans[entry, FINISHED] = is_end
            goes_on = not is_end
            slots[row] = slot if s + room >= num_steps else -1
            step += 1
            place = place + 1 if place + 1 < room else 0
        lanes[lane, CURSOR] = step
        lanes[lane, BEGUN] = number
        lanes[lane, OPEN] = goes_on
        lanes[lane, TAIL] = max(lanes[lane, TAIL], step - most_live)
    if table.size > 0:
        put_rows(table, sources, num_rows, slots_at)
    # Rows evicted at once are in the ring for their frames only.
    for i in range(len(written)):
        for s in range(num_steps - most_live):
            slots[row_of(given, i, s)] = -1
    return False


@compiled
def put_rows(table: Any, sources: Any, num_rows: int, slots_at: int) -> None:
    """Copies rows to their slots; rows with negative slots are skipped.

    Args:
        table: `[*, W]` int64.
        sources: `[f, 4]` of the rows.
        num_rows: n.
        slots_at: the address of `[n]` slots.
    """
    slots = array_at(slots_at, num_rows, np.int64)
    row_bytes, to = table.shape[1] * _WORD, table.ctypes.data
    for field in range(len(sources)):
        start, end = sources[field, _ADDRESS], sources[field, _ADDRESS]
        end += (len(slots) - 1) * sources[field, _STRIDE] + sources[field, _SIZE]
        if start < to + table.size * _WORD and end > to:
            # Sources in the table itself would be overwritten before they are copied.
            block = np.empty((len(slots), table.shape[1]), np.int64)
            moved = sources.copy()
            moved[:, _ADDRESS] = block.ctypes.data + sources[:, _START]
            moved[:, _STRIDE] = row_bytes
            _copy(block, sources, np.arange(len(slots)))
            _copy(table, moved, slots)
            return
    _copy(table, sources, slots)


@compiled
def _copy(table: Any, sources: Any, slots: Any) -> None:
    row_bytes = table.shape[1] * _WORD
    for first in range(0, len(slots), _CHUNK):
        stop = min(first + _CHUNK, len(slots))
        # Padding is at the end of a row, and takes less than two words.
        for row in range(first, stop):
            if slots[row] >= 0:
                for word in range(max(table.shape[1] - 2, 0), table.shape[1]):
                    table[slots[row], word] = 0
        for field in range(len(sources)):
            stride, size = sources[field, _STRIDE], sources[field, _SIZE]
            at, to = sources[field, _ADDRESS], table.ctypes.data + sources[field, _START]
            # With a size known at compile time, a copy takes a tenth of the time.
            if size == 1:
                for row in range(first, stop):
                    if slots[row] >= 0:
                        copy_bytes(to + slots[row] * row_bytes, at + row * stride, 1)
            elif size == 4:
                for row in range(first, stop):
                    if slots[row] >= 0:
                        copy_bytes(to + slots[row] * row_bytes, at + row * stride, 4)
            elif size == 8:
                for row in range(first, stop):
                    if slots[row] >= 0:
                        copy_bytes(to + slots[row] * row_bytes, at + row * stride, 8)
            else:
                for row in range(first, stop):
                    if slots[row] >= 0:
                        copy_bytes(to + slots[row] * row_bytes, at + row * stride, size)
