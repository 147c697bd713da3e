"""No library: one gather of contiguous rows, as many bytes as a batch has. Nothing can be faster."""

import numpy as np

from tests.benchmarks.data import SEQUENCE_STEPS, Columns
from tests.benchmarks.peers.base import Buffer


class Raw(Buffer):
    """Uniform draws from a ring of rows, each the bytes of its fields one after another."""

    def __init__(self, columns: Columns, capacity: int):
        # In order of size, so that each field begins at a multiple of its own.
        names = sorted(columns, key=lambda name: -columns[name].dtype.itemsize)
        layout = [(name, columns[name].dtype, columns[name].shape[1:]) for name in names]
        size = np.dtype(layout).itemsize
        self.dtype = np.dtype([*layout, ("padding", np.uint8, (-size % 8,))])
        self.rows = np.zeros(capacity, self.dtype)
        self.bytes = self.rows.view(np.int64).reshape(capacity, -1)
        self.capacity, self.cursor = capacity, 0
        self.rng = np.random.default_rng(0)
        for name, column in columns.items():
            self.rows[name][: len(column)] = column
        self.cursor = len(columns["done"])

    @staticmethod
    def prepare(rows: Columns) -> Columns:
        return rows

    def write(self, prepared: Columns) -> None:
        num_rows = len(prepared["done"])
        slots = (self.cursor + np.arange(num_rows)) % self.capacity
        for name, rows in prepared.items():
            self.rows[name][slots] = rows
        self.cursor += num_rows

    def slots(self, num_rows: int) -> np.ndarray:
        return self.rng.integers(0, min(self.cursor, self.capacity), num_rows)

    def sample(self, batch_size: int) -> np.ndarray:
        return self.bytes.take(self.slots(batch_size), 0).view(self.dtype)[:, 0]

    @staticmethod
    def columns_of(batch: np.ndarray) -> Columns:
        return {name: batch[name] for name in batch.dtype.names if name != "padding"}


class Sequences(Raw):
    """Stretches of rows, whatever their episodes."""

    def slots(self, num_rows: int) -> np.ndarray:
        first = super().slots(num_rows // SEQUENCE_STEPS)
        following = first[:, None] + np.arange(SEQUENCE_STEPS)
        return following.ravel() % min(self.cursor, self.capacity)


WORKS = {
    "uniform": Raw,
    "her": Raw,
    "n_step": Raw,
    "priorities": Raw,
    "recent": Raw,
    "sequences": Sequences,
}
