"""tianshou: `ReplayBuffer`, `HERReplayBuffer`, `PrioritizedReplayBuffer`."""

from typing import Any

import numpy as np
import torch
from tianshou.algorithm import Algorithm
from tianshou.data import Batch, HERReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

from tests.benchmarks.data import (
    DISCOUNT,
    HINDSIGHT_GOALS,
    N_STEPS,
    PARTS,
    PRIORITY_ALPHA,
    PRIORITY_BETA,
    Columns,
    goal_reward,
    single_rows,
)
from tests.benchmarks.peers.base import Buffer

TITLE = "tianshou"


def to_batch(rows: Columns) -> Batch:
    flat = "achieved_goal" not in rows
    following = {part: rows[f"next_{part}"] for part in PARTS} if not flat else {}
    return Batch(
        obs=rows["observation"] if flat else Batch({part: rows[part] for part in PARTS}),
        act=rows["action"],
        rew=rows["reward"],
        terminated=rows["terminated"],
        truncated=rows["truncated"],
        done=rows["done"],
        obs_next=rows["next_observation"] if flat else Batch(following),
        info=Batch(),
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
        return [to_batch(row)[0] for row in single_rows(rows)]

    def write(self, prepared: list[Batch]) -> None:
        for step in prepared:
            self.buffer.add(step)

    def sample(self, batch_size: int) -> Batch:
        return self.buffer.sample(batch_size)[0]

    @staticmethod
    def columns_of(batch: Any) -> dict[str, np.ndarray]:
        columns = {
            "action": batch.act,
            "reward": batch.rew,
            "terminated": batch.terminated,
            "truncated": batch.truncated,
            "done": batch.done,
        }
        if not isinstance(batch.obs, Batch):
            return columns | {"observation": batch.obs, "next_observation": batch.obs_next}
        columns |= {part: batch.obs[part] for part in PARTS}
        return columns | {f"next_{part}": batch.obs_next[part] for part in PARTS}


class Hindsight(Uniform):
    """Hindsight at sample time: rewrites the stored rows and puts them back at the next call."""

    def make(self, capacity: int, columns: Columns) -> HERReplayBuffer:
        ends = np.flatnonzero(columns["done"])
        return HERReplayBuffer(
            capacity,
            compute_reward_fn=goal_reward,
            horizon=int(np.diff(ends, prepend=-1).max()),
            future_k=HINDSIGHT_GOALS + 1,
        )


class NStep(Uniform):
    """Flat observations, folded at sample time for a value function that is 0 everywhere."""

    def sample(self, batch_size: int) -> Batch:
        batch, rows = self.buffer.sample(batch_size)

        def value(buffer: ReplayBuffer, last_rows: np.ndarray) -> torch.Tensor:
            batch.obs_next = buffer.obs_next[last_rows]
            return torch.zeros(len(last_rows))

        Algorithm.compute_nstep_return(batch, self.buffer, rows, value, DISCOUNT, N_STEPS)
        return batch

    @staticmethod
    def columns_of(batch: Any) -> dict[str, np.ndarray]:
        return {
            "observation": batch.obs,
            "action": batch.act,
            "next_observation": batch.obs_next,
            "reward": batch.returns.numpy()[:, 0],
        }


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def make(self, capacity: int, columns: Columns) -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(capacity, PRIORITY_ALPHA, PRIORITY_BETA)

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
