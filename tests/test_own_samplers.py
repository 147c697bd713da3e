"""Samplers of one's own: subclasses of ours that override `sample`, alone and as the base of another."""

import pytest
import torch
from goal_data import HISTORIES, AsDrawn
from torchrl.data.replay_buffers.samplers import Sampler

import trl_storages.samplers
from trl_storages import (
    ERESampler,
    HERSampler,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    UniformSampler,
)
from trl_storages.samplers import WrappingSampler

CAPACITY = 40
SAMPLERS = {
    UniformSampler: UniformSampler,
    PERSampler: lambda kind: kind(CAPACITY),
    ERESampler: lambda kind: kind(c_min=10),
    HERSampler: lambda kind: kind(num_goals=1),
}


def own(kind: type, *methods: str):
    """A sampler of a subclass of `kind` whose `methods` draw the newest row alone."""

    def newest(self, storage, batch_size, *window):
        index, info = getattr(super(subclass, self), methods[0])(storage, batch_size, *window)
        return storage.episodes.slots_by_age(torch.zeros_like(index)), info

    subclass = type("Own", (kind,), dict.fromkeys(methods, newest))
    make = SAMPLERS[kind]
    return subclass() if make is kind else make(subclass)


def storage_of(sampler):
    storage = ReplayStorage(
        storage=PackedStorage(CAPACITY),
        sampler=sampler,
        transform=AsDrawn(),
        batch_size=16,
    )
    HISTORIES["before wrap-around"].write(storage)
    return storage


def test_every_sampler_that_may_be_a_base_is_walked():
    public = (getattr(trl_storages.samplers, name) for name in trl_storages.samplers.__all__)
    drawing = {part for part in public if isinstance(part, type) and issubclass(part, Sampler)}
    assert set(SAMPLERS) == drawing - {WrappingSampler}


@pytest.mark.parametrize("kind", SAMPLERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("num_wrappers", [0, 1, 2])
def test_an_overridden_sample_is_what_draws(kind, num_wrappers):
    sampler = own(kind, "sample")
    for number in range(num_wrappers):
        sampler = HERSampler(num_goals=1, goal_key=f"goal_{number}", base=sampler)
    storage = storage_of(sampler)
    assert storage.episodes.ages(storage.sample()["index"]).unique().tolist() == [0]


@pytest.mark.parametrize("kind", [UniformSampler, PERSampler])
def test_an_overridden_window_is_what_draws(kind):
    storage = storage_of(HERSampler(num_goals=1, base=ERESampler(base=own(kind, "sample_window"))))
    assert storage.episodes.ages(storage.sample()["index"]).unique().tolist() == [0]


@pytest.mark.parametrize("kind", [UniformSampler, PERSampler])
def test_a_window_needs_more_than_an_overridden_sample(kind):
    with pytest.raises(TypeError, match="Own overrides sample alone: override sample_window"):
        ERESampler(base=own(kind, "sample"))


def test_a_new_base_draws_from_the_generator_of_the_storage():
    def draw():
        storage = storage_of(HERSampler(num_goals=0, base=ERESampler()))
        storage.set_rng(torch.Generator().manual_seed(5))
        storage.sampler.base = ERESampler()
        storage.sampler.base.base = UniformSampler()
        return storage.sample(50)["index"]

    assert torch.equal(draw(), draw())


def test_draws_of_ones_own_follow_the_generator():
    draws = []
    for _ in range(2):

        class Doubled(UniformSampler):
            def sample(self, storage, batch_size):
                index, info = super().sample(storage, batch_size // 2)
                return torch.cat([index, index]), info

        storage = storage_of(HERSampler(num_goals=1, base=Doubled()))
        storage.set_rng(torch.Generator().manual_seed(3))
        draws.append(storage.sample().select("index", "goal_index"))
    assert (draws[0] == draws[1]).all()
    assert torch.equal(draws[0]["index"][:8], draws[0]["index"][8:])
