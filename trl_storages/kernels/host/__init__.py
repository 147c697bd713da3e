"""Compiled loops over arrays, for what lies on the CPU or on disk."""

from trl_storages.kernels.host.lane_order import LaneOrder
from trl_storages.kernels.host.raw_priorities import RawPriorities
from trl_storages.kernels.host.ring import Ring
from trl_storages.kernels.host.rows import RowTable, fold, join
from trl_storages.kernels.host.tree import SumTree

__all__ = ["LaneOrder", "RawPriorities", "Ring", "RowTable", "SumTree", "fold", "join"]
