"""Draws, trees and folds, by hand."""

import numpy as np
import torch
from scipy.stats import chisquare

from trl_storages.index import EpisodeIndex
from trl_storages.kernels import draws, streams, tree
from trl_storages.streams import Arena, Block, HostRows, Layout

RNG = np.random.default_rng(0)


def noise(size):
    return RNG.integers(0, 2**63 - 1, size)


def unequal_lanes():
    index = EpisodeIndex(30, 3)
    index.cursors[:], index.tails[:] = [4, 0, 13], [0, 0, 3]
    return index


def test_uniform_over_unequal_lanes():
    slots = unequal_lanes().draw(torch.from_numpy(noise(14_000)))
    counts = np.bincount(slots, minlength=30)
    live = [*range(4), *range(20, 30)]
    assert counts.sum() == counts[live].sum()
    assert chisquare(counts[live]).pvalue > 1e-4


def test_whole_finished_episodes_are_drawn_alike():
    layout = Layout({"observation": (torch.int64, (1,)), ("next", "reward"): (torch.int64, (1,))})
    index = EpisodeIndex(80, 2)
    entries = 2 * index.entries_per_lane, layout.entry_words
    rows = HostRows(layout, index, Arena({"entries": (np.int64, entries)}))
    # Of lane 0 the first episode is partly evicted, the fourth cut, and the last runs.
    lengths = [[7, 20, 1, 3, 9, 6], [3, 5]]
    for lane, each in enumerate(lengths):
        for number, length in enumerate(each):
            done, cut = np.arange(length) == length - 1, np.zeros(length, bool)
            done[-1] = (lane, number) not in ((0, 3), (0, 5))
            cut[0] = True
            block = np.zeros((length, layout.row_words), np.int64)
            offsets = np.array([0, length])
            rows.append(Block(np.array([lane]), offsets, block, done, cut), cuts_gaps=True)
    drawn = index.random_episodes(6000, torch.Generator().manual_seed(0))
    counts = np.bincount(drawn, minlength=80)
    usable = [7, 27, 31, 40, 43]
    assert counts.sum() == counts[usable].sum()
    assert chisquare(counts[usable]).pvalue > 1e-4


def test_an_episode_ends_where_it_did_though_a_write_that_was_cut_off_went_on_with_it():
    index = EpisodeIndex(40)
    which = np.array([0])
    for length, is_cut, is_published in ((2, False, True), (5, False, False), (3, True, True)):
        offsets, flags = np.array([0, length]), np.zeros(length, bool)
        cut = flags.copy()
        cut[0] = is_cut
        at, slots = np.arange(length) + 2 * index.cursors[0], np.empty(length, np.int64)
        streams.enter(index.tables, which, offsets, at, flags, cut, slots)
        if is_published:
            streams.publish(index.tables, which, offsets)
    assert index.ahead(index.live_slots()).tolist() == [1, 0, 2, 1, 0]


def test_least_window_that_reaches_a_count():
    index = unequal_lanes()
    assert [index.window_of(c) for c in (1, 2, 3, 8, 9, 14, 99)] == [1, 1, 2, 4, 5, 10, 10]


def test_tree():
    starts = tree.level_starts(20)
    nodes = np.zeros(starts[-1])
    leaves = np.array([3, 17, 3, 9])
    tree.set_leaves(nodes, starts, False, leaves, np.array([9.0, 2.0, 1.0, 5.0]))
    assert nodes[0] == 8  # of equal leaves the last one counts
    for ranges, law in (([[], []], {3: 1, 9: 5, 17: 2}), ([[2, 12], [9, 20]], {3: 1, 17: 2})):
        drawn, weights = np.empty(8000, np.int64), np.empty(8000)
        within = np.array(ranges, np.int64).reshape(2, -1)
        total = tree.draw_leaves(nodes, starts, within, noise(8000), drawn, weights)
        assert total == sum(law.values())
        assert set(drawn.tolist()) == set(law)
        assert all(weights == [law[it] for it in drawn.tolist()])
        counts = np.bincount(drawn, minlength=20)[[*law]]
        assert chisquare(counts, 8000 * np.array([*law.values()]) / total).pvalue > 1e-4
    least = np.full(starts[-1], np.inf)
    tree.set_leaves(least, starts, True, leaves, np.array([9.0, 2.0, 1.0, 0.0]))
    assert tree.least_within(least, starts, np.empty((2, 0), np.int64)) == 1
    assert tree.least_within(least, starts, np.array([[4], [20]])) == 2


def test_folds():
    rewards = np.array([[[1.0], [2.0]], [[4.0], [np.inf]]])
    out = np.empty((2, 1))
    draws.fold(rewards, np.array([2, 1]), np.array([1.0, 0.5]), out)
    assert out.tolist() == [[3.0], [2.0]]
