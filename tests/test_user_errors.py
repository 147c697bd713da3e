"""What goes wrong in loops is said, with what to pass instead, and nothing is written."""

import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import trl_storages
from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    GoalRelabel,
    HERReplayStorage,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    ReplayStorageEnsemble,
    UniformReplayStorage,
    gym_reward,
)
from trl_storages.datasets import from_arrays

BITS = 4
ENV = gymnasium.make("BitFlipping-v0", n_bits=BITS)


def storage_for(num_envs: int = 1, **options) -> HERReplayStorage:
    return HERReplayStorage(
        ENV.observation_space,
        ENV.action_space,
        reward_fn=gym_reward(ENV),
        storage_size=120,
        num_envs=num_envs,
        batch_size=16,
        **options,
    )


def vector(mode: AutoresetMode, num_envs: int = 2):
    return gymnasium.make_vec(
        "BitFlipping-v0",
        num_envs=num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        n_bits=BITS,
    )


def loop(storage, env, num_steps: int = 12) -> None:
    env.action_space.seed(0)
    observations, _ = env.reset(seed=0)
    for _ in range(num_steps):
        actions = env.action_space.sample()
        after, rewards, terminateds, truncateds, infos = env.step(actions)
        storage.record(observations, actions, rewards, terminateds, truncateds, infos, after)
        observations = after


class TestObservationsOfTheWrongEpisode:
    @pytest.mark.parametrize("told", [None, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
    def test_environments_that_reset_in_the_same_step(self, told):
        storage = storage_for(2, autoreset_mode=told)

        with pytest.raises(ValueError, match=r"last observation of .*autoreset_mode=env.metadata"):
            loop(storage, vector(AutoresetMode.SAME_STEP))

        # The steps before are there, the wrong one is not.
        assert not storage[:]["next", "done"].any()
        storage.validate()

    def test_the_right_observations_put_in_by_hand_are_fine(self):
        env, storage = vector(AutoresetMode.SAME_STEP), storage_for(2)
        env.action_space.seed(0)
        observations, _ = env.reset(seed=0)
        for _ in range(12):
            actions = env.action_space.sample()
            after, rewards, terminateds, truncateds, infos = env.step(actions)
            last = {key: value.copy() for key, value in after.items()}
            for lane in np.flatnonzero(terminateds | truncateds):
                for key in last:
                    last[key][lane] = infos["final_obs"][lane][key]
            storage.record(observations, actions, rewards, terminateds, truncateds, infos, last)
            observations = after

        assert len(storage) == 24
        assert storage[:]["next", "done"].any()

    def test_a_vector_of_one_that_resets_in_the_next_step(self):
        with pytest.warns(UserWarning, match=r"ended, and its next step begins .*autoreset_mode="):
            loop(storage_for(1), vector(AutoresetMode.NEXT_STEP, 1))

    def test_a_single_environment_that_is_not_reset(self):
        storage = UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), storage_size=10)
        before, after = np.zeros(1, "f"), np.ones(1, "f")

        storage.record(before, 0, 0.0, True, False, {}, after)
        with pytest.warns(UserWarning, match="reset them when they end"):
            storage.record(after, 0, 0.0, False, False, {}, before)
        # Once is enough.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            storage.record(before, 0, 0.0, True, False, {}, after)
            storage.record(after, 0, 0.0, False, False, {}, before)

    @pytest.mark.parametrize("mode", list(AutoresetMode))
    def test_loops_that_are_right_are_left_alone(self, mode):
        storage = storage_for(2, autoreset_mode=mode)
        env = vector(mode)
        if mode is not AutoresetMode.DISABLED:
            loop(storage, env)
            assert storage[:]["next", "done"].any()

    def test_observations_that_never_change_tell_nothing(self):
        storage = UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), storage_size=10)
        for _ in range(3):
            storage.record(np.zeros(1, "f"), 0, 0.0, True, False, {}, np.zeros(1, "f"))

        assert len(storage) == 3

    def test_a_reset_that_is_announced(self):
        storage = UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), storage_size=10)
        storage.record(np.zeros(1, "f"), 0, 0.0, True, False, {}, np.ones(1, "f"))
        storage.end_episodes()
        storage.record(np.ones(1, "f"), 0, 0.0, False, False, {}, np.zeros(1, "f"))

        assert len(storage) == 2


