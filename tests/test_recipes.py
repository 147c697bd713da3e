"""The ready-made storages: what they store, what they refuse, and that all take the same options."""

import copy
import inspect
import pickle
import pydoc
import re
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from goal_data import achieved_goals, distance_reward, goal_transitions
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from oracles import RingOracle
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, SerialEnv

import trl_storages
from trl_storages import HERReplayStorage, UniformReplayStorage, gym_reward, keys

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


SPACES = {"observation_space", "action_space"}


def parameter(name):
    """Returns what reads a parameter of the parts; None of a storage whose parts have none."""
    return lambda storage: getattr(storage, name, None)


#: Option -> another value than its default, and what is another then.
EFFECTS = {
    "storage_size": (20, lambda storage: storage.episodes.capacity),
    "num_envs": (2, lambda storage: storage.episodes.num_envs),
    "batch_size": (3, lambda storage: len(storage.sample())),
    "device": ("meta", lambda storage: storage.storage.device),
    "path": ("rows", lambda storage: storage.storage.scratch_dir),
    "mode": ("r", lambda storage: storage.storage.reader is None),
    "n_step": (5, parameter("n_step")),
    "discount": (0.5, parameter("discount")),
    "alpha": (0.3, parameter("alpha")),
    "beta": (0.3, parameter("beta")),
    "normalize": ("none", parameter("normalize")),
    "eps": (0.3, parameter("eps")),
    "eta": (0.9, parameter("eta")),
    "c_min": (3, parameter("c_min")),
    "prefetch": (3, lambda storage: storage._prefetch_cap),
    "seed": (3, lambda storage: storage._rng and storage._rng.initial_seed()),
    "info_keys": ({"force": spaces.Box(0, 1, (2,))}, lambda storage: storage.storage.layout),
    "extra_fields": ({"state": (torch.float32, ())}, lambda storage: storage.storage.layout),
    "frame_stack": (4, lambda storage: storage.storage.layout),
    "share_next": (True, lambda storage: storage.storage.share_next),
    "sample_unit": (trl_storages.EpisodeSequence(2), lambda storage: len(storage.sample())),
    "autoreset_mode": ("Disabled", lambda storage: storage._recorder.autoreset_mode),
    "on_gap": ("cut", lambda storage: storage.writer.gaps.on_gap),
}
#: Options that do nothing while another one is off, and a value with which it is on.
NEEDED = {
    "beta": {"alpha": 0.5},
    "normalize": {"alpha": 0.5},
    "eps": {"alpha": 0.5},
    "c_min": {"eta": 0.5},
    # A fact of the task, which may always be told.
    "discount": {"n_step": 2},
}


def make_vector(mode):
    env = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
    )
    return RecordEpisodeStatistics(env)


@pytest.mark.parametrize("name", [*RECIPES[:-1], "EpisodeReplayStorage"])
@pytest.mark.parametrize(
    ("make_env", "num_envs", "mode"),
    [
        (lambda: gymnasium.make("CartPole-v1"), 1, None),
        *[(partial(make_vector, mode), 3, mode) for mode in AutoresetMode],
        (lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), 1, None),
        (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), 2, None),
    ],
)
def test_an_environment_says_its_spaces_its_number_and_how_it_resets(
    name, make_env, num_envs, mode
):
    env = make_env()
    storage = getattr(trl_storages, name).from_env(env, storage_size=12, batch_size=4)
    assert type(storage).__name__ == name
    assert (storage.episodes.num_envs, storage.batch_size) == (num_envs, 4)
    assert storage._recorder.autoreset_mode == mode
    if isinstance(env, EnvBase):
        storage.extend(env.rollout(3, break_when_any_done=False))
        assert storage[:]["observation"].shape == (3 * num_envs, 4)
    else:
        before, _ = env.reset(seed=0)
        action = env.action_space.sample()
        after, reward, terminated, truncated, info = env.step(action)
        storage.record(before, action, reward, terminated, truncated, info, after)
        assert storage[:]["observation"].tolist() == before.reshape(-1, 4).tolist()
    env.close()


def test_what_is_given_beside_an_environment_goes_before_what_it_says():
    env = make_vector(AutoresetMode.SAME_STEP)
    storage = UniformReplayStorage.from_env(env, num_envs=6, autoreset_mode=None)
    assert storage.episodes.num_envs == 6
    assert storage._recorder.autoreset_mode is None
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    storage = HERReplayStorage.from_env(env, reward_fn=gym_reward(env), num_goals=2)
    assert storage.num_goals == 2


