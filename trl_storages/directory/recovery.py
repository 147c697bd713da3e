"""Recovery of intact transitions from a directory after an unclean shutdown.

Each entry has a checksum and the number of its step, see `kernels.checksums`. From these the index is
rebuilt.
"""

from __future__ import annotations

import numpy as np

from trl_storages.directory.description import MOST, Description
from trl_storages.entries import HostEntries
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import CONTINUES, DONE, SPLIT, checksums

__all__ = ["recover", "remove_unpublished"]


def remove_unpublished(index: EpisodeIndex, entries: HostEntries) -> None:
    """Removes the checksums of steps that a killed writer did not publish.

    The numbers of these steps are given to other steps from now on.
    """
    words = entries.checksums
    steps, _, _ = checksums.steps_of(words[:, checksums.NUMBER])
    words[steps >= index.cursors.repeat(index.entries_per_lane), checksums.NUMBER] = 0


def recover(index: EpisodeIndex, entries: HostEntries, description: Description) -> None:
    """Fills an index with the intact transitions, and removes all other checksums.

    Each lane keeps one run of consecutive steps: the run that contains the last flushed step, or the
    newest run if the last flushed step is lost.

    Args:
        index: is overwritten.
        entries: entries with their checksums.
        description: contains the tails and the cursors of the last flush.
    """
    words, k, M = entries.checksums, index.stack, index.entries_per_lane
    steps, begins, done = checksums.steps_of(words[:, checksums.NUMBER])
    positions = np.tile(np.arange(M), index.num_envs)
    is_valid = (steps >= 0) & (steps < MOST) & (positions >= k - 1) & (positions + 1 < M)
    intact = np.flatnonzero(is_valid & (steps >= np.repeat(description.tails, M)))
    intact = intact[entries.are_intact(intact)]
    index.reset()
    is_kept = np.zeros(len(words), bool)
    bounds = np.searchsorted(intact, np.arange(index.num_envs + 1) * M).tolist()
    for lane, flushed in enumerate(description.cursors):
        run = intact[bounds[lane] : bounds[lane + 1]]
        run = run[_select_run(steps[run], flushed, index.steps_per_lane)]
        if not len(run):
            continue
        is_kept[run] = True
        ends = np.where(done[run], DONE, CONTINUES)
        if not done[run[-1]]:
            ends[-1] = SPLIT  # later steps may be lost
        first = int(steps[run[0]])
        index.restore_lane(
            *(lane, steps[run], positions[run], begins[run], ends),
            first=first - (not begins[run[0]]),
            tail=first,
        )
    # Parts of the file that were never written have zero checksums, and are not written here.
    words[(words[:, checksums.NUMBER] != 0) & ~is_kept, checksums.NUMBER] = 0


def _select_run(steps: np.ndarray, flushed: int, max_steps: int) -> np.ndarray:
    """Returns the positions of the kept run among the steps of a lane, in the order of steps."""
    numbers, order = np.unique(steps, return_index=True)
    begins = np.flatnonzero(np.diff(numbers) != 1) + 1
    bounds = np.concatenate([[0], begins, [len(numbers)]])
    at = int(np.searchsorted(numbers, flushed - 1))
    is_stored = at < len(numbers) and numbers[at] == flushed - 1
    run = int(np.searchsorted(begins, at, "right")) if is_stored else len(begins)
    begin, end = bounds[run], bounds[run + 1]
    return order[max(begin, end - max_steps) : end]
