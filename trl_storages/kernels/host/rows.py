"""A table of rows: writes and gathers, in compiled loops.

Letters: N rows, W words of 8 bytes a row, B rows picked, n rows put or steps of a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.kernels.host.compiling import (
    LINE,
    address,
    array_at,
    compiled,
    contiguous,
    copy_bytes,
    is_set,
    prefetch,
)
from trl_storages.kernels.host.writing import Before, NewRows, put_rows
from trl_storages.kernels.memory import new_batch

if TYPE_CHECKING:
    from trl_storages.kernels.tables import RingTables

__all__ = ["RowTable", "fold", "not_found"]

_WORD = 8  # bytes
# How many rows ahead to prefetch, and how many bytes of each: the processor prefetches the rest itself.
_AHEAD = 16
_MOST_AHEAD = 1024  # bytes
_NO_VALUES = np.zeros((0, 2), np.int64)
_NO_SPANS, _NO_HEADERS = np.zeros((0, 4), np.int64), np.zeros(0, np.int64)
# Arrays of the dtypes that rewards are summed in: `_fold` reads the dtype off them.
_LIKE: dict[torch.dtype, np.ndarray] = {
    torch.float32: np.zeros(0, np.float32),
    torch.float64: np.zeros(0),
}


class RowTable:
    """Copies rows out of a table and into it.

    Args:
        rows: `[N, W]` int64, contiguous, on the CPU.
    """

    #: The class of the rows that it takes.
    new_rows = NewRows
    #: Whether appending can look for gaps to the rows before in the same call.
    finds_gaps = True
    #: Whether rows are stored as they are read.
    is_plain = True

    def __init__(self, rows: torch.Tensor) -> None:
        #: `[N, W]` int64.
        self.array = rows.numpy()
        self._num_words = rows.shape[1]
        size = self._num_words * _WORD
        # The span that copies whole rows one after another.
        self._whole = np.array([[0, 0, size, size]])
        #: The rows as `find_gaps` takes them.
        self.before: Before = (self.array, _NO_HEADERS, _NO_VALUES, 0)

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        parts: tuple[np.ndarray, np.ndarray] = (_NO_SPANS, _NO_SPANS),
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows.

        Args:
            slots: int64 of any shape `[*B]`; negative ones count from the end.
            following: `[*B]` int64, rows whose values go under `next`; None takes the rows themselves.
            parts: where the values at the root and those under `next` are in a row, as in `copy_into`.
            pin_memory: whether to return pinned memory.

        Returns:
            `[*B, W]` int64 in new memory.

        Raises:
            IndexError: a slot is outside of the rows.
        """
        shape = (*slots.shape, self._num_words)
        out = new_batch(shape, pin_memory=pin_memory)
        self._copy(slots, self._whole if following is None else parts[0], address(out))
        if following is not None:
            self._copy(following, parts[1], address(out))
        return out

    def pick_fields(
        self, slots: torch.Tensor, fields: Iterable[tuple[int, torch.dtype, torch.Size]]
    ) -> list[torch.Tensor]:
        """Copies some fields of rows, each contiguous within a row.

        Args:
            slots: int64 of any shape `[*B]`; negative ones count from the end.
            fields: the first byte in a row, the dtype and the shape of each.

        Returns:
            for each field `[*B, *shape]` in new memory.

        Raises:
            IndexError: a slot is outside of the rows.
        """
        batch, found, spans = slots.shape, [], []
        for start, dtype, shape in fields:
            out = new_batch(batch + shape, dtype)
            size = shape.numel() * dtype.itemsize
            spans.append((start, address(out), size, size))
            found.append(out)
        if spans:
            self._copy(slots, np.array(spans), 0)
        return found

    def copy_into(
        self,
        out: torch.Tensor,
        slots: torch.Tensor,
        spans: np.ndarray,
        where: torch.Tensor | None = None,
    ) -> None:
        """Copies bytes of rows to given places.

        Args:
            out: `[B, *]`, each row contiguous.
            slots: `[B]` int64; negative ones count from the end.
            spans: `[n, 4]` int64: the first byte in a row, the first byte in a row of `out`, how many
                bytes, and the bytes from one row of `out` to the next.
            where: `[B]` bool, which rows to copy; None copies all.

        Raises:
            IndexError: a slot is outside of the rows.
        """
        if where is not None:
            where = contiguous(where, torch.bool)
        self._copy(slots, spans, address(out), 0 if where is None else address(where))

    def _copy(self, slots: torch.Tensor, spans: np.ndarray, out: int, where: int = 0) -> None:
        """Copies bytes of rows to an address, as `copy_into` does; `where` is an address, or 0."""
        slots = contiguous(slots)
        wrong = _pick(self.array, slots.numel(), address(slots), spans, out, where)
        if wrong >= 0:
            raise not_found(int(slots.view(-1)[wrong]), len(self.array))

    def next_values(self, slots: torch.Tensor) -> tuple[np.ndarray, bool]:
        """Returns where the values of rows under `next` are.

        Args:
            slots: `[B]` int64; negative ones count from the end.

        Returns:
            `[B]` int64, addresses of rows as they are read, of which only these values are there; and
            whether another process may overwrite some of them before they are copied.
        """
        row_bytes = self.array.shape[1] * _WORD
        return self.array.ctypes.data + slots.numpy() % len(self.array) * row_bytes, False

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Copies rows to their slots.

        Args:
            slots: `[n]` int64, from 0 to N - 1.
            rows: n of them.
            ring: of the rows, if neighbouring rows matter.
        """
        slots = contiguous(slots)
        put_rows(self.array, rows.sources, slots.numel(), address(slots))


def fold(
    rewards: torch.Tensor, length: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns Σ weights[i] · rewards[i] over i < length, summed from 0 in this order in float64.

    Args:
        rewards: `[n, *B]`.
        length: int64 from 1 to n, one for each of B.
        weights: `[n]` float64, one for each row of rewards.
        dtype: of the sums, which are rounded once.

    Returns:
        `[*B]` of that dtype.
    """
    if rewards.dtype is not torch.float32 or dtype is not torch.float32:
        rewards = rewards.double()
    # Several ints are parsed faster than a size.
    rewards, out = rewards.contiguous(), rewards.new_empty(*rewards.shape[1:])
    size = len(weights), length.numel()
    _fold(_LIKE[out.dtype], *size, *map(address, (rewards, length, weights, out)))
    return out if out.dtype is dtype else out.to(dtype)


