"""Dumps of packed rows, in TorchRL's files: copied piece by piece, so that one sees how far it is.

Letters: N rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorStorageCheckpointer

from trl_storages.progress_bar import tracker

__all__ = ["RowsCheckpointer"]

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
        """
        path = Path(path)
        if self._save_hooks or storage.device.type != "cpu" or not storage.initialized:
            super().dumps(storage, path)
            return
        # No dump, should this be interrupted.
        (path / _METADATA).unlink(missing_ok=True)
        fields = storage._storage
        self._copy(fields, fields.memmap_like(path), storage.row_nbytes, "saving rows")
        metadata = {"metadata": {}, "is_pytree": False, "len": storage._len}
        (path / _METADATA).write_text(json.dumps(metadata))

    def loads(self, storage: Any, path: str | Path) -> None:
        """Restores what `dumps` saved."""
        path = Path(path)
        if self._load_hooks:
            super().loads(storage, path)
            return
        length = json.loads((path / _METADATA).read_text())["len"]
        saved = TensorDict.load_memmap(path, allow_pickle=False)
        if not storage.initialized:
            storage._init(saved[0])
        self._copy(saved, storage._storage, storage.row_nbytes, "loading rows")
        storage._len = length

    def _copy(
        self, source: TensorDictBase, target: TensorDictBase, row_nbytes: int, what: str
    ) -> None:
        num_rows, piece = source.batch_size[0], max(_PIECE // row_nbytes, 1)
        starts = range(0, num_rows, piece)
        leaves = [(target.get(key), leaf) for key, leaf in source.items(True, True)]
        for start in tracker(what, self.progress)(starts):
            size = min(piece, num_rows - start)
            for there, here in leaves:
                there.narrow(0, start, size).copy_(here.narrow(0, start, size))
