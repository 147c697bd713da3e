"""tianshou: `ReplayBuffer`, `HERReplayBuffer`."""

from typing import Any

import numpy as np
from tianshou.data import Batch, HERReplayBuffer, ReplayBuffer

from tests.benchmarks.data import HINDSIGHT_GOALS, Columns, goal_reward, single_rows
from tests.benchmarks.peers.base import Buffer

TITLE = "tianshou"
PARTS = ("observation", "achieved_goal", "desired_goal")


def to_batch(rows: Columns) -> Batch:
    return Batch(
        obs=Batch({part: rows[part] for part in PARTS}),
        act=rows["action"],
        rew=rows["reward"],
        terminated=rows["terminated"],
        truncated=rows["truncated"],
        done=rows["done"],
        obs_next=Batch({part: rows[f"next_{part}"] for part in PARTS}),
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
        return (
            {part: batch.obs[part] for part in PARTS}
            | {f"next_{part}": batch.obs_next[part] for part in PARTS}
            | {
                "action": batch.act,
                "reward": batch.rew,
                "terminated": batch.terminated,
                "truncated": batch.truncated,
                "done": batch.done,
            }
        )


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


WORKS = {"uniform": Uniform, "her": Hindsight}
