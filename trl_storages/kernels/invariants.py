"""Checks of the invariants of the tables of an episode index, in array operations.

Another process may be writing: steps that are evicted before a check ends are not checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CONTINUES, CURSOR, SPLIT, TAIL, draws

__all__ = ["check", "check_bounds", "require", "retained_steps"]


def retained_steps(index: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lane, step and slot `[N]` of all live steps, and of the newest step of lanes without any.

    The next step of a lane continues the stream of its newest step, also if the newest step is evicted.

    Raises:
        RuntimeError: cursor and tail of a lane contradict each other.
    """
    lanes, (cursors, tails) = index[4], _bounds_of_lanes(index)
    firsts = np.minimum(tails, np.maximum(cursors - 1, 0))
    counts = cursors - firsts
    slot = draws.slots_between(index, firsts, cursors)
    step = np.arange(len(slot)) + (cursors - counts.cumsum()).repeat(counts)
    return np.arange(len(lanes)).repeat(counts), step, slot


def _bounds_of_lanes(index: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns cursors and tails `[E]`; another process may be moving them."""
    lanes, T = index[4:6]
    cursors = lanes[:, CURSOR].copy()
    tails = lanes[:, TAIL].copy()
    is_valid = (tails >= 0) & (tails <= lanes[:, CURSOR]) & (cursors - tails <= T)
    if not is_valid.all():
        raise RuntimeError(f"the index is damaged: a tail is not within {T} steps of its cursor.")
    return cursors, tails


def require(name: str, is_true: np.ndarray, index: Any, lane: np.ndarray, step: np.ndarray) -> None:
    """Raises a RuntimeError if an invariant is false `[N]` for a step that is still stored."""
    violations = np.flatnonzero(~is_true)
    lanes = index[4][lane[violations]]
    if (step[violations] >= np.minimum(lanes[:, TAIL], lanes[:, CURSOR] - 1)).any():
        raise RuntimeError(f"the index is damaged: {name}.")


def check_bounds(index: Any) -> None:
    """Raises a RuntimeError if reading a slot could exceed the tables or the entries."""
    where, episode, _, _, lanes, T, M, k, _, _ = index
    _bounds_of_lanes(index)
    is_valid = ((where == 0) | (where >= k - 1)) & (where < len(lanes) * M - 1)
    if not (is_valid & (episode >= 0) & (episode <= T)).all():
        raise RuntimeError("the index is damaged: an entry or an episode is out of range.")


def check(index: Any) -> None:
    """Raises a RuntimeError if the tables of an index contradict one another."""
    check_bounds(index)
    where, episode, ends, spans, _, T, M, k, _, depth = index
    lane, step, slot = retained_steps(index)
    position, number, end = where[slot] - lane * M, episode[slot], ends[slot]
    is_inside = (position >= k - 1) & (position < M - 1) & (end <= SPLIT)
    require("an entry is outside of its lane", is_inside, index, lane, step)
    first, last = spans[lane, number].T
    is_in_span = (first >= 0) & (first <= step) & (step <= last)
    require("a step is outside of its episode", is_in_span, index, lane, step)
    # Pairs of a step and the next step of its lane.
    is_pair, begins = lane[1:] == lane[:-1], (first == step)[1:]
    continues = (number[1:] == number[:-1]) & (end[:-1] == CONTINUES)
    is_next = ((number[1:] - number[:-1]) % (T + 1) == 1) & (last == step)[:-1]
    is_ordered = ~is_pair | np.where(begins, is_next, continues)
    require("an episode does not follow the end of the previous one", is_ordered, index, lane, step)
    distance, is_first = np.diff(position), position[1:] == k - 1
    is_adjacent = ~is_pair | (distance == 1) | (distance == k + 1) | is_first
    require("the entries of a lane are not consecutive", is_adjacent, index, lane, step)
    # Entries wrap to the beginning of their lane at most once, and end before the oldest entry.
    wraps = np.append(0, (is_pair & is_first).cumsum())
    oldest = np.flatnonzero(np.append(True, ~is_pair)[: len(lane)])
    newest = np.append(oldest[1:], len(lane))[: len(oldest)] - 1
    num_wraps = wraps[newest] - wraps[oldest]
    num_entries = position[newest] - position[oldest] + num_wraps * M + depth
    is_disjoint = (num_wraps == 0) | (num_entries < M)
    require("two steps share an entry", is_disjoint, index, lane[oldest], step[oldest])
