"""The ready-made storages: the fields of their spaces, and the names of batches."""

import inspect

import pytest
import torch
from contract.make import spaces
from contract.steps import Player, as_bits, rows
from torchrl.data import Composite, Unbounded

import trl_storages
from trl_storages import keys

OBSERVATIONS, ACTIONS = spaces()
SPECS = Composite(
    observation=Unbounded((3,)), achieved_goal=Unbounded((2,)), desired_goal=Unbounded((2,))
)
FIELDS = {*rows([]).keys(True, True)} - {"effort"}


def make(name="HERReplayStorage", observations=OBSERVATIONS, actions=ACTIONS, **options):
    if name == "HERReplayStorage":
        options.setdefault("reward_fn", lambda achieved, desired, infos: desired.sum(-1))
    options.setdefault("storage_size", 12)
    return getattr(trl_storages, name)(observations, actions, **options)


def steps(num_steps):
    """Rows `[T]`, with entries that are not to be stored."""
    data = rows(Player().play([4] * (num_steps // 4), num_steps % 4))
    data["collector", "traj_ids"] = torch.arange(num_steps) // 4
    data["logits"] = torch.zeros(num_steps, 7)
    return data


@pytest.mark.parametrize(
    ("observations", "actions"), [(OBSERVATIONS, ACTIONS), (SPECS, Unbounded((2,)))]
)
def test_spaces_and_specs_give_the_same_fields(observations, actions):
    storage = make(observations=observations, actions=actions)
    assert storage.storage.initialized  # before the first write
    storage.extend(steps(8))
    stored, expected = storage[:], steps(8)
    assert {*stored.keys(True, True)} - {"index"} == FIELDS
    for key in FIELDS:
        assert torch.equal(as_bits(stored[key]), as_bits(expected[key]))


def test_every_option_is_explained():
    explained = inspect.cleandoc(trl_storages.UniformReplayStorage.__doc__)
    for option in inspect.signature(trl_storages.UniformReplayStorage).parameters:
        assert f"    {option}: " in explained, option


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("NStepReplayStorage", {"n_step": 3}),
        ("PrioritizedReplayStorage", {"alpha": 0.6}),
        ("EREReplayStorage", {"eta": 0.996}),
        ("EpisodeReplayStorage", {"batch_size": 16}),
    ],
)
def test_recipes_differ_in_their_defaults(name, other):
    of_uniform = inspect.signature(trl_storages.UniformReplayStorage).parameters
    of_recipe = inspect.signature(getattr(trl_storages, name)).parameters
    different = {
        key: it.default for key, it in of_recipe.items() if it.default != of_uniform[key].default
    }
    assert different == other


# Names that sampling sets in batches


def test_all_that_sampling_sets_is_known():
    whole = make(alpha=0.5, n_step=2, sample_unit=trl_storages.EpisodeSequence(2))
    whole.extend(steps(12))
    both = trl_storages.ReplayStorageEnsemble(whole, batch_size=4)
    found = {
        key
        for batch in (whole.sample(4), whole.sample_episodes(2), both.sample())
        for key in batch.keys(include_nested=True, leaves_only=True)
    }
    # TorchRL's own transforms write the same under these, and NStep refuses rows that hold its one.
    may_be_stored = {keys.IS_INIT, keys.STEPS_TO_NEXT_OBS}
    assert found == FIELDS | may_be_stored | {*keys.SET_BY_SAMPLING}


def test_names_that_torchrl_writes_too_may_be_stored():
    for key in (keys.IS_INIT, keys.STEPS_TO_NEXT_OBS, ("next", "index")):
        storage = make("UniformReplayStorage", extra_fields={key: (torch.int64, (1,))})
        storage.extend(steps(6).set(key, torch.arange(6).unsqueeze(1)))
        batch = storage.sample(9)
        assert torch.equal(batch[key].squeeze(1), batch["index"])


def test_sampled_batches_are_written_again():
    one, other = make(alpha=0.5), make(alpha=0.5, on_gap="ignore")
    one.extend(steps(6))
    other.extend(one.sample(5), lanes=[0])
    assert len(other) == 5
    assert {*other[:].keys(True, True)} == FIELDS
