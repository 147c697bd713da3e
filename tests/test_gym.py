import math
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList
from in_pairs import in_pairs
from tensordict import TensorDict
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    NonTensor,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import GymEnv, GymWrapper

from trl_storages import UniformReplayStorage
from trl_storages.gym import GymRecorder, transition_fields
from trl_storages.replay import ReplayStorage
from trl_storages.rows.packed import PackedStorage
from trl_storages.writing import EpisodeWriter

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class CountingEnv(gymnasium.Env):
    """Observes its seed, episode and step; episodes of 1 to 5 steps; deterministic."""

    observation_space = spaces.Dict(
        {
            "observation": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "goals": spaces.Dict({"reached": spaces.Box(0, 255, (2, 2), np.uint8)}),
            "kind": spaces.Discrete(4),
        }
    )
    action_space = spaces.Discrete(3)

    def __init__(self, info_at_reset=True):
        self.info_at_reset = info_at_reset
        self.seed = 0
        self.episode = self.count = -1

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode += 1
        self.count = 0
        self.length = 1 + (3 * self.seed + 2 * self.episode) % 5
        info = {"force": -99.0, "nested": {"pair": np.zeros(2, np.float32)}}
        return self._observation(), info if self.info_at_reset else {}

    def step(self, action):
        self.count += 1
        is_end = self.count == self.length
        terminated = is_end and self.episode % 2 == 0
        force = 10.0 * self.episode + self.count + 0.25 * int(action)
        info = {"force": force, "nested": {"pair": np.float32([force, self.seed])}}
        return self._observation(), -force, terminated, is_end and not terminated, info

    def _observation(self):
        return {
            "observation": np.array([self.seed, self.episode, self.count], np.float64),
            "goals": {"reached": np.full((2, 2), 10 * self.episode + self.count, np.uint8)},
            "kind": np.int64(self.count % 4),
        }


FIELDS = transition_fields(CountingEnv.observation_space, CountingEnv.action_space)
INFO_KEYS = ("force", ("next", "nested", "pair"))


def policy(observation):
    return (observation["observation"].sum(-1) % 3).astype(np.int64)


def single_loop(seed, num_steps, **kwargs):
    """The transitions of a loop over one environment, built without the recorder."""
    env, rows = CountingEnv(**kwargs), []
    obs, _ = env.reset(seed=seed)
    for _ in range(num_steps):
        action = policy(obs)
        then, reward, terminated, truncated, info = env.step(action)
        row = {"action": torch.tensor(action), "force": torch.tensor(info["force"]).double()}
        for key in ("observation", "kind", ("goals", "reached")):
            for prefix, source in (((), obs), (("next",), then)):
                value = source["goals"]["reached"] if isinstance(key, tuple) else source[key]
                path = (*prefix, *key) if isinstance(key, tuple) else (*prefix, key)
                row[path] = torch.tensor(value)
        row["next", "nested", "pair"] = torch.tensor(info["nested"]["pair"])
        row["next", "reward"] = torch.tensor([reward], dtype=torch.float32)
        row["next", "terminated"] = torch.tensor([terminated])
        row["next", "truncated"] = torch.tensor([truncated])
        row["next", "done"] = torch.tensor([terminated or truncated])
        rows.append(TensorDict(row))
        obs = env.reset()[0] if terminated or truncated else then
    return torch.stack(rows)


def vector_loop(envs, recorder, num_steps, convert=lambda value: value, stack=True):
    """What the recorder makes of a plain loop over a vector: a list of rows for each lane."""
    by_lane = [[] for _ in range(envs.num_envs)]
    obs, _ = envs.reset(seed=list(range(envs.num_envs)))
    for _ in range(num_steps):
        action = policy(obs)
        then, reward, terminated, truncated, infos = envs.step(action)
        step = (obs, action, reward, terminated, truncated, infos, then)
        recorded = recorder.rows(*(convert(item) for item in step))
        if recorded is not None:
            rows, lanes = recorded
            lanes = range(envs.num_envs) if lanes is None else lanes.tolist()
            for row, lane in zip(rows.clone(), lanes, strict=True):
                by_lane[lane].append(row)
        done = terminated | truncated
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and done.any():
            then, _ = envs.reset(options={"reset_mask": done})
        obs = then
    return [torch.stack(rows) for rows in by_lane] if stack else None


