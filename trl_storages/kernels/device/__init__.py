"""The operations of `kernels.host` in tensor operations, for any device, but those of directories."""

from trl_storages.kernels.device.frames import FrameTable
from trl_storages.kernels.device.raw_priorities import RawPriorities
from trl_storages.kernels.device.ring import Ring
from trl_storages.kernels.device.rows import RowTable, fold
from trl_storages.kernels.device.sharing import SharedTable
from trl_storages.kernels.device.tree import SumTree
from trl_storages.kernels.device.writing import NewRows

__all__ = [
    "FrameTable",
    "NewRows",
    "RawPriorities",
    "Ring",
    "RowTable",
    "SharedTable",
    "SumTree",
    "fold",
]
