"""Loops prefetch exactly the memory that they read later."""

import numpy as np
import pytest

from trl_storages.index import EpisodeIndex
from trl_storages.kernels import SHARED, draws, entries, priority_tree

# The number of rows and of entries; words of an entry, of an observation, and before `next` values.
B, M, W, SEEN, ROOT = 50, 300, 5, 3, 4
SIZES = 0, SEEN, 0, SEEN, ROOT


@pytest.fixture
def prefetched(monkeypatch):
    """Returns the list of the prefetched byte ranges `(begin, end)` of loops that run as Python."""
    ranges = []
    EpisodeIndex(2).bounds(np.zeros(1, np.int64))  # compiled before `prefetch` is replaced

    def record(array, i, first=0, end=8):
        ranges.append(stretch(array, i, first, end))

    for module in (draws, entries, priority_tree):
        monkeypatch.setattr(module, "prefetch", record)
    return ranges


def stretch(array, i, first=0, end=8):
    start = array.ctypes.data + int(i) * array.strides[0]
    return start + first, start + end


def python(loop):
    return getattr(loop, "py_func", loop)


class TestEntries:
    rng = np.random.default_rng(0)
    entries, at, last = rng.integers(9, size=(M, W)), rng.permutation(M - 2)[:B], np.arange(B) + 9

    def test_gather_prefetches_rows(self, prefetched):
        out = np.empty((B, W + SEEN), np.int64)
        store = self.entries, SIZES, 1
        python(entries.gather)(store, self.at, self.last, out)
        both = zip(self.at, self.last, strict=True)
        its = ((p, 0, W * 8, q, ROOT * 8, (W + SEEN) * 8) for p, q in both)
        expected = [stretch(self.entries, *it[at : at + 3]) for it in its for at in (0, 3)]
        assert prefetched == expected

    def test_copy_in_prefetches_entries(self, prefetched):
        words, kinds = np.zeros((B, W + SEEN), np.int64), np.full(B, SHARED, np.uint8)
        stored = np.zeros_like(self.entries)
        python(entries.copy_in)((stored, SIZES, 1), words, kinds, self.at, 0, B)
        expected = [stretch(stored, p, 0, W * 8) for p in self.at]
        # The first entries are written at once.
        assert prefetched == expected[-len(prefetched) :]
        assert len(prefetched) > B // 4

    @pytest.mark.parametrize("shift", [0, 1])
    def test_take_and_paste_prefetch_the_field(self, prefetched, shift):
        elements = self.entries.view(np.uint32)
        expected = [stretch(elements, p + shift, 5 * 4, 8 * 4) for p in self.at]
        out, rows = np.empty((B, 1, 3), np.uint32), np.zeros((B, W + SEEN), np.int64)
        python(entries.take)(elements, self.at, shift, 5, out)
        assert prefetched == expected
        pasted = self.at, shift, 5, 3, np.ones(B, bool)
        python(entries.paste)(elements, *pasted, rows, np.array([2]))
        assert prefetched == expected * 2


class TestIndex:
    """An index of 70 steps in episodes of ten. The callers of the loops read what these prefetch."""

    def index(self):
        index, ends = EpisodeIndex(100), np.arange(70) % 10 == 9
        begins = np.arange(70) % 10 == 0
        index.restore_lane(0, np.arange(70), np.arange(70) + 1, begins, ends, first=0, tail=0)
        return index

    def test_draw_prefetches_slots(self, prefetched):
        index = self.index()
        slots = python(draws.draw)(index.tables, 100, np.arange(B) << 57)
        assert [*zip(prefetched[::2], prefetched[1::2], strict=True)] == [
            (stretch(index.episode, slot), stretch(index.where, slot)) for slot in slots
        ]

    def test_bounds_and_goals_prefetch_episodes_and_entries(self, prefetched):
        index, slots = self.index(), np.arange(B)
        python(draws.bounds)(index.tables, slots)
        spans = [stretch(index.spans[0], index.episode[slot]) for slot in slots]
        assert [it for it in prefetched if it in spans] == spans
        episodes = [it for it in prefetched if it not in spans]
        assert episodes == [stretch(index.episode, slot) for slot in slots][-len(episodes) :]
        assert len(episodes) > B // 2
        kinds, noise = np.full(B, draws.GOAL_KINDS["future"], np.uint8), np.arange(B) << 57
        goals = python(draws.goals)(index.tables, slots, noise, kinds, np.empty(0))
        # The ranges of `bounds` come first if `bounds` runs as Python too.
        assert prefetched[-B:] == [stretch(index.where, goal) for goal in goals]

    def test_draw_leaves_prefetches_children(self, prefetched):
        """They are the eight children of each visited node, except those of the root."""
        starts = priority_tree.level_starts(1000)
        sums, every = np.zeros(starts[-1]), np.arange(1000)
        priority_tree.set_leaves(sums, starts, False, every, np.ones(1000))
        leaves, weights = np.empty(B, np.int64), np.empty(B)
        noise, ranges = np.arange(B) << 57, priority_tree.every_leaf(starts)
        python(priority_tree.draw_leaves)(sums, starts, ranges, noise, leaves, weights)
        levels = [(2, leaves // 64), (3, leaves // 8), (4, leaves)]
        assert prefetched == [
            stretch(sums, starts[level] + node // 8 * 8)
            for level, nodes in levels
            for node in nodes
        ]
