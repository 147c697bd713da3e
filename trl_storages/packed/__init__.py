"""A TorchRL storage of streams, and the view of drawn rows."""

from trl_storages.packed.rows import BatchRows, Rows
from trl_storages.packed.storage import PackedStorage
from trl_storages.packed.view import StorageView

__all__ = ["BatchRows", "PackedStorage", "Rows", "StorageView"]
