"""cpprb: `ReplayBuffer`, `HindsightReplayBuffer`, `PrioritizedReplayBuffer`."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from cpprb import HindsightReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import Buffer, as_columns


def stretches(columns: Columns) -> Iterator[Columns]:
    """Cuts rows into episodes, the last of which may be unfinished."""
    ends = (np.flatnonzero(columns["done"]) + 1).tolist()
    for start, stop in zip([0, *ends], [*ends, len(columns["done"])], strict=True):
        if start < stop:
            yield data.take_rows(columns, start, stop)


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
        return list(data.single_rows(rows))

    def write(self, prepared: list[Columns]) -> None:
        for step in prepared:
            self.buffer.add(**step)

    def sample(self, batch_size: int) -> Columns:
        return self.buffer.sample(batch_size)


class Hindsight(Uniform):
    """Hindsight when an episode is written: each row is stored five times, its goals are frozen.

    Written steps wait in a buffer of their own until their episode ends.
    """

    def __init__(self, columns: Columns, capacity: int):
        size = data.GOAL_SIZE
        state = {"shape": data.OBSERVATION_SIZE + size, "dtype": np.float32}
        action, done = {"shape": data.ACTION_SIZE, "dtype": np.float32}, {"dtype": bool}
        self.buffer = HindsightReplayBuffer(
            capacity * (data.HINDSIGHT_GOALS + 1),
            {"obs": state, "act": action, "next_obs": state, "done": done},
            max_episode_len=1000,
            reward_func=lambda after, act, goal: data.goal_reward(after[:, -size:], goal),
            goal_func=lambda obs: obs[:, -size:],
            goal_shape=(size,),
            strategy="future",
            additional_goals=data.HINDSIGHT_GOALS,
            prioritized=False,
        )
        self.write([*map(self.step_of, stretches(columns))])

    @staticmethod
    def step_of(rows: Columns) -> tuple[Columns, np.ndarray | None]:
        """Leaves the desired goal out of observations, and names it at the end of an episode."""
        columns = {"act": rows["action"], "done": rows["done"]}
        for name, before in (("obs", ""), ("next_obs", "next_")):
            parts = rows[f"{before}observation"], rows[f"{before}achieved_goal"]
            columns[name] = np.concatenate(parts, -1)
        return columns, rows["desired_goal"][0] if rows["done"][-1] else None

    @staticmethod
    def prepare(rows: Columns) -> list[tuple[Columns, np.ndarray | None]]:
        return [*map(Hindsight.step_of, data.single_rows(rows))]

    def write(self, prepared: list[tuple[Columns, np.ndarray | None]]) -> None:
        for step, goal_at_end in prepared:
            self.buffer.add(**step)
            if goal_at_end is not None:
                self.buffer.on_episode_end(goal_at_end)

    @staticmethod
    def columns_of(batch: Columns) -> Columns:
        names = {"obs": "observation", "next_obs": "next_observation", "goal": "desired_goal"}
        names |= {"act": "action", "rew": "reward", "done": "done"}
        return data.split_columns(as_columns({names[it]: batch[it] for it in names}))


class Episodes(Uniform):
    """A buffer that is told where episodes end."""

    def __init__(self, columns: Columns, capacity: int):
        columns = self.turned(columns)
        self.buffer = self.make(capacity, fields_of(columns))
        self.write([*stretches(columns)])

    @staticmethod
    def turned(columns: Columns) -> Columns:
        """Lays observations out as the buffer wants them."""
        return columns

    def write(self, prepared: list[Columns]) -> None:
        for steps in prepared:
            # n-step rewards are summed in place, in the caller's array.
            self.buffer.add(**(steps | {"reward": steps["reward"].copy()}))
            if steps["done"][-1]:
                self.buffer.on_episode_end()


class NStep(Episodes):
    """Flat observations, with n-step returns that are computed when they are written."""

    def make(self, capacity: int, fields: dict) -> ReplayBuffer:
        names = {"rew": "reward", "next": "next_observation"}
        n_step = {"size": data.N_STEPS, "gamma": data.DISCOUNT, **names}
        return ReplayBuffer(capacity, fields, Nstep=n_step)


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def make(self, capacity: int, fields: dict) -> PrioritizedReplayBuffer:
        return PrioritizedReplayBuffer(capacity, fields, alpha=data.PRIORITY_ALPHA)

    def sample(self, batch_size: int) -> Columns:
        batch = self.buffer.sample(batch_size, data.PRIORITY_BETA)
        self.buffer.update_priorities(batch["indexes"], np.linspace(0.1, 1, batch_size))
        return batch


class FlatOnce(Episodes):
    """Flat observations, of which the next one is that of the following row (`next_of`)."""

    options: ClassVar[dict] = {}

    def make(self, capacity: int, fields: dict) -> ReplayBuffer:
        del fields["next_observation"]
        return ReplayBuffer(capacity, fields, next_of="observation", **self.options)


class StacksOnce(FlatOnce):
    """Stacked frames, of which rows hold the newest one (`stack_compress`), the frames last."""

    options: ClassVar[dict] = {"stack_compress": "observation"}

    @staticmethod
    def turned(columns: Columns, source: int = 1, target: int = -1) -> Columns:
        parts = ("observation", "next_observation")
        return columns | {part: np.moveaxis(columns[part], source, target) for part in parts}

    @staticmethod
    def prepare(rows: Columns) -> list[Columns]:
        return list(data.single_rows(StacksOnce.turned(rows)))

    @staticmethod
    def columns_of(batch: Columns) -> Columns:
        return StacksOnce.turned(as_columns(batch), -1, 1)


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
