"""Stable-Baselines3: `DictReplayBuffer`, `HerReplayBuffer`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from tests.benchmarks.data import (
    ACTION_SIZE,
    GOAL_SIZE,
    HINDSIGHT_GOALS,
    OBSERVATION_SIZE,
    Columns,
    goal_reward,
    single_rows,
)
from tests.benchmarks.peers.base import Buffer

TITLE = "Stable-Baselines3"
PARTS = ("observation", "achieved_goal", "desired_goal")


def box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


SPACES = {
    "observation_space": spaces.Dict(
        {
            "observation": box(OBSERVATION_SIZE),
            "achieved_goal": box(GOAL_SIZE),
            "desired_goal": box(GOAL_SIZE),
        }
    ),
    "action_space": spaces.Box(-1, 1, (ACTION_SIZE,), np.float32),
    "device": "cpu",
}


class RewardOnly:
    """As much of a vector environment as `HerReplayBuffer` calls."""

    def env_method(
        self,
        name: str,
        achieved_goal: np.ndarray,
        desired_goal: np.ndarray,
        infos: list[dict],
        indices: Sequence[int],
    ) -> list[np.ndarray]:
        return [goal_reward(achieved_goal, desired_goal)]


class Uniform(Buffer):
    """Uniform draws of dict observations."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        self.fill(columns)

    def make(self, capacity: int) -> DictReplayBuffer:
        return DictReplayBuffer(capacity, **SPACES)

    def fill(self, columns: Columns) -> None:
        """Does what `add` would do row by row, which takes half a minute for a million."""
        buffer, num_rows = self.buffer, len(columns["done"])
        for part in PARTS:
            buffer.observations[part][:num_rows, 0] = columns[part]
            buffer.next_observations[part][:num_rows, 0] = columns[f"next_{part}"]
        buffer.actions[:num_rows, 0] = columns["action"]
        buffer.rewards[:num_rows, 0] = columns["reward"]
        buffer.dones[:num_rows, 0] = columns["done"]
        buffer.timeouts[:num_rows, 0] = columns["truncated"]
        buffer.full, buffer.pos = num_rows == buffer.buffer_size, num_rows % buffer.buffer_size

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [
            (
                {part: row[part] for part in PARTS},
                {part: row[f"next_{part}"] for part in PARTS},
                row["action"],
                row["reward"],
                row["done"],
                [{"TimeLimit.truncated": row["truncated"][0]}],
            )
            for row in single_rows(rows)
        ]

    def write(self, prepared: list[tuple]) -> None:
        for step in prepared:
            self.buffer.add(*step)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    @staticmethod
    def columns_of(batch: Any) -> dict[str, np.ndarray]:
        return (
            {part: batch.observations[part].numpy() for part in PARTS}
            | {f"next_{part}": batch.next_observations[part].numpy() for part in PARTS}
            | {
                "action": batch.actions.numpy(),
                "reward": batch.rewards.numpy()[:, 0],
                "terminated": batch.dones.numpy()[:, 0] != 0,
            }
        )


class Hindsight(Uniform):
    """Hindsight at sample time, from later steps of the episode."""

    def make(self, capacity: int) -> HerReplayBuffer:
        return HerReplayBuffer(
            capacity,
            **SPACES,
            env=RewardOnly(),
            n_sampled_goal=HINDSIGHT_GOALS,
            goal_selection_strategy="future",
        )

    def fill(self, columns: Columns) -> None:
        super().fill(columns)
        buffer, num_rows = self.buffer, len(columns["done"])
        ends = np.flatnonzero(columns["done"])
        starts = np.concatenate([[0], ends + 1])
        lengths = np.diff(starts)
        finished = starts[-1]
        buffer.ep_start[:finished, 0] = np.repeat(starts[:-1], lengths)
        buffer.ep_length[:finished, 0] = np.repeat(lengths, lengths)
        buffer.ep_start[finished:num_rows, 0] = finished
        buffer._current_ep_start[0] = finished % buffer.buffer_size


WORKS = {"uniform": Uniform, "her": Hindsight}
