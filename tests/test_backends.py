"""The same seed draws the same batches, bit for bit, whichever backend answers."""

import pytest
import torch
from goal_data import HISTORIES, distance_reward
from in_pairs import in_pairs
from on_gpu import assert_equal_on, noise_of_the_cpu
from torchrl.envs.transforms import Compose

from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)
from trl_storages.kernels.tables import GOAL_STRATEGIES
from trl_storages.samplers import UniformSampler

SAMPLERS = {
    "uniform": lambda size: UniformSampler(),
    "recent": lambda size: ERESampler(0.99, c_min=3),
    "future": lambda size: HERSampler("future"),
    "mixture": lambda size: HERSampler(dict.fromkeys(GOAL_STRATEGIES, 1 / 6), 5, discount=0.7),
    "final": lambda size: HERSampler("final", 1),
    "episode": lambda size: HERSampler("episode", float("inf")),
    "random": lambda size: HERSampler("random", base=ERESampler(0.99, c_min=3)),
    "priorities": PERSampler,
    "all": lambda size: HERSampler(base=ERESampler(0.99, c_min=3, base=PERSampler(size))),
}

each_combination = in_pairs(
    history=[*HISTORIES], unit=[None, EpisodeSequence(3, burn_in=1)], sampler=[*SAMPLERS]
)


def batches(history, sampler, unit, device="cpu"):
    """The slots of what was written, and four batches with what they were drawn with."""
    history = HISTORIES[history]
    sampler, transform = SAMPLERS[sampler](history.capacity), NStep(3, 0.9)
    if isinstance(sampler, HERSampler):
        transform = Compose(GoalRelabel(distance_reward), transform)
    buffer = ReplayStorage(
        storage=PackedStorage(history.capacity, device=device),
        writer=EpisodeWriter(history.num_envs),
        sampler=sampler,
        sample_unit=unit,
        transform=transform,
        generator=torch.Generator(device).manual_seed(5),
    )
    history.write(buffer)
    drawn = []
    for size in (1, 7, 30, 30):
        batch = buffer.sample(size)
        drawn.append({key: value.clone() for key, value in batch.items(True, True)})
        batch["td_error"] = batch["next", "reward"].abs()
        buffer.update_tensordict_priority(batch)
    return drawn


@pytest.mark.requirement("backends")
@each_combination
def test_same_seed_same_batches(history, unit, sampler, monkeypatch):
    drawn = []
    for backend in ("numba", "torch"):
        monkeypatch.setenv("TRL_STORAGES_BACKEND", backend)
        drawn.append(batches(history, sampler, unit))
    for one, other in zip(*drawn, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype, key
            assert torch.equal(value.view(torch.uint8), other[key].view(torch.uint8)), key


@pytest.mark.gpu
@pytest.mark.requirement("devices")
@each_combination
def test_same_noise_same_batches_on_a_gpu(history, unit, sampler, monkeypatch):
    """A GPU has random numbers of its own; for the same ones it answers as the CPU does."""
    drawn = []
    for device in ("cpu", "cuda"):
        with noise_of_the_cpu(monkeypatch, 5):
            drawn.append(batches(history, sampler, unit, device))
    for one, other in zip(*drawn, strict=True):
        assert_equal_on(other, one)
