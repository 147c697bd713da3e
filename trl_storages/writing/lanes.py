"""Which lane each row goes to.

Letters: E lanes (environments), L of them that are written, T steps of each, N rows, U trajectories.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

__all__ = ["Places", "all_lanes", "in_order", "route"]


class Places(NamedTuple):
    """Where rows go, lane by lane."""

    which: np.ndarray
    """`[L]` the lanes, in order."""
    offsets: np.ndarray
    """`[L + 1]` where the rows of each begin."""
    order: np.ndarray | None
    """`[N]` the row at each place; None if they are in order."""


def in_order(which: np.ndarray, steps: int) -> Places:
    """Returns the places of rows `[L, T]` of these lanes."""
    offsets, by_lane = np.arange(len(which) + 1) * steps, which.argsort()
    if (by_lane[1:] > by_lane[:-1]).all():
        return Places(which, offsets, None)
    order = by_lane[:, None] * steps + np.arange(steps)
    return Places(which[by_lane], offsets, order.reshape(-1))


@lru_cache
def all_lanes(num_envs: int, steps: int) -> Places:
    """Returns the places of rows `[E, T]`."""
    return in_order(np.arange(num_envs), steps)


def route(
    trajectories: np.ndarray,
    done: np.ndarray,
    *,
    held: np.ndarray,
    is_open: np.ndarray,
    last_written: np.ndarray,
) -> Places:
    """Assigns each trajectory of a flat batch to one lane.

    A trajectory continues in the lane that holds it. A new one goes to a lane whose episode has ended,
    else to the least recently written lane. Among ended lanes, it goes to that of the preceding
    trajectory in the batch while that lane has at most its share of the rows, else to the one with the
    fewest rows: so a flattened batch `[E, T]` fills the lanes as `[E, T]` does.

    Args:
        trajectories: `[N]` integers, one number a trajectory; the rows of each in time order.
        done: `[N]` bool, the episode ends with this row.
        held: `[E]` the number of the last trajectory of each lane.
        is_open: `[E]` bool, whether its episode is open.
        last_written: `[E]` when each lane was last written, by any clock.

    Returns:
        the places of the rows, of each lane in time order.

    Raises:
        ValueError: more trajectories stay open after the batch than there are lanes.

    >>> from numpy import array
    >>> two = {"held": array([0, 0]), "is_open": array([False, False]), "last_written": array([0, 0])}
    >>> route(array([4, 5, 4, 5]), array([False] * 4), **two)
    Places(which=array([0, 1]), offsets=array([0, 2, 4]), order=array([0, 2, 1, 3]))
    """
    number, first, of_row = np.unique(trajectories, return_index=True, return_inverse=True)
    # Rank trajectories by their first appearance.
    order = first.argsort()
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    unit = rank[of_row.reshape(-1)]
    size = np.bincount(unit)
    goes_on = ~done[unit.argsort(kind="stable")[size.cumsum() - 1]]
    number = number[order]
    if (num_open := int(goes_on.sum())) > len(held):
        raise ValueError(_too_many(num_open, len(held)))
    lane, place = _lanes(number, size, goes_on, held, is_open, last_written)

    # Order the rows of each lane by the place of their trajectory in it, then by time.
    turn = np.empty(len(number), np.int64)
    turn[np.lexsort((np.arange(len(number)), place, lane))] = np.arange(len(number))
    rows = turn[unit].argsort(kind="stable")
    count = np.bincount(lane, size, minlength=len(held)).astype(np.int64)
    which = np.flatnonzero(count)
    return Places(which, np.concatenate([[0], count[which].cumsum()]), rows)


def _lanes(
    number: np.ndarray,
    size: np.ndarray,
    goes_on: np.ndarray,
    held: np.ndarray,
    is_open: np.ndarray,
    last_written: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lane of each trajectory `[U]`, and its place there `[U]`.

    Args:
        number: `[U]` the numbers of the trajectories.
        size: `[U]` their rows in the batch.
        goes_on: `[U]` bool, whether they are still open after these.
        held: as in `route`.
        is_open: likewise.
        last_written: likewise.
    """
    num_envs, share = len(held), -(-int(size.sum()) // len(held))
    holders = {int(held[lane]): lane for lane in np.flatnonzero(is_open)[::-1].tolist()}
    rows = [0] * num_envs
    # Lanes whose open episode would be cut, and those that already have a last trajectory.
    is_cut, is_taken, is_held = is_open.tolist(), [False] * num_envs, [False] * num_envs
    lanes, places = np.full(len(number), -1), np.ones(len(number), np.int64)
    for at, name in enumerate(number.tolist()):
        lane = holders.get(name)
        if lane is not None:
            # It continues the lane's newest row, so it comes first.
            lanes[at], places[at] = lane, 0
            rows[lane] += int(size[at])
            is_cut[lane] = False
            is_taken[lane] = is_held[lane] = bool(goes_on[at])
    when = last_written.tolist()
    before = -1
    for at, (num_rows, stays_open) in enumerate(zip(size.tolist(), goes_on.tolist(), strict=True)):
        if lanes[at] < 0:
            # An ended trajectory may precede one that stays open, if that one is new too.
            barred = is_taken if stays_open else is_held
            free = [lane for lane in range(num_envs) if not barred[lane]]
            if not free:
                raise ValueError(_too_many(num_envs + 1, num_envs))
            is_next = before in free and not is_cut[before] and rows[before] + num_rows <= share
            if not is_next:
                before = min(
                    free, key=lambda e: (is_cut[e], when[e] if is_cut[e] else rows[e], when[e])
                )
            lanes[at], places[at] = before, 2 if stays_open else 1
            rows[before] += num_rows
            is_cut[before] = False
            is_taken[before] |= stays_open
        before = int(lanes[at])
    return lanes, places


def _too_many(num_trajectories: int, num_envs: int) -> str:
    return (
        f"{num_trajectories} trajectories that run side by side need as many lanes, got {num_envs}: make "
        f"the storage with num_envs={num_trajectories}, or end those that are over with a `done`."
    )