def assert_same(rows, expected):
    assert set(rows.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        assert rows[key].dtype == value.dtype, key
        assert torch.equal(rows[key], value), key


def as_tensors(value):
    if isinstance(value, dict):
        return {key: as_tensors(entry) for key, entry in value.items()}
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    return torch.from_numpy(value) if is_array else value


@in_pairs(
    mode=MODES,
    fields=[FIELDS, None],
    info_at_reset=[True, False],
    form=["dict", "list"],
    convert=[lambda value: value, as_tensors],
)
def test_each_lane_equals_a_loop_of_its_own(mode, fields, info_at_reset, form, convert):
    envs = SyncVectorEnv(
        [lambda: CountingEnv(info_at_reset=info_at_reset) for _ in range(4)], autoreset_mode=mode
    )
    recorder = GymRecorder(
        4,
        fields=fields,
        autoreset_mode=envs.metadata["autoreset_mode"],
        info_keys=INFO_KEYS,
    )
    by_lane = vector_loop(envs if form == "dict" else DictInfoToList(envs), recorder, 30, convert)
    for seed, rows in enumerate(by_lane):
        if mode is AutoresetMode.NEXT_STEP:
            # One step in (length + 1) only resets; lane 0 has episodes of 1, 3, 5, 2, 4 steps.
            assert 20 <= len(rows) <= 25
        else:
            assert len(rows) == 30
        assert_same(rows, single_loop(seed, len(rows)))


def test_a_single_environment_equals_the_loop():
    env = CountingEnv()
    recorder = GymRecorder(1, fields=FIELDS, info_keys=INFO_KEYS)
    rows = []
    obs, _ = env.reset(seed=2)
    for _ in range(12):
        action = policy(obs)
        then, *outcome = env.step(action)
        row, lanes = recorder.rows(obs, action, *outcome, then)
        assert lanes is None
        assert row.batch_size == (1,)
        rows.append(row)
        obs = env.reset()[0] if outcome[1] or outcome[2] else then
    assert_same(torch.cat(rows), single_loop(2, 12))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_modes_as_strings(mode):
    assert GymRecorder(2, autoreset_mode=mode).autoreset_mode is AutoresetMode(mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_storage_records_each_lane_in_order(mode):
    envs = SyncVectorEnv([CountingEnv for _ in range(3)], autoreset_mode=mode)
    storage = ReplayStorage(
        storage=PackedStorage(3 * 40),
        writer=EpisodeWriter(num_envs=3),
        recorder=GymRecorder(3, autoreset_mode=mode, info_keys=INFO_KEYS),
    )
    slots = [[] for _ in range(3)]

    class Record:
        """Stands where the recorder stands: a storage takes the same arguments."""

        def rows(self, *step):
            for slot in [] if (written := storage.record(*step)) is None else written.tolist():
                slots[slot % 3].append(slot)

    vector_loop(envs, Record(), 30, stack=False)
    for seed in range(3):
        assert_same(storage.storage[torch.tensor(slots[seed])], single_loop(seed, len(slots[seed])))


# Golden values: two environments, one observation number, worked out by hand.

BOX = spaces.Box(-np.inf, np.inf, (1,), np.float32)
BOX_FIELDS = transition_fields(BOX, spaces.Discrete(3))


def step(obs=(1, 2), then=(3, 4), terminated=(False, False), infos=None, **changes):
    values = {
        "observations": np.array(obs, np.float32).reshape(-1, 1),
        "actions": np.zeros(len(obs), np.int64),
        "rewards": np.arange(len(obs), dtype=np.float64),
        "terminateds": np.array(terminated),
        "truncateds": np.zeros(len(obs), bool),
        "infos": infos or {},
        "next_observations": np.array(then, np.float32).reshape(-1, 1),
    }
    return {**values, **changes}


def test_same_step_puts_the_last_observation_back():
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="SameStep")
    final = np.array([None, np.float32([9])], dtype=object)
    call = step(
        terminated=(False, True), infos={"final_obs": final, "_final_obs": np.array([False, True])}
    )
    rows, lanes = recorder.rows(**call)
    assert rows["next", "observation"].tolist() == [[3], [9]]
    assert rows["observation"].tolist() == [[1], [2]]
    assert lanes is None
    assert call["next_observations"].tolist() == [[3], [4]]


@pytest.mark.parametrize(
    "infos",
    [
        {"final_obs": np.float32([[0], [9]])},
        {"final_obs": torch.tensor([[0.0], [9.0]])},
        {"final_obs": {"observation": np.float32([[0], [9]])}},
        [{}, {"final_obs": np.float32([9])}],
        ({}, {"final_obs": {"observation": [9.0]}}),
        {"final_observation": np.array([None, np.float32([9])], dtype=object)},
        [{}, {"terminal_observation": np.float32([9]), "TimeLimit.truncated": False}],
    ],
)
def test_other_forms_of_the_last_observation(infos):
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="SameStep")
    rows, _ = recorder.rows(**step(terminated=(False, True), infos=infos))
    assert rows["next", "observation"].tolist() == [[3], [9]]


