"""A directory of rows as a reader sees it; there may be many, while one process writes.

Letters: E lanes (environments).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from trl_storages.disk.description import Description, fingerprint
from trl_storages.disk.directory import Directory
from trl_storages.disk.files import check_platform, has_writer
from trl_storages.disk.words import State, Track, Words
from trl_storages.ring import EpisodeIndex

__all__ = ["Reader"]

Batch = TypeVar("Batch")

_PATIENCE = 10.0  # seconds in which a batch must succeed, retries included


class Reader:
    """Follows the commits of a directory's writer, and detects rows that were overwritten while read.

    The writer clears the mark of a row before it overwrites it. So a read is consistent if the marks of
    its rows are unchanged afterwards.

    Args:
        path: the directory.
        identity: of the expected storage; None accepts any.
        directory: a directory whose files are mapped already: that of a writer from which this process
            was forked, or one that was closed.
        check: whether to verify the checksums of all rows first; None does if the directory was not
            closed, and has no writer that has verified them.

    Attributes:
        words: the mapped files. Replaced when the writer loads other rows.
        seen: the slots of rows read since `read_consistently` began; None outside of it.

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
        self._fingerprint: tuple[int, int, int] | None = None
        #: The last commit that was taken in, and its number.
        self.state: State | None = None
        self._number: int | None = None
        # How often the directory had been opened to write.
        self._openings: int | None = None
        self.seen: list[torch.Tensor] | None = None
        self.words: Words = None if directory is None else directory.words  # type: ignore[assignment]
        self._identity = identity if directory is None else directory.description.identity
        if directory is None:
            self._look()
        if check is None:
            is_verified = has_writer(path) and not self.words.openings.item() & 1
            check = not (self.description.is_clean or is_verified)
        self._must_check = check

    @property
    def description(self) -> Description:
        """Of the directory, when it was last looked at."""
        return self.words.description

    def check_writable(self) -> None:
        """Raises a RuntimeError: only one process may write."""
        raise RuntimeError(
            f"the rows in {self.path} were opened for reading, as workers, copies and pickles are: open "
            "them without mode='r' to write."
        )

    # Following

    def _look(self) -> None:
        """Takes in a changed description, and maps its files if they are others."""
        if (now := fingerprint(self.path)) == self._fingerprint and self.words is not None:
            return
        if now is None and self._identity is not None:
            raise RuntimeError(
                f"the storage in {self.path} was deleted; there is nothing to be read."
            )
        new = Description.read(self.path)
        if self._identity not in (None, new.identity):
            raise RuntimeError(
                f"the storage in {self.path} was deleted, and made anew, or has lost rows with the "
                "power: open it again to read what it holds now."
            )
        self._identity = new.identity
        words = self.words
        is_same = words is not None and words.description.generation == new.generation
        # A copy may have been put in the place of the file.
        if is_same and words.is_there:
            self.words.description = new
        else:
            self.state, self._number = None, None
            try:
                self.words = Words(self.path, new, writable=False)
            except FileNotFoundError:
                if fingerprint(self.path) == now:
                    raise
                # A load has replaced the files meanwhile.
                self._look()
                return
        self._fingerprint = now

    def refresh(self, index: EpisodeIndex, track: Track = iter) -> bool:
        """Takes in what was committed since the last call.

        Args:
            index: the episodes; brought up to the commit.
            track: reports progress.

        Returns:
            whether there was anything new.

        Raises:
            RuntimeError: the directory was deleted or created anew, or rows are overwritten faster than
                they are indexed.
            ValueError: it is damaged.
        """
        until, wrong = time.monotonic() + _PATIENCE, None
        while True:
            self._look()
            words = self.words
            if self.state is None:
                index.clear()
            # Read first, as the next writer may have committed nothing yet.
            self._openings = words.openings.item()
            number = words.commits.number
            if number == self._number:
                return False
            state = words.committed()
            if (
                state is not None
                and not (self._must_check and self._is_damaged(state, track))
                and words.feed(index, state, track)
            ):
                self.state, self._number, self._must_check = state, number, False
                return True
            if number == wrong and (self._must_check or not has_writer(self.path)):
                raise ValueError(
                    f"{self.path} is damaged, or was not closed before the power failed: open it for "
                    "writing once."
                )
            # The description may have changed before this commit: read it again.
            self._fingerprint, self.state, wrong = None, None, number
            if time.monotonic() > until:
                raise RuntimeError(self._too_slow())

    def _is_damaged(self, state: State, track: Track) -> bool:
        return len(self.words.damaged(state.tails, state.cursors, self.words.intact(track))) > 0

    # Reading

    def read_consistently(
        self, index: EpisodeIndex, refresh: Callable[[], object], read: Callable[[], Batch]
    ) -> Batch:
        """Returns the result of `read`, which is called again until no row was overwritten meanwhile.

        Args:
            index: the episodes.
            refresh: takes in new commits.
            read: reads rows and appends their slots to `seen`.

        Raises:
            RuntimeError: rows are overwritten faster than a batch is read.
            Exception: whatever `read` raises if no row was overwritten.
        """
        until: float | None = None
        while True:
            self.seen, failed = [], None
            try:
                batch = read()
            except Exception as error:
                # A transform may fail on rows that are half overwritten.
                failed = error
            finally:
                seen, self.seen = self.seen, None
            if self._are_there(index, seen):
                if failed is not None:
                    raise failed
                return batch
            # The first try may include compilation.
            if until is None:
                until = time.monotonic() + _PATIENCE
            elif time.monotonic() > until:
                raise RuntimeError(self._too_slow())
            refresh()

    def _are_there(self, index: EpisodeIndex, seen: list[torch.Tensor]) -> bool:
        """Returns whether rows, at int64 slots, were not overwritten since the last refresh."""
        if not all(self.words.marked.hold(index.ring, slots) for slots in seen):
            return False
        # Read last, like the marks: another writer may have reused next values of evicted rows.
        return self.words.openings.item() == self._openings

    def _too_slow(self) -> str:
        return (
            f"the rows in {self.path} are overwritten faster than a batch is read, or damaged: make the "
            "storage larger or the batches smaller, or open it for writing once."
        )
