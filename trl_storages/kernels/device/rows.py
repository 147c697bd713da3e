"""Rows joined from fields, put into a table and picked from it, in tensor operations.

Letters: N rows, W words of 8 bytes a row, B rows picked or put, n steps of a window, L lanes and S steps
written now.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["RowTable", "fold", "join"]

_NO_SPANS = np.zeros((0, 2), np.int64)


class RowTable:
    """Copies rows out of a table and into it; see `kernels.host.rows.RowTable`.

    Args:
        rows: `[N, W]` int64, contiguous.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        #: `[N, W]` int64.
        self.rows = rows
        self._num_rows, self._num_words = rows.shape
        self._bytes = rows.view(torch.uint8)

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        spans: np.ndarray = _NO_SPANS,
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows: `[*B]` int64 slots, negative ones from the end, to `[*B, W]`."""
        picked = self.rows.index_select(0, self._counted(slots))
        if following is not None:
            lent, into = (
                self._bytes.index_select(0, following.reshape(-1)),
                picked.view(torch.uint8),
            )
            for start, size in spans.tolist():
                into[:, start : start + size] = lent[:, start : start + size]
        picked = picked.view((*slots.shape, self._num_words))
        return picked.pin_memory() if pin_memory else picked

    def pick_field(
        self, slots: torch.Tensor, start_byte: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Copies one field of rows: `[*B]` int64 slots to `[*B, *shape]`."""
        size = torch.Size(shape).numel() * dtype.itemsize
        field = self._bytes[:, start_byte : start_byte + size]
        picked = field.index_select(0, self._counted(slots))
        # Flat, as a row of no bytes at all has no stride that another dtype could be seen with.
        return picked.reshape(-1).view(dtype).view((*slots.shape, *shape))

    def _counted(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns `[B]` slots counted from the first row; others than of rows stay such."""
        flat = slots.reshape(-1)
        return torch.where(flat < 0, flat + self._num_rows, flat)

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies rows `[B, W]` to their slots `[B]`."""
        self.rows[slots] = rows

    def breaks(self, slots: torch.Tensor, rows: torch.Tensor, pairs: np.ndarray) -> torch.Tensor:
        """Finds rows among `[L, S, W]` that do not begin with what the row before them led to."""
        now = rows.view(torch.uint8)
        before = self._bytes.index_select(0, slots).unsqueeze(1)
        led_to = torch.cat([before, now[:, :-1]], 1)
        found = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
        for start, end, size in pairs.tolist():
            differs = now[..., start : start + size] != led_to[..., end : end + size]
            found |= differs.any(-1)
        return found


def join(
    fields: Sequence[torch.Tensor], places: np.ndarray, num_rows: int, num_words: int
) -> torch.Tensor:
    """Lays fields side by side in rows `[B, W]` on the device of the first one."""
    device = fields[0].device
    rows = torch.zeros((num_rows, num_words), dtype=torch.int64, device=device)
    into = rows.view(torch.uint8)
    for field, (start, size) in zip(fields, places.tolist(), strict=True):
        if size and num_rows:
            plain = field.detach().to(device).resolve_conj().resolve_neg().contiguous()
            # A mere number has no bytes to be seen.
            into[:, start : start + size] = plain.reshape(-1).view(torch.uint8).view(num_rows, size)
    return rows


def fold(rewards: torch.Tensor, length: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns Σ weights[i] · rewards[i] over i < length `[B]`, of `[n, B]`, added in this order."""
    step = torch.arange(len(rewards), device=rewards.device).unsqueeze(1)
    # To add -0.0 leaves every number as it is, 0.0 would turn -0.0 into 0.0.
    taken = torch.where(step < length, rewards * weights.unsqueeze(1), -0.0)
    # On the CPU a running sum adds from the first on, as the compiled loop does.
    return taken.cumsum(0)[-1]
