"""Checks of the invariants of the tables of an episode index, in array operations.

Another process may be writing: steps that are evicted before a check ends are not checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CONTINUES, CURSOR, SPLIT, TAIL, Index, draws

__all__ = ["check", "check_bounds", "require", "retained_steps"]


def retained_steps(tables: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns lane, step and slot `[N]` of all live steps, and of the newest step of lanes without any.

    The next step of a lane continues the stream of its newest step, also if the newest step is evicted.

    Raises:
        RuntimeError: cursor and tail of a lane contradict each other.
    """
    cursors, tails = _bounds_of_lanes(tables)
    firsts = np.minimum(tails, np.maximum(cursors - 1, 0))
    counts = cursors - firsts
    slot = draws.slots_between(tables, firsts, cursors)
    step = np.arange(len(slot)) + (cursors - counts.cumsum()).repeat(counts)
    return np.arange(len(cursors)).repeat(counts), step, slot


def _bounds_of_lanes(tables: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns cursors and tails `[E]`; another process may be moving them."""
    index = Index(*tables)
    cursors, tails = index.lane_bounds[:, CURSOR].copy(), index.lane_bounds[:, TAIL].copy()
    is_valid = (tails >= 0) & (tails <= index.lane_bounds[:, CURSOR])
    if not (is_valid & (cursors - tails <= index.num_steps)).all():
        raise RuntimeError(
            f"the index is damaged: a tail is not within {index.num_steps} steps of its cursor."
        )
    return cursors, tails


def require(
    name: str, is_true: np.ndarray, tables: Any, lane: np.ndarray, step: np.ndarray
) -> None:
    """Raises a RuntimeError if an invariant is false `[N]` for a step that is still stored."""
    violations = np.flatnonzero(~is_true)
    lane_bounds = Index(*tables).lane_bounds[lane[violations]]
    if (step[violations] >= np.minimum(lane_bounds[:, TAIL], lane_bounds[:, CURSOR] - 1)).any():
        raise RuntimeError(f"the index is damaged: {name}.")


def check_bounds(tables: Any) -> None:
    """Raises a RuntimeError if reading a slot could exceed the tables or the entries."""
    index = Index(*tables)
    where, num_entries = index.where, len(index.lane_bounds) * index.num_entries
    _bounds_of_lanes(tables)
    is_valid = ((where == 0) | (where >= index.stack - 1)) & (where < num_entries - 1)
    if not (is_valid & (index.episode >= 0) & (index.episode <= index.num_steps)).all():
        raise RuntimeError("the index is damaged: an entry or an episode is out of range.")


def check(tables: Any) -> None:
    """Raises a RuntimeError if the tables of an index contradict one another."""
    check_bounds(tables)
    where, episode, ends, spans, _, T, M, k, _, depth = Index(*tables)
    lane, step, slot = retained_steps(tables)
    position = where[slot] - lane * M
    number, end = episode[slot], ends[slot]
    is_inside = (position >= k - 1) & (position < M - 1) & (end <= SPLIT)
    require("an entry is outside of its lane", is_inside, tables, lane, step)
    first, last = spans[lane, number].T
    is_in_span = (first >= 0) & (first <= step) & (step <= last)
    require("a step is outside of its episode", is_in_span, tables, lane, step)
    # Pairs of a step and the next step of its lane.
    is_pair, begins = lane[1:] == lane[:-1], (first == step)[1:]
    continues = (number[1:] == number[:-1]) & (end[:-1] == CONTINUES)
    is_next = ((number[1:] - number[:-1]) % (T + 1) == 1) & (last == step)[:-1]
    is_ordered = ~is_pair | np.where(begins, is_next, continues)
    require(
        "an episode does not follow the end of the previous one", is_ordered, tables, lane, step
    )
    distance, is_first = np.diff(position), position[1:] == k - 1
    is_adjacent = ~is_pair | (distance == 1) | (distance == k + 1) | is_first
    require("the entries of a lane are not consecutive", is_adjacent, tables, lane, step)
    # Entries wrap to the beginning of their lane at most once, and end before the oldest entry.
    wraps = np.append(0, (is_pair & is_first).cumsum())
    oldest = np.flatnonzero(np.append(True, ~is_pair)[: len(lane)])
    newest = np.append(oldest[1:], len(lane))[: len(oldest)] - 1
    num_wraps = wraps[newest] - wraps[oldest]
    num_entries = position[newest] - position[oldest] + num_wraps * M + depth
    is_disjoint = (num_wraps == 0) | (num_entries < M)
    require("two steps share an entry", is_disjoint, tables, lane[oldest], step[oldest])
