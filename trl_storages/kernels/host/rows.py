"""Rows put into a table and picked from it, in compiled loops.

Letters: N rows, W words of 8 bytes a row, B rows picked, n rows put or steps of a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, prefetch
from trl_storages.kernels.host.memory import copy_bytes
from trl_storages.kernels.host.writing import Before, Given, NewRows, put_rows

if TYPE_CHECKING:
    from trl_storages.kernels.host.ring import Ring
    from trl_storages.kernels.ring_tables import RingTables

__all__ = ["RowTable", "fold", "not_found"]

_WORD = 8  # bytes
_LINE = 64  # bytes that memory delivers at once
# Rows are asked for so many rows ahead, and no more bytes of each: the processor goes on by itself.
_AHEAD = 16
_MOST_AHEAD = 1024  # bytes
_NO_VALUES = np.zeros((0, 2), np.int64)
_NO_SPANS, _NO_HEADERS = np.zeros((0, 4), np.int64), np.zeros(0, np.int64)


class RowTable:
    """Copies rows out of a table and into it.

    Args:
        rows: `[N, W]` int64, contiguous, on the CPU.
    """

    #: Rows that it takes.
    new_rows = NewRows
    #: Whether rows that are appended can be compared with those before them in the same call.
    looks = True
    #: Whether rows are stored as they are seen.
    is_plain = True

    def __init__(self, rows: torch.Tensor) -> None:
        #: `[N, W]` int64.
        self.array = rows.numpy()
        self._num_words = rows.shape[1]
        self._whole = _whole_rows(self._num_words)
        #: The rows as `find_gaps` looks for what they led to.
        self.before: Before = (self.array, _NO_HEADERS, _NO_VALUES, 0)

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        spans: np.ndarray = _NO_SPANS,
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows.

        Args:
            slots: int64 of any shape `[*B]`; negative ones count from the end.
            following: `[*B]` int64, rows that lend what lies under `next`; None are the rows themselves.
            spans: where that lies in a row, as `copy_into` takes it.
            pin_memory: whether the new memory is such that a GPU reads it by itself.

        Returns:
            `[*B, W]` int64 in new memory.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        shape = (*slots.shape, self._num_words)
        out = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
        self._copy(slots, self._whole, out.data_ptr())
        if following is not None:
            self._copy(following, spans, out.data_ptr())
        return out

    def pick_fields(
        self, slots: torch.Tensor, fields: Iterable[tuple[int, torch.dtype, torch.Size]]
    ) -> list[torch.Tensor]:
        """Copies some fields of rows, each of elements that lie one after another.

        Args:
            slots: int64 of any shape `[*B]`; negative ones count from the end.
            fields: of each where it begins in a row, in bytes, its dtype and its shape.

        Returns:
            of each `[*B, *shape]` in new memory.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        batch, found, spans = slots.shape, [], []
        for start, dtype, shape in fields:
            out = torch.empty(batch + shape, dtype=dtype)
            size = shape.numel() * dtype.itemsize
            spans.append((start, out.data_ptr(), size, size))
            found.append(out)
        if spans:
            self._copy(slots, np.array(spans), 0)
        return found

    def copy_into(self, out: torch.Tensor, slots: torch.Tensor, spans: np.ndarray) -> None:
        """Copies some bytes of rows to where they are wanted.

        Args:
            out: `[B, *]`, the bytes of each row one after another.
            slots: `[B]` int64; negative ones count from the end.
            spans: `[n, 4]` int64: where bytes begin in a row, where they go in one of `out`, how many
                they are, and how many bytes of `out` lie from one row to the next.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        self._copy(slots, spans, out.data_ptr())

    def _copy(self, slots: torch.Tensor, spans: np.ndarray, out: int) -> None:
        """Copies bytes of rows to an address, as `copy_into` does."""
        flat = slots.numpy().reshape(-1)
        if (wrong := _pick(self.array, flat, spans, out)) >= 0:
            raise not_found(flat[wrong], len(self.array))

    def sources(self, rows: NewRows, ring: Ring, given: Given) -> np.ndarray:
        """Returns where what is stored of new rows comes from, and where it belongs.

        Args:
            rows: n of them.
            ring: of the rows that are there, as `append` finds it.
            given: the steps that they are, by `Ring.given`.

        Returns:
            `[*, 4]` int64, as `NewRows.sources`.
        """
        return rows.sources

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Copies rows to where they belong.

        Args:
            slots: `[n]` int64, from 0 to N - 1; rows of negative ones are left out.
            rows: n of them.
            ring: of the rows, where it matters which ones follow one another.
        """
        put_rows(self.array, rows.sources, slots.numpy())


def fold(
    rewards: torch.Tensor, length: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns Σ weights[i] · rewards[i] over i < length, added to 0 in this order in float64.

    Args:
        rewards: `[n, B]`.
        length: `[B]` int64, from 1 to n.
        weights: `[n]` float64.
        dtype: of the sums, which are rounded once.

    Returns:
        `[B]` of that dtype.
    """
    if rewards.dtype is not torch.float32 or dtype is not torch.float32:
        rewards = rewards.double()
    out = torch.empty(rewards.shape[1], dtype=rewards.dtype)
    _fold(rewards.contiguous().numpy(), length.numpy(), weights.numpy(), out.numpy())
    return out.to(dtype)


def not_found(slot: int, num_rows: int) -> IndexError:
    """Says that a slot is that of no row."""
    return IndexError(f"slots must be below {num_rows}, the size of the storage, got {slot}.")


def _whole_rows(num_words: int) -> np.ndarray:
    """Returns the span of rows that go one after another."""
    size = num_words * _WORD
    return np.array([[0, 0, size, size]])


@compiled
def _pick(table: np.ndarray, slots: np.ndarray, spans: np.ndarray, out: int) -> int:
    """Copies bytes of each row; returns which of `slots` is of no row, or -1."""
    address, num_rows, row_bytes = table.ctypes.data, table.shape[0], table.shape[1] * _WORD
    if spans.shape[0] == 0:
        return -1
    # Those of a row lie close together, as a rule.
    low, high = spans[0, 0], spans[0, 0] + spans[0, 2]
    for s in range(1, spans.shape[0]):
        low, high = min(low, spans[s, 0]), max(high, spans[s, 0] + spans[s, 2])
    high = min(high, low + _MOST_AHEAD)
    # Most often there is one span.
    start, to, size, pitch = spans[0, 0], out + spans[0, 1], spans[0, 2], spans[0, 3]
    for i in range(slots.shape[0]):
        ahead = i + _AHEAD
        if ahead < slots.shape[0]:
            first = slots[ahead] * row_bytes
            for byte in range(low, high, _LINE):
                prefetch(table, first + byte)
            # It may be in a further line.
            prefetch(table, first + high - 1)
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
def _fold(rewards: np.ndarray, length: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    for b in range(length.shape[0]):
        total = 0.0
        for i in range(length[b]):
            total += weights[i] * rewards[i, b]
        out[b] = total
