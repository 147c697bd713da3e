"""The table of priorities against lists, on both backends: rows, reports, draws, copies."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scipy.stats import chisquare

from trl_storages.priorities import ABSENT, PriorityTable, leaf_weights
from trl_storages.ring import EpisodeIndex

CPU = torch.device("cpu")


@pytest.fixture(params=["numba", "torch"])
def backend(request, monkeypatch):
    monkeypatch.setenv("TRL_STORAGES_BACKEND", request.param)


each_backend = pytest.mark.usefixtures("backend")


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)


def random_noise(n, seed=0):
    return torch.empty(n, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed))


def noise_of(*uniform):
    """The 63-bit numbers that become numbers in [0, 1)."""
    return (torch.tensor(uniform, dtype=torch.float64) * 2.0**53).long() << 10


def filled(*priorities, alpha=1.0, eps=0.5, **options):
    table = PriorityTable(len(priorities), alpha=alpha, eps=eps, device=CPU, **options)
    table.write(torch.arange(len(priorities)))
    table.update(torch.arange(len(priorities)), floats(*priorities), None)
    return table


@each_backend
class TestByHand:
    """Rows of 1, 3, 0, 4 with eps 0.5 and alpha 1 weigh 1.5, 3.5, 0.5, 4.5, together 10."""

    MARKS = noise_of(0.0, 0.14, 0.16, 0.49, 0.51, 0.54, 0.56, 0.999)

    @pytest.mark.requirement("per-draws")
    def test_draws_and_their_weights(self):
        table = filled(1.0, 3.0, 0.0, 4.0)
        slots, weight, stamp = table.draw(self.MARKS, 1.0, 4)
        assert slots.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        # The least of the batch weighs 0.5.
        expected = [1 / 3, 1 / 3, 1 / 7, 1 / 7, 1, 1, 1 / 9, 1 / 9]
        assert weight.tolist() == pytest.approx(expected, rel=1e-6)
        assert weight.dtype is torch.float32
        assert stamp.tolist() == [1] * 8
        assert table.draw(self.MARKS[-1:], 1.0, 4)[1].item() == 1.0
        _, halved, _ = table.draw(self.MARKS, 0.5, 4)
        torch.testing.assert_close(halved, weight.sqrt())

    @pytest.mark.requirement("per-draws")
    def test_weights_of_the_storage_and_raw_ones(self):
        table = filled(1.0, 3.0, 0.0, 4.0)

        def weight(mark, normalize):
            return table.draw(mark, 1.0, 4, normalize=normalize)[1].item()

        assert weight(self.MARKS[-1:], "storage") == pytest.approx(1 / 9)
        table.update(ints(2), floats(1.0), None)
        assert weight(self.MARKS[:1], "storage") == 1.0
        # The four weigh 1.5, 3.5, 1.5, 4.5: 2.75 on average.
        assert weight(self.MARKS[:1], "none") == pytest.approx(2.75 / 1.5)

    @pytest.mark.requirement("live-parameters")
    def test_rescale_is_exact_and_comes_back(self):
        table = filled(1.0, 3.0, 0.0, 4.0)

        def drawn():
            return table.draw(random_noise(100), 0.4, 4, normalize="storage")

        before = drawn()
        for exponents, total in (((0.0, 0.5), 4.0), ((2.0, 1.0), 4 + 16 + 1 + 25)):
            table.rescale(alpha=exponents[0], eps=exponents[1])
            table.validate()
            drawn()
            assert table._tree.total.item() == total
            table.validate()
        table.rescale(alpha=1.0, eps=0.5)
        for was, now in zip(before, drawn(), strict=True):
            assert torch.equal(was, now)

    @pytest.mark.requirement("live-parameters")
    def test_a_draw_that_goes_on_beside_a_change_of_alpha(self):
        """As with `prefetch`, where a scheduler sets `alpha` while another thread draws."""
        table, change = filled(1.0, 3.0, 0.0, 4.0), {"alpha": 0.0, "eps": 0.5}
        slots, weight, _ = table.draw(self.MARKS, 1.0, 4)
        tree, draws = table._tree, table._tree.draw

        def draw(*what):
            table.rescale(**change)
            return draws(*what)

        tree.draw = draw
        there, weighed, _ = table.draw(self.MARKS, 1.0, 4)
        assert torch.equal(there, slots)
        assert torch.equal(weighed, weight)
        # The next draw knows it.
        assert table.draw(self.MARKS, 1.0, 4)[1].tolist() == [1.0] * 8
        table.validate()

    def test_validate_finds_what_is_broken(self):
        table = filled(1.0, 3.0, 0.0, 4.0)
        table.draw(random_noise(4), 0.4, 4, normalize="storage")
        table.validate()
        table._rows.priorities[1] = 2.0
        with pytest.raises(RuntimeError, match=r"sum over the priorities is 10\.0, must be 9\.0"):
            table.validate()
        table._rows.priorities[1] = math.nan
        with pytest.raises(RuntimeError, match=r"at least 0, got nan at the slot 1 and 0 more"):
            table.validate()
        table._rows.largest.fill_(math.inf)
        with pytest.raises(RuntimeError, match="the largest priority must be finite"):
            table.validate()


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20),
    st.floats(0, 1),
    st.floats(0, 1),
)
@settings(max_examples=50)
@pytest.mark.requirement("per-draws")
def test_weights_follow_from_the_probabilities(values, alpha, beta):
    weights = [(value + 1e-3) ** alpha for value in values]
    raw = [(len(values) * weight / sum(weights)) ** -beta for weight in weights]
    for kernels in ("numba", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRL_STORAGES_BACKEND", kernels)
            table = filled(*values, alpha=alpha, eps=1e-3)
        for normalize in ("batch", "storage", "none"):
            asked = random_noise(64), beta, len(values)
            slots, got, _ = table.draw(*asked, normalize=normalize)
            drawn = [raw[slot] for slot in slots.tolist()]
            scale = {"batch": max(drawn), "storage": max(raw), "none": 1.0}[normalize]
            assert got.tolist() == pytest.approx([each / scale for each in drawn], rel=1e-5)


@given(st.integers(1, 300), st.integers(0, 50), st.sampled_from([0.3, 0.6, 1.7]))
@settings(max_examples=50)
def test_a_priority_weighs_the_same_wherever_it_stands(size, offset, alpha):
    priorities = torch.rand(size, generator=torch.Generator().manual_seed(size)).double() * 10
    weights = leaf_weights(priorities, alpha)
    alone = [leaf_weights(each.reshape(1), alpha) for each in priorities]
    assert torch.equal(weights, torch.cat(alone))
    shifted = leaf_weights(torch.cat([torch.ones(offset).double(), priorities]), alpha)
    assert torch.equal(weights, shifted[offset:])


def test_many_weigh_the_same_on_several_threads():
    priorities = torch.rand(100_003, generator=torch.Generator().manual_seed(0)).double()
    parts = [leaf_weights(part, 0.6) for part in priorities.split(999)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(leaf_weights(priorities, 0.6), torch.cat(parts))
    finally:
        torch.set_num_threads(threads)


@each_backend
@pytest.mark.requirement("per-draws")
def test_draws_are_as_likely_as_they_should_be():
    priorities = [1.0, 2.0, 3.0, 4.0]
    table = filled(*priorities, alpha=0.5, eps=1e-9)
    counts = torch.bincount(table.draw(random_noise(50_000), 0.4, 4)[0], minlength=4)
    roots = [math.sqrt(p) for p in priorities]
    expected = [50_000 * root / sum(roots) for root in roots]
    assert chisquare(counts.numpy(), expected).pvalue > 1e-3


@pytest.mark.requirement("persistence")
@each_backend
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("normalize", ["batch", "storage"])
def test_copies_and_pickles_are_independent_equal_and_of_the_backend_there(
    monkeypatch, num_envs, normalize
):
    table, options = filled(*range(6), alpha=0.6), {"normalize": normalize}
    episodes = EpisodeIndex(6, num_envs)
    episodes.append(torch.zeros(num_envs, 6 // num_envs, dtype=torch.bool))
    table.draw(random_noise(4), 0.4, torch.tensor(2), episodes, **options)
    table.write(ints(1))
    pickled = pickle.dumps(table)
    copies = [copy.deepcopy(table)]
    for choice in ("numba", "torch"):
        monkeypatch.setenv("TRL_STORAGES_BACKEND", choice)
        copies.append(pickle.loads(pickled))
    for copied in copies:
        copied.validate()
        for draws in (
            [each.draw(random_noise(64), 0.4, 6, **options) for each in (copied, table)],
            [
                each.draw(random_noise(64), 0.4, torch.tensor(3), episodes, **options)
                for each in (copied, table)
            ],
        ):
            assert all(torch.equal(*both) for both in zip(*draws, strict=True))
        copied.write(ints(2))
        copied.update(ints(2), floats(0.25), None)
        copied.validate()
        assert table.priorities[2] == 2.0
    table.validate()


class TableMachine(RuleBasedStateMachine):
    """Random operations on a table of each backend, and the same on two lists."""

    @initialize(
        size=st.integers(1, 80),
        alpha=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def plant(self, size, alpha):
        self.tables = []
        for choice in ("numba", "torch"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRL_STORAGES_BACKEND", choice)
                self.tables.append(PriorityTable(size, alpha=alpha, eps=0.5, device=CPU))
        self.alpha, self.eps = alpha, 0.5
        self.clear()
        self.stamps = [0] * size

    def clear(self):
        self.priorities = [ABSENT] * self.tables[0].capacity
        self.largest = 0.0

    def slots(self, data):
        slot = st.integers(-1, len(self.priorities) - 1)
        return data.draw(st.lists(slot, min_size=1, max_size=12))

    @rule(data=st.data())
    def write(self, data):
        slots = self.slots(data)
        for table in self.tables:
            table.write(ints(*slots))
        for slot in set(slots) - {-1}:
            self.priorities[slot] = self.largest or 1.0
            self.stamps[slot] += 1

    @rule(data=st.data())
    def update(self, data):
        slots = self.slots(data)
        number = st.floats(0, 100, width=32)
        new = data.draw(st.lists(number, min_size=len(slots), max_size=len(slots)))
        late = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        stamps = [self.stamps[slot] - lag for slot, lag in zip(slots, late, strict=True)]
        for table in self.tables:
            table.update(ints(*slots), floats(*new), torch.tensor(stamps, dtype=torch.int32))
        for slot, priority, lag in zip(slots, new, late, strict=True):
            if slot >= 0 and not lag and self.priorities[slot] != ABSENT:
                self.priorities[slot] = priority
                self.largest = max(self.largest, priority)

    @rule(alpha=st.sampled_from([0.0, 0.3, 1.0, 2.0]), eps=st.sampled_from([0.5, 1.0]))
    def rescale(self, alpha, eps):
        for table in self.tables:
            table.rescale(alpha=alpha, eps=eps)
        self.alpha, self.eps = alpha, eps

    @rule()
    def forget(self):
        for table in self.tables:
            table.clear()
        self.clear()
        self.stamps = [stamp + 1 for stamp in self.stamps]

    @rule()
    def save_and_load(self):
        states = [table.state_dict() for table in self.tables]
        for table, state in zip(self.tables, reversed(states), strict=True):
            table.load_state_dict(state)
        self.stamps = [stamp + 1 for stamp in self.stamps]

    @rule(
        seed=st.integers(0, 1000),
        beta=st.floats(0, 1),
        normalize=st.sampled_from(["batch", "storage", "none"]),
    )
    def draw(self, seed, beta, normalize):
        there = [p for p in self.priorities if p != ABSENT]
        if not there:
            return
        asked = random_noise(16, seed), beta, len(there)
        draws = [table.draw(*asked, normalize=normalize) for table in self.tables]
        assert all(torch.equal(*both) for both in zip(*draws, strict=True))
        slots, weights, stamps = (each.tolist() for each in draws[0])
        drawn = [self.priorities[slot] for slot in slots]
        assert ABSENT not in drawn
        if normalize == "none":
            reference = sum((p + self.eps) ** self.alpha for p in there) / len(there)
        else:
            least = min(drawn if normalize == "batch" else there)
            reference = (least + self.eps) ** self.alpha
        expected = [(reference / (p + self.eps) ** self.alpha) ** beta for p in drawn]
        assert weights == pytest.approx(expected, rel=1e-5)
        assert stamps == [self.stamps[slot] for slot in slots]

    @invariant()
    def holds_what_the_lists_hold(self):
        for table in self.tables:
            assert table.priorities.tolist() == self.priorities
            assert table.stamps.tolist() == self.stamps
            assert table.new_priority == (self.largest or 1.0)
            table.validate()


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40)
