"""Copies the fields of a batch into rows, in as few operations as pay.

Letters: N rows, W words of 8 bytes a row, B any batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trl_storages.storages.layout import Field, Layout

__all__ = ["RowWriter"]

# Fields up to this size are joined before they are written: one copy more, but fewer operations.
_SMALL = 1024  # bytes


class RowWriter:
    """Writes batches whose entries are known to fit.

    Fields of one dtype are neighbours in a row, so that the small ones of a dtype can be joined, and
    written as if they were one.

    Args:
        layout: of the rows.
        rows: `[N, W]` int64.
    """

    def __init__(self, layout: Layout, rows: torch.Tensor) -> None:
        self._device = rows.device
        self._blocks: list[tuple[list[Field], Any]] = []
        views = layout.views(rows)
        for fields in _joined(layout.fields):
            block = views[fields[0].key]
            if len(fields) > 1:
                start, stop = fields[0].start, fields[-1].start + fields[-1].size
                block = rows.view(fields[0].dtype)[:, start:stop]
            # NumPy writes a few rows in a third of torch's time.
            self._blocks.append((fields, _array(block) if self._on_cpu else block))

    @property
    def _on_cpu(self) -> bool:
        return self._device.type == "cpu"

    def write(self, slots: Any, entries: Sequence[torch.Tensor], batch_size: torch.Size) -> None:
        """Writes entries.

        Args:
            slots: what indexes the rows: an int, a slice, or int64 of shape B on their device.
            entries: tensors `[*B, *field.shape]`, in the order of the layout's fields, on any device.
            batch_size: B.
        """
        on_cpu = self._on_cpu
        if on_cpu and isinstance(slots, torch.Tensor):
            slots = slots.numpy()
        is_flat = not isinstance(slots, slice) or len(batch_size) < 2
        at = 0
        for fields, block in self._blocks:
            parts = entries[at : at + len(fields)]
            at += len(fields)
            rows = parts[0] if len(fields) == 1 else self._join(parts, fields, batch_size)
            if not is_flat:
                rows = rows.flatten(0, len(batch_size) - 1)
            block[slots] = _array(rows) if on_cpu else rows.to(self._device)

    def _join(
        self, parts: Sequence[torch.Tensor], fields: Sequence[Field], batch_size: torch.Size
    ) -> torch.Tensor:
        """Returns `[*B, width]`."""
        device = self._device
        flat = [
            part if len(field.shape) == 1 else part.reshape(*batch_size, field.size)
            for part, field in zip(parts, fields, strict=True)
        ]
        return torch.cat([part if part.device == device else part.to(device) for part in flat], -1)


def _joined(fields: Sequence[Field]) -> Iterator[list[Field]]:
    """Splits the fields of a row into those that are written together."""
    run: list[Field] = []
    for field in fields:
        is_small = field.size * field.dtype.itemsize <= _SMALL
        if run and not (is_small and field.dtype is run[-1].dtype):
            yield run
            run = []
        run.append(field)
        if not is_small:
            yield run
            run = []
    if run:
        yield run


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Sees a tensor on the CPU as an array, to copy its bits; one elsewhere is brought there."""
    if tensor.dtype is torch.bfloat16:
        # NumPy has no bfloat16.
        tensor = tensor.detach().view(torch.int16)
    return tensor.numpy(force=True)
