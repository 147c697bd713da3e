"""Both priority trees against a plain list, against each other, and against chance.

The trees are held to the same answers by the same tests. `TRL_STORAGES_NATIVE_TREE=0` hides the
native one, from these tests too.
"""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scipy.stats import chisquare

from trl_storages.episodes import EpisodeIndex
from trl_storages.priority_tree import (
    ABSENT,
    LaneOrder,
    LevelTree,
    NativeTree,
    has_native_tree,
    priority_tree,
)

needs_native = pytest.mark.skipif(
    not has_native_tree(),
    reason="TorchRL's native part does not load with this torch, or is hidden",
)
KINDS = [pytest.param(NativeTree, marks=needs_native), LevelTree]
each_kind = pytest.mark.parametrize("kind", KINDS)


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


def floats(*values):
    return torch.tensor(values, dtype=torch.float32)


def uniform(n, seed=0):
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def planted(kind, priorities, alpha=1.0, eps=1e-6):
    tree = kind(len(priorities), alpha=alpha, eps=eps)
    tree.fill(floats(*priorities))
    return tree


class TestByHand:
    """Leaves 1, 3, 0, 4 with eps 0.5 and alpha 1 weigh 1.5, 3.5, 0.5, 4.5, together 10."""

    @pytest.fixture(params=KINDS)
    def tree(self, request):
        return planted(request.param, [1.0, 3.0, 0.0, 4.0], eps=0.5)

    def test_sums_and_minimum(self, tree):
        assert float(tree.total()) == 10.0
        assert float(tree.least()) == 0.0
        assert tree.total(ints(0, 1, 2, 1), ints(2, 4, 2, 2)).tolist() == [5.0, 8.5, 0.0, 3.5]
        assert float(tree.least(ints(0, 3), ints(2, 4))) == 1.0
        assert float(tree.least(ints(2, 0), ints(2, 0))) == ABSENT

    def test_draws_follow_the_cumulative_sum(self, tree):
        # Of the total, (1 - u) lies in (0, 1.5], (1.5, 5], (5, 5.5], (5.5, 10].
        marks = torch.tensor([0.0, 0.44, 0.46, 0.49, 0.51, 0.84, 0.86, 0.999], dtype=torch.float64)
        leaf, priority, _ = tree.draw(marks)
        assert leaf.tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
        assert priority.dtype is torch.float32
        assert priority.tolist() == [4.0, 4.0, 0.0, 0.0, 3.0, 3.0, 1.0, 1.0]

    def test_draws_within_ranges(self, tree):
        # Leaves 1 and 3 weigh 3.5 and 4.5.
        marks = torch.tensor([0.0, 0.56, 0.57, 0.999], dtype=torch.float64)
        leaf, priority, _ = tree.draw(marks, ints(1, 3, 0), ints(2, 4, 0))
        assert leaf.tolist() == [3, 3, 1, 1]
        assert priority.tolist() == [4.0, 4.0, 3.0, 3.0]

    def test_rescale_is_exact_and_comes_back(self, tree):
        before = tree.draw(uniform(100))
        tree.rescale(alpha=0.0, eps=0.5)
        assert float(tree.total()) == 4.0
        tree.rescale(alpha=2.0, eps=1.0)
        assert float(tree.total()) == 4 + 16 + 1 + 25
        tree.rescale(alpha=1.0, eps=0.5)
        for was, now in zip(before, tree.draw(uniform(100)), strict=True):
            assert torch.equal(was, now)
        tree.validate()

    def test_late_priorities_are_left_alone(self, tree):
        leaf, _, generation = tree.draw(uniform(50))
        tree.renew(ints(3), 2.0)
        written = tree.set(leaf, torch.full((50,), 9.0), generation)
        drawn = set(leaf.tolist())
        assert drawn == {0, 1, 2, 3}
        assert tree.priorities.tolist() == [9.0, 9.0, 9.0, 2.0]
        assert written.sum() == 9 * (leaf != 3).sum()
        assert tree.set(ints(3), floats(7.0), generation[leaf == 3][:1]).sum() == 0.0
        assert tree.get(ints(3)).item() == 2.0
        tree.validate()

    def test_validate_finds_what_is_broken(self, tree):
        tree.priorities[1] = 2.0
        with pytest.raises(RuntimeError, match=r"sum over the priorities is 10\.0, must be 9\.0"):
            tree.validate()


