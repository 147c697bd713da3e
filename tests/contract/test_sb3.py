"""Replay buffers in Stable-Baselines3: what its own buffers document, compared with them, and more."""

import re
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from contract.in_pairs import in_pairs
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

pytest.importorskip("stable_baselines3", reason="needs the extra 'sb3'")
import sb3_contrib
import stable_baselines3 as sb3
from stable_baselines3.common import buffers
from stable_baselines3.common.save_util import load_from_pkl
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from stable_baselines3.her import GoalSelectionStrategy

from trl_storages import HERReplayStorage, gym_reward
from trl_storages.sb3 import HerReplayBuffer, ReplayBuffer

GUIDE = Path(__file__).parents[2] / "tutorials" / "coming_from.md"
GAMMA = 0.9
STACKS = {"compress": True, "frame_stack": 4}
LENGTHS = 3, 5, 1, 7
SPACES = {
    "vector": Box(-9, 9, (3,), np.float32),
    "float64": Box(-9, 9, (2, 2), np.float64),
    "stacks": Box(0, 255, (4, 6, 5), np.uint8),
    "number": Discrete(50),
    "numbers": MultiDiscrete([50, 60]),
    "bits": MultiBinary(4),
    "dict": Dict(
        image=Box(0, 255, (3, 6, 5), np.uint8), vector=Box(-9, 9, (2,)), number=Discrete(9)
    ),
}
ACTIONS = {
    "one": Discrete(3),
    "several": MultiDiscrete([3, 4]),
    "bits": MultiBinary(2),
    "vector": Box(-1, 1, (2, 2), np.float64),
}


def play(space, action_space, num_envs, num_steps):
    """Yields arguments of `add`: unequal episodes, which end by termination or by a time limit."""
    space.seed(0)
    action_space.seed(0)
    rng = np.random.default_rng(0)
    is_stack = isinstance(space, Box) and space.shape[0] == 4

    def following(value=None):
        new = space.sample()
        return np.concatenate([value[1:], new[-1:]]) if is_stack and value is not None else new

    def joined(values):
        if isinstance(space, Dict):
            return {key: np.stack([value[key] for value in values]) for key in space}
        return np.stack(values)

    obs = [following() for _ in range(num_envs)]
    ends = [
        {sum((LENGTHS * 20)[lane : lane + n]) for n in range(1, 60)} for lane in range(num_envs)
    ]
    for step in range(1, num_steps + 1):
        next_obs = [following(value) for value in obs]
        done = np.array([step in ends[lane] for lane in range(num_envs)])
        limits = rng.random(num_envs) < 0.5
        infos = [
            {"TimeLimit.truncated": bool(limit)} if end else {}
            for end, limit in zip(done, limits, strict=True)
        ]
        action = np.stack([action_space.sample() for _ in range(num_envs)])
        reward = rng.normal(size=num_envs)
        yield joined(obs), joined(next_obs), action, reward, done, infos
        obs = [following() if end else value for end, value in zip(done, next_obs, strict=True)]


def assert_equal(samples, expected):
    """Compares two batches; n-step returns and powers of gamma may be rounded differently."""
    for name, value, other in zip(expected._fields, samples, expected, strict=True):
        pairs = [(value, other)]
        if isinstance(other, dict):
            assert [*value] == [*other]
            pairs = [(value[key], other[key]) for key in other]
        for one, two in pairs:
            if two is None:
                assert one is None
            elif name in ("rewards", "discounts"):
                torch.testing.assert_close(one, two)
            else:
                assert one.dtype is two.dtype
                assert torch.equal(one, two), name


def batch_of_sb3(buffer, samples, env, monkeypatch):
    """Returns the same transitions from a buffer of SB3."""
    lanes, positions = np.divmod(samples.batch["index"].numpy(), buffer.buffer_size)
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "randint", lambda *_, **__: lanes)  # SB3 draws environments
        return buffer._get_samples(positions, env=env)


def normalizer(env):
    """Returns a `VecNormalize` with statistics that change rewards and observations."""
    normalized = VecNormalize(env, gamma=GAMMA, clip_reward=1.0)
    normalized.ret_rms.var, normalized.training = np.float64(4.0), False
    statistics = normalized.obs_rms
    for one in statistics.values() if isinstance(statistics, dict) else [statistics]:
        one.mean, one.var = one.mean + 0.5, one.var * 9
    return normalized


