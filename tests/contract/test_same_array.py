"""Environments that change their observation in place are told apart from constant arrays."""

import numpy as np
import pytest
import torch
from contract.make import assemble, library
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

SPACE = Box(-1e3, 1e3, (2,), np.float32)


def storage_for(space=SPACE, **options):
    options = {"storage_size": 100, **options}
    return library.UniformReplayStorage(space, Discrete(2), **options)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("place", ["cpu", "device"])
def test_observation_that_is_changed_in_place_raises(is_view, place, monkeypatch):
    if place == "device":
        monkeypatch.setattr("trl_storages.storage.memory.HOSTS", ())
    storage, state = storage_for(), np.zeros(2, np.float32)
    seen, after = (state[:], state[:]) if is_view else (state, state)
    storage.record(seen, 0, 1.0, False, False, {}, after)
    state += 1
    with pytest.raises(ValueError, match=r"same array[\s\S]*observation\.copy\(\)"):
        storage.record(seen, 0, 1.0, False, False, {}, after)
    assert len(storage) == 1


def test_lanes_of_one_array_that_is_changed_in_place_raise():
    storage = storage_for(num_envs=2, autoreset_mode="SameStep")
    state, no = np.zeros((2, 2), np.float32), np.zeros(2, bool)
    step = state, [0, 0], [1.0, 1.0], no, no, {}, state
    storage.record(*step)
    state[1] += 1
    with pytest.raises(ValueError, match="same array"):
        storage.record(*step)
    assert len(storage) == 2


def test_tensor_that_is_changed_in_place_raises_in_extend():
    storage, state = assemble(on_gap="ignore"), torch.zeros(1, 2)
    outcome = {"reward": torch.ones(1, 1), "done": torch.zeros(1, 1, dtype=torch.bool)}
    step = TensorDict({"observation": state, "next": {"observation": state, **outcome}}, [1])
    storage.extend(step)
    state += 1
    with pytest.raises(ValueError, match="same array"):
        storage.extend(step)
    assert len(storage) == 1


def test_constant_array_is_stored():
    storage, state = storage_for(), np.full(2, np.nan, np.float32)
    for step in range(8):
        storage.record(state, 0, 1.0, step % 3 == 2, False, {}, state)
    assert len(storage) == 8
    assert len(storage.episodes.table()) == 3


def test_goal_that_is_one_array_for_an_episode_is_stored_although_the_loop_resets_early():
    storage, goal = storage_for(Dict(observation=SPACE, desired_goal=SPACE)), np.zeros(2, "f")
    at = [np.full(2, number, np.float32) for number in range(9)]
    for number in (0, 1, 5):
        seen, after = ({"observation": at[n], "desired_goal": goal} for n in (number, number + 1))
        if number == 5:
            with pytest.warns(UserWarning, match="end_episodes"):
                storage.record(seen, 0, 1.0, False, False, {}, after)
        else:
            storage.record(seen, 0, 1.0, False, False, {}, after)
    assert len(storage.episodes.table()) == 2
