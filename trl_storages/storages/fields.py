"""Some fields of a storage, whether its rows are packed or TorchRL's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data import TensorStorage

from trl_storages.storages.entries import Nested, nested_sizes
from trl_storages.storages.packed import PackedStorage

__all__ = ["field_keys", "nested_under", "read_fields"]


def read_fields(
    storage: TensorStorage, index: torch.Tensor, keys: Iterable[NestedKey]
) -> dict[NestedKey, torch.Tensor]:
    """Gathers some fields of a storage, whether its rows are packed or TorchRL's own.

    Args:
        storage: a `PackedStorage`, `LazyTensorStorage` or `LazyMemmapStorage` that holds a TensorDict.
        index: int64 slots of any shape B.
        keys: the fields.

    Returns:
        key -> tensor `[*B, *shape]` in new memory.

    Raises:
        KeyError: there is no such field; the message lists those that are there.
    """
    if isinstance(storage, PackedStorage):
        return storage.read(index, keys)
    data: TensorDictBase = storage._storage
    fields = {}
    for key in keys:
        column = data.get(key, None)
        if column is None:
            there = sorted(map(str, data.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"the rows have no field {unravel_key(key)!r}; they have {there}.")
        picked = column.index_select(0, index.reshape(-1))
        fields[key] = picked if index.ndim == 1 else picked.view(index.shape + column.shape[1:])
    return fields


def field_keys(storage: TensorStorage) -> tuple[NestedKey, ...]:
    """Returns the keys of all fields of a storage, whether its rows are packed or TorchRL's own."""
    if isinstance(storage, PackedStorage):
        return storage.layout.keys  # type: ignore[union-attr]
    return tuple(storage._storage.keys(include_nested=True, leaves_only=True))


def nested_under(storage: TensorStorage, name: str) -> Nested:
    """Returns the further batch dimensions of the TensorDicts under `name`, by their path from there."""
    nested = (
        storage.layout.nested  # type: ignore[union-attr]
        if isinstance(storage, PackedStorage)
        else nested_sizes(storage._storage, 1)
    )
    return tuple((path[1:], size) for path, size in nested if path[0] == name and path[1:])
