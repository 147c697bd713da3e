"""The operations of `kernels.host` in tensor operations, for any device, without waiting for the host."""

from trl_storages.kernels.device.lane_order import LaneOrder
from trl_storages.kernels.device.raw_priorities import RawPriorities
from trl_storages.kernels.device.ring import Ring
from trl_storages.kernels.device.rows import RowTable, fold, join
from trl_storages.kernels.device.tree import SumTree

__all__ = ["LaneOrder", "RawPriorities", "Ring", "RowTable", "SumTree", "fold", "join"]