def test_a_flag_that_an_environment_does_not_give():
    with pytest.raises(TypeError, match=r"truncateds must be bool, got None.* is False"):
        GymRecorder(2, fields=BOX_FIELDS).rows(**step(truncateds=None))


def test_a_vec_env_that_reset_in_the_same_step_is_not_taken_as_given():
    recorder = GymRecorder(2, fields=BOX_FIELDS)
    infos = [{}, {"terminal_observation": np.float32([9])}]
    with pytest.raises(ValueError, match=r"environment 1, which ended.*'SameStep'"):
        recorder.rows(**step(terminated=(False, True), infos=infos))


@pytest.mark.parametrize(
    "infos",
    [
        {},
        {"final_obs": np.array([None, None], dtype=object)},
        {"final_obs": np.float32([[0], [9]]), "_final_obs": np.array([True, False])},
        [{"final_obs": np.float32([9])}, {"other": 1}],
    ],
)
def test_a_missing_last_observation(infos):
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="SameStep")
    with pytest.raises(ValueError, match=r"environment 1 ended.*final_obs.*pass the infos of"):
        recorder.rows(**step(terminated=(False, True), infos=infos))


def test_next_step_leaves_out_the_step_that_resets():
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="NextStep")
    rows, lanes = recorder.rows(**step(terminated=(False, True)))
    assert (len(rows), lanes) == (2, None)
    rows, lanes = recorder.rows(**step(obs=(3, 4), then=(5, 0), terminated=(True, False)))
    assert lanes.tolist() == [0]
    assert rows["next", "observation"].tolist() == [[5]]
    rows, lanes = recorder.rows(**step(obs=(5, 0), then=(0, 1), terminated=(False, True)))
    assert lanes.tolist() == [1]
    assert rows["next", "reward"].tolist() == [[1]]
    # Both end together: the step after it has no transition at all.
    recorder.reset()
    recorder.rows(**step(terminated=(True, True)))
    assert recorder.rows(**step()) is None
    assert recorder.rows(**step())[1] is None


