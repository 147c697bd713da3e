"""All dtypes of torch in all operations, and rewards of each of them folded and relabelled."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage
from torchrl.envs.transforms import Compose

from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    ReplayTransform,
    UniformReplayStorage,
)
from trl_storages.functional.returns import relabelled_dtype, return_dtype

pytestmark = [
    pytest.mark.requirement("numerics"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Of one byte, which torch has few operations for.
BYTES = [
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
REWARDS = [torch.bool, *INTEGERS, *FLOATS]
DTYPES = [*REWARDS, *BYTES, *COMPLEX]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
each_reward = pytest.mark.parametrize("dtype", REWARDS, ids=lambda dtype: str(dtype)[6:])


def bits(tensor):
    """The bytes of a tensor, which are equal where its values are, NaN or not."""
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def values(dtype, *shape):
    """Values that tell rows apart, as far as the dtype goes."""
    number = torch.arange(math.prod(shape)).reshape(shape)
    if dtype is torch.bool:
        return number % 3 == 1
    return (number % 100 + 1).to(dtype)


def transitions(dtype, num_rows, num_envs=1):
    """Rows with fields of a dtype, of several shapes, in episodes of five steps."""
    shape = (num_envs, num_rows)
    steps = torch.arange(num_rows).expand(shape)
    done = (steps % 5 == 4).unsqueeze(-1)
    data = TensorDict(
        {
            "observation": values(dtype, *shape, 3),
            "scalar": values(dtype, *shape),
            "image": values(dtype, *shape, 2, 2),
            "desired_goal": values(dtype, *shape, 2),
            "next": {
                "observation": values(dtype, *shape, 3),
                "achieved_goal": values(dtype, *shape, 2),
                "desired_goal": values(dtype, *shape, 2),
                "reward": steps.unsqueeze(-1).float(),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        shape,
    )
    return data if num_envs > 1 else data[0]


KEYS = [
    *("observation", "scalar", "image", "desired_goal"),
    *(("next", "observation"), ("next", "achieved_goal"), ("next", "desired_goal")),
]


def make(storage=None, num_envs=1, **options):
    return ReplayStorage(
        storage=PackedStorage(40) if storage is None else storage,
        writer=EpisodeWriter(num_envs, on_gap="ignore"),
        batch_size=16,
        **{"generator": torch.Generator().manual_seed(0), **options},
    )


def assert_rows(batch, data, keys=KEYS):
    """Compares a batch with the rows that its index names, bit for bit."""
    rows = data[batch["index"].flatten()]
    for key in keys:
        assert batch[key].dtype == data[key].dtype, key
        assert bits(batch[key]) == bits(rows[key]), key


# TorchRL's storages keep a tensor a field: a dtype of each kind shows what differs there.
PLACES = [
    *((dtype, PackedStorage) for dtype in DTYPES),
    *((dtype, LazyTensorStorage) for dtype in (torch.bool, torch.bfloat16, torch.complex64)),
    *((dtype, LazyMemmapStorage) for dtype in (torch.int8, torch.float16)),
]


@pytest.mark.parametrize(
    ("dtype", "storage_type"), PLACES, ids=lambda value: str(value).removeprefix("torch.")
)
class TestOperations:
    def test_write_sample_slice_and_copy(self, dtype, storage_type):
        data = transitions(dtype, 30)
        storage = make(storage_type(40))
        storage.extend(data[:29])
        storage.add(data[29])
        assert_rows(storage.sample(), data)
        assert bits(storage[3:7]["observation"]) == bits(data[3:7]["observation"])
        for read in (storage[:], storage[:].cpu(), storage[torch.arange(30)]):
            assert all(bits(read[key]) == bits(data[key]) for key in KEYS)
        storage.validate()
        storage.explain(storage.sample())

    def test_wrap_and_empty(self, dtype, storage_type):
        data = transitions(dtype, 60, num_envs=2)
        storage = make(storage_type(40), num_envs=2)
        for step in range(0, 60, 15):
            storage.extend(data[:, step : step + 15])
        newest = data[:, 40:].transpose(0, 1).reshape(-1)
        assert all(bits(storage[:][key]) == bits(newest[key]) for key in KEYS)
        storage.empty(keep_steps=3)
        assert bits(storage[:]["observation"]) == bits(newest[-6:]["observation"])

    def test_whole_episodes(self, dtype, storage_type):
        data = transitions(dtype, 30)
        storage = make(storage_type(40))
        storage.extend(data[:5])
        storage.extend(data[5:7].set(("next", "done"), torch.tensor([[False], [True]])))
        batch = storage.sample_episodes(9)
        mask = batch["collector", "mask"]
        assert not mask.all()
        for key in KEYS:
            assert batch[key].dtype == dtype
            assert not any(bits(batch[key][~mask]))
            assert bits(batch[key][mask]) == bits(data[key][batch["index"][mask]])

    def test_seen_by_samplers_and_transforms(self, dtype, storage_type):
        data = transitions(dtype, 30)

        def reward_fn(achieved, desired, transition):
            assert achieved.dtype == desired.dtype == transition["scalar"].dtype == dtype
            return torch.ones(len(achieved))

        relabel = GoalRelabel(reward_fn, info_keys=["scalar"])
        for options in (
            {"transform": NStep(3, 0.9)},
            {"sampler": HERSampler("random"), "transform": relabel},
            {"sampler": HERSampler("future"), "transform": Compose(relabel, NStep(2, 0.9))},
            {"sampler": PERSampler(40), "sample_unit": EpisodeSequence(3, 1, 1)},
            {"prefetch": 1},
        ):
            storage = make(storage_type(40), **copy.deepcopy(options))
            storage.extend(data)
            batch = storage.sample()
            assert_rows(batch, data, ["observation", "scalar", "image"])
            if "sampler" in options and "transform" in options:
                mask = batch["her_mask"]
                goals = data[batch["goal_index"]]["next", "achieved_goal"]
                assert batch["desired_goal"].dtype == dtype
                assert bits(batch["desired_goal"][mask]) == bits(goals[mask])
                assert bits(batch["next", "desired_goal"][mask]) == bits(goals[mask])

    def test_saved_and_loaded(self, dtype, storage_type, tmp_path):
        data = transitions(dtype, 30)
        storage = make(storage_type(40))
        storage.extend(data)
        others = []
        if storage_type is PackedStorage:
            others = [make(storage_type(40)), pickle.loads(pickle.dumps(storage))]
            others[0].load_state_dict(storage.state_dict())
        storage.dumps(tmp_path / "dump")
        others.append(make(storage_type(40)))
        others[-1].loads(tmp_path / "dump")
        for other in others:
            assert all(bits(other[:][key]) == bits(data[key]) for key in KEYS)


@each_dtype
def test_on_disk(dtype, tmp_path):
    data = transitions(dtype, 30)
    storage = make(PackedStorage(40, scratch_dir=tmp_path / "rows"))
    storage.extend(data)
    storage.close()
    with_again = ReplayStorage.open(tmp_path / "rows", batch_size=16, check=True)
    assert_rows(with_again.sample(), data)
    with_again.close()


NUMPY = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("name", [*NUMPY, "float16", "float32", "float64", "complex64"])
def test_record(name):
    """Observations of a gymnasium loop, of the dtypes that NumPy has."""
    from gymnasium import spaces

    dtype = np.dtype(name)
    space = spaces.Box(0, 1, (3,), dtype) if dtype.kind in "fu" else spaces.Box(0, 1, (3,), np.int8)
    space.dtype = dtype
    storage = UniformReplayStorage(space, spaces.Discrete(3), storage_size=20, batch_size=4)
    written = [np.arange(step, step + 3).astype(dtype) for step in range(12)]
    for step in range(11):
        storage.record(written[step], 1, 1.0, False, False, {}, written[step + 1])
    batch = storage.sample()
    for index, got in zip(batch["index"].tolist(), batch["observation"], strict=True):
        assert np.array_equal(got.numpy(), written[index])
        assert got.numpy().dtype == dtype


def test_dtypes_that_rows_cannot_hold():
    for dtype in (torch.int4, torch.bits8, torch.float4_e2m1fn_x2, torch.qint8):
        with pytest.raises(TypeError, match=rf"'x'.*{str(dtype)[6:]}"):
            PackedStorage(4, fields={"x": (dtype, (2,))})


# Rewards


def rewarded(reward, done=None, **options):
    """A storage of one lane with these rewards."""
    storage = ReplayStorage(storage=PackedStorage(len(reward)), batch_size=64, **options)
    done = torch.zeros(len(reward), 1, dtype=torch.bool) if done is None else done
    rows = {"next": {"reward": reward.unsqueeze(-1), "done": done}}
    storage.extend(TensorDict(rows, [len(reward)]))
    return storage


def folded(reward, n_steps, gamma, done=None):
    """The n-step rewards of all rows, by slot."""
    storage = rewarded(reward, done, transform=NStep(n_steps, gamma))
    batches = [storage.sample() for _ in range(12)]
    batch = torch.cat([batch.select("index", "next") for batch in batches])
    drawn = batch["index"].tolist()
    return batch["next", "reward"].squeeze(-1)[[drawn.index(slot) for slot in range(len(reward))]]


def summed(reward, n_steps, gamma, ends=()):
    """The same by plain numbers, exactly rounded sums of float64 products."""
    numbers = [float(value) for value in reward]
    out = []
    for first in range(len(numbers)):
        total = 0.0
        for i, number in enumerate(numbers[first : first + n_steps]):
            total += gamma**i * number
            if first + i in ends:
                break
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


class TestNStep:
    """What was wrong before, by hand."""

    def test_bool(self):
        got = folded(torch.ones(3, dtype=torch.bool), 3, 0.9)
        assert got[0].item() == pytest.approx(2.71, rel=1e-7)
        assert got.dtype is torch.float32

    def test_int8_over_a_long_window(self):
        got = folded(torch.ones(20, dtype=torch.int8), 200, 0.99)
        assert got[0].item() == pytest.approx((1 - 0.99**20) / 0.01, rel=1e-6)

    def test_large_integers(self):
        got = folded(torch.tensor([2**40 + 1, 2**40 + 3]), 2, 1.0)
        assert got.tolist() == [2**41 + 4, 2**40 + 3]

    def test_bfloat16_is_rounded_once(self):
        reward = torch.ones(5, dtype=torch.bfloat16)
        got = folded(reward, 5, 0.99)
        exact = summed(reward, 5, 0.99)
        assert torch.equal(got, exact.to(torch.bfloat16))

    @each_reward
    @pytest.mark.parametrize(("n_steps", "gamma"), [(3, 0.9), (7, 0.99), (200, 0.5), (4, 0.0)])
    def test_every_dtype(self, dtype, n_steps, gamma):
        reward = values(dtype, 12)
        done = torch.zeros(12, 1, dtype=torch.bool)
        done[6] = True
        got = folded(reward, n_steps, gamma, done)
        assert got.dtype is return_dtype(dtype)
        exact = summed(reward, n_steps, gamma, ends=[6]).to(got.dtype)
        tolerance = 1e-6 if got.dtype in (torch.float32, torch.float64) else 0
        torch.testing.assert_close(got, exact, rtol=tolerance, atol=0)

    @settings(max_examples=30)
    @given(st.sampled_from(REWARDS), st.integers(1, 12), st.floats(0, 1), st.integers(0, 999))
    def test_any(self, dtype, n_steps, gamma, seed):
        generator = torch.Generator().manual_seed(seed)
        reward = torch.randint(0, 120, (9,), generator=generator).to(dtype)
        if n_steps == 1:
            assert folded(reward, 1, gamma).dtype is dtype
            return
        got = folded(reward, n_steps, gamma)
        exact = summed(reward, n_steps, gamma).to(got.dtype)
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_what_lies_outside_of_a_window_never_takes_part(self, dtype, bad):
        reward = torch.ones(12, dtype=dtype)
        reward[[5, 11]] = bad
        done = torch.zeros(12, 1, dtype=torch.bool)
        done[4] = True
        got = folded(reward, 3, 0.5, done)
        assert got[:5].tolist() == [1.75, 1.75, 1.75, 1.5, 1.0]
        assert got[6:9].tolist() == [1.75] * 3
        assert not got[[5, 9, 10, 11]].isfinite().any()

    @pytest.mark.parametrize("backend", ["numba", "torch"])
    def test_either_backend(self, backend, monkeypatch):
        monkeypatch.setenv("TRL_STORAGES_BACKEND", backend)
        reward = torch.tensor([1.0, 2.0, math.inf, 4.0, 8.0])
        done = torch.tensor([False, True, True, False, True]).unsqueeze(-1)
        assert folded(reward, 4, 0.5, done).tolist() == [2.0, 2.0, math.inf, 8.0, 8.0]

    def test_the_default_dtype(self):
        torch.set_default_dtype(torch.float64)
        try:
            assert folded(torch.ones(3, dtype=torch.bool), 3, 0.9).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    def test_complex_rewards_raise(self):
        storage = rewarded(torch.ones(3, dtype=torch.complex64), transform=NStep(2))
        with pytest.raises(TypeError, match=r"real numbers, got torch\.complex64"):
            storage.sample()

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float16])
    @pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 1)])
    def test_rewards_of_several_agents(self, shape, dtype):
        storage = ReplayStorage(storage=PackedStorage(8), batch_size=64, transform=NStep(3, 0.5))
        done = torch.zeros(8, 1, dtype=torch.bool)
        reward = torch.ones(8, *shape, dtype=dtype)
        storage.extend(TensorDict({"next": {"done": done, "reward": reward}}, [8]))
        batch = storage.sample()
        assert batch["next", "reward"].dtype is return_dtype(dtype)
        expected = torch.tensor([1.75] * 6 + [1.5, 1.0])[batch["index"]]
        expected = expected.view(-1, *(1,) * len(shape)).expand(-1, *shape)
        assert torch.equal(batch["next", "reward"].float(), expected)
        # One step stays as it is stored.
        storage.transform[0].n_step = 1
        batch = storage.sample()
        assert batch["next", "reward"].dtype is dtype
        assert batch["steps_to_next_obs"].shape == (64, *shape)

    def test_rewards_under_the_agents_that_are_not_named_raise(self):
        storage = ReplayStorage(storage=PackedStorage(8), batch_size=4, transform=NStep(3))
        agents = TensorDict({"reward": torch.zeros(8, 3, 1)}, [8, 3])
        done = torch.zeros(8, 1, dtype=torch.bool)
        storage.extend(TensorDict({"next": {"done": done, "agents": agents}}, [8]))
        with pytest.raises(KeyError, match=r"lack.*reward_key=.*several agents"):
            storage.sample()


class Passed(ReplayTransform):
    def replay(self, rows):
        pass


def goal_rows(reward):
    """Four rows of one episode, whose next achieved goals are 0 to 3."""
    goals = torch.arange(4.0, device=reward.device).unsqueeze(1)
    done = torch.zeros(4, 1, dtype=torch.bool, device=reward.device)
    return TensorDict(
        {
            "desired_goal": goals + 9,
            "next": {
                "achieved_goal": goals,
                "desired_goal": goals + 9,
                "reward": reward,
                "done": done,
                "terminated": done.clone(),
                "truncated": done.clone(),
            },
        },
        [4],
    )


def half_distance(achieved, desired, transition):
    return -0.5 * (achieved - desired).abs().squeeze(-1)


class TestRelabel:
    @each_reward
    @pytest.mark.parametrize("is_first", [True, False])
    def test_fractions_are_kept(self, dtype, is_first):
        stored = values(dtype, 4, 1)
        relabel = GoalRelabel(half_distance)
        transform = relabel if is_first else Compose(Passed(), relabel)
        storage = make(sampler=HERSampler("final", 1), transform=transform)
        storage.extend(goal_rows(stored))
        batch = storage.sample()
        mask, reward = batch["her_mask"], batch["next", "reward"]
        assert reward.dtype is relabelled_dtype(dtype, torch.float32)
        assert reward.dtype.is_floating_point
        expected = -0.5 * (3 - batch["next", "achieved_goal"])
        assert torch.equal(reward[mask].double(), expected[mask].double())
        assert torch.equal(reward[~mask].double(), stored[batch["index"][~mask]].double())
        assert storage[:]["next", "reward"].dtype is dtype

    @each_reward
    def test_fractions_are_summed(self, dtype):
        relabel = Compose(GoalRelabel(half_distance), NStep(2, 0.5))
        storage = make(sampler=HERSampler("final", math.inf), transform=relabel)
        storage.extend(goal_rows(values(dtype, 4, 1)))
        batch = storage.sample()
        expected = torch.tensor([-2.0, -1.25, -0.5, 0.0])[batch["index"]]
        assert torch.equal(batch["next", "reward"].squeeze(-1).double(), expected.double())

    @pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS])
    def test_integers_do_not_wrap_around(self, dtype):
        relabel = GoalRelabel(lambda achieved, desired, _: torch.full((len(desired),), -1000))
        storage = make(sampler=HERSampler("final", 1), transform=relabel)
        stored = values(dtype, 4, 1)
        storage.extend(goal_rows(stored))
        batch = storage.sample()
        reward, mask = batch["next", "reward"].double(), batch["her_mask"]
        assert (reward[mask] == -1000).all()
        assert torch.equal(reward[~mask], stored[batch["index"][~mask]].double())

    @each_reward
    def test_audit_truncates_nothing(self, dtype):
        storage = make()
        storage.extend(goal_rows(torch.zeros(4, 1).to(dtype)))
        found = GoalRelabel(lambda achieved, *_: 0.5 * (achieved > 1)).audit(storage)
        assert found.slots.tolist() == [3, 2]
        assert found.computed.tolist() == [0.5, 0.5]
        assert "stored 0, computed 0.5" in str(found)
        assert GoalRelabel(lambda achieved, *_: 0 * achieved).audit(storage).passed

    def test_audit_of_large_integers(self):
        storage = make()
        stored = torch.full((4, 1), 2**60)
        storage.extend(goal_rows(stored))
        assert GoalRelabel(lambda achieved, *_: stored).audit(storage).passed
        assert not GoalRelabel(lambda achieved, *_: stored + 1).audit(storage).passed

    def test_audit_of_rewards_that_were_rounded(self):
        storage = make()
        storage.extend(goal_rows(torch.full((4, 1), 0.1, dtype=torch.bfloat16)))
        assert GoalRelabel(lambda achieved, *_: torch.full((4,), 0.1)).audit(storage).passed

    @pytest.mark.parametrize("shape", [(4, 3, 1), (4, 3), (4,)])
    def test_rewards_of_several_agents_raise(self, shape):
        storage = make(sampler=HERSampler(), transform=GoalRelabel(half_distance))
        storage.extend(goal_rows(torch.zeros(shape)))
        with pytest.raises(ValueError, match=r"shape \[1\] a row.*got .*Of several agents, store"):
            storage.sample()
        with pytest.raises(ValueError, match=r"shape \[1\] a row.*got .*Of several agents, store"):
            storage.transform[0].audit(storage)

    def test_goals_are_not_truncated(self):
        storage = make(sampler=HERSampler(), transform=GoalRelabel(half_distance))
        rows = goal_rows(torch.zeros(4, 1))
        for key in ("desired_goal", ("next", "desired_goal")):
            rows[key] = rows[key].long()
        storage.extend(rows)
        with pytest.raises(TypeError, match=r"desired goal must be floating.*got torch\.int64"):
            storage.sample()

    def test_complex_rewards_raise(self):
        relabel = GoalRelabel(lambda achieved, *_: achieved.to(torch.complex64))
        storage = make(sampler=HERSampler(), transform=relabel)
        storage.extend(goal_rows(torch.zeros(4, 1)))
        with pytest.raises(TypeError, match="reward_fn must return real numbers"):
            storage.sample()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint16, torch.bfloat16])
def test_on_a_gpu(dtype, gpu):
    """No dtype makes the host wait."""
    relabel = Compose(GoalRelabel(half_distance), NStep(3, 0.9))
    storage = make(
        PackedStorage(4, device=gpu), generator=None, sampler=HERSampler("final"), transform=relabel
    )
    steps = torch.zeros(4, 1, device=gpu)
    storage.extend(goal_rows(steps.to(dtype)))
    reward = storage.sample()["next", "reward"]
    assert reward.dtype is relabelled_dtype(dtype, torch.float32)
    assert reward.device == gpu
