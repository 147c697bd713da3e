"""The files of a storage's rows, as this process writes or reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakMethod

import torch

from trl_storages.disk.directory import Directory
from trl_storages.disk.reader import Reader
from trl_storages.disk.words import Track, Words
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout
from trl_storages.rows.saved_rows import Moved

__all__ = ["RowFiles"]

Batch = TypeVar("Batch")


class RowFiles:
    """Rows in a directory, which one process writes and any number of others read.

    A process that was forked from the writer is a reader, as is one that has closed the directory.

    Args:
        source: the `Directory` if this process writes it, otherwise a `Reader` that follows the writer.
        episodes: the index of the rows.
        adopt: called with the layout and the words of the rows, at first and when they are replaced.
    """

    def __init__(
        self,
        source: Directory | Reader,
        episodes: EpisodeIndex,
        adopt: Callable[[Layout, Words], None],
    ) -> None:
        self.episodes = episodes
        #: Number of batches between checks for the writer's new rows.
        self.fetch_every = 1
        # Weak, so that the files are closed once the storage is gone.
        self._adopt_rows = WeakMethod(adopt)
        #: The directory if this process writes it, or once did; None in other processes.
        self.directory = source if isinstance(source, Directory) else None
        self._reader = None if isinstance(source, Directory) else source
        #: Counts refreshes, rollbacks and replacements.
        self.refreshes = 1
        #: Called when rows have changed by a refresh or a rollback, to notify samplers.
        self.on_new_rows: Callable[[], object] | None = None
        # Batches read so far.
        self._reads = 0
        # The files that were adopted.
        self._words: Words | None = None
        self._adopt(source)

    def _adopt(self, source: Directory | Reader) -> None:
        if self._words is not source.words and (adopt := self._adopt_rows()) is not None:
            adopt(source.description.layout, source.words)
            self._words = source.words

    @property
    def reader(self) -> Reader | None:
        """Follows the writer; None in the process that writes."""
        directory = self.directory
        if self._reader is None and directory is not None and not directory.is_writer:
            self._reader = Reader(directory.path, directory=directory)
            if directory.process != os.getpid():
                # The fork may have caught another thread in the middle of a write.
                self.refresh()
        return self._reader

    @property
    def source(self) -> Directory | Reader:
        """The `Reader` or `Directory` through which this process reads or writes."""
        return self.reader or self.directory  # type: ignore[return-value]

    def refresh(self, track: Track = iter) -> None:
        """Takes in what the writer has committed since the last refresh.

        Args:
            track: shows progress.

        Raises:
            RuntimeError: the directory was deleted or recreated, or rows are overwritten faster than
                they are read.
        """
        reader: Reader = self.reader  # type: ignore[assignment]
        try:
            has_news = reader.refresh(self.episodes, track)
        finally:
            # Also if it failed, after it had found other files.
            self._adopt(reader)
        self._count(has_news)

    def go_back(self) -> None:
        """Rolls back to the committed rows; see `Directory.go_back`."""
        self.directory.go_back(self.episodes)  # type: ignore[union-attr]
        self._count(has_news=True)

    def _count(self, has_news: bool) -> None:
        # Counted in any case: changes of priorities are not reported as news.
        self.refreshes += 1
        if has_news and self.on_new_rows is not None:
            self.on_new_rows()

    def read_consistently(self, read: Callable[[], Batch]) -> Batch:
        """Returns what `read` returns, once no row that it read was overwritten meanwhile.

        Args:
            read: reads rows; called again if another process overwrote some of them meanwhile.

        Raises:
            RuntimeError: rows are overwritten faster than a batch is read.
            Exception: what `read` raises for rows that were not overwritten.
        """
        reader = self.reader
        if reader is None or reader.seen is not None:
            return read()
        if self._reads % self.fetch_every == 0:
            self.refresh()
        self._reads += 1
        return reader.read_consistently(self.episodes, self.refresh, read)

    def note(self, *slots: torch.Tensor | None) -> None:
        """Records the slots that are read, int64 of any shapes, if others may overwrite them."""
        if self._reader is not None and self._reader.seen is not None:
            self._reader.seen += [some for some in slots if some is not None]

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write them."""
        (self.directory or self._reader).check_writable()  # type: ignore[union-attr]

    def load(self, moved: Moved, fill: Callable[[Words], None]) -> None:
        """Replaces all rows atomically; see `Directory.load`."""
        directory: Directory = self.directory  # type: ignore[assignment]
        try:
            commit = moved.episodes, moved.write_count, moved.trajectories
            directory.load(*commit, fill, moved.priorities)
        finally:
            self._adopt(directory)
            self.refreshes += 1
