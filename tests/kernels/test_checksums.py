"""Checksums of entries are word for word as documented, because directories keep them for years."""

import numpy as np
import pytest

from trl_storages.kernels import DISCONTINUITY, DONE, SEPARATE, SHARED, checksums

ALL = 2**64 - 1
STRIDE = 0x9E3779B97F4A7C15
# The number of entries, and of words of an entry.
M, W = 12, 4


def finish(z):
    """The last steps of splitmix64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ALL
    z = (z ^ z >> 27) * 0x94D049BB133111EB & ALL
    return z ^ z >> 31


def mix(x):
    return x ^ x >> 31


def expected(entries, size, k, numbers):
    """Returns the checksums of entries with these words NUMBER, 0 for an entry without a step."""
    c = [finish(STRIDE * (i + 1) & ALL) | 1 for i in range(W + k + 2)]
    words = [[int(word) & ALL for word in entry] for entry in entries]
    seen = [finish((STRIDE + sum(c[w] * mix(it[w]) for w in range(size))) & ALL) for it in words]
    checksums_of_entries = []
    for p, number in enumerate(numbers):
        needed = seen[max(p - k + 1, 0) : p + 2]
        total = STRIDE + c[W] * mix(number)
        total += sum(c[W + 1 + j] * mix(check) for j, check in enumerate(needed))
        total += sum(c[w] * mix(words[p][w]) for w in range(size, W))
        checksums_of_entries.append([number, seen[p], finish(total & ALL) if number else 0])
    return checksums_of_entries


def test_multipliers_are_odd_numbers_of_splitmix64():
    """The seed is 0; the first two numbers are published."""
    numbers = [finish(STRIDE * (i + 1) & ALL) for i in range(W + 3)]
    assert numbers[:2] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert checksums.multipliers(W, 1).view(np.uint64).tolist() == [it | 1 for it in numbers]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 3])
class TestChecksums:
    """Two consecutive steps, and a third after a discontinuity, among entries without steps."""

    def written(self, size, k):
        rng = np.random.default_rng(0)
        entries = rng.integers(-(2**63), 2**63 - 1, (M, W))
        table, c = np.full((M, checksums.NUM_WORDS), 7), checksums.multipliers(W, k)
        entry, continuity = (
            np.array([k, k + 1, 2 * k + 3]),
            np.array([SEPARATE, SHARED, DISCONTINUITY], np.uint8),
        )
        numbers = [(5 + 1) << 2 | 2, (6 + 1) << 2 | 1, (7 + 1) << 2]
        tables = table, c
        checksums.write_checksums(entries, size, k, tables, continuity, entry, np.array(numbers))
        return entries, tables, entry, dict(zip(entry.tolist(), numbers, strict=True))

    def test_are_as_documented(self, size, k):
        entries, (table, _), entry, numbers = self.written(size, k)
        right = np.array(
            expected(entries, size, k, [numbers.get(p, 0) for p in range(M)]), np.uint64
        )
        written = np.zeros(M, bool)
        for p in entry:
            written[p - k + 1 : p + 2] = True
        assert table[written].view(np.uint64).tolist() == right[written].tolist()
        assert (table[~written] == 7).all()

    def test_detect_each_changed_word(self, size, k):
        entries, tables, entry, _ = self.written(size, k)

        def are_intact():
            intact, computed = np.zeros(len(entry), bool), np.zeros(M, np.int64)
            needed = np.flatnonzero(np.isin(np.arange(M), entry[:, None] + np.arange(1 - k, 2)))
            checksums.compute_observation_checksums(entries, size, tables[1], needed, computed)
            checksums.are_intact(entries, size, k, tables, entry, computed, intact)
            return intact.tolist()

        assert are_intact() == [True] * 3
        for words, needs in ((entries, np.arange(W) < size), (tables[0], np.arange(3) == 1)):
            for p, w in np.ndindex(*words.shape):
                its = [bool(q - k < p < q + 2) if needs[w] else p == q for q in entry.tolist()]
                words[p, w] ^= 1 << 62
                assert are_intact() == [not it for it in its], (p, w)
                words[p, w] ^= 1 << 62


def test_step_numbers_contain_step_begin_and_done():
    """There are two lanes of four slots."""
    spans = np.array([[[3, 4], [5, 5], [0, 0], [0, 0], [0, 0]], [[0, 1], [0, 0]] + [[2, 9]] * 3])
    episode, ends = np.array([0, 1, 0, 0, 0, 0, 2, 2]), np.zeros(8, np.uint8)
    ends[[1, 5]] = DONE
    tables = None, episode, ends, spans, None, 4, None, 1, None, 1
    slots, steps = np.array([3, 0, 1, 5, 6, 7]), np.array([3, 4, 5, 1, 2, 3])
    words = checksums.step_numbers(tables, slots, steps)
    assert [number >> 2 for number in words.tolist()] == (steps + 1).tolist()
    numbers, begins, done = checksums.steps_of(words)
    assert numbers.tolist() == steps.tolist()
    assert begins.tolist() == [True, False, True, False, True, False]
    assert done.tolist() == [False, False, True, True, False, False]
    assert checksums.step_number(0, False, False) == 4
    assert checksums.steps_of(np.zeros(1, np.int64))[0] == -1  # an entry without a step
