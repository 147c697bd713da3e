"""A directory that holds the rows of a storage, beyond the process that wrote them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trl_storages.directory.description import MOST, NAME, ROWS, Description, damaged
from trl_storages.directory.files import NO_LINKS, WriterLock, open_regular, sync_directory
from trl_storages.entries import Arena, HostEntries, Layout, arena_sizes
from trl_storages.entries.frames import host_entries
from trl_storages.index import EpisodeIndex
from trl_storages.index.invariants import check_bounds, require
from trl_storages.kernels import CONTINUES, DONE, SPLIT, checksums

__all__ = ["Directory"]

#: Writes rows into an index and entries.
Fill = Callable[[EpisodeIndex, HostEntries], None]
# Files of a directory beside its description and its rows.
_BESIDE = (f"{NAME}.new", "lock")


class Directory:
    """Rows in a file, with their index: whatever becomes of the process, they are there again.

    After a kill all rows are there that were written. After a power cut those are there that `flush`
    returned from, unless they gave way since, and later ones as far as they are whole. `create` and
    `open` make one.

    Attributes:
        path: the directory.
        layout: of the rows.
        index: which rows there are.
        rows: the rows.
        is_open: whether it was not closed.
    """

    def __init__(
        self, path: Path, lock: WriterLock | None, described: Description, file: int
    ) -> None:
        self.path, self._lock, self._described = path, lock, described
        self.is_open = True
        # By which file it is other processes see whether it was replaced.
        self._inode, self._rows_path = os.fstat(file).st_ino, str(path / described.rows)
        # Whether a reader has found the index anew: it does not follow that of a later writer.
        self._is_apart = False
        self.layout = layout = described.layout
        sizes, most = (described.max_size, described.num_envs), described.max_entries
        needs = {"stack": layout.frames, "depth": layout.depth}
        self.index = index = EpisodeIndex(*sizes, **needs, max_entries=most)
        room = arena_sizes(layout, index, is_in_file=True)
        is_writer, lazy = lock is not None, ("entries", "checksums", "records")
        self._arena = arena = Arena(**room, file=file, writable=is_writer, lazy=lazy)
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
        """Makes a directory, and opens it to write.

        What it held before is there until all else is on the disk.

        Args:
            path: the directory; it is made if it is not there.
            layout: of the rows.
            max_size: the number of rows, see `EpisodeIndex`.
            num_envs: the number of lanes.
            max_entries: room for observations, over all lanes.
            fresh: whether the rows that the directory holds are discarded.
            fill: writes the first rows; None leaves it empty.
            state: of other parts, as JSON.

        Raises:
            FileExistsError: it holds something already.
            RuntimeError: it has a writer.
            OSError: the disk is full.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        _check_free(path, fresh)
        lock = WriterLock(path)
        try:
            _check_free(path, fresh)
            none = [0] * num_envs
            sizes = max_size, num_envs, max_entries
            described = Description(layout, *sizes, tails=none, cursors=none, state=state or {})
            made = cls._made(path, lock, described, fill)
            sync_directory(path.parent)
        except BaseException:
            lock.forget()
            raise
        return made

    @classmethod
    def _made(
        cls, path: Path, lock: WriterLock | None, described: Description, fill: Fill | None
    ) -> Directory:
        """Makes another file of rows, and names it in the description once it is on the disk."""
        number = 1 + max((int(it[5:]) for it in _rows_in(path)), default=0)
        rows = path / f"rows.{number}"
        file = os.open(rows, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o644)
        try:
            made = cls(path, lock, replace(described, rows=rows.name), file)
            if fill is not None:
                fill(made.index, made.entries)
                made.entries.write_all_checksums()
        except BaseException:
            rows.unlink()
            raise
        finally:
            os.close(file)
        # So that who has seen another one tells them apart.
        made._arena.arrays["epoch"][:] = time.time_ns()
        made.flush()
        made._remove_others()
        return made

    def replaced(self, fill: Fill, state: Mapping[str, Any] | None) -> Directory:
        """Returns the directory with other rows, and another state; these are not written to any more.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        state = self.state if state is None else dict(state)
        described = replace(self._described, state=state)
        made = self._made(self.path, self._lock, described, fill)
        self._lock = None
        return made

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: str = "r+") -> Directory:
        """Opens a directory.

        After an unclean end of the machine, or of a copy of a directory in use, the rows that are whole
        are found anew. After a clean one not all rows are looked at: `validate` does.

        Args:
            path: the directory.
            mode: "r+" to write, "r" to read.

        Raises:
            FileNotFoundError: it holds no storage.
            RuntimeError: it has a writer, and `mode` is "r+".
            ValueError: it is damaged.
        """
        path = Path(path)
        lock = WriterLock(path) if mode == "r+" else None
        try:
            while True:
                described = Description.read(path)
                try:
                    return cls._opened(path, lock, described)
                except ValueError:
                    # Else somebody wrote meanwhile, or made it anew.
                    if Description.read(path) == described:
                        raise
        except BaseException:
            if lock:
                lock.forget()
            raise

    @classmethod
    def _opened(cls, path: Path, lock: WriterLock | None, described: Description) -> Directory:
        rows = path / described.rows
        try:
            file = open_regular(rows, os.O_RDONLY if lock is None else os.O_RDWR)
        except OSError as error:
            raise damaged(rows, error) from None
        try:
            if not os.fstat(file).st_size:
                raise ValueError("it is empty")
            opened = cls(path, lock, described, file)
            if described.is_clean:
                opened._check_closed()
            is_same = described.inode == opened._inode and described.boot == _boot()
            # A writer has checked all rows before it says which boot this is.
            is_written = (
                lock is None and is_same and described.boot != "" and WriterLock.is_taken(path)
            )
            if is_written:
                check_bounds(opened.index.tables)
        except (ValueError, OverflowError, MemoryError, RuntimeError) as error:
            raise damaged(rows, str(error)) from error
        finally:
            os.close(file)
        if not (described.is_clean or is_written):
            # Where no boot has a name, the writer doubts the index, but a reader must follow it.
            if is_same and (described.boot or lock is None):
                opened.validate()
                if lock:
                    _forget_beyond(opened.index, opened.entries)
            else:
                _recover(opened.index, opened.entries, described)
                opened._is_apart = lock is None
        if lock:
            opened.flush()
            opened._remove_others()
        return opened

    def _check_closed(self) -> None:
        """Raises an error unless lanes are as they were closed, and no slot leads out of the file."""
        check_bounds(self.index.tables)
        lanes = self.index.tails.tolist(), self.index.cursors.tolist()
        if lanes != (self._described.tails, self._described.cursors):
            raise ValueError("its index is not that of a closed directory")

    def validate(self) -> None:
        """Raises a ValueError if a live row is damaged, or its place in the index."""
        index = self.index
        try:
            index.validate()
            lane, step, slot = index.kept()
            at = index.where[slot]
            numbers = checksums.step_numbers(index.tables, slot, step)
            whole = self.entries.are_intact(at) & (
                self.entries.checksums[at, checksums.NUMBER] == numbers
            )
            require("rows are whole", whole, index.tables, lane, step)
        except RuntimeError as error:
            raise damaged(self.path / self._described.rows, str(error)) from error

    def _remove_others(self) -> None:
        """Removes files of rows that were replaced, or never came to be used."""
        for name in _rows_in(self.path):
            if name != self._described.rows:
                (self.path / name).unlink(missing_ok=True)

    def newest(self) -> Directory:
        """Returns the rows that count now: these, or those of a directory that was made anew."""
        try:
            inode = os.stat(self._rows_path).st_ino
        except OSError:
            inode = -1
        is_current = inode == self._inode
        if is_current and self._is_apart:
            is_current = Description.read(self.path) == self._described
        return self if is_current or not self.is_open else Directory.open(self.path, "r")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy reads, unless this one has ended before: the copy goes on in its place then.
        return (_reopened, (self.path,)) if self.is_writer else (Directory.open, (self.path, "r"))

    @property
    def state(self) -> Mapping[str, Any]:
        """Of other parts, as the last `flush` was given it."""
        return self._described.state

    @property
    def is_writer(self) -> bool:
        """Whether this process may write."""
        return self._lock is not None and self._lock.is_held

    @property
    def is_quiescent(self) -> bool:
        """Whether no other process may be writing, which one may begin after this one has opened it."""
        return self.is_writer or Description.read(self.path).is_clean

    def check_writer(self) -> None:
        """Raises a RuntimeError if this process may not write."""
        if not self.is_writer:
            raise RuntimeError(
                f"{self.path} is open for reading only: mode='r', closed, or in a forked process."
            )

    def flush(
        self, state: Mapping[str, Any] | None = None, *, is_clean: bool = False, tails: Any = None
    ) -> None:
        """Waits until all rows are on the disk: they outlive a power cut.

        Args:
            state: of other parts, as JSON; None is that of before.
            is_clean: whether nothing will be written from now on.
            tails: `[E]` steps before these will not come back; None is those that are gone.

        Raises:
            OSError: the disk is full. The rows are there, as after a kill.
        """
        tails, cursors = self.index.tails if tails is None else tails, self.index.cursors.tolist()
        self._arena.flush()
        state = self.state if state is None else dict(state)
        words = {"tails": tails.tolist(), "cursors": cursors, "state": state, "is_clean": is_clean}
        described = replace(self._described, **words, boot=_boot(), inode=self._inode)
        described.write(self.path)
        self._described = described

    def empty(self, keep_steps: int = 0) -> None:
        """Discards all rows but the last `keep_steps` of each lane, for good.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        self.flush(tails=self.index.tails_after_evicting(keep_steps))
        self.index.evict(keep_steps)

    def close(self, state: Mapping[str, Any] | None = None, *, keep: bool = True) -> None:
        """Flushes, and lets another process write; rows are read still. Without `keep` they go."""
        if not keep:
            self.check_writer()
        try:
            if not keep:
                for name in (NAME, *_rows_in(self.path), *_BESIDE):
                    (self.path / name).unlink(missing_ok=True)
                with suppress(OSError):  # of what others keep there
                    self.path.rmdir()
            elif self.is_writer:
                self.flush(state, is_clean=True)
        finally:
            self.is_open = False
            if self._lock is not None:
                self._lock.forget()


