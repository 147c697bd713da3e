"""A table of rows: writes and gathers, in tensor operations.

Letters: N rows, W words of 8 bytes a row, B rows picked, n rows put or steps of a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.kernels.device.writing import NewRows

if TYPE_CHECKING:
    from trl_storages.kernels.device.ring import Ring
    from trl_storages.kernels.tables import RingTables

__all__ = ["RowTable", "fold"]

_NO_PARTS = np.zeros((0, 4), np.int64), np.zeros((0, 4), np.int64)


class RowTable:
    """Copies rows out of a table and into it; see `kernels.host.rows.RowTable`.

    Args:
        rows: `[N, W]` int64, contiguous.
    """

    #: The class of the rows that it takes.
    new_rows = NewRows
    #: Looking for gaps while appending would wait for the device.
    finds_gaps = False

    def __init__(self, rows: torch.Tensor) -> None:
        #: `[N, W]` int64.
        self.rows = rows
        self._num_rows, self._num_words = rows.shape
        self._bytes = rows.view(torch.uint8)

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        parts: tuple[np.ndarray, np.ndarray] = _NO_PARTS,
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows: `[*B]` int64 slots, negative ones counting from the end, to `[*B, W]`."""
        picked = self._rows_of(self._counted(slots))
        if following is not None:
            self.copy_into(picked, following.reshape(-1), parts[1])
        picked = picked.view((*slots.shape, picked.shape[1]))
        return picked.pin_memory() if pin_memory else picked

    def _rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns rows `[B, W]` as they are read, at slots that are not negative."""
        return self.rows.index_select(0, slots)

    def pick_fields(
        self, slots: torch.Tensor, fields: Iterable[tuple[int, torch.dtype, torch.Size]]
    ) -> list[torch.Tensor]:
        """Copies some fields of rows: `[*B]` int64 slots to `[*B, *shape]` of each."""
        return [self._pick_field(slots, *field) for field in fields]

    def _pick_field(
        self, slots: torch.Tensor, start_byte: int, dtype: torch.dtype, shape: torch.Size
    ) -> torch.Tensor:
        size = shape.numel() * dtype.itemsize
        field = self._bytes[:, start_byte : start_byte + size]
        picked = field.index_select(0, self._counted(slots))
        # Flattened: a row of no bytes has no stride that a view of another dtype could use.
        return picked.reshape(-1).view(dtype).view((*slots.shape, *shape))

    def copy_into(
        self,
        out: torch.Tensor,
        slots: torch.Tensor,
        spans: np.ndarray,
        where: torch.Tensor | None = None,
    ) -> None:
        """Copies bytes of rows to given places; see `kernels.host.rows.RowTable`."""
        into = out.view(torch.uint8)
        for start, to, size, _ in spans.tolist():
            found = self._pick_field(slots, start, torch.uint8, torch.Size([size]))
            target = into[:, to : to + size]
            target.copy_(found if where is None else torch.where(where.unsqueeze(1), found, target))

    def _counted(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns slots `[B]` counted from the first row; invalid ones stay invalid."""
        flat = slots.reshape(-1)
        return torch.where(flat < 0, flat + self._num_rows, flat)

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns rows `[L, W]` as they are read."""
        return self.rows[slots]

    def write(
        self,
        ring: Ring,
        lanes: torch.Tensor,
        steps: torch.Tensor,
        words: torch.Tensor,
    ) -> None:
        """Copies steps of lanes to their slots.

        Args:
            ring: of the rows, in the state before the write.
            lanes: `[L]`.
            steps: `[L, S]`.
            words: `[L, k, W]`, the rows of the last k steps, which are kept.
        """
        steps = steps[:, -words.shape[1] :]
        self.rows[ring.slots_at(steps, lanes.unsqueeze(1))] = words

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Copies n rows to their slots `[n]`."""
        self.rows[slots] = rows.words()


def fold(
    rewards: torch.Tensor, length: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns Σ weights[i] · rewards[i] over i < length `[*B]`, of `[n, *B]`; see `kernels.host.fold`."""
    step = torch.arange(len(rewards), device=rewards.device).unsqueeze(1)
    weighted = rewards.flatten(1).double() * weights.unsqueeze(1)
    taken = torch.where(step < length, weighted, 0.0)
    # On the CPU a cumulative sum adds from left to right, as the compiled loop does.
    return taken.cumsum(0)[-1].to(dtype).view(rewards.shape[1:])
