"""A directory of rows, as its one writer sees it.

Letters: E lanes (environments), T live steps a lane at most, S spare steps, R = T + S, L lanes
written now.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.disk.commits import State
from trl_storages.disk.description import (
    Description,
    History,
    check_is_free,
    holds_storage,
    own_files,
    remove_files,
)
from trl_storages.disk.files import WriterLock, check_platform, sync_directory
from trl_storages.disk.recovery import recover
from trl_storages.disk.words import Track, Words, remove
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Directory"]


class Directory:
    """The files of a storage, held by the one process that writes them. Made by `create` and `open`.

    Attributes:
        path: the directory.
        description: what it says of itself.
        words: the files.
        process: the number of the process that opened it; one that was forked from it only reads.
    """

    def __init__(
        self, path: Path, lock: WriterLock, description: Description, words: Words, state: State
    ) -> None:
        self.path, self._lock = path, lock
        self.description, self.words, self._opened = description, words, state
        self.process = os.getpid()
        # Whether this writer has begun a history of its own.
        self._has_begun = False

    # Making and opening

    @classmethod
    def create(cls, path: Path, layout: Layout, num_rows: int, num_lanes: int) -> Self:
        """Makes the files of an empty storage, with all the space that they will need.

        Raises:
            FileExistsError: there is anything but what is left of an interrupted making.
            OSError: the disk is full or may not be written. Nothing is left then.
            RuntimeError: another process is making or writing it, or the platform has no file locks.
        """
        check_platform(path)
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        check_is_free(path)
        lock = WriterLock(path)
        try:
            check_is_free(path)  # of what another process made until it let the lock go
        except FileExistsError:
            lock.release()
            raise
        description = Description.of_new(layout, num_rows, num_lanes)
        try:
            description.announce(path)
            words = Words.create(path, description)
            description.write(path)
        except BaseException:
            remove_files(path, and_directory=is_new)
            lock.release()
            raise
        return cls(path, lock, description, words, words.commits.read())  # type: ignore[arg-type]

    @classmethod
    def open(cls, path: Path, *, check: bool | None = None, track: Track = iter) -> Self:
        """Takes up a directory where it was left, by whatever end of its last writer.

        Args:
            path: the directory.
            check: as in `recover`.
            track: shows how far it is.

        Raises:
            FileNotFoundError: it holds no storage, or lacks a file.
            ValueError: it is damaged or of another format. Nothing was changed.
            RuntimeError: there is a writer already, or the platform has no file locks.
            OSError: it may not be written.
        """
        check_platform(path)
        Description.read(path)  # before a lock is left where there is no storage
        lock = WriterLock(path)
        try:
            description = Description.read(path)
            words = Words(path, description, writable=True)
            state, num_lost = recover(path, words, description, check, track)
            directory = cls(path, lock, description, words, state)
            directory._remove_others()
            if num_lost is not None:
                directory._go_on_after_loss(num_lost)
        except BaseException:
            lock.release()
            raise
        return directory

    def _remove_others(self) -> None:
        """Removes the files of generations that a load has left, or never finished."""
        mine = f".{self.description.generation}.bin"
        for name in own_files(self.path):
            if not name.endswith(mine):
                (self.path / name).unlink(missing_ok=True)

    def _go_on_after_loss(self, num_lost: int) -> None:
        self.begin_history()
        warnings.warn(
            f"{self.path} was not closed, and what was written last is not whole, as after a loss of "
            f"power: {num_lost} rows or more that were not flushed were lost, "
            f"{int((self.state.cursors - self.state.tails).sum())} are there.",
            RuntimeWarning,
            stacklevel=2,
        )

    def episodes(self, track: Track = iter) -> EpisodeIndex:
        """Returns an index of the rows that are there.

        Raises:
            ValueError: they are not what they must be.
        """
        description = self.description
        index = EpisodeIndex(
            description.num_rows, description.num_lanes, spare_steps=description.spare_steps
        )
        if not self.words.feed(index, self.state, description, track):
            raise ValueError(
                f"{self.path} is damaged: its marks are not those of its steps. Bring it back from a "
                "copy; nothing was changed."
            )
        return index

    # Writing

    @property
    def is_writer(self) -> bool:
        """Whether this process may write."""
        return self._lock.is_held

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write."""
        if not self._lock.is_held:
            raise RuntimeError(
                f"the rows in {self.path} were closed, or belong to the process that this one was forked "
                "from, and can be read only: open them anew to write."
            )

    def begin(self, index: EpisodeIndex, num_steps: int, lanes: Sequence[int] | None) -> None:
        """Makes ready to write further steps: their slots hold no row until `seal`.

        Args:
            index: the episodes, before the write.
            num_steps: of each lane.
            lanes: which are written; None is all of them.

        Raises:
            RuntimeError: this process may not write.
            OSError: the disk is full. Nothing has changed then.
        """
        self.begin_history()
        committed, known = self.words.commits.cursors, index.host_steps
        is_one = len(known) == 1
        if committed[0] > known[0] if is_one else (committed > known).any():
            # An interrupt came when they were committed already: they are written once more, and must
            # stay where they are meanwhile.
            return
        if num_steps > self.description.spare_steps:
            self._make_room(slice(None) if lanes is None else [*lanes], num_steps)
        self.words.marked.clear(index.ring, num_steps, lanes)

    def _make_room(self, written: Any, num_steps: int) -> None:
        """Evicts what lies where more steps go than there are spare ones; it is being replaced anyway."""
        state = self.state
        lanes = state.lanes.copy()
        cursors, tails = lanes[:2, written]
        lanes[1, written] = np.clip(
            cursors + num_steps - self.description.ring_steps, tails, cursors
        )
        if (lanes != state.lanes).any():
            self._publish(state._replace(lanes=lanes))

    def seal(self, index: EpisodeIndex, num_steps: int, lanes: Sequence[int] | None) -> None:
        """Says of the newest steps of lanes, which were written, what they are; as `begin`."""
        self.words.marked.seal(index.ring, self.description.history, num_steps, lanes)

    def commit(self, index: EpisodeIndex, write_count: int, trajectories: np.ndarray) -> None:
        """Makes what an index says count.

        Args:
            index: the episodes.
            write_count: rows written, as TorchRL's writers count them.
            trajectories: `[E]` the collector's number of each lane's last trajectory.

        Raises:
            RuntimeError: this process may not write.
            OSError: the disk is full. Nothing has changed then.
        """
        self.begin_history()
        history = self.description.history
        self.words.commits.publish_lanes(index, history, write_count, trajectories)

    @property
    def state(self) -> State:
        """What was committed last, or is left of it."""
        if not self._has_begun:
            return self._opened
        return self.words.commits.read()  # type: ignore[return-value]

    def _publish(self, state: State) -> None:
        self.words.commits.publish(state._replace(history=self.description.history))

    def begin_history(self) -> None:
        """Says for good, before the first change, that what comes is this writer's.

        Raises:
            RuntimeError: this process may not write.
            OSError: the disk is full. Nothing has changed then.
        """
        self.check_writable()
        if not self._has_begun:
            self._begin_history(self._opened.cursors, self._opened.tails)

    def _begin_history(self, cursors: np.ndarray, tails: np.ndarray) -> None:
        """Says for good that steps from now on are this writer's."""
        description = self.description.begun(cursors.tolist(), tails.tolist())
        description.write(self.path)
        self.description = description
        # What is left of a table is all that counts from now on.
        self._publish(self._opened)
        self._has_begun = True

    def empty(self, index: EpisodeIndex, write_count: int, trajectories: np.ndarray) -> None:
        """Forgets all rows, for good.

        Args:
            index: the episodes; it forgets them too.
            write_count: as in `commit`.
            trajectories: likewise.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        self.check_writable()
        cursors = index.host_steps
        if not self._has_begun:
            self._begin_history(cursors, cursors)
        else:
            description = replace(self.description, tails=tuple(cursors.tolist()))
            description.write(self.path)
            self.description = description
        index.evict(cursors)
        self.commit(index, write_count, trajectories)

    def replace(
        self,
        index: EpisodeIndex,
        write_count: int,
        trajectories: np.ndarray,
        fill: Callable[[Words], object],
    ) -> None:
        """Replaces all rows by others, at once and for good.

        Args:
            index: the episodes of the others.
            write_count: as in `commit`.
            trajectories: likewise.
            fill: writes the others to the slots that the index has them in.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        self.check_writable()
        old, lanes = self.description, _columns(index, trajectories)
        cursors, tails = tuple(lanes[0].tolist()), tuple(lanes[1].tolist())
        new = replace(
            old,
            generation=old.generation + 1,
            histories=(History(old.history + 1, tails),),
            tails=tails,
            flushed=cursors,
            is_clean=False,
        )
        words, state = Words.create(self.path, new), State(new.history, write_count, lanes)
        try:
            fill(words)
            for lane, (cursor, tail) in enumerate(zip(cursors, tails, strict=True)):
                words.marked.seal(index.ring, new.history, cursor - tail, [lane])
            words.commits.publish(state)
            words.flush()
            sync_directory(self.path)
            new.write(self.path)
        finally:
            # An interrupt may have come when the directory had changed already.
            if Description.read(self.path).generation == new.generation:
                self.description, self.words, self._has_begun = new, words, True
                remove(self.path, old)
            else:
                remove(self.path, new)

    # Keeping

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
            progress: what else is to go on where it is; None keeps what there is.
            is_clean: whether nothing more is written.

        Raises:
            OSError: the disk is full. What was written is there all the same.
        """
        self.check_writable()
        state = self.state
        if not np.array_equal(state.open, index.is_open.numpy()):
            self.commit(index, state.write_count, state.trajectories)
        self.words.flush()
        sync_directory(self.path)
        if progress is not None:
            progress = {**progress, "number": self.words.commits.number}
        live = index.slots_by_age(torch.arange(len(index)))
        description = replace(
            self.description,
            flushed=tuple(state.cursors.tolist()),
            tails=tuple(state.tails.tolist()),
            is_clean=is_clean or self.description.is_clean,
            has_priorities=is_clean and self.words.has_priorities(live),
            progress=self.description.progress if progress is None else progress,
        )
        description.write(self.path)
        self.description = description

    def abandon(self) -> None:
        """Lets another writer in, and leaves everything as a killed process would."""
        self._lock.release()

    def delete(self) -> None:
        """Removes the files, and the directory if nothing else is in it."""
        self.check_writable()
        remove_files(self.path, and_directory=True)
        self._lock.release()

    @staticmethod
    def delete_at(path: Path) -> None:
        """Removes the storage in a directory, of whatever format, if there is one and nobody writes it.

        Raises:
            RuntimeError: it has a writer.
        """
        check_platform(path)
        if holds_storage(path):
            lock = WriterLock(path)
            try:
                remove_files(path, and_directory=False)
            finally:
                lock.release()


def _columns(index: EpisodeIndex, trajectories: np.ndarray) -> np.ndarray:
    """Returns the lanes as a commit has them, `[4, E]`."""
    return np.stack(
        [index.host_steps, index.host_tails, index.is_open.long().numpy(), trajectories]
    )
