"""Makes an index anew, of the rows in a file that are whole.

Letters: E lanes, M entries a lane.
"""

from __future__ import annotations

import numpy as np

from trl_storages.directory.description import Description
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import CUT, DONE, GOES_ON, checks
from trl_storages.streams import HostRows

__all__ = ["forget_beyond", "recover"]

_MOST = 2**48


def forget_beyond(index: EpisodeIndex, rows: HostRows) -> None:
    """Removes marks of steps that a killed writer did not publish.

    Their numbers are given to other steps from now on.
    """
    marks = rows.marked[0]
    steps, _, _ = checks.steps_of(marks[:, checks.NUMBER])
    marks[steps >= index.cursors.repeat(index.entries_per_lane), checks.NUMBER] = 0


def recover(index: EpisodeIndex, rows: HostRows, described: Description) -> None:
    """Fills an index with the rows that are whole, and removes all other marks.

    Of each lane the steps without a hole count that hold the last one that was flushed; if that is not
    there, the newest.

    Args:
        index: any contents.
        rows: with marks, see `kernels.checks`.
        described: says which steps don't count any more, and which were flushed.
    """
    marks, k, M = rows.marked[0], index.stack, index.entries_per_lane
    steps, begins, done = checks.steps_of(marks[:, checks.NUMBER])
    place = np.tile(np.arange(M), index.num_envs)
    fits = (steps >= 0) & (steps < _MOST) & (place >= k - 1) & (place + 1 < M)
    at = np.flatnonzero(fits & (steps >= np.repeat(described.tails, M)))
    at = at[rows.are_whole(at)]
    index.clear()
    kept = np.zeros(len(marks), bool)
    for lane, flushed in enumerate(described.cursors):
        its = at[at // M == lane]
        its = its[_chosen(steps[its], flushed, index.steps_per_lane)]
        if not len(its):
            continue
        kept[its] = True
        ends = np.where(done[its], DONE, GOES_ON)
        if not done[its[-1]]:
            ends[-1] = CUT  # who knows what came behind it
        first = int(steps[its[0]])
        index.set_lane(
            *(lane, steps[its], place[its], begins[its], ends),
            first=first - (not begins[its[0]]),
            tail=first,
        )
    # Where a file has no room every mark is zero: nothing is written there.
    marks[(marks[:, checks.NUMBER] != 0) & ~kept, checks.NUMBER] = 0


def _chosen(steps: np.ndarray, flushed: int, most: int) -> np.ndarray:
    """Returns which of the steps of a lane count, in their order."""
    run, order = np.unique(steps, return_index=True)
    holes = np.flatnonzero(np.diff(run) != 1) + 1
    bounds = np.concatenate([[0], holes, [len(run)]])
    at = int(np.searchsorted(run, flushed - 1))
    is_there = at < len(run) and run[at] == flushed - 1
    which = int(np.searchsorted(holes, at, "right")) if is_there else len(holes)
    begin, end = bounds[which], bounds[which + 1]
    return order[max(begin, end - most) : end]
