"""Draws rows in proportion to their priorities, in O(log N), on any device.

A `PriorityTree` holds a column of priorities, and the sums and minima over it. It has two
implementations that draw the same leaves from the same random numbers: TorchRL's compiled sum tree on
the CPU where it loads, and plain PyTorch everywhere else. A `PriorityTable` is a tree as a sampler
needs it: by slot, with new rows, late reports and wrong ones.
"""

from trl_storages.priority_tree.base import ABSENT, PriorityTree
from trl_storages.priority_tree.choice import has_native_tree, priority_tree
from trl_storages.priority_tree.lane_order import LaneOrder
from trl_storages.priority_tree.levels import LevelTree
from trl_storages.priority_tree.native import NativeTree
from trl_storages.priority_tree.table import Normalization, PriorityTable

__all__ = [
    "ABSENT",
    "LaneOrder",
    "LevelTree",
    "NativeTree",
    "Normalization",
    "PriorityTable",
    "PriorityTree",
    "has_native_tree",
    "priority_tree",
]
