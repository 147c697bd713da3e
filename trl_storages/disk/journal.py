"""Rows on disk that outlive the process: every write is there as a whole, or not at all.

Letters: N rows, W words a row, E lanes, n rows written, L lanes and S steps of a write.

A directory holds `storage.json` (the layout), `header.bin` (which rows are there), `rows.bin`,
`marks.bin` (a word and a checksum a row, from which the episodes are rebuilt), `undo.bin` (what the
write in progress replaces), `lock`, and, where they are needed, `priorities.bin` and `progress.json`.
Nothing in it is code.

A write keeps what it replaces, says in the header which rows are no longer to be read, writes rows and
marks, and commits: one word in the header then names the new counters. Killed before that, the next
writer puts back what was kept. So the directory is at any moment as it was before a write or after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trl_storages.disk.directory import HEADER, UNDO
from trl_storages.disk.files import MappedWords, WriterLock
from trl_storages.disk.header import State, fence
from trl_storages.disk.marks import checksums, pack_marks, steps
from trl_storages.disk.open_files import OpenFiles
from trl_storages.disk.undo import Undo
from trl_storages.rows.layout import Layout

__all__ = ["Journal", "Steps"]

_CHUNK = 1 << 24  # bytes of rows that are checked at a time


class Steps(NamedTuple):
    """What the writer knows of the rows that it writes, step by step."""

    lanes: np.ndarray
    """`[L]` int64."""
    begins: np.ndarray
    """`[L, S]` bool, whether the row is the first of its episode."""
    dones: np.ndarray
    """`[L, S]` bool, whether it is the last."""
    trajectories: np.ndarray | None = None
    """`[L]` int64, the collector's number of the last trajectory."""


class Journal(OpenFiles):
    """The files of one storage, and the protocol under which they are written.

    Made by `create` and `open`, as `OpenFiles` is.
    """

    def __init__(
        self, directory: Path, layout: Layout, header: MappedWords, lock: WriterLock | None
    ) -> None:
        super().__init__(directory, layout, header, lock)
        self._undo: Undo | None = None
        self._next: State | None = None
        if lock is not None:
            self._undo = Undo(directory / UNDO, self.header.identity.num_words)
            self._recover()
            self.header.check()

    def _recover(self) -> None:
        """Undoes the write that a killed process left, or tidies up after one that it committed."""
        header = self.header
        pending = header.pending
        if not pending:
            return
        if pending == self.state.sequence + 1:
            self._put_back()
        elif pending != self.state.sequence:
            raise ValueError(
                f"the header is damaged: commit {pending} can't follow commit "
                f"{self.state.sequence}. Bring {HEADER} back from a copy; nothing was changed."
            )
        self._finish()

    # Writing

    @property
    def steps_per_lane(self) -> int:
        """T, how many steps of each lane find room."""
        return self.header.identity.num_rows // self.header.identity.num_lanes

    def begin_steps(self, slots: np.ndarray, new: Steps) -> np.ndarray:
        """Begins to write the next steps of some lanes; see `undone_on_error`.

        Args:
            slots: `[L * S]` int64, lane by lane; of more than T steps the last T.
            new: says what is written.

        Returns:
            `[L * S]` int64 marks for `commit`.
        """
        state = self._start()
        first = state.cursors[new.lanes]
        num_steps = new.begins.shape[1]
        state.cursors[new.lanes] = first + num_steps
        state.open[new.lanes] = ~new.dones[:, -1]
        if new.trajectories is not None:
            state.trajectories[new.lanes] = new.trajectories
        state.write_count += len(first) * num_steps
        kept = min(num_steps, self.steps_per_lane)
        step = first[:, None] + np.arange(num_steps - kept, num_steps)
        state.num_rows = int(np.minimum(state.cursors, self.steps_per_lane).sum())
        replaces = step[:, -1].max() >= self.steps_per_lane
        self._prepare(slots if replaces else slots[:0])
        self.header.reserved[:] = state.cursors
        fence()
        return pack_marks(step, new.begins[:, -kept:], new.dones[:, -kept:]).reshape(-1)

    def begin_rewrite(self, slots: np.ndarray) -> State:
        """Begins to change rows in any other way; see `undone_on_error`.

        Args:
            slots: `[n]` int64 of all that will change.

        Returns:
            the state to be committed, to be changed as need be.
        """
        state = self._start()
        self._prepare(slots)
        self.header.rewrites += 1
        return state

    def _start(self) -> State:
        self.check_writable()
        self.abort()  # what an interrupt left, if it came where nobody looks out for one
        self._next = self.state.copy()
        return self._next

    def _prepare(self, replaced: np.ndarray) -> None:
        undo: Undo = self._undo  # type: ignore[assignment]
        undo.make_room(len(replaced))
        undo.keep(replaced, self.marks, self.rows)
        self.header.pending = self.state.sequence + 1

    def commit(self, slots: np.ndarray, marks: np.ndarray) -> None:
        """Makes what was written since `begin_...` count.

        Args:
            slots: `[n]` int64 slots that were written.
            marks: `[n]` int64 their marks.
        """
        self.marks[slots, 0] = marks
        for some in self._chunks(len(slots)):
            at = slots[some]
            self.marks[at, 1] = checksums(self.rows.take(at, 0), marks[some])
        header, state = self.header, self._next
        header.publish(state)  # type: ignore[arg-type]
        self.state = state  # type: ignore[assignment]
        self._finish()

    def abort(self) -> None:
        """Ends a write that was not finished: undoes it, unless it was committed already."""
        if self._next is None:
            return
        header = self.header
        if header.read().sequence != self.state.sequence:
            self.state = self._next
        elif header.pending == self.state.sequence + 1:
            self._put_back()
        self._finish()

    def _put_back(self) -> None:
        # A reader that has seen rows half written must not find everything as it was.
        self.header.rewrites |= 1
        self._undo.restore(self.marks, self.rows)  # type: ignore[union-attr]

    def _finish(self) -> None:
        header = self.header
        header.reserved[:] = self.state.cursors
        if (rewrites := header.rewrites) % 2:
            header.rewrites = rewrites + 1
        header.pending = 0
        self._next = None

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Surrounds a write from `begin_...` to `commit`, so that all of it counts or nothing."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    # Care

    def damaged_slots(
        self, slots: np.ndarray, track: Callable[[list[slice]], Iterable[slice]] = iter
    ) -> np.ndarray:
        """Returns which of some slots hold a row that does not match its checksum.

        Args:
            slots: `[n]` int64.
            track: wraps the loop over chunks, to show how far it is.
        """
        bad = []
        for chunk in track(self._chunks(len(slots))):
            some = slots[chunk]
            marks = self.marks[some]
            wrong = checksums(self.rows[some], marks[:, 0]) != marks[:, 1]
            bad.append(some[wrong | (steps(marks[:, 0]) < 0)])
        return np.concatenate(bad) if bad else slots[:0]

    def _chunks(self, size: int) -> list[slice]:
        """Cuts a range of rows, so that a copy of each part is small."""
        step = max(_CHUNK // (8 * self.rows.shape[1]), 1)
        return [slice(start, start + step) for start in range(0, size, step)]
