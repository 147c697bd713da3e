"""The saved rows of TorchRL's own storages: checked first, then copied into place.

Letters: N rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import Storage, TensorStorage

from trl_storages.rows.dumping import copy_fields, read_rows
from trl_storages.rows.entries import tensors_of
from trl_storages.rows.layout import Layout
from trl_storages.rows.packed import PackedStorage
from trl_storages.saved import DumpFolder, SavedState, check_part, read_part

__all__ = ["load_rows_state", "read_rows_dump", "read_rows_state"]


def read_rows_state(storage: Storage, state: Any) -> dict[NestedKey, torch.Tensor]:
    """Returns the fields `[N, ...]` of a saved state, after it was checked whole.

    Args:
        storage: that it is to be loaded into; not changed.
        state: what a storage saved.

    Returns:
        key -> tensor; none if no row was saved, or the rows are no tensors.

    Raises:
        KeyError, TypeError, ValueError: the storage can't take it. The message says what is wrong.
    """
    if isinstance(storage, PackedStorage):
        return storage.read_state(state)
    if not _holds_tensors(storage):
        check_part(storage, state)
        return {}
    saved = SavedState(
        state, f"the saved {type(storage).__name__}", ("_storage", "initialized", "_len")
    )
    if not saved.flag("initialized"):
        saved.integer("_len", 0, 0)
        return {}
    saved.integer("_len", 0, storage.max_size)
    rows = _tensordict(saved)
    fields = tensors_of(rows)
    found, size = Layout.of(fields, batch_dims=1), list(rows.batch_size)
    if size != [storage.max_size]:
        raise ValueError(
            f"the saved storage has {size} rows, this one {storage.max_size}: its size must be the same. "
            "Nothing was changed."
        )
    if storage.initialized:
        own = Layout.of(tensors_of(storage._storage), batch_dims=1)
        if found.described != own.described:
            raise ValueError(
                f"the saved rows are {found}, this storage's are {own}. Nothing was changed."
            )
    return fields


def load_rows_state(storage: Storage, state: dict[str, Any]) -> None:
    """Restores the rows of a state that was checked."""
    if isinstance(storage, PackedStorage) or not _holds_tensors(storage):
        storage.load_state_dict(state)
        return
    fields = read_rows_state(storage, state)
    if fields:
        if not storage.initialized:
            first = {key: value[0] for key, value in fields.items()}
            storage._init(TensorDict(first, []))
        own = tensors_of(storage._storage)
        copy_fields(fields, own, Layout.of(own, batch_dims=1).row_nbytes, "loading rows", False)
    storage._len = state["_len"]
    storage._bump_mutation_revision()


def read_rows_dump(storage: Storage, folder: DumpFolder, name: str) -> Any:
    """Returns the state that a dump holds of a storage, unchecked.

    Raises:
        ValueError: a file is missing, cut or damaged.
    """
    if isinstance(storage, PackedStorage):
        return storage.read_dump(folder.folder(name))
    if not _holds_tensors(storage):
        return read_part(storage, folder, name)
    rows, length = read_rows(storage, folder.folder(name))
    return {"_storage": rows, "initialized": True, "_len": length}


def _holds_tensors(storage: Storage) -> bool:
    return isinstance(storage, TensorStorage) and (
        not storage.initialized or isinstance(storage._storage, TensorDictBase)
    )


def _tensordict(saved: SavedState) -> TensorDictBase:
    rows = saved["_storage"]
    if isinstance(rows, Mapping) and not isinstance(rows, TensorDictBase):
        try:
            # It would forget how its entries are nested if it were copied to a plain dict.
            rows = TensorDict().load_state_dict(copy.copy(rows), strict=False)
        except Exception as error:
            raise saved.error("_storage", "the state of a TensorDict", repr(error)) from error
    if not isinstance(rows, TensorDictBase) or rows.ndim != 1 or rows.is_empty():
        raise saved.error("_storage", "a TensorDict of rows", type(rows).__name__)
    return rows
