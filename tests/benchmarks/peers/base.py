"""What a benchmark asks of a library's replay buffer."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from tests.benchmarks.data import Columns

__all__ = ["Buffer"]


class Buffer(ABC):
    """A replay buffer of one library, filled with transitions.

    Args:
        columns: the transitions to fill it with, in time order.
        capacity: how many it has room for, at least as many as given.
    """

    @abstractmethod
    def __init__(self, columns: Columns, capacity: int): ...

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
    @abstractmethod
    def columns_of(batch: Any) -> dict[str, np.ndarray]:
        """Names the parts of a batch as the data does, so that a test can look at them.

        `reward`, `terminated` and the like as `[B]`, whatever their shape in the library.
        """
