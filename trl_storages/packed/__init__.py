"""A TorchRL storage of streams, and the view of drawn rows."""

from trl_storages.packed.row_view import RowView
from trl_storages.packed.storage import PackedStorage, checked_fields

__all__ = ["PackedStorage", "RowView", "checked_fields"]
