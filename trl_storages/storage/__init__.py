"""A TorchRL storage of streams, and the view of drawn rows."""

from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.storage.rows import BatchRows, Rows
from trl_storages.storage.view import StorageView

__all__ = ["BatchRows", "PackedStorage", "Rows", "StorageView"]
