"""A TorchRL storage of streams, and the view of drawn rows."""

from trl_storages.packed.row_view import RowView
from trl_storages.packed.storage import PackedStorage

__all__ = ["PackedStorage", "RowView"]
