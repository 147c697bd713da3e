"""What a benchmark asks of a library's replay buffer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.data import Columns

__all__ = ["Buffer", "as_columns"]

FLAGS = ("reward", "terminated", "truncated", "done")


def as_columns(batch: Mapping[str, Any]) -> Columns:
    """Returns tensors or arrays of any library as arrays, rewards and flags as `[B]`."""
    columns = {}
    for name, values in batch.items():
        array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        columns[name] = array.reshape(-1) if name in FLAGS else array
    return columns


class Buffer(ABC):
    """A replay buffer of one library, filled with transitions.

    Args:
        columns: the transitions to fill it with, in time order.
        capacity: how many it has room for, at least as many as given.

    Attributes:
        device: where its batches arrive, as torch names it. Those of `ON_CUDA` heed it.
        directory: where the rows are; None is in memory. Only this package heeds it.
        num_lanes: E, how many environments write at once, where the work is that of lanes.
    """

    device: str = "cpu"
    directory: Path | None = None
    num_lanes: int = 1

    @abstractmethod
    def __init__(self, columns: Columns, capacity: int): ...

    @classmethod
    def configured(cls, **attributes: Any) -> type["Buffer"]:
        """Returns the same adapter with other attributes."""
        return type(cls.__name__, (cls,), attributes)

    @staticmethod
    @abstractmethod
    def prepare(rows: Columns) -> Any:
        """Turns new rows `[S, ...]` into what `write` takes; this is never timed."""

    @abstractmethod
    def write(self, prepared: Any) -> None:
        """Adds rows, over the oldest ones."""

    @abstractmethod
    def sample(self, batch_size: int) -> Any:
        """Draws a batch of tensors (arrays, where the library knows no tensors)."""

    @staticmethod
    def columns_of(batch: Any) -> Columns:
        """Names the parts of a batch as the data does, so that a test can look at them."""
        return as_columns(batch)
