"""The ready-made storages: what they store, what they refuse, and that all take the same options."""

import gymnasium
import numpy as np
import pytest
import torch
from goal_data import achieved_goals, distance_reward, goal_transitions
from gymnasium import spaces
from oracles import RingOracle
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded

import trl_storages
from trl_storages import HERReplayStorage, UniformReplayStorage, gym_reward

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

    def test_sampling_before_the_first_write(self, name):
        with pytest.raises(RuntimeError, match="write transitions"):
            make(name).sample(2)


class TestHindsight:
    @pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_goals_and_rewards(self, strategy, num_envs):
        options = {"goal_selection_strategy": strategy, "num_goals": 3, "seed": 0}
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
            make(goal_selection_strategy="past")

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
