"""A TorchRL storage of streams of observations, and views of its transitions."""

from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.storage.rows import BatchRows, Rows
from trl_storages.storage.view import StorageView

__all__ = ["BatchRows", "PackedStorage", "Rows", "StorageView"]
