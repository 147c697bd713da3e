"""The tree of sums and of least weights: by hand, and against lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from trl_storages.index import EpisodeIndex
from trl_storages.kernels import tree

ALL = np.empty((2, 0), np.int64)


def ints(*values):
    return np.array(values, dtype=np.int64)


def planted(weights, is_least=False):
    """Returns a tree, and where its levels begin."""
    starts = tree.level_starts(len(weights))
    nodes = np.full(starts[-1], np.inf if is_least else 0.0)
    tree.set_leaves(nodes, starts, is_least, np.arange(len(weights)), np.array(weights, float))
    return nodes, starts


def drawn(sums, starts, noise, ranges=ALL):
    leaves, weights = np.empty(len(noise), np.int64), np.empty(len(noise))
    total = tree.draw_leaves(sums, starts, ranges, noise, leaves, weights)
    return leaves, weights, total


def noise_of(*uniform):
    """The 63-bit numbers that become numbers in [0, 1)."""
    return (np.array(uniform) * 2.0**53).astype(np.int64) << 10


def random_noise(size):
    return np.random.default_rng(0).integers(0, 2**63, size, np.int64)


def test_draws_follow_the_cumulative_sum():
    sums, starts = planted([1, 0, 2, 5])
    leaves, weights, total = drawn(sums, starts, noise_of(0, 0.124, 0.125, 0.374, 0.375, 0.999))
    assert total == 8
    assert leaves.tolist() == [0, 0, 2, 2, 3, 3]
    assert weights.tolist() == [1, 1, 2, 2, 5, 5]


def test_draws_within_ranges():
    sums, starts = planted([1] * 20)
    leaves, _, total = drawn(sums, starts, noise_of(0, 0.3, 0.5, 0.9), np.array([[2, 15], [4, 17]]))
    assert total == 4
    assert leaves.tolist() == [2, 3, 15, 16]


def test_of_a_leaf_that_occurs_twice_the_last_weight_stays():
    sums, starts = planted([1] * 9)
    tree.set_leaves(sums, starts, False, ints(3, 8, 3), np.array([7.0, 2.0, 4.0]))
    assert sums[0] == 7 + 4 + 2
    assert drawn(sums, starts, noise_of(0.999))[0] == 8


def test_a_leaf_that_weighs_nothing_is_never_drawn():
    weights = np.zeros(700)
    weights[[0, 64, 65, 400]] = 1e-300, 1.0, 1e300, 0.1
    sums, starts = planted(weights)
    noise = np.concatenate([random_noise(5000), ints(0, 2**63 - 1)])
    leaves, drawn_weights, _ = drawn(sums, starts, noise)
    assert (drawn_weights > 0).all()
    assert set(leaves) <= {0, 64, 65, 400}


def test_draws_are_as_likely_as_they_should_be():
    weights = np.arange(1, 101) ** 0.7
    counts = np.bincount(drawn(*planted(weights), random_noise(200_000))[0], minlength=100)
    assert chisquare(counts, weights / weights.sum() * 200_000).pvalue > 1e-3


def test_the_root_is_the_sum_after_many_updates():
    rng = np.random.default_rng(1)
    sums, starts = planted([0] * 5000)
    weights = np.zeros(5000)
    for _ in range(1000):
        leaves, values = rng.permutation(5000)[:1000], 10 ** rng.uniform(-6, 6, 1000)
        weights[leaves] = values
        tree.set_leaves(sums, starts, False, leaves, values)
    assert sums[0] == pytest.approx(weights.sum(), rel=1e-12)
    renewed = sums.copy()
    tree.renew(renewed, starts, False)
    assert np.array_equal(renewed, sums)


@st.composite
def histories(draw):
    """A number of leaves, updates of their whole weights, and disjoint ranges; none is all."""
    size = draw(st.integers(1, 150))
    update = st.dictionaries(st.integers(0, size - 1), st.integers(0, 9), min_size=1)
    bounds = draw(st.lists(st.integers(0, size), max_size=6, unique=True).map(sorted))
    pairs = [*zip(bounds[::2], bounds[1::2], strict=False)]
    return size, draw(st.lists(update, min_size=1, max_size=4)), pairs


@given(history=histories())
def test_it_answers_as_a_list_does(history):
    size, updates, pairs = history
    weights = np.zeros(size)
    (sums, starts), (least, _) = planted(weights), planted(weights, is_least=True)
    for update in updates:
        leaves, values = ints(*update), np.array([*update.values()], float)
        weights[leaves] = values
        for nodes, is_least in ((sums, False), (least, True)):
            tree.set_leaves(nodes, starts, is_least, leaves, values)
    ranges = ints(*zip(*pairs, strict=True)) if pairs else ALL
    listed = np.concatenate([np.arange(*pair) for pair in pairs or [(0, size)]])
    positive = weights[listed][weights[listed] > 0]
    assert tree.least_within(least, starts, ranges) == positive.min(initial=np.inf)
    if len(positive):
        noise = random_noise(50)
        leaves, _, total = drawn(sums, starts, noise, ranges)
        ends = weights[listed].cumsum()
        assert total == ends[-1]
        # Whole numbers are added exactly.
        expected = ends.searchsorted((noise >> 10) * 2.0**-53 * total, side="right")
        assert leaves.tolist() == listed[expected].tolist()


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_the_newest_rows_are_the_ranges(window):
    index = EpisodeIndex(10, 2)
    index.cursors[:], index.tails[:] = (8, 2), (3, 0)
    ranges = np.empty((2, 4), np.int64)
    tree.newest_ranges(index.tables, window, ranges)
    listed = [slot for pair in ranges.T for slot in range(*pair)]
    newest = [step % 5 for step in range(max(3, 8 - window), 8)]
    assert sorted(listed) == sorted([*newest, *(5 + step for step in range(max(0, 2 - window), 2))])
