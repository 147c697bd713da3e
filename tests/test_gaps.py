"""Streams that start again without a `done` are noticed wherever rows come in."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from tally_env import tally
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv

from trl_storages import EpisodeWriter, PackedStorage, ReplayStorage, UniformReplayStorage

pytestmark = [
    pytest.mark.requirement("nothing-crosses"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

STORAGES = {
    "packed": lambda size, path: PackedStorage(size),
    "on disk": lambda size, path: PackedStorage(size, scratch_dir=path / "rows"),
    "stock": lambda size, path: LazyTensorStorage(size),
}


def stream(*starts, steps=3, dtype=torch.float32, done=False):
    """[E, T] rows of lanes whose observations count on from these numbers."""
    seen = torch.tensor(starts).unsqueeze(1) + torch.arange(steps)
    flag = torch.full((len(starts), steps, 1), False)
    flag[:, -1] = done
    return TensorDict(
        {
            "observation": seen.unsqueeze(-1).to(dtype),
            "next": {
                "observation": (seen + 1).unsqueeze(-1).to(dtype),
                "done": flag,
                "reward": torch.rand(len(starts), steps, 1),
            },
        },
        seen.shape,
    )


def make(num_envs=1, size=40, **options):
    return ReplayStorage(storage=PackedStorage(size), writer=EpisodeWriter(num_envs, **options))


def joined(storage):
    """Whether some row is taken for the continuation of one that led elsewhere."""
    slots = storage.episodes.slots_by_age(torch.arange(len(storage.episodes)))
    slots = slots[storage.episodes.behind(slots) > 0]
    before = storage.storage.get(storage.episodes.shift(slots, -1))
    return bool((storage.storage.get(slots)["observation"] != before["next", "observation"]).any())


WAYS = {
    "extend [E, T]": lambda storage, data: storage.extend(data),
    "extend lazily": lambda storage, data: storage.extend(
        LazyStackedTensorDict.lazy_stack(list(data.unbind(1)), 1)
    ),
    "extend [E]": lambda storage, data: [storage.extend(step) for step in data.unbind(1)],
    "add [E]": lambda storage, data: [storage.add(step) for step in data.unbind(1)],
    "some lanes": lambda storage, data: [
        storage.extend(row.unsqueeze(0), lanes=[lane]) for lane, row in enumerate(data.unbind(0))
    ],
}


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("way", WAYS)
class TestEveryWayIn:
    def make(self, kind, path, on_gap):
        return ReplayStorage(
            storage=STORAGES[kind](40, path), writer=EpisodeWriter(2, on_gap=on_gap)
        )

    def test_it_warns_once_before_the_row_is_written(self, kind, way, tmp_path):
        storage = self.make(kind, tmp_path, "warn")
        WAYS[way](storage, stream(0, 50))
        WAYS[way](storage, stream(3, 53))
        with pytest.raises(UserWarning, match=r"end_episodes\(\)[\s\S]*on_gap='cut'"):
            WAYS[way](storage, stream(6, 20))
        written = len(storage)
        assert not joined(storage)
        with pytest.warns(UserWarning, match="end_episodes"):
            WAYS[way](storage, stream(90, 20))
        assert len(storage) > written
        WAYS[way](storage, stream(70, 10))

    def test_after_what_it_names_there_is_no_warning(self, kind, way, tmp_path):
        storage = self.make(kind, tmp_path, "warn")
        WAYS[way](storage, stream(0, 50))
        storage.end_episodes()
        WAYS[way](storage, stream(20, 90, done=True))
        WAYS[way](storage, stream(0, 1))
        storage.validate()

    def test_cut(self, kind, way, tmp_path):
        storage = self.make(kind, tmp_path, "cut")
        for starts in ((0, 50), (3, 20), (6, 23), (0, 26)):
            WAYS[way](storage, stream(*starts))
        assert not joined(storage)
        lengths = storage.episodes.episodes()
        assert lengths["length"].tolist() == [9, 3, 3, 9]
        storage.validate()

    def test_ignore(self, kind, way, tmp_path):
        storage = self.make(kind, tmp_path, "ignore")
        WAYS[way](storage, stream(0, 50))
        WAYS[way](storage, stream(0, 50))
        assert storage.episodes.episodes()["length"].tolist() == [6, 6]


@given(data=st.data(), num_envs=st.integers(1, 3), size=st.integers(1, 8))
def test_cut_wherever_observations_say_so(data, num_envs, size):
    """Against a plain loop, over wraps, ends and trajectory numbers."""
    storage = make(num_envs, num_envs * size, on_gap="cut")
    last = [None] * num_envs
    for _ in range(data.draw(st.integers(1, 4))):
        steps = data.draw(st.integers(1, 5))
        flags = st.lists(st.booleans(), min_size=steps, max_size=steps)
        jump = torch.tensor([data.draw(flags) for _ in range(num_envs)])
        done = torch.tensor([data.draw(flags) for _ in range(num_envs)])
        rows = stream(*[0] * num_envs, steps=steps)
        rows["next", "done"] = done.unsqueeze(-1)
        begins = torch.zeros(num_envs, steps, dtype=torch.bool)
        for lane in range(num_envs):
            for step in range(steps):
                follows = last[lane] is not None and not jump[lane, step]
                now = last[lane][0] if follows else np.random.default_rng().random() * 1e6
                rows["observation"][lane, step] = now
                rows["next", "observation"][lane, step] = now + 1
                begins[lane, step] = not follows or last[lane][1]
                last[lane] = float(rows["next", "observation"][lane, step]), bool(done[lane, step])
        slots = storage.extend(rows)
        storage.validate()
        kept = slots >= 0
        assert not joined(storage)
        kept[:, :1] &= storage.episodes.steps_per_lane > steps
        starts = storage.episodes.behind(slots.clamp(min=0)) == 0
        whole = kept & storage.episodes.is_whole(slots.clamp(min=0))
        assert (starts == begins)[whole].all()


class TestWhatIsCompared:
    def test_bits(self):
        """NaN equals itself; zeros of two signs differ."""
        for value, other, is_gap in ((float("nan"), float("nan"), False), (0.0, -0.0, True)):
            storage = make()
            data = stream(0)[0]
            data["next", "observation"][-1] = value
            storage.extend(data)
            data = stream(4)[0]
            data["observation"][0] = other
            if is_gap:
                with pytest.raises(UserWarning, match="end_episodes"):
                    storage.extend(data)
            else:
                storage.extend(data)

    @pytest.mark.parametrize(
        "dtype",
        [
            *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
            *(torch.float64, torch.complex64, torch.complex128),
        ],
    )
    def test_every_dtype(self, dtype):
        storage = make(2)
        data = stream(0, 0, steps=2, dtype=dtype)
        data["next", "observation"] = data["observation"].roll(-1, 1)
        storage.extend(data)
        storage.extend(data)
        data = data.clone()
        data["observation"][1, 0] = 1
        with pytest.raises(UserWarning, match="end_episodes"):
            storage.extend(data)

    def test_entries_with_a_twin_where_there_is_no_observation(self):
        storage = make()
        data = stream(0)[0].rename_key_("observation", "pixels")
        data["next"].rename_key_("observation", "pixels")
        data["desired_goal"], data["next", "desired_goal"] = torch.ones(3, 1), torch.zeros(3, 1)
        data["done"] = torch.ones(3, 1, dtype=torch.bool)
        storage.extend(data)
        with pytest.raises(UserWarning, match="end_episodes"):
            storage.extend(data)

    def test_the_keys_that_are_named(self):
        storage = make(observation_keys=[("sensors", "force")])
        data = stream(0)[0]
        data["sensors", "force"] = data["observation"] * 2
        data["next", "sensors", "force"] = data["next", "observation"] * 2
        storage.extend(data)
        other = data.clone()
        other["sensors", "force"] = (other["observation"] + 3) * 2
        other["next", "sensors", "force"] = (other["observation"] + 4) * 2
        storage.extend(other)
        with pytest.raises(UserWarning, match="end_episodes"):
            storage.extend(other)

    def test_refused(self):
        with pytest.raises(ValueError, match=r"on_gap.*'warn', 'cut', 'ignore'.*.*"):
            EpisodeWriter(on_gap="stop")
        with pytest.raises(TypeError, match="observation_keys"):
            EpisodeWriter(observation_keys="observation")
        with pytest.raises(ValueError, match="observation_keys"):
            EpisodeWriter(keys=["observation", ("next", "done")], observation_keys=["observation"])
        storage = make(observation_keys=["pixels"])
        with pytest.raises(KeyError, match=r"pixels[\s\S]*observation"):
            storage.extend(stream(0)[0])
        assert len(storage) == 0


class TestCollectors:
    def test_rollouts_that_reset_each_time(self):
        env = GymEnv("CartPole-v1")
        env.set_seed(0)
        storage = make()
        storage.extend(env.rollout(4))
        with pytest.raises(UserWarning, match="end_episodes"):
            storage.extend(env.rollout(4))
        storage.end_episodes()
        storage.extend(env.rollout(4))

    def collect(self, storage, num_envs, flat):
        env = SerialEnv(num_envs, lambda: GymEnv("CartPole-v1"))
        collector = Collector(
            env, env.rand_action, frames_per_batch=4 * num_envs, total_frames=4 * num_envs
        )
        for data in collector:
            storage.extend(data.reshape(-1) if flat else data)
        collector.shutdown()

    @pytest.mark.parametrize("flat", [False, True])
    def test_a_warm_up_and_then_another_collector(self, flat):
        """Both number their trajectories from 0."""
        storage = make(2)
        self.collect(storage, 2, flat)
        with pytest.raises(UserWarning, match="end_episodes"):
            self.collect(storage, 2, flat)
        assert not joined(storage)
        storage.end_episodes()
        self.collect(storage, 2, flat)
        storage = make(2, on_gap="cut")
        self.collect(storage, 2, flat)
        self.collect(storage, 2, flat)
        assert storage.episodes.episodes()["length"].tolist() == [4] * 4

    def test_a_collector_goes_on_without_gaps(self):
        env = SerialEnv(2, tally)
        storage = make(2)
        for data in Collector(env, env.rand_action, frames_per_batch=14, total_frames=140):
            storage.extend(data)
        assert not joined(storage)

    def test_a_stock_buffer(self):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), writer=EpisodeWriter())
        buffer.extend(stream(0)[0])
        with pytest.raises(UserWarning, match="end_episodes"):
            buffer.extend(stream(0)[0])


def record(storage, *seen, num_envs, done=False):
    """A step of each lane that begins with these observations, and leads to the number after."""
    now = np.array(seen, np.float32).reshape(num_envs, 1)
    flags = np.full(num_envs, done)
    if num_envs == 1:
        return storage.record(now[0], 0, 0.0, bool(done), False, {}, now[0] + 1)
    actions, rewards = np.zeros(num_envs, np.int64), np.zeros(num_envs)
    return storage.record(now, actions, rewards, flags, ~flags & False, {}, now + 1)


@pytest.mark.parametrize("num_envs", [1, 3])
class TestRecord:
    def make(self, num_envs, on_gap, size=5):
        return UniformReplayStorage(
            Box(-99, 99, (1,)),
            Discrete(2),
            storage_size=size * num_envs,
            num_envs=num_envs,
            on_gap=on_gap,
        )

    def test_it_warns_once(self, num_envs):
        """Over the end of the ring as well."""
        storage = self.make(num_envs, "warn")
        for step in range(12):
            record(storage, *range(step, step + num_envs), num_envs=num_envs)
        state = storage.episodes.state_dict()
        with pytest.raises(UserWarning, match="end_episodes"):
            record(storage, *[50] * num_envs, num_envs=num_envs)
        for name, tensor in storage.episodes.state_dict().items():
            assert torch.equal(tensor, state[name])
        storage.end_episodes()
        record(storage, *[50] * num_envs, num_envs=num_envs, done=True)
        record(storage, *[9] * num_envs, num_envs=num_envs)
        with pytest.warns(UserWarning, match="end_episodes"):
            record(storage, *[9] * num_envs, num_envs=num_envs)
        record(storage, *[9] * num_envs, num_envs=num_envs)

    @pytest.mark.parametrize("place", range(5))
    def test_cut(self, num_envs, place):
        storage = self.make(num_envs, "cut")
        for step in range(5 + place):
            record(storage, *range(step, step + num_envs), num_envs=num_envs)
        now = np.arange(5 + place, 5 + place + num_envs)
        now[-1] = 70
        slots = record(storage, *now, num_envs=num_envs)
        assert storage.episodes.behind(slots).tolist() == [4] * (num_envs - 1) + [0]
        storage.validate()
        assert not joined(storage)

    def test_lanes_that_skip_steps(self, num_envs):
        env = gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")
        storage = UniformReplayStorage(
            env.single_observation_space,
            env.single_action_space,
            num_envs=num_envs,
            storage_size=60 * num_envs,
            autoreset_mode=env.metadata["autoreset_mode"],
        )
        seen, _ = env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(90):
            actions = env.action_space.sample()
            after, *outcome = env.step(actions)
            storage.record(seen, actions, *outcome, after)
            seen = after
        storage.end_episodes()
        seen, _ = env.reset(seed=1)
        after, *outcome = env.step(actions)
        storage.record(seen, actions, *outcome, after)
        assert not joined(storage)
        seen, _ = env.reset(seed=2)
        after, *outcome = env.step(actions)
        with pytest.raises(UserWarning, match="end_episodes"):
            storage.record(seen, actions, *outcome, after)


def test_infos_of_a_recipe_are_no_observations():
    """`force` is the infos' of one step, at the root and under `next`."""
    storage = UniformReplayStorage(
        Box(-99, 99, (1,)), Discrete(2), storage_size=9, info_keys=["force", ("next", "force")]
    )
    for step in range(4):
        now = np.array([step], np.float32)
        storage.record(now, 0, 0.0, False, False, {"force": float(step)}, now + 1)


