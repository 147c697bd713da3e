"""A directory of rows, as any number of readers see it while one process may be writing.

Letters: E lanes (environments).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from trl_storages.disk.description import Description, stamp
from trl_storages.disk.directory import Directory
from trl_storages.disk.files import check_platform, has_writer
from trl_storages.disk.recovery import are_whole
from trl_storages.disk.words import State, Track, Words
from trl_storages.ring import EpisodeIndex

__all__ = ["Reader"]

Batch = TypeVar("Batch")

_PATIENCE = 10.0  # seconds that a batch may take, with all rows that it loses to the writer


class Reader:
    """Follows what the writer of a directory commits, and knows of rows that are not what they were.

    The writer takes the mark of a row away before it writes there. So what was read is whole if the
    marks of its rows are still there afterwards.

    Args:
        path: the directory.
        identity: of the storage that must be there; None takes any.
        directory: whose files are mapped already, of a writer from which this process was forked, or
            that was closed.
        check: whether to look at the checksums of all rows at first; None does where the directory was
            not closed and has no writer, who would have looked.

    Attributes:
        description: of the directory.
        words: the files that are read. Others take their place where the writer loads other rows.
        seen: the slots of rows that were read since `read_consistently` began; None outside of it.

    Raises:
        FileNotFoundError: the directory holds no storage.
        ValueError: it is damaged, or of another format.
    """

    def __init__(
        self,
        path: Path,
        *,
        identity: str | None = None,
        directory: Directory | None = None,
        check: bool | None = False,
    ) -> None:
        check_platform(path)
        self.path = path
        self.description = Description.read(path) if directory is None else directory.description
        self._identity = identity or self.description.identity
        self._stamp: tuple[int, int, int] | None = None
        #: What was committed at the last look, and the number of that commit.
        self.state: State | None = None
        self._number: int | None = None
        self.seen: list[torch.Tensor] | None = None
        if directory is None:
            self._map(self.description)
        else:
            self.words = directory.words
        if check is None:
            check = not (self.description.is_clean or has_writer(path))
        self._must_check = check

    def check_writable(self) -> None:
        """Raises a RuntimeError: only one process may write."""
        raise RuntimeError(
            f"the rows in {self.path} were opened for reading, as workers, copies and pickles are: open "
            "them without mode='r' to write."
        )

    # Following

    def _map(self, description: Description) -> None:
        """Takes up the files of a description, or of the one that has taken its place meanwhile."""
        if description.identity != self._identity:
            raise RuntimeError(
                f"the storage in {self.path} was deleted, and made anew: open it again to read the new "
                "one."
            )
        try:
            self.words = Words(self.path, description, writable=False)
        except FileNotFoundError:
            now = Description.read(self.path)
            if now == description:
                raise
            self._map(now)
        else:
            self.description = description

    def _look_at_description(self, index: EpisodeIndex) -> None:
        """Looks whether the directory is the same, and has the same generation and histories."""
        now, old = stamp(self.path), self.description
        if now == self._stamp:
            return
        if now is None:
            raise RuntimeError(
                f"the storage in {self.path} was deleted; there is nothing to be read."
            )
        new = Description.read(self.path)
        if (new.identity, new.generation) != (old.identity, old.generation):
            self._map(new)
        else:
            self.description = new
        self._stamp, new = now, self.description
        if (new.generation, new.histories) != (old.generation, old.histories):
            # What is known may be of rows that a killed writer left behind.
            index.clear()
            self.state, self._number = None, None

    def refresh(self, index: EpisodeIndex, track: Track = iter) -> bool:
        """Takes in what was committed since the last look.

        Args:
            index: the episodes; it is brought to what was committed.
            track: shows how far it is.

        Returns:
            whether there was anything new.

        Raises:
            RuntimeError: the directory was deleted or made anew, or rows are overwritten faster than
                they are looked at.
            ValueError: it is damaged.
        """
        until, wrong = time.monotonic() + _PATIENCE, None
        while True:
            self._look_at_description(index)
            words, description = self.words, self.description
            number = words.commits.number
            if number == self._number:
                return False
            state = words.committed(description)
            if (
                state is not None
                and (
                    not self._must_check or are_whole(words, words.steps(description, track), state)
                )
                and words.feed(index, state, description, track)
            ):
                self.state, self._number, self._must_check = state, number, False
                return True
            if number == wrong and (self._must_check or not has_writer(self.path)):
                raise ValueError(
                    f"{self.path} is damaged, or was not closed before the power failed: open it for "
                    "writing once."
                )
            # A history is made known before its first commit.
            self._stamp, wrong = None, number
            if time.monotonic() > until:
                raise RuntimeError(self._too_slow())

    # Reading

    def read_consistently(
        self, index: EpisodeIndex, refresh: Callable[[], object], read: Callable[[], Batch]
    ) -> Batch:
        """Returns what `read` reads, all of it from rows that were there while it did.

        Args:
            index: the episodes.
            refresh: takes in what is new.
            read: reads rows and notes them in `seen`; it is called again where some were overwritten.

        Raises:
            RuntimeError: rows are overwritten faster than a batch is read.
            Exception: what `read` raises of rows that were there.
        """
        if self.seen is not None:
            return read()  # within another call, which will look
        until: float | None = None
        while True:
            self.seen = []
            try:
                batch = read()
                if self.are_there(index, self.seen):
                    return batch
            except Exception:
                # Of rows half written, a transform may say anything.
                if self.are_there(index, self.seen):
                    raise
            finally:
                self.seen = None
            # The first try may have waited for loops to be compiled.
            if until is None:
                until = time.monotonic() + _PATIENCE
            elif time.monotonic() > until:
                raise RuntimeError(self._too_slow())
            refresh()

    def are_there(self, index: EpisodeIndex, seen: list[torch.Tensor]) -> bool:
        """Returns whether the writer has not begun to overwrite any of some rows.

        Args:
            index: the episodes.
            seen: int64 slots of rows that were there at the last look.
        """
        if not all(self.words.marked.hold(index.ring, slots) for slots in seen):
            return False
        # After all reads before, as the marks. What was free to a writer may not be to the next one.
        return self.state is None or self.words.history == self.state.history

    def _too_slow(self) -> str:
        return (
            f"the rows in {self.path} are overwritten faster than a batch is read, or damaged: make the "
            "storage larger or the batches smaller, or open it for writing once."
        )