@each_kind
def test_an_absent_leaf_is_never_drawn_nor_the_least(kind):
    tree = kind(5000, alpha=0.5, eps=1e-6)
    assert float(tree.total()) == 0.0
    assert float(tree.least()) == ABSENT
    tree.renew(ints(0, 7, 4999), 3.0)
    leaf, priority, generation = tree.draw(uniform(2000))
    assert set(leaf.tolist()) == {0, 7, 4999}
    assert priority.tolist() == [3.0] * 2000
    assert generation.tolist() == [1] * 2000
    assert float(tree.least()) == 3.0


@each_kind
def test_the_edges_of_the_unit_interval(kind):
    tree = kind(3000, alpha=1.0, eps=1e-6)
    tree.renew(ints(10, 20), 1.0)
    edges = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert tree.draw(edges)[0].tolist() == [20, 10]


@pytest.mark.requirement("per-update")
@each_kind
def test_of_repeated_indices_the_last_wins(kind):
    tree = kind(100, alpha=1.0, eps=1e-6)
    tree.renew(torch.arange(100), 1.0)
    index = torch.randint(100, (5000,), generator=torch.Generator().manual_seed(1))
    priority = torch.rand(5000, generator=torch.Generator().manual_seed(2))
    tree.set(index, priority)
    expected = dict(zip(index.tolist(), priority.tolist(), strict=True))
    assert tree.priorities.tolist() == [expected[i] for i in range(100)]
    tree.validate()


@pytest.mark.requirement("per-update")
@each_kind
def test_updates_of_absent_leaves_and_those_left_out_change_nothing(kind):
    tree = kind(10, alpha=1.0, eps=1e-6)
    tree.renew(ints(1, 2, 3), 1.0, torch.tensor([True, False, True]))
    keep = torch.tensor([True, True, False, True])
    assert tree.set(ints(1, 2, 3, 9), floats(5, 6, 7, 8), keep=keep).sum() == 5.0
    expected = [ABSENT] * 10
    expected[1], expected[3] = 5.0, 1.0
    assert tree.priorities.tolist() == expected
    tree.validate()


@pytest.mark.requirement("per-draws")
@each_kind
def test_draws_are_as_likely_as_they_should_be(kind):
    priorities = [1.0, 2.0, 3.0, 4.0]
    tree = planted(kind, priorities, alpha=0.5, eps=1e-9)
    counts = torch.bincount(tree.draw(uniform(50_000))[0], minlength=4)
    roots = [math.sqrt(p) for p in priorities]
    expected = [50_000 * root / sum(roots) for root in roots]
    assert chisquare(counts.numpy(), expected).pvalue > 1e-3


@pytest.mark.requirement("per-draws")
@each_kind
@pytest.mark.parametrize("size", [1, 31, 32, 33, 255, 256, 1023, 40_000])
def test_the_share_of_each_leaf_is_exact(kind, size):
    # Evenly spaced numbers instead of random ones: counts are then shares, rounded.
    tree = kind(size, alpha=1.0, eps=1e-6)
    priorities = 0.5 + torch.rand(size, generator=torch.Generator().manual_seed(size))
    tree.renew(torch.arange(size), 1.0)
    tree.set(torch.arange(size), priorities)
    num_draws = 8 * size
    grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    counts = torch.bincount(tree.draw(grid)[0], minlength=size)
    share = (priorities.double() + 1e-6) / (priorities.double() + 1e-6).sum() * num_draws
    assert (counts - share).abs().max() < 1.0


@each_kind
@pytest.mark.requirement("per-update")
def test_the_root_is_the_sum_after_a_million_updates(kind):
    size = 50_000
    tree = kind(size, alpha=0.6, eps=1e-6)
    tree.renew(torch.arange(size), 1.0)
    generator = torch.Generator().manual_seed(3)
    for _ in range(100):
        index = torch.randint(size, (10_000,), generator=generator)
        # Over twelve orders of magnitude, where sums that are added to would drift.
        priority = 10 ** (12 * torch.rand(10_000, generator=generator) - 6)
        tree.set(index, priority)
    expected = ((tree.priorities.double() + 1e-6) ** 0.6).sum().item()
    assert float(tree.total()) == pytest.approx(expected, rel=1e-6)
    tree.validate()
    # And equal columns make equal trees, whatever their history.
    fresh = kind(size, alpha=0.6, eps=1e-6)
    fresh.fill(tree.priorities)
    assert float(fresh.total()) == float(tree.total())


