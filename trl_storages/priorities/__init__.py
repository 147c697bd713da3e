"""The priorities of rows, and draws in proportion to them.

A `PriorityTable` holds the raw priorities by slot, and a sum tree from `trl_storages.kernels` derived
from them.
"""

from trl_storages.kernels.tree_tables import ABSENT
from trl_storages.priorities.table import Normalization, PriorityTable

__all__ = ["ABSENT", "Normalization", "PriorityTable"]
