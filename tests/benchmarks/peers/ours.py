"""This package: `ReplayStorage` over `PackedStorage`."""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tests.benchmarks.data import HINDSIGHT_GOALS, Columns, to_tensordict
from tests.benchmarks.peers.base import Buffer
from tests.benchmarks.peers.torchrl import columns_of
from trl_storages.replay import ReplayStorage
from trl_storages.samplers import HERSampler
from trl_storages.storages import PackedStorage
from trl_storages.transforms import GoalRelabel

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


WORKS = {"uniform": Uniform, "her": Hindsight}