class Walk(gymnasium.Env):
    """A walk on a line: unequal episodes, of which every second one ends by a time limit."""

    def __init__(self, is_discrete=True, has_goals=True):
        self.action_space = Discrete(2) if is_discrete else Box(-1, 1, (1,))
        number = Box(-99, 99, (1,))
        self.observation_space = Box(-99, 999, (2,))
        if has_goals:
            parts = {"observation": self.observation_space, "achieved_goal": number}
            self.observation_space = Dict(**parts, desired_goal=number)
        self.episode, self.infos, self.lock = -1, [], threading.Lock()  # a lock cannot be pickled

    def reset(self, *, seed=None, options=None):
        self.episode, self.time, self.place = self.episode + 1, 0, 0.0
        return self.observation(), {}

    def observation(self):
        seen = np.array([self.episode, self.time], np.float32)
        if isinstance(self.observation_space, Box):
            return seen
        place, goal = (np.array([x], np.float32) for x in (self.place, self.episode % 5))
        return {"observation": seen, "achieved_goal": place, "desired_goal": goal}

    def step(self, action):
        self.time += 1
        self.place += float(np.sum(action)) + 0.25 * self.time
        is_over, is_limit = self.time >= LENGTHS[self.episode % 4] + 1, self.episode % 2 == 1
        ends = is_over and not is_limit, is_over and is_limit
        obs = self.observation()
        reward = (
            1.0 if isinstance(obs, np.ndarray) else self.reward_of(self.place, self.episode % 5)
        )
        return obs, reward, *ends, {"time": self.time}

    def reward_of(self, place, goal):
        return -abs(np.float32(place) - np.float32(goal))

    def compute_reward(self, achieved_goal, desired_goal, infos):
        self.infos.append(infos)
        return self.reward_of(achieved_goal, desired_goal)[:, 0]


class Tenfold(gymnasium.Wrapper):
    """Multiplies rewards, also those of new goals."""

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        return obs, 10 * reward, *rest

    def compute_reward(self, *arguments):
        return 10 * self.env.unwrapped.compute_reward(*arguments)


def walks(num_envs=1, wrapper=lambda env: env, **options):
    return DummyVecEnv([lambda: wrapper(Walk(**options)) for _ in range(num_envs)])


def learnt(num_steps, env, replay_buffer_class=HerReplayBuffer, algorithm=sb3.DQN, **options):
    """Returns a model after some steps of learning; `options` are those of the replay buffer."""
    space = env.observation_space
    model = algorithm(
        "MultiInputPolicy" if isinstance(space, Dict) else "MlpPolicy",
        env,
        replay_buffer_class=replay_buffer_class,
        replay_buffer_kwargs=options,
        buffer_size=60 * env.num_envs,
        learning_starts=20,
        batch_size=8,
        gamma=GAMMA,
        policy_kwargs={"net_arch": [8]},
        device="cpu",
        seed=0,
    )
    return model.learn(num_steps)


# Compared with SB3's buffers


@in_pairs(
    space=[*SPACES],
    actions=[*ACTIONS],
    num_envs=[1, 3],
    num_steps=[15, 75],
    handles=[True, False],
)
def test_batches_equal_those_of_sb3(space, actions, num_envs, num_steps, handles, monkeypatch):
    spaces = SPACES[space], ACTIONS[actions]
    kind = buffers.DictReplayBuffer if space == "dict" else buffers.ReplayBuffer
    options = {"n_envs": num_envs, "device": "cpu", "handle_timeout_termination": handles}
    theirs = kind(20 * num_envs + 1, *spaces, **options)
    buffer = ReplayBuffer(
        20 * num_envs + 1, *spaces, **options, **STACKS if space == "stacks" else {}
    )
    for step in play(*spaces, num_envs, num_steps):
        theirs.add(*step)
        buffer.add(*step)
        assert (buffer.pos, buffer.full, buffer.size()) == (theirs.pos, theirs.full, theirs.size())
    samples = buffer.sample(1000)
    assert len({*samples.batch["index"].tolist()}) == buffer.size() * num_envs
    assert_equal(samples, batch_of_sb3(theirs, samples, None, monkeypatch))
    assert isinstance(samples, type(theirs.sample(1)))
    buffer.reset()
    assert (buffer.pos, buffer.full, buffer.size()) == (0, False, 0)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(1)


