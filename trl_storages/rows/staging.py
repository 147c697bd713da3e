"""Prepares rows to be written.

Letters: n rows, W words of 8 bytes a row, E environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from trl_storages.kernels import backend
from trl_storages.keys import DONE, next_key
from trl_storages.rows.entries import plain
from trl_storages.rows.layout import Layout
from trl_storages.rows.stacks import framed_rows

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows

__all__ = ["StepBlock", "as_array", "pairs_of", "rows_of", "rows_of_flags", "stage"]

# Dtypes that NumPy lacks, with integers of the same size that carry their bits.
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
    done: torch.Tensor | None = None,
) -> NewRows:
    """Returns entries as rows to write.

    Args:
        layout: of a row.
        entries: key -> tensor `[*batch_size, *shape]`, on any device.
        batch_size: of the entries, n rows in all.
        device: of the storage that the rows go to.
        strict: raise on an entry that is not in the layout; False drops it.
        done: n bool, which rows end their episodes; None if no lane is written.

    Raises:
        KeyError, TypeError, ValueError: an entry does not fit the layout.
    """
    fields = layout.fit(entries, batch_size, strict=strict)
    return rows_of(backend(device).NewRows, layout, fields, batch_size, device, done=done)


def rows_of(
    new_rows: type[NewRows],
    layout: Layout,
    fields: Sequence[torch.Tensor],
    batch_size: torch.Size,
    device: torch.device,
    *,
    done: torch.Tensor | None = None,
    is_plain: bool = False,
) -> NewRows:
    """Returns fields as rows to write.

    Args:
        new_rows: class of the rows.
        layout: of a row.
        fields: `[*batch_size, *shape]` in the order of the layout, as `Layout.fit` returns them.
        batch_size: of the fields, n rows in all.
        device: of the storage that the rows go to.
        done: as in `stage`.
        is_plain: whether fields and flags are known to be `plain`.
    """
    fields = layout.frames_first(fields, len(batch_size))
    if new_rows.reads_fields and (layout.stacks or not is_plain):
        fields = plain(fields)
        done = None if done is None else plain([done])[0]
    size = batch_size.numel(), layout.num_words
    return framed_rows(layout, new_rows(fields, layout.places, *size, done, device))


def rows_of_flags(done: torch.Tensor, num_rows: int, device: torch.device) -> NewRows:
    """Returns n rows without fields, with only the flags that end episodes."""
    new_rows, places = backend(device).NewRows, np.zeros((0, 2), np.int64)
    if new_rows.reads_fields:
        [done] = plain([done])
    return new_rows([], places, num_rows, 0, done, device)


class StepBlock:
    """One step of E environments as rows, to be filled field by field.

    Args:
        layout: of a row.
        num_envs: E.
        device: where the values are.
    """

    def __init__(self, layout: Layout, num_envs: int, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._words = torch.zeros(num_envs, layout.num_words, dtype=torch.int64, device=device)
        #: Key -> `[E, *shape]`.
        self.views = layout.views(self._words)
        #: The same for assignment: arrays on the CPU, tensors elsewhere.
        self.columns: dict[NestedKey, Any] = self.views
        #: Whether the columns are arrays.
        self.is_on_host = device.type == "cpu"
        if self.is_on_host:
            # Assignment to an array takes a fifth of the time.
            self.columns = {key: as_array(view) for key, view in self.views.items()}
        #: The L environments that made a transition; None for all of them.
        self.lanes: list[int] | None = None
        self._rows_here = self._rows(device)

    def put(self, key: NestedKey, values: torch.Tensor, which: Any = ...) -> None:
        """Sets the values of a field, for some environments."""
        self.columns[key][which] = as_array(values) if self.is_on_host else values

    def rows(self, device: torch.device) -> NewRows:
        """Returns the rows of the block, with the values that it has when they are written.

        Args:
            device: of the storage that the rows go to.
        """
        if device == self.device and self.lanes is None:
            return self._rows_here
        return self._rows(device)

    def tensordict(self) -> TensorDict:
        """Returns the transitions as a TensorDict `[L]` in new memory."""
        words = self._words.clone() if self.lanes is None else self._words[self.lanes]
        return self.layout.tensordict(words)

    def _rows(self, device: torch.device) -> NewRows:
        words, done = self._words, self.views[DONE]
        if self.lanes is not None:
            words, done = words[self.lanes], done[self.lanes]
        rows = backend(device).NewRows.of_block(words, self.layout.places, done, device)
        return framed_rows(self.layout, rows)


def as_array(tensor: torch.Tensor | np.ndarray) -> np.ndarray:
    """Returns a tensor as an array of its bits: a view on the CPU, a copy from other devices."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype in _UNKNOWN_TO_NUMPY:
        tensor = tensor.detach().view(_UNKNOWN_TO_NUMPY[tensor.dtype])
    return tensor.numpy(force=True)


def pairs_of(layout: Layout, keys: Iterable[NestedKey]) -> np.ndarray:
    """Pairs the fields from before a step with those from after it.

    Args:
        layout: of the rows.
        keys: of fields from before a step; skipped if the twin under `next` has another dtype or shape.

    Returns:
        `[p, 2]` int64: the number of a field among those of a row, and that of its twin.
    """
    places = {key: place for place, key in enumerate(layout.keys)}
    described = layout.described
    pairs = [(key, next_key(key)) for key in keys]
    found = [(places[at], places[end]) for at, end in pairs if described[at] == described[end]]
    return np.array(found, np.int64).reshape(-1, 2)