class TestResetsOfAVector:
    """Without a mode, a step in which gymnasium only resets is refused, whatever way it takes."""

    @pytest.mark.parametrize("convert", [lambda value: value, lambda value: value.tolist()])
    def test_in_the_next_step(self, convert):
        env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        storage = UniformReplayStorage(
            env.single_observation_space, env.single_action_space, storage_size=400, num_envs=2
        )
        env.action_space.seed(0)
        before, _ = env.reset(seed=0)
        was_done = np.zeros(2, bool)
        for _ in range(200):
            actions = env.action_space.sample()
            after, rewards, terminateds, truncateds, infos = env.step(actions)
            step = before, actions, convert(rewards), terminateds, truncateds, infos, after
            if was_done.any():
                break
            storage.record(*step)
            before, was_done = after, terminateds | truncateds
        assert was_done.any()
        rows, state = storage[:].clone(), storage._recorder.state_dict()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"no reward .*autoreset_mode=env.metadata\['auto"):
                storage.record(*step)
            assert torch.equal(storage[:]["observation"], rows["observation"])
            assert storage._recorder.state_dict()["ended"].equal(state["ended"])
            storage.validate()
        # With the mode it is right.
        again = UniformReplayStorage(
            env.single_observation_space,
            env.single_action_space,
            storage_size=400,
            num_envs=2,
            autoreset_mode=env.metadata["autoreset_mode"],
        )
        loop(again, env, 200)
        assert not (again[:]["next", "reward"] == 0).any()

    @pytest.mark.parametrize("named", [True, False])
    def test_by_hand(self, named):
        env = vector(AutoresetMode.DISABLED)
        mode = {"autoreset_mode": AutoresetMode.DISABLED} if named else {}
        storage = storage_for(2, **mode)
        env.action_space.seed(0)
        before, _ = env.reset(seed=0)
        for _ in range(30):
            actions = env.action_space.sample()
            after, rewards, terminateds, truncateds, infos = env.step(actions)
            storage.record(before, actions, rewards, terminateds, truncateds, infos, after)
            done = terminateds | truncateds
            before = env.reset(options={"reset_mask": done})[0] if done.any() else after
        assert len(storage) == 60
        assert storage[:]["next", "done"].any()

    def test_to_where_episodes_end(self):
        """In CliffWalking a quarter of these episodes begin where the one before was cut short."""
        envs = [gymnasium.make("CliffWalking-v1", max_episode_steps=12) for _ in range(2)]
        storage = UniformReplayStorage(
            envs[0].observation_space, envs[0].action_space, storage_size=4000, num_envs=2
        )
        rng = np.random.default_rng(0)
        before, same = np.array([env.reset(seed=0)[0] for env in envs]), 0
        for _ in range(1500):
            actions = rng.integers(4, size=2)
            outcomes = [env.step(action) for env, action in zip(envs, actions, strict=True)]
            after, rewards, terminateds, truncateds, _ = map(np.array, zip(*outcomes, strict=True))
            storage.record(before, actions, rewards, terminateds, truncateds, {}, after)
            before = after.copy()
            for lane in np.flatnonzero(terminateds | truncateds):
                before[lane] = envs[lane].reset()[0]
                same += before[lane] == after[lane]
        assert len(storage) == 3000
        assert same > 20

    def test_what_shows_that_a_loop_resets_by_itself(self):
        """A reward, a flag or another observation; nobody looks from then on."""
        here, there, no = np.zeros((2, 1), "f"), np.ones((2, 1), "f"), np.zeros(2, bool)
        for observations, reward, flags in (
            (there, 0.5, no),
            (there, 0.0, ~no),
            (np.float32([[1], [2]]), 0.0, no),
        ):
            storage = UniformReplayStorage(
                Box(-9, 9, (1,)), Discrete(2), storage_size=20, num_envs=2, on_gap="ignore"
            )

            def record(observations, reward, flags, storage=storage):
                after = there + here - observations
                zero = np.zeros(2, int)
                storage.record(observations, zero, np.full(2, reward), flags, no, {}, after)

            record(here, 0.0, ~no)
            record(observations, reward, flags)
            record(here, 0.0, ~no)
            record(there, 0.0, no)
            assert len(storage) == 8
            storage.validate()


def transition(num_envs: int = 0) -> dict:
    """The arguments of one `record`, of a single environment or of a vector."""

    def many(value):
        return np.stack([np.asarray(value)] * num_envs) if num_envs else value

    env = gymnasium.make("BitFlipping-v0", n_bits=BITS)
    before, _ = env.reset(seed=0)
    after, reward, terminated, truncated, info = env.step(1)
    return {
        "observations": {key: many(value) for key, value in before.items()},
        "actions": many(1),
        "rewards": many(reward),
        "terminateds": many(terminated),
        "truncateds": many(truncated),
        "infos": {key: many(value) for key, value in info.items()},
        "next_observations": {key: many(value) for key, value in after.items()},
    }


class TestArguments:
    @pytest.mark.parametrize(
        ("actions", "message"),
        [
            (np.float32(1), "actions must be int64, got float32.*convert it, as by np.asarray"),
            (torch.ones(()), "actions must be int64, got float32.*convert it, as by np.asarray"),
            (torch.zeros(BITS), "actions must be int64, got float32"),
            (0.5, "actions must be int64, got float64"),
            ("left", "actions must be int64, got .*not numbers"),
            (None, "actions must be int64, got None.*no value"),
        ],
    )
    def test_action_of_the_wrong_dtype(self, actions, message):
        storage = storage_for()
        with pytest.raises(TypeError, match=message):
            storage.record(**transition() | {"actions": actions})
        assert not len(storage)

    def test_one_hot_actions(self):
        storage = storage_for()
        with pytest.raises(ValueError, match=r"actions must have the shape \[\].*got \[4\]"):
            storage.record(**transition() | {"actions": torch.zeros(BITS, dtype=torch.int64)})
        assert not len(storage)

    @pytest.mark.parametrize(
        ("made_for", "given", "message"),
        [
            (1, 3, "must hold 1 environment, got 3; make the storage with num_envs=3"),
            (3, 2, "must hold 3 environments, got 2; make the storage with num_envs=2"),
            (2, 0, "one for each environment, got a single one; make the storage with num_envs=1"),
        ],
    )
    def test_wrong_number_of_environments(self, made_for, given, message):
        storage = storage_for(made_for)
        with pytest.raises(ValueError, match=message):
            storage.record(**transition(given))
        assert not len(storage)

    @pytest.mark.parametrize("name", ["rewards", "truncateds", "actions"])
    def test_one_argument_of_another_number_of_environments(self, name):
        storage = storage_for(3)
        with pytest.raises(ValueError, match=f"{name} must hold 3 environments, got 2"):
            storage.record(**transition(3) | {name: transition(2)[name]})
        assert not len(storage)

    def test_a_collector_s_batch_of_another_number_of_environments(self):
        storage = storage_for(3)
        whole = storage_for(2)
        whole.record(**transition(2))
        with pytest.raises(ValueError, match=r"\[3, T\].*got \[2\]"):
            storage.extend(whole[:])
        assert not len(storage)

    def test_a_collector_s_stack_of_batches(self):
        storage = storage_for(4, on_gap="ignore")
        whole = storage_for(1)
        whole.record(**transition())
        stack = whole[:].expand(2, 2, 3, 1).squeeze(-1)
        with pytest.raises(ValueError, match=r"for num_envs=4: data.flatten\(0, 1\)"):
            storage.extend(stack.clone())
        assert not len(storage)
        storage.extend(stack.flatten(0, 1).clone())
        assert len(storage) == 12