@in_pairs(
    n_steps=[2, 3, 9],
    num_envs=[1, 3],
    num_steps=[15, 75],
    handles=[True, False],
    is_normalized=[True, False],
)
def test_n_step_returns_and_discounts_equal_those_of_sb3(
    n_steps, num_envs, num_steps, handles, is_normalized, monkeypatch
):
    spaces = Box(-9, 9, (2,)), ACTIONS["one"]
    env = normalizer(walks(has_goals=False)) if is_normalized else None
    options = {"n_envs": num_envs, "device": "cpu", "handle_timeout_termination": handles}
    options |= {"n_steps": n_steps, "gamma": GAMMA}
    theirs = buffers.NStepReplayBuffer(20 * num_envs, *spaces, **options)
    buffer = ReplayBuffer(20 * num_envs, *spaces, **options)
    for step in play(*spaces, num_envs, num_steps):
        theirs.add(*step)
        buffer.add(*step)
    samples = buffer.sample(300, env=env)
    assert_equal(samples, batch_of_sb3(theirs, samples, env, monkeypatch))
    assert len(samples.discounts.unique()) == min(n_steps, max(LENGTHS))


def test_n_step_sums_by_hand():
    buffer = ReplayBuffer(9, Box(0, 9, (1,)), Discrete(2), "cpu", n_steps=3, gamma=0.5)
    for step, (done, limit) in enumerate([(0, 0), (0, 0), (1, 1), (0, 0), (1, 0)]):
        obs = np.full((1, 1), step, np.float32)
        next_obs = obs + (0.5 if done else 1)
        infos = [{"TimeLimit.truncated": bool(limit)}]
        buffer.add(obs, next_obs, np.array([1]), np.array([2.0**step]), np.array([done]), infos)
    samples = buffer.sample(100)
    first = samples.observations.flatten().long()
    assert {*first.tolist()} == {0, 1, 2, 3, 4}
    for values, expected in [
        (samples.rewards, [1 + 1 + 1, 2 + 2, 4, 8 + 8, 16]),
        (samples.discounts, [0.125, 0.25, 0.5, 0.25, 0.5]),
        (samples.next_observations, [2.5, 2.5, 2.5, 4.5, 4.5]),
        (samples.dones, [0, 0, 0, 1, 1]),
    ]:
        assert torch.equal(values.flatten(), torch.tensor(expected, dtype=torch.float32)[first])


def test_extend_adds_step_by_step():
    spaces = SPACES["vector"], ACTIONS["one"]
    steps = [*play(*spaces, 1, 4)]
    buffer = ReplayBuffer(9, *spaces, "cpu")
    buffer.extend(*(np.stack(column) for column in list(zip(*steps, strict=True))[:5]), [[{}]] * 4)
    assert buffer.size() == 4
    assert torch.equal(
        buffer.storage[:]["observation"], torch.from_numpy(np.concatenate([x[0] for x in steps]))
    )
    assert buffer.to_torch(np.ones(2)).dtype is torch.float64


# HER


def windows_of(model, batch, n_steps):
    """Yields for each sample: the places of its window, its goal, and whether it was relabelled."""
    index = model.replay_buffer.storage.episodes
    for slot, goal_slot, is_relabelled in zip(
        *(batch[key].tolist() for key in ("index", "goal_index", "her_mask")), strict=True
    ):
        after = int(index.num_after(torch.tensor([slot]))[0])
        slots = [
            int(index.shift(torch.tensor([slot]), i)[0]) for i in range(min(n_steps, after + 1))
        ]
        yield slots, goal_slot, is_relabelled


@pytest.mark.parametrize(
    "strategy", ["future", "final", "episode", "random", *GoalSelectionStrategy]
)
@pytest.mark.parametrize("num_envs", [1, 2])
def test_goals_by_strategy(strategy, num_envs):
    env = walks(num_envs)
    model = learnt(150 * num_envs, env, n_sampled_goal=3, goal_selection_strategy=strategy)
    samples, storage = model.replay_buffer.sample(400), model.replay_buffer.storage
    batch = samples.batch
    assert batch["her_mask"].sum() == 300
    slots, goals = batch["index"], batch["goal_index"]
    achieved = storage[goals]["next", "achieved_goal"]
    for observations in (samples.observations, samples.next_observations):
        goal = torch.where(batch["her_mask"][:, None], achieved, storage[slots]["desired_goal"])
        assert torch.equal(observations["desired_goal"], goal)
    distance = (samples.next_observations["achieved_goal"] - goal).abs()
    assert torch.equal(samples.rewards, -distance)
    assert storage.strategy == (strategy if isinstance(strategy, str) else strategy.name.lower())


