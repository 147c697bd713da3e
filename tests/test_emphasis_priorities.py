"""ERESampler over PERSampler: priorities count within the window, and only there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import RingOracle
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from trl_storages.ring import EpisodeIndex
from trl_storages.rows import PackedStorage
from trl_storages.samplers import ERESampler, HERSampler, PERSampler
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("ere-per")


class Case:
    """A ring written in pieces, prioritized within a window of `c_min` rows, and its model."""

    def __init__(self, capacity, num_envs, c_min, storage=PackedStorage, batch_size=500, **kwargs):
        self.sampler = ERESampler(0.5, c_min, base=PERSampler(capacity, **kwargs))
        self.buffer = TensorDictReplayBuffer(
            storage=storage(capacity),
            sampler=self.sampler,
            writer=EpisodeWriter(num_envs),
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(5),
        )
        self.model = RingOracle(capacity, num_envs)

    def write(self, num_steps, lanes=None):
        num_lanes = self.model.num_envs if lanes is None else len(lanes)
        done = torch.zeros(num_lanes, num_steps, 1, dtype=torch.bool)
        rows = TensorDict({"next": {"done": done}}, [num_lanes, num_steps])
        self.model.append(done.squeeze(-1).tolist(), lanes=lanes)
        self.buffer.writer.extend(rows if self.model.num_envs > 1 else rows[0], lanes=lanes)

    def set_priorities(self, priority_of):
        slots = torch.tensor(list(self.model.live()))
        self.buffer.update_priority(slots, torch.tensor([priority_of(int(s)) for s in slots]))

    def newest(self, count):
        return [self.model.slot(row) for row in self.model.by_age()[:count]]

    def draws(self, num_batches=1):
        # The only update of a phase has the narrowest window.
        self.sampler.begin_phase(1)
        batches = [self.buffer.sample() for _ in range(num_batches)]
        index = torch.cat([batch["index"] for batch in batches])
        return index, torch.cat([batch["priority_weight"] for batch in batches])


CASES = {
    "before wrap-around": (40, 1, [(25, None)]),
    "wrapped": (40, 1, [(33, None), (20, None)]),
    "lanes": (48, 4, [(7, None), (9, None)]),
    "lanes of unequal fill": (45, 3, [(6, None), (5, [1]), (11, [2])]),
    "a lane wrapped, the others not": (30, 3, [(4, None), (13, [0])]),
}


@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize(("capacity", "num_envs", "writes"), CASES.values(), ids=CASES)
def test_priorities_count_within_the_window(capacity, num_envs, writes, storage):
    alpha, beta, eps, window = 0.5, 0.7, 1e-6, 13
    case = Case(capacity, num_envs, window, storage, alpha=alpha, beta=beta, eps=eps)
    for num_steps, lanes in writes:
        case.write(num_steps, lanes)
    newest = case.newest(window)
    # The least and the largest priority of all are outside, where they must not count.
    outside = iter([0.001, 50.0, *[3.0] * 100])
    inside = dict(zip(newest, (1.0 + i % 4 for i in range(window)), strict=True))
    case.set_priorities(lambda slot: inside[slot] if slot in inside else next(outside))

    index, weight = case.draws(100)
    counts = torch.bincount(index, minlength=capacity)
    assert counts.sum() == counts[newest].sum() == 50_000
    share = torch.tensor([(inside[slot] + eps) ** alpha for slot in newest], dtype=torch.float64)
    expected = 50_000 * share / share.sum()
    assert stats.chisquare(counts[newest], expected).pvalue > 1e-3
    exact = [((1.0 + eps) / (inside[slot] + eps)) ** (alpha * beta) for slot in index.tolist()]
    torch.testing.assert_close(weight, torch.tensor(exact), rtol=1e-6, atol=0)


@settings(max_examples=50)
@given(data=st.data())
def test_exactly_the_newest_rows_are_drawn(data):
    num_envs = data.draw(st.integers(1, 3), "lanes")
    capacity = data.draw(st.integers(num_envs, 14), "capacity")
    c_min = data.draw(st.integers(1, 15), "c_min")
    case = Case(capacity, num_envs, c_min, alpha=0.3)
    lanes = st.lists(st.integers(0, num_envs - 1), min_size=1, unique=True)
    for _ in range(data.draw(st.integers(1, 4), "writes")):
        written = data.draw(lanes, "written") if num_envs > 1 else None
        case.write(data.draw(st.integers(1, 9), "steps"), written)
        case.set_priorities(lambda slot: 1.0 + slot % 3)
        # The weight of one row in the window is 1 / (14 * 3^0.3) at least.
        assert set(case.draws(2)[0].tolist()) == set(case.newest(c_min))


def test_a_new_row_is_in_reach_at_once_and_has_the_largest_priority():
    case = Case(8, 1, c_min=2, alpha=1.0, beta=1.0)
    case.write(8)
    case.set_priorities(lambda slot: 3.0 if slot == 7 else 1.0)
    case.write(1)
    index, weight = case.draws(20)
    assert set(index.tolist()) == {7, 0}
    # Both have priority 3, the largest; that of 1 is outside.
    assert (weight == 1).all()


def test_parameters_of_the_base_hold_from_the_next_draw():
    case = Case(10, 1, c_min=4, alpha=1.0, beta=1.0)
    case.write(10)
    case.set_priorities(lambda slot: 4.0 if slot == 9 else 1.0)
    index, weight = case.draws()
    torch.testing.assert_close(weight, torch.where(index == 9, 0.25, 1.0))
    case.sampler.base.beta = 0.5
    index, weight = case.draws()
    torch.testing.assert_close(weight, torch.where(index == 9, 0.5, 1.0))
    case.sampler.base.alpha = 0.0
    index, weight = case.draws(40)
    assert (weight == 1).all()
    assert stats.chisquare(torch.bincount(index, minlength=10)[6:]).pvalue > 1e-3


def test_hindsight_over_emphasis_over_priorities():
    case = Case(30, 1, c_min=6)
    case.write(50)
    case.sampler.begin_phase(1)
    sampler = HERSampler(base=case.sampler)
    index, info = sampler.sample(case.buffer.storage, 400)
    assert set(index.tolist()) == set(case.newest(6))
    assert {"goal_index", "her_mask", "priority_weight"} <= set(info)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_sampling_never_waits_for_the_gpu(gpu, num_envs):
    class Storage:
        ndim, max_size, device = 1, 30, gpu
        num_rows = 0

        def __len__(self):
            return self.num_rows

    storage = Storage()
    storage.episodes = EpisodeIndex(30, num_envs, device=gpu)
    sampler = ERESampler(0.99, c_min=2, base=PERSampler(30))
    slots = torch.arange(12, device=gpu)
    sampler.mark_update(slots, storage=storage)
    storage.episodes.append(torch.zeros(num_envs, 12 // num_envs, dtype=torch.bool))
    storage.num_rows = 12
    index, info = sampler.sample(storage, 8)
    assert index.device == info["priority_weight"].device == gpu
    sampler.update_priority(index, torch.ones(8, device=gpu), storage=storage)
    assert sampler.sample(storage, 8)[0].shape == (8,)
