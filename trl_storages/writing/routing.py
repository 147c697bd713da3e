"""Which lane each transition goes to.

Letters: E lanes (environments), L of them that are written, T steps of each, N transitions.
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
    """The lane of each transition: N transitions, sorted by lane, in time order in each lane."""

    lanes: np.ndarray
    """`[L]` the lanes that are written, each once."""
    offsets: np.ndarray
    """`[L + 1]` the transitions of `lanes[i]` are those from `offsets[i]` to `offsets[i + 1]`."""
    order: np.ndarray | None
    """`[N]` the rank in the data of each sorted transition; None if the data are already sorted."""


def in_lane_order(lanes: np.ndarray, num_steps: int) -> Routing:
    """Returns the routing of data `[L, T]` for these lanes."""
    return Routing(lanes, np.arange(len(lanes) + 1) * num_steps, None)


def num_steps_of(batch_size: Sequence[int], num_lanes: int) -> int:
    """Returns T of data `[*L, T]`, or 1 for one step of each lane `[*L]`; L may be several dimensions.

    Raises:
        ValueError: the data have another shape.
    """
    if prod(batch_size) == num_lanes:
        return 1
    if batch_size and prod(batch_size[:-1]) == num_lanes:
        return batch_size[-1]
    raise ValueError(
        f"a batch for {counted(num_lanes, 'lane')} must be [{num_lanes}, T] (time last) or [{num_lanes}] "
        f"(one step of each), got {[*batch_size]}. Create the replay buffer with the num_envs of the "
        "data, pass lanes=[...], or pass transitions [N] with trajectory ids (traj_key)."
    )


@lru_cache
def all_lanes(num_envs: int, num_steps: int) -> Routing:
    """Returns the routing of data `[E, T]`."""
    return in_lane_order(np.arange(num_envs), num_steps)


def route(
    trajectories: np.ndarray,
    done: np.ndarray,
    *,
    last_trajectories: np.ndarray,
    is_open: np.ndarray,
    written_at: np.ndarray,
) -> Routing:
    """Assigns each trajectory of a flat batch to one lane.

    A trajectory continues in the lane that holds its last transition. A new trajectory goes to a lane
    whose episode has ended, if possible to the lane that it would have if the batch were `[E, T]`,
    flattened. If no episode has ended, the new trajectory goes to the least recently written lane, whose
    episode is split.

    Args:
        trajectories: `[N]` integers, one number per trajectory; each trajectory is in time order.
        done: `[N]` bool, whether the episode ends with this transition.
        last_trajectories: `[E]` the number of the last trajectory of each lane.
        is_open: `[E]` bool, whether the episode of each lane continues.
        written_at: `[E]` when each lane was last written, by any clock.

    Returns:
        the routing of the transitions.

    Raises:
        ValueError: more trajectories stay open after the batch than there are lanes.

    >>> from numpy import array, zeros
    >>> lanes = {"last_trajectories": zeros(2), "is_open": zeros(2, bool), "written_at": zeros(2)}
    >>> route(array([4, 5, 4, 5]), zeros(4, bool), **lanes)
    Routing(lanes=array([0, 1]), offsets=array([0, 2, 4]), order=array([0, 2, 1, 3]))
    """
    numbers, firsts, units = np.unique(trajectories, return_index=True, return_inverse=True)
    stays_open = ~done[units.argsort(kind="stable")[np.bincount(units).cumsum() - 1]]
    lane_with = {
        int(last_trajectories[lane]): lane for lane in np.flatnonzero(is_open)[::-1].tolist()
    }
    is_new = np.array([number not in lane_with for number in numbers.tolist()])
    # In a lane the trajectory that it holds comes first, and a trajectory that stays open comes last.
    order = np.lexsort((firsts, stays_open, is_new))
    num_envs = len(last_trajectories)
    lane_share = -(-len(trajectories) // num_envs)
    is_taken = [False] * num_envs
    # The cost of a new trajectory: -1 if no episode is split, else the time of the last write.
    cost = np.where(is_open, written_at, -1).tolist()
    # The lanes by cost. Pairs with a former cost of their lane are skipped.
    cheapest = [*zip(cost, range(num_envs), strict=True)]
    heapify(cheapest)
    lane_of = np.empty(len(numbers), np.int64)
    for unit in order.tolist():
        lane = lane_with.get(int(numbers[unit]))
        if lane is None:
            while cheapest and (is_taken[cheapest[0][1]] or cost[cheapest[0][1]] != cheapest[0][0]):
                heappop(cheapest)
            if cheapest:
                minimum, lane = cheapest[0]
                flat_lane = int(firsts[unit]) // lane_share
                can_take = not is_taken[flat_lane] and cost[flat_lane] == minimum
                lane = flat_lane if can_take else lane
        if lane is None:
            num_open = max(int(stays_open.sum()), num_envs + 1)
            raise ValueError(
                f"{num_open} concurrent trajectories need as many lanes, got {num_envs}: create the "
                f"replay buffer with num_envs={num_open}, or set `done` where trajectories end."
            )
        lane_of[unit], cost[lane], is_taken[lane] = lane, -1, bool(stays_open[unit])
        if not is_taken[lane]:
            heappush(cheapest, (-1, lane))
    ranks = order.argsort()
    counts = np.bincount(lane_of[units], minlength=num_envs)
    lanes = np.flatnonzero(counts)
    sorted_ranks = np.lexsort((ranks[units], lane_of[units]))
    return Routing(lanes, np.concatenate([[0], counts[lanes].cumsum()]), sorted_ranks)