@in_pairs(n_steps=[1, 3], is_normalized=[True, False], num_envs=[1, 2], prefetch=[0, 2])
def test_rewards_of_new_goals_are_normalized_each_and_then_summed(
    n_steps, is_normalized, num_envs, prefetch
):
    env = walks(num_envs, Tenfold)
    env = normalizer(env) if is_normalized else env
    options = {"n_steps": n_steps, "gamma": GAMMA, "prefetch": prefetch, "batch_size": 300}
    model = learnt(150 * num_envs, env, **options)
    storage, statistics = model.replay_buffer.storage, model.get_vec_normalize_env()
    # The second batch is prefetched.
    _, samples = (model.replay_buffer.sample(300, env=statistics) for _ in range(2))
    stored = storage[torch.arange(len(storage))]
    expected, discounts = [], []
    for slots, goal_slot, is_relabelled in windows_of(model, samples.batch, n_steps):
        goal = stored["desired_goal"][slots[0]]
        if is_relabelled:
            goal = stored["next", "achieved_goal"][goal_slot]
        rewards = -10 * (stored["next", "achieved_goal"][slots] - goal).abs().numpy()
        if is_normalized:
            rewards = np.clip(rewards / np.sqrt(4.0 + env.epsilon), -1, 1)
        expected.append(sum(GAMMA**i * reward for i, reward in enumerate(rewards.flatten())))
        discounts.append(GAMMA ** len(slots))
    torch.testing.assert_close(
        samples.rewards.flatten(), torch.tensor(expected, dtype=torch.float32)
    )
    if n_steps == 1:
        assert samples.discounts is None
    else:
        torch.testing.assert_close(samples.discounts.flatten(), torch.tensor(discounts))
    raw = {key: samples.batch[key].numpy() for key in env.observation_space}
    seen = env.normalize_obs(raw) if is_normalized else raw
    assert_equal(
        samples, samples._replace(observations={k: torch.tensor(v) for k, v in seen.items()})
    )
    assert (seen["observation"] == raw["observation"]).all() != is_normalized


def test_infos_reach_compute_reward_as_a_list_of_dictionaries():
    env = walks(2)
    model = learnt(60, env, copy_info_dict=True, info_keys=["time"])
    (walk, _), samples = env.envs, model.replay_buffer.sample(5)
    times = samples.next_observations["observation"][:, 1].tolist()
    assert [info["time"] for info in walk.infos[-1]] == times
    with pytest.raises(ValueError, match="copy_info_dict=True needs info_keys"):
        learnt(0, env, copy_info_dict=True)


def test_further_options_of_the_presets():
    env = walks()
    options = {
        "alpha": 0.6,
        "eta": 0.99,
        "terminated_fn": lambda a, b, _: (a == b).all(-1),
        "seed": 3,
    }
    model = learnt(100, env, c_min=5, **options)
    assert (model.replay_buffer.storage.eta, model.replay_buffer.storage.alpha) == (0.99, 0.6)
    samples = model.replay_buffer.sample(50)
    assert "priority_weight" in samples.batch
    is_reached = samples.rewards[samples.batch["her_mask"]] == 0
    assert torch.equal(samples.dones[samples.batch["her_mask"]].bool() & is_reached, is_reached)
    model.replay_buffer.storage.n_step = 2
    assert model.replay_buffer.sample(5).discounts.shape == (5, 1)


# In algorithms

DISCRETE = sb3.DQN, sb3_contrib.QRDQN
CONTINUOUS = sb3.DDPG, sb3.TD3, sb3.SAC, sb3_contrib.TQC, sb3_contrib.CrossQ


