"""Marks of entries in files: which step an entry holds, and checks that notice a mixture of pages.

A mark of an entry is three words:

- the step and its flags, `(step + 1) << 2 | begins << 1 | done`; 0 of an observation alone;
- a check of its observation;
- a check of its step with number and flags, and of the checks of the observations that it needs: its own
  and the k - 1 before, and the next one.

The check of words x_w is

    finish(start + Σ_w c_w f(x_w)),    f(x) = x ^ (x >>> 31)

modulo 2^64, with odd constants c and `finish` the last steps of splitmix64. Without f, changes of the
uppermost bits of two words would cancel out.

Letters as in `kernels.streams`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels.compile import fence, inlined, loop
from trl_storages.kernels.words import CURSOR, DONE, FIRST, LANES, LAST, SAME, STEPS, TAIL

__all__ = [
    "NUMBER",
    "NUM_WORDS",
    "OF_OBSERVATION",
    "OF_STEP",
    "factors",
    "first_wrong",
    "mark",
    "rows_of",
]

NUMBER, OF_OBSERVATION, OF_STEP = range(3)
NUM_WORDS = 3
_START = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# `>>` fills with the sign: the masks make it fill with zeros.
_BY_27, _BY_30, _BY_31 = 2**37 - 1, 2**34 - 1, 2**33 - 1
_MOST = 2**60


def factors(entry_words: int, frames: int) -> np.ndarray:
    """Returns the constants c: for the words of an entry, the number, and the checks of observations."""
    mixed = np.arange(1, entry_words + frames + 3, dtype=np.uint64) * np.uint64(_START + 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST_FACTOR + 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_FACTOR + 2**64)
    found: np.ndarray = (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)
    return found


@inlined
def _folded(word: int) -> int:
    return word ^ (word >> 31 & _BY_31)


@inlined
def _finished(total: int) -> int:
    total = (total ^ (total >> 30 & _BY_30)) * _FIRST_FACTOR
    total = (total ^ (total >> 27 & _BY_27)) * _SECOND_FACTOR
    return total ^ (total >> 31 & _BY_31)


@loop
def _of_observation(entries: Any, p: int, size: int, c: Any) -> int:
    """Returns the check of the observation of entry p, of `size` words."""
    total = _START
    for w in range(size):
        total += c[w] * _folded(entries[p, w])
    return _finished(total)


@loop
def _of_step(entries: Any, marks: Any, p: int, size: int, k: int, number: int, c: Any) -> int:
    """Returns the check of the step in entry p, behind `size` words of observation."""
    width = entries.shape[1]
    total = _START + c[width] * _folded(number)
    for j in range(k + 1):
        total += c[width + 1 + j] * _folded(marks[p - (k - 1) + j, OF_OBSERVATION])
    for w in range(size, width):
        total += c[w] * _folded(entries[p, w])
    return _finished(total)


@loop
def mark(
    index: Any,
    entries: Any,
    size: int,
    marked: Any,
    which: Any,
    offsets: Any,
    how: Any,
    at: Any,
    slots: Any,
) -> None:
    """Marks the entries of a block that was entered and copied, before it is published.

    Args:
        index: as in `kernels.streams`.
        entries: `[E M, W]`.
        size: O.
        marked: the marks `[E M, 3]`, and c.
        which: `[L]` lanes.
        offsets: `[L + 1]`, where the rows of each begin.
        how: `[N]` how each row compares with what its stream ends with.
        at: `[N]` its entry.
        slots: `[N]` its slot.
    """
    _, episode, ends, spans, lanes, _, _, k = index
    marks, c = marked
    for m in range(len(which)):
        e, step = which[m], lanes[which[m], CURSOR]
        for i in range(offsets[m], offsets[m + 1]):
            p = at[i]
            # Observations that were there are marked already.
            for q in range(p - (k - 1) if how[i] != SAME else p + 1, p + 2):
                marks[q, NUMBER] = marks[q, OF_STEP] = 0
                marks[q, OF_OBSERVATION] = _of_observation(entries, q, size, c)
            begins = spans[e, episode[slots[i]], FIRST] == step
            number = (step + 1) << 2 | (2 if begins else 0) | (1 if ends[slots[i]] == DONE else 0)
            marks[p, OF_STEP] = _of_step(entries, marks, p, size, k, number, c)
            marks[p, NUMBER] = number
            step += 1


@loop
def rows_of(entries: Any, size: int, k: int, M: int, marked: Any, steps: Any) -> None:
    """Finds the step of the whole row in each entry, `[E M]`, -1 where there is none."""
    marks, c = marked
    seen = np.zeros(len(marks), np.uint8)  # whether an observation is whole, 1, or not, 2
    for p in range(len(marks)):
        steps[p] = -1
        number = marks[p, NUMBER]
        if not 0 < number >> 2 < _MOST or p % M < k - 1 or p % M + 1 >= M:
            continue
        whole = _of_step(entries, marks, p, size, k, number, c) == marks[p, OF_STEP]
        for q in range(p - (k - 1), p + 2):
            if whole and seen[q] == 0:
                same = _of_observation(entries, q, size, c) == marks[q, OF_OBSERVATION]
                seen[q] = 1 if same else 2
            whole = whole and seen[q] == 1
        if whole:
            steps[p] = (number >> 2) - 1


@loop
def _is_right(
    index: Any,
    entries: Any,
    size: int,
    marked: Any,
    reads_rows: bool,
    e: int,
    s: int,
    begin: int,
    cursor: int,
) -> bool:
    """Returns whether step s of lane e is whole, and its place in the index is as it can be."""
    where, episode, ends, spans, _, T, M, k = index
    marks, c = marked
    slot, before = e * T + s % T, e * T + (s - 1) % T
    p, number = where[slot], episode[slot]
    if not (e * M + k - 1 <= p < e * M + M - 1 and 0 <= number <= T and ends[slot] <= 2):
        return False
    first, last = spans[e, number, FIRST], min(spans[e, number, LAST], cursor - 1)
    if not 0 <= first <= s <= last:
        return False
    is_next = False
    if s > begin:
        if (first == s) != (episode[before] != number):
            return False
        if first == s and spans[e, episode[before], LAST] != s - 1:
            return False
        if first == s and number != (episode[before] + 1) % (T + 1):
            return False
        if first < s and ends[before] == DONE:
            return False
        # Entries lie one behind another, but for one return to the beginning of the lane.
        oldest, previous = where[e * T + begin % T], where[before]
        is_next = p == previous + 1
        if previous >= oldest:
            if p <= previous and p + 1 >= oldest - (k - 1):
                return False
        elif p <= previous or p + 1 >= oldest - (k - 1):
            return False
    sought = (s + 1) << 2 | (2 if first == s else 0) | (1 if ends[slot] == DONE else 0)
    if marks[p, NUMBER] != sought or (s == cursor - 1 and last != s):
        return False
    if not reads_rows:
        return True
    # What a step needs of the one before was seen with that.
    for q in range(p + 1 if is_next else p - (k - 1), p + 2):
        if _of_observation(entries, q, size, c) != marks[q, OF_OBSERVATION]:
            return False
    return _of_step(entries, marks, p, size, k, sought, c) == marks[p, OF_STEP]


@loop
def first_wrong(index: Any, entries: Any, size: int, marked: Any, reads_rows: bool) -> int:
    """Returns the first lane in which a live row, or its place in the index, is damaged; -1 if none is.

    A writer may go on meanwhile. Without `reads_rows` the index alone is checked, with the numbers of
    the steps.
    """
    lanes, T = index[LANES], index[STEPS]
    for e in range(len(lanes)):
        cursor = lanes[e, CURSOR]
        fence()
        tail = lanes[e, TAIL]
        if not (0 <= cursor < _MOST and tail >= 0 and cursor - tail <= T):
            return e
        fence()
        if tail > cursor == lanes[e, CURSOR]:
            return e
        # The stream goes on from the last step, though it may not be live.
        begin = s = max(min(tail, cursor - 1), 0)
        while s < cursor:
            if _is_right(index, entries, size, marked, reads_rows, e, s, begin, cursor):
                s += 1
                continue
            fence()
            tail = min(lanes[e, TAIL], lanes[e, CURSOR] - 1)
            if tail <= begin:
                return e
            # Some of what was looked at gave way meanwhile.
            begin, s = tail, max(s, tail)
    return -1
