"""What each row on disk says of itself: its step, whether an episode begins or ends, a checksum.

Letters: n rows, W words a row.
"""

from __future__ import annotations

import numpy as np

__all__ = ["begins", "checksums", "dones", "pack_marks", "steps"]

# Steps are counted from 1 in a mark, so that 0 says that nothing was ever written.


def pack_marks(steps: np.ndarray, begins: np.ndarray, dones: np.ndarray) -> np.ndarray:
    """Returns one word a row.

    Args:
        steps: int64, the step of the row in its lane.
        begins: bool, whether the row is the first of its episode.
        dones: bool, whether it is the last.

    >>> mark = pack_marks(np.array([7]), np.array([True]), np.array([False]))
    >>> steps(mark), begins(mark), dones(mark)
    (array([7]), array([ True]), array([False]))
    """
    return (steps + 1) << 2 | begins.astype(np.int64) << 1 | dones


def steps(marks: np.ndarray) -> np.ndarray:
    """Returns the step of each row, -1 where nothing was written."""
    return (marks >> 2) - 1


def begins(marks: np.ndarray) -> np.ndarray:
    """Returns whether each row is the first of its episode."""
    return marks >> 1 & 1 == 1


def dones(marks: np.ndarray) -> np.ndarray:
    """Returns whether each row ended its episode."""
    return marks & 1 == 1


def checksums(rows: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Returns a checksum of each row and its mark: a sum weighted by odd numbers, modulo 2^64.

    Args:
        rows: `[n, W]` int64.
        marks: `[n]` int64.

    Returns:
        `[n]` int64. Any change of a single word changes it.
    """
    weights = _weights(rows.shape[1] + 1)
    return rows @ weights[1:] + marks * weights[0]


_WEIGHTS: dict[int, np.ndarray] = {}


def _weights(size: int) -> np.ndarray:
    """The first odd numbers of the splitmix64 sequence."""
    if size not in _WEIGHTS:
        with np.errstate(over="ignore"):
            mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        _WEIGHTS[size] = ((mixed ^ mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)
    return _WEIGHTS[size]
