"""Checksums of entries in files: they say which step an entry holds, and detect torn pages.

The checksums of an entry are three words:

- NUMBER, the step with its flags, `(step + 1) << 2 | begins << 1 | done`; 0 if the entry has no step;
- OBSERVATION, the checksum of the observation with its decoded frame;
- STEP, the checksum of the values of the step, of NUMBER, and of the OBSERVATION checksums that the step
  needs: of its own entry, the k - 1 entries before, and the next entry.

The checksum of words x_w is

    finish(start + Σ_w c_w f(x_w)),    f(x) = x ^ (x >>> 31)

modulo 2^64, with odd multipliers c and `finish` the last steps of splitmix64. Without f, changes of the
uppermost bits of two words would cancel out.

Loops receive `sums`, the pair of the checksums `[E M, 3]` and the multipliers c. `size` is the
number of words of an entry that its observation takes. Letters as in `kernels.entries`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import DONE, FIRST, SHARED, Index
from trl_storages.kernels.compile import inlined, loop

__all__ = [
    "NUMBER",
    "NUM_WORDS",
    "OBSERVATION",
    "STEP",
    "are_intact",
    "compute_observation_checksums",
    "multipliers",
    "observation_checksum",
    "step_number",
    "step_numbers",
    "steps_of",
    "write_checksums",
    "write_step_checksums",
]

NUMBER, OBSERVATION, STEP = range(3)
NUM_WORDS = 3
_START = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# `>>` fills with the sign: the masks make it fill with zeros.
_BY_27, _BY_30, _BY_31 = 2**37 - 1, 2**34 - 1, 2**33 - 1


def multipliers(entry_words: int, frames: int) -> np.ndarray:
    """Returns c: one multiplier for each word of an entry, for NUMBER, and for the observations."""
    mixed = np.arange(1, entry_words + frames + 3, dtype=np.uint64) * np.uint64(_START + 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST_FACTOR + 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_FACTOR + 2**64)
    return (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)


@inlined
def _mix(word: int) -> int:
    return word ^ (word >> 31 & _BY_31)


@inlined
def _finish(total: int) -> int:
    total = (total ^ (total >> 30 & _BY_30)) * _FIRST_FACTOR
    total = (total ^ (total >> 27 & _BY_27)) * _SECOND_FACTOR
    return total ^ (total >> 31 & _BY_31)


@inlined
def observation_checksum(frame: Any, entries: Any, p: int, first: int, size: int, c: Any) -> int:
    """Returns the checksum of a decoded frame, perhaps empty, and words `first` to `size` of entry p."""
    total = np.int64(_START)
    for w in range(len(frame)):
        total += c[w] * _mix(frame[w])
    for w in range(first, size):
        total += c[len(frame) + w - first] * _mix(entries[p, w])
    return _finish(total)


@inlined
def _step_checksum(
    entries: Any, checksums: Any, p: int, size: int, k: int, number: int, c: Any
) -> int:
    """Returns the checksum of the step in entry p."""
    width = entries.shape[1]
    total = _START + c[width] * _mix(number)
    for j in range(k + 1):
        total += c[width + 1 + j] * _mix(checksums[p - (k - 1) + j, OBSERVATION])
    for w in range(size, width):
        total += c[w] * _mix(entries[p, w])
    return _finish(total)


@inlined
def step_number(step: int, begins: bool, done: bool) -> int:
    """Returns the word NUMBER of a step."""
    return (step + 1) << 2 | (2 if begins else 0) | (1 if done else 0)


@loop
def step_numbers(tables: Any, slots: Any, steps: Any) -> Any:
    """Returns the words NUMBER `[N]` of some steps of an index."""
    index = Index(*tables)
    numbers = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        slot = slots[i]
        first = index.spans[slot // index.num_steps, index.episode[slot], FIRST]
        numbers[i] = step_number(steps[i], first == steps[i], index.ends[slot] == DONE)
    return numbers


@loop
def write_checksums(
    entries: Any, size: int, k: int, sums: Any, continuity: Any, entry: Any, numbers: Any
) -> None:
    """Writes the checksums of rows that were copied into their entries, before the rows are published.

    Args:
        entries: `[E M, W]`.
        size: O.
        k: frames a stack.
        sums: the checksums and c.
        continuity: `[N]` how each row compares with the end of its stream.
        entry: `[N]` the entry of each row.
        numbers: `[N]` the word NUMBER of each row.
    """
    checksums, c = sums
    for i in range(len(entry)):
        # A shared observation already has its checksum.
        begin = entry[i] + 1 if continuity[i] == SHARED else entry[i] - (k - 1)
        for q in range(begin, entry[i] + 2):
            checksums[q, NUMBER] = checksums[q, STEP] = 0
            checksums[q, OBSERVATION] = observation_checksum(entries[0, :0], entries, q, 0, size, c)
    write_step_checksums(entries, size, k, sums, entry, numbers)


@loop
def write_step_checksums(
    entries: Any, size: int, k: int, sums: Any, entry: Any, numbers: Any
) -> None:
    """Writes NUMBER and STEP of the steps in entries `[N]`, whose observations have checksums."""
    checksums, c = sums
    for i in range(len(entry)):
        p = entry[i]
        checksums[p, STEP] = _step_checksum(entries, checksums, p, size, k, numbers[i], c)
        checksums[p, NUMBER] = numbers[i]


@loop
def compute_observation_checksums(
    entries: Any, size: int, c: Any, needed: Any, computed: Any
) -> None:
    """Writes the OBSERVATION checksums of the entries `needed` `[n]` to `computed` `[E M]`."""
    for q in needed:
        computed[q] = observation_checksum(entries[0, :0], entries, q, 0, size, c)


@loop
def are_intact(
    entries: Any, size: int, k: int, sums: Any, entry: Any, computed: Any, intact: Any
) -> None:
    """Checks the steps in entries `[B]`, and their observations by the checksums computed from them."""
    checksums, c = sums
    for i in range(len(entry)):
        p = entry[i]
        number = checksums[p, NUMBER]
        intact[i] = checksums[p, STEP] == _step_checksum(entries, checksums, p, size, k, number, c)
        for q in range(p - (k - 1), p + 2):
            intact[i] &= computed[q] == checksums[q, OBSERVATION]


def steps_of(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the steps in words NUMBER, -1 for no step, and whether each begins and ends an episode."""
    return (numbers >> 2) - 1, numbers & 2 != 0, numbers & 1 != 0
