"""The operations of `kernels.host` in tensor operations; those of tables also run on other devices."""

from trl_storages.kernels.device.disk import (
    Commits,
    MarkedRows,
    PriorityWords,
    checksums,
    orders_stores,
)
from trl_storages.kernels.device.frames import FrameTable
from trl_storages.kernels.device.raw_priorities import RawPriorities
from trl_storages.kernels.device.ring import Ring
from trl_storages.kernels.device.rows import RowTable, fold
from trl_storages.kernels.device.sharing import SharedTable
from trl_storages.kernels.device.tree import SumTree
from trl_storages.kernels.device.writing import NewRows

__all__ = [
    "Commits",
    "FrameTable",
    "MarkedRows",
    "NewRows",
    "PriorityWords",
    "RawPriorities",
    "Ring",
    "RowTable",
    "SharedTable",
    "SumTree",
    "checksums",
    "fold",
    "orders_stores",
]
