"""Reads the fields of rows of a `PackedStorage`.

Letters: B samples, N rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages._torchrl import set_entry
from trl_storages.kernels.memory import on_device
from trl_storages.keys import next_key
from trl_storages.rows.layout import Layout
from trl_storages.rows.packed import PackedStorage, Taken
from trl_storages.rows.views import nest

__all__ = [
    "BatchedFields",
    "Copied",
    "FollowingFields",
    "SingleFields",
    "StoredFields",
    "read_fields",
    "stored_fields",
]

#: A field, `[B]` int64 the other rows that it is read from, and `[B]` bool for which rows.
Copied = tuple[NestedKey, torch.Tensor, torch.Tensor]

# Shorter rows are gathered whole on first access, which costs about as much as one field.
_SHORT = 4096  # bytes


class StoredFields(dict[NestedKey, torch.Tensor]):
    """The fields of some rows, each gathered on first access.

    Args:
        storage: holds the rows.
        slots: `[*B]` int64 slots of the rows, on the device of the storage.
        device: of the gathered fields.

    Attributes:
        storage: as given.
        slots: likewise.
        device: likewise.
        following: `[*B]` int64, the rows that supply the entries under `next`; None: the rows themselves.
    """

    following: torch.Tensor | None = None

    def __init__(self, storage: Any, slots: torch.Tensor, device: torch.device) -> None:
        self.storage, self.slots, self.device = storage, slots, device

    @abstractmethod
    def __missing__(self, key: NestedKey) -> torch.Tensor:
        """Gathers a field, `[*B, *shape]`.

        Raises:
            KeyError: no such field; the message lists the existing ones.
        """

    def names(self) -> tuple[NestedKey, ...]:
        """Returns the keys of all fields, gathered or not."""
        return self.storage.layout.keys

    def follow(self, slots: torch.Tensor) -> None:
        """Takes the entries under `next` from other rows from now on, `[*B]` int64."""
        self.following = slots
        for key in [*self]:
            if key[0] == "next":
                del self[key]

    @abstractmethod
    def tensordict(self, entries: Mapping[NestedKey, torch.Tensor]) -> TensorDictBase:
        """Returns all fields in new memory, with `entries` added or replacing them."""

    def take(self, targets: Sequence[NestedKey], copied: Copied) -> bool:
        """Fills fields with a field of other rows from now on; returns False if they can't be."""
        return False

    def packed(self) -> tuple[Layout, torch.Tensor] | None:
        """Returns the layout and the `[*B, W]` int64 rows if they are gathered whole, else None."""
        return None


class _WholeRows(StoredFields):
    """Packed rows, gathered whole on the first access to a field."""

    _block: torch.Tensor | None = None
    _taken: Taken | None = None

    def __missing__(self, key: NestedKey) -> torch.Tensor:
        self._gather()
        if key not in self:
            self.storage.layout.field(key)  # raises the KeyError
        return self[key]

    def _gather(self) -> None:
        layout, block = self.packed()
        self.update(layout.views(block))

    def packed(self) -> tuple[Layout, torch.Tensor]:
        if self._block is None:
            self._block = self.storage.gather(self.slots, self.following, self._taken)
        return self.storage.layout, self._block

    def take(self, targets: Sequence[NestedKey], copied: Copied) -> bool:
        source, slots, where = copied
        wanted = (source, *targets)
        spans = self.storage.layout.spans_to[wanted]
        if spans is None or self._taken is not None or slots.device != self.slots.device:
            return False
        self._taken, self._block = (slots, spans, where), None
        self.clear()
        return True

    def follow(self, slots: torch.Tensor) -> None:
        self.following, self._block = slots, None
        self.clear()
        self._gather()

    def tensordict(self, entries: Mapping[NestedKey, torch.Tensor]) -> TensorDictBase:
        layout = self.storage.layout
        fields = self or layout.views(self.packed()[1])
        return nest({**fields, **entries}, self.slots.shape, self.device, layout.nested)


class SingleFields(StoredFields):
    """Rows gathered field by field."""

    def __missing__(self, key: NestedKey) -> torch.Tensor:
        keys, storage = [key], self.storage
        if key in (stacks := storage.layout.stacks):
            # A stack shares all frames but one with its twin under `next`.
            root = unravel_key(key[1:]) if key[0] == "next" else key
            keys = [it for it in (root, next_key(root)) if it in stacks]
        self.update(read_fields(storage, self.slots, keys, self.device, self.following))
        return self[key]

    def tensordict(self, entries: Mapping[NestedKey, torch.Tensor]) -> TensorDictBase:
        """Returns all fields, with `entries` added or replacing them."""
        names = [key for key in self.names() if key not in entries]
        if missing := [key for key in names if key not in self]:
            # Fields gathered in one call take less time than one by one.
            self.update(read_fields(self.storage, self.slots, missing, self.device, self.following))
        fields = {key: self[key] for key in names}
        nested = self.storage.layout.nested
        return nest({**fields, **entries}, self.slots.shape, self.device, nested)