class TestInfos:
    """Infos come as a dict, as a dict of arrays, or as a list of dicts; all are taken."""

    @pytest.mark.parametrize("form", ["arrays", "list"])
    def test_both_forms_of_a_vector(self, form):
        storage = storage_for(3, info_keys=("num_steps",))
        call = transition(3)
        if form == "list":
            call["infos"] = [{"num_steps": 1 + lane} for lane in range(3)]
        else:
            call["infos"]["num_steps"] = np.arange(1, 4)

        storage.record(**call)

        assert storage[:]["num_steps"].flatten().tolist() == [1, 2, 3]

    @pytest.mark.parametrize(
        ("infos", "error", "message"),
        [
            ([{"num_steps": 1}] * 2, ValueError, "infos must hold 3 environments, got 2"),
            ([{"steps": 1}] * 3, KeyError, r"'num_steps' must be there.*there are \['steps'\]"),
            ({}, KeyError, "'num_steps' must be there at every step.*correct info_keys"),
            (None, KeyError, "'num_steps' must be there at every step"),
            ({"num_steps": np.arange(2)}, ValueError, "must hold 3 environments, got 2"),
            ({"num_steps": 1}, ValueError, "a value for each environment, got 1; pass"),
        ],
    )
    def test_infos_that_do_not_fit(self, infos, error, message):
        storage = storage_for(3, info_keys=("num_steps",))
        with pytest.raises(error, match=message):
            storage.record(**transition(3) | {"infos": infos})
        assert not len(storage)

    @pytest.mark.parametrize("infos", [[{"num_steps": 1}], ({"num_steps": 1},)])
    def test_a_list_for_a_single_environment(self, infos):
        assert not isinstance(infos, Mapping)
        storage = storage_for(info_keys=("num_steps",))
        with pytest.raises(TypeError, match=r"infos must be a dictionary.*got"):
            storage.record(**transition() | {"infos": infos})
        assert not len(storage)


CART = Box(-9, 9, (4,), np.float32), Discrete(2)


def refused(error: type[Exception], message: str):
    return pytest.raises(error, match=message)


