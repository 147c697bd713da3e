"""Where the rows live."""

from trl_storages.storages.layout import Field, Layout
from trl_storages.storages.packed import PackedStorage, read_fields

__all__ = ["Field", "Layout", "PackedStorage", "read_fields"]
