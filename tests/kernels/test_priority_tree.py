"""The tree of weights: by hand, against lists, and over lanes that wrap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_storages.kernels import priority_tree


class Tree:
    """A tree of sums, and one of least weights beside it."""

    def __init__(self, weights, num_leaves=None):
        self.size = num_leaves or len(weights)
        self.starts = priority_tree.level_starts(self.size)
        self.sums, self.least_of = np.zeros(self.starts[-1]), np.full(self.starts[-1], np.inf)
        self.set(range(len(weights)), weights)

    def set(self, leaves, weights):
        leaves, weights = np.array(leaves, np.int64), np.array(weights, np.float64)
        priority_tree.set_leaves(self.sums, self.starts, False, leaves, weights)
        priority_tree.set_leaves(self.least_of, self.starts, True, leaves, weights)

    @property
    def weights(self):
        return self.sums[self.starts[-2] :][: self.size]

    def ranges(self, given):
        return priority_tree.every_leaf(self.starts) if given is None else np.array(given, np.int64)

    def draw(self, noise, ranges=None):
        noise, ranges = np.asarray(noise, np.int64), self.ranges(ranges)
        leaves, weights = np.empty(len(noise), np.int64), np.empty(len(noise))
        total = priority_tree.draw_leaves(self.sums, self.starts, ranges, noise, leaves, weights)
        assert weights.tolist() == self.weights[leaves].tolist()
        return leaves, total

    def least(self, ranges=None):
        return priority_tree.least_within(self.least_of, self.starts, self.ranges(ranges))


def noise_of(uniform):
    """The 63-bit numbers that become numbers in [0, 1)."""
    return (np.asarray(uniform) * 2.0**53).astype(np.int64) << 10


def random_noise(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**63 - 1, n)


def grid(n):
    """Evenly spaced numbers instead of random ones: counts are then shares, rounded."""
    return noise_of((np.arange(n) + 0.5) / n)


class TestByHand:
    """Leaves that weigh 1.5, 3.5, 0, 0.5, 4.5, together 10."""

    def tree(self):
        return Tree([1.5, 3.5, 0.0, 0.5, 4.5])

    def test_draws_follow_the_cumulative_sum(self):
        # Masses lie in [0, 1.5), [1.5, 5), [5, 5.5), [5.5, 10).
        leaves, total = self.tree().draw(noise_of([0, 0.14, 0.16, 0.49, 0.51, 0.54, 0.56, 0.999]))
        assert leaves.tolist() == [0, 0, 1, 1, 3, 3, 4, 4]
        assert total == 10.0

    def test_draws_within_ranges(self):
        # Leaves 1 and 4 weigh 3.5 and 4.5; the second range is empty.
        leaves, total = self.tree().draw(noise_of([0, 0.43, 0.44, 0.999]), ((1, 0, 4), (3, 0, 5)))
        assert leaves.tolist() == [1, 1, 4, 4]
        assert total == 8.0


def test_a_leaf_that_weighs_nothing_is_never_drawn():
    made = Tree([], 5000)
    made.set([0, 7, 4999], [3.0] * 3)
    assert made.weights[[0, 7, 4999]].tolist() == [3.0] * 3
    assert {*made.draw(random_noise(2000))[0]} == {0, 7, 4999}
    made.set([7], [0.0])
    assert {*made.draw(random_noise(2000))[0]} == {0, 4999}
    edges = [0, 2**63 - 1]
    assert made.draw(edges)[0].tolist() == [0, 4999]
    assert made.draw(edges, ((0, 3), (0, 5000)))[0].tolist() == [4999, 4999]


@pytest.mark.parametrize(
    ("weights", "last"), [((1e16, 1, 1, 1, 1, 1, 1, 1), 0), ((0, 1e16, 4, 1, 1, 1, 1, 0), 2)]
)
def test_a_mass_beyond_the_sum_in_order_is_of_the_last_leaf_that_counts(weights, last):
    # By halves the light leaves add up first; one by one each is lost in the heavy one.
    made = Tree(weights)
    assert made.sums[0] > np.cumsum(weights)[-1]
    assert made.draw([2**63 - 1])[0].tolist() == [last]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 1023, 40_000])
@pytest.mark.requirement("per-draws")
def test_the_share_of_each_leaf_is_exact(size):
    weights = 0.5 + np.random.default_rng(size).random(size)
    made, num_draws = Tree(weights), 8 * size
    first, last = size // 5, size - size // 7
    for ranges, start, stop in ((None, 0, size), (((first,), (last,)), first, last)):
        counts = np.bincount(made.draw(grid(num_draws), ranges)[0], minlength=size)
        share = weights[start:stop] / weights[start:stop].sum() * num_draws
        assert np.abs(counts[start:stop] - share).max() < 1.0
        assert counts[start:stop].sum() == num_draws


@pytest.mark.requirement("ere-per")
def test_a_light_range_beside_heavy_leaves_is_drawn_exactly():
    # Sums up to a leaf, taken from one another, would have lost these weights altogether.
    weights = np.full(1000, 1e15)
    weights[500:504] = 1e-6, 2e-6, 3e-6, 4e-6
    leaves, _ = Tree(weights).draw(grid(1000), ((500,), (504,)))
    assert np.bincount(leaves, minlength=504)[500:].tolist() == [100, 200, 300, 400]


def test_a_range_of_the_most_nodes():
    """Seven on either side of each level but the root's."""
    leaves, _ = Tree(np.ones(512)).draw(grid(510), ((1,), (511,)))
    assert leaves.tolist() == [*range(1, 511)]


