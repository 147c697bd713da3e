"""cpprb: `ReplayBuffer`, `HindsightReplayBuffer`, `PrioritizedReplayBuffer`."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from cpprb import HindsightReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

from tests.benchmarks.data import (
    ACTION_SIZE,
    DISCOUNT,
    GOAL_SIZE,
    HINDSIGHT_GOALS,
    N_STEPS,
    OBSERVATION_SIZE,
    PRIORITY_ALPHA,
    PRIORITY_BETA,
    Columns,
    goal_reward,
    single_rows,
    take_rows,
)
from tests.benchmarks.peers.base import Buffer

TITLE = "cpprb"
FLAGS = ("reward", "done", "terminated", "truncated")


def stretches(columns: Columns) -> Iterator[Columns]:
    """Cuts rows into episodes, the last of which may be unfinished."""
    ends = (np.flatnonzero(columns["done"]) + 1).tolist()
    for start, stop in zip([0, *ends], [*ends, len(columns["done"])], strict=True):
        if start < stop:
            yield take_rows(columns, start, stop)


def fields_of(columns: Columns) -> dict[str, dict]:
    """Describes columns as the buffers want them to be."""
    return {
        name: {"shape": column.shape[1:] or 1, "dtype": column.dtype}
        for name, column in columns.items()
    }


class Uniform(Buffer):
    """Uniform draws."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity, fields_of(columns))
        self.buffer.add(**columns)

    def make(self, capacity: int, fields: dict) -> ReplayBuffer:
        return ReplayBuffer(capacity, fields)

    @staticmethod
    def prepare(rows: Columns) -> list[Columns]:
        return list(single_rows(rows))

    def write(self, prepared: list[Columns]) -> None:
        for step in prepared:
            self.buffer.add(**step)

    def sample(self, batch_size: int) -> Columns:
        return self.buffer.sample(batch_size)

    @staticmethod
    def columns_of(batch: Columns) -> Columns:
        return {name: part[:, 0] if name in FLAGS else part for name, part in batch.items()}


class Hindsight(Buffer):
    """Hindsight when an episode is written: each row is stored five times, its goals are frozen.

    Written steps wait in a buffer of their own until their episode ends.
    """

    def __init__(self, columns: Columns, capacity: int):
        state = {"shape": OBSERVATION_SIZE + GOAL_SIZE, "dtype": np.float32}
        self.buffer = HindsightReplayBuffer(
            capacity * (HINDSIGHT_GOALS + 1),
            {
                "obs": state,
                "act": {"shape": ACTION_SIZE, "dtype": np.float32},
                "next_obs": state,
                "done": {"dtype": bool},
            },
            max_episode_len=1000,
            reward_func=lambda next_obs, act, goal: goal_reward(next_obs[:, -GOAL_SIZE:], goal),
            goal_func=lambda obs: obs[:, -GOAL_SIZE:],
            goal_shape=(GOAL_SIZE,),
            strategy="future",
            additional_goals=HINDSIGHT_GOALS,
            prioritized=False,
        )
        for episode in stretches(columns):
            self.buffer.add(**self.columns(episode))
            if episode["done"][-1]:
                self.buffer.on_episode_end(episode["desired_goal"][0])

    @staticmethod
    def columns(rows: Columns) -> Columns:
        """Leaves the desired goal out of the observation: this buffer adds it by itself."""
        join = np.concatenate
        return {
            "obs": join([rows["observation"], rows["achieved_goal"]], -1),
            "act": rows["action"],
            "next_obs": join([rows["next_observation"], rows["next_achieved_goal"]], -1),
            "done": rows["done"],
        }

    @staticmethod
    def prepare(rows: Columns) -> list[tuple[Columns, np.ndarray | None]]:
        return [
            (Hindsight.columns(row), row["desired_goal"][0] if row["done"][0] else None)
            for row in single_rows(rows)
        ]

    def write(self, prepared: list[tuple[Columns, np.ndarray | None]]) -> None:
        for step, goal_at_end in prepared:
            self.buffer.add(**step)
            if goal_at_end is not None:
                self.buffer.on_episode_end(goal_at_end)

    def sample(self, batch_size: int) -> Columns:
        return self.buffer.sample(batch_size)

    @staticmethod
    def columns_of(batch: Columns) -> Columns:
        return {
            "observation": batch["obs"][:, :OBSERVATION_SIZE],
            "achieved_goal": batch["obs"][:, OBSERVATION_SIZE:],
            "desired_goal": batch["goal"],
            "action": batch["act"],
            "next_observation": batch["next_obs"][:, :OBSERVATION_SIZE],
            "next_achieved_goal": batch["next_obs"][:, OBSERVATION_SIZE:],
            "reward": batch["rew"][:, 0],
            "done": batch["done"][:, 0],
        }