def not_found(slot: int, num_rows: int) -> IndexError:
    """Returns the error for a slot without a row."""
    return IndexError(f"slots must be below {num_rows}, the size of the storage, got {slot}.")


@compiled
def _pick(
    table: np.ndarray, num_slots: int, slots_at: int, spans: np.ndarray, out: int, where: int
) -> int:
    """Copies bytes of each row; returns the position of the first invalid slot, or -1."""
    slots = array_at(slots_at, num_slots, np.int64)
    address, num_rows, row_bytes = table.ctypes.data, table.shape[0], table.shape[1] * _WORD
    if spans.shape[0] == 0:
        return -1
    # The spans of a row are usually close together: prefetch the range that holds them all.
    low, high = spans[0, 0], spans[0, 0] + spans[0, 2]
    for s in range(1, spans.shape[0]):
        low, high = min(low, spans[s, 0]), max(high, spans[s, 0] + spans[s, 2])
    high = min(high, low + _MOST_AHEAD)
    # There is usually one span.
    start, to, size, pitch = spans[0, 0], out + spans[0, 1], spans[0, 2], spans[0, 3]
    for i in range(slots.shape[0]):
        ahead = i + _AHEAD
        if ahead < slots.shape[0]:
            first = slots[ahead] * row_bytes
            # Each line once: a prefetch takes longer than a copy of as many bytes.
            begin = first + low - ((address + first + low) & (LINE - 1))
            for byte in range(begin, first + high, LINE):
                prefetch(table, byte)
        if where and not is_set(where + i):
            continue
        slot = slots[i]
        if slot < 0:
            slot += num_rows
        if slot < 0 or slot >= num_rows:
            return i
        source = address + slot * row_bytes
        copy_bytes(to + i * pitch, source + start, size)
        for s in range(1, spans.shape[0]):
            copy_bytes(out + spans[s, 1] + i * spans[s, 3], source + spans[s, 0], spans[s, 2])
    return -1


@compiled
def _fold(
    like: np.ndarray,
    num_rows: int,
    size: int,
    rewards_at: int,
    length_at: int,
    weights_at: int,
    out_at: int,
) -> None:
    """Sums rewards of the dtype of `like`."""
    rewards = array_at(rewards_at, num_rows * size, like.dtype)
    length, out = array_at(length_at, size, np.int64), array_at(out_at, size, like.dtype)
    weights = array_at(weights_at, num_rows, np.float64)
    for b in range(size):
        total = 0.0
        for i in range(length[b]):
            total += weights[i] * rewards[i * size + b]
        out[b] = total
