"""Which lane each transition goes to, and notes on each lane.

Letters: E lanes (environments), L of them that are written, T steps of each, N transitions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import prod
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

import numpy as np

from trl_storages.entries.arena import Arena
from trl_storages.entries.layout import Block
from trl_storages.validation import counted

__all__ = ["LaneNotes", "Routing", "in_lane_order", "route"]

_NEVER = np.iinfo(np.int64).max


class Routing(NamedTuple):
    """The lane of each transition: N transitions, sorted by lane, in time order in each lane."""

    lanes: np.ndarray
    """`[L]` the lanes that are written, each once."""
    offsets: np.ndarray
    """`[L + 1]` the transitions of `lanes[i]` are those from `offsets[i]` to `offsets[i + 1]`."""
    order: np.ndarray | None
    """`[N]` the rank in the data of each sorted transition; None if the data are already sorted."""


@lru_cache
def in_lane_order(lanes: Sequence[int], batch_size: Sequence[int]) -> Routing:
    """Returns the routing of data `[*L, T]`, or of one step of each lane `[*L]`, for these lanes.

    L may be several dimensions.

    Raises:
        ValueError: the data have another shape.
    """
    num_lanes = len(lanes)
    if prod(batch_size) == num_lanes:
        num_steps = 1
    elif prod(batch_size[:-1]) == num_lanes:
        num_steps = batch_size[-1]
    else:
        raise ValueError(
            f"a batch for {counted(num_lanes, 'lane')} must be [{num_lanes}, T] (time last) or "
            f"[{num_lanes}] (one step of each), got {[*batch_size]}. Create the replay buffer with the "
            "num_envs of the data, pass lanes=[...], or pass transitions [N] with trajectory ids "
            "(traj_key)."
        )
    return Routing(np.array(lanes, np.int64), np.arange(num_lanes + 1) * num_steps, None)


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


class LaneNotes:
    """Two notes per lane, each valid from a cursor on, and the number of transitions ever written.

    A new note is stored before its transitions are published, and becomes valid with their cursor. Until
    then the other note of the lane is valid. Therefore an interrupt or a kill in between needs no repair.

    Args:
        num_envs: E.

    Attributes:
        count: `[1]` number of transitions ever written.
        written_at: `[E]` the count after the last write of each lane.
        is_shared: whether other processes share the notes.
    """

    def __init__(self, num_envs: int) -> None:
        self._shared: Arena | None = None
        self._use(np.zeros((8, num_envs), np.int64))

    def _use(self, table: np.ndarray) -> None:
        self._table, self.count, self.written_at = table, table[0, :1], table[1]
        self.is_shared = self._shared is not None
        # `[2, 3, E]` of each note: the cursor from which on it is valid, the number of the lane's last
        # trajectory, and the process that wrote the lane.
        self._notes = table[2:].reshape(2, 3, -1)

    def count_steps(self, lanes: np.ndarray, num_steps: int) -> None:
        """Counts transitions that were written to some lanes."""
        self.count[0] = self.written_at[lanes] = int(self.count[0]) + num_steps

    def share(self) -> None:
        """Moves the notes to memory that other processes share."""
        self._notes[:, 2] = os.getpid()
        self._shared = Arena.shared({"notes": (np.int64, self._table.shape)})
        self._shared.copy_from({"notes": self._table})
        self._use(self._shared.arrays["notes"])

    def __getstate__(self) -> dict[str, Any]:
        shared = self._shared if get_spawning_popen() else None
        return {"table": self._table.copy(), "shared": shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shared = state["shared"]
        self._use(state["table"] if self._shared is None else self._shared.arrays["notes"])

    def _valid(self, lanes: np.ndarray, cursors: np.ndarray) -> np.ndarray:
        """Returns `[L]` which note of each lane is valid: the later one, if its cursor is published."""
        since = self._notes[:, 0, lanes]
        return np.asarray(since.argmax(0) ^ (since.max(0) > cursors[lanes]))

    def trajectories(self, cursors: np.ndarray) -> np.ndarray:
        """Returns the last trajectory of each lane `[E]`; `cursors` `[E]` are those of the index."""
        lanes = np.arange(len(cursors))
        return np.asarray(self._notes[self._valid(lanes, cursors), 1, lanes])

    def reset(self, trajectories: np.ndarray) -> None:
        """Sets the last trajectories `[E]`, valid at once."""
        self._notes[:, 0], self._notes[:, 1] = 0, trajectories

    def add(self, block: Block, trajectories: np.ndarray | None, cursors: np.ndarray) -> None:
        """Adds notes that become valid once a block is published.

        The block is cut where a transition begins another trajectory than that of the transition before
        it, and where another process wrote its lane last.

        Args:
            block: the transitions.
            trajectories: `[N]` the trajectory of each transition; None if the numbers are unknown.
            cursors: `[E]` cursors before the transitions.
        """
        if trajectories is None and not self.is_shared:
            return
        lanes, offsets, *_ = block
        notes, process, first = self._notes, os.getpid(), offsets[:-1]
        valid = self._valid(lanes, cursors)
        _, last_trajectories, last_process = notes[valid, :, lanes].T
        begins = np.zeros(offsets[-1], bool)
        if trajectories is not None:
            begins[1:] = trajectories[1:] != trajectories[:-1]
            # The first transition may continue the last trajectory of its lane.
            begins[first] = trajectories[first] != last_trajectories
            last_trajectories = trajectories[offsets[1:] - 1]
        if self.is_shared:  # another process has other environments
            begins[first] |= last_process != process
        block.cut[begins] = True
        target = 1 - valid
        notes[target, 0, lanes] = _NEVER  # until the note is complete
        notes[target, 1, lanes] = last_trajectories
        notes[target, 2, lanes] = process
        notes[target, 0, lanes] = cursors[lanes] + np.diff(offsets)