@needs_native
@given(st.integers(1, 3000), st.integers(0, 2**32), st.floats(0, 2))
def test_both_trees_give_the_same_answers(size, seed, alpha):
    generator = torch.Generator().manual_seed(seed)
    trees = [kind(size, alpha=alpha, eps=1e-3) for kind in (NativeTree, LevelTree)]
    rows = torch.randint(size, (size // 2 + 1,), generator=generator)
    index = torch.randint(size, (64,), generator=generator)
    priority = 10 * torch.rand(64, generator=generator)
    bounds = torch.randint(size + 1, (4,), generator=generator).sort().values
    start, stop = bounds[::2], bounds[1::2]
    marks = torch.rand(32, dtype=torch.float64, generator=generator)
    for tree in trees:
        tree.renew(rows, 1.0)
        tree.set(index, priority)
    native, levels = trees
    assert torch.equal(native.priorities, levels.priorities)
    for ranges in ((), (start, stop)):
        assert float(native.least(*ranges)) == float(levels.least(*ranges))
        sums = [torch.as_tensor(tree.total(*ranges), dtype=torch.float64) for tree in trees]
        torch.testing.assert_close(*sums, rtol=1e-12, atol=0.0)
        if sums[0].sum() > 0:
            for got, expected in zip(*(t.draw(marks, *ranges) for t in trees), strict=True):
                assert torch.equal(got, expected)


@each_kind
@given(data=st.data())
def test_ranges_are_those_of_a_list(kind, data):
    size = data.draw(st.integers(1, 2500))
    values = np.random.default_rng(size).random(size).astype(np.float32)
    values[:: data.draw(st.integers(2, 7))] = ABSENT
    tree = planted(kind, values.tolist(), alpha=1.0, eps=0.25)
    bounds = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=6))
    bounds = sorted(bounds[: len(bounds) // 2 * 2])
    start, stop = ints(*bounds[::2]), ints(*bounds[1::2])
    parts = [values[a:b] for a, b in zip(start, stop, strict=True)]
    sums = [sum(float(v) + 0.25 for v in part if v != ABSENT) for part in parts]
    assert tree.total(start, stop).tolist() == pytest.approx(sums, rel=1e-12)
    least = min(float(part.min(initial=ABSENT)) for part in parts)
    assert float(tree.least(start, stop)) == least
    if sum(sums):
        leaf, priority, _ = tree.draw(uniform(64), start, stop)
        inside = {
            i for a, b in zip(start.tolist(), stop.tolist(), strict=True) for i in range(a, b)
        }
        assert set(leaf.tolist()) <= {i for i in inside if values[i] != ABSENT}
        assert priority.tolist() == [float(values[i]) for i in leaf]


@each_kind
def test_copies_and_pickles_are_independent_and_equal(kind):
    tree = planted(kind, [1.0, 2.0, ABSENT], alpha=0.6)
    tree.renew(ints(1), 5.0)
    for copied in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert type(copied) is kind
        for got, expected in zip(copied.draw(uniform(64)), tree.draw(uniform(64)), strict=True):
            assert torch.equal(got, expected)
        copied.renew(ints(2), 1.0)
        copied.validate()
        assert tree.get(ints(2)).item() == ABSENT
    tree.validate()


def test_the_fastest_tree_is_chosen(monkeypatch):
    options = {"alpha": 1.0, "eps": 1e-6}
    expected = NativeTree if has_native_tree() else LevelTree
    assert type(priority_tree(8, **options)) is expected
    assert type(priority_tree(8, **options, device="meta")) is LevelTree
    monkeypatch.setenv("TRL_STORAGES_NATIVE_TREE", "0")
    assert type(priority_tree(8, **options)) is LevelTree
    assert repr(priority_tree(8, **options)) == "LevelTree(8, alpha=1.0, eps=1e-06, device=cpu)"


@needs_native
def test_rounding_never_draws_an_absent_leaf():
    # The compiled tree subtracts on its way down; what is left may exceed the last weight by a bit.
    tree = NativeTree(4096, alpha=1.0, eps=1e-6)
    tree.renew(ints(100, 2000), 1.0)
    behind = np.array([101, 2001, 4000, 4095])
    assert tree._step_back(behind).tolist() == [100, 2000, 2000, 2000]


class TestLaneOrder:
    @given(st.integers(1, 5), st.integers(1, 30))
    def test_slots_and_leaves_are_inverse(self, num_lanes, capacity):
        order = LaneOrder(capacity, num_lanes)
        slots = torch.arange(capacity)
        leaves = order.leaves(slots)
        assert len(set(leaves.tolist())) == capacity
        assert leaves.max() < order.num_leaves < capacity + num_lanes
        assert torch.equal(order.slots(leaves), slots)

    @pytest.mark.requirement("ere-per")
    @given(st.integers(1, 4), st.integers(1, 6), st.data())
    def test_the_newest_rows_are_the_ranges(self, num_lanes, steps, data):
        capacity = num_lanes * steps + data.draw(st.integers(0, num_lanes - 1))
        episodes = EpisodeIndex(capacity, num_lanes)
        order = LaneOrder(capacity, num_lanes)
        for _ in range(data.draw(st.integers(1, 8))):
            lanes = sorted(data.draw(st.sets(st.integers(0, num_lanes - 1), min_size=1)))
            length = data.draw(st.integers(1, steps + 1))
            episodes.append(torch.zeros(len(lanes), length, dtype=torch.bool), lanes=lanes)
        for window in range(1, len(episodes) + 2):
            ranges = zip(*order.newest(episodes, torch.tensor(window)), strict=True)
            leaves = [leaf for start, stop in ranges for leaf in range(int(start), int(stop))]
            newest = episodes.slots_by_age(torch.arange(min(window, len(episodes))))
            assert sorted(leaves) == sorted(order.leaves(newest).tolist())


class TreeMachine(RuleBasedStateMachine):
    """Random operations on a tree, and the same on two lists."""

    kind: type

    @initialize(size=st.integers(1, 80), alpha=st.sampled_from([0.0, 0.5, 1.0]))
    def plant(self, size, alpha):
        self.tree = self.kind(size, alpha=alpha, eps=0.5)
        self.alpha, self.eps = alpha, 0.5
        self.priorities = [ABSENT] * size
        self.generations = [0] * size

    def indices(self, data, max_size=12):
        index = st.integers(0, len(self.priorities) - 1)
        return data.draw(st.lists(index, min_size=1, max_size=max_size))

    @rule(data=st.data(), priority=st.floats(0, 100, width=32))
    def renew(self, data, priority):
        index = self.indices(data)
        self.tree.renew(ints(*index), priority)
        for i in set(index):
            self.priorities[i] = priority
            self.generations[i] += 1

    @rule(data=st.data())
    def set(self, data):
        index = self.indices(data)
        number = st.floats(0, 100, width=32)
        new = data.draw(st.lists(number, min_size=len(index), max_size=len(index)))
        late = data.draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index)))
        generation = [self.generations[i] - lag for i, lag in zip(index, late, strict=True)]
        taken = self.tree.set(
            ints(*index), floats(*new), torch.tensor(generation, dtype=torch.int32)
        )
        written = []
        for i, priority, lag in zip(index, new, late, strict=True):
            if not lag and self.priorities[i] != ABSENT:
                self.priorities[i] = priority
                written.append(priority)
        assert sorted(p for p in taken.tolist() if p) == sorted(p for p in written if p)

    @rule(alpha=st.sampled_from([0.0, 0.3, 1.0, 2.0]), eps=st.sampled_from([0.5, 1.0]))
    def rescale(self, alpha, eps):
        self.tree.rescale(alpha=alpha, eps=eps)
        self.alpha, self.eps = alpha, eps

    @rule()
    def clear(self):
        self.tree.clear()
        self.priorities = [ABSENT] * len(self.priorities)
        self.generations = [generation + 1 for generation in self.generations]

    @rule(seed=st.integers(0, 1000))
    def draw(self, seed):
        there = [i for i, p in enumerate(self.priorities) if p != ABSENT]
        if not there:
            return
        leaf, priority, generation = self.tree.draw(uniform(16, seed))
        assert set(leaf.tolist()) <= set(there)
        assert float(self.tree.least()) == min(self.priorities[i] for i in there)
        assert priority.tolist() == [self.priorities[i] for i in leaf.tolist()]
        assert generation.tolist() == [self.generations[i] for i in leaf.tolist()]

    @invariant()
    def holds_what_the_list_holds(self):
        assert self.tree.priorities.tolist() == self.priorities
        self.tree.validate()


class NativeMachine(TreeMachine):
    kind = NativeTree


class LevelMachine(TreeMachine):
    kind = LevelTree


TestNativeTree = needs_native(NativeMachine.TestCase)
TestLevelTree = LevelMachine.TestCase
TestNativeTree.settings = TestLevelTree.settings = settings(max_examples=60)
