"""No library: NumPy gathers drawn rows of each column, the least that separate arrays allow."""

import numpy as np

from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import Buffer

TITLE = "by column"


class Uniform(Buffer):
    """Uniform draws from a ring of plain arrays."""

    def __init__(self, columns: Columns, capacity: int):
        self.columns = {
            name: np.zeros((capacity, *column.shape[1:]), column.dtype)
            for name, column in columns.items()
        }
        self.capacity, self.cursor = capacity, 0
        self.rng = np.random.default_rng(0)
        self.write(columns)

    @staticmethod
    def prepare(rows: Columns) -> Columns:
        return rows

    def write(self, prepared: Columns) -> None:
        num_rows = len(prepared["done"])
        slots = (self.cursor + np.arange(num_rows)) % self.capacity
        for name, column in self.columns.items():
            column[slots] = prepared[name]
        self.cursor += num_rows

    def sample(self, batch_size: int) -> Columns:
        slots = self.rng.integers(0, min(self.cursor, self.capacity), batch_size)
        return {name: column.take(slots, 0) for name, column in self.columns.items()}

    @staticmethod
    def columns_of(batch: Columns) -> Columns:
        return batch


WORKS = {"uniform": Uniform, "n_step": Uniform, "pixels": Uniform}