@pytest.mark.parametrize("name", [*RECIPES, "EpisodeReplayStorage"])
def test_every_option_does_something_or_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [*inspect.signature(getattr(trl_storages, name)).parameters]
    assert {*EFFECTS} == {*inspect.signature(UniformReplayStorage).parameters} - SPACES
    goals = dict(OBSERVATIONS.spaces, observation=spaces.Box(0, 1, (4, 5), np.float32))

    def made(**options):
        storage = make(name, spaces.Dict(goals), **options)
        if {"batch_size", "sample_unit"} & {*options}:
            data = rows(8)
            for key in ("observation", ("next", "observation")):
                data[key] = torch.zeros(8, 4, 5)
            storage.extend(data)
        return storage

    for option, (value, probe) in EFFECTS.items():
        if option not in options:
            with pytest.raises(
                TypeError, match=rf"has no option '{option}': it draws whole .*too\."
            ):
                make(name, **{option: value})
            continue
        # What a reader reads was made with the option before it.
        others = {"mode": {"path": "rows"}, **NEEDED}.get(option, {})
        with_batches = {"batch_size": 4} if option in ("batch_size", "sample_unit") else {}
        before = probe(made(**others, **with_batches))
        assert probe(made(**{**others, **with_batches, option: value})) != before, option


@pytest.mark.parametrize("name", [*RECIPES, "EpisodeReplayStorage"])
def test_a_reader_draws_as_the_writer_does(name, tmp_path):
    options = {"path": tmp_path / "rows", "batch_size": 5, "seed": 1}
    with pytest.raises(FileNotFoundError):
        make(name, mode="r", **options)
    storage = make(name, **options)
    storage.extend(rows(8))
    reader = make(name, mode="r", **options)
    for _ in range(3):
        assert (storage.sample() == reader.sample()).all()
    storage.extend(rows(4))
    reader.sample()
    assert len(reader) == len(storage) == 12
    with pytest.raises(RuntimeError, match="opened for reading"):
        reader.extend(rows(4))
    with pytest.raises(ValueError, match="made for 12 rows, got 20"):
        make(name, mode="r", storage_size=20, path=options["path"])
    for wrong in ({}, {"path": None}):
        with pytest.raises(ValueError, match=r"mode.* path"):
            make(name, mode="r", **wrong)


