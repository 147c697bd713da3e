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

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_storages.storages.directory import (
    HEADER,
    MARKS,
    PROGRESS,
    ROWS,
    UNDO,
    check_is_storage,
    create_files,
    read_layout,
    remove_files,
    write_header,
)
from trl_storages.storages.files import (
    MappedWords,
    WriterLock,
    sync_directory,
    write_text,
)
from trl_storages.storages.header import Header, State
from trl_storages.storages.layout import Layout
from trl_storages.storages.marks import checksums, pack_marks, steps
from trl_storages.storages.undo import Undo

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


class Journal:
    """The files of one storage: made or opened, written under the protocol, flushed and closed.

    Made by `create` and `open`.

    Attributes:
        directory: where the files are.
        layout: of a row.
        rows: `[N, W]` int64.
        marks: `[N, 2]` int64: mark and checksum of each row.
        state: the last committed counters; of a reader, those that it last looked at.
        lock: held by a writer, None for a reader.
    """

    def __init__(
        self, directory: Path, layout: Layout, header: MappedWords, lock: WriterLock | None
    ) -> None:
        self.directory, self.layout, self.lock = directory, layout, lock
        self._header_words = header
        self.header = Header(header.array)
        identity, writable = self.header.identity, lock is not None
        size = identity.num_rows * identity.num_words
        self._row_words = MappedWords(directory / ROWS, size, writable=writable)
        self.rows = self._row_words.array.reshape(-1, identity.num_words)
        self._mark_words = MappedWords(directory / MARKS, 2 * identity.num_rows, writable=writable)
        self.marks = self._mark_words.array.reshape(-1, 2)
        #: A column of its own beside the rows, if a sampler keeps one.
        self.column: MappedWords | None = None
        self.state = self.header.read()
        self._undo: Undo | None = None
        self._next: State | None = None
        if writable:
            self._undo = Undo(directory / UNDO, identity.num_words)
            self._recover()
            self.header.check()

    # Making and opening

    @classmethod
    def create(
        cls,
        directory: Path,
        layout: Layout,
        num_rows: int,
        num_lanes: int = 1,
        *,
        has_episodes: bool = False,
    ) -> Journal:
        """Makes the files of an empty storage; see `create_files`."""
        lock = create_files(directory, layout, num_rows, num_lanes, has_episodes=has_episodes)
        return cls._open(directory, lock)

    @classmethod
    def open(cls, directory: Path, *, writable: bool = True) -> Journal:
        """Opens the files of a storage, and completes or undoes what a killed writer left.

        Raises:
            FileNotFoundError: the directory holds no storage, or lacks a file.
            ValueError: a file is truncated, damaged or of another version. Nothing was changed.
            RuntimeError: there is a writer already.
            OSError: the disk may not be written.
        """
        check_is_storage(directory)
        return cls._open(directory, WriterLock(directory) if writable else None)

    @classmethod
    def _open(cls, directory: Path, lock: WriterLock | None) -> Journal:
        try:
            layout, identity = read_layout(directory)
            size = Header.num_words(identity.num_lanes)
            header = MappedWords(directory / HEADER, size, writable=lock is not None)
            return cls(directory, layout, header, lock)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, ValueError):
                raise ValueError(f"{directory} can't be opened: {error}") from error
            raise

    def set_lanes(self, num_lanes: int) -> None:
        """Says, before the first row, that an `EpisodeWriter` writes so many lanes.

        Raises:
            ValueError: rows were written, in another number of lanes or without episodes.
        """
        identity = self.header.identity
        if identity.has_episodes and identity.num_lanes == num_lanes:
            return
        if self.state.sequence > 1:
            lanes = (
                f"in {identity.num_lanes} lanes" if identity.has_episodes else "without episodes"
            )
            raise ValueError(
                f"the rows in {self.directory} were written {lanes}, got a writer of {num_lanes}: "
                "open them with the writer that they were made with."
            )
        self.check_writable()
        identity.num_lanes, identity.has_episodes = num_lanes, True
        write_header(self.directory, identity)
        size = Header.num_words(num_lanes)
        self._header_words = MappedWords(self.directory / HEADER, size, writable=True)
        self.header = Header(self._header_words.array)
        self.state = self.header.read()

    def _recover(self) -> None:
        """Undoes the write that a killed process left, or tidies up after one that it committed."""
        header = self.header
        pending = header.pending
        if not pending:
            return
        if pending == self.state.sequence + 1:
            # Odd while rows change, so that readers that are at work leave them alone.
            header.rewrites |= 1
            self._undo.restore(self.marks, self.rows)  # type: ignore[union-attr]
            header.reserved[:] = self.state.cursors
        elif pending != self.state.sequence:
            raise ValueError(
                f"the header is damaged: commit {pending} can't follow commit "
                f"{self.state.sequence}. Bring {HEADER} back from a copy; nothing was changed."
            )
        header.rewrites += header.rewrites % 2
        header.pending = 0

    # Writing

    @property
    def is_writer(self) -> bool:
        """Whether this process may write."""
        return self.lock is not None and self.lock.is_held

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write."""
        if self.is_writer:
            return
        if self.lock is None:
            reason = "were opened for reading: open them without mode='r' to write"
        else:
            reason = "were closed, or belong to the process that this one was forked from"
        raise RuntimeError(f"the rows in {self.directory} {reason}.")

    @property
    def steps_per_lane(self) -> int:
        """T, how many steps of each lane find room."""
        return self.header.identity.num_rows // self.header.identity.num_lanes

    def begin_steps(self, slots: np.ndarray, new: Steps) -> np.ndarray:
        """Begins to write the next steps of some lanes; `commit` or `abort` must follow.

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
        return pack_marks(step, new.begins[:, -kept:], new.dones[:, -kept:]).reshape(-1)

    def begin_rewrite(self, slots: np.ndarray) -> State:
        """Begins to change rows in any other way; `commit` or `abort` must follow.

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
        """Puts back what was there before `begin_...`, unless it is committed already."""
        if self.header.read().sequence != self.state.sequence:
            self.state = self._next  # type: ignore[assignment]
            self._finish()
            return
        self._undo.restore(self.marks, self.rows)  # type: ignore[union-attr]
        self._finish()

    def _finish(self) -> None:
        self.header.reserved[:] = self.state.cursors
        if (rewrites := self.header.rewrites) % 2:
            self.header.rewrites = rewrites + 1
        self.header.pending = 0

    # Keeping

    def flush(self) -> None:
        """Waits until everything that was written is on disk, the header last."""
        self._row_words.flush()
        self._mark_words.flush()
        if self.column is not None:
            self.column.flush()
        sync_directory(self.directory)
        self._header_words.flush()

    def save_progress(self, progress: dict[str, Any]) -> None:
        """Keeps what is no part of the rows, such as random states, as JSON."""
        write_text(self.directory / PROGRESS, json.dumps(progress))

    def load_progress(self) -> dict[str, Any]:
        """Returns what `save_progress` kept last, or nothing."""
        path = self.directory / PROGRESS
        try:
            return json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; delete it to go on without.") from error

    def close(self) -> None:
        """Lets another writer in."""
        if self.lock is not None:
            self.lock.release()

    def delete(self) -> None:
        """Closes the storage and removes its files, and the directory if nothing else is in it."""
        self.check_writable()
        self.close()
        remove_files(self.directory, and_directory=True)

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

    def tensor(self) -> torch.Tensor:
        """Returns the rows as a tensor that shares their memory."""
        return torch.from_numpy(self.rows)
