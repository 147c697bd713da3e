"""Minari's module, and the episodes that are read or written at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["grouped", "minari_module"]

# Steps of the episodes that are read or written at once.
_BLOCK = 1 << 16


def minari_module(what: str) -> Any:
    """Returns the module, with all that `what` needs.

    Raises:
        ImportError: Minari is not installed.
    """
    try:
        import minari.data_collector
    except ImportError as error:
        raise ImportError(
            f"{what} needs Minari: pip install 'trl-storages[minari]' (got {error})."
        ) from error
    return minari


def grouped(lengths: Sequence[int]) -> list[list[int]]:
    """Returns numbers of episodes that are of about a block together."""
    groups: list[list[int]] = []
    num_steps = _BLOCK
    for number, length in enumerate(lengths):
        if num_steps >= _BLOCK:
            groups.append([])
            num_steps = 0
        groups[-1].append(number)
        num_steps += length
    return groups
