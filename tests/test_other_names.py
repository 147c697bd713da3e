"""Names of other libraries are answered with ours; ours are not in the tables of theirs."""

import copy
import inspect
import pickle
import re

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete

import trl_storages
from trl_storages.other_names import METHOD_NAMES, OTHER_NAMES, STEP, STEP_NAMES

# Options that users look for on a storage that is made, as other buffers have them.
READ = ("device", "num_envs", "observation_space", "seed", "storage_size")


@pytest.fixture
def storage():
    return trl_storages.UniformReplayStorage(Box(-9, 9, (3,)), Discrete(2), storage_size=8)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_methods_of_others(storage, name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': it is .* here"):
        getattr(storage, name)
    assert not hasattr(storage, name)


def test_no_method_of_ours_is_taken_for_anothers():
    options = inspect.signature(trl_storages.HERReplayStorage).parameters
    assert not {*dir(trl_storages.HERReplayStorage)} & {*METHOD_NAMES}
    assert not {*options} & {*OTHER_NAMES}
    assert not {*STEP} & {*STEP_NAMES}


@pytest.mark.parametrize("name", READ)
def test_options_that_are_no_attributes_say_where_to_look(storage, name):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is \w.* here"):
        getattr(storage, name)
    assert (storage.episodes.capacity, storage.episodes.num_envs) == (8, 1)
    assert storage.storage.device.type == "cpu"


def test_a_ratio_is_no_number_of_goals():
    with pytest.raises(
        TypeError, match=r"'her_ratio': .* num_goals \(4 for a ratio of 0\.8\) here"
    ):
        trl_storages.HERReplayStorage(Box(-9, 9, (3,)), Discrete(2), reward_fn=abs, her_ratio=0.8)


def test_other_attributes_are_as_ever(storage):
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        storage.colour  # noqa: B018
    with pytest.raises(AttributeError, match="no part with n_step"):
        storage.n_step  # noqa: B018
    assert len(pickle.loads(pickle.dumps(copy.copy(storage)))) == 0


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("optimize_memory_usage", "called share_next here"),
        ("ignore_obs_next", "called share_next here"),
        ("stack_num", "called frame_stack here"),
        ("sequence_length", r"called sample_unit=EpisodeSequence\(...\) here"),
        ("handle_timeout_termination", r"called truncateds, an argument of record\(...\) here"),
        *((part, rf"ReplayStorage\({part}=...\)") for part in ("sampler", "storage", "transform")),
    ],
)
def test_options_of_others_and_parts(name, ours):
    with pytest.raises(TypeError, match=f"no option '{name}': .*{ours}"):
        trl_storages.UniformReplayStorage(Box(-9, 9, (3,)), Discrete(2), **{name: 1})


def test_an_ensemble_says_how_it_is_called(storage):
    with pytest.raises(
        TypeError, match=r"'p': there are .*shares.* It is made of storages, .*shares="
    ):
        trl_storages.ReplayStorageEnsemble(storage, p=[1])


@pytest.mark.parametrize(
    ("part", "option", "ours"),
    [
        (trl_storages.HERSampler, "her_ratio", "num_goals (4 for a ratio of 0.8)"),
        (trl_storages.EpisodeWriter, "n_envs", "num_envs"),
        (trl_storages.EpisodeSequence, "seq_len", "length"),
        (trl_storages.EpisodeSequence(2).targets, "gamma", "discount"),
        (trl_storages.NStep, "n_steps", "n_step"),
        (trl_storages.NStep, "gamma", "discount"),
        (trl_storages.PackedStorage, "capacity", "max_size"),
        (trl_storages.PERSampler, "buffer_size", "max_capacity"),
        (trl_storages.HERSampler, "goal_selection_strategy", "strategy"),
        (trl_storages.GoalRelabel, "compute_reward", "reward_fn"),
        (trl_storages.returns_to_go, "gamma", "discount"),
        (trl_storages.UniformReplayStorage.from_env, "priority_key", "update_tensordict_priority"),
    ],
)
def test_options_of_parts_are_answered_too(part, option, ours):
    given = (gymnasium.make("CartPole-v1"),) if part.__name__ == "from_env" else ()
    with pytest.raises(TypeError, match=f"{option}'.*it is called {re.escape(ours)}"):
        part(*given, **{option: 1})


def test_the_class_that_was_called_is_named():
    with pytest.raises(TypeError, match=r"^PrioritizedReplayStorage\(\) missing 2 .*from_env"):
        trl_storages.PrioritizedReplayStorage()