@pytest.mark.parametrize("has_goals", [True, False])
@pytest.mark.parametrize("algorithm", [*DISCRETE, *CONTINUOUS])
def test_algorithms_store_true_last_observations(algorithm, has_goals):
    if has_goals and algorithm is sb3_contrib.CrossQ:
        pytest.skip("CrossQ has no policy for dictionaries")
    env = walks(2, is_discrete=algorithm in DISCRETE, has_goals=has_goals)
    kind = HerReplayBuffer if has_goals else ReplayBuffer
    model = learnt(80, env, kind, algorithm, n_steps=2, gamma=GAMMA)
    assert model._n_updates > 0
    stored = model.replay_buffer.storage[:]
    seen, after = stored["observation"], stored["next", "observation"]
    assert torch.equal(seen + torch.tensor([0.0, 1.0]), after)
    lengths = torch.tensor(LENGTHS)[seen[:, 0].long() % 4] + 1
    is_end, is_limit = after[:, 1] == lengths, seen[:, 0] % 2 == 1
    assert torch.equal(stored["next", "terminated"].flatten(), is_end & ~is_limit)
    assert torch.equal(stored["next", "truncated"].flatten(), is_end & is_limit)


def test_second_learn_begins_another_episode():
    model = learnt(28, walks(has_goals=False), ReplayBuffer)
    model.learn(28)
    lengths = model.replay_buffer.storage.episodes.table()["length"].tolist()
    # SB3 resets the environment after 4 of 6 steps.
    assert lengths == [4, 6, 2, 8, 4, 4, 2, 8, 4, 6, 2, 6]


