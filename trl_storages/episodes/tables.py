"""The state of an episode index, as tensors.

Letters: M slots of the ring, E lanes (environments).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Array", "Tables", "module_of", "put", "take"]

Array = Any  # a tensor, or NumPy's view of one


class Tables(NamedTuple):
    """The state of an `EpisodeIndex`: M slots, as many entries for episodes and a void one, E lanes."""

    episode: Array
    """`[M]` the entry of each slot's episode."""
    first: Array
    """`[M + 1]` the first surviving slot of each episode."""
    last: Array
    """`[M + 1]` the last slot of each episode, so far."""
    first_step: Array
    """`[M + 1]` int64, the step of its lane with which the episode began."""
    finished: Array
    """`[M + 1]` bool, whether `done` ended it."""
    begun: Array
    """`[E]` int64, how many episodes the lane has begun."""
    open: Array
    """`[E]` bool, whether the lane's next row continues its last episode."""
    cursors: Array
    """`[E]` int64, steps written to the lane."""
    num_rows: Array
    """`[]` int64, live rows."""


def put(array: Array, index: Array, value: Array) -> None:
    """Writes to an array, converting as NumPy does."""
    array[index] = value.to(array.dtype) if isinstance(array, torch.Tensor) else value


def take(table: Array, index: Array) -> Array:
    """Gathers rows of `table` for an index of any shape; both are tensors, or both NumPy's."""
    if isinstance(index, np.ndarray):
        return table.take(index)
    if index.ndim == 1:
        return table.index_select(0, index)
    return table.index_select(0, index.reshape(-1)).view(index.shape + table.shape[1:])


def module_of(array: Array) -> ModuleType:
    """Returns the module whose functions take the array: NumPy or torch."""
    return np if isinstance(array, np.ndarray) else torch
