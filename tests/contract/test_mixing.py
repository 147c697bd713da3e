"""TorchRL's parts in our storage, and ours in TorchRL's buffers: each works, or raises and says why."""

from collections import Counter

import pytest
import torch
from contract.lanes import HISTORIES
from contract.make import assemble, library
from contract.steps import Player, assert_same, ids_of, reward_fn, rows
from scipy import stats
from torchrl import data as stock
from torchrl.data.replay_buffers import sample_units
from torchrl.envs.transforms import Compose, DoubleToFloat, MultiStepTransform, RewardScaling

EpisodeSequence, ERESampler = library.EpisodeSequence, library.ERESampler
GoalRelabel, HERSampler, NStep = library.GoalRelabel, library.HERSampler, library.NStep
PackedStorage, PERSampler = library.PackedStorage, library.PERSampler
UniformSampler = library.UniformSampler

# Lanes of unequal fill, which hold rows in slots that are not the first ones.
HISTORY = HISTORIES["unequal fill"]
SIZE, LANES = HISTORY.size, HISTORY.lanes

#: How a part is made -> what the error names; None if it works.
THEIRS = {
    "RandomSampler": (lambda: {"sampler": stock.RandomSampler()}, None),
    "SamplerWithoutReplacement": (lambda: {"sampler": stock.SamplerWithoutReplacement()}, None),
    "SliceSampler": (lambda: {"sampler": stock.SliceSampler(slice_len=2)}, "EpisodeSequence"),
    "SliceSamplerWithoutReplacement": (
        lambda: {"sampler": stock.SliceSamplerWithoutReplacement(slice_len=2)},
        "EpisodeSequence",
    ),
    "ConsumingSampler": (lambda: {"sampler": stock.ConsumingSampler(2)}, "UniformSampler"),
    "StalenessAwareSampler": (lambda: {"sampler": stock.StalenessAwareSampler()}, "UniformSampler"),
    "SamplerEnsemble": (
        lambda: {"sampler": stock.SamplerEnsemble(stock.RandomSampler())},
        "ReplayStorageEnsemble",
    ),
    "SliceSampler below ours": (
        lambda: {
            "sampler": HERSampler(base=stock.SliceSampler(slice_len=2)),
            "transform": GoalRelabel(reward_fn),
        },
        "EpisodeSequence",
    ),
    "RandomSampler below ours": (
        lambda: {
            "sampler": HERSampler(base=stock.RandomSampler()),
            "transform": GoalRelabel(reward_fn, info_keys=["effort"]),
        },
        None,
    ),
    "Sequence": (lambda: {"sample_unit": sample_units.Sequence(2)}, "EpisodeSequence"),
    "LazyTensorStorage": (lambda: {"storage": stock.LazyTensorStorage(SIZE)}, "PackedStorage"),
    "ListStorage": (lambda: {"storage": stock.ListStorage(SIZE)}, "PackedStorage"),
    "RoundRobinWriter": (lambda: {"writer": stock.RoundRobinWriter()}, "EpisodeWriter"),
    "TensorDictMaxValueWriter": (
        lambda: {"writer": stock.TensorDictMaxValueWriter()},
        "EpisodeWriter",
    ),
    "RewardScaling": (
        lambda: {"transform": RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])},
        None,
    ),
    "MultiStepTransform": (lambda: {"transform": MultiStepTransform(3, 0.9)}, "NStep"),
    "MultiStepTransform of several": (
        lambda: {"transform": Compose(DoubleToFloat(), MultiStepTransform(3, 0.9))},
        "NStep",
    ),
}


@pytest.mark.parametrize(("make", "named"), THEIRS.values(), ids=THEIRS)
def test_parts_of_torchrl(make, named, place):
    if named is not None:
        with pytest.raises(TypeError, match=f"use .*{named}"):
            assemble(SIZE, LANES, place=place, **make())
        return
    storage = assemble(SIZE, LANES, place=place, **make())
    lanes = HISTORY.write(storage)
    counts = Counter(lanes.of(storage.sample(20 * len(lanes.live()))))
    assert counts.keys() == set(lanes.live())


@pytest.mark.native
def test_priorities_of_torchrl():
    with pytest.raises(TypeError, match="PERSampler"):
        assemble(SIZE, LANES, sampler=stock.PrioritizedSampler(SIZE, 0.6, 0.4))


