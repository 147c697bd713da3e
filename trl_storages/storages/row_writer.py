"""Copies the fields of a batch into rows, in as few operations as pay.

Letters: N rows, W words of 8 bytes a row, B any batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trl_storages.storages.layout import Field, Layout

__all__ = ["RowWriter", "as_array"]

# NumPy has none of these, but integers of their size.
_UNKNOWN_TO_NUMPY = {
    torch.bfloat16: torch.int16,
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}

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
        self._on_cpu = rows.device.type == "cpu"
        # Which entries, their sizes if they must be flattened to be joined, and where they go.
        self._blocks: list[tuple[slice, list[int], Any]] = []
        views, at = layout.views(rows), 0
        for fields in _joined(layout.fields):
            block = views[fields[0].key]
            if len(fields) > 1:
                start, stop = fields[0].start, fields[-1].start + fields[-1].size
                block = rows.view(fields[0].dtype)[:, start:stop]
            # NumPy writes a few rows in a third of torch's time.
            place = as_array(block) if self._on_cpu else block
            is_flat = all(len(field.shape) == 1 for field in fields)
            sizes = [] if is_flat else [field.size for field in fields]
            self._blocks.append((slice(at, at + len(fields)), sizes, place))
            at += len(fields)

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
        for which, sizes, block in self._blocks:
            parts = entries[which]
            rows = parts[0] if len(parts) == 1 else self._join(parts, sizes, batch_size)
            if not is_flat:
                rows = rows.flatten(0, len(batch_size) - 1)
            block[slots] = as_array(rows) if on_cpu else rows.to(self._device)

    def _join(
        self, parts: Sequence[torch.Tensor], sizes: Sequence[int], batch_size: torch.Size
    ) -> torch.Tensor:
        """Returns `[*B, width]`."""
        if sizes:
            parts = [
                part.reshape(*batch_size, size) for part, size in zip(parts, sizes, strict=True)
            ]
        try:
            return torch.cat(parts, -1)  # type: ignore[arg-type]
        except RuntimeError:
            # They lie on several devices.
            return torch.cat([part.to(self._device) for part in parts], -1)


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


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Sees a tensor on the CPU as an array, to copy its bits; one elsewhere is brought there."""
    if tensor.dtype in _UNKNOWN_TO_NUMPY:
        tensor = tensor.detach().view(_UNKNOWN_TO_NUMPY[tensor.dtype])
    return tensor.numpy(force=True)