def test_reset_forgets_who_ended():
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="NextStep")
    recorder.rows(**step(terminated=(True, True)))
    recorder.reset(np.array([False, True]))
    assert recorder.rows(**step())[1].tolist() == [1]
    for lanes in ([0], torch.tensor([0]), None):
        recorder.rows(**step(terminated=(True, True)))
        recorder.reset(lanes)
        recorded = recorder.rows(**step())
        if lanes is None:
            assert recorded[1] is None
        else:
            assert recorded[1].tolist() == [0]
        recorder.reset()
    for lanes in ([True, True, False], [2], [-1], []):
        with pytest.raises(ValueError, match=r"numbers in 0..1|mask of lanes .* \[2\], got \["):
            recorder.reset(lanes)


def test_the_state_is_saved_and_loaded():
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="NextStep")
    recorder.rows(**step(terminated=(False, True)))
    state = recorder.state_dict()
    other = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="NextStep")
    other.load_state_dict(state)
    assert other.rows(**step())[1].tolist() == [0]
    assert recorder.rows(**step())[1].tolist() == [0]
    with pytest.raises(
        ValueError, match=r"must be of shape \[3\] \(one for each environment\), got \[2\]"
    ):
        GymRecorder(3).load_state_dict(state)


def test_rows_have_memory_of_their_own():
    call, recorder = step(), GymRecorder(2, fields=BOX_FIELDS)
    rows, _ = recorder.rows(**call)
    before = rows.clone()
    call["observations"][:] = 7
    recorder.rows(**call)
    assert (rows == before).all()
    assert rows.device == torch.device("cpu")


def test_arguments_are_never_altered():
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="SameStep")
    final = np.full(2, None, dtype=object)
    final[0], final[1] = np.float32([8]), np.float32([9])
    call = step(terminated=(True, True), infos={"final_obs": final})
    before = {name: np.array(value) for name, value in call.items() if name != "infos"}
    recorder.rows(**call)
    assert all(np.array_equal(call[name], before[name]) for name in before)


