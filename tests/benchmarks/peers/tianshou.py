"""tianshou: `ReplayBuffer`, `HERReplayBuffer`, `PrioritizedReplayBuffer`."""

from typing import Any

import numpy as np
import torch
from tianshou.algorithm import Algorithm
from tianshou.data import Batch, HERReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import Buffer, as_columns

FLAGS = ("terminated", "truncated", "done")


def to_batch(rows: Columns) -> Batch:
    now, after = data.observation_of(rows), data.observation_of(rows, "next_")
    now, after = (Batch(it) if isinstance(it, dict) else it for it in (now, after))
    flags = {name: rows[name] for name in FLAGS}
    return Batch(
        obs=now, obs_next=after, act=rows["action"], rew=rows["reward"], info=Batch(), **flags
    )


class Uniform(Buffer):
    """Uniform draws."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity, columns)
        # Row by row takes half a minute for a million; this is what `update` copies from.
        source = ReplayBuffer(len(columns["done"]))
        source.set_batch(to_batch(columns))
        source._size = len(columns["done"])
        self.buffer.update(source)

    def make(self, capacity: int, columns: Columns) -> ReplayBuffer:
        return ReplayBuffer(capacity)

    @staticmethod
    def prepare(rows: Columns) -> list[Batch]:
        return [to_batch(row)[0] for row in data.single_rows(rows)]

    def write(self, prepared: list[Batch]) -> None:
        for step in prepared:
            self.buffer.add(step)

    def sample(self, batch_size: int) -> Batch:
        return self.buffer.sample(batch_size)[0]

    @staticmethod
    def columns_of(batch: Any) -> Columns:
        columns = {"action": batch.act, "reward": batch.rew} | {it: batch[it] for it in FLAGS}
        for before, parts in (("", batch.obs), ("next_", batch.obs_next)):
            named = parts.items() if isinstance(parts, Batch) else [("observation", parts)]
            columns |= {before + part: values for part, values in named}
        return as_columns(columns)


class Hindsight(Uniform):
    """Hindsight at sample time: rewrites the stored rows and puts them back at the next call."""

    def make(self, capacity: int, columns: Columns) -> HERReplayBuffer:
        ends = np.flatnonzero(columns["done"])
        return HERReplayBuffer(
            capacity,
            compute_reward_fn=data.goal_reward,
            horizon=int(np.diff(ends, prepend=-1).max()),
            future_k=data.HINDSIGHT_GOALS + 1,
        )


class NStep(Uniform):
    """Flat observations, folded at sample time for a value function that is 0 everywhere."""

    def sample(self, batch_size: int) -> Batch:
        batch, rows = self.buffer.sample(batch_size)

        def value(buffer: ReplayBuffer, last_rows: np.ndarray) -> torch.Tensor:
            batch.obs_next = buffer.obs_next[last_rows]
            return torch.zeros(len(last_rows))

        Algorithm.compute_nstep_return(batch, self.buffer, rows, value, data.DISCOUNT, data.N_STEPS)
        return batch

    @staticmethod
    def columns_of(batch: Any) -> Columns:
        batch.rew = batch.returns
        return Uniform.columns_of(batch)


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def make(self, capacity: int, columns: Columns) -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(capacity, data.PRIORITY_ALPHA, data.PRIORITY_BETA)

    def sample(self, batch_size: int) -> Batch:
        batch, rows = self.buffer.sample(batch_size)
        self.buffer.update_weight(rows, np.linspace(0.1, 1, batch_size))
        return batch


WORKS = {
    "flat": Uniform,
    "stacks": Uniform,
    "uniform": Uniform,
    "her": Hindsight,
    "n_step": NStep,
    "priorities": Prioritized,
}
