"""Stable-Baselines3: `DictReplayBuffer`, `HerReplayBuffer`, `NStepReplayBuffer`."""

from typing import Any, ClassVar

import numpy as np
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import Buffer, as_columns


class RewardOnly:
    """As much of a vector environment as `HerReplayBuffer` calls."""

    def env_method(self, name: str, achieved: Any, desired: Any, *_: Any, **__: Any) -> list:
        return [data.goal_reward(achieved, desired)]


def step_of(row: Columns) -> tuple:
    infos = [{"TimeLimit.truncated": truncated} for truncated in row["truncated"].tolist()]
    now, after = data.observation_of(row), data.observation_of(row, "next_")
    return now, after, row["action"], row["reward"], row["done"], infos


class Uniform(Buffer):
    """Uniform draws of dict observations."""

    kind: type[ReplayBuffer] = DictReplayBuffer
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, columns: Columns, capacity: int):
        described = capacity, *data.spaces_of(columns)
        self.buffer = self.kind(*described, device=self.device, **self.options)
        self.fill(columns)

    def fill(self, columns: Columns) -> None:
        """Does what `add` would do row by row, which takes half a minute for a million."""
        buffer, num_rows = self.buffer, len(columns["done"])
        arrays = {"action": buffer.actions, "reward": buffer.rewards, "done": buffer.dones}
        arrays["truncated"] = buffer.timeouts
        for before in ("", "next_"):
            stored = getattr(buffer, f"{before}observations")
            stored = stored if isinstance(stored, dict) else {"observation": stored}
            arrays |= {before + part: array for part, array in stored.items()}
        for name, array in arrays.items():
            array[:num_rows, 0] = columns[name]
        buffer.full, buffer.pos = num_rows == buffer.buffer_size, num_rows % buffer.buffer_size

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [step_of(row) for row in data.single_rows(rows)]

    def write(self, prepared: list[tuple]) -> None:
        for step in prepared:
            self.buffer.add(*step)

    def sample(self, batch_size: int) -> Any:
        return self.buffer.sample(batch_size)

    @staticmethod
    def columns_of(batch: Any) -> Columns:
        columns = {"action": batch.actions, "reward": batch.rewards}
        if not isinstance(batch.observations, dict):
            following = {"next_observation": batch.next_observations}
            return as_columns(columns | following | {"observation": batch.observations})
        following = {f"next_{part}": it for part, it in batch.next_observations.items()}
        columns = as_columns(columns | following | batch.observations)
        return columns | {"terminated": batch.dones.cpu().numpy()[:, 0] != 0}


class Hindsight(Uniform):
    """Hindsight at sample time, from later steps of the episode."""

    kind = HerReplayBuffer
    options = {
        "env": RewardOnly(),
        "n_sampled_goal": data.HINDSIGHT_GOALS,
        "goal_selection_strategy": "future",
    }

    def fill(self, columns: Columns) -> None:
        super().fill(columns)
        num_rows = len(columns["done"])
        starts = np.concatenate([[0], np.flatnonzero(columns["done"]) + 1])
        lengths, finished = np.diff(starts), starts[-1]
        self.buffer.ep_start[:finished, 0] = np.repeat(starts[:-1], lengths)
        self.buffer.ep_length[:finished, 0] = np.repeat(lengths, lengths)
        self.buffer.ep_start[finished:num_rows, 0] = finished
        self.buffer._current_ep_start[0] = finished % self.buffer.buffer_size


class RecordLanes(Uniform):
    """Steps of eight environments at once, the rows of the data dealt out to them."""

    options = {"n_envs": data.LANES}

    def fill(self, columns: Columns) -> None:
        self.write(self.prepare(columns))

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [step_of(data.take_rows(rows, *step)) for step in data.lane_steps(rows)]


class Flat(Uniform):
    """Uniform draws of observations that are one array."""

    kind = ReplayBuffer


class NStep(Flat):
    """The same, with n-step returns that are computed at sample time."""

    kind = NStepReplayBuffer
    options = {"n_steps": data.N_STEPS, "gamma": data.DISCOUNT}


WORKS = {
    "flat": Flat,
    "stacks": Flat,
    "uniform": Uniform,
    "her": Hindsight,
    "n_step": NStep,
    "record": Uniform,
    "record_lanes": RecordLanes,
}
