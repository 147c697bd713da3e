"""The mark of a row on disk, which identifies its step, and its checksum.

Letters: n rows, W words of 8 bytes a row.

A mark is one word: bit 0 is set if there is a row, bit 1 if it begins an episode, bit 2 if it ends one
with `done`; the bits from 3 on are its step in its lane.

The checksum of words x_w, a mark and a slot is

    finish(START + Σ_w c_{w+2} f(x_w) + c_0 f(mark) + c_1 f(slot)),    f(x) = x ^ (x >>> 31)

modulo 2^64, with odd constants c_i = splitmix64(i + 1) | 1 and `finish` the last steps of splitmix64.
Without f, changes of the uppermost bits of two words, such as the signs of two numbers, would cancel out.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

__all__ = [
    "BEGINS",
    "ENDS",
    "FINISH",
    "INFINITY_BITS",
    "LOWER_HALF",
    "MOST_STAMP",
    "NAN_BITS",
    "NEGATIVE_ZERO_BITS",
    "ONE_BITS",
    "PRESENT",
    "STAMP_BIT",
    "STAMP_FACTOR",
    "START",
    "STEP_BIT",
    "factors",
    "is_of",
]

PRESENT, BEGINS, ENDS = 1, 2, 4
STEP_BIT = 3
LOWER_HALF = 2**32 - 1
#: Bit patterns of float32 numbers, as integers.
ONE_BITS, INFINITY_BITS, NAN_BITS, NEGATIVE_ZERO_BITS = 0x3F800000, 0x7F800000, 0x7FC00000, 2**31
#: Multiplicative hash of the step of a row to the 31 bits of its stamp.
STAMP_FACTOR, STAMP_BIT, MOST_STAMP = 0x9E3779B97F4A7C15 - 2**64, 33, 2**31 - 1
#: As int64: the golden ratio; and shift, mask and factor of each of splitmix64's last steps.
START = 0x9E3779B97F4A7C15 - 2**64
FINISH = (
    (30, 2**34 - 1, 0xBF58476D1CE4E5B9 - 2**64),
    (27, 2**37 - 1, 0x94D049BB133111EB - 2**64),
    (31, 2**33 - 1, 1),
)


@cache
def factors(num_words: int) -> np.ndarray:
    """Returns `[W + 2]` int64, the constants c of a checksum: for the mark, the slot, and the words."""
    mixed = np.arange(1, num_words + 3, dtype=np.uint64) * np.uint64(START + 2**64)
    for shift, _, factor in FINISH:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor % 2**64)
    found: np.ndarray = (mixed | np.uint64(1)).view(np.int64)
    return found


def is_of(marks: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Returns whether marks are those of rows with these steps, bool."""
    return (marks & PRESENT != 0) & (marks >> STEP_BIT == steps)
