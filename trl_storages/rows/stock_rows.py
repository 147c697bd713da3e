"""The rows of TorchRL's own storages as they are saved: checked first, then copied into place.

Letters: N rows.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Storage, TensorStorage

from trl_storages.rows.entries import nested_sizes, tensors_of
from trl_storages.rows.layout import Layout
from trl_storages.rows.packed import PackedStorage
from trl_storages.saved.files import copy_in_pieces
from trl_storages.saved.parts import SavedPart, SavedState, StockPart

__all__ = ["StockRows", "rows_part"]


class StockRows(SavedPart):
    """A storage of TorchRL's own that holds a TensorDict, or nothing yet.

    Args:
        storage: the storage to save.
    """

    def __init__(self, storage: TensorStorage) -> None:
        self._rows = storage

    def _layout(self) -> Layout | None:
        if not self._rows.initialized:
            return None
        rows = self._rows._storage
        return Layout.of(tensors_of(rows), 1, nested_sizes(rows, 1))

    def state_dict(self) -> dict[str, Any]:
        """Returns the layout, the fields `[N, ...]` in its order (not copies), and the number of rows."""
        storage, layout, fields = self._rows, self._layout(), {}
        if layout is not None:
            found = tensors_of(storage._storage)
            for place, field in enumerate(layout.fields):
                # Memory-mapped tensors are of a subclass.
                fields[str(place)] = found[field.key].as_subclass(torch.Tensor)
        json = None if layout is None else layout.to_json()
        return {"layout": json, "fields": fields, "_len": storage._len}

    def read_state(self, state_dict: Any) -> dict[NestedKey, torch.Tensor]:
        """Returns the fields `[N, ...]` of a saved state; empty if it has no rows.

        Raises:
            KeyError, TypeError, ValueError: as `check_state`.
        """
        what, size = f"the saved {type(self._rows).__name__}", self._rows.max_size
        saved = SavedState(state_dict, what, ("layout", "fields", "_len"))
        layout, own = None, self._layout()
        if saved["layout"] is not None:
            layout = Layout.from_json(saved["layout"])
        saved.integer("_len", 0, 0 if layout is None else size)
        if layout and own and layout.described != own.described:
            raise ValueError(
                "the saved rows are of other fields than those of this storage: "
                f"{layout.unlike(own.described)}. Nothing was changed."
            )
        named = {str(place): field for place, field in enumerate(layout.fields if layout else ())}
        fields = SavedState(saved["fields"], f"'fields' of {what}", [*named])
        hint = "the size of the storage must be that of the saved one"
        return {
            field.key: fields.tensor(name, field.dtype, (size, *field.shape), hint)
            for name, field in named.items()
        }

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a checked state."""
        storage, fields = self._rows, self.read_state(state)
        if fields:
            if not storage.initialized:
                layout = Layout.from_json(state["layout"])
                row = torch.zeros(1, layout.num_words, dtype=torch.int64, device=storage.device)
                storage._init(layout.tensordict(row)[0])
            copy_in_pieces(fields, tensors_of(storage._storage), progress=progress)
        storage._len = state["_len"]
        storage._bump_mutation_revision()


def rows_part(storage: Storage) -> SavedPart:
    """Returns any storage as a part that can be saved."""
    if isinstance(storage, PackedStorage):
        return storage
    if isinstance(storage, TensorStorage) and (
        not storage.initialized or isinstance(storage._storage, TensorDictBase)
    ):
        return StockRows(storage)
    return StockPart(storage)