def test_a_gap_on_a_gpu_is_heard_of_without_waiting(gpu):
    storage = ReplayStorage(storage=PackedStorage(20, device=gpu), writer=EpisodeWriter(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (0, 3, 6):
            storage.extend(stream(step, step + 5).to(gpu))
    cutting = ReplayStorage(
        storage=PackedStorage(20, device=gpu), writer=EpisodeWriter(2, on_gap="cut")
    )
    for _ in range(2):
        cutting.extend(stream(0, 5).to(gpu))


def test_a_late_gap_is_told_at_the_next_write():
    """What a GPU has found by then, simulated by a note."""
    from trl_storages.priorities import DeferredFlag

    storage = make()
    storage.extend(stream(0)[0])
    storage.writer.gaps.late = DeferredFlag(torch.device("cpu"))
    storage.writer.gaps.late.note(torch.tensor(True))
    with pytest.warns(UserWarning, match=r"was written[\s\S]*end_episodes"):
        storage.extend(stream(3)[0])
    storage.extend(stream(0)[0])


@pytest.mark.gpu
def test_a_gap_on_a_real_gpu():
    storage = ReplayStorage(storage=PackedStorage(20, device="cuda"), writer=EpisodeWriter())
    storage.extend(stream(0)[0].to("cuda"))
    storage.extend(stream(0)[0].to("cuda"))
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="end_episodes"):
        storage.extend(stream(3)[0].to("cuda"))
