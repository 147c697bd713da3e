"""What is done to rows, ring and trees: the same operations twice, compiled and in tensor operations.

`host` has compiled loops over arrays, for what lies on the CPU or on disk. `device` has the same names in
tensor operations, for any device, without waiting for the host. Both give the same answers, bit for bit.
`backend` decides which one answers, once for each part; nothing outside of this package asks again.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from trl_storages.callers import warn_caller

if TYPE_CHECKING:
    from trl_storages.kernels import device, host

    # Both have the same methods.
    RowTable = device.RowTable | host.RowTable
    NewRows = device.NewRows | host.NewRows
    PriorityWords = device.PriorityWords | host.PriorityWords

__all__ = ["backend"]

_VARIABLE = "TRL_STORAGES_BACKEND"
_CHOICES = ("numba", "torch")


def backend(device: torch.device | str) -> ModuleType:
    """Returns the module whose operations answer for what lies on `device`.

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
def _host() -> ModuleType | None:
    """Returns the compiled operations, or None where there is no numba; warns of that once."""
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
    return host
