"""Operations on rows, ring and trees, implemented twice: in compiled loops and in tensor operations.

`host` has compiled loops over arrays, for rows on the CPU or on disk. `device` has the same names in
tensor operations: for any device and without synchronising with the host, but for files and for rows
that are overwritten in place. On the CPU, results are bit-identical.
`backend` chooses between them, once for each component; nothing outside of this package does.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import torch

from trl_storages.callers import warn_caller

if TYPE_CHECKING:
    from trl_storages.kernels import device as tensor_operations

__all__ = ["Backend", "backend"]

_VARIABLE = "TRL_STORAGES_BACKEND"
_CHOICES = ("numba", "torch")


class Backend(Protocol):
    """What both modules provide. For type checkers, the classes of `device` stand for both."""

    Commits: type[tensor_operations.Commits]
    FrameTable: type[tensor_operations.FrameTable]
    MarkedRows: type[tensor_operations.MarkedRows]
    NewRows: type[tensor_operations.NewRows]
    PriorityWords: type[tensor_operations.PriorityWords]
    RawPriorities: type[tensor_operations.RawPriorities]
    Ring: type[tensor_operations.Ring]
    RowTable: type[tensor_operations.RowTable]
    SharedTable: type[tensor_operations.SharedTable]
    SumTree: type[tensor_operations.SumTree]

    def checksums(
        self, rows: torch.Tensor, marks: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Returns the checksums `[n]` of rows `[n, W]`, all int64."""

    def fold(
        self, rewards: torch.Tensor, length: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns Σ weights[i] · rewards[i] over i < length, `[*B]`, of `[n, *B]`."""

    def orders_stores(self) -> bool:
        """Returns whether other processes see stores in order."""


def backend(device: torch.device | str) -> Backend:
    """Returns the module with the operations for tensors on `device`.

    That is `kernels.host` for the CPU and `kernels.device` for any other device. With
    `TRL_STORAGES_BACKEND=torch` in the environment, or where numba can't be imported, it is
    `kernels.device` for the CPU too.

    Raises:
        ValueError: `TRL_STORAGES_BACKEND` is neither "numba" nor "torch".
    """
    from trl_storages.kernels import device as tensor_operations

    if torch.device(device).type != "cpu":
        return tensor_operations
    choice = os.environ.get(_VARIABLE, "numba")
    if choice not in _CHOICES:
        raise ValueError(f"{_VARIABLE} must be one of {_CHOICES}, got {choice!r}.")
    return tensor_operations if choice == "torch" else _host() or tensor_operations


@cache
def _host() -> Backend | None:
    """Returns the compiled operations, or None without numba, of which it warns once."""
    try:
        from trl_storages.kernels import host
    except ImportError as error:
        warn_caller(
            f"numba can't be imported ({error}), so that rows on the CPU are worked on in tensor "
            "operations, several times slower; `pip install numba` mends it, TRL_STORAGES_BACKEND=torch "
            "says that it is meant.",
            RuntimeWarning,
        )
        return None
    return cast("Backend", host)
