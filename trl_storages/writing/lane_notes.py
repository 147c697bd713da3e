"""Notes on each lane: its last trajectory, the process that wrote it, and when it was written.

Letters: E lanes (environments), L of them that are written.
"""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from trl_storages.entries.arena import Arena

__all__ = ["LaneNotes"]

_NEVER = np.iinfo(np.int64).max


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

    def _valid(self, lanes: Any, cursors: np.ndarray) -> np.ndarray:
        """Returns `[L]` which note of each lane is valid: the later one, if its cursor is published."""
        since = self._notes[:, 0, lanes]
        return np.asarray(since.argmax(0) ^ (since.max(0) > cursors[lanes]))

    def trajectories(self, cursors: np.ndarray, lanes: Any = slice(None)) -> np.ndarray:
        """Returns the last trajectory of each lane `[L]`; `cursors` `[E]` are those of the index."""
        lanes = np.arange(len(self.written_at))[lanes]
        return np.asarray(self._notes[self._valid(lanes, cursors), 1, lanes])

    def reset(self, trajectories: np.ndarray) -> None:
        """Sets the last trajectories `[E]`, valid at once."""
        self._notes[:, 0], self._notes[:, 1] = 0, trajectories

    def add(
        self,
        lanes: np.ndarray,
        num_steps: np.ndarray,
        cursors: np.ndarray,
        trajectories: np.ndarray | None,
    ) -> np.ndarray:
        """Adds notes that become valid once transitions are published.

        Args:
            lanes: `[L]` the lanes of the transitions.
            num_steps: `[L]` number of transitions per lane.
            cursors: `[E]` cursors before the transitions.
            trajectories: `[L]` the last trajectories; None keeps them.

        Returns:
            `[L]` bool, whether another process wrote the lane last.
        """
        notes, process = self._notes, os.getpid()
        valid = self._valid(lanes, cursors)
        target, previous_process = 1 - valid, notes[valid, 2, lanes]
        notes[target, 0, lanes] = _NEVER  # until the note is complete
        notes[target, 1, lanes] = notes[valid, 1, lanes] if trajectories is None else trajectories
        notes[target, 2, lanes] = process
        notes[target, 0, lanes] = cursors[lanes] + num_steps
        return previous_process != process
