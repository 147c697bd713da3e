"""Loops ask ahead for the memory that they read, all of it and no other."""

import numpy as np
import pytest

from trl_storages.index import EpisodeIndex
from trl_storages.kernels import SHARED, draws, entries, priority_tree

# Rows, and of entries their number, their words, those of observations, and before what is `next`.
B, M, W, SEEN, ROOT = 50, 300, 5, 3, 4


@pytest.fixture
def asked(monkeypatch):
    """What loops ask for that run as Python: where each stretch of bytes begins and ends."""
    found = []
    EpisodeIndex(2).bounds(np.zeros(1, np.int64))  # compiled with the real one

    def record(array, i, first=0, end=8):
        found.append(stretch(array, i, first, end))

    for module in (draws, entries, priority_tree):
        monkeypatch.setattr(module, "prefetch", record)
    return found


def stretch(array, i, first=0, end=8):
    start = array.ctypes.data + int(i) * array.strides[0]
    return start + first, start + end


def python(loop):
    return getattr(loop, "py_func", loop)


class TestEntries:
    rng = np.random.default_rng(0)
    entries, at, last = rng.integers(9, size=(M, W)), rng.permutation(M - 2)[:B], np.arange(B) + 9

    def test_whole_rows(self, asked):
        out = np.empty((B, W + SEEN), np.int64)
        python(entries.gather)(self.entries, (0, SEEN, 0, SEEN, ROOT), 1, self.at, self.last, out)
        both = zip(self.at, self.last, strict=True)
        its = ((p, 0, W * 8, q, ROOT * 8, (W + SEEN) * 8) for p, q in both)
        expected = [stretch(self.entries, *it[at : at + 3]) for it in its for at in (0, 3)]
        assert asked == expected

    def test_rows_that_are_written(self, asked):
        block, how = np.zeros((B, W + SEEN), np.int64), np.full(B, SHARED, np.uint8)
        stored = np.zeros_like(self.entries)
        python(entries.copy_in)(stored, (0, SEEN, 0, SEEN, ROOT), 1, block, how, self.at)
        expected = [stretch(stored, p, 0, W * 8) for p in self.at]
        # Those that come first are written at once.
        assert asked == expected[-len(asked) :]
        assert len(asked) > B // 4

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_a_field(self, asked, ahead):
        elements = self.entries.view(np.uint32)
        expected = [stretch(elements, p + ahead, 5 * 4, 8 * 4) for p in self.at]
        out, rows = np.empty((B, 1, 3), np.uint32), np.zeros((B, W + SEEN), np.int64)
        python(entries.take)(elements, self.at, ahead, 5, out)
        assert asked == expected
        pasted = self.at, ahead, 5, 3, np.ones(B, bool)
        python(entries.paste)(elements, *pasted, rows, np.array([2]))
        assert asked == expected * 2


class TestIndex:
    """Of 70 steps in episodes of ten; what is asked for of slots that are drawn is read afterwards."""

    def index(self):
        index, ends = EpisodeIndex(100), np.arange(70) % 10 == 9
        begins = np.arange(70) % 10 == 0
        index.restore_lane(0, np.arange(70), np.arange(70) + 1, begins, ends, first=0, tail=0)
        return index

    def test_draws(self, asked):
        index, slots = self.index(), np.empty(B, np.int64)
        python(draws.draw)(index.tables, 100, np.arange(B) << 57, slots)
        assert [*zip(asked[::2], asked[1::2], strict=True)] == [
            (stretch(index.episode, slot), stretch(index.where, slot)) for slot in slots
        ]

    def test_bounds_and_goals(self, asked):
        index, slots, goals = self.index(), np.arange(B), np.empty(B, np.int64)
        python(draws.bounds)(index.tables, slots)
        spans = [stretch(index.spans[0], index.episode[slot]) for slot in slots]
        assert [it for it in asked if it in spans] == spans
        episodes = [it for it in asked if it not in spans]
        assert episodes == [stretch(index.episode, slot) for slot in slots][-len(episodes) :]
        assert len(episodes) > B // 2
        kinds, noise = np.full(B, draws.GOAL_KINDS["future"], np.uint8), np.arange(B) << 57
        python(draws.goals)(index.tables, slots, noise, kinds, np.empty(0), goals)
        # Those of `bounds` come before, where that runs as Python too.
        assert asked[-B:] == [stretch(index.where, goal) for goal in goals]

    def test_a_tree(self, asked):
        """The eight children of each node that is come to, but for those of the root."""
        starts = priority_tree.level_starts(1000)
        sums, every = np.zeros(starts[-1]), np.arange(1000)
        priority_tree.set_leaves(sums, starts, False, every, np.ones(1000))
        leaves, weights = np.empty(B, np.int64), np.empty(B)
        noise, ranges = np.arange(B) << 57, priority_tree.every_leaf(starts)
        python(priority_tree.draw_leaves)(sums, starts, ranges, noise, leaves, weights)
        levels = [(2, leaves // 64), (3, leaves // 8), (4, leaves)]
        assert asked == [
            stretch(sums, starts[level] + node // 8 * 8)
            for level, nodes in levels
            for node in nodes
        ]
