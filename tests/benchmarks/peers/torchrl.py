"""TorchRL: its replay buffers over `LazyTensorStorage`."""

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import prioritized
from torchrl.envs import MultiStepTransform

from tests.benchmarks import data
from tests.benchmarks.data import Columns
from tests.benchmarks.peers.base import FLAGS, Buffer, as_columns


def goal_reward(batch: TensorDictBase) -> torch.Tensor:
    """Gives `[B, 1]`; on the next achieved goal, as every other library of the benchmark."""
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).square().sum(-1, True)
    return (distance < 0.05**2).float() - 1


def columns_of(batch: TensorDictBase) -> data.Columns:
    """Names the entries of a TED batch as the data does; shared with this package's adapter."""
    columns = {}
    for key, value in batch.items(include_nested=True, leaves_only=True):
        parts = (key,) if isinstance(key, str) else key
        columns[parts[-1] if parts[-1] in FLAGS else "_".join(parts)] = value
    return as_columns(columns)


class Uniform(Buffer):
    """Uniform draws."""

    def __init__(self, columns: Columns, capacity: int):
        self.buffer = self.make(capacity)
        # MultiStepTransform takes memory that grows with the square of what is written at once.
        size = 1000 if columns["observation"].ndim == 2 else 100
        for rows in data.to_tensordict(columns).split(size):
            self.buffer.extend(rows)

    def make(self, capacity: int) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity, device=self.device))

    @staticmethod
    def prepare(rows: Columns) -> list[TensorDict]:
        return list(data.to_tensordict(rows).unbind(0))

    def write(self, prepared: list[TensorDict]) -> None:
        for step in prepared:
            self.buffer.add(step)

    def sample(self, batch_size: int) -> TensorDictBase:
        return self.buffer.sample(batch_size)

    columns_of = staticmethod(columns_of)


class Hindsight(Uniform):
    """Hindsight at sample time, from later steps of the episode."""

    def make(self, capacity: int) -> HERReplayBuffer:
        # With rows on a GPU, sampling mixes devices up and raises.
        return HERReplayBuffer(
            goal_reward,
            her_ratio=data.HINDSIGHT_GOALS / (data.HINDSIGHT_GOALS + 1),
            strategy="future",
            storage=LazyTensorStorage(capacity),
        )

    def sample(self, batch_size: int) -> TensorDictBase:
        return super().sample(batch_size).to(self.device)


class NStep(Uniform):
    """Flat observations, folded when they are written: the newest rows are held back."""

    def make(self, capacity: int) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, device=self.device),
            transform=MultiStepTransform(data.N_STEPS, data.DISCOUNT),
        )

    def write(self, prepared: list[TensorDict]) -> None:
        for step in prepared:
            self.buffer.extend(step.unsqueeze(0))


class Prioritized(Uniform):
    """Flat observations; a sample is a draw and the update of its priorities."""

    def make(self, capacity: int) -> TensorDictPrioritizedReplayBuffer:
        # The wheels have no tree of priorities for rows on a GPU.
        return TensorDictPrioritizedReplayBuffer(
            alpha=data.PRIORITY_ALPHA,
            beta=data.PRIORITY_BETA,
            storage=LazyTensorStorage(capacity),
        )

    def sample(self, batch_size: int) -> TensorDictBase:
        batch = self.buffer.sample(batch_size)
        device = batch["action"].device
        batch.set("td_error", torch.linspace(0.1, 1, batch_size, device=device))
        self.buffer.update_tensordict_priority(batch)
        return batch.to(self.device)


class Sequences(Uniform):
    """Stretches of an episode, one after another in the batch.

    The sampler finds where episodes end by the flags, which its documentation names as the fastest
    way, and keeps what it found until the next write.
    """

    def make(self, capacity: int) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, device=self.device),
            sampler=SliceSampler(
                slice_len=data.SEQUENCE_STEPS, end_key=("next", "done"), cache_values=True
            ),
        )


class Extend(Uniform):
    """Writes of several rows at once."""

    @staticmethod
    def prepare(rows: Columns) -> TensorDict:
        return data.to_tensordict(rows)

    def write(self, prepared: TensorDict) -> None:
        self.buffer.extend(prepared)


class Lanes(Extend):
    """Steps of thousands of environments; a storage of two dimensions has time first."""

    def make(self, capacity: int) -> TensorDictReplayBuffer:
        storage = LazyTensorStorage(capacity, ndim=2, device=self.device)
        return TensorDictReplayBuffer(storage=storage)

    def __init__(self, columns: data.Columns, capacity: int):
        self.buffer = self.make(capacity)
        self.write(data.to_tensordict(columns).reshape(self.num_lanes, -1))

    @staticmethod
    def prepare(rows: data.Columns) -> TensorDict:
        return data.to_tensordict(rows).unsqueeze(1)

    def write(self, prepared: TensorDict) -> None:
        self.buffer.extend(prepared.transpose(0, 1))


WORKS = {
    "uniform": Uniform,
    "her": Hindsight,
    "n_step": NStep,
    "priorities": Prioritized,
    "sequences": Sequences,
    # `NextStateReconstructor` is for rows in order: of rows that are drawn it gives others, or NaN.
    "flat": Uniform,
    "stacks": Uniform,
    "extend": Extend,
    "lanes": Lanes,
}
if prioritized.SumSegmentTreeFp32 is None:
    # TorchRL's samplers by priority need it.
    del WORKS["priorities"]
