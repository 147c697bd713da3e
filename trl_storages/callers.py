"""Warnings that point at the user's line that caused them."""

from __future__ import annotations

import inspect
import warnings

__all__ = ["warn_caller"]

#: Packages whose frames are skipped.
_BETWEEN = {"trl_storages", "torchrl", "tensordict", "torch", "numba", "importlib"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest line outside of this package and the libraries that call it.

    Args:
        message: the message.
        category: the warning category.
    """
    depth, frame = 0, inspect.currentframe()
    while frame is not None:
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            break
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=depth)