class NStep(Uniform):
    """Flat observations, folded when they are written."""

    def __init__(self, columns: Columns, capacity: int):
        fold = {"size": N_STEPS, "gamma": DISCOUNT, "rew": "reward", "next": "next_observation"}
        self.buffer = ReplayBuffer(capacity, fields_of(columns), Nstep=fold)
        self.write(list(stretches(columns)))

    def write(self, prepared: list[Columns]) -> None:
        for steps in prepared:
            # The rewards are summed in place, in the caller's array.
            self.buffer.add(**(steps | {"reward": steps["reward"].copy()}))
            if steps["done"][-1]:
                self.buffer.on_episode_end()


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def make(self, capacity: int, fields: dict) -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(capacity, fields, alpha=PRIORITY_ALPHA)

    def sample(self, batch_size: int) -> Columns:
        batch = self.buffer.sample(batch_size, PRIORITY_BETA)
        self.buffer.update_priorities(batch["indexes"], np.linspace(0.1, 1, batch_size))
        return batch


class FlatOnce(Uniform):
    """Flat observations, of which the next one is that of the following row (`next_of`)."""

    options: ClassVar[dict] = {}

    def __init__(self, columns: Columns, capacity: int):
        columns = self.turned(columns)
        fields = fields_of(columns)
        del fields["next_observation"]
        self.buffer = ReplayBuffer(capacity, fields, next_of="observation", **self.options)
        self.write(list(stretches(columns)))

    @staticmethod
    def turned(columns: Columns) -> Columns:
        """Lays observations out as the buffer wants them."""
        return columns

    def write(self, prepared: list[Columns]) -> None:
        for steps in prepared:
            self.buffer.add(**steps)
            if steps["done"][-1]:
                self.buffer.on_episode_end()


class StacksOnce(FlatOnce):
    """Stacked frames, of which rows hold the newest one (`stack_compress`), the frames last."""

    options: ClassVar[dict] = {"stack_compress": "observation"}

    @staticmethod
    def turned(columns: Columns) -> Columns:
        parts = ("observation", "next_observation")
        return columns | {part: np.moveaxis(columns[part], 1, -1) for part in parts}

    @staticmethod
    def prepare(rows: Columns) -> list[Columns]:
        return list(single_rows(StacksOnce.turned(rows)))

    @staticmethod
    def columns_of(batch: Columns) -> Columns:
        columns = Uniform.columns_of(batch)
        parts = ("observation", "next_observation")
        return columns | {part: np.moveaxis(columns[part], -1, 1) for part in parts}


class Extend(Uniform):
    """Writes of several rows at once."""

    @staticmethod
    def prepare(rows: Columns) -> Columns:
        return rows

    def write(self, prepared: Columns) -> None:
        self.buffer.add(**prepared)


WORKS = {
    "uniform": Uniform,
    "her": Hindsight,
    "n_step": NStep,
    "priorities": Prioritized,
    "flat": FlatOnce,
    "stacks": StacksOnce,
    "extend": Extend,
}
