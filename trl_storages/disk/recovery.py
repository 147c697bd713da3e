"""What counts of the rows in a directory that is opened, after a clean close, a kill or a loss of power.

Letters: E lanes (environments), T live steps a lane at most, R ring steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trl_storages.disk.commits import State
from trl_storages.disk.description import Description
from trl_storages.disk.words import Track, Words
from trl_storages.kernels.marks import ENDS

__all__ = ["above_tails", "check_whole", "recover"]

_BRING_BACK = "Bring the directory back from a copy; nothing was changed."


def recover(
    directory: Path, words: Words, description: Description, check: bool | None, track: Track = iter
) -> tuple[State, int | None]:
    """Finds out which rows count.

    Args:
        directory: for messages.
        words: the files.
        description: of the directory.
        check: whether to look at the checksums of rows; None does after anything but a clean close.
        track: shows how far it is.

    Returns:
        what was committed or, where that is not whole, what is left of it; and in that case how many rows
        less these are, 0 if it is not known.

    Raises:
        ValueError: something is damaged that no loss of power damages.
    """
    committed = words.commits.read()
    deeply = not description.is_clean if check is None else check
    if committed is None and description.is_clean:
        raise ValueError(
            f"{directory} is damaged: it was closed cleanly, and its table of commits does not match its "
            f"checksum. {_BRING_BACK}"
        )
    steps = words.steps(description, deeply=deeply, track=track)
    if committed is not None:
        state = above_tails(committed, description)
        wrong = _num_wrong(description, state, steps)
        if not wrong:
            return state, None
        if description.is_clean:
            raise ValueError(
                f"{directory} is damaged: {wrong} rows are not what was written, though it was closed "
                f"cleanly. {_BRING_BACK}"
            )
    state = _runs(words, description, committed, steps)
    lost = 0 if committed is None else int(np.maximum(committed.cursors - state.cursors, 0).sum())
    return state, lost


def check_whole(directory: Path, words: Words, description: Description) -> None:
    """Checks that every row that counts is whole, while another process may be writing.

    Raises:
        ValueError: one is not.
    """
    while True:
        number, committed = words.commits.number, words.commits.read()
        if committed is not None:
            state = above_tails(committed, description)
            steps = words.steps(description, deeply=True)
            if not _num_wrong(description, state, steps):
                return
        if committed is None or words.commits.number == number:
            raise ValueError(
                f"{directory} is damaged, or was not closed before the power failed: open it for writing "
                "once."
            )


def above_tails(state: State, description: Description) -> State:
    """Forgets what was forgotten for good before it was committed."""
    durable = np.array(description.tails)
    lanes = state.lanes.copy()
    lanes[:2] = np.maximum(lanes[:2], durable)
    return state._replace(lanes=lanes)


def _num_wrong(description: Description, state: State, steps: np.ndarray) -> int:
    """Counts live rows that are not whole, or can't be live."""
    place, newest = np.arange(description.ring_steps)[:, None], state.cursors - 1
    live = newest - (newest - place) % description.ring_steps
    is_live = live >= state.tails
    too_many = state.cursors - state.tails - description.steps_per_lane
    return int((is_live & (steps != live)).sum() + np.maximum(too_many, 0).sum())


def _runs(
    words: Words, description: Description, committed: State | None, steps: np.ndarray
) -> State:
    """Finds in each lane the run of whole rows around the last one that was flushed, or the longest.

    Args:
        words: the files.
        description: of the directory.
        committed: the table that is selected, if its checksum is right.
        steps: `[R, E]` as `Words.steps` finds them.
    """
    flushed = np.array(description.flushed)
    durable = np.array(description.tails)
    # Where nothing is left, steps go on from where none was ever written.
    cursors = np.maximum(durable, flushed)
    tails, is_open = cursors.copy(), np.zeros_like(cursors)
    for lane in range(description.num_lanes):
        found = np.sort(steps[:, lane])
        run = _run(found[found >= durable[lane]], flushed.item(lane) - 1)
        if run is not None:
            tails[lane], cursors[lane] = run
            last = (run[1] - 1) % description.ring_steps * description.num_lanes + lane
            is_open[lane] = not words.marks[last, 0] & ENDS
    tails = np.maximum(tails, cursors - description.steps_per_lane)
    unknown = np.zeros_like(cursors)
    lanes = np.stack([cursors, tails, is_open, unknown])
    if committed is not None:
        lanes[3] = committed.trajectories
    write_count = int(cursors.sum()) if committed is None else committed.write_count
    return State(description.history, write_count, lanes)


def _run(steps: np.ndarray, flushed: int) -> tuple[int, int] | None:
    """Returns the first step and the end of the run of steps that holds one, or of the longest.

    Args:
        steps: int64, ascending.
        flushed: the last step that was flushed.

    >>> steps = np.array([1, 2, 3, 5, 6, 8])
    >>> _run(steps, 5), _run(steps, 7), _run(steps[:0], 7)
    ((5, 7), (1, 4), None)
    """
    if not len(steps):
        return None
    after = np.flatnonzero(np.diff(steps) != 1) + 1
    starts, stops = steps[np.append(0, after)], steps[np.append(after, len(steps)) - 1] + 1
    holds = (starts <= flushed) & (flushed < stops)
    lengths = stops - starts
    # The newest of equally long ones.
    at = holds.argmax() if holds.any() else len(lengths) - 1 - lengths[::-1].argmax()
    return int(starts[at]), int(stops[at])