def test_parts_that_are_exchanged_or_added():
    """As refused as in the constructor, and nothing is changed."""
    storage = assemble(SIZE, LANES)
    lanes, sampler = HISTORY.write(storage), storage.sampler
    with pytest.raises(TypeError, match="EpisodeSequence"):
        storage.set_sampler(stock.SliceSampler(slice_len=2))
    for change in (storage.append_transform, lambda it: storage.insert_transform(0, it)):
        with pytest.raises(TypeError, match="NStep"):
            change(MultiStepTransform(3, 0.9))
    assert storage.sampler is sampler
    assert set(lanes.of(storage.sample(64))) <= set(lanes.live())


def test_epochs_go_on_in_the_place_of_torchrls(place):
    storage = assemble(SIZE, LANES, place=place, sampler=stock.SamplerWithoutReplacement())
    lanes = HISTORY.write(storage)
    drawn = [step for _ in range(3) for step in lanes.of(storage.sample(len(lanes.live())))]
    assert Counter(drawn) == dict.fromkeys(lanes.live(), 3)


# TorchRL's buffers can't name lanes.
FULL = HISTORIES["lanes"]

#: How a part of ours is made -> whether it works in a buffer of TorchRL's.
OURS = {
    "UniformSampler": (lambda: {"sampler": UniformSampler()}, True),
    "epochs": (lambda: {"sampler": UniformSampler(without_replacement=True)}, True),
    "PERSampler": (lambda: {"sampler": PERSampler(FULL.size)}, True),
    "ERESampler": (lambda: {"sampler": ERESampler(1.0, c_min=3)}, True),
    "ERESampler over PERSampler": (
        lambda: {"sampler": ERESampler(1.0, c_min=3, base=PERSampler(FULL.size))},
        True,
    ),
    "RandomSampler": (lambda: {"sampler": stock.RandomSampler()}, True),
    "HERSampler": (lambda: {"sampler": HERSampler()}, False),
    "GoalRelabel": (lambda: {"transform": GoalRelabel(reward_fn)}, False),
    "NStep": (lambda: {"transform": NStep(3, 0.9)}, False),
}


each_buffer = pytest.mark.parametrize("buffer", [stock.TensorDictReplayBuffer, stock.ReplayBuffer])


@each_buffer
@pytest.mark.parametrize(("make", "works"), OURS.values(), ids=OURS)
def test_our_parts_in_a_buffer_of_torchrls(make, works, buffer, place):
    made = assemble(FULL.size, FULL.lanes, place=place, buffer=buffer, batch_size=None, **make())
    lanes = FULL.write(made)
    if not works:
        with pytest.raises(RuntimeError, match="ReplayStorage"):
            made.sample(32)
        return
    steps = lanes.of(made.sample(40 * len(lanes.live())))
    assert Counter(steps).keys() == set(lanes.live())
    batch = made.sample(32)
    expected = rows(lanes.of(batch))
    assert_same(batch.select(*expected.keys(True, True)), expected)


def test_the_loop_of_prioritized_replay_in_a_buffer_of_torchrls():
    sampler = PERSampler(FULL.size, alpha=1.0, beta=1.0)
    made = assemble(
        FULL.size, FULL.lanes, buffer=stock.TensorDictReplayBuffer, batch_size=None, sampler=sampler
    )
    lanes = FULL.write(made)
    for _ in range(20):
        batch = made.sample(32)
        batch["td_error"] = (ids_of(batch) % 7 + 1).float()
        made.update_tensordict_priority(batch)
    ids = torch.tensor([step.id for step in lanes.live()]).double()
    counts = Counter(ids_of(made.sample(20_000)).tolist())
    expected = (ids % 7 + 1) / (ids % 7 + 1).sum() * 20_000
    assert stats.chisquare([counts[number] for number in ids.tolist()], expected).pvalue > 1e-4


@each_buffer
@pytest.mark.parametrize("name", ["SliceSampler", "LazyTensorStorage"])
def test_an_episode_writer_with_parts_that_know_no_episodes(name, buffer):
    with pytest.raises(TypeError, match="use "):
        assemble(SIZE, LANES, buffer=buffer, **THEIRS[name][0]())


def test_her_sampler_in_a_torchrl_buffer_raises():
    storage = stock.LazyTensorStorage(10, ndim=2)
    made = stock.TensorDictReplayBuffer(storage=storage, sampler=HERSampler(), batch_size=4)
    made.extend(rows(Player().play([5, 5])).view(2, 5))
    with pytest.raises(RuntimeError, match="ReplayStorage"):
        made.sample()
