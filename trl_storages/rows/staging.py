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

__all__ = ["StepBlock", "as_array", "pairs_of", "rows_of", "stage"]

# The alignment of columns as tensors.
_ALIGNED = 16
# Columns of up to so many bytes are joined.
_MOST_JOINED = 1024
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
    done: torch.Tensor | None = None,
) -> NewRows:
    """Returns entries as rows to write.

    Args:
        layout: of a row.
        entries: key -> tensor `[*batch_size, *shape]`, on any device.
        batch_size: of the entries, n rows in all.
        device: of the storage that the rows go to.
        done: n bool, which rows end their episodes; None if no lane is written.

    Raises:
        KeyError, TypeError, ValueError: an entry does not fit the layout.
    """
    fields = layout.fit(entries, batch_size)
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


class StepBlock:
    """One step of E environments, to be filled column by column, from which rows are written.

    Args:
        layout: of a row.
        num_envs: E.
        device: where the values are.
        keys: of the columns that `fill` takes, in its order.
    """

    def __init__(
        self, layout: Layout, num_envs: int, device: torch.device, keys: Sequence[NestedKey]
    ) -> None:
        self.layout = layout
        #: Whether the columns are arrays.
        self.is_on_host = device.type == "cpu"
        #: The L environments that made a transition; None for all of them.
        self.lanes: list[int] | None = None
        sizes, starts, end = {it.key: num_envs * it.num_bytes for it in layout.fields}, {}, 0
        # Small columns, and those of single numbers, are adjacent on the CPU, and filled in one copy.
        joined = [
            key
            for key, field in ((key, layout.field(key)) for key in keys if self.is_on_host)
            if field.size == 1 or (sizes[key] <= _MOST_JOINED and field.stack is None)
        ]
        for key in (*joined, *(key for key in layout.keys if key not in joined)):
            starts[key] = end if key in joined else -(-end // _ALIGNED) * _ALIGNED
            end = starts[key] + sizes[key]
        # The last byte is the zero of bytes that belong to no field.
        self._bytes = torch.zeros(end + 1, dtype=torch.uint8, device=device)
        self._fields = [self._bytes[starts[key] :][: sizes[key]] for key in layout.keys]
        self._done = self._bytes[starts[DONE] :][:num_envs].view(torch.bool).view(num_envs, 1)
        #: Key -> `[E, *shape]`, for assignment: arrays on the CPU, tensors elsewhere.
        self.columns: dict[NestedKey, Any] = {}
        for field, values in zip(layout.fields, self._fields, strict=True):
            key, batch = field.key, torch.Size([num_envs])
            if key in joined:
                # They need not be aligned, as tensors must be.
                dtype, at = as_array(torch.empty(0, dtype=field.dtype)).dtype, starts[key]
                memory = self._bytes.numpy()
                self.columns[key] = np.ndarray(batch + field.shape, dtype, memory, at)
            else:
                seen = field.seen(values.view(field.dtype), batch)
                self.columns[key] = as_array(seen) if self.is_on_host else seen
        self._joined: Any = bytearray()
        if joined:
            self._joined = self._bytes.numpy().data[: sum(sizes[key] for key in joined)]
        self._single = [(at, self.columns[key]) for at, key in enumerate(keys) if key not in joined]
        # Where each byte of the rows is.
        where = np.full((num_envs, layout.row_nbytes), end)
        for key, (first, size) in zip(layout.keys, layout.places.tolist(), strict=True):
            steps = np.arange(starts[key], starts[key] + sizes[key])
            where[:, first : first + size] = steps.reshape(num_envs, size)
        self._where = torch.from_numpy(where).to(device)
        # The rows, if they are read from the columns when they are written.
        self._rows: NewRows | None = None
        if (new_rows := backend(device).NewRows).reads_fields:
            size = num_envs, layout.num_words
            rows = new_rows(self._fields, layout.places, *size, self._done, device)
            self._rows = framed_rows(layout, rows)

    def put(self, key: NestedKey, values: torch.Tensor, which: Any = ...) -> None:
        """Sets the values of a field, for some environments."""
        self.columns[key][which] = as_array(values) if self.is_on_host else values

    def fill(self, values: list[Any]) -> None:
        """Sets all values of some columns.

        Args:
            values: bytes, or arrays (tensors elsewhere than on the CPU) of exactly their dtypes; changed.
        """
        for at, column in self._single:
            column[...], values[at] = values[at], b""
        try:
            self._joined[:] = b"".join(values)
        except TypeError:
            # Some are not contiguous.
            arrays = [it if isinstance(it, bytes) else np.asarray(it).tobytes() for it in values]
            self._joined[:] = b"".join(arrays)

    def rows(self, device: torch.device) -> NewRows:
        """Returns the rows of the block, usually with the values that it has when they are written.

        Args:
            device: of the storage that the rows go to.
        """
        if self.lanes is None and self._rows is not None and device.type == "cpu":
            return self._rows
        new_rows, done = backend(device).NewRows, self._done[self._which]
        rows = new_rows.of_block(self._words(), self.layout.places, done, device)
        return framed_rows(self.layout, rows)

    def tensordict(self) -> TensorDict:
        """Returns the transitions as a TensorDict `[L]` in new memory."""
        return self.layout.tensordict(self._words())

    def _words(self) -> torch.Tensor:
        """Returns a copy of the rows `[L, W]`."""
        return self._bytes[self._where[self._which]].view(torch.int64)

    @property
    def _which(self) -> Any:
        return slice(None) if self.lanes is None else self.lanes


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
