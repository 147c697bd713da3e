"""Compiled loops over arrays, for what lies on the CPU or on disk."""

from trl_storages.kernels.host.disk import (
    Commits,
    MarkedRows,
    PriorityWords,
    checksums,
    fence,
    orders_stores,
)
from trl_storages.kernels.host.frames import FrameTable
from trl_storages.kernels.host.lane_order import LaneOrder
from trl_storages.kernels.host.raw_priorities import RawPriorities
from trl_storages.kernels.host.ring import Ring
from trl_storages.kernels.host.rows import RowTable, fold
from trl_storages.kernels.host.sharing import SharedTable
from trl_storages.kernels.host.tree import SumTree
from trl_storages.kernels.host.writing import NewRows

__all__ = [
    "Commits",
    "FrameTable",
    "LaneOrder",
    "MarkedRows",
    "NewRows",
    "PriorityWords",
    "RawPriorities",
    "Ring",
    "RowTable",
    "SharedTable",
    "SumTree",
    "checksums",
    "fence",
    "fold",
    "orders_stores",
]
