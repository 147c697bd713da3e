"""This package: `ReplayStorage` over `PackedStorage`, and `record` of the ready-made storages."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Compose

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers import ring, torchrl
from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    FrameStack,
    GoalRelabel,
    HERReplayStorage,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    UniformReplayStorage,
)

OUTCOME = ("reward", "terminated", "truncated")


def goal_reward(
    achieved_goal: torch.Tensor, desired_goal: torch.Tensor, _: Mapping
) -> torch.Tensor:
    distance = (achieved_goal - desired_goal).square().sum(-1)
    return (distance < 0.05**2).float() - 1


class Uniform(torchrl.Uniform):
    """Uniform draws."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        for rows in data.to_tensordict(columns).split(10_000):
            self.buffer.extend(rows)

    def make(self, capacity: int) -> ReplayStorage:
        rows = PackedStorage(capacity, device=self.device)
        return ReplayStorage(storage=rows, **self.parts(capacity))

    def parts(self, capacity: int) -> dict[str, Any]:
        return {}


class Hindsight(Uniform):
    """Hindsight at sample time, from later steps of the episode."""

    def parts(self, capacity: int) -> dict[str, Any]:
        sampler = HERSampler("future", data.HINDSIGHT_GOALS)
        return {"sampler": sampler, "transform": GoalRelabel(goal_reward)}


class Folded(Uniform):
    """Flat observations, folded at sample time."""

    def parts(self, capacity: int) -> dict[str, Any]:
        return {"transform": NStep(data.N_STEPS, data.DISCOUNT)}


class Recent(Uniform):
    """Flat observations, recent ones more often."""

    def parts(self, capacity: int) -> dict[str, Any]:
        return {"sampler": ERESampler()}


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def parts(self, capacity: int) -> dict[str, Any]:
        return {"sampler": PERSampler(capacity, data.PRIORITY_ALPHA, data.PRIORITY_BETA)}

    sample = torchrl.Prioritized.sample


class HindsightNStep(Hindsight):
    """Hindsight, folded for the goal that was drawn."""

    def parts(self, capacity: int) -> dict[str, Any]:
        folded = Compose(GoalRelabel(goal_reward), NStep(data.N_STEPS, data.DISCOUNT))
        return {**super().parts(capacity), "transform": folded}


class Everything(HindsightNStep):
    """Hindsight, folded, drawn by priority among recent rows; and the update of the priorities."""

    def parts(self, capacity: int) -> dict[str, Any]:
        recent = ERESampler(base=PERSampler(capacity, data.PRIORITY_ALPHA, data.PRIORITY_BETA))
        sampler = HERSampler("future", data.HINDSIGHT_GOALS, base=recent)
        return {**super().parts(capacity), "sampler": sampler}

    sample = torchrl.Prioritized.sample


class Sequences(Uniform):
    """Stretches of an episode, one after another in the batch."""

    def parts(self, capacity: int) -> dict[str, Any]:
        return {"sample_unit": EpisodeSequence(data.SEQUENCE_STEPS)}

    def sample(self, batch_size: int) -> TensorDictBase:
        return self.buffer.sample(batch_size // data.SEQUENCE_STEPS)


class Stacks(Uniform):
    """Stacked frames, of which each is stored once."""

    def make(self, capacity: int) -> ReplayStorage:
        pixels = (torch.uint8, data.PIXEL_SHAPE, FrameStack(data.PIXEL_SHAPE[0]))
        number, flag = (torch.float32, (1,)), (torch.bool, (1,))
        fields: Mapping[NestedKey, Any] = {
            "observation": pixels,
            "action": number,
            ("next", "observation"): pixels,
            ("next", "reward"): number,
            **{("next", name): flag for name in ("done", "terminated", "truncated")},
        }
        rows = PackedStorage(capacity, device=self.device, fields=fields)
        # The steps between draws are the same over and over.
        return ReplayStorage(storage=rows, writer=EpisodeWriter(on_gap="cut"))


class Extend(Uniform):
    """Writes of several rows at once."""

    prepare, write = staticmethod(torchrl.Extend.prepare), torchrl.Extend.write


def step_of(rows: Columns, at: Any, outcome: Iterable[Any]) -> tuple:
    now, after = (
        {part: rows[before + part][at] for part in data.PARTS} for before in ("", "next_")
    )
    return now, rows["action"][at], *outcome, {}, after


class Record(Uniform):
    """Steps of a plain loop over one environment: arrays as gymnasium gives them."""

    recipe: type[ReplayStorage] = UniformReplayStorage
    options: ClassVar[dict[str, Any]] = {}

    def make(self, capacity: int) -> ReplayStorage:
        options = {"storage_size": capacity, "device": self.device, "path": self.directory}
        return self.recipe(data.GOAL_SPACE, data.ACTION_SPACE, **options, **self.options)

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [
            step_of(rows, row, (rows[name][row].item() for name in OUTCOME))
            for row in range(len(rows["done"]))
        ]

    def write(self, prepared: list[tuple]) -> None:
        for step in prepared:
            self.buffer.record(*step)


class RecordHindsight(Record):
    """The same, drawn with hindsight."""

    recipe = HERReplayStorage
    options: ClassVar[dict[str, Any]] = {
        "reward_fn": goal_reward,
        "num_goals": data.HINDSIGHT_GOALS,
    }


class RecordLanes(Record):
    """Steps of eight environments at once, the rows of the data dealt out to them."""

    # Rows that are dealt out do not go on from each other.
    options: ClassVar[dict[str, Any]] = {
        "num_envs": data.LANES,
        "autoreset_mode": "Disabled",
        "on_gap": "ignore",
    }

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        lanes = data.to_tensordict(columns).reshape(-1, data.LANES).transpose(0, 1)
        for steps in lanes.split(1000, 1):
            self.buffer.extend(steps)

    @staticmethod
    def prepare(rows: Columns) -> list[tuple]:
        return [
            step_of(rows, slice(*step), (rows[name][slice(*step)] for name in OUTCOME))
            for step in data.lane_steps(rows)
        ]


class Lanes(Uniform):
    """Steps `[E, 1]` of thousands of environments, or flat ones of new trajectories; and priorities."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        for steps in data.to_tensordict(columns).reshape(self.num_lanes, -1).split(1000, 1):
            self.buffer.extend(steps)

    def make(self, capacity: int) -> ReplayStorage:
        options = {"num_envs": self.num_lanes, "device": self.device, "path": self.directory}
        rows = PackedStorage(capacity, **options)
        return ReplayStorage(
            storage=rows, writer=EpisodeWriter(self.num_lanes), **self.parts(capacity)
        )

    prepare, write = staticmethod(ring.Lanes.prepare), torchrl.Extend.write


class PrioritizedLanes(Lanes):
    """The same, drawn by priority; a sample is a draw and the update of its priorities."""

    parts, sample = Prioritized.parts, Prioritized.sample


WORKS = {
    "uniform": Uniform,
    "her": Hindsight,
    "her_n_step": HindsightNStep,
    "everything": Everything,
    "n_step": Folded,
    "priorities": Prioritized,
    "recent": Recent,
    "sequences": Sequences,
    "flat": Uniform,
    "stacks": Stacks,
    "extend": Extend,
    "record": Record,
    "record_her": RecordHindsight,
    "record_lanes": RecordLanes,
    "lanes": Lanes,
    "prioritized_lanes": PrioritizedLanes,
}
