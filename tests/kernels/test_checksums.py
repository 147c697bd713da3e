"""Marks of entries: word for word what is documented, as directories keep them for years."""

import numpy as np
import pytest

from trl_storages.kernels import DISCONTINUITY, DONE, SEPARATE, SHARED, checksums

ALL = 2**64 - 1
STRIDE = 0x9E3779B97F4A7C15
# Entries, their words, those of observations.
M, W = 12, 4


def finish(z):
    """The last steps of splitmix64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ALL
    z = (z ^ z >> 27) * 0x94D049BB133111EB & ALL
    return z ^ z >> 31


def folded(x):
    return x ^ x >> 31


def expected(entries, size, k, numbers):
    """The marks of entries whose first words are given, 0 of those without a step."""
    c = [finish(STRIDE * (i + 1) & ALL) | 1 for i in range(W + k + 2)]
    words = [[int(word) & ALL for word in entry] for entry in entries]
    seen = [finish((STRIDE + sum(c[w] * folded(it[w]) for w in range(size))) & ALL) for it in words]
    marks = []
    for p, number in enumerate(numbers):
        needed = seen[max(p - k + 1, 0) : p + 2]
        total = STRIDE + c[W] * folded(number)
        total += sum(c[W + 1 + j] * folded(check) for j, check in enumerate(needed))
        total += sum(c[w] * folded(words[p][w]) for w in range(size, W))
        marks.append([number, seen[p], finish(total & ALL) if number else 0])
    return marks


def test_constants():
    """The numbers of splitmix64 for the seed 0, the first of which are published, made odd."""
    numbers = [finish(STRIDE * (i + 1) & ALL) for i in range(W + 3)]
    assert numbers[:2] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert checksums.multipliers(W, 1).view(np.uint64).tolist() == [it | 1 for it in numbers]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 3])
class TestMarks:
    """Of two steps of a stream, a third after a gap, and before them entries that were others."""

    def marked(self, size, k):
        rng = np.random.default_rng(0)
        entries = rng.integers(-(2**63), 2**63 - 1, (M, W))
        marks, c = np.full((M, checksums.NUM_WORDS), 7), checksums.multipliers(W, k)
        at, how = (
            np.array([k, k + 1, 2 * k + 3]),
            np.array([SEPARATE, SHARED, DISCONTINUITY], np.uint8),
        )
        numbers = [(5 + 1) << 2 | 2, (6 + 1) << 2 | 1, (7 + 1) << 2]
        checksums.mark(entries, size, k, (marks, c), how, at, np.array(numbers))
        return entries, (marks, c), at, dict(zip(at.tolist(), numbers, strict=True))

    def test_are_as_documented(self, size, k):
        entries, (marks, _), at, numbers = self.marked(size, k)
        right = np.array(
            expected(entries, size, k, [numbers.get(p, 0) for p in range(M)]), np.uint64
        )
        written = np.zeros(M, bool)
        for p in at:
            written[p - k + 1 : p + 2] = True
        assert marks[written].view(np.uint64).tolist() == right[written].tolist()
        assert (marks[~written] == 7).all()

    def test_say_whether_steps_are_whole(self, size, k):
        entries, marked, at, _ = self.marked(size, k)

        def are_intact():
            whole = np.zeros(len(at), bool)
            checksums.are_intact(entries, size, k, marked, at, whole)
            return whole.tolist()

        assert are_intact() == [True] * 3
        for words, needs in ((entries, np.arange(W) < size), (marked[0], np.arange(3) == 1)):
            for p, w in np.ndindex(*words.shape):
                its = [bool(q - k < p < q + 2) if needs[w] else p == q for q in at.tolist()]
                words[p, w] ^= 1 << 62
                assert are_intact() == [not it for it in its], (p, w)
                words[p, w] ^= 1 << 62


def test_numbers_of_steps():
    """Of two lanes of four slots: the step, whether its episode begins there, and whether it is done."""
    spans = np.array([[[3, 4], [5, 5], [0, 0], [0, 0], [0, 0]], [[0, 1], [0, 0]] + [[2, 9]] * 3])
    episode, ends = np.array([0, 1, 0, 0, 0, 0, 2, 2]), np.zeros(8, np.uint8)
    ends[[1, 5]] = DONE
    index = None, episode, ends, spans, None, 4, None, 1, None, 1
    slots, steps = np.array([3, 0, 1, 5, 6, 7]), np.array([3, 4, 5, 1, 2, 3])
    found = checksums.numbers(index, slots, steps)
    assert [number >> 2 for number in found.tolist()] == (steps + 1).tolist()
    numbers, begins, done = checksums.steps_of(found)
    assert numbers.tolist() == steps.tolist()
    assert begins.tolist() == [True, False, True, False, True, False]
    assert done.tolist() == [False, False, True, True, False, False]
    assert checksums.number(0, False, False) == 4
    assert checksums.steps_of(np.zeros(1, np.int64))[0] == -1  # of an observation alone