def test_arrays_that_tensors_cannot_share():
    read_only = np.broadcast_to(np.float32([[7]]), (2, 1))
    backwards = np.float32([[1], [2]])[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, _ = GymRecorder(2, fields=BOX_FIELDS).rows(
            **step(
                observations=read_only,
                next_observations=backwards,
                actions=np.array([1, 2], ">i8"),
            )
        )
    assert rows["observation"].tolist() == [[7], [7]]
    assert rows["next", "observation"].tolist() == [[2], [1]]
    assert rows["action"].tolist() == [1, 2]


def test_plain_numbers_and_lists_and_gradients():
    fields = transition_fields(BOX, spaces.Discrete(3))
    action = torch.tensor([1.0], requires_grad=True)
    rows, _ = GymRecorder(1, fields=fields).rows([1], 2, 3, False, True, None, action)
    assert rows["observation"].tolist() == [[1]]
    assert (rows["action"].dtype, rows["action"].tolist()) == (torch.int64, [2])
    assert (rows["next", "reward"].dtype, rows["next", "reward"].tolist()) == (torch.float32, [[3]])
    assert rows["next", "done"].tolist() == [[True]]
    assert not rows["next", "observation"].requires_grad


def test_values_that_fit_exactly_are_cast():
    rows, _ = GymRecorder(2, fields=BOX_FIELDS).rows(
        **step(actions=np.array([1, 2], np.int32), observations=np.ones((2, 1), np.float16))
    )
    assert (rows["action"].dtype, rows["observation"].dtype) == (torch.int64, torch.float32)


def test_a_vector_of_one_has_a_leading_dimension():
    rows, _ = GymRecorder(1, fields=BOX_FIELDS).rows(
        **step(obs=(1,), then=(3,), terminated=(False,))
    )
    assert rows["observation"].tolist() == [[1]]


def test_nested_actions_and_a_state():
    action_space = spaces.Dict({"move": BOX, "grip": spaces.Discrete(2)})
    observation_space = spaces.Dict({"state": BOX, "extra": spaces.Discrete(5)})
    fields = transition_fields(observation_space, action_space)
    call = ({"state": [1.0], "extra": 4}, {"move": [0.5], "grip": 1}, 0.0, False, False, {})
    for given in (fields, None):
        recorder = GymRecorder(1, fields=given)
        rows, _ = recorder.rows(*call, {"extra": 3, "state": [2.0]})
        assert rows["observation"].tolist() == [[1]]
        assert rows["next", "observation"].tolist() == [[2]]
        assert rows["action", "move"].tolist() == [[0.5]]
        assert rows["next", "extra"].tolist() == [3]


# What must hold, what came, what to do.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"actions": np.zeros(2)}, TypeError, "actions must be int64, got float64.*convert"),
        ({"actions": [0.5, 1.0]}, TypeError, "actions must be int64, got float64"),
        ({"actions": torch.zeros(2)}, TypeError, "actions must be int64, got float32"),
        ({"terminateds": np.zeros(2)}, TypeError, "terminateds must be bool, got float64"),
        ({"rewards": np.array(["a", "b"])}, TypeError, "rewards must be float32, got <U1"),
        ({"rewards": np.zeros(2, complex)}, TypeError, "rewards must be float32, got complex128"),
        ({"observations": np.zeros((2, 1))}, TypeError, "observations must be float32, got float6"),
        (
            {"observations": np.zeros((2, 3), "f")},
            ValueError,
            r"observations .* \[2, 1\].*\[2, 3\]",
        ),
        ({"actions": np.zeros((2, 1), int)}, ValueError, r"actions must .* \[2\].*got \[2, 1\]"),
        ({"rewards": np.zeros(3)}, ValueError, "rewards must hold 2 env.* got 3; .*num_envs=3"),
        ({"rewards": 1.0}, ValueError, r"rewards must have the shape \[2, 1\].*got \[\]"),
        ({"terminateds": True}, ValueError, "terminateds must hold 2 flags.*num_envs=1"),
        ({"observations": {"a": 1}}, KeyError, r"observations must have .*'observation'.*\['a'\]"),
        ({"actions": {"a": 1}}, TypeError, "actions must be int64, got object"),
        ({"infos": [{}]}, ValueError, "infos must hold 2 environments, got 1"),
    ],
)
def test_wrong_arguments(changes, error, message):
    recorder = GymRecorder(2, fields=BOX_FIELDS, autoreset_mode="NextStep")
    with pytest.raises(error, match=message):
        recorder.rows(**step(terminated=(True, True)) | changes)
    # Nothing was remembered of it.
    assert recorder.rows(**step())[1] is None


@pytest.mark.parametrize("name", ["observations", "next_observations"])
def test_missing_extra_and_flat_entries(name):
    env = CountingEnv()
    obs, _ = env.reset()
    call = dict(zip(step(), (obs, 1, 0.0, False, False, {}, obs), strict=True))
    recorder = GymRecorder(1, fields=FIELDS)
    without = {key: value for key, value in obs.items() if key != "kind"}
    with pytest.raises(KeyError, match=rf"{name} must have the key 'kind'; there are \['goals'"):
        recorder.rows(**call | {name: without})
    with pytest.raises(ValueError, match=rf"{name} must have .* only, got \['more'\] too"):
        recorder.rows(**call | {name: {**obs, "more": 1}})
    with pytest.raises(TypeError, match=rf"{name} must be a dictionary .*'reached'.* got ndarray"):
        recorder.rows(**call | {name: {**obs, "goals": np.zeros(2)}})
    with pytest.raises(TypeError, match=rf"{name}\['goals'\]\['reached'\] must be uint8"):
        recorder.rows(**call | {name: {**obs, "goals": {"reached": np.zeros((2, 2))}}})


