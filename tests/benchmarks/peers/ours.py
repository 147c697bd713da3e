"""This package: its presets, which differ in their options."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers import ring, torchrl
from trl_storages import (
    EpisodeSequence,
    EREReplayStorage,
    HERReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    ReplayStorage,
    UniformReplayStorage,
)

OUTCOME = ("reward", "terminated", "truncated")


def goal_reward(
    achieved_goal: torch.Tensor, desired_goal: torch.Tensor, _: Mapping
) -> torch.Tensor:
    distance = (achieved_goal - desired_goal).square().sum(-1)
    return (distance < 0.05**2).float() - 1


class Preset(torchrl.Extend):
    """Draws of a preset, and writes of several rows at once, `[E, T]` with several lanes."""

    preset: type[ReplayStorage] = UniformReplayStorage
    options: Mapping[str, Any] = {}

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.preset(
            *data.spaces_of(columns),
            storage_size=capacity,
            num_envs=self.num_lanes,
            device=self.device,
            path=self.directory,
            **self.options,
        )
        for steps in self.dealt(columns).split(1 + 10_000 // self.num_lanes, 1):
            self.buffer.extend(steps)

    def dealt(self, columns: Columns) -> TensorDictBase:
        """Returns the rows of each lane, `[E, T]`."""
        return data.to_tensordict(columns).reshape(self.num_lanes, -1)


class Steps(Preset):
    """The same, with steps that are written one by one as TensorDicts."""

    prepare, write = staticmethod(torchrl.Uniform.prepare), torchrl.Uniform.write


class Prioritized(Steps):
    """A sample is a draw and the update of its priorities."""

    preset = PrioritizedReplayStorage
    sample = torchrl.Prioritized.sample


class Sequences(Steps):
    """Stretches of an episode, one after another in the batch."""

    options = {"sample_unit": EpisodeSequence(data.SEQUENCE_STEPS)}

    def sample(self, batch_size: int) -> TensorDictBase:
        return self.buffer.sample(batch_size // data.SEQUENCE_STEPS)


def step_of(rows: Columns, at: Any, outcome: Iterable[Any]) -> tuple:
    row = {name: column[at] for name, column in rows.items()}
    now, after = data.observation_of(row), data.observation_of(row, "next_")
    return now, row["action"], *outcome, {}, after


class Record(Preset):
    """Steps of a plain loop over one environment: arrays as gymnasium gives them."""

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [
            step_of(rows, row, (rows[name][row].item() for name in OUTCOME))
            for row in range(len(rows["done"]))
        ]

    def write(self, prepared: list[tuple]) -> None:
        for step in prepared:
            self.buffer.record(*step)


class RecordLanes(Record):
    """Steps of eight environments at once, the rows of the data dealt out to them."""

    num_lanes = data.LANES
    # Rows that are dealt out do not go on from each other.
    options = {"autoreset_mode": "Disabled", "on_gap": "ignore"}

    def dealt(self, columns: Columns) -> TensorDictBase:
        return data.to_tensordict(columns).reshape(-1, self.num_lanes).transpose(0, 1)

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [
            step_of(rows, slice(*step), (rows[name][slice(*step)] for name in OUTCOME))
            for step in data.lane_steps(rows)
        ]


class Lanes(Preset):
    """Steps `[E, 1]` of thousands of environments."""

    prepare = staticmethod(ring.Lanes.prepare)


class PrioritizedLanes(Lanes):
    """The same; a sample is a draw and the update of its priorities."""

    preset, sample = PrioritizedReplayStorage, Prioritized.sample


HINDSIGHT = {"reward_fn": goal_reward, "num_goals": data.HINDSIGHT_GOALS}
WINDOWS = {"n_step": data.N_STEPS, "discount": data.DISCOUNT}
PRIORITIES = {"alpha": data.PRIORITY_ALPHA, "beta": data.PRIORITY_BETA}
# The steps between draws of stacks are the same over and over.
STACKS = {"frame_stack": data.PIXEL_SHAPE[0], "on_gap": "cut"}
her = Steps.configured(preset=HERReplayStorage, options=HINDSIGHT)
WORKS = {
    "uniform": Steps,
    "her": her,
    "her_n_step": her.configured(options=HINDSIGHT | WINDOWS),
    "everything": Prioritized.configured(
        preset=HERReplayStorage, options=HINDSIGHT | WINDOWS | PRIORITIES | {"eta": 0.996}
    ),
    "n_step": Steps.configured(preset=NStepReplayStorage, options=WINDOWS),
    "priorities": Prioritized.configured(options=PRIORITIES),
    "recent": Steps.configured(preset=EREReplayStorage),
    "sequences": Sequences,
    "flat": Steps,
    "stacks": Steps.configured(options=STACKS),
    "extend": Preset,
    "record": Record,
    "record_her": Record.configured(preset=HERReplayStorage, options=HINDSIGHT),
    "record_lanes": RecordLanes,
    "lanes": Lanes,
    "prioritized_lanes": PrioritizedLanes.configured(options=PRIORITIES),
}