class TestFirstTries:
    """What newcomers do first, and what they are told."""

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda: UniformReplayStorage(ENV), r"missing.*env.action_space, storage_size="),
            (lambda: UniformReplayStorage(*CART, 100), r"positional.*by name: .*storage_size="),
            (lambda: HERReplayStorage(*CART), r"missing.*reward_fn=gym_reward\(env\)"),
            (lambda: ReplayStorage(1000), r"positional.*storage=PackedStorage\(1000\)"),
            (lambda: ReplayStorage(storage_size=9), "missing.*UniformReplayStorage and"),
        ],
    )
    def test_a_constructor_says_how_it_is_called(self, make, told):
        with refused(TypeError, told):
            make()

    @pytest.mark.parametrize("option", ["reward_fn", "terminated_fn"])
    @pytest.mark.parametrize(
        "function",
        [lambda reached, goal: reached, lambda reached, goal, infos, more: reached, torch.nn.ReLU],
    )
    def test_a_goal_function_takes_three_arguments(self, option, function):
        named = {"reward_fn": gym_reward(ENV), option: function}
        with refused(
            TypeError, rf"^{option} must be .*\(achieved_goal, desired_goal, tr.*got one of"
        ):
            GoalRelabel(**named)
        with refused(
            TypeError, rf"^{option} must be .*\(achieved_goal, desired_goal, tr.*got one of"
        ):
            HERReplayStorage.from_env(ENV, **named)

    def test_rewards_of_a_vector_of_environments(self):
        with refused(TypeError, "SyncVectorEnv holds several environments.*one made alike"):
            gym_reward(vector(AutoresetMode.NEXT_STEP))

    def test_goals_for_an_actor_beside_those_of_rewards(self):
        storage = storage_for()
        loop(storage, ENV, num_steps=3)
        told = r"pass transform=GoalRelabel\(None, goal_key='actor_goal'\)"
        with refused(RuntimeError, told):
            storage.set_sampler(HERSampler(goal_key="actor_goal", base=storage.sampler))
            storage.sample()
        storage = storage_for()
        loop(storage, ENV, num_steps=3)
        with refused((KeyError, RuntimeError), "as base= of it"):
            storage.set_sampler(HERSampler(goal_key="actor_goal"))
            storage.append_transform(GoalRelabel(None, goal_key="actor_goal"))
            storage.sample()

    def test_a_dump_is_no_directory_of_rows(self, tmp_path):
        UniformReplayStorage(*CART, storage_size=10).dumps(tmp_path / "dump")
        with refused(FileExistsError, r"take what dumps\(\) wrote by loads\(\)"):
            UniformReplayStorage(*CART, storage_size=10, path=tmp_path / "dump")

    def test_what_was_saved_of_another_size(self):
        for options in ({}, {"alpha": 0.6}):
            small, large = (
                UniformReplayStorage(*CART, storage_size=size, **options) for size in (10, 20)
            )
            loop(large, gymnasium.make("CartPole-v1"), 15)
            with refused(
                ValueError, r"^the saved storage has 20 slots .*this one 10 .*num_envs of"
            ):
                small.load_state_dict(large.state_dict())
            with refused(
                ValueError, r"^the saved storage has 10 slots .*this one 20 .*num_envs of"
            ):
                large.load_state_dict(small.state_dict())

    def test_errors_within_a_constructor_stay_what_they_are(self):
        with refused(TypeError, r"^PackedStorage\(\) missing .*'max_size'$"):
            ReplayStorage(storage=PackedStorage)

    def test_a_directory_with_rows_of_a_run_before(self, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(torchrl_logger, "info", said.append)
        storage = UniformReplayStorage(*CART, storage_size=8, path=tmp_path)
        loop(storage, gymnasium.make("CartPole-v1"), 3)
        storage.close()
        assert not said
        assert len(UniformReplayStorage(*CART, storage_size=8, path=tmp_path)) == 3
        (told,) = said
        assert f"goes on with 3 rows that {tmp_path} holds; to begin with none call empty()" in told

    def test_a_refused_directory_is_not_announced(self, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(torchrl_logger, "info", said.append)
        storage = UniformReplayStorage(*CART, storage_size=8, path=tmp_path)
        loop(storage, gymnasium.make("CartPole-v1"), 3)
        storage.close()
        with refused(ValueError, "was made with num_envs=1, got 2: pass the one"):
            UniformReplayStorage(*CART, storage_size=8, path=tmp_path, num_envs=2)
        assert not said

    def test_lanes_that_come_last(self):
        storage = ReplayStorage(storage=PackedStorage(60), writer=EpisodeWriter(2))
        with refused(ValueError, r"data.transpose\(0, 1\) if .*; or pass num_envs=5"):
            storage.extend(TensorDict({"observation": torch.zeros(5, 2)}, [5, 2]))

    def test_the_size_of_a_smaller_storage(self):
        saved = storage_for()
        loop(saved, ENV, 3)
        with refused(ValueError, "the storage_size and num_envs of the one that was saved"):
            UniformReplayStorage(
                ENV.observation_space, ENV.action_space, storage_size=30
            ).load_state_dict(saved.state_dict())

    def test_a_dump_is_not_opened(self, tmp_path):
        storage_for().dumps(tmp_path / "dump")
        with refused(FileNotFoundError, r"What dumps\(\) saved .* loads\(\)"):
            ReplayStorage.open(tmp_path / "dump")

    def test_episodes_that_are_stacked(self):
        flags = {"observations": np.zeros((3, 5, 2)), "actions": np.zeros((3, 5, 2))}
        with refused(ValueError, r"one flag for each of 3 .*reshape\(-1, \*entry.shape\[2:\]\)"):
            from_arrays(flags | {"rewards": np.zeros((3, 5)), "timeouts": np.zeros((3, 5))})

    def test_no_reward_function(self):
        with refused(TypeError, "reward_fn must be .* None only with a goal_key, got None"):
            GoalRelabel(None)

    def test_spaces_of_all_environments(self):
        envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        storage = UniformReplayStorage(envs.observation_space, envs.action_space, num_envs=2)
        with refused(ValueError, "spaces of one environment, single_observation_space"):
            loop(storage, envs, 1)
        assert not len(storage)

    @pytest.mark.parametrize(
        ("given", "error", "told"),
        [
            (
                {"terminateds": 0},
                TypeError,
                "must be bool, got int64, which are no flags; .*`!= 0`",
            ),
            ({"observations": np.zeros(4)}, TypeError, r"gymnasium\.wrappers\.DtypeObservation"),
        ],
    )
    def test_values_of_another_kind(self, given, error, told):
        storage, seen = UniformReplayStorage(*CART, storage_size=8), np.zeros(4, np.float32)
        step = {"observations": seen, "actions": 0, "rewards": 0.0, "terminateds": False}
        step |= {"truncateds": False, "infos": {}, "next_observations": seen}
        with refused(error, told):
            storage.record(**step | given)
        assert not len(storage)

    @pytest.mark.parametrize("key", ["action", ("next", "truncated"), ("next", "done")])
    def test_messages_name_keys_as_they_are_written(self, key):
        storage, seen = UniformReplayStorage(*CART, storage_size=8), np.zeros(4, np.float32)
        storage.record(seen, 0, 0.0, False, False, {}, seen)
        rows = storage[:].exclude(key)
        declared = ReplayStorage(storage=PackedStorage(8, fields={"force": None}))
        agents = NStep(2, reward_key=("next", "agents", "reward"))
        parts = ReplayStorage(storage=PackedStorage(8), transform=agents, batch_size=1)
        parts.extend(storage[:])
        for fails in (
            lambda: storage.extend(rows),
            lambda: parts.extend(rows),
            lambda: parts.sample(),
            lambda: declared.extend(storage[:]),
            lambda: storage.storage.layout.field("force"),
            lambda: storage.explain(rows),
        ):
            with pytest.raises(KeyError) as error:
                fails()
            said = str(error.value)
            assert "('next', 'reward')" in said
            assert not re.search(r"\\|the infos", said)

    def test_further_fields_of_a_loop_come_by_the_infos(self):
        state, seen = Box(-1, 1, (3,), np.float32), np.zeros(4, np.float32)
        for named in (
            {"extra_fields": {"state": (torch.float32, (3,))}},
            {"info_keys": {"state": state}},
        ):
            storage = UniformReplayStorage(*CART, **named)
            with refused(
                KeyError, r"'state' must be there .* hand it on, as in .*'state': \.\.\.}"
            ):
                storage.record(seen, 0, 0.0, False, False, {}, seen)
            assert not len(storage)
            storage.record(seen, 0, 0.0, False, False, {"state": torch.ones(3)}, seen)
            assert storage.sample(2)["state"].eq(1).all()

    @pytest.mark.parametrize(
        ("key", "dtype", "shape", "error", "told"),
        [
            ("action", torch.int64, (3, 2), ValueError, "env.action_spec if these are one-hot"),
            ("observation", torch.float64, (3, 4), TypeError, "env.observation_spec"),
        ],
    )
    def test_entries_of_an_environment_of_torchrl(self, key, dtype, shape, error, told):
        storage = UniformReplayStorage(*CART, storage_size=8)
        kinds = storage.storage.layout.described.items()
        steps = TensorDict({name: torch.zeros(3, *it[1], dtype=it[0]) for name, it in kinds}, [3])
        with refused(error, told):
            storage.extend(steps.set(key, torch.zeros(shape, dtype=dtype)))
        with refused(TypeError, "got 2 of them: make one by torch.stack"):
            storage.extend([steps, steps])
        assert not len(storage)

    def test_a_storage_shows_how_goals_are_written(self):
        storage = storage_for(terminated_fn=torch.where)
        assert "GoalRelabel(gym_reward(<BitFlippingEnv<" in repr(storage)
        assert "terminated_fn=where)," in repr(storage)
        assert repr(GoalRelabel(None, goal_key="far")) == "GoalRelabel(None, goal_key='far')"


class TestOtherFields:
    """Of rows that are saved, only the fields that differ are named."""

    @staticmethod
    def made(size: int = 3, action=None, **options) -> UniformReplayStorage:
        spaces = Box(-1, 1, (size,)), action or Discrete(2)
        return UniformReplayStorage(*spaces, storage_size=20, **options)

    def test_reopened(self, tmp_path):
        self.made(path=tmp_path / "rows").close()
        with pytest.raises(
            ValueError, match=r"'observation' is float32 \[3\], got float32 \[4\];"
        ) as error:
            self.made(4, path=tmp_path / "rows")
        assert "action" not in str(error.value)
        with pytest.raises(
            ValueError, match=r"fields: 'action' is int64 \[\], got float32 \[2\]\."
        ):
            self.made(action=Box(-1, 1, (2,)), path=tmp_path / "rows")
        assert len(self.made(path=tmp_path / "rows")) == 0

    def test_loaded(self):
        with pytest.raises(ValueError, match=r"'observation' is float32 \[3\], got float32 \[5\];"):
            self.made(5).load_state_dict(self.made().state_dict())

    def test_missing_and_further_ones(self):
        named = {"a": (torch.float32, ()), "b": (torch.int64, (2,))}
        layout = PackedStorage(5, fields=named).layout
        text = layout.unlike({"a": None, "c": (torch.bool, ())})
        assert text == "'b' is int64 [2], got none; 'c' is missing, got bool []"


class TestRemovedDirectories:
    """A directory that is removed, or replaced, while a process writes it."""

    @pytest.mark.parametrize("replaced", [False, True])
    @pytest.mark.parametrize("method", ["flush", "close", "empty"])
    def test_it_is_said_and_the_rows_can_be_saved(self, tmp_path, method, replaced):
        path, options = tmp_path / "rows", {"storage_size": 8}
        storage = UniformReplayStorage(*CART, path=path, **options)
        loop(storage, gymnasium.make("CartPole-v1"), 3)
        shutil.rmtree(path)
        other = UniformReplayStorage(*CART, path=path, **options) if replaced else None
        before = sorted(file.read_bytes() for file in path.glob("*")) if other else []
        with refused(FileNotFoundError, r"rows was removed while .*dumps\(another path\)"):
            getattr(storage, method)()
        assert storage.storage.directory.is_writer == (method != "close")
        # Who has closed a directory reads what there is.
        if method == "close" and replaced:
            for read in (len, ReplayStorage.sample):
                with refused(RuntimeError, "rows was deleted, and made anew, .*: open it again"):
                    read(storage)
        else:
            assert len(storage) == 3
            storage.dumps(tmp_path / "dump")
            loaded = UniformReplayStorage(*CART, path=tmp_path / "new", **options)
            loaded.loads(tmp_path / "dump")
            assert (loaded[:] == storage[:]).all()
        if other:
            assert sorted(file.read_bytes() for file in path.glob("*")) == before
            loop(other, gymnasium.make("CartPole-v1"), 3)
            other.close()

    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_write_that_needs_space_says_so(self, tmp_path, replaced):
        path, options = tmp_path / "rows", {"storage_size": 4000, "share_next": True}
        storage = UniformReplayStorage(*CART, path=path, **options)
        still = np.zeros(4, np.float32)
        storage.record(still, 0, 1.0, False, True, {}, still + 1)
        shutil.rmtree(path)
        other = UniformReplayStorage(*CART, path=path, **options) if replaced else None
        flags = np.zeros((3000, 1), bool)
        block = TensorDict(
            {
                "observation": np.zeros((3000, 4), np.float32),
                "action": np.zeros(3000, int),
                "next": {
                    "observation": np.ones((3000, 4), np.float32),
                    "reward": np.zeros((3000, 1), np.float32),
                    "terminated": flags,
                    "truncated": ~flags,
                    "done": ~flags,
                },
            },
            [3000],
        )
        with refused(FileNotFoundError, r"rows was removed while .*dumps\(another path\)"):
            storage.extend(block)
        assert len(storage) == 1
        if other:
            other.extend(block)
            other.close()

    def test_it_is_deleted_already(self, tmp_path):
        storage = UniformReplayStorage(*CART, storage_size=8, path=tmp_path / "rows")
        shutil.rmtree(tmp_path / "rows")
        other = UniformReplayStorage(*CART, storage_size=8, path=tmp_path / "rows")
        storage.close(keep=False)
        assert not storage.storage.directory.is_writer
        loop(other, gymnasium.make("CartPole-v1"), 3)
        other.close()


@pytest.mark.parametrize("named", ["~", "~/rows", "~nobody-of-this-name/rows"])
def test_a_directory_of_a_user(tmp_path, monkeypatch, named):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    storage = UniformReplayStorage(*CART, storage_size=8, path=named)
    loop(storage, gymnasium.make("CartPole-v1"), 3)
    storage.close()
    there = str(tmp_path / "home") if named[1:2] in ("", "/") else "~nobody-of-this-name"
    assert (tmp_path / there / named.partition("/")[2]).is_dir()
    assert len(ReplayStorage.open(named, mode="r")) == 3
    storage.dumps(named + "/dump")
    UniformReplayStorage(*CART, storage_size=8).loads(named + "/dump")


class TestHalfMade:
    """An object whose constructor raised is shown, so that its error is what is told."""

    @pytest.mark.parametrize("kind", [*map(vars(trl_storages).get, trl_storages.__all__)])
    def test_it_is_shown(self, kind):
        if not isinstance(kind, type) or is_dataclass(kind):
            return
        half = kind.__new__(kind)
        assert kind.__name__ in repr(half)
        if issubclass(kind, ReplayStorage | ReplayStorageEnsemble):
            assert not half
            assert len(half) == 0

    def test_it_says_what_it_lacks(self):
        half = UniformReplayStorage.__new__(UniformReplayStorage)
        assert "<UniformReplayStorage, not whole: AttributeError(" in repr(half)


def flagged(*shape: int, agents: int = 0) -> TensorDict:
    """Steps without an end; with agents, each of them has flags of its own beside those of all."""
    time = torch.arange(shape[-1]).float().expand(shape).unsqueeze(-1)

    def flags(*size: int) -> dict[str, torch.Tensor]:
        names = ("done", "terminated", "truncated")
        return {name: torch.zeros(*shape, *size, 1, dtype=torch.bool) for name in names}

    after = {"observation": time + 1, "reward": torch.ones(*shape, 1), **flags()}
    if agents:
        after["agents"] = flags(agents)
    return TensorDict({"observation": time, "next": after}, shape)


STORED = {
    "packed": PackedStorage,
    "shared": lambda size: PackedStorage(size, share_next=True),
    "TorchRL's": LazyTensorStorage,
}


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@pytest.mark.parametrize("kind", STORED)
class TestEndsThatAreNotDone:
    """TorchRL's `done` is `terminated | truncated`; n-step returns would sum past a terminal state."""

    def make(self, kind: str, num_envs: int = 1, **options) -> ReplayStorage:
        writer = EpisodeWriter(num_envs, **options)
        return ReplayStorage(storage=STORED[kind](400), writer=writer, batch_size=4)

    def refused(self, storage, put, flag: str) -> None:
        rows = len(storage)
        with pytest.raises(ValueError, match=f"'done'.* must be true wherever .*'{flag}'"):
            put()
        assert len(storage) == rows
        storage.validate()

    @pytest.mark.parametrize("at", [0, 127, 128, 150, 299])
    def test_extend(self, kind, flag, at):
        storage, steps = self.make(kind), flagged(300)
        steps["next", flag][at] = True
        self.refused(storage, lambda: storage.extend(steps), flag)
        steps["next", "done"][at] = True
        storage.extend(steps)
        assert len(storage) == 300

    def test_add(self, kind, flag):
        storage, step = self.make(kind), flagged(1)[0]
        step["next", flag][:] = True
        self.refused(storage, lambda: storage.add(step), flag)

    def test_several_lanes(self, kind, flag):
        storage, steps = self.make(kind, 2), flagged(2, 3)
        steps["next", flag][1, 2] = True
        self.refused(storage, lambda: storage.extend(steps), flag)
        steps["next", "done"][0, 2] = True
        self.refused(storage, lambda: storage.extend(steps), flag)

    def test_of_agents(self, kind, flag):
        storage, steps = self.make(kind), flagged(3, agents=2)
        steps["next", "agents", flag][1, 1] = True
        self.refused(storage, lambda: storage.extend(steps), flag)
        steps["next", "agents", "done"][1, 0] = True
        self.refused(storage, lambda: storage.extend(steps), flag)
        steps["next", "agents", "done"][1, 1] = True
        storage.extend(steps)

    def test_agents_that_have_no_done_of_their_own(self, kind, flag):
        """The episode goes on for the others."""
        storage, steps = self.make(kind), flagged(3, agents=2)
        steps["next", "agents", flag][1, 1] = True
        storage.extend(steps.exclude(("next", "agents", "done")))
        assert len(storage) == 3


class TestBatchesThatLackWhatWasDrawn:
    def make(self, **options) -> ReplayStorage:
        storage = ReplayStorage(
            storage=PackedStorage(50), sampler=PERSampler(50), batch_size=4, **options
        )
        storage.extend(flagged(10))
        return storage

    @pytest.mark.parametrize("unit", [None, EpisodeSequence(2)], ids=["rows", "sequences"])
    def test_are_refused_by_name(self, unit):
        storage = self.make(sample_unit=unit)
        batch = storage.sample()
        batch["td_error"] = torch.rand(batch.batch_size)
        for key in ("validity_mask", "learning_mask") if unit else ("index",):
            with pytest.raises(KeyError, match=f"lacks its entry '{key}'"):
                storage.update_tensordict_priority(batch.exclude(key))

    def test_of_an_ensemble(self):
        ensemble = ReplayStorageEnsemble(self.make(), self.make(), batch_size=4)
        batch = ensemble.sample()
        with pytest.raises(KeyError, match="lacks its entry 'index'"):
            ensemble.update_tensordict_priority(batch.exclude("index"), torch.rand(4))


@pytest.mark.parametrize("name", ["sample", "batches"])
def test_an_argument_that_there_is_not(name):
    storage = ReplayStorage(storage=PackedStorage(50))
    for source in (storage, ReplayStorageEnsemble(storage)):
        called = rf"^{type(source).__name__}\.{name}\(\)"
        with pytest.raises(TypeError, match=rf"{called} got an unexpected .*'device'"):
            getattr(source, name)(device="cpu")


def test_a_number_for_the_lanes():
    storage = storage_for(num_envs=2)
    with pytest.raises(ValueError, match=r"distinct numbers in 0\.\.1, got 0: pass \[0\]\.$"):
        storage.end_episodes(lanes=0)
    with pytest.raises(ValueError, match=r"distinct numbers in 0\.\.1, got 2\.$"):
        storage.end_episodes(lanes=2)


@pytest.mark.parametrize("lanes", [[False, False], torch.zeros(2).bool()])
def test_no_lane_was_reset(lanes):
    """A loop hands on the mask of each step."""
    storage = ReplayStorage(storage=PackedStorage(10), writer=EpisodeWriter(2))
    storage.extend(TensorDict({"next": {"done": torch.zeros(2, 3, 1).bool()}}, [2, 3]))
    storage.end_episodes(lanes)
    assert storage.episodes.is_open.all()


class TestSampleUnits:
    @pytest.mark.parametrize("boundary", ["pad", "fit", "cross"])
    @pytest.mark.parametrize("kind", [PackedStorage, LazyTensorStorage])
    def test_a_sequence_that_no_lane_can_hold(self, boundary, kind):
        unit = EpisodeSequence(8, burn_in=2, bootstrap=1, boundary=boundary)
        told = r"sequence of sample_unit has 11 steps, and a lane of the storage holds 4: .*larger"
        for buffer in (ReplayStorage, TensorDictReplayBuffer):
            with pytest.warns(UserWarning, match=told):
                buffer(storage=kind(8), writer=EpisodeWriter(2), sample_unit=unit)
        spaces = ENV.observation_space, ENV.action_space
        with pytest.warns(UserWarning, match=told):
            UniformReplayStorage(*spaces, storage_size=8, num_envs=2, sample_unit=unit)
        UniformReplayStorage(*spaces, storage_size=22, num_envs=2, sample_unit=unit)

    def test_they_are_read_as_they_were_given(self):
        unit = EpisodeSequence(3)
        assert storage_for(sample_unit=unit).sample_unit is unit
        assert storage_for().sample_unit is None


class TestServices:
    """What is said where the storage is made, before a process is started for it."""

    @pytest.mark.parametrize("kind", [UniformReplayStorage, ReplayStorage])
    def test_that_storages_do_not_support(self, kind):
        with pytest.raises(ValueError, match=r"service_backend must be one of \('direct', 'ray'\)"):
            kind(service_backend="rai")
        with pytest.raises(ValueError, match=r"got 'thread'"):
            kind(service_backend="thread")

    def test_options_by_another_name(self):
        spaces = ENV.observation_space, ENV.action_space
        where = {"remote_config": {"num_cpus": 0}}
        with pytest.raises(TypeError, match="do you mean service_backend_options"):
            UniformReplayStorage(*spaces, service_backend_option=where)
        with pytest.raises(
            TypeError, match=r"there are .*service_backend, service_backend_options"
        ):
            UniformReplayStorage.from_env(ENV, xyz=where)
        with pytest.raises(TypeError, match="do you mean service_backend_options"):
            storage_for(service_backend_option=where)

    @pytest.mark.parametrize(
        ("options", "error", "told"),
        [
            ({"nstep": 3}, TypeError, "no option 'nstep': it is called n_step"),
            ({"eta": 2}, ValueError, "eta must be in"),
            ({"on_gap": "x"}, ValueError, "on_gap must be one of"),
            ({"autoreset_mode": "x"}, ValueError, "autoreset_mode must be"),
            ({"extra_fields": {"action": (torch.float32, ())}}, ValueError, "extra_fields must be"),
            ({"strategy": "x"}, ValueError, "strategy must be"),
            ({"num_goals": -1}, ValueError, "num_goals must be"),
            ({"num_envs": 200}, ValueError, "must be at least num_envs=200; got 120"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_options_that_do_not_fit(self, options, error, told):
        with pytest.raises(error, match=told):
            storage_for(**options)


def test_a_size_that_is_a_float():
    with pytest.raises(
        ValueError, match=r"must be an integer, got 1000000.0 \(float\): pass 1000000"
    ):
        UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), storage_size=1e6)


def test_a_discount_without_n_step_does_nothing():
    spaces = Box(-9, 9, (1,)), Discrete(2)
    with pytest.raises(ValueError, match=r"discount does nothing without n_step.* loss has"):
        UniformReplayStorage(*spaces, discount=0.9)
    UniformReplayStorage(*spaces, discount=0.9, n_step=1)


def test_goals_that_are_not_geometric_are_not_discounted():
    with pytest.raises(ValueError, match="discount does nothing with strategy='future': only geom"):
        HERSampler("future", discount=0.9)
    with pytest.raises(
        ValueError, match=r"discount does nothing without n_step.* 'geometric' ones"
    ):
        storage_for(discount=0.9)
    mixture = {"future": 0.5, "geometric": 0.5}
    assert HERSampler(mixture, discount=0.9).discount == 0.9
    assert storage_for(discount=0.9, strategy=mixture).sampler.discount == 0.9
    folded = storage_for(discount=0.9, n_step=2)
    folded.strategy = "geometric"
    assert folded.sampler.discount == 0.9


def test_a_size_that_the_environments_do_not_share_equally_is_told():
    spaces = Box(-9, 9, (1,)), Discrete(2)
    with pytest.warns(UserWarning, match="storage_size=11 is not .* num_envs=3: 9 transitions are"):
        storage = UniformReplayStorage(*spaces, storage_size=11, num_envs=3)
    assert storage.episodes.capacity == 9
    UniformReplayStorage(*spaces, num_envs=3)


def test_a_directory_of_stacks_is_reopened_with_frame_stack(tmp_path):
    spaces, options = (Box(0, 255, (4, 8, 8), np.uint8), Discrete(2)), {"storage_size": 20}
    storage = UniformReplayStorage(*spaces, **options, frame_stack=4, path=tmp_path)
    storage.record(np.zeros((4, 8, 8), "u1"), 0, 0.0, True, False, {}, np.zeros((4, 8, 8), "u1"))
    storage.close()
    with refused(
        ValueError, r"as FrameStack\(num_frames=4.*got uint8 \[4, 8, 8\];.*frame_stack they"
    ):
        UniformReplayStorage(*spaces, **options, path=tmp_path)
    assert len(UniformReplayStorage(*spaces, **options, frame_stack=4, path=tmp_path)) == 1


def test_one_of_a_kind_is_singular():
    storage = storage_for()
    loop(storage, ENV, 1)
    assert str(storage.explain(storage.sample(1))).startswith("1 sample of 1 row stored")
    assert str(GoalRelabel(gym_reward(ENV)).audit(storage)).endswith("on all 1 row.")
    with pytest.raises(ValueError, match="a batch for 1 lane must be"):
        storage.extend(torch.stack([storage[:], storage[:]]), lanes=[0])


@pytest.mark.parametrize(
    "form",
    ["single", "arrays", "dictionaries", "reset in the same step", "final dictionaries"],
)
def test_a_time_limit_that_is_passed_as_terminal(form):
    num_envs = 1 if form == "single" else 2
    mode = "SameStep" if form == "reset in the same step" else None
    storage = UniformReplayStorage(*CART, storage_size=8, num_envs=num_envs, autoreset_mode=mode)
    name, which = "TimeLimit.truncated", np.arange(num_envs) == num_envs - 1
    arrays = {name: which, f"_{name}": which}
    infos = {
        "single": {name: True},
        "arrays": arrays,
        "dictionaries": [{}, {name: True}],
        "reset in the same step": {"final_info": arrays, "final_obs": np.ones((2, 4), "f")},
        "final dictionaries": {"final_info": np.array([None, {name: True}])},
    }[form]
    values = np.zeros((num_envs, 4), "f"), np.zeros(num_envs, int), np.zeros(num_envs), which
    observation, action, reward, flag = (it[0] if form == "single" else it for it in values)

    def record(terminated, truncated):
        storage.record(observation, action, reward, terminated, truncated, infos, observation)
        return storage[:]["next", "terminated"].any().item()

    with refused(
        ValueError, rf"environment {num_envs - 1} was cut by its time limit.*as truncateds"
    ):
        record(flag, flag & False)
    assert not len(storage)
    # The loop may let the limit count as a terminal state.
    assert record(flag, flag)
    storage.empty()
    assert not record(flag & False, flag)


@pytest.mark.parametrize("said", [False, [True], [[True, True]] * 2, "yes", None])
def test_what_is_no_flag_of_each_environment_is_no_time_limit(said):
    storage = UniformReplayStorage(*CART, storage_size=8, num_envs=2)
    observation, flags = np.zeros((2, 4), "f"), np.array([False, True])
    infos = {"TimeLimit.truncated": said if isinstance(said, bool | str | None) else np.array(said)}
    storage.record(observation, [0, 0], [0.0, 0.0], flags, ~flags & False, infos, observation)
    assert len(storage) == 2


def test_a_refused_empty_keeps_what_was_drawn_ahead(tmp_path):
    options = {"storage_size": 8, "batch_size": 4, "path": tmp_path, "prefetch": 2}
    storage = UniformReplayStorage(*CART, **options)
    loop(storage, gymnasium.make("CartPole-v1"), 3)
    reader = UniformReplayStorage(*CART, **options, mode="r")
    reader.sample()
    ahead = [*reader._prefetch_queue]
    assert ahead
    with refused(RuntimeError, "opened for reading"):
        reader.empty()
    assert [*reader._prefetch_queue] == ahead


def test_a_storage_in_place_of_its_rows():
    with pytest.raises(
        TypeError, match=r"got a HERReplayStorage: pass its rows, as in storage\[:\]"
    ):
        storage_for().extend(storage_for())


def test_a_gap_names_its_lane_and_the_loop():
    storage = UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), storage_size=20, num_envs=2)
    first, after = np.zeros((2, 1), "f"), np.ones((2, 1), "f")
    flags = np.zeros(2, bool)
    storage.record(first, [0, 0], [0.0, 0.0], flags, flags, {}, after)
    with pytest.warns(
        UserWarning, match=r"lane \(1\) led to.* `obs = next_obs` missing .*overwritten"
    ):
        storage.record([[1.0], [0.0]], [0, 0], [0.0, 0.0], flags, flags, {}, after)


def test_a_sampler_is_not_assigned():
    storage = storage_for()
    with pytest.raises(AttributeError, match=r"HERReplayStorage.sampler .*set_sampler\(sampler\)"):
        storage.sampler = storage.sampler


@pytest.mark.parametrize("shape", [(4, 8, 9), (8, 9, 4)])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_frame_in_the_place_of_a_stack(shape, num_envs):
    space = Box(0, 255, shape, np.uint8)
    storage = UniformReplayStorage(space, Discrete(2), storage_size=8, num_envs=num_envs)
    lead = (num_envs,) if num_envs > 1 else ()
    frame, flag = np.zeros((*lead, 8, 9), np.uint8), np.zeros(lead, bool)
    with pytest.raises(ValueError, match=r"got \[.*8, 9\]; pass stacks of 4 frames"):
        storage.record(frame, np.zeros(lead, int), np.zeros(lead), flag, flag, {}, frame)


def test_a_goal_that_another_transform_writes():
    storage = storage_for()
    storage.set_sampler(HERSampler(base=HERSampler(goal_key="actor_goal")))
    storage.append_transform(GoalRelabel(None, goal_key="actr_goal"))
    loop(storage, ENV, 3)
    with pytest.raises(
        RuntimeError, match=r"'actor_goal' .* got GoalRelabel of 'desired_goal', .*of 'actr_goal'"
    ):
        storage.sample()


def test_priorities_below_zero_are_no_losses():
    storage = storage_for(alpha=0.6)
    loop(storage, ENV, 3)
    batch = storage.sample()
    for wrong, hint in (
        (-1.0, r"Pass td_error.abs\(\)"),
        (float("nan"), "Look for NaN in the loss"),
    ):
        with pytest.raises(ValueError, match=hint):
            storage.update_tensordict_priority(batch, torch.full((len(batch),), wrong))
