"""This package: `ReplayStorage` over `PackedStorage`."""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.transforms import Compose

from tests.benchmarks.data import (
    DISCOUNT,
    HINDSIGHT_GOALS,
    N_STEPS,
    PRIORITY_ALPHA,
    PRIORITY_BETA,
    Columns,
    to_tensordict,
)
from tests.benchmarks.peers.base import Buffer
from tests.benchmarks.peers.torchrl import columns_of
from trl_storages.replay import ReplayStorage
from trl_storages.samplers import ERESampler, HERSampler, PERSampler
from trl_storages.storages import PackedStorage
from trl_storages.transforms import GoalRelabel, NStep

TITLE = "trl_storages"


def goal_reward(
    achieved_goal: torch.Tensor, desired_goal: torch.Tensor, _: Mapping
) -> torch.Tensor:
    distance = (achieved_goal - desired_goal).square().sum(-1)
    return (distance < 0.05**2).float() - 1


class Uniform(Buffer):
    """Uniform draws."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        self.buffer.extend(to_tensordict(columns))

    def make(self, capacity: int) -> ReplayStorage:
        return ReplayStorage(storage=PackedStorage(capacity))

    @staticmethod
    def prepare(rows: Columns) -> list[TensorDict]:
        return list(to_tensordict(rows).unbind(0))

    def write(self, prepared: list[TensorDict]) -> None:
        for step in prepared:
            self.buffer.add(step)

    def sample(self, batch_size: int) -> TensorDictBase:
        return self.buffer.sample(batch_size)

    @staticmethod
    def columns_of(batch: TensorDictBase) -> dict[str, np.ndarray]:
        return columns_of(batch)


class Hindsight(Uniform):
    """Hindsight at sample time, from later steps of the episode."""

    def make(self, capacity: int) -> ReplayStorage:
        return ReplayStorage(
            storage=PackedStorage(capacity),
            sampler=HERSampler("future", HINDSIGHT_GOALS),
            transform=GoalRelabel(goal_reward),
        )


class Folded(Uniform):
    """Flat observations, folded at sample time."""

    def make(self, capacity: int) -> ReplayStorage:
        return ReplayStorage(storage=PackedStorage(capacity), transform=NStep(N_STEPS, DISCOUNT))


class Recent(Uniform):
    """Flat observations, recent ones more often."""

    def make(self, capacity: int) -> ReplayStorage:
        return ReplayStorage(storage=PackedStorage(capacity), sampler=ERESampler())


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def make(self, capacity: int) -> ReplayStorage:
        return ReplayStorage(
            storage=PackedStorage(capacity),
            sampler=PERSampler(capacity, PRIORITY_ALPHA, PRIORITY_BETA),
        )

    def sample(self, batch_size: int) -> TensorDictBase:
        batch = self.buffer.sample(batch_size)
        batch.set("td_error", torch.linspace(0.1, 1, batch_size))
        self.buffer.update_tensordict_priority(batch)
        return batch


class Everything(Prioritized):
    """Hindsight, folded, drawn by priority among recent rows; and the update of the priorities."""

    def make(self, capacity: int) -> ReplayStorage:
        priorities = PERSampler(capacity, PRIORITY_ALPHA, PRIORITY_BETA)
        return ReplayStorage(
            storage=PackedStorage(capacity),
            sampler=HERSampler("future", HINDSIGHT_GOALS, base=ERESampler(base=priorities)),
            transform=Compose(GoalRelabel(goal_reward), NStep(N_STEPS, DISCOUNT)),
        )


WORKS = {
    "uniform": Uniform,
    "her": Hindsight,
    "n_step": Folded,
    "priorities": Prioritized,
    "recent": Recent,
    "everything": Everything,
}
