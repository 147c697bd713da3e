"""rlox: `ReplayBuffer`, `HERBuffer`, `PrioritizedReplayBuffer`, written in Rust.

An observation is one flat array, so that the parts of a dict are joined before a step is written.
"""

import itertools
from typing import Any

import numpy as np
import rlox

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import Buffer, as_columns

SIZES = data.FLAT_SIZE, data.ACTION_SIZE
NAMES = {
    "obs": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
    "next_obs": "next_observation",
}


class Flat(Buffer):
    """Uniform draws, of at most as many rows as are stored."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer, self.seeds = self.make(capacity), itertools.count()
        self.write(self.prepare(columns))

    def make(self, capacity: int) -> Any:
        return rlox.ReplayBuffer(capacity, *SIZES)

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        flat = data.flat_columns(rows) if "achieved_goal" in rows else rows
        columns = (flat[name] for name in NAMES.values())
        return [*zip(*(it.tolist() if it.ndim == 1 else it for it in columns), strict=True)]

    def write(self, prepared: list[tuple]) -> None:
        for step in prepared:
            self.buffer.push(*step)

    def sample(self, batch_size: int) -> dict[str, np.ndarray]:
        return self.buffer.sample(batch_size, next(self.seeds))

    @staticmethod
    def columns_of(batch: dict[str, np.ndarray]) -> Columns:
        return as_columns({NAMES[name]: batch[name] for name in NAMES})


class Uniform(Flat):
    """The same, of the joined parts of an observation."""

    @staticmethod
    def columns_of(batch: dict[str, np.ndarray]) -> Columns:
        return data.split_columns(Flat.columns_of(batch))


class Hindsight(Uniform):
    """Hindsight at sample time, for about four rows of five; the reward is that of a distance."""

    def make(self, capacity: int) -> Any:
        goals = data.GOAL_SIZE, data.OBSERVATION_SIZE, data.OBSERVATION_SIZE + data.GOAL_SIZE
        return rlox.HERBuffer(capacity, *SIZES, *goals, "future", data.HINDSIGHT_GOALS, 0.05)

    def write(self, prepared: list[tuple]) -> None:
        for obs, action, reward, terminated, truncated, after in prepared:
            self.buffer.push(obs, after, action, reward, terminated, truncated)

    def sample(self, batch_size: int) -> dict[str, np.ndarray]:
        share = data.HINDSIGHT_GOALS / (data.HINDSIGHT_GOALS + 1)
        return self.buffer.sample(batch_size, share, next(self.seeds))


class Prioritized(Flat):
    """A sample is a draw and the update of its priorities."""

    def make(self, capacity: int) -> Any:
        return rlox.PrioritizedReplayBuffer(
            capacity, *SIZES, data.PRIORITY_ALPHA, data.PRIORITY_BETA
        )

    def sample(self, batch_size: int) -> dict[str, np.ndarray]:
        batch = super().sample(batch_size)
        self.buffer.update_priorities(batch["indices"], np.linspace(0.1, 1, batch_size))
        return batch


class Extend(Uniform):
    """Writes of several rows at once, which the buffer wants flat."""

    @staticmethod
    def prepare(rows: Columns) -> list[np.ndarray]:
        flat = data.flat_columns(rows)
        names = ("observation", "next_observation", "action", "reward", "terminated", "truncated")
        columns = [flat[name].reshape(-1) for name in names]
        return [it.astype(np.uint8) if it.dtype == bool else it for it in columns]

    def write(self, prepared: list[np.ndarray]) -> None:
        self.buffer.push_batch(*prepared)


WORKS = {
    "uniform": Uniform,
    "her": Hindsight,
    "priorities": Prioritized,
    "record": Uniform,
    "extend": Extend,
}
