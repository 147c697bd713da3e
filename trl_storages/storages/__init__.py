"""Where the rows live."""

from trl_storages.storages.directory import PROGRESS
from trl_storages.storages.dumping import RowsCheckpointer
from trl_storages.storages.durable_lanes import DurableLanes
from trl_storages.storages.entries import Nested, nested_sizes, tensors_of
from trl_storages.storages.fields import StoredFields, field_keys, read_fields
from trl_storages.storages.following import FollowingStorage
from trl_storages.storages.journal import Journal, Steps
from trl_storages.storages.layout import Field, Layout, nest
from trl_storages.storages.packed import PackedStorage
from trl_storages.storages.priority_column import PriorityColumn
from trl_storages.storages.row_view import RowView
from trl_storages.storages.staging import StepBlock, as_array, pairs_of, stage
from trl_storages.storages.stock_rows import load_rows_state, read_rows_dump, read_rows_state

__all__ = [
    "PROGRESS",
    "DurableLanes",
    "Field",
    "FollowingStorage",
    "Journal",
    "Layout",
    "Nested",
    "PackedStorage",
    "PriorityColumn",
    "RowView",
    "RowsCheckpointer",
    "StepBlock",
    "Steps",
    "StoredFields",
    "as_array",
    "field_keys",
    "load_rows_state",
    "nest",
    "nested_sizes",
    "pairs_of",
    "read_fields",
    "read_rows_dump",
    "read_rows_state",
    "stage",
    "tensors_of",
]
