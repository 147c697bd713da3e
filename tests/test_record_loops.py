"""`record` in loops over `gymnasium.make_vec`: the rows are those of loops over single environments."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode

from trl_storages import UniformReplayStorage

IMAGE = Box(0, 255, (4, 4, 3), np.uint8)
OBSERVATIONS = {
    "image": IMAGE,
    "dict": Dict({"position": Box(-np.inf, np.inf, (2,), np.float64), "camera": IMAGE}),
}
ACTIONS = {
    "discrete": Discrete(5),
    "box": Box(-1, 1, (3,), np.float32),
    "multi-discrete": MultiDiscrete([3, 4]),
    "multi-binary": MultiBinary(6),
}
NUM_ENVS = 3


class WalkEnv(gymnasium.Env):
    """Sums up its actions; episodes end, or are cut short, after 1 to 6 steps."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = OBSERVATIONS[observations], ACTIONS[actions]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 7))
        self.position, self.count = self.np_random.standard_normal(2), 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        self.position = self.position + np.array([np.sum(action), 1.0])
        is_end, is_cut = self.count == self.length, self.length % 2 == 0
        reward = float(self.position.sum())
        return self.observe(), reward, is_end and not is_cut, is_end and is_cut, {}

    def observe(self):
        camera = np.full(IMAGE.shape, int(abs(self.position[0]) * 1000) % 256, np.uint8)
        camera[self.count % 4] = self.count
        if isinstance(self.observation_space, Dict):
            return {"position": self.position.copy(), "camera": camera}
        return camera


gymnasium.register("Walk-v0", WalkEnv)


def storage_for(env, num_envs=1, **options):
    space = getattr(env, "single_observation_space", env.observation_space)
    actions = getattr(env, "single_action_space", env.action_space)
    return UniformReplayStorage(space, actions, storage_size=900, num_envs=num_envs, **options)


def single_loop(observations, actions, seed, taken):
    """The rows of one environment, which is handed the actions of its lane."""
    env = gymnasium.make("Walk-v0", observations=observations, actions=actions)
    storage = storage_for(env)
    before, _ = env.reset(seed=seed)
    for action in taken:
        after, *outcome = env.step(action)
        storage.record(before, action, *outcome, after)
        before = env.reset()[0] if outcome[1] or outcome[2] else after
    return storage[:]


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_each_lane_holds_what_a_single_environment_does(observations, actions, mode):
    env = gymnasium.make_vec(
        "Walk-v0",
        num_envs=NUM_ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        observations=observations,
        actions=actions,
    )
    storage = storage_for(env, NUM_ENVS, autoreset_mode=env.metadata["autoreset_mode"])
    env.action_space.seed(5)
    before, _ = env.reset(seed=10)
    taken, ended = [[] for _ in range(NUM_ENVS)], np.zeros(NUM_ENVS, bool)
    for _ in range(30):
        action = env.action_space.sample()
        after, *outcome = env.step(action)
        storage.record(before, action, *outcome, after)
        for lane in range(NUM_ENVS):
            # The step after the end of an episode only resets, in one of the modes.
            if not (ended[lane] and mode is AutoresetMode.NEXT_STEP):
                taken[lane].append(action[lane])
        ended = outcome[1] | outcome[2]
        if mode is AutoresetMode.DISABLED and ended.any():
            after, _ = env.reset(options={"reset_mask": ended})
        before = after

    storage.validate()
    for lane in range(NUM_ENVS):
        steps = len(taken[lane])
        expected = single_loop(observations, actions, 10 + lane, taken[lane])
        rows = storage[torch.arange(steps) * NUM_ENVS + lane]
        assert set(rows.keys(True, True)) == set(expected.keys(True, True))
        for key, value in expected.items(True, True):
            assert rows[key].dtype == value.dtype
            assert torch.equal(rows[key], value), key
        assert expected["next", "terminated"].any()
        assert expected["next", "truncated"].any()
    # Episodes differ in length.
    lengths = storage.episodes.episodes()["length"]
    assert len(lengths.unique()) > 3