@pytest.mark.parametrize("name", RECIPES)
def test_options_that_need_another_one(name):
    given = {
        "PrioritizedReplayStorage": "alpha",
        "EREReplayStorage": "eta",
        "NStepReplayStorage": "n_step",
    }.get(name)
    for option, needed in NEEDED.items():
        ((switch, _),) = needed.items()
        value, off = EFFECTS[option][0], {"alpha": 0, "eta": 1, "n_step": 1}[switch]
        # Who turns the other one off, as one of several values to compare, is not told.
        make(name, **{option: value, switch: off})
        if switch == given:
            make(name, **{option: value})
            continue
        with pytest.raises(
            ValueError, match=rf"{option} does nothing without {switch}, .* {off} in"
        ):
            make(name, **{option: value})


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

    def test_lanes(self, name):
        with pytest.warns(UserWarning, match="is not a multiple of num_envs=3: 12 transitions"):
            storage = make(name, num_envs=3, storage_size=14)
        assert storage.storage.max_size == 12  # whole steps of all lanes
        storage.extend(rows(3, 9))
        oracle = RingOracle(12, 3)
        oracle.append([[step % 4 == 3 for step in range(9)]] * 3)
        slots = torch.tensor(list(oracle.live()))
        expected = [oracle.ahead(row) for row in oracle.live().values()]
        assert storage.episodes.ahead(slots).tolist() == expected
        assert set(storage.sample(300)["index"].tolist()) == set(oracle.live())

    def test_memory_mapped(self, name, tmp_path):
        storage, memory = (
            make(name, path=path, seed=3, batch_size=6) for path in (tmp_path / "rows", None)
        )
        assert (tmp_path / "rows").is_dir()
        for each in (storage, memory):
            each.extend(rows(10))
        first, second = storage.sample(), memory.sample()
        for key in FIELDS | {"index"}:
            assert torch.equal(first[key], second[key])

    def test_the_seed_decides(self, name):
        batches = []
        for seed in (1, 1, 2):
            storage = make(name, seed=seed, batch_size=32)
            storage.extend(rows(10))
            batches.append(storage.sample()["index"])
        assert torch.equal(batches[0], batches[1])
        assert not torch.equal(batches[0], batches[2])

    def test_prefetch(self, name):
        storage = make(name, prefetch=2, batch_size=6)
        storage.extend(rows(10))
        for _ in range(4):
            assert storage.sample()["observation"].shape == (6, 4)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"storage_size": 2, "num_envs": 3}, r"storage_size.*3.*2"),
            ({"storage_size": 0}, r"storage_size.*0"),
            ({"num_envs": 0}, r"num_envs.*0"),
        ],
    )
    def test_sizes_that_leave_no_room(self, name, options, match):
        with pytest.raises(ValueError, match=match):
            make(name, **options)

    @pytest.mark.parametrize(
        ("spoil", "named"),
        [
            (lambda data: data.exclude("action"), "action"),
            (lambda data: data.exclude(("next", "reward")), "reward"),
            (lambda data: data.set("observation", data["observation"].double()), "observation"),
            (lambda data: data.set("achieved_goal", torch.zeros(4, 2)), "achieved_goal"),
        ],
    )
    def test_a_wrong_first_write_is_caught(self, name, spoil, named):
        storage = make(name)
        before = storage.storage.rows.clone()
        with pytest.raises((KeyError, TypeError, ValueError), match=named):
            storage.extend(spoil(rows(4)))
        assert torch.equal(storage.storage.rows, before)
        assert len(storage) == 0
        storage.extend(rows(4))
        assert len(storage) == 4

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("batch_size", 0),
            ("batch_size", 2.5),
            ("prefetch", -1),
            ("storage_size", 12.0),
            ("n_step", 0),
            ("discount", 1.5),
            ("alpha", -0.1),
            ("beta", 1.1),
            ("normalize", "sum"),
            ("eta", 0.0),
            ("c_min", 0),
            ("autoreset_mode", "sometimes"),
        ],
    )
    def test_options_out_of_their_range(self, name, option, value):
        """Also where the option has no effect for want of another one."""
        with pytest.raises(ValueError, match=rf"{option} must .*{value}"):
            make(name, **{option: value})

    def test_an_unknown_option(self, name):
        with pytest.raises(TypeError, match="'buffer_size': it is called storage_size here"):
            make(name, buffer_size=3)

    @pytest.mark.parametrize(
        ("other", "ours"),
        [(other, ours) for other, ours in trl_storages.other_names.OTHER_NAMES.items()],
    )
    def test_names_of_other_libraries(self, name, other, ours):
        of_goals = ours in ("num_goals", "reward_fn", "strategy")
        if of_goals and name != "HERReplayStorage":
            ours = ""
        with pytest.raises(TypeError, match=re.escape(f"{name} has no option {other!r}: ")) as told:
            make(name, **{other: 3})
        assert ours in str(told.value)

    def test_slips(self, name):
        with pytest.raises(TypeError, match=r"'batchsize': do you mean batch_size\?"):
            make(name, batchsize=3)
        with pytest.raises(TypeError, match="'colour': there are action_space, alpha, autoreset"):
            make(name, colour="red")

    def test_help_names_every_option_with_its_default(self, name):
        kind = getattr(trl_storages, name)
        shown = inspect.signature(kind).parameters
        assert not {"args", "kwargs", "options", "self"} & {*shown}
        changed = {"NStepReplayStorage": ("n_step", 3), "EREReplayStorage": ("eta", 0.996)}
        changed["PrioritizedReplayStorage"] = ("alpha", 0.6)
        option, default = changed.get(name, ("storage_size", 1_000_000))
        assert shown[option].default == default
        assert shown["seed"].annotation == int | None
        help_text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        assert f"{option}: {shown[option].annotation.__name__} = {default}" in help_text
        assert "*args" not in help_text.splitlines()[2]

    def test_every_option_is_explained(self, name):
        del name
        explained = trl_storages.UniformReplayStorage.__doc__
        for option in inspect.signature(trl_storages.UniformReplayStorage).parameters:
            assert f"        {option}: " in explained, option

    def test_a_subclass_with_options_of_its_own(self, name):
        kind = getattr(trl_storages, name)

        class Named(kind):
            """Has a name."""

            def __init__(self, *spaces, label, **options):
                super().__init__(*spaces, **options)
                self.label = label

        options = {"reward_fn": distance_reward} if name == "HERReplayStorage" else {}
        storage = Named(OBSERVATIONS, ACTIONS, label="first", storage_size=4, **options)
        assert storage.label == "first"
        storage.label = "second"
        assert {"label", "storage_size"} <= {*inspect.signature(Named).parameters}

    def test_extra_fields(self, name):
        storage = make(
            name,
            extra_fields={
                "state": (torch.float16, (3, 2)),
                ("agent", "log_prob"): (torch.float32, ()),
            },
        )
        data = rows(4)
        with pytest.raises(KeyError, match=r"lacks .*log_prob"):
            storage.extend(data)
        data["state"] = torch.randn(4, 3, 2).half()
        data["agent", "log_prob"] = torch.randn(4)
        storage.extend(data)
        batch = storage.sample(50)
        for key in ("state", ("agent", "log_prob")):
            assert torch.equal(batch[key], data[key][batch["index"]])
        for wrong, error in (
            ({"observation": (torch.float32, (4,))}, ValueError),
            ({"state": torch.float32}, TypeError),
            ({"state": (3, torch.float32)}, TypeError),
            ({"state": (torch.float32, (1.5,))}, ValueError),
            (("state",), TypeError),
        ):
            with pytest.raises(error, match="extra_fields"):
                make(name, extra_fields=wrong)

    def test_a_sample_unit(self, name):
        storage = make(name, sample_unit=trl_storages.EpisodeSequence(3, burn_in=1), batch_size=5)
        storage.extend(rows(10))
        assert storage.sample()["validity_mask"].shape == (20,)

    def test_eps(self, name):
        assert make(name, alpha=0.5, eps=0.25).eps == 0.25

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

    def test_sampling_before_the_first_write(self, name):
        with pytest.raises(RuntimeError, match="write transitions"):
            make(name).sample(2)


