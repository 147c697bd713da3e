"""The ready-made storages: what they store, what they refuse, and that all take the same options."""

import copy
import inspect
import pickle

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
RECIPES = [
    "UniformReplayStorage",
    "NStepReplayStorage",
    "PrioritizedReplayStorage",
    "EREReplayStorage",
    "HERReplayStorage",
]


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


@pytest.mark.parametrize("name", RECIPES)
class TestEveryRecipe:
    @pytest.mark.parametrize(
        ("observations", "actions"), [(OBSERVATIONS, ACTIONS), (SPECS, Categorical(1000))]
    )
    def test_stores_the_fields_of_the_spaces_only(self, name, observations, actions):
        storage = make(name, observations, actions, batch_size=5)
        assert storage.storage.layout is not None  # fixed before the first write
        storage.extend(rows(8))
        stored = storage.storage.get(torch.arange(8))
        assert set(stored.keys(True, True)) == FIELDS
        expected = rows(8)
        for key in FIELDS:
            assert torch.equal(stored[key], expected[key])
        batch = storage.sample()
        assert batch.batch_size == (5,)
        assert FIELDS | {"index"} <= set(batch.keys(True, True))

    def test_shown(self, name):
        storage = make(name, num_envs=2)
        storage.extend(rows(2, 4))
        shown = repr(storage)
        assert shown.startswith(f"{name}(\n")
        for part in ("rows=8/12", "Sampler(", "EpisodeWriter(num_envs=2", "batch_size=256"):
            assert part in shown

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
    def test_copied(self, name, copied):
        storage = make(name, seed=3, batch_size=6)
        storage.extend(rows(10))
        other = copied(storage)
        for _ in range(3):
            first, second = storage.sample(), other.sample()
            for key in FIELDS | {"index"}:
                assert torch.equal(first[key], second[key])

    def test_on_a_gpu(self, name, gpu):
        if name == "PrioritizedReplayStorage":
            pytest.skip("new rows are told to its trees by the writer, which counts on the host")
        storage = make(name, device="cuda:0", num_envs=3, batch_size=8)
        episodes = storage.episodes
        steps = torch.arange(4, device=gpu).expand(3, 4)
        lanes = torch.arange(3, device=gpu).unsqueeze(1).expand(3, 4)
        data = goal_transitions(lanes, steps, steps == 2).select(*FIELDS)
        # As the writer does, but for what it counts on the host.
        slots = episodes.next_slots(4).reshape(-1)
        storage.storage.set(slots, data.reshape(-1), set_cursor=False)
        storage.storage._len = 12
        episodes.append(steps == 2)
        batch = storage.sample()
        assert {value.device for value in batch.values(True, True)} == {gpu}


def test_every_option_is_explained():
    explained = trl_storages.UniformReplayStorage.__doc__
    for option in inspect.signature(trl_storages.UniformReplayStorage).parameters:
        assert f"        {option}: " in explained, option


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
