"""The operations of `kernels.host` in tensor operations, for any device, without waiting for the host."""

from trl_storages.kernels.device.ring import Ring
from trl_storages.kernels.device.rows import RowTable, fold

__all__ = ["Ring", "RowTable", "fold"]