class TestHindsight:
    @pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_goals_and_rewards(self, strategy, num_envs):
        options = {"strategy": strategy, "num_goals": 3, "seed": 0}
        storage = make(num_envs=num_envs, storage_size=7 * num_envs, batch_size=40, **options)
        storage.extend(rows(num_envs, 10))
        oracle = RingOracle(7 * num_envs, num_envs)
        oracle.append([[step % 4 == 3 for step in range(10)]] * num_envs)
        live, batch = oracle.live(), storage.sample()
        assert batch["her_mask"].sum() == 30
        batch = batch[batch["her_mask"]]
        goals = [live[slot] for slot in batch["goal_index"].tolist()]
        for anchor, goal in zip(batch["index"].tolist(), goals, strict=True):
            assert goal in oracle.goals(live[anchor], strategy)
        for key in ("desired_goal", ("next", "desired_goal")):
            assert torch.equal(batch[key], achieved_goals(goals))
        reward = distance_reward(batch["next", "achieved_goal"], batch["desired_goal"], None)
        assert torch.equal(batch["next", "reward"].squeeze(-1), reward)

    @pytest.mark.requirement("her-info")
    @pytest.mark.parametrize(
        "info_keys",
        [
            ("effort", ("next", "force")),
            {"effort": spaces.Box(0, 99, (), np.float64), "kind": spaces.Discrete(9)},
        ],
    )
    def test_infos_of_a_loop_reach_the_reward_function(self, info_keys):
        """Row by row, of every lane, with the key that they were asked for by."""

        def reward_fn(achieved, desired, transition):
            assert set(transition) == set(info_keys)
            return transition["effort"].squeeze(-1)

        storage = make(
            num_envs=2,
            reward_fn=reward_fn,
            info_keys=info_keys,
            num_goals=float("inf"),
            on_gap="ignore",
        )
        there = np.ones(2, bool)
        observation = {
            key: np.zeros((2, *space.shape), np.float32) for key, space in OBSERVATIONS.items()
        }
        for step in range(8):
            observation["observation"][:] = [[step] * 4, [-step] * 4]
            infos = {
                "effort": np.array([10.0 * step, 10.0 * step + 1]),
                "_effort": there,
                "force": np.array([[step, 1], [step, 2]]),
                "_force": there,
                "kind": np.array([3, 4]),
                "_kind": there,
            }
            zeros, flags = np.zeros(2), np.array([step % 3 == 2, step % 4 == 3])
            storage.record(
                observation, np.zeros(2, np.int64), zeros, flags, ~there, infos, observation
            )
        batch = storage.sample(50)
        lane = (batch["index"] % 2).unsqueeze(-1)
        expected = 10 * batch["observation"][:, :1].abs() + lane
        assert torch.equal(batch["next", "reward"], expected)
        assert storage["effort"].dtype is torch.float64

    def test_the_first_write_must_hold_infos_without_a_space(self):
        storage = make(info_keys=("effort",))
        with pytest.raises(KeyError, match="effort"):
            storage.extend(rows(4).exclude("effort"))
        assert len(storage) == 0
        storage.extend(rows(4))
        assert storage["effort"].shape == (4, 1)
        with pytest.raises(TypeError, match=r"effort.*float64.*float32"):
            storage.extend(rows(4).set("effort", torch.zeros(4, 1)))

    @pytest.mark.requirement("her-info")
    def test_info_keys_reach_the_reward_function(self):
        storage = make(
            reward_fn=lambda achieved, desired, transition: transition["effort"],
            info_keys={"effort": spaces.Box(0, np.inf, (1,), np.float64)},
            num_goals=float("inf"),
        )
        storage.extend(rows(8))
        batch = storage.sample(20)
        assert torch.equal(batch["next", "reward"], batch["effort"].float())

    def test_terminated_fn(self):
        storage = make(terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1))
        storage.extend(rows(8))
        batch = storage.sample(40)
        batch = batch[batch["her_mask"]]
        reached = (batch["index"] == batch["goal_index"]).unsqueeze(-1)
        assert torch.equal(batch["next", "terminated"], reached)

    def test_an_environment_s_own_reward(self):
        env = gymnasium.make("BitFlipping-v0", n_bits=4)
        storage = HERReplayStorage(
            env.observation_space,
            env.action_space,
            reward_fn=gym_reward(env),
            storage_size=50,
            batch_size=64,
        )
        env.action_space.seed(0)
        observation, _ = env.reset(seed=0)
        for _ in range(70):
            action = env.action_space.sample()
            step = env.step(action)
            storage.record(observation, action, *step[1:], step[0])
            observation = env.reset()[0] if step[2] or step[3] else step[0]
        storage.validate()
        batch = storage.sample()
        solved = (batch["next", "achieved_goal"] == batch["desired_goal"]).all(-1, keepdim=True)
        assert torch.equal(batch["next", "reward"], solved.float() - 1)
        assert storage.transform[0].audit(storage).passed

    @pytest.mark.parametrize("missing", ["achieved_goal", "desired_goal"])
    def test_goal_keys_absent(self, missing):
        left = {key: space for key, space in OBSERVATIONS.items() if key != missing}
        specs = Composite({key: spec for key, spec in SPECS.items() if key != missing})
        for observations in (spaces.Dict(left), specs):
            with pytest.raises(KeyError, match=rf"{missing}.*observation"):
                make(observations=observations)
        with pytest.raises(KeyError, match="dict"):
            make(observations=OBSERVATIONS["observation"])

    def test_unknown_strategy(self):
        with pytest.raises(ValueError, match=r"future.*final.*episode.*random.*past"):
            make(strategy="past")

    def test_negative_num_goals(self):
        with pytest.raises(ValueError, match=r"num_goals.*-1"):
            make(num_goals=-1)

    def test_a_reward_function_is_needed(self):
        with pytest.raises(TypeError, match="reward_fn"):
            HERReplayStorage(OBSERVATIONS, ACTIONS)
        with pytest.raises(TypeError, match="reward_fn"):
            make(reward_fn=None)