def _reopened(path: Path) -> Directory:
    """Opens the directory of a pickled writer: to write, unless it has a writer."""
    with suppress(RuntimeError):
        return Directory.open(path, "r+")
    return Directory.open(path, "r")


def _forget_beyond(index: EpisodeIndex, rows: HostEntries) -> None:
    """Removes checksums of steps that a killed writer did not publish.

    Their numbers are given to other steps from now on.
    """
    words = rows.checksums
    steps, _, _ = checksums.steps_of(words[:, checksums.NUMBER])
    words[steps >= index.cursors.repeat(index.entries_per_lane), checksums.NUMBER] = 0


def _recover(index: EpisodeIndex, rows: HostEntries, described: Description) -> None:
    """Fills an index with the rows that are whole, and removes all other checksums.

    Of each lane the steps without a hole count that hold the last one that was flushed; if that is not
    there, the newest.

    Args:
        index: any contents.
        rows: with checksums, see `kernels.checksums`.
        described: says which steps don't count any more, and which were flushed.
    """
    words, k, M = rows.checksums, index.stack, index.entries_per_lane
    steps, begins, done = checksums.steps_of(words[:, checksums.NUMBER])
    place = np.tile(np.arange(M), index.num_envs)
    fits = (steps >= 0) & (steps < MOST) & (place >= k - 1) & (place + 1 < M)
    at = np.flatnonzero(fits & (steps >= np.repeat(described.tails, M)))
    at = at[rows.are_intact(at)]
    index.reset()
    kept = np.zeros(len(words), bool)
    begins_of = np.searchsorted(at, np.arange(index.num_envs + 1) * M).tolist()
    for lane, flushed in enumerate(described.cursors):
        its = at[begins_of[lane] : begins_of[lane + 1]]
        its = its[_chosen(steps[its], flushed, index.steps_per_lane)]
        if not len(its):
            continue
        kept[its] = True
        ends = np.where(done[its], DONE, CONTINUES)
        if not done[its[-1]]:
            ends[-1] = SPLIT  # who knows what came behind it
        first = int(steps[its[0]])
        index.set_lane(
            *(lane, steps[its], place[its], begins[its], ends),
            first=first - (not begins[its[0]]),
            tail=first,
        )
    # Where a file has no room every checksum is zero: nothing is written there.
    words[(words[:, checksums.NUMBER] != 0) & ~kept, checksums.NUMBER] = 0


