"""The files of a storage while they are open, for their one writer or for a reader.

Letters: N rows, W words a row, E lanes (environments).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trl_storages.disk.directory import (
    HEADER,
    MARKS,
    PROGRESS,
    ROWS,
    check_is_storage,
    create_files,
    read_layout,
    remove_files,
    write_header,
)
from trl_storages.disk.files import (
    MappedWords,
    WriterLock,
    check_platform,
    sync_directory,
    write_text,
)
from trl_storages.disk.header import Header
from trl_storages.rows.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OpenFiles"]


class OpenFiles:
    """The files of one storage: made or opened, flushed and closed.

    Made by `create` and `open`.

    Attributes:
        directory: where the files are.
        layout: of a row.
        rows: `[N, W]` int64.
        marks: `[N, 2]` int64: mark and checksum of each row.
        column: further words beside the rows, if a sampler keeps some.
        header: which rows are there.
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
        self.column: MappedWords | None = None
        self.state = self.header.read()

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
    ) -> Self:
        """Makes the files of an empty storage; see `create_files`."""
        lock = create_files(directory, layout, num_rows, num_lanes, has_episodes=has_episodes)
        return cls._open(directory, lock)

    @classmethod
    def open(cls, directory: Path, *, writable: bool = True) -> Self:
        """Opens the files of a storage, and completes or undoes what a killed writer left.

        Raises:
            FileNotFoundError: the directory holds no storage, or lacks a file.
            ValueError: a file is truncated, damaged or of another version. Nothing was changed.
            RuntimeError: there is a writer already, or the platform has no file locks.
            OSError: the disk may not be written.
        """
        check_platform(directory)
        check_is_storage(directory)
        return cls._open(directory, WriterLock(directory) if writable else None)

    @classmethod
    def _open(cls, directory: Path, lock: WriterLock | None) -> Self:
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
        remove_files(self.directory, and_directory=True)
        self.close()

    def tensor(self) -> torch.Tensor:
        """Returns the rows as a tensor that shares their memory."""
        return torch.from_numpy(self.rows)
