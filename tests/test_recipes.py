"""The ready-made storages: the fields of their spaces, and the names of batches."""

import inspect

import numpy as np
import pytest
import torch
from goal_data import distance_reward, goal_transitions
from gymnasium import spaces
from torchrl.data import Categorical, Composite, Unbounded

import trl_storages
from trl_storages import keys

OBSERVATIONS = spaces.Dict(
    {
        "observation": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "achieved_goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "desired_goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    }
)
ACTIONS = spaces.Discrete(1000)
SPECS = Composite(
    observation=Unbounded((4,)), achieved_goal=Unbounded((3,)), desired_goal=Unbounded((3,))
)
FIELDS = {
    "observation",
    "achieved_goal",
    "desired_goal",
    "action",
    *[("next", key) for key in ("observation", "achieved_goal", "desired_goal")],
    *[("next", key) for key in ("reward", "done", "terminated", "truncated")],
}


def make(name="HERReplayStorage", observations=OBSERVATIONS, actions=ACTIONS, **options):
    if name == "HERReplayStorage":
        options.setdefault("reward_fn", distance_reward)
    options.setdefault("storage_size", 12)
    return getattr(trl_storages, name)(observations, actions, **options)


def rows(*shape):
    """Rows [T] of one lane or [E, T] of several, with entries that are not to be stored."""
    lanes, steps = torch.meshgrid(
        torch.arange(shape[0] if len(shape) > 1 else 1), torch.arange(shape[-1]), indexing="ij"
    )
    data = goal_transitions(lanes, steps, steps % 4 == 3)
    data["collector", "traj_ids"] = steps // 4
    data["logits"] = torch.zeros(*steps.shape, 7)
    return data if len(shape) > 1 else data[0]


@pytest.mark.parametrize(
    ("observations", "actions"), [(OBSERVATIONS, ACTIONS), (SPECS, Categorical(1000))]
)
def test_spaces_and_specs_give_the_same_fields(observations, actions):
    storage = make(observations=observations, actions=actions)
    assert storage.storage.initialized  # before the first write
    storage.extend(rows(8))
    stored, expected = storage[:], rows(8)
    assert {*stored.keys(True, True)} - {"index"} == FIELDS
    for key in FIELDS:
        assert torch.equal(stored[key], expected[key])


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
    whole.extend(rows(12))
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
        storage.extend(rows(6).set(key, torch.arange(6).unsqueeze(1)))
        batch = storage.sample(9)
        assert torch.equal(batch[key].squeeze(1), batch["index"])


def test_sampled_batches_are_written_again():
    one, other = make(alpha=0.5), make(alpha=0.5, on_gap="ignore")
    one.extend(rows(6))
    other.extend(one.sample(5), lanes=[0])
    assert len(other) == 5
    assert {*other[:].keys(True, True)} == FIELDS