def test_learned_fields_hold_from_then_on():
    recorder = GymRecorder(2)
    with pytest.raises(TypeError, match="next_observations must be float32, got float64"):
        recorder.rows(**step(next_observations=np.zeros((2, 1))))
    # A step that failed has fixed nothing.
    recorder.rows(**step(observations=np.zeros((2, 1)), next_observations=np.zeros((2, 1))))
    with pytest.raises(TypeError, match="actions must be int64, got float32"):
        recorder.rows(
            **step(
                observations=np.zeros((2, 1)),
                next_observations=np.zeros((2, 1)),
                actions=np.zeros(2, np.float32),
            )
        )


def test_missing_and_wrong_infos():
    recorder = GymRecorder(2, fields=BOX_FIELDS, info_keys=("force",))
    with pytest.raises(KeyError, match=r"'force' must .* environment 0 .* there are \['mass'\]"):
        recorder.rows(**step(infos={"mass": np.ones(2)}))
    infos = {"force": np.ones(2), "_force": np.array([True, False])}
    with pytest.raises(KeyError, match="environment 1 does not have it"):
        recorder.rows(**step(infos=infos))
    with pytest.raises(TypeError, match=r"'force'.* must be numbers"):
        recorder.rows(**step(infos={"force": np.array(["a", "b"], dtype=object)}))
    with pytest.raises(ValueError, match=r"infos\['force'\] must hold 2 environments, got 3"):
        recorder.rows(**step(infos={"force": np.ones(3)}))
    same = GymRecorder(2, fields=BOX_FIELDS, info_keys=("force",), autoreset_mode="SameStep")
    # What was said of the reset is not of the step.
    infos = {"final_obs": np.zeros((2, 1), "f"), "force": np.ones(2), "_force": np.ones(2, bool)}
    with pytest.raises(KeyError, match=r"'final_info.force' must"):
        same.rows(**step(terminated=(True, False), infos=infos))


@pytest.mark.parametrize("name", ["SameStep", "samestep", "SAME_STEP", AutoresetMode.SAME_STEP])
def test_modes_of_autoreset_by_any_name(name):
    assert GymRecorder(1, autoreset_mode=name).autoreset_mode is AutoresetMode.SAME_STEP


def test_wrong_settings():
    with pytest.raises(ValueError, match="num_envs must be an integer of at least 1, got 0"):
        GymRecorder(0)
    with pytest.raises(ValueError, match=r"autoreset_mode must be None or one of .*'SameStep'"):
        GymRecorder(1, autoreset_mode="same")
    with pytest.raises(TypeError, match="info_keys must be a sequence of keys, got 'force'"):
        GymRecorder(1, info_keys="force")
    with pytest.raises(TypeError, match="string or a tuple of them; got 3"):
        GymRecorder(1, info_keys=(3,))
    with pytest.raises(ValueError, match="keys of a transition must differ, got 'observation'"):
        GymRecorder(2, info_keys=("observation",)).rows(**step(infos={"observation": np.zeros(2)}))


# Fields.