def test_observations_of_any_kind():
    """Not a dict: it is stored as `observation`, with the space's dtype and shape."""
    image = spaces.Box(0, 255, (3, 5, 5), np.uint8)
    storage = UniformReplayStorage(image, spaces.MultiBinary(3), storage_size=4)
    layout = {
        field.key: (field.dtype, tuple(field.shape)) for field in storage.storage.layout.fields
    }
    assert layout["observation"] == layout["next", "observation"] == (torch.uint8, (3, 5, 5))
    assert layout["next", "reward"] == (torch.float32, (1,))
    for flag in ("done", "terminated", "truncated"):
        assert layout["next", flag] == (torch.bool, (1,))
    specs = Composite(observation=Bounded(0, 255, (3, 5, 5), dtype=torch.uint8))
    same = UniformReplayStorage(specs, Binary(3, dtype=torch.int8), storage_size=4)
    assert same.storage.layout == storage.storage.layout


@pytest.mark.requirement("episodes")
class TestEpisodes:
    """`EpisodeReplayStorage`: its samples are whole episodes."""

    def make(self, **options):
        return make("EpisodeReplayStorage", batch_size=3, **options)

    def test_a_sample_is_one_of_episodes(self):
        storage, same = (self.make(storage_size=20, seed=2, prefetch=n) for n in (0, 2))
        for each in (storage, same):
            each.extend(rows(14))  # episodes of 4, the last one unfinished
        other = self.make(storage_size=20, seed=2)
        other.extend(rows(14))
        for _ in range(5):
            batch = storage.sample()
            assert batch.shape == (3, 4)
            assert batch["collector", "mask"].all()
            assert batch["next", "done"].squeeze(-1).tolist() == [[False] * 3 + [True]] * 3
            for expected in (same.sample(), other.sample_episodes(3)):
                assert (batch == expected).all()
        assert storage.sample(7).shape == (7, 4)
        assert len(list(storage.batches(2, 5))) == 2

    def test_when_it_can_sample(self):
        storage = self.make()
        assert not storage.can_sample()
        storage.extend(rows(3))
        assert not storage.can_sample()  # none is finished
        with pytest.raises(RuntimeError, match="no finished episode"):
            storage.sample()
        storage.extend(rows(4)[3:])
        assert storage.can_sample()
        unfinished = rows(12)
        for flag in ("done", "terminated", "truncated"):
            unfinished["next", flag].zero_()
        storage.extend(unfinished[:9])
        assert not storage.can_sample()  # its first row was overwritten

    def test_asking_draws_nothing(self):
        storage, other = self.make(seed=1), self.make(seed=1)
        for each in (storage, other):
            each.extend(rows(12))
        assert storage.can_sample()
        assert (storage.sample() == other.sample()).all()

    @pytest.mark.parametrize("num_envs", [1, 2])
    def test_an_episode_that_does_not_fit(self, num_envs):
        storage = self.make(num_envs=num_envs, storage_size=6 * num_envs)
        long = rows(7) if num_envs == 1 else rows(num_envs, 7)
        with pytest.raises(ValueError, match=r"lanes hold 6 steps; got 7"):
            storage.extend(long)
        assert len(storage) == 0
        storage.extend(long[..., :6])
        assert storage.is_full


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


