"""Where the rows live."""

from trl_storages.storages.layout import Field, Layout, Span, nest
from trl_storages.storages.packed import PackedStorage, field_keys, read_fields

__all__ = ["Field", "Layout", "PackedStorage", "Span", "field_keys", "nest", "read_fields"]
