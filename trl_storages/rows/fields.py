"""The fields of rows, whether these are packed or in one of TorchRL's own storages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data import TensorStorage

from trl_storages.rows.layout import nest
from trl_storages.rows.packed import PackedStorage

__all__ = ["BatchFields", "StoredFields", "field_keys", "read_fields"]

# Shorter rows are gathered as a whole at the first question: it costs about as much as one field.
_SHORT = 4096  # bytes


class StoredFields:
    """The stored fields of some rows, gathered when they are asked for.

    Args:
        storage: a `PackedStorage`, or one of TorchRL's storages of tensors.
        slots: int64 of shape B on its device.
        collate: turns what the storage returns into a batch; None leaves it as it is.

    Attributes:
        slots: as given.
        device: where fields arrive.
    """

    def __init__(
        self,
        storage: Any,
        slots: torch.Tensor,
        collate: Callable[[Any], TensorDictBase] | None = None,
    ) -> None:
        self.slots, self._storage, self._collate = slots, storage, collate
        self.device: torch.device = getattr(storage, "out_device", None) or storage.device
        self._is_sent = self.device != storage.device
        self._by_field = (
            isinstance(storage, PackedStorage)
            and storage.row_nbytes > _SHORT
            and collate is None
            and not self._is_sent
        )
        self._found: dict[NestedKey, torch.Tensor] = {}

    def keys(self) -> tuple[NestedKey, ...]:
        """Returns the keys of all fields."""
        return field_keys(self._storage)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def some(self, slots: torch.Tensor) -> StoredFields:
        """Returns further rows, of which only some fields are wanted."""
        further = StoredFields(self._storage, slots)
        further._by_field = True
        return further

    def like(self, slots: torch.Tensor) -> StoredFields:
        """Returns further rows, of which as much is wanted as of these."""
        return StoredFields(self._storage, slots, self._collate)

    def __getitem__(self, key: NestedKey) -> torch.Tensor:
        """Returns a field, `[*B, *shape]`.

        Raises:
            KeyError: there is no such field; the message lists those that are there.
        """
        found = self._found.get(key)
        if found is None:
            found = self._read(key) if self._by_field else self._whole.get(key, None)
            if found is None:
                raise _no_field(key, self._whole)
            self._found[key] = found
        return found

    def _read(self, key: NestedKey) -> torch.Tensor:
        field = read_fields(self._storage, self.slots, (key,))[key]
        return field.to(self.device, non_blocking=True) if self._is_sent else field

    @cached_property
    def _whole(self) -> TensorDictBase:
        rows = self._storage.get(self.slots)
        return rows if self._collate is None else self._collate(rows)

    def tensordict(self) -> TensorDictBase:
        """Returns all fields, in memory of their own."""
        return self._nested(self.keys()) if self._by_field else self._whole

    def root(self) -> TensorDictBase:
        """Returns the fields at the root, and some more perhaps."""
        if not self._by_field:
            return self._whole
        return self._nested([key for key in self.keys() if key[0] != "next"])

    def following(self) -> TensorDictBase:
        """Returns the fields under `next`, as a TensorDict of those alone."""
        if not self._by_field:
            return self._whole.get("next")
        return self._nested([key for key in self.keys() if key[0] == "next"]).get("next")

    def _nested(self, keys: Iterable[NestedKey]) -> TensorDictBase:
        fields, nested = {key: self[key] for key in keys}, self._storage.layout.nested
        return nest(fields, self.slots.shape, self.device, nested)


class BatchFields:
    """The entries of a batch in the place of stored fields, once it is one.

    Args:
        batch: of batch size B.
    """

    def __init__(self, batch: TensorDictBase) -> None:
        self._batch = batch

    def keys(self) -> tuple[NestedKey, ...]:
        """Returns the keys of all entries."""
        return tuple(self._batch.keys(include_nested=True, leaves_only=True))

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __getitem__(self, key: NestedKey) -> torch.Tensor:
        """Returns an entry.

        Raises:
            KeyError: there is none; the message lists those that are there.
        """
        found = self._batch.get(key, None)
        if found is None:
            raise _no_field(key, self._batch)
        return found

    def tensordict(self) -> TensorDictBase:
        """Returns the batch."""
        return self._batch


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
            raise _no_field(key, data)
        picked = column.index_select(0, index.reshape(-1))
        fields[key] = picked if index.ndim == 1 else picked.view(index.shape + column.shape[1:])
    return fields


def field_keys(storage: TensorStorage) -> tuple[NestedKey, ...]:
    """Returns the keys of all fields of a storage, whether its rows are packed or TorchRL's own."""
    if isinstance(storage, PackedStorage):
        return storage.layout.keys  # type: ignore[union-attr]
    return tuple(storage._storage.keys(include_nested=True, leaves_only=True))


def _no_field(key: NestedKey, rows: TensorDictBase) -> KeyError:
    there = sorted(map(str, rows.keys(include_nested=True, leaves_only=True)))
    return KeyError(f"the rows have no field {unravel_key(key)!r}; they have {there}.")
