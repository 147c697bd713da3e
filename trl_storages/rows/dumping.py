"""Dumps of rows, in TorchRL's files: copied piece by piece, so that one sees how far it is.

Letters: N rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import LazyTensorStorage, TensorStorageCheckpointer

from trl_storages.progress_bar import tracker
from trl_storages.rows.entries import tensors_of
from trl_storages.saved import DumpFolder, SavedState, check_names

__all__ = ["RowsCheckpointer", "copy_fields", "read_rows"]

_PIECE = 1 << 26  # bytes
_METADATA = "storage_metadata.json"


class RowsCheckpointer(TensorStorageCheckpointer):
    """What TorchRL's checkpointer of tensors does, for the fields of packed rows.

    Attributes:
        progress: whether to show how far it is.
    """

    progress = False

    @contextmanager
    def showing(self, progress: bool) -> Iterator[None]:
        """Shows how far it is, or not, for the time being.

        Raises:
            ImportError: tqdm is not installed, and progress shall be shown.
        """
        tracker("", progress)
        self.progress = progress
        try:
            yield
        finally:
            self.progress = False

    def dumps(self, storage: Any, path: str | Path) -> None:
        """Saves the fields of a storage, each in a file of its own.

        Raises:
            RuntimeError: nothing was written to the storage yet.
            ValueError: a field has a name that no file can have. Nothing is written then.
        """
        path = Path(path)
        if storage.initialized:
            check_names(storage.layout.keys)
        if self._save_hooks or storage.device.type != "cpu" or not storage.initialized:
            super().dumps(storage, path)
            return
        # No dump, should this be interrupted.
        (path / _METADATA).unlink(missing_ok=True)
        fields = storage._storage
        for file in path.rglob("*.memmap"):
            file.unlink()  # of an older dump, of more rows perhaps
        target = tensors_of(fields.memmap_like(path))
        copy_fields(tensors_of(fields), target, storage.row_nbytes, "saving rows", self.progress)
        metadata = {"metadata": {}, "is_pytree": False, "len": storage._len}
        (path / _METADATA).write_text(json.dumps(metadata))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Restores what `dumps` saved; see `PackedStorage.loads`."""
        storage.loads(path)


def copy_fields(
    source: Mapping[NestedKey, torch.Tensor],
    target: Mapping[NestedKey, torch.Tensor],
    row_nbytes: int,
    what: str,
    progress: bool,
) -> None:
    """Copies fields `[N, ...]` piece by piece.

    Args:
        source: key -> tensor.
        target: the same keys.
        row_nbytes: bytes that a row takes, about.
        what: stands before the bar that shows how far it is.
        progress: whether to show it.
    """
    num_rows = len(next(iter(source.values())))
    piece = max(_PIECE // max(row_nbytes, 1), 1)
    for start in tracker(what, progress)(range(0, num_rows, piece)):
        size = min(piece, num_rows - start)
        for key, there in target.items():
            there.narrow(0, start, size).copy_(source[key].narrow(0, start, size))


def read_rows(storage: Any, folder: DumpFolder) -> tuple[TensorDictBase, int]:
    """Returns the rows that a dump holds of a storage of tensors, `[N]`, and how many of them count.

    Args:
        storage: one like it was dumped; not changed.
        folder: where it was dumped to.

    Raises:
        ValueError: a file is missing, cut or damaged.
    """
    checkpointer = storage.checkpointer
    what = f"{folder.path / _METADATA}"
    if type(checkpointer) not in (RowsCheckpointer, TensorStorageCheckpointer):
        # Others have files of their own, and read them in their own way.
        trial = LazyTensorStorage(storage.max_size)
        try:
            checkpointer.loads(trial, folder.path)
        except Exception as error:
            raise ValueError(
                f"{folder.path} must be what {type(checkpointer).__name__} dumped: {error!r}. Nothing "
                "was changed."
            ) from error
        return trial._storage, len(trial)
    saved = SavedState(folder.json(_METADATA), what, ("metadata", "is_pytree", "len"))
    if saved.flag("is_pytree") or saved["metadata"] != {}:
        raise saved.error("is_pytree", "False, as rows are a TensorDict", saved["metadata"])
    rows: TensorDictBase = folder.tensordict()
    for hook in checkpointer._load_hooks:
        rows = hook(rows, out=None)
    return rows, saved.integer("len")