@pytest.mark.parametrize("mode", AutoresetMode)
def test_what_the_loop_adds_to_the_infos_is_of_the_step_also_where_an_episode_ends(mode):
    envs = gymnasium.make_vec(
        "BitFlipping-v0",
        num_envs=2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        n_bits=2,
    )
    storage = UniformReplayStorage.from_env(
        envs, storage_size=100, extra_fields={"state": (torch.float32, (1,))}
    )
    before, _ = envs.reset(seed=0)
    state, over = torch.zeros(2, 1), np.zeros(2, bool)
    for _ in range(30):
        actions = envs.action_space.sample()
        after, reward, terminated, truncated, infos = envs.step(actions)
        kept = {**infos, "state": state}
        storage.record(before, actions, reward, terminated, truncated, kept, after)
        done = terminated | truncated
        # A step that only resets leaves the state where an episode begins.
        begins = done | (over if mode is AutoresetMode.NEXT_STEP else False)
        state = torch.where(torch.as_tensor(begins)[:, None], 0, state + 1)
        before, over = after, done
        if mode is AutoresetMode.DISABLED and done.any():
            before, _ = envs.reset(options={"reset_mask": done})
    # Each row holds how many steps of its episode came before it.
    rows = storage.sample(500)
    assert rows["state"].max() > 0
    assert torch.equal(rows["state"][:, 0], storage.episodes.behind(rows["index"]).float())
    envs.close()


def ending_envs(mode, num_envs=3):
    return gymnasium.make_vec(
        "BitFlipping-v0",
        num_envs=num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        n_bits=2,
    )


@pytest.mark.parametrize("num_envs", [1, 3])
def test_steps_that_only_reset_are_noticed_also_if_the_storage_is_told_there_are_none(num_envs):
    envs = ending_envs(AutoresetMode.NEXT_STEP, num_envs)
    storage = UniformReplayStorage.from_env(envs, storage_size=90, autoreset_mode="Disabled")
    before, _ = envs.reset(seed=0)
    actions = np.zeros(num_envs, np.int64)
    after = before
    while not storage.episodes.episodes()["finished"].any():
        before, (after, *outcome) = after, envs.step(actions)
        storage.record(before, actions, *outcome, after)
    begun, (after, *outcome) = after, envs.step(actions)
    with pytest.warns(UserWarning, match="that step is no transition: make the storage with"):
        storage.record(begun, actions, *outcome, after)
    envs.close()


def test_a_state_of_two_tensors_is_refused_by_name():
    envs = ending_envs(AutoresetMode.SAME_STEP)
    storage = UniformReplayStorage.from_env(envs, storage_size=90, info_keys=["state"])
    before, _ = envs.reset(seed=0)
    actions = np.zeros(3, np.int64)
    after, *outcome, infos = envs.step(actions)
    for state in ((torch.zeros(3, 4), torch.ones(3, 4)), (torch.zeros(1, 3, 4),) * 2):
        with pytest.raises(
            TypeError, match=r"\['state'\] must be one tensor, got a tuple of 2.*'cell'"
        ):
            storage.record(before, actions, *outcome, {**infos, "state": state}, after)
    assert len(storage) == 0
    envs.close()


@pytest.mark.parametrize(
    ("num_envs", "field", "given", "remedy"),
    [
        (3, [4], [1, 3, 4], "value[0]"),
        (3, [1, 4], [1, 3, 4], "value.transpose(0, 1), for a field of the shape [1, 4] each"),
        (3, [4], [2, 3, 4], "value.transpose(0, 1), for a field of the shape [2, 4] each"),
        (3, None, [1, 3, 4], "value.transpose(0, 1), for a field of the shape [1, 4] each"),
        (1, [4], [1, 1, 4], "value.reshape([4])"),
        (1, [1, 4], [1, 1, 4], "value.reshape([1, 4])"),
    ],
)
def test_a_state_as_recurrent_networks_return_it_is_told_how_to_turn(
    num_envs, field, given, remedy
):
    kept = {"info_keys": ["state"]} if field is None else {}
    kept = kept or {"extra_fields": {"state": (torch.float32, field)}}
    spaces = Box(-9, 9, (2,)), Discrete(2)
    storage = UniformReplayStorage(*spaces, storage_size=90, num_envs=num_envs, **kept)
    lead = [] if num_envs == 1 else [num_envs]
    seen, zeros, flags = np.zeros([*lead, 2], "f"), np.zeros(lead), np.zeros(lead, bool)
    step = seen, zeros.astype(int), zeros, flags, flags, {"state": torch.zeros(given)}, seen + 1
    if num_envs == 1:
        step = seen, 0, 0.0, False, False, *step[5:]
    with pytest.raises(ValueError, match=re.escape(remedy)):
        storage.record(*step)
    assert len(storage) == 0
