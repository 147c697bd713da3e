"""gym_reward: an environment's own rewards, for tensors."""

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv

from trl_storages import gym_reward

ACHIEVED = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
DESIRED = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])


def torchrl_env():
    return GymEnv("BitFlipping-v0", n_bits=2, categorical_action_encoding=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make("BitFlipping-v0", n_bits=2),
        torchrl_env,
        lambda: TransformedEnv(torchrl_env()),
    ],
    ids=["gymnasium", "torchrl", "transformed"],
)
def test_rewards_are_the_environments(make):
    reward = gym_reward(make())(ACHIEVED, DESIRED, {})
    assert reward.tolist() == [0.0, -1.0, 0.0]


def test_infos_arrive_as_arrays():
    class Env:
        def compute_reward(self, achieved_goal, desired_goal, info):
            assert isinstance(info["weight"], np.ndarray)
            return info["weight"] * (achieved_goal == desired_goal).all(-1)

    reward = gym_reward(Env())(ACHIEVED, DESIRED, {"weight": torch.tensor([2.0, 3.0, 4.0])})
    assert reward.tolist() == [2.0, 0.0, 4.0]


def test_an_environment_without_goals():
    with pytest.raises(TypeError, match="reward_fn of your own"):
        gym_reward(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["plain", "transformed"])
def test_several_environments_at_once(wrap):
    with pytest.raises(TypeError, match="SerialEnv holds several environments"):
        gym_reward(wrap(SerialEnv(2, torchrl_env)))
