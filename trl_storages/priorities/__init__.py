"""The priorities of rows, and draws in proportion to them.

A `PriorityTable` keeps the raw priorities by slot, and derives from them a tree of
`trl_storages.kernels`.
"""

from trl_storages.kernels.tree_tables import ABSENT
from trl_storages.priorities.table import Normalization, PriorityTable

__all__ = ["ABSENT", "Normalization", "PriorityTable"]
