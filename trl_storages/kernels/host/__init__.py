"""Compiled loops over arrays, for what lies on the CPU or on disk."""

from trl_storages.kernels.host.ring import Ring
from trl_storages.kernels.host.rows import RowTable, fold

__all__ = ["Ring", "RowTable", "fold"]
