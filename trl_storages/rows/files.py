"""The files of a storage's rows, as this process writes or reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from weakref import WeakMethod

import torch

from trl_storages.disk.description import Description
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

    A process that forked from the writer reads, and so does one that has closed the directory.

    Args:
        source: the directory, if this process writes it; otherwise what follows its writer.
        episodes: the index of the rows.
        adopt: called with a layout and the words of rows that have taken the place of those before.
        fetch_every: batches that are read before the writer's new rows are looked at.
    """

    def __init__(
        self,
        source: Directory | Reader,
        episodes: EpisodeIndex,
        adopt: Callable[[Layout, Words], None],
        fetch_every: int = 1,
    ) -> None:
        self.episodes, self.fetch_every = episodes, fetch_every
        # Files are closed when nobody has the rows any more.
        self._adopt_rows = WeakMethod(adopt)
        #: The files as this process writes them, or wrote them once; None in others.
        self.directory = source if isinstance(source, Directory) else None
        self._reader = None if isinstance(source, Directory) else source
        #: Counts how often what others write was looked at.
        self.refreshes = 1
        #: Called after new rows of another process were found, so that samplers hear of them.
        self.on_new_rows: Callable[[], object] | None = None
        # Batches that were read.
        self._reads = 0
        self._adopt(source)

    def _adopt(self, source: Directory | Reader) -> None:
        if (adopt := self._adopt_rows()) is not None:
            adopt(source.description.layout, source.words)

    @property
    def reader(self) -> Reader | None:
        """What follows the writer; None in the process that writes."""
        directory = self.directory
        if self._reader is None and directory is not None and not directory.is_writer:
            self._reader = Reader(directory.path, directory=directory)
            if directory.process != os.getpid():
                # What is known may be half of what another thread was writing when this one forked.
                self.episodes.clear()
                self.refresh()
            self._adopt(self._reader)
        return self._reader

    @property
    def source(self) -> Directory | Reader:
        """What this process reads or writes them by."""
        return self.reader or self.directory  # type: ignore[return-value]

    @property
    def words(self) -> Words:
        """The files themselves."""
        return self.source.words

    @property
    def description(self) -> Description:
        """What is said of them."""
        return (self.directory or self._reader).description  # type: ignore[union-attr]

    @property
    def path(self) -> Path:
        """The directory that they are in."""
        return (self.directory or self._reader).path  # type: ignore[union-attr]

    def refresh(self, track: Track = iter) -> None:
        """Takes in what the writer has committed since the last time.

        Args:
            track: shows how far it is.

        Raises:
            RuntimeError: the directory was deleted or made anew, or rows are overwritten faster than they
                are looked at.
        """
        reader: Reader = self.reader  # type: ignore[assignment]
        words = reader.words
        has_news = reader.refresh(self.episodes, track)
        # Of priorities nobody tells.
        self.refreshes += 1
        if not has_news:
            return
        if reader.words is not words:
            self._adopt(reader)
        if self.on_new_rows is not None:
            self.on_new_rows()

    def go_back(self) -> None:
        """Returns to the rows that count; see `Directory.go_back`."""
        self.directory.go_back(self.episodes)  # type: ignore[union-attr]
        self.refreshes += 1
        if self.on_new_rows is not None:
            self.on_new_rows()

    def read_consistently(self, read: Callable[[], Batch]) -> Batch:
        """Returns what `read` reads, all of it from rows that were there while it did.

        Args:
            read: reads rows; where another process may write them, it is called again if some were
                overwritten meanwhile.

        Raises:
            RuntimeError: rows are overwritten faster than a batch is read.
            Exception: what `read` raises of rows that were there.
        """
        reader = self.reader
        if reader is None or reader.seen is not None:
            return read()
        if self._reads % self.fetch_every == 0:
            self.refresh()
        self._reads += 1
        return reader.read_consistently(self.episodes, self.refresh, read)

    def note(self, *slots: torch.Tensor | None) -> None:
        """Notes which rows are read, int64 of any shapes, where others may overwrite them meanwhile."""
        if self._reader is not None and self._reader.seen is not None:
            self._reader.seen += [some for some in slots if some is not None]

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write them."""
        (self.directory or self._reader).check_writable()  # type: ignore[union-attr]

    def replace(self, moved: Moved, fill: Callable[[Words], None]) -> None:
        """Puts other rows in the place of all that there are, at once; see `Directory.replace`."""
        directory: Directory = self.directory  # type: ignore[assignment]
        words = directory.words
        try:
            directory.replace(moved.episodes, moved.write_count, moved.trajectories, fill)
        finally:
            if directory.words is not words:
                self._adopt(directory)
                self.refreshes += 1
