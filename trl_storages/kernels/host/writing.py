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

from trl_storages.kernels.host.compiling import are_same_bytes, compiled, copy_bytes, is_set
from trl_storages.kernels.sharing import NUM_TIPS, TIP_BIT
from trl_storages.kernels.tables import BEGUN, CURSOR, FINISHED, FIRST, LAST, OPEN, TAIL

__all__ = ["Before", "Given", "NewRows", "append_steps", "find_gaps", "put_rows"]

#: Steps to be written, as the loops take them: `written` to `end_stride` of `find_gaps`.
Given = tuple[Any, Any, Any, Any, Any, Any]
#: The rows before, as the loops take them: `table` to `moved` of `find_gaps`.
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

_address = torch.Tensor.data_ptr


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
        addresses = [*map(_address, self._fields)]
        #: Whether next observations are unknown, and each row has a copy of its own in their place.
        self.is_compact = False
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
        put_rows(words, self.sources, np.arange(self.num_rows))
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

    def some(self, places: torch.Tensor) -> NewRows:
        """Returns a copy of some of the rows, not as steps of any lane."""
        words = self.words()[places]
        done = torch.zeros(len(words), 1, dtype=torch.bool)
        return self.of_block(words, self.sources[:, _START:], done, words.device)


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


@compiled
def find_gaps(
    lanes: Any,
    room: int,
    written: Any,
    num_steps: int,
    cut: Any,
    order: Any,
    first_end: int,
    end_stride: int,
    sources: Any,
    pairs: Any,
    is_ring: bool,
    table: Any,
    headers: Any,
    values: Any,
    moved: int,
    gaps: Any,
) -> bool:
    """Finds rows that continue an episode but not the row before them.

    Args:
        lanes: of the index.
        room: R.
        written: `[L]` the lanes.
        num_steps: S.
        cut: `[L, S]` bool, rows that begin an episode anyway; empty if none does.
        order: `[L, S]` the row of each step; empty if rows are in the order of the steps.
        first_end: the address of the first `done` flag.
        end_stride: bytes to the next flag.
        sources: `[f, 4]` of the rows.
        pairs: `[p, 2]` a field, and the field under `next` that it must equal in the row before.
        is_ring: whether `table` holds the rows of the ring; otherwise the rows before, `[L, *]`.
        table: `[*, *]` the rows before, as they are stored.
        headers: `[*]` of these, if they share next values; those of the newest row are in a tip then.
        values: `[*, *]` the side table.
        moved: offset in bytes of the stored fields in a row as read; 0 if rows share nothing.
        gaps: `[L, S]` bool, the output.

    Returns:
        whether there is a gap.
    """
    found = False
    for i in range(len(written)):
        lane, previous = written[i], 0
        goes_on = lanes[lane, OPEN] != 0
        newest = (lanes[lane, CURSOR] - 1) % room * len(lanes) + lane if is_ring else i
        own = table.ctypes.data + newest * table.shape[1] * _WORD - moved
        after = own
        if moved > 0:
            tip = (np.int64(headers[newest]) >> TIP_BIT) & NUM_TIPS
            entry = 1 + (tip - 1) * len(lanes) + lane if tip > 0 else 0
            after = values.ctypes.data + entry * values.shape[1] * _WORD
        for s in range(num_steps):
            row = order[i, s] if order.size > 0 else i * num_steps + s
            gaps[i, s] = False
            if goes_on and not (cut.size > 0 and cut[i, s]):
                for p in range(len(pairs)):
                    now, led_to = pairs[p, 0], pairs[p, 1]
                    start = sources[led_to, _START]
                    end = sources[led_to, _ADDRESS] + previous * sources[led_to, _STRIDE]
                    if s == 0:
                        end = start + (after if start < moved else own)
                    value = sources[now, _ADDRESS] + row * sources[now, _STRIDE]
                    if not are_same_bytes(value, end, sources[now, _SIZE]):
                        gaps[i, s] = found = True
            goes_on = not is_set(first_end + row * end_stride)
            previous = row
    return found


@compiled
def append_steps(
    episode: Any,
    spans: Any,
    lanes: Any,
    most_live: int,
    room: int,
    written: Any,
    num_steps: int,
    cut: Any,
    order: Any,
    first_end: int,
    end_stride: int,
    sources: Any,
    pairs: Any,
    table: Any,
    slots: Any,
) -> bool:
    """Adds steps to the index, and copies their rows to their slots, unless there is a gap.

    Args:
        episode: of the index.
        spans: of the index.
        lanes: of the index.
        most_live: T.
        room: R.
        written: as in `find_gaps`.
        num_steps: as in `find_gaps`.
        cut: as in `find_gaps`.
        order: as in `find_gaps`.
        first_end: as in `find_gaps`.
        end_stride: as in `find_gaps`.
        sources: `[*, 4]` of the stored part of the rows.
        pairs: as in `find_gaps`, of rows that share nothing; empty to skip that check.
        table: `[*, W]` where rows go; empty if they are stored elsewhere.
        slots: `[n]` the output, -1 for steps evicted at once.

    Returns:
        whether there is a gap, and so nothing was written.
    """
    if len(pairs) > 0:
        gaps = np.empty((len(written), num_steps), np.bool_)
        if find_gaps(
            lanes,
            room,
            written,
            num_steps,
            cut,
            order,
            first_end,
            end_stride,
            sources,
            pairs,
            True,
            table,
            slots,
            table,
            0,
            gaps,
        ):
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
            row = order[i, s] if order.size > 0 else i * num_steps + s
            if not goes_on or (cut.size > 0 and cut[i, s]):
                entry = lane * most_live + number % most_live
                number += 1
                spans[entry, FIRST] = step
            slot = place * len(lanes) + lane
            is_end = is_set(first_end + row * end_stride)
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
        put_rows(table, sources, slots)
    # Rows evicted at once are in the ring for their frames only.
    for i in range(len(written)):
        for s in range(num_steps - most_live):
            slots[order[i, s] if order.size > 0 else i * num_steps + s] = -1
    return False


@compiled
def put_rows(table: Any, sources: Any, slots: Any) -> None:
    """Copies rows to their slots; rows with negative slots are skipped.

    Args:
        table: `[*, W]` int64.
        sources: `[f, 4]` of n rows.
        slots: `[n]`.
    """
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