class SameDraws(buffers.ReplayBuffer):
    """SB3's buffer, with the transitions that ours would sample."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ours = ReplayBuffer(*arguments, **options)

    def add(self, *step):
        super().add(*step)
        self.ours.add(*step)

    def sample(self, batch_size, env=None):
        slots = self.ours.sample(batch_size).batch["index"]
        return self._get_samples(slots.numpy(), env)


def test_the_same_transitions_train_bitwise_the_same_network():
    kinds = ReplayBuffer, ReplayBuffer, SameDraws
    models = [learnt(200, walks(has_goals=False), kind) for kind in kinds]
    parameters = [[*model.policy.parameters()] for model in models]
    for one, again, theirs in zip(*parameters, strict=True):
        assert torch.equal(one, again)
        assert torch.equal(one, theirs)


# Saved and loaded


@pytest.mark.parametrize("truncates", [True, False])
def test_model_and_buffer_continue_after_load(truncates, tmp_path):
    env = walks()
    model = learnt(96, env, n_steps=3)
    episodes = model.replay_buffer.storage.episodes
    assert episodes.is_open.all()
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    again = sb3.DQN.load(tmp_path / "model", env, device="cpu")
    again.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=truncates)
    buffer = again.replay_buffer
    assert isinstance(buffer, buffers.ReplayBuffer)
    assert (buffer.pos, buffer.full, buffer.size()) == (96 - 60, True, 60)
    assert buffer.storage.episodes.is_open.all() != truncates
    assert (buffer.storage[:] == model.replay_buffer.storage[:]).all()
    batches = []
    for each in (model, again):
        torch.manual_seed(0)
        batches.append(each.replay_buffer.sample(20))
    if not truncates:
        assert_equal(*batches)
    again.learn(8, reset_num_timesteps=False)
    assert again.num_timesteps == 104
    with pytest.raises(ValueError, match="already initialized"):
        buffer.set_env(env)
    loaded = load_from_pkl(tmp_path / "buffer")
    with pytest.raises(RuntimeError, match="call set_env"):
        loaded.sample(20)


def test_lambdas_are_saved_with_the_buffer(tmp_path):
    functions = {
        "reward_fn": lambda achieved, goal, _: -(achieved - goal).norm(dim=-1),
        "terminated_fn": lambda achieved, goal, _: (achieved == goal).all(-1),
    }
    model = learnt(96, walks(), audit=False, **functions)
    model.save_replay_buffer(tmp_path / "buffer")
    again, batches = load_from_pkl(tmp_path / "buffer"), []
    for buffer in (model.replay_buffer, again):
        torch.manual_seed(0)
        batches.append(buffer.sample(20))
    assert_equal(*batches)


def test_directory_continues_in_the_next_model(tmp_path):
    env = walks(2)
    model = learnt(72, env, path=tmp_path / "replay")
    stored = model.replay_buffer.storage[:]
    model.save(tmp_path / "model")
    with pytest.raises(RuntimeError, match="has a writer"):
        sb3.DQN.load(tmp_path / "model", walks(2))
    # Another process evaluates the model meanwhile.
    player = sb3.DQN.load(
        tmp_path / "model", env, custom_objects={"replay_buffer_kwargs": {}}, device="cpu"
    )
    assert player.predict(env.reset())[0].shape == (2,)
    model.replay_buffer.storage.close()
    again = sb3.DQN.load(tmp_path / "model", walks(2), device="cpu")
    assert (again.replay_buffer.size(), again.replay_buffer.pos) == (36, 36)
    assert (again.replay_buffer.storage[:] == stored).all()
    again.learn(8, reset_num_timesteps=False)
    assert again.replay_buffer.size() == 40


def from_sb3():
    """Returns the function of the guide."""
    (block,) = re.findall(r"```python\n([^`]*def from_sb3.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {"np": np, "torch": torch}
    exec(block, names)
    return names["from_sb3"]


@pytest.mark.parametrize("num_steps", [16, 100])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "DictReplayBuffer", "HerReplayBuffer"])
def test_content_of_sb3_is_imported(kind, num_steps):
    is_her, env = kind == "HerReplayBuffer", walks(2, has_goals=kind != "ReplayBuffer")
    theirs = learnt(2 * num_steps, env, sb3.HerReplayBuffer if is_her else getattr(buffers, kind))
    theirs = theirs.replay_buffer
    spaces = env.observation_space, env.action_space
    goals = {"preset": HERReplayStorage, "reward_fn": gym_reward(env.envs[0])} if is_her else {}
    theirs.timeouts[theirs.pos - 1] = (
        1 - theirs.dones[theirs.pos - 1]
    )  # running episodes are truncated
    # With room for whole episodes in each lane.
    ours = ReplayBuffer(200, *spaces, n_envs=2)
    if is_her:
        ours = HerReplayBuffer(200, *spaces, env, n_envs=2)
    ours.storage.extend_from(from_sb3()(theirs, **goals))
    size, stored = theirs.size(), ours.storage[:]
    assert ours.size() == size == min(num_steps, 60)
    parts = theirs.observations, theirs.next_observations
    if kind == "ReplayBuffer":
        parts = [{"observation": part} for part in parts]
    columns = [
        *((stored[key], parts[0][key]) for key in parts[0]),
        *((stored["next", key], parts[1][key]) for key in parts[1]),
        (stored["action"], theirs.actions),
        (stored["next", "reward"], theirs.rewards),
        (stored["next", "truncated"], theirs.timeouts),
        (stored["next", "terminated"], theirs.dones * (1 - theirs.timeouts)),
    ]
    rows = [
        np.concatenate([value.numpy().reshape(2 * size, -1) for value, _ in columns], 1),
        np.concatenate([value[:size].reshape(2 * size, -1) for _, value in columns], 1),
    ]
    assert np.array_equal(*(table[np.lexsort(table.T)] for table in rows))


# Errors


def test_options_that_raise():
    spaces = SPACES["vector"], ACTIONS["one"]
    with pytest.raises(ValueError, match="optimize_memory_usage must be False"):
        ReplayBuffer(100, *spaces, optimize_memory_usage=True)
    with pytest.raises(ValueError, match="service_backend must be left out"):
        ReplayBuffer(100, *spaces, service_backend="ray")
    with pytest.raises(TypeError, match="use n_steps="):
        ReplayBuffer(100, *spaces, n_step=3)
    with pytest.raises(TypeError, match="use goal_selection_strategy="):
        HerReplayBuffer(100, *spaces, None, strategy="final")
    with pytest.raises(TypeError, match="batch"):
        ReplayBuffer(100, *spaces, batch=3)
    with pytest.raises(KeyError, match="achieved_goal"):
        HerReplayBuffer(100, *spaces, walks())


def test_steps_that_raise_store_nothing():
    spaces = SPACES["vector"], ACTIONS["one"]
    buffer = ReplayBuffer(100, *spaces, "cpu", n_envs=2, info_keys=["force"])
    (step,) = play(*spaces, 2, 1)
    with pytest.raises(KeyError, match="force"):
        buffer.add(*step)
    with pytest.raises(ValueError, match="reshape"):
        buffer.add(step[0][:1], *step[1:-1], [{"force": 1.0}] * 2)
    assert buffer.size() == 0
