"""Marks of entries in files: which step an entry holds, and checks that notice a mixture of pages.

A mark of an entry is three words:

- the step and its flags, `(step + 1) << 2 | begins << 1 | done`; 0 of an observation alone;
- a check of its observation, with its frame as it is decoded;
- a check of its step with number and flags, and of the checks of the observations that it needs: its own
  and the k - 1 before, and the next one.

The check of words x_w is

    finish(start + Σ_w c_w f(x_w)),    f(x) = x ^ (x >>> 31)

modulo 2^64, with odd constants c and `finish` the last steps of splitmix64. Without f, changes of the
uppermost bits of two words would cancel out.

Letters as in `kernels.entries`, and N rows, B entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import DONE, FIRST, SHARED
from trl_storages.kernels.compile import inlined, loop

__all__ = [
    "NUMBER",
    "NUM_WORDS",
    "OF_OBSERVATION",
    "OF_STEP",
    "are_intact",
    "are_marked",
    "mark",
    "mark_steps",
    "multipliers",
    "number",
    "numbers",
    "of_observation",
    "steps_of",
]

NUMBER, OF_OBSERVATION, OF_STEP = range(3)
NUM_WORDS = 3
_START = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# `>>` fills with the sign: the masks make it fill with zeros.
_BY_27, _BY_30, _BY_31 = 2**37 - 1, 2**34 - 1, 2**33 - 1


def multipliers(entry_words: int, frames: int) -> np.ndarray:
    """Returns the constants c: for the words of an entry, the number, and the checks of observations."""
    mixed = np.arange(1, entry_words + frames + 3, dtype=np.uint64) * np.uint64(_START + 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST_FACTOR + 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_FACTOR + 2**64)
    return (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)


@inlined
def _folded(word: int) -> int:
    return word ^ (word >> 31 & _BY_31)


@inlined
def _finished(total: int) -> int:
    total = (total ^ (total >> 30 & _BY_30)) * _FIRST_FACTOR
    total = (total ^ (total >> 27 & _BY_27)) * _SECOND_FACTOR
    return total ^ (total >> 31 & _BY_31)


@inlined
def of_observation(frame: Any, entries: Any, p: int, first: int, size: int, c: Any) -> int:
    """Returns the check of a decoded frame, if any, and of words `first` to `size` of entry p."""
    total = np.int64(_START)
    for w in range(len(frame)):
        total += c[w] * _folded(frame[w])
    for w in range(first, size):
        total += c[len(frame) + w - first] * _folded(entries[p, w])
    return _finished(total)


@inlined
def _of_step(entries: Any, marks: Any, p: int, size: int, k: int, number: int, c: Any) -> int:
    """Returns the check of the step in entry p, behind `size` words of observation."""
    width = entries.shape[1]
    total = _START + c[width] * _folded(number)
    for j in range(k + 1):
        total += c[width + 1 + j] * _folded(marks[p - (k - 1) + j, OF_OBSERVATION])
    for w in range(size, width):
        total += c[w] * _folded(entries[p, w])
    return _finished(total)


@inlined
def number(step: int, begins: bool, done: bool) -> int:
    """Returns the first word of the mark of a step."""
    return (step + 1) << 2 | (2 if begins else 0) | (1 if done else 0)


@loop
def numbers(index: Any, slots: Any, steps: Any) -> Any:
    """Returns the first words of the marks of some steps of an index, `[N]`."""
    _, episode, ends, spans, _, T, _, _, _, _ = index
    found = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        begins = spans[slots[i] // T, episode[slots[i]], FIRST] == steps[i]
        found[i] = number(steps[i], begins, ends[slots[i]] == DONE)
    return found


@loop
def mark(entries: Any, size: int, k: int, marked: Any, how: Any, at: Any, numbers: Any) -> None:
    """Marks the entries of rows that were copied, before they are published.

    Args:
        entries: `[E M, W]`.
        size: O.
        k: frames a stack.
        marked: the marks `[E M, 3]`, and c.
        how: `[N]` how each row compares with what its stream ends with.
        at: `[N]` its entry.
        numbers: `[N]` the first word of its mark.
    """
    marks, c = marked
    for i in range(len(at)):
        # Observations that were there are marked already.
        for q in range(at[i] - (k - 1) if how[i] != SHARED else at[i] + 1, at[i] + 2):
            marks[q, NUMBER] = marks[q, OF_STEP] = 0
            marks[q, OF_OBSERVATION] = of_observation(entries[0, :0], entries, q, 0, size, c)
    mark_steps(entries, size, k, marked, at, numbers)


@loop
def mark_steps(entries: Any, size: int, k: int, marked: Any, at: Any, numbers: Any) -> None:
    """Marks the steps in entries `at` `[N]`, whose observations are marked; see `mark`."""
    marks, c = marked
    for i in range(len(at)):
        marks[at[i], OF_STEP] = _of_step(entries, marks, at[i], size, k, numbers[i], c)
        marks[at[i], NUMBER] = numbers[i]


@loop
def are_marked(entries: Any, size: int, k: int, marked: Any, at: Any, found: Any) -> None:
    """Finds whether the step in each of some entries `at` `[B]` is whole, if its observations are."""
    marks, c = marked
    for i in range(len(at)):
        check = _of_step(entries, marks, at[i], size, k, marks[at[i], NUMBER], c)
        found[i] = check == marks[at[i], OF_STEP]


@loop
def are_intact(entries: Any, size: int, k: int, marked: Any, at: Any, whole: Any) -> None:
    """Finds whether the step in each of some entries `at` `[B]` is whole, with what it needs."""
    marks, c = marked
    seen = np.zeros(len(marks), np.uint8)  # whether an observation is whole, 1, or not, 2
    are_marked(entries, size, k, marked, at, whole)
    for i in range(len(at)):
        p, same = at[i], whole[i]
        for q in range(p - (k - 1), p + 2):
            if same and seen[q] == 0:
                check = of_observation(entries[0, :0], entries, q, 0, size, c)
                seen[q] = 1 if check == marks[q, OF_OBSERVATION] else 2
            same = same and seen[q] == 1
        whole[i] = same


def steps_of(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns which steps the numbers of marks say, -1 of none, and whether each begins and is done."""
    return (numbers >> 2) - 1, numbers & 2 != 0, numbers & 1 != 0