class BatchedFields(StoredFields):
    """Rows as the batch that the storage, or the user's collate function, makes of them.

    Attributes:
        collate: turns what the storage returns into a batch; None leaves it as it is.
        batch: the batch; None until it is read, on the first access to a field.
    """

    collate: Callable[[Any], TensorDictBase] | None = None
    batch: TensorDictBase | None = None

    def __missing__(self, key: NestedKey) -> torch.Tensor:
        batch = self._whole()
        found: torch.Tensor | None = batch.get(key, None)
        if found is None:
            raise _no_field(key, batch)
        return found

    def names(self) -> tuple[NestedKey, ...]:
        """Returns the keys of all fields, those of the batch once it is read."""
        return super().names() if self.batch is None else _names_of(self.batch)

    def follow(self, slots: torch.Tensor) -> None:
        """Takes the entries under `next` from other rows from now on, `[*B]` int64."""
        self.following, self.batch = slots, None

    def tensordict(self, entries: Mapping[NestedKey, torch.Tensor]) -> TensorDictBase:
        """Returns the batch, with `entries` added or replacing its own."""
        batch = self._whole()
        for key, value in entries.items():
            set_entry(batch, key, value)
        return batch

    def _whole(self) -> TensorDictBase:
        if self.batch is None:
            self.batch = self._read(self.slots)
            if self.following is not None:
                set_entry(self.batch, "next", self._read(self.following).get("next"))
        return self.batch

    def _read(self, slots: torch.Tensor) -> TensorDictBase:
        rows = self.storage.get(slots)
        return rows if self.collate is None else self.collate(rows)


class FollowingFields(SingleFields):
    """The rows that supply the entries under `next` of other rows.

    Args:
        stored: those other rows.
    """

    def __init__(self, stored: StoredFields) -> None:
        self.storage, self.device = stored.storage, stored.device
        self.slots = stored.following  # type: ignore[assignment]
        self._stored = stored

    def __missing__(self, key: NestedKey) -> torch.Tensor:
        return self._stored[key] if key[0] == "next" else super().__missing__(key)


def stored_fields(
    storage: PackedStorage,
    slots: torch.Tensor,
    collate: Callable[[Any], TensorDictBase] | None = None,
) -> StoredFields:
    """Returns the fields of rows.

    Args:
        storage: holds the rows.
        slots: int64 of shape B on its device.
        collate: turns what the storage returns into a batch; None leaves it as it is.
    """
    device = getattr(storage, "out_device", None) or storage.device
    if collate is not None:
        rows = BatchedFields(storage, slots, device)
        rows.collate = collate
        return rows
    # Rows that go to another device are sent in one copy.
    is_long = storage.layout.row_nbytes > _SHORT  # type: ignore[union-attr]
    kind = SingleFields if is_long and not storage.is_sent_away else _WholeRows
    return kind(storage, slots, device)


def read_fields(
    storage: PackedStorage,
    index: torch.Tensor,
    keys: Collection[NestedKey],
    device: torch.device | None = None,
    following: torch.Tensor | None = None,
) -> dict[NestedKey, torch.Tensor]:
    """Gathers some fields of a storage.

    Args:
        storage: holds the rows.
        index: int64 slots of any shape B.
        keys: the fields.
        device: where they are sent; None leaves them on the storage's.
        following: as in `PackedStorage.read`, whose rows these then are.

    Returns:
        key -> `[*B, *shape]` in new memory.

    Raises:
        KeyError: no such field; the message lists the existing ones.
    """
    found = storage.read(index, keys, following)
    if device is not None and device != index.device:
        found = {key: on_device(field, device) for key, field in found.items()}
    return found


def _names_of(rows: TensorDictBase) -> tuple[NestedKey, ...]:
    return tuple(rows.keys(include_nested=True, leaves_only=True))


def _no_field(key: NestedKey, rows: TensorDictBase) -> KeyError:
    there = sorted(_names_of(rows), key=str)
    return KeyError(f"the rows have no field {unravel_key(key)!r}; they have {there}.")
