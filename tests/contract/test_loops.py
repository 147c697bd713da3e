"""`record` in plain gymnasium loops: the rows are those of loops over single environments."""

from itertools import pairwise
from types import MappingProxyType

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import assemble, make_for, make_of
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

each_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)
INFO_KEYS = {
    "force": spaces.Box(-np.inf, np.inf, (1,), np.float64),
    ("next", "pair"): spaces.Box(-np.inf, np.inf, (2,), np.float32),
}

_THREE = spaces.Discrete(3)
_ONE = np.broadcast_to(np.int32(1), ())  # which may not be written


class CountingEnv(gymnasium.Env):
    """Observes its seed, episode and step; episodes of 1 to 5 steps end or are cut short by turns."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "goals": spaces.Dict({"reached": spaces.Box(0, 255, (2, 2), np.uint8)}),
            "kind": spaces.Discrete(4),
        }
    )

    def __init__(self, action_space=_THREE):
        self.action_space = action_space
        self.number, self.episode = 0, -1

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.number, self.episode = seed, -1
        self.episode += 1
        self.count = 0
        self.length = 1 + (3 * self.number + 2 * self.episode) % 5
        of_reset = {"force": np.full(1, -99.0), "pair": np.zeros(2, np.float32)}
        return self._observation(), of_reset if self.episode % 2 else {}

    def step(self, action):
        self.count += 1
        is_end = self.count == self.length
        terminated = is_end and self.episode % 2 == 0
        force = 10.0 * self.episode + self.count + 0.25 * float(np.sum(action))
        info = {"force": np.array([force]), "pair": np.float32([force, self.number])}
        return self._observation(), -force, terminated, is_end and not terminated, info

    def _observation(self):
        return {
            "observation": np.array([self.number, self.episode, self.count], np.float64),
            "goals": {"reached": np.full((2, 2), 10 * self.episode + self.count, np.uint8)},
            "kind": np.int64(self.count % 4),
        }


def policy(observation, space):
    """[E] or [] actions that follow from the observation."""
    total = observation["observation"].sum(-1)
    match space:
        case spaces.Discrete():
            return (total % 3).astype(np.int64)
        case spaces.MultiDiscrete():
            return np.stack([total % 3, total % 4], -1).astype(np.int64)
        case spaces.MultiBinary():
            return np.stack([total % 2, total % 3 == 0], -1).astype(np.int8)
    return np.stack([total, -total], -1).astype(np.float32)


ACTIONS = [
    _THREE,
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(2),
    spaces.Box(-99, 99, (2,), np.float32),
]


def expected_rows(seed, num_steps, actions):
    """[T] what a loop over one environment sees, without any storage."""
    env, rows = CountingEnv(actions), []
    before, _ = env.reset(seed=seed)
    for _ in range(num_steps):
        action = policy(before, actions)
        after, reward, terminated, truncated, info = env.step(action)
        after_reset = env.reset()[0] if terminated or truncated else after
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        row = {
            **seen_tensors(before),
            "action": torch.as_tensor(action),
            "next": {
                **seen_tensors(after),
                "force": torch.tensor(info["force"]),
                "pair": torch.tensor(info["pair"]),
                "reward": torch.tensor([reward], dtype=torch.float32),
                **{name: torch.tensor([bool(flag)]) for name, flag in flags.items()},
            },
        }
        rows.append(TensorDict(row))
        before = after_reset
    return torch.stack(rows)


def seen_tensors(seen):
    parts = {"observation": seen["observation"], "kind": seen["kind"]}
    parts = {key: torch.as_tensor(value) for key, value in parts.items()}
    return {**parts, "goals": {"reached": torch.tensor(seen["goals"]["reached"])}}


def as_tensors(value):
    if isinstance(value, dict):
        return MappingProxyType({key: as_tensors(entry) for key, entry in value.items()})
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    return torch.from_numpy(value) if is_array else value


def in_lane_order(rows):
    """Rows sorted by environment, episode and step."""
    seen = rows["observation"]
    return rows[torch.argsort(seen[:, 0] * 10_000 + seen[:, 1] * 100 + seen[:, 2])]


def assert_same(rows, expected):
    assert set(rows.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        assert rows[key].dtype == value.dtype, key
        assert torch.equal(rows[key], value), key


def play(envs, storage, num_steps, convert=lambda value: value):
    """A plain loop over a vector of environments; returns how many steps each of them made."""
    steps = np.zeros(envs.num_envs, int)
    before, _ = envs.reset(seed=list(range(envs.num_envs)))
    mode, over = envs.metadata["autoreset_mode"], np.zeros(envs.num_envs, bool)
    for _ in range(num_steps):
        action = policy(before, envs.single_action_space)
        after, *outcome = envs.step(action)
        storage.record(*(convert(value) for value in (before, action, *outcome, after)))
        # In one of the modes the step after the end of an episode only resets.
        steps += ~over if mode is AutoresetMode.NEXT_STEP else True
        over = outcome[1] | outcome[2]
        if mode is AutoresetMode.DISABLED and over.any():
            after, _ = envs.reset(options={"reset_mask": over})
        before = after
    return steps


@each_mode
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("actions", ACTIONS, ids=lambda space: type(space).__name__)
def test_each_lane_holds_what_a_single_environment_does(place, mode, num_envs, actions):
    envs = SyncVectorEnv([lambda: CountingEnv(actions)] * num_envs, autoreset_mode=mode)
    info_keys = INFO_KEYS if actions is _THREE else [*INFO_KEYS]
    storage = make_for(envs, place=place, size=90, info_keys=info_keys)
    convert = as_tensors if isinstance(actions, spaces.MultiDiscrete) else (lambda value: value)
    steps = play(envs, storage, 25, convert)
    expected = [expected_rows(seed, count, actions) for seed, count in enumerate(steps)]
    assert_same(in_lane_order(storage[:]), in_lane_order(torch.cat(expected)))


@pytest.mark.parametrize("with_parts", [False, True])
def test_a_single_environment(place, with_parts):
    """Whose fields the storage knows, or learns from the first step."""
    env = CountingEnv()
    storage = make_for(env, place=place, size=40, info_keys=INFO_KEYS)
    expected = expected_rows(2, 30, env.action_space)
    if with_parts:
        storage = assemble(40, place=place)
        expected = expected.exclude(("next", "force"), ("next", "pair"))
    before, _ = env.reset(seed=2)
    for _ in range(30):
        action = policy(before, env.action_space)
        after, *outcome = env.step(action)
        index = storage.record(before, action, *outcome, after)
        assert storage[index]["observation"].tolist() == [before["observation"].tolist()]
        before = env.reset()[0] if outcome[1] or outcome[2] else after
    assert_same(in_lane_order(storage[:]), expected)


@each_mode
def test_what_the_loop_adds_to_the_infos_is_of_the_step(mode):
    """A recurrent state, also where an episode ends and the environment is reset."""
    envs = SyncVectorEnv([CountingEnv] * 2, autoreset_mode=mode)
    storage = make_for(envs, size=90, extra_fields={"state": (torch.float32, (1,))})

    class Recording:
        state = torch.zeros(2, 1)
        over = np.zeros(2, bool)

        def record(self, *step):
            storage.record(*step[:5], {**step[5], "state": self.state}, step[6])
            done = step[3] | step[4]
            begins = done | (self.over if mode is AutoresetMode.NEXT_STEP else False)
            self.state = torch.where(torch.as_tensor(begins)[:, None], 0, self.state + 1)
            self.over = done

    play(envs, Recording(), 30)
    rows = storage[:]
    assert torch.equal(rows["state"][:, 0], rows["observation"][:, 2].float())
    assert rows["state"].max() > 2


@pytest.mark.requirement("refused-is-unchanged")
class TestRefused:
    def step_that_ends(self, envs):
        before, _ = envs.reset(seed=[0, 1, 2])
        while True:
            action = policy(before, envs.single_action_space)
            after, *outcome = envs.step(action)
            if (outcome[1] | outcome[2]).any():
                return before, action, *outcome, after
            before = after

    LACKING = {
        "everything": (lambda _: {}, "final_obs"),
        "a last observation": (lambda it: {**it, "_final_obs": np.zeros(3, bool)}, "final_obs"),
        "what was before the reset": (lambda it: {**it, "final_info": {}}, r"'force'.*got \['f"),
        "an entry of one": (lambda it: {**it, "_force": np.zeros(3, bool)}, "force"),
    }

    @pytest.mark.parametrize(("change", "named"), LACKING.values(), ids=LACKING)
    def test_infos_that_lack_something(self, change, named):
        envs = SyncVectorEnv([CountingEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
        storage = make_for(envs, size=90, info_keys=INFO_KEYS)
        *step, infos, after = self.step_that_ends(envs)
        with pytest.raises((KeyError, ValueError), match=named):
            storage.record(*step, change(infos), after)
        assert len(storage) == 0
        storage.record(*step, infos, after)
        assert len(storage) == 3

    @pytest.mark.parametrize(("n", "with_parts"), [(3, False), (3, True), (1, False), (1, True)])
    def test_vector_environments_without_a_named_mode(self, n, with_parts):
        envs = SyncVectorEnv([CountingEnv] * n, autoreset_mode=AutoresetMode.SAME_STEP)
        storage = assemble(90, n) if with_parts else make_for(envs, size=90, autoreset_mode=None)
        before, _ = envs.reset(seed=[3] * n)
        after, *outcome = envs.step(np.ones(n, np.int64))
        with pytest.raises(ValueError, match="autoreset_mode"):
            storage.record(before, np.ones(n, np.int64), *outcome, after)


SPACES = {
    "floats": spaces.Box(-1, 1, (2, 3), np.float64),
    "pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "a number": spaces.Discrete(7),
    "numbers": spaces.MultiDiscrete([3, 4]),
    "bits": spaces.MultiBinary(6),
    "nested": spaces.Dict(
        {
            "observation": spaces.Box(-9, 9, (2,), np.float16),
            "deep": spaces.Dict({"er": spaces.Dict({"one": spaces.Discrete(3)})}),
        }
    ),
}


def entries(space, value):
    """(space, value) of each entry; of a space that is no dict under `observation`."""
    if not isinstance(space, spaces.Dict):
        return {("observation",): (space, value)}
    found = {}
    for name, part in space.items():
        for key, entry in entries(part, value[name]).items():
            found[(name, *(key if isinstance(part, spaces.Dict) else ()))] = entry
    return found


@pytest.mark.requirement("nested-dtypes")
@pytest.mark.parametrize("name", SPACES)
def test_observations_of_every_space(name, place):
    space = SPACES[name]
    space.seed(0)
    storage = make_of(space, _THREE, place=place)
    seen = [space.sample() for _ in range(6)]
    for before, after in pairwise(seen):
        storage.record(before, 1, 0.0, False, False, {}, after)
    rows = storage[:]
    for key in entries(space, seen[0]):
        parts = [entries(space, value)[key] for value in seen]
        expected = torch.stack([torch.as_tensor(np.asarray(value)) for _, value in parts])
        before, after = rows[key], rows["next"][key]
        assert before.dtype == after.dtype == expected.dtype
        assert torch.equal(before, expected[:-1])
        assert torch.equal(after, expected[1:])


class TestValues:
    """What a loop hands over is copied, and cast where nothing is lost."""

    def recorded(self, observation, action, reward, space=_THREE):
        box = spaces.Box(-9, 9, observation.shape, np.float32)
        storage = make_of(box, space)
        for is_first in (True, False):
            with torch.inference_mode(is_first):
                storage.record(observation, action, reward, False, False, {}, observation)
        return storage[:]

    @pytest.mark.parametrize(
        "observation",
        [
            np.float32([1, 2]),
            np.float32([1, 0, 2, 0])[::2],
            np.array([1, 2], ">f4"),
            np.float16([[1, 2]])[::-1],
            torch.tensor([1.0, 2.0]),
            torch.tensor([1.0, 2.0], requires_grad=True),
        ],
    )
    @pytest.mark.parametrize("action", [1, _ONE, np.array(1), torch.tensor(1)])
    def test_forms(self, observation, action):
        rows = self.recorded(observation, action, np.float64(0.5))
        assert rows["observation"].reshape(2, 2).tolist() == [[1, 2]] * 2
        assert rows["action"].tolist() == [1, 1]
        assert rows["next", "reward"].tolist() == [[0.5]] * 2

    def test_arrays_may_be_used_again(self):
        storage = make_of(spaces.Box(-9, 9, (2,), np.float32), _THREE)
        before, after = np.zeros(2, np.float32), np.ones(2, np.float32)
        for number in range(5):
            before[:], after[:] = number, number + 1
            storage.record(before, 1, 0.0, False, False, {}, after)
        assert storage[:]["observation"][:, 0].tolist() == [0, 1, 2, 3, 4]
        assert before.tolist() == [4, 4]

    @pytest.mark.requirement("refused-is-unchanged")
    @pytest.mark.parametrize(
        ("space", "action"),
        [
            (_THREE, 3),
            (spaces.MultiBinary(2), [256, 0]),
            (spaces.Discrete(3, start=-1), 2),
            (spaces.MultiDiscrete([2, 3]), [2, 0]),
            (_THREE, 0.5),
            (spaces.Dict({"action": _THREE}), 1),
        ],
    )
    def test_actions_that_there_are_not(self, space, action):
        with pytest.raises((ValueError, TypeError), match="action"):
            self.recorded(np.float32([1, 2]), action, 0.0, space)

    def test_a_first_step_that_is_refused_tells_nothing(self):
        storage, seen = assemble(), np.zeros(2)
        with pytest.raises(ValueError, match="observation"):
            storage.record(seen, 1, 0.0, False, False, {}, seen[:1])
        seen = np.zeros(3, np.float32)
        storage.record(seen, 1, 0.0, False, False, {}, seen)
        assert storage[:]["observation"].dtype is torch.float32


def test_end_episodes_in_a_loop_that_resets_early():
    env = CountingEnv()
    storage = make_for(env, "n-step", size=40, n_step=100, discount=1.0)
    for seed in (3, 4):
        before, _ = env.reset(seed=seed)
        after, *outcome = env.step(1)
        storage.record(before, 1, *outcome, after)
        storage.end_episodes()
    batch = storage.sample(50)
    assert (batch["steps_to_next_obs"] == 1).all()
    assert torch.equal(batch["next", "observation"][:, 0], batch["observation"][:, 0])
    # No step is skipped, as the one after an end would be.
    envs = SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    storage = make_for(envs, size=90)
    for _ in range(3):
        play(envs, storage, 1)
        storage.end_episodes()
    assert len(storage) == 6
