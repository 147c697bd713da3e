"""Compiled loops over arrays, for data on the CPU or on disk."""

from trl_storages.kernels.host.disk import (
    Commits,
    MarkedRows,
    PriorityWords,
    checksums,
)
from trl_storages.kernels.host.frames import FrameTable
from trl_storages.kernels.host.raw_priorities import RawPriorities
from trl_storages.kernels.host.ring import Ring
from trl_storages.kernels.host.rows import RowTable, fold
from trl_storages.kernels.host.sharing import SharedTable
from trl_storages.kernels.host.tree import SumTree
from trl_storages.kernels.host.writing import NewRows

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
]
