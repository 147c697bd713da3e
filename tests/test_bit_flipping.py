import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from trl_storages.envs import BitFlippingEnv


def make(n_bits, continuous=False):
    return gymnasium.make("BitFlipping-v0", n_bits=n_bits, continuous=continuous).unwrapped


def start(env, state, goal, seed=0):
    """Resets until the state and the goal are the given ones: no private attribute is touched."""
    for trial in range(seed, seed + 10_000):
        obs, _ = env.reset(seed=trial)
        if obs["observation"].tolist() == state and obs["desired_goal"].tolist() == goal:
            return obs
    raise AssertionError("no seed found")


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("n_bits", [2, 6])
def test_bit_flipping_passes_the_checker_of_gymnasium(n_bits, continuous):
    check_env(make(n_bits, continuous))


def test_episode_worked_out_by_hand():
    env = make(3)
    start(env, [0, 0, 0], [1, 0, 1])
    obs, reward, terminated, truncated, info = env.step(0)
    assert obs["observation"].tolist() == obs["achieved_goal"].tolist() == [1, 0, 0]
    assert obs["desired_goal"].tolist() == [1, 0, 1]
    assert (reward, terminated, truncated) == (-1.0, False, False)
    assert info == {"is_success": False, "num_steps": 1}
    obs, reward, terminated, truncated, info = env.step(np.int64(2))
    assert obs["observation"].tolist() == [1, 0, 1]
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info == {"is_success": True, "num_steps": 2}


def test_continuous_action_flips_its_largest_component():
    env = make(3, continuous=True)
    start(env, [0, 0, 0], [1, 1, 1])
    state = env.step(np.array([0.9, -1.0, 0.8], np.float32))[0]["observation"]
    assert state.tolist() == [1, 0, 0]
    state = env.step(np.array([-0.9, -0.2, -0.3], np.float32))[0]["observation"]
    assert state.tolist() == [1, 1, 0]
    state = env.step(np.zeros(3, np.float32))[0]["observation"]  # the first of equal ones
    assert state.tolist() == [0, 1, 0]


def test_start_and_goal_are_uniform_over_unequal_pairs():
    env = make(2)
    counts = np.zeros((4, 4))
    env.reset(seed=0)
    for _ in range(12_000):
        obs, info = env.reset()
        assert not info["is_success"]
        state = int(obs["observation"] @ [1, 2])
        goal = int(obs["desired_goal"] @ [1, 2])
        counts[state, goal] += 1
    assert (counts.diagonal() == 0).all()
    unequal = counts[~np.eye(4, dtype=bool)]
    # 12 pairs, 1000 expected each; 31.3 is the 0.999 quantile of chi-square with 11 degrees.
    assert ((unequal - 1000) ** 2 / 1000).sum() < 31.3


def test_rewards_of_any_leading_shape():
    env = make(2)
    goal = np.array([1.0, 0.0], np.float32)
    reached = np.array([[[1, 0], [0, 0]], [[0, 1], [1, 0]]], np.float32)
    rewards = env.compute_reward(reached, goal, None)
    assert rewards.tolist() == [[0, -1], [-1, 0]]
    assert rewards.dtype == np.float32
    assert not np.signbit(rewards[0, 0])
    assert env.compute_terminated(reached, goal, None).tolist() == [[True, False], [False, True]]
    assert env.compute_reward(goal, goal, {}) == 0
    infos = {"num_steps": np.array([1, 2, 3])}
    assert env.compute_truncated(reached, goal, infos).tolist() == [False, True, True]


def test_step_agrees_with_the_compute_functions():
    env = make(4)
    rng = np.random.default_rng(0)
    for episode in range(20):
        env.reset(seed=episode)
        ended = False
        while not ended:
            obs, reward, terminated, truncated, info = env.step(int(rng.integers(4)))
            goals = obs["achieved_goal"], obs["desired_goal"], info
            assert reward == env.compute_reward(*goals)
            assert terminated == env.compute_terminated(*goals) == info["is_success"]
            assert truncated == env.compute_truncated(*goals)
            ended = terminated or truncated
        assert info["num_steps"] <= 4


@pytest.mark.parametrize("n_bits", [0, -1, 2.5, 2.0, True, "3"])
def test_wrong_number_of_bits_raises(n_bits):
    with pytest.raises((TypeError, ValueError), match="n_bits must be an integer of at least 1"):
        BitFlippingEnv(n_bits)


@pytest.mark.parametrize("action", [3, -1, 1.0, np.zeros(3, np.float32)])
def test_wrong_discrete_action_raises(action):
    env = make(3)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"number of a bit, 0 to 2.*continuous=True"):
        env.step(action)
    assert env.step(0)[4]["num_steps"] == 1


@pytest.mark.parametrize("action", [1, np.zeros(2, np.float32), np.array([0, np.nan, 0])])
def test_wrong_continuous_action_raises(action):
    env = make(3, continuous=True)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"3 finite numbers.*continuous=False"):
        env.step(action)
