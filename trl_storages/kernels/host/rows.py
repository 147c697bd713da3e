"""Rows put into a table and picked from it, in compiled loops.

Letters: N rows, W words of 8 bytes a row, B rows picked, n rows put or steps of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, prefetch
from trl_storages.kernels.host.memory import copy_bytes
from trl_storages.kernels.host.writing import Before, Given, NewRows, put_rows

if TYPE_CHECKING:
    from trl_storages.kernels.host.ring import Ring
    from trl_storages.kernels.ring_tables import RingTables

__all__ = ["ALL", "RowTable", "fold", "not_found", "one_span"]

_WORD = 8  # bytes
_LINE = 64  # bytes that memory delivers at once
# Rows are asked for so many rows ahead, and no more bytes of each: the processor goes on by itself.
_AHEAD = 16
_MOST_AHEAD = 1024  # bytes
_NO_VALUES = np.zeros((0, 2), np.int64)
_NO_SPANS, _NO_HEADERS = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
#: A mask where there is none.
ALL = np.zeros(0, bool)


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
        pitch = self._num_words * _WORD
        self._copy(slots, one_span(0, pitch), out.data_ptr(), pitch)
        if following is not None:
            self._copy(following, spans, out.data_ptr(), pitch)
        return out

    def pick_field(
        self, slots: torch.Tensor, start_byte: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Copies one field of rows: elements that lie one after another.

        Args:
            slots: int64 of any shape `[*B]`; negative ones count from the end.
            start_byte: where the field begins in a row.
            dtype: of its elements.
            shape: of the field.

        Returns:
            `[*B, *shape]` in new memory.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        out = torch.empty((*slots.shape, *shape), dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        self._copy(slots, one_span(start_byte, size), out.data_ptr(), size)
        return out

    def copy_into(
        self,
        out: torch.Tensor,
        slots: torch.Tensor,
        spans: np.ndarray,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Copies some bytes of rows to where they are wanted.

        Args:
            out: `[B, *]`, the bytes of each row one after another.
            slots: `[B]` int64; negative ones count from the end.
            spans: `[n, 3]` int64: where bytes begin in a row, where they go in one of `out`, and how
                many they are.
            mask: `[B]` bool, which rows are copied; None is all.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        self._copy(slots, spans, out.data_ptr(), out.stride(0) * out.element_size(), mask)

    def _copy(
        self,
        slots: torch.Tensor,
        spans: np.ndarray,
        out: int,
        pitch: int,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Copies bytes of rows to an address, so many bytes on from row to row."""
        flat = slots.numpy().reshape(-1)
        wrong = _pick(self.array, flat, ALL if mask is None else mask.numpy(), spans, out, pitch)
        if wrong >= 0:
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


@cache
def one_span(start: int, size: int) -> np.ndarray:
    """Returns the span of one field, which goes to where nothing else does."""
    return np.array([[start, 0, size]])


@compiled
def _pick(
    table: np.ndarray, slots: np.ndarray, mask: np.ndarray, spans: np.ndarray, out: int, pitch: int
) -> int:
    """Copies bytes of each row; returns which of `slots` is of no row, or -1."""
    address, num_rows, row_bytes = table.ctypes.data, table.shape[0], table.shape[1] * _WORD
    is_masked = mask.shape[0] > 0
    for s in range(spans.shape[0]):
        start, to, size = spans[s, 0], out + spans[s, 1], spans[s, 2]
        asked = min(size, _MOST_AHEAD)
        for i in range(slots.shape[0]):
            ahead = i + _AHEAD
            if ahead < slots.shape[0]:
                for byte in range(0, asked, _LINE):
                    prefetch(table, slots[ahead] * row_bytes + start + byte)
            if is_masked and not mask[i]:
                continue
            slot = slots[i]
            if slot < 0:
                slot += num_rows
            if slot < 0 or slot >= num_rows:
                return i
            copy_bytes(to + i * pitch, address + slot * row_bytes + start, size)
    return -1


@compiled
def _fold(rewards: np.ndarray, length: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    for b in range(length.shape[0]):
        total = 0.0
        for i in range(length[b]):
            total += weights[i] * rewards[i, b]
        out[b] = total
