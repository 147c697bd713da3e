"""Which lane each row goes to.

Letters: E lanes (environments), L of them that are written, T steps of each, N rows, U trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np

from trl_storages.validation import counted

__all__ = ["Routing", "all_lanes", "in_lane_order", "num_steps_of", "route"]


class Routing(NamedTuple):
    """Where rows go, lane by lane."""

    which: np.ndarray
    """`[L]` the lanes, each once."""
    offsets: np.ndarray
    """`[L + 1]` where the rows of each begin."""
    order: np.ndarray | None
    """`[N]` the row at each place; None if they are in order."""


def in_lane_order(which: np.ndarray, steps: int) -> Routing:
    """Returns the places of rows `[L, T]` of these lanes."""
    return Routing(which, np.arange(len(which) + 1) * steps, None)


def num_steps_of(batch: Sequence[int], num_lanes: int) -> int:
    """Returns T of a batch `[*L, T]`, or of one step of each lane `[*L]`; L may be several dimensions.

    Raises:
        ValueError: the batch has another shape.
    """
    if prod(batch) == num_lanes:
        return 1
    if batch and prod(batch[:-1]) == num_lanes:
        return batch[-1]
    raise ValueError(
        f"a batch for {counted(num_lanes, 'lane')} must be [{num_lanes}, T] (time last) or [{num_lanes}] "
        f"(one step of each), got {[*batch]}: make the storage with the num_envs of the data, name "
        "lanes=[...], or pass rows [N] with the numbers of their trajectories (traj_key)."
    )


@lru_cache
def all_lanes(num_envs: int, steps: int) -> Routing:
    """Returns the places of rows `[E, T]`."""
    return in_lane_order(np.arange(num_envs), steps)


def route(
    trajectories: np.ndarray,
    done: np.ndarray,
    *,
    held: np.ndarray,
    is_open: np.ndarray,
    last_written: np.ndarray,
) -> Routing:
    """Assigns each trajectory of a flat batch to one lane.

    A trajectory continues in the lane that holds it. A new one goes to a lane whose episode has ended,
    if possible the one where it would be if the batch were `[E, T]`, flattened; else to the least
    recently written lane, whose episode is cut.

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
    number, first, unit = np.unique(trajectories, return_index=True, return_inverse=True)
    stays_open = ~done[unit.argsort(kind="stable")[np.bincount(unit).cumsum() - 1]]
    holder = {int(held[lane]): lane for lane in np.flatnonzero(is_open)[::-1].tolist()}
    is_new = np.array([name not in holder for name in number.tolist()])
    # In a lane, what it holds goes on first, and what stays open comes last.
    order = np.lexsort((first, stays_open, is_new))
    num_envs = len(held)
    share = -(-len(trajectories) // num_envs)
    is_taken = [False] * num_envs
    # What a new one costs: nothing where the episode is over; else rather what was written long ago.
    cost = np.where(is_open, last_written, -1).tolist()
    # The lanes by cost; what a lane cost before is passed over.
    cheapest = [*zip(cost, range(num_envs), strict=True)]
    heapify(cheapest)
    lane_of = np.empty(len(number), np.int64)
    for at in order.tolist():
        lane = holder.get(int(number[at]))
        if lane is None:
            while cheapest and (is_taken[cheapest[0][1]] or cost[cheapest[0][1]] != cheapest[0][0]):
                heappop(cheapest)
            if cheapest:
                least, lane = cheapest[0]
                own = int(first[at]) // share
                lane = own if not is_taken[own] and cost[own] == least else lane
        if lane is None:
            need = max(int(stays_open.sum()), num_envs + 1)
            raise ValueError(
                f"{need} trajectories that run side by side need as many lanes, got {num_envs}: make "
                f"the storage with num_envs={need}, or end those that are over with a `done`."
            )
        lane_of[at], cost[lane], is_taken[lane] = lane, -1, bool(stays_open[at])
        if not is_taken[lane]:
            heappush(cheapest, (-1, lane))
    turn = order.argsort()
    count = np.bincount(lane_of[unit], minlength=num_envs)
    which = np.flatnonzero(count)
    rows = np.lexsort((turn[unit], lane_of[unit]))
    return Routing(which, np.concatenate([[0], count[which].cumsum()]), rows)
