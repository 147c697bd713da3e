"""`record` and `add` say what they take, where they are called as other libraries' `add` is."""

import inspect

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

import trl_storages
from trl_storages.other_names import STEP

OBS, NEXT_OBS, ACTION, REWARD, DONE = np.zeros(3, "f4"), np.ones(3, "f4"), 1, 0.5, False


@pytest.fixture
def storage():
    return trl_storages.UniformReplayStorage(Box(-9, 9, (3,)), Discrete(2), storage_size=8)


def test_the_order_is_that_of_the_signature():
    record = trl_storages.ReplayStorage.record
    assert [*inspect.signature(record).parameters] == ["self", *STEP]
    assert [*inspect.signature(trl_storages.ReplayStorage.add).parameters] == ["self", "data"]


@pytest.mark.parametrize(
    ("step", "named", "message"),
    [
        # Stable-Baselines3 and CleanRL, Stable-Baselines 2, Rainbow of CleanRL.
        ((OBS, NEXT_OBS, ACTION, REWARD, DONE, [{}]), {}, r"got 6 .* record\(obs, action, reward"),
        ((OBS, ACTION, REWARD, NEXT_OBS, DONE, {}), {}, "got 6 arguments"),
        ((OBS, ACTION, REWARD, NEXT_OBS, DONE), {}, "got 5 arguments"),
        # Seven, in an order of one's own.
        ((OBS, ACTION, REWARD, NEXT_OBS, DONE, DONE, {}), {}, "infos must be a dict.*, got bool"),
        # cpprb.
        (
            (),
            {"obs": OBS, "act": ACTION, "rew": REWARD, "next_obs": NEXT_OBS, "done": DONE},
            "obs is observations, act is actions, rew is rewards, next_obs is next_observations, "
            "done is terminateds and truncateds",
        ),
        ((), {"colour": 1}, "got colour"),
        ((OBS, ACTION), {"observations": OBS}, "got 3 arguments"),
        # TorchRL and tianshou.
        ((TensorDict({"observation": OBS}),), {}, "got a TensorDict: write it by extend or add"),
        ((), {}, "got 0 arguments"),
    ],
)
def test_a_step_of_another_library(storage, step, named, message):
    order = "record takes observations, actions, rewards, terminateds, truncateds, infos, next_obs"
    with pytest.raises(TypeError, match=order) as told:
        storage.record(*step, **named)
    assert told.match(message)
    assert len(storage) == 0


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ((OBS, NEXT_OBS, ACTION, REWARD, DONE, [{}]), {}),
        ((), {"obs": OBS, "act": ACTION}),
        ((), {"obs": OBS}),
        ((), {}),
    ],
)
def test_a_step_that_is_added(storage, step, named):
    count = len(step) + len(named)
    with pytest.raises(TypeError, match=rf"add takes one TensorDict, got {count} .* record\(obs"):
        storage.add(*step, **named)
    assert len(storage) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"observations": np.zeros(4, "f4")}, ValueError, "observations must"),
        ({"infos": [{}]}, TypeError, "infos must be a dictionary for a single environment"),
        ({"actions": "left"}, TypeError, "actions must"),
    ],
)
def test_other_errors_are_what_they_were(storage, change, error, message):
    step = dict(zip(STEP, (OBS, ACTION, REWARD, DONE, DONE, {}, NEXT_OBS), strict=True))
    with pytest.raises(error, match=message) as told:
        storage.record(**{**step, **change})
    assert "in this order" not in str(told.value)
    with pytest.raises(TypeError, match="data must be a TensorDict"):
        storage.add(torch.zeros(3))
