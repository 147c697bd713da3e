"""Stable-Baselines3: `DictReplayBuffer`, `HerReplayBuffer`, `NStepReplayBuffer`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from tests.benchmarks.data import (
    ACTION_SPACE,
    DISCOUNT,
    GOAL_SPACE,
    HINDSIGHT_GOALS,
    LANES,
    N_STEPS,
    PARTS,
    Columns,
    goal_reward,
    lane_steps,
    single_rows,
    take_rows,
)
from tests.benchmarks.peers.base import Buffer

TITLE = "Stable-Baselines3"


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


def fill(buffer: ReplayBuffer, columns: Columns) -> None:
    """Does what `add` would do row by row, except for the observations, which differ in form.

    Row by row takes half a minute for a million.
    """
    num_rows = len(columns["done"])
    buffer.actions[:num_rows, 0] = columns["action"]
    buffer.rewards[:num_rows, 0] = columns["reward"]
    buffer.dones[:num_rows, 0] = columns["done"]
    buffer.timeouts[:num_rows, 0] = columns["truncated"]
    buffer.full, buffer.pos = num_rows == buffer.buffer_size, num_rows % buffer.buffer_size


def step_of(row: Columns, observation: Any, next_observation: Any) -> tuple:
    infos = [{"TimeLimit.truncated": truncated} for truncated in row["truncated"].tolist()]
    return observation, next_observation, row["action"], row["reward"], row["done"], infos


def dict_step(row: Columns) -> tuple:
    now, after = ({part: row[before + part] for part in PARTS} for before in ("", "next_"))
    return step_of(row, now, after)


class Uniform(Buffer):
    """Uniform draws of dict observations."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        fill(self.buffer, columns)
        num_rows = len(columns["done"])
        for part in PARTS:
            self.buffer.observations[part][:num_rows, 0] = columns[part]
            self.buffer.next_observations[part][:num_rows, 0] = columns[f"next_{part}"]

    def make(self, capacity: int) -> DictReplayBuffer:
        return DictReplayBuffer(capacity, GOAL_SPACE, ACTION_SPACE, device=self.device)

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [dict_step(row) for row in single_rows(rows)]

    def write(self, prepared: list[tuple]) -> None:
        for step in prepared:
            self.buffer.add(*step)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    @staticmethod
    def columns_of(batch: Any) -> dict[str, np.ndarray]:
        return (
            {part: batch.observations[part].numpy(force=True) for part in PARTS}
            | {f"next_{part}": batch.next_observations[part].numpy(force=True) for part in PARTS}
            | {
                "action": batch.actions.numpy(force=True),
                "reward": batch.rewards.numpy(force=True)[:, 0],
                "terminated": batch.dones.numpy(force=True)[:, 0] != 0,
            }
        )


class Hindsight(Uniform):
    """Hindsight at sample time, from later steps of the episode."""

    def __init__(self, columns: Columns, capacity: int):
        super().__init__(columns, capacity)
        num_rows = len(columns["done"])
        starts = np.concatenate([[0], np.flatnonzero(columns["done"]) + 1])
        lengths, finished = np.diff(starts), starts[-1]
        self.buffer.ep_start[:finished, 0] = np.repeat(starts[:-1], lengths)
        self.buffer.ep_length[:finished, 0] = np.repeat(lengths, lengths)
        self.buffer.ep_start[finished:num_rows, 0] = finished
        self.buffer._current_ep_start[0] = finished % self.buffer.buffer_size

    def make(self, capacity: int) -> HerReplayBuffer:
        return HerReplayBuffer(
            capacity,
            GOAL_SPACE,
            ACTION_SPACE,
            RewardOnly(),
            device=self.device,
            n_sampled_goal=HINDSIGHT_GOALS,
            goal_selection_strategy="future",
        )


class RecordLanes(Uniform):
    """Steps of eight environments at once, the rows of the data dealt out to them."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = DictReplayBuffer(
            capacity, GOAL_SPACE, ACTION_SPACE, device=self.device, n_envs=LANES
        )
        for step in lane_steps(columns):
            self.write(self.prepare(take_rows(columns, *step)))

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [dict_step(take_rows(rows, *step)) for step in lane_steps(rows)]


class Flat(Buffer):
    """Uniform draws of observations that are one array."""

    def __init__(self, columns: Columns, capacity: int):
        shape, dtype = columns["observation"].shape[1:], columns["observation"].dtype
        low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        action_space = spaces.Box(-1, 1, columns["action"].shape[1:], np.float32)
        self.buffer = self.make(capacity, spaces.Box(low, high, shape, dtype.type), action_space)
        fill(self.buffer, columns)
        num_rows = len(columns["done"])
        self.buffer.observations[:num_rows, 0] = columns["observation"]
        self.buffer.next_observations[:num_rows, 0] = columns["next_observation"]

    def make(
        self, capacity: int, observation_space: spaces.Box, action_space: spaces.Box
    ) -> ReplayBuffer:
        return ReplayBuffer(capacity, observation_space, action_space, device=self.device)

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [step_of(r, r["observation"], r["next_observation"]) for r in single_rows(rows)]

    write, sample = Uniform.write, Uniform.sample

    @staticmethod
    def columns_of(batch: Any) -> dict[str, np.ndarray]:
        return {
            "observation": batch.observations.numpy(force=True),
            "action": batch.actions.numpy(force=True),
            "next_observation": batch.next_observations.numpy(force=True),
            "reward": batch.rewards.numpy(force=True)[:, 0],
        }


class NStep(Flat):
    """The same, folded at sample time."""

    def make(
        self, capacity: int, observation_space: spaces.Box, action_space: spaces.Box
    ) -> NStepReplayBuffer:
        return NStepReplayBuffer(
            capacity,
            observation_space,
            action_space,
            device=self.device,
            n_steps=N_STEPS,
            gamma=DISCOUNT,
        )


WORKS = {
    "flat": Flat,
    "stacks": Flat,
    "uniform": Uniform,
    "her": Hindsight,
    "n_step": NStep,
    "record": Uniform,
    "record_lanes": RecordLanes,
}