def _chosen(steps: np.ndarray, flushed: int, most: int) -> np.ndarray:
    """Returns which of the steps of a lane count, in their order."""
    run, order = np.unique(steps, return_index=True)
    holes = np.flatnonzero(np.diff(run) != 1) + 1
    bounds = np.concatenate([[0], holes, [len(run)]])
    at = int(np.searchsorted(run, flushed - 1))
    is_there = at < len(run) and run[at] == flushed - 1
    which = int(np.searchsorted(holes, at, "right")) if is_there else len(holes)
    begin, end = bounds[which], bounds[which + 1]
    return order[max(begin, end - most) : end]


def _boot() -> str:
    """Returns which boot of which machine this is, "" if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _rows_in(path: Path) -> list[str]:
    return [it.name for it in path.iterdir() if ROWS.fullmatch(it.name)]


def _check_free(path: Path, fresh: bool) -> None:
    """Raises a FileExistsError unless a directory is empty, or holds a storage that may be discarded."""
    found = {it.name for it in path.iterdir()}
    if NAME in found and fresh:
        return
    if others := found - {*_rows_in(path), *_BESIDE}:
        instead = ", or be made fresh=True" if NAME in found else ""
        raise FileExistsError(f"{path} must be empty{instead}, got one with {sorted(others)[:5]}.")
