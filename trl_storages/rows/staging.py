"""Rows that are about to be written, laid out in a block of their own.

Letters: n rows, W words of 8 bytes a row, E environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.kernels import backend
from trl_storages.keys import next_key
from trl_storages.rows.layout import Layout

__all__ = ["StepBlock", "as_array", "pairs_of", "stage"]

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


def stage(
    layout: Layout,
    entries: Mapping[NestedKey, torch.Tensor],
    batch_size: torch.Size,
    device: torch.device,
    *,
    strict: bool = True,
) -> torch.Tensor:
    """Returns the rows that entries make up.

    Args:
        layout: of a row.
        entries: key -> tensor `[*batch_size, *shape]`, on any device.
        batch_size: of the entries, n rows in all.
        device: where the rows are wanted.
        strict: whether an entry that is not in the layout is an error; it is left out otherwise.

    Returns:
        `[n, W]` int64 in new memory.

    Raises:
        KeyError, TypeError, ValueError: an entry does not fit the layout.
    """
    fields = layout.fit(entries, batch_size, strict=strict)
    begin = device
    if device.type != "cpu":
        if not any(field.device == device for field in fields):
            # They cross in one piece.
            begin = torch.device("cpu")
        fields = [field.to(begin) for field in fields]
    rows = backend(device).join(fields, layout.places, batch_size.numel(), layout.num_words)
    return rows.to(device)


class StepBlock:
    """One step of E environments as rows, to be filled field by field.

    Args:
        layout: of a row.
        num_envs: E.
        device: where the values are.
    """

    def __init__(self, layout: Layout, num_envs: int, device: torch.device) -> None:
        self.layout, self.device = layout, device
        #: `[E, 1, W]` int64.
        self.steps = torch.zeros(num_envs, 1, layout.num_words, dtype=torch.int64, device=device)
        #: Key -> `[E, *shape]`.
        self.views = layout.views(self.steps[:, 0])
        #: The same to put values into: arrays on the CPU, tensors elsewhere.
        self.columns: dict[NestedKey, Any] = self.views
        #: Whether the columns are arrays.
        self.is_on_host = device.type == "cpu"
        if self.is_on_host:
            # To put a value into an array takes a fifth of the time.
            self.columns = {key: as_array(view) for key, view in self.views.items()}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Sees a tensor on the CPU as an array, to copy its bits; one elsewhere is brought there."""
    if tensor.dtype in _UNKNOWN_TO_NUMPY:
        tensor = tensor.detach().view(_UNKNOWN_TO_NUMPY[tensor.dtype])
    return tensor.numpy(force=True)


def pairs_of(layout: Layout, keys: Iterable[NestedKey]) -> np.ndarray:
    """Returns where rows say what a step began with, and what it led to.

    Args:
        layout: of the rows.
        keys: of what a step began with; those whose twin under `next` is of another kind are left out.

    Returns:
        `[n, 3]` int64: the first byte of a field, the first byte of its twin, and the bytes of each.
    """
    pairs = [(layout.field(key), layout.field(next_key(key))) for key in keys]
    places = [
        (now.start_byte, after.start_byte, now.num_bytes)
        for now, after in pairs
        if (now.dtype, now.shape) == (after.dtype, after.shape)
    ]
    return np.array(places, np.int64).reshape(-1, 3)
