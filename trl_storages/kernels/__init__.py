"""Operations on rows, ring and trees, implemented twice: in compiled loops and in tensor operations.

`host` has compiled loops over arrays, for rows on the CPU or on disk. `device` has the same names in
tensor operations, but those of directories: for any device and without synchronising with the host, but
for rows that are overwritten in place. On the CPU, results are bit-identical.
`backend` chooses between them, once for each component.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

if TYPE_CHECKING:
    from trl_storages.kernels import device as tensor_operations

__all__ = ["Backend", "backend"]


class Backend(Protocol):
    """What both modules provide. For type checkers, the classes of `device` stand for both."""

    FrameTable: type[tensor_operations.FrameTable]
    NewRows: type[tensor_operations.NewRows]
    RawPriorities: type[tensor_operations.RawPriorities]
    Ring: type[tensor_operations.Ring]
    RowTable: type[tensor_operations.RowTable]
    SharedTable: type[tensor_operations.SharedTable]
    SumTree: type[tensor_operations.SumTree]

    # Of `host` alone, for directories.
    Commits: Any
    MarkedRows: Any
    PriorityWords: Any
    checksums: Any

    def fold(
        self, rewards: torch.Tensor, length: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns Σ weights[i] · rewards[i] over i < length, `[*B]`, of `[n, *B]`."""


def backend(device: torch.device | str) -> Backend:
    """Returns the module with the operations for tensors on `device`.

    That is `kernels.host` for the CPU and `kernels.device` for any other device. With
    `TRL_STORAGES_BACKEND=torch` in the environment it is `kernels.device` for the CPU too.
    """
    if torch.device(device).type != "cpu" or os.environ.get("TRL_STORAGES_BACKEND") == "torch":
        from trl_storages.kernels import device as tensor_operations

        return cast("Backend", tensor_operations)
    from trl_storages.kernels import host

    return cast("Backend", host)
