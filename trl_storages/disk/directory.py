"""A directory of rows, as its one writer sees it.

Letters: E lanes (environments), S spare steps, D steps before a row whose frames it is read with, L lanes
written now.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from trl_storages.callers import warn_caller
from trl_storages.disk.description import (
    Description,
    check_is_free,
    holds_storage,
    remove_files,
    remove_rows,
)
from trl_storages.disk.files import WriterLock, damaged, removed
from trl_storages.disk.recovery import recover
from trl_storages.disk.words import State, Track, Words
from trl_storages.kernels.tables import Block
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout
from trl_storages.saved.durable import sync_directory

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Directory"]

Found = TypeVar("Found")

# The description of more could not be read within the bounds on untrusted files.
_MOST_LANES = 2**18


class Directory:
    """The files of a storage, held by the one process that writes them. Made by `create` and `open`.

    Attributes:
        path: the directory.
        words: the files.
        process: ID of the process that opened it; forks of it may only read.
    """

    def __init__(self, path: Path, lock: WriterLock, words: Words) -> None:
        self.path, self._lock, self.words = path, lock, words
        self.process = os.getpid()

    # Creating and opening

    @classmethod
    def create(cls, path: Path, layout: Layout, num_rows: int, num_lanes: int) -> Self:
        """Creates the files of an empty storage; reserves their disk space, but for the side table.

        Raises:
            FileExistsError: the directory holds more than the leftovers of an interrupted creation.
            OSError: the disk is full or not writable. Nothing is left then.
            RuntimeError: another process is creating or writing it.
            ValueError: there are too many lanes. Nothing is made then.
        """
        if num_lanes > _MOST_LANES:
            raise ValueError(
                f"a directory holds at most {_MOST_LANES:,} lanes (num_envs), got {num_lanes:,}: keep "
                "the rows in memory, or in several directories."
            )
        made = [it for it in (path, *path.parents) if not it.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path, check_is_free) as (lock, _):
            none = [0] * num_lanes
            description = Description(layout, num_rows, num_lanes, none, none)
            try:
                remove_rows(path)
                words = Words.create(path, description)
                # The files must be durable before the description calls them clean.
                words.flush()
                for it in made:
                    sync_directory(it.parent)
                description.write(path)
            except BaseException:
                remove_files(path, and_directory=bool(made))
                raise
        return cls(path, lock, words)

    @classmethod
    def open(
        cls, path: Path, *, check: bool | None = None, track: Track = iter
    ) -> tuple[Self, EpisodeIndex]:
        """Resumes a directory, however its last writer ended; returns it with an index of its rows.

        Args:
            path: the directory.
            check: as in `recover`.
            track: reports progress.

        Raises:
            FileNotFoundError: it holds no storage, or lacks a file.
            ValueError: it is damaged or of another format. Nothing was changed.
            RuntimeError: it has a writer already.
            OSError: it is not writable.
        """
        with _locked(path, Description.read) as (lock, description):
            words = Words(path, description, writable=True)
            if not description.is_clean:
                # Odd until all is verified: a reader that is opened meanwhile can't rely on it.
                words.openings |= 1
            state, is_whole = recover(words, check, track)
            # Flushed rows may have been overwritten since, and lost.
            flushed = np.minimum(description.flushed, state.cursors)
            words.take_up_side(state, flushed)
            index = description.new_index()
            if not words.feed(index, state, track):
                raise damaged(path, "its marks are not those of its steps")
            remove_rows(path, but=description.data_name)
            directory = cls(path, lock, words)
            if not description.is_clean:
                words.forget(state.cursors)
            if not is_whole:
                # Both are durable before the next write: the old table might match its rows, yet not
                # what was recovered.
                words.publish(state)
                words.flush()
                steps: Any = {"flushed": flushed.tolist(), "tails": state.tails.tolist()}
                directory._say(replace(description, identity=uuid.uuid4().hex, **steps))
                warn_caller(
                    f"{path} was not closed, and what was written last is not whole, as after a loss of "
                    "power: rows that were not flushed were lost, "
                    f"{int((state.cursors - state.tails).sum())} are there.",
                    RuntimeWarning,
                )
            words.openings[:] = (words.openings | 1) + 1
        return directory, index

    # Writing

    @property
    def is_writer(self) -> bool:
        """Whether this process may write."""
        return self._lock.is_held

    @property
    def description(self) -> Description:
        """The current description."""
        return self.words.description

    @property
    def state(self) -> State:
        """The last committed state."""
        return self.words.committed()  # type: ignore[return-value]

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write."""
        if not self._lock.is_held:
            raise RuntimeError(
                f"the rows in {self.path} were closed, or belong to the process that this one was forked "
                "from, and can be read only: open them anew to write."
            )

    def begin(self, index: EpisodeIndex, block: Block) -> None:
        """Prepares to write further steps: their slots hold no row until `seal`.

        Args:
            index: the episodes, before the write.
            block: the steps.

        Raises:
            RuntimeError: this process may not write.
            OSError: the disk is full. Nothing has changed then.
        """
        self.prepare()
        if block.num_steps > self.description.most_steps:
            self._make_room(index, block)
        self.words.marked.clear(index.ring, block.num_steps, block.lanes, self.words.commits)

    def _make_room(self, index: EpisodeIndex, block: Block) -> None:
        """Evicts in advance the rows that a write of more steps than are spare will replace."""
        state, own = self.state, self.description
        kept = index.host_steps + block.num_steps - own.ring_steps + own.layout.past_steps
        tails = state.tails.copy()
        tails[block.which] = np.clip(kept, tails, state.cursors)[block.which]
        if (tails != state.tails).any():
            self.words.publish(state._replace(tails=tails))

    def seal(
        self,
        index: EpisodeIndex,
        blocks: Sequence[Block],
        write_count: int,
        trajectories: np.ndarray,
    ) -> None:
        """Seals steps that were written with checksums and marks, then commits them.

        Args:
            index: the episodes, with these steps.
            blocks: which steps of which lanes.
            write_count: rows written, as TorchRL's writers count them.
            trajectories: `[E]` the collector's number of each lane's last trajectory.
        """
        words = self.words
        kept = None if words.priorities.is_new else words.priorities
        for block in blocks:
            steps = block.num_steps, block.lanes, kept
            commit: Any = (words.commits, write_count, trajectories) if block is blocks[-1] else ()
            words.marked.seal(index.ring, *steps, *commit)

    def go_back(self, index: EpisodeIndex) -> None:
        """Rolls back to the last commit after a write that failed.

        If the rollback fails too, for example for lack of memory, this process becomes a reader.

        Args:
            index: the episodes.
        """
        self.check_writable()
        state = self._ended(index)
        try:
            self.words.forget(state.cursors)
            index.clear()
            self.words.feed(index, state)
        except BaseException:
            self.abandon()
            index.clear()
            raise

    def _ended(self, index: EpisodeIndex) -> State:
        """Returns the last commit, with the episodes that were ended since without a row."""
        state = self.state
        was_written = index.host_steps != state.cursors
        return state._replace(open=np.where(was_written, state.open, index.is_open.numpy()))

    def prepare(self) -> None:
        """Prepares for a change: durably says, before the first one, that the directory is not clean.

        Raises:
            RuntimeError: this process may not write.
            OSError: the disk is full, or the directory is gone. Nothing has changed then.
        """
        self.check_writable()
        if self.description.is_clean:
            self._say(replace(self.description, is_clean=False))

    def check_there(self) -> None:
        """Raises a FileNotFoundError if the directory is gone."""
        if not self._lock.is_there:
            raise removed(self.path)

    def _say(self, description: Description) -> None:
        self.check_there()
        description.write(self.path)
        self.words.description = description

    def evict(
        self, index: EpisodeIndex, tails: np.ndarray, write_count: int, trajectories: np.ndarray
    ) -> None:
        """Durably forgets the rows before a given step of each lane.

        Args:
            index: the episodes; loses these rows as well.
            tails: `[E]` the first steps to keep, as in `EpisodeIndex.evict`.
            write_count: as in `seal`.
            trajectories: as in `seal`.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        self.check_writable()
        tails = np.clip(tails, index.host_tails, index.host_steps)
        self._say(replace(self.description, tails=tails.tolist(), is_clean=False))
        index.evict(tails)
        self.words.commits.publish_lanes(index.ring, write_count, trajectories)

    def load(
        self,
        index: EpisodeIndex,
        write_count: int,
        trajectories: np.ndarray,
        fill: Callable[[Words], object],
        priorities: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """Replaces all rows by others, atomically and durably.

        Args:
            index: the episodes of the new rows.
            write_count: as in `seal`.
            trajectories: as in `seal`.
            fill: writes the new rows to their slots in the index, and the frames that the oldest ones are
                read with to the slots before those.
            priorities: of the rows, as `Words.keep_priorities` takes them; None if none are kept.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        self.check_writable()
        self.check_there()
        generation = self.description.generation + 1
        cursors, tails = index.host_steps.tolist(), index.host_tails.tolist()
        steps: Any = {"flushed": cursors, "tails": tails}
        # Commits are counted anew.
        steps["progress"] = {**self.description.progress, "number": None}
        new = replace(self.description, generation=generation, **steps, is_clean=False)
        try:
            words = Words.create(self.path, new)
            fill(words)
            commit: Any = words.commits, write_count, trajectories
            words.marked.seal(index.ring, new.ring_steps, None, None, *commit)
            if priorities is not None:
                words.keep_priorities(*priorities)
            words.protect_tips(index.host_steps)
            words.flush()
            sync_directory(self.path)
            new.write(self.path)
        finally:
            # An error may have come after the switch.
            if (now := Description.read(self.path)).generation == generation:
                self.words = words
            remove_rows(self.path, but=now.data_name)

    # Flushing and closing

    def flush(
        self,
        index: EpisodeIndex,
        progress: dict[str, Any] | None = None,
        *,
        is_clean: bool = False,
    ) -> None:
        """Waits until everything is on disk.

        Args:
            index: the episodes, some of which may have been ended without a row.
            progress: other state to resume from; None keeps the last one.
            is_clean: whether this is the last flush before closing.

        Raises:
            OSError: the disk is full. The rows written so far are kept.
            FileNotFoundError: the directory is gone.
        """
        self.check_writable()
        state, words = self._ended(index), self.words
        if not np.array_equal(state.open, self.state.open):
            self.prepare()
            words.publish(state)
        words.flush()
        words.protect_tips(state.cursors)
        changes: Any = {"flushed": state.cursors.tolist(), "tails": state.tails.tolist()}
        if progress is not None:
            changes["progress"] = {**progress, "number": words.commits.number}
        is_clean = is_clean or self.description.is_clean
        self._say(replace(self.description, **changes, is_clean=is_clean))

    def close(self, index: EpisodeIndex, progress: dict[str, Any] | None = None) -> None:
        """Flushes, marks the directory as clean, and releases the lock."""
        try:
            self.flush(index, progress, is_clean=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Releases the lock, and leaves everything else as a killed process would."""
        self._lock.release()

    def delete(self) -> None:
        """Removes the files, and the directory if it is empty then."""
        self.check_writable()
        if self._lock.is_there:
            remove_files(self.path, and_directory=True)
        self._lock.release()

    @staticmethod
    def delete_at(path: Path) -> None:
        """Removes the storage in a directory, of any format, if there is one.

        Raises:
            RuntimeError: it has a writer.
        """
        if holds_storage(path):
            with _locked(path, holds_storage) as (lock, _):
                remove_files(path, and_directory=False)
                lock.release()


@contextmanager
def _locked(path: Path, look: Callable[[Path], Found]) -> Iterator[tuple[WriterLock, Found]]:
    """Locks a directory for which `look` raises nothing; an error in the body releases the lock."""
    look(path)  # before the lock file is created
    lock = WriterLock(path)
    try:
        yield lock, look(path)  # again: another process may have held the lock meanwhile
    except BaseException:
        lock.release()
        raise