def _space(key):
    *branches, name = keys.key_path(key)
    space = spaces.Dict({name: spaces.Box(-1, 1, (2,))})
    for branch in reversed(branches):
        space = spaces.Dict({branch: space})
    return space


@pytest.mark.parametrize("key", [*keys.SET_BY_SAMPLING, ("index", "inner"), "collector"])
def test_names_that_sampling_sets_are_refused(key, tmp_path):
    box, spec = spaces.Box(-1, 1, (2,)), Composite({key: Unbounded((2,))})
    plain = {"observations": box, "actions": ACTIONS}
    for given in (
        {"observations": _space(key)},
        {"observations": spec},
        {"actions": Composite({key: Unbounded((2,)), "action": Unbounded((2,))})},
        {"info_keys": [key]},
        {"info_keys": {key: box}},
        {"extra_fields": {key: (torch.float32, (2,))}},
    ):
        with pytest.raises(ValueError, match=rf"got {re.escape(repr(key))}, .*rename it in its"):
            make("UniformReplayStorage", **{**plain, **given}, path=tmp_path / "rows")
    with pytest.raises(ValueError, match=rf"got {re.escape(repr(key))}, .*rename it in its"):
        trl_storages.PackedStorage(
            5, fields={key: (torch.float32, (2,))}, scratch_dir=tmp_path / "rows"
        )
    assert not [*tmp_path.iterdir()]


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


def test_a_recurrent_state_that_is_dropped_is_warned_of_once():
    storage = UniformReplayStorage(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), storage_size=20)
    flag = torch.zeros(5, 1, dtype=torch.bool)
    later = {"observation": torch.zeros(5, 3), "step_count": torch.ones(5, 1)}
    outcome = {"reward": torch.zeros(5, 1), "done": flag, "terminated": flag, "truncated": flag}
    steps = TensorDict(
        {**later, "action": torch.zeros(5, dtype=torch.int64), "next": {**later, **outcome}}, [5]
    )
    with_state = steps.clone()
    with_state["state"] = with_state["next", "state"] = torch.zeros(5, 4)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage.extend(steps)
    with pytest.warns(UserWarning, match=r"hold \['state'\], .* dropped.*primer.*extra_fields"):
        storage.extend(with_state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage.extend(with_state)
        storage.extend(steps)
        storage.extend(with_state)
