"""Which rows of an opened directory are valid, after a clean close, a kill or a power loss.

Letters: E lanes (environments), T live steps per lane at most, R ring steps, D steps before a row whose
frames it is read with.
"""

from __future__ import annotations

import numpy as np
import torch

from trl_storages.disk.files import damaged
from trl_storages.disk.words import State, Track, Words
from trl_storages.kernels.marks import ENDS

__all__ = ["recover"]


def recover(words: Words, check: bool | None, track: Track = iter) -> tuple[State, bool]:
    """Works out which rows are valid.

    Args:
        words: the files.
        check: whether to verify the checksums of rows; None does unless it was closed cleanly.
        track: reports progress.

    Returns:
        the committed state and True; or, if it is not intact, the state that can be recovered, and False.

    Raises:
        ValueError: there is damage that a power loss can't explain.
    """
    is_clean, committed = words.description.is_clean, words.committed()
    if committed is not None and (is_clean if check is None else not check):
        return committed, True
    intact = words.intact(track)
    if committed is not None and not len(words.damaged(committed.tails, committed.cursors, intact)):
        return committed, True
    if is_clean:
        what = "its table of commits does" if committed is None else "rows that count do"
        raise damaged(words.path, f"{what} not match the checksum, though it was closed cleanly")
    return _runs(words, committed, intact.view(-1, words.description.num_lanes).numpy()), False


def _runs(words: Words, committed: State | None, steps: np.ndarray) -> State:
    """Recovers in each lane the run of intact rows around the last flushed one, else the longest run.

    Args:
        words: the files.
        committed: the selected table, if its checksum is right.
        steps: `[R, E]` from `Words.intact`.
    """
    description = words.description
    oldest, flushed = np.array(description.tails), np.array(description.flushed)
    # A lane without a row resumes at a step that was never flushed.
    cursors = np.maximum(oldest, flushed)
    tails, is_open, unknown = cursors.copy(), np.zeros_like(cursors), np.zeros_like(cursors)
    is_linked = np.ones_like(steps, bool)
    if words.side is not None:
        is_linked = words.check_next(torch.arange(steps.size), tips=False).view(steps.shape).numpy()
    for lane, order in enumerate(np.argsort(steps, axis=0).T):
        order = order[steps[order, lane] >= oldest[lane]]
        run = _run(steps[order, lane], is_linked[order, lane], flushed.item(lane) - 1)
        if run is not None and words.side is not None:
            run = _with_tip(words, run, lane)
        if run is not None:
            tails[lane], cursors[lane] = run
            last = (run[1] - 1) % len(steps) * len(cursors) + lane
            is_open[lane] = not words.marks[last, 0] & ENDS
    tails = np.maximum(tails, cursors - description.steps_per_lane)
    tails = _with_frames(words, tails, cursors, steps)
    is_open[tails == cursors] = 0
    count = int(cursors.sum()) if committed is None else committed.write_count
    numbers = unknown if committed is None else committed.trajectories
    return State(count, cursors, tails, is_open, numbers)


def _with_tip(words: Words, run: tuple[int, int], lane: int) -> tuple[int, int] | None:
    """Returns a run, cut after the newest row whose next values are known; None if there is none.

    If that is not its last row, its tip is rewritten: no other valid row uses it.
    """
    own, (first, end) = words.description, run
    for last in range(end - 1, first - 1, -1):
        slot = last % own.ring_steps * own.num_lanes + lane
        has_tip = bool(words.check_next(torch.tensor([slot]), tips=True))
        if has_tip or (last < end - 1 and words.renew_tip(slot)):
            return first, last + 1
    return None


def _with_frames(
    words: Words, tails: np.ndarray, cursors: np.ndarray, steps: np.ndarray
) -> np.ndarray:
    """Returns the first step of each lane from which on all frames that rows are read with are intact.

    Args:
        words: the files.
        tails: `[E]` the first steps of the runs.
        cursors: `[E]` the steps after the newest ones.
        steps: `[R, E]` from `Words.intact`.

    Returns:
        `[E]` int64 steps.
    """
    before = tails - np.arange(1, words.description.layout.past_steps + 1)[:, None]
    found = np.take_along_axis(steps, before % len(steps), axis=0)
    num_there = ((found == before) & (before >= 0)).cumprod(0).sum(0)
    while (is_short := tails - words.seen_from(tails, cursors) > num_there).any():
        tails, num_there = tails + is_short, num_there + is_short
    return tails


def _run(steps: np.ndarray, is_linked: np.ndarray, flushed: int) -> tuple[int, int] | None:
    """Returns the first step and the end of the run that holds `flushed`, else of the longest run.

    Args:
        steps: int64, ascending.
        is_linked: bool, whether the row of a step gives the next values of the row before it, intact.
        flushed: the last step that was flushed.

    >>> steps = np.array([1, 2, 3, 5, 6, 8])
    >>> linked = np.ones(6, bool)
    >>> _run(steps, linked, 5), _run(steps, linked, 7), _run(steps[:0], linked[:0], 7)
    ((5, 7), (1, 4), None)
    """
    is_first = (np.diff(steps) != 1) | ~is_linked[1:]
    runs = np.split(steps, np.flatnonzero(is_first) + 1) if len(steps) else []
    # Of equally long runs, the newest.
    found = max(
        runs, key=lambda run: (run[0] <= flushed <= run[-1], len(run), run[0]), default=None
    )
    return None if found is None else (int(found[0]), int(found[-1]) + 1)
