"""Makes an index anew, of the rows in a file that are whole.

Letters: E lanes.
"""

from __future__ import annotations

import numpy as np

from trl_storages.index import EpisodeIndex
from trl_storages.kernels import checks
from trl_storages.kernels.words import CUT, DONE, GOES_ON
from trl_storages.streams import Arena, Layout

__all__ = ["forget_beyond", "recover"]


def forget_beyond(index: EpisodeIndex, arena: Arena) -> bool:
    """Removes marks of steps that a killed writer did not publish; returns whether there were any.

    Their numbers are given to other steps from now on.
    """
    # A mapping would take room where nothing was written, if only to read it.
    numbers = arena.copy_of("marks")[:, checks.NUMBER].reshape(index.num_envs, -1)
    left = (numbers >> 2 > index.cursors[:, None]).reshape(-1)
    if left.any():
        arena.arrays["marks"][left, checks.NUMBER] = 0
        return True
    return False


def recover(
    index: EpisodeIndex, layout: Layout, arena: Arena, tails: list[int], cursors: list[int]
) -> None:
    """Fills an index with the rows that are whole, and removes all other marks.

    Of each lane the steps without a hole count that hold the last one that was flushed; if that is not
    there, the newest.

    Args:
        index: any contents.
        layout: of the rows.
        arena: holds index, entries and marks.
        tails: `[E]` steps before these don't count.
        cursors: `[E]` steps before these were flushed.
    """
    marks = arena.copy_of("marks")
    marked = marks, checks.factors(layout.entry_words, layout.frames)
    steps = np.empty(len(marks), np.int64)
    checks.rows_of(
        *(arena.arrays["entries"], layout.observation_words, layout.frames),
        *(index.entries_per_lane, marked, steps),
    )
    index.clear()
    kept = np.zeros(len(marks), bool)
    size = index.entries_per_lane
    for lane, (tail, flushed) in enumerate(zip(tails, cursors, strict=True)):
        found = steps[lane * size : (lane + 1) * size]
        run, places = _chosen(found, tail, flushed, index.steps_per_lane)
        if len(run):
            entries = places + lane * size
            kept[entries] = True
            _fill(index, lane, run, places, marks[entries, checks.NUMBER])
    # Where a file has no room every mark is zero: nothing is written there.
    arena.arrays["marks"][(marks[:, checks.NUMBER] != 0) & ~kept, checks.NUMBER] = 0


def _chosen(found: np.ndarray, tail: int, flushed: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of a lane that count, and their entries in it."""
    places = np.flatnonzero(found >= tail)
    run, order = np.unique(found[places], return_index=True)
    places = places[order]
    holes = np.flatnonzero(np.diff(run) != 1) + 1
    bounds = [0, *holes.tolist(), len(run)]
    at = int(np.searchsorted(run, flushed - 1))
    if at < len(run) and run[at] == flushed - 1:
        which = int(np.searchsorted(holes, at, "right"))
    else:
        which = len(bounds) - 2
    begin, end = bounds[which], bounds[which + 1]
    begin = max(begin, end - most)
    return run[begin:end], places[begin:end]


def _fill(
    index: EpisodeIndex, lane: int, steps: np.ndarray, places: np.ndarray, numbers: np.ndarray
) -> None:
    """Enters the only steps of a lane into an index."""
    begins, done = numbers & 2 != 0, numbers & 1 != 0
    ends = np.where(done, DONE, GOES_ON)
    if not done[-1]:
        ends[-1] = CUT  # who knows what came behind it
    first = int(steps[0]) - (not begins[0])
    index.set_lane(lane, steps, places, begins, ends, first=first, tail=int(steps[0]))