@pytest.mark.requirement("per-update")
def test_the_root_is_the_sum_after_a_million_updates():
    made, rng = Tree([], 50_000), np.random.default_rng(3)
    for _ in range(100):
        # Over twelve orders of magnitude, where sums that are added to would drift.
        made.set(rng.integers(50_000, size=10_000), 10 ** rng.uniform(-6, 6, 10_000))
    assert made.sums[0] == pytest.approx(made.weights.sum(), rel=1e-6)
    # Equal weights make equal trees, whatever their history, also if all are joined at once.
    fresh = Tree([], 50_000)
    fresh.set(range(50_000), made.weights)
    assert fresh.sums.tolist() == made.sums.tolist()


magnitudes = st.sampled_from([(0.0, 1.0), (1e-120, 1e-100), (1e-10, 1e30), (1e200, 1e300)])


@st.composite
def histories(draw):
    """Writes to a tree of some size, then ranges of leaves, and a seed."""
    size = draw(st.sampled_from([1, 7, 8, 9, 60, 64, 65, 500, 513, 4097]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    writes = []
    for _ in range(draw(st.integers(1, 4))):
        batch = draw(st.sampled_from([1, 3, 8, 40, 700]))
        weights = rng.uniform(*draw(magnitudes), batch)
        weights[rng.random(batch) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = 0.0
        writes.append((rng.integers(0, size, batch), weights))
    bounds = np.sort(rng.integers(0, size + 1, 2 * draw(st.integers(1, 4))))
    order = rng.permutation(len(bounds) // 2)
    return size, writes, (bounds[::2][order], bounds[1::2][order]), int(rng.integers(2**31))


@settings(max_examples=50)
@given(histories())
def test_it_answers_as_a_list_does(history):
    size, writes, ranges, seed = history
    made, plain = Tree([], size), np.zeros(size)
    for leaves, weights in writes:
        for leaf, weight in zip(leaves, weights, strict=True):
            plain[leaf] = weight
        made.set(leaves, weights)
    inside = [leaf for bounds in zip(*ranges, strict=True) for leaf in range(*bounds)]
    assert made.weights.tolist() == plain.tolist()
    for within, there in ((None, [*range(size)]), (ranges, inside)):
        positive = plain[there][plain[there] > 0]
        assert made.least(within) == positive.min(initial=np.inf)
        if len(positive):
            leaves, total = made.draw(random_noise(64, seed), within)
            assert {*leaves} <= {*there}
            assert plain[leaves].min() > 0
            assert total == pytest.approx(positive.sum(), rel=1e-12)
