"""Rows of transitions: how they are laid out, stored, read and written."""

from trl_storages.rows.entries import Nested, Structure, nested_sizes, tensors_of
from trl_storages.rows.fields import StoredFields, read_fields, stored_fields
from trl_storages.rows.frames import FrameStack, stacked_observations
from trl_storages.rows.layout import Field, Layout
from trl_storages.rows.packed import PackedStorage, check_writable
from trl_storages.rows.row_view import RowView
from trl_storages.rows.saved_rows import Moved
from trl_storages.rows.stacks import Evicted, Stacks
from trl_storages.rows.staging import StepBlock, as_array, pairs_of, stage
from trl_storages.rows.views import nest

__all__ = [
    "Evicted",
    "Field",
    "FrameStack",
    "Layout",
    "Moved",
    "Nested",
    "PackedStorage",
    "RowView",
    "Stacks",
    "StepBlock",
    "StoredFields",
    "Structure",
    "as_array",
    "check_writable",
    "nest",
    "nested_sizes",
    "pairs_of",
    "read_fields",
    "stacked_observations",
    "stage",
    "stored_fields",
    "tensors_of",
]
