"""A directory that keeps transitions after the process that wrote them has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl_storages.directory.description import NAME, ROWS, Description, damaged
from trl_storages.directory.files import NO_LINKS, WriterLock, open_regular, sync_directory
from trl_storages.directory.recovery import recover, remove_unpublished
from trl_storages.entries import Arena, HostEntries, Layout, arena_sizes
from trl_storages.entries.frames import host_entries
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import checksums
from trl_storages.kernels.invariants import check_bounds, require

__all__ = ["Directory"]

#: Writes transitions to an index and entries.
Fill = Callable[[EpisodeIndex, HostEntries], None]
# Further files of a directory, besides its description and its transitions.
_OTHER_FILES = (f"{NAME}.new", "lock")


class Directory:
    """Transitions in a file, with their index, which survive the process; see `create` and `open`.

    After a kill all written transitions are stored. After a power cut those are stored that `flush` has
    written to the disk, unless they were evicted since, and later ones if they are intact.

    Attributes:
        path: the directory.
        layout: the layout of a transition.
        index: the episode index of the transitions.
        entries: reads and writes the entries.
        is_open: whether `close` was not called yet.
    """

    def __init__(
        self, path: Path, lock: WriterLock | None, description: Description, file: int
    ) -> None:
        self.path, self._lock, self._description = path, lock, description
        self.is_open = True
        # Another inode at the same path means that another process has replaced the file.
        self._inode, self._rows_path = os.fstat(file).st_ino, str(path / description.rows)
        # Whether this reader has recovered an index in its memory, which does not follow a later writer.
        self._has_recovered_index = False
        self.layout = layout = description.layout
        sizes = description.max_size, description.num_envs
        needs = {"stack": layout.frames, "depth": layout.depth}
        self.index = index = EpisodeIndex(*sizes, **needs, max_entries=description.max_entries)
        arena_options = arena_sizes(layout, index, is_in_file=True)
        is_writer, lazy = lock is not None, ("entries", "checksums", "records")
        self._arena = arena = Arena(**arena_options, file=file, writable=is_writer, lazy=lazy)
        self.entries = host_entries(layout, index, arena)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        layout: Layout,
        max_size: int,
        num_envs: int = 1,
        max_entries: int | None = None,
        *,
        fresh: bool = False,
        fill: Fill | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Directory:
        """Creates a directory, and opens it for writing.

        Previous contents are removed once the new contents are on the disk.

        Args:
            path: the directory; it is created if it does not exist.
            layout: the layout of a transition.
            max_size: number of transitions, see `EpisodeIndex`.
            num_envs: number of lanes.
            max_entries: number of observations that fit, over all lanes.
            fresh: whether to discard previous transitions.
            fill: writes the first transitions; None leaves the directory empty.
            state: the state of the other components, as JSON.

        Raises:
            FileExistsError: the directory contains other files, or transitions and `fresh` is False.
            RuntimeError: the directory has a writer.
            OSError: the disk is full.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        _check_free(path, fresh)
        lock = WriterLock(path)
        try:
            _check_free(path, fresh)
            zeros = [0] * num_envs
            sizes = max_size, num_envs, max_entries
            description = Description(layout, *sizes, tails=zeros, cursors=zeros, state=state or {})
            directory = cls._create_file(path, lock, description, fill)
            sync_directory(path.parent)
        except BaseException:
            lock.forget()
            raise
        return directory

    @classmethod
    def _create_file(
        cls, path: Path, lock: WriterLock | None, description: Description, fill: Fill | None
    ) -> Directory:
        """Creates a file of transitions, and enters it in the description once it is on the disk."""
        number = 1 + max((int(name[5:]) for name in _rows_in(path)), default=0)
        rows = path / f"rows.{number}"
        file = os.open(rows, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o644)
        try:
            directory = cls(path, lock, replace(description, rows=rows.name), file)
            if fill is not None:
                fill(directory.index, directory.entries)
                directory.entries.write_all_checksums()
        except BaseException:
            rows.unlink()
            raise
        finally:
            os.close(file)
        # A reset count that no earlier file had.
        directory._arena.arrays["epoch"][:] = time.time_ns()
        directory.flush()
        directory._remove_old_files()
        return directory

    def replace_rows(self, fill: Fill, state: Mapping[str, Any] | None) -> Directory:
        """Replaces the transitions by those that `fill` writes, and the state of the components.

        Returns:
            the directory with the new transitions; this object can no longer write.

        Raises:
            OSError: the disk is full. Nothing was changed.
        """
        state = self.state if state is None else dict(state)
        description = replace(self._description, state=state)
        directory = self._create_file(self.path, self._lock, description, fill)
        self._lock = None
        return directory

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: str = "r+") -> Directory:
        """Opens a directory.

        After a power cut, and in a copy of a directory that was in use, the index is rebuilt from the
        intact transitions. After a clean shutdown transitions are not checked; `validate` checks them.

        Args:
            path: the directory.
            mode: "r+" to write, "r" to read.

        Raises:
            FileNotFoundError: the directory contains no storage.
            RuntimeError: the directory has another writer, and `mode` is "r+".
            ValueError: the directory is damaged.
        """
        path = Path(path)
        lock = WriterLock(path) if mode == "r+" else None
        try:
            while True:
                description = Description.read(path)
                try:
                    return cls._open(path, lock, description)
                except ValueError:
                    # Another process may have changed the directory while it was read.
                    if Description.read(path) == description:
                        raise
        except BaseException:
            if lock:
                lock.forget()
            raise

    @classmethod
    def _open(cls, path: Path, lock: WriterLock | None, description: Description) -> Directory:
        rows = path / description.rows
        try:
            file = open_regular(rows, os.O_RDONLY if lock is None else os.O_RDWR)
        except OSError as error:
            raise damaged(rows, error) from None
        try:
            if not os.fstat(file).st_size:
                raise ValueError("it is empty")
            directory = cls(path, lock, description, file)
            if description.is_clean:
                directory._check_closed()
            is_same_boot = description.inode == directory._inode and description.boot == _boot()
            # A writer checks all transitions before it enters this boot in the description.
            has_writer = lock is None and is_same_boot and description.boot != ""
            has_writer = has_writer and WriterLock.is_taken(path)
            if has_writer:
                check_bounds(directory.index.tables)
        except (ValueError, OverflowError, MemoryError, RuntimeError) as error:
            raise damaged(rows, str(error)) from error
        finally:
            os.close(file)
        if not (description.is_clean or has_writer):
            # On systems without boot ids a writer recovers the index; a reader follows it as it is.
            if is_same_boot and (description.boot or lock is None):
                directory.validate()
                if lock:
                    remove_unpublished(directory.index, directory.entries)
            else:
                recover(directory.index, directory.entries, description)
                directory._has_recovered_index = lock is None
        if lock:
            directory.flush()
            directory._remove_old_files()
        return directory

    def _check_closed(self) -> None:
        """Raises an error unless the lanes match the description, and all slots are within the file."""
        check_bounds(self.index.tables)
        lanes = self.index.tails.tolist(), self.index.cursors.tolist()
        if lanes != (self._description.tails, self._description.cursors):
            raise ValueError("its index does not match the description of the closed directory")

    def validate(self) -> None:
        """Raises a ValueError if the index or a live transition is damaged."""
        index = self.index
        try:
            index.validate()
            lane, step, slot = index.retained_steps()
            at = index.where[slot]
            numbers = checksums.step_numbers(index.tables, slot, step)
            is_intact = self.entries.are_intact(at) & (
                self.entries.checksums[at, checksums.NUMBER] == numbers
            )
            require("a transition does not match its checksum", is_intact, index.tables, lane, step)
        except RuntimeError as error:
            raise damaged(self.path / self._description.rows, str(error)) from error

    def _remove_old_files(self) -> None:
        """Removes files of transitions that the description does not name."""
        for name in _rows_in(self.path):
            if name != self._description.rows:
                (self.path / name).unlink(missing_ok=True)

    def reopen_if_replaced(self) -> Directory:
        """Returns this directory, or opens it again if another process has replaced its contents."""
        try:
            inode = os.stat(self._rows_path).st_ino
        except OSError:
            inode = -1
        is_current = inode == self._inode
        if is_current and self._has_recovered_index:
            is_current = Description.read(self.path) == self._description
        return self if is_current or not self.is_open else Directory.open(self.path, "r")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a writer is a reader, unless the writer has ended: then the copy continues writing.
        return (_reopen, (self.path,)) if self.is_writer else (Directory.open, (self.path, "r"))

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the other components, from the last `flush`."""
        return self._description.state

    @property
    def is_writer(self) -> bool:
        """Whether this process may write."""
        return self._lock is not None and self._lock.is_held

    @property
    def has_other_writer(self) -> bool:
        """Whether another process may be writing."""
        return not (self.is_writer or Description.read(self.path).is_clean)

    def check_writer(self) -> None:
        """Raises a RuntimeError if this process may not write."""
        if not self.is_writer:
            raise RuntimeError(
                f"{self.path} is open for reading only: it was opened with mode='r', closed, or forked."
            )

    def flush(
        self, state: Mapping[str, Any] | None = None, *, is_clean: bool = False, tails: Any = None
    ) -> None:
        """Waits until all transitions are on the disk, where they survive a power cut.

        Args:
            state: the state of the other components, as JSON; None keeps the previous one.
            is_clean: whether this process will not write any more.
            tails: `[E]` oldest steps that a recovery may restore; None takes the oldest live steps.

        Raises:
            OSError: the disk is full. The transitions are stored as after a kill.
        """
        tails, cursors = self.index.tails if tails is None else tails, self.index.cursors.tolist()
        self._arena.flush()
        state = self.state if state is None else dict(state)
        words = {"tails": tails.tolist(), "cursors": cursors, "state": state, "is_clean": is_clean}
        description = replace(self._description, **words, boot=_boot(), inode=self._inode)
        description.write(self.path)
        self._description = description

    def evict(self, keep_steps: int = 0) -> None:
        """Evicts all transitions except the last `keep_steps` of each lane, durably.

        Raises:
            OSError: the disk is full. Nothing was changed.
        """
        self.flush(tails=self.index.tails_after_evicting(keep_steps))
        self.index.evict(keep_steps)

    def close(self, state: Mapping[str, Any] | None = None, *, keep: bool = True) -> None:
        """Flushes, and lets another process write; `keep=False` removes the directory.

        The transitions can still be read.
        """
        if not keep:
            self.check_writer()
        try:
            if not keep:
                for name in (NAME, *_rows_in(self.path), *_OTHER_FILES):
                    (self.path / name).unlink(missing_ok=True)
                with suppress(OSError):  # the directory contains other files
                    self.path.rmdir()
            elif self.is_writer:
                self.flush(state, is_clean=True)
        finally:
            self.is_open = False
            if self._lock is not None:
                self._lock.forget()


def _reopen(path: Path) -> Directory:
    """Opens the directory of a pickled writer: for writing, unless it has another writer."""
    with suppress(RuntimeError):
        return Directory.open(path, "r+")
    return Directory.open(path, "r")


def _boot() -> str:
    """Returns the id of this boot of this machine; "" on systems without such ids."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _rows_in(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if ROWS.fullmatch(file.name)]


def _check_free(path: Path, fresh: bool) -> None:
    """Raises a FileExistsError unless a directory is empty, or contains a storage to discard."""
    names = {file.name for file in path.iterdir()}
    if NAME in names and fresh:
        return
    if blocking := names - {*_rows_in(path), *_OTHER_FILES}:
        advice = ", or pass fresh=True to discard its contents" if NAME in names else ""
        raise FileExistsError(f"{path} must be empty{advice}; it contains {sorted(blocking)[:5]}.")