class SpaceEnv(gymnasium.Env):
    """An environment with the given spaces, that does nothing."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


OBSERVATION_SPACES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Box(0, 255, (4, 4, 1), np.uint8),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Discrete(5),
    spaces.Discrete(5, dtype=np.int32),
    spaces.MultiBinary(4),
    spaces.MultiDiscrete([3, 5]),
    spaces.MultiDiscrete([4, 4]),
    CountingEnv.observation_space,
    spaces.Dict({"state": BOX, "pixels": spaces.Box(0, 255, (2, 2), np.uint8)}),
]


@pytest.mark.parametrize("observation_space", OBSERVATION_SPACES, ids=str)
@pytest.mark.parametrize(
    "action_space", [spaces.Discrete(2), BOX, spaces.MultiDiscrete([2, 3])], ids=str
)
def test_fields_are_those_of_torchrl(observation_space, action_space):
    env = GymWrapper(SpaceEnv(observation_space, action_space), categorical_action_encoding=True)
    fields = transition_fields(observation_space, action_space)
    assert fields == transition_fields(env.observation_spec, env.action_spec)
    assert fields == transition_fields(env.observation_spec, env.full_action_spec)
    rollout = env.rollout(2).exclude("done", "terminated", "truncated")
    assert set(rollout.keys(True, True)) == set(fields)
    for key, (dtype, shape) in fields.items():
        assert (rollout[key].dtype, rollout[key].shape[1:]) == (dtype, shape), key


def test_fields_of_bit_flipping():
    env = GymEnv("BitFlipping-v0", n_bits=4, categorical_action_encoding=True)
    fields = transition_fields(env.observation_spec, env.action_spec)
    bits, flag = (torch.float32, torch.Size([4])), (torch.bool, torch.Size([1]))
    goals = ("observation", "achieved_goal", "desired_goal")
    assert fields == {
        **dict.fromkeys(goals, bits),
        **{("next", key): bits for key in goals},
        "action": (torch.int64, torch.Size([])),
        ("next", "reward"): (torch.float32, torch.Size([1])),
        ("next", "done"): flag,
        ("next", "terminated"): flag,
        ("next", "truncated"): flag,
    }
    env.close()


def test_fields_of_a_batch_of_environments():
    observation = Composite(
        observation=Bounded(0, 1, (8, 3)),
        more=Composite(bits=Binary(4, (8, 4)), shape=(8,)),
        shape=(8,),
    )
    fields = transition_fields(observation, Categorical(5, shape=(8,)))
    assert fields["observation"] == (torch.float32, torch.Size([3]))
    assert fields["next", "more", "bits"] == (torch.int8, torch.Size([4]))
    assert fields["action"] == (torch.int64, torch.Size([]))


def test_info_fields():
    infos = {"force": BOX, ("next", "kind"): Unbounded((2,), dtype=torch.int32)}
    fields = transition_fields(BOX, BOX, infos)
    assert fields["force"] == (torch.float32, torch.Size([1]))
    assert fields["next", "kind"] == (torch.int32, torch.Size([2]))
    assert ("next", "force") not in fields
    assert transition_fields(BOX, BOX, ("force",)) == transition_fields(BOX, BOX)
    rows, _ = GymRecorder(2, fields=fields, info_keys=infos).rows(
        **step(
            actions=np.zeros((2, 1), np.float32),
            infos={"force": np.ones(2, np.float32), "kind": np.ones((2, 2), np.int32)},
        )
    )
    assert {key: (rows[key].dtype, rows[key].shape[1:]) for key in fields} == fields
    assert set(rows.keys(True, True)) == set(fields)


@pytest.mark.parametrize(
    ("observation_space", "error", "message"),
    [
        (spaces.Tuple([BOX, BOX]), TypeError, "space of 'observation' must be a Box.*got Tuple"),
        (spaces.Dict({"a": spaces.Text(3)}), TypeError, "space of 'a' must be .*got Text"),
        (spaces.Box(0, 9, (1,), np.longdouble), TypeError, "one of the dtypes .*got float128"),
        (spaces.Dict({}), ValueError, "observation space must have an entry"),
        (spaces.Dict({"action": BOX}), ValueError, "keys .* must differ, got 'action'"),
        (spaces.Dict({"reward": BOX}), ValueError, r"differ, got \('next', 'reward'\)"),
        (spaces.Dict({"next": BOX}), ValueError, "differ, got 'next'"),
        (Composite(a=NonTensor(())), TypeError, "spec of 'a' must be of a tensor"),
        ("observation", TypeError, "must be a gymnasium space or a TorchRL spec, got 'obs"),
    ],
)
def test_spaces_without_fields(observation_space, error, message):
    with pytest.raises(error, match=message):
        transition_fields(observation_space, spaces.Discrete(2))


def test_info_spaces_without_fields():
    with pytest.raises(TypeError, match="info 'a' must be a single tensor"):
        transition_fields(BOX, BOX, {"a": spaces.Dict({"b": BOX})})
    with pytest.raises(ValueError, match="keys of a transition must differ, got 'observation'"):
        transition_fields(BOX, BOX, {"observation": BOX})


DISCRETE = [
    (spaces.Discrete(3), [0, 2], [3, -1]),
    (spaces.Discrete(3, start=-1), [-1, 1], [-2, 2]),
    (spaces.MultiDiscrete([2, 3]), [[1, 0], [0, 2]], [[2, 0], [0, 3], [0, -1]]),
    (
        spaces.Dict({"turn": spaces.Discrete(2), "push": spaces.Box(-1, 1, (2,), np.float64)}),
        [{"turn": 1, "push": [9.0, 0.0]}],
        [{"turn": 2, "push": [0.0, 0.0]}],
    ),
    (Categorical(3), [0, 2], [3, -1]),
    (MultiCategorical([2, 3]), [[1, 2]], [[1, 3]]),
]


def batched(action, num_envs):
    if isinstance(action, dict):
        return {name: batched(value, num_envs) for name, value in action.items()}
    return np.stack([np.asarray(action)] * num_envs)


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize(("space", "right", "wrong"), DISCRETE)
def test_actions_that_there_are_not(space, right, wrong, num_envs):
    is_spec = isinstance(space, TensorSpec)
    seen = Unbounded((1,)) if is_spec else BOX
    if is_spec:
        seen = Composite(observation=seen)
    storage = UniformReplayStorage(seen, space, storage_size=60, num_envs=num_envs or 1)
    after = np.zeros((num_envs, 1) if num_envs else 1, np.float32)
    flag = np.zeros(num_envs, bool) if num_envs else False
    last = np.zeros(num_envs) if num_envs else 0.0

    def record(action):
        return storage.record(after, action, last, flag, flag, {}, after)

    for action in wrong:
        if num_envs:
            action = batched(action, num_envs)
        with pytest.raises(
            ValueError, match=r"^actions.* must be from -?\d to \d, got -?\d in env"
        ):
            record(action)
        assert not len(storage)
    for action in right:
        record(batched(action, num_envs) if num_envs else action)
    assert len(storage) == len(right) * (num_envs or 1)


def test_of_environments_that_only_reset_no_action_is_looked_at():
    storage = UniformReplayStorage(
        BOX, spaces.Discrete(2), storage_size=20, num_envs=2, autoreset_mode="NextStep"
    )
    seen, none = np.zeros((2, 1), np.float32), np.zeros(2, bool)
    storage.record(seen, [0, 1], [0.0, 0.0], np.array([False, True]), none, {}, seen)
    storage.record(seen, [0, -1], [0.0, 0.0], none, none, {}, seen)
    assert len(storage) == 3
    with pytest.raises(ValueError, match="got -1 in environment 1"):
        storage.record(seen, [0, -1], [0.0, 0.0], none, none, {}, seen)


@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_no_finite_numbers_are_warned_of_once(bad, num_envs):
    storage = UniformReplayStorage(
        BOX, spaces.Discrete(2), storage_size=20, num_envs=num_envs or 1, on_gap="ignore"
    )
    seen = np.zeros((num_envs, 1) if num_envs else 1, np.float32)
    flag = np.zeros(num_envs, bool) if num_envs else False
    action = np.zeros(num_envs, np.int64) if num_envs else 0
    reward = np.array([0.0, bad]) if num_envs else bad
    told = rf"must be finite, got {bad} of environment {(num_envs or 1) - 1}: "
    with pytest.warns(UserWarning, match=told) as warned:
        storage.record(seen, action, reward, flag, flag, {}, seen)
    assert [warning.filename for warning in warned] == [__file__]
    storage.record(seen, action, reward, flag, flag, {}, seen)
    assert len(storage) == 2 * (num_envs or 1)
