"""Files of int64 words: reserved on disk when they are created, then memory-mapped as arrays."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trl_storages.kernels import backend
from trl_storages.saved.durable import created
from trl_storages.saved.untrusted import NO_LINKS, NO_RESERVE, open_regular

try:
    import fcntl
except ImportError:
    # Rows in memory need no file locks.
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "MappedWords",
    "WriterLock",
    "check_platform",
    "create_file",
    "damaged",
    "has_writer",
    "in_forked_child",
    "opened",
    "removed",
]

_WORD = 8  # bytes
_PIECE = 1 << 20  # bytes that are written at a time


def check_platform(directory: Path) -> None:
    """Raises a RuntimeError if this platform lacks what a directory of rows needs."""
    if fcntl is None:
        raise RuntimeError(
            f"rows in a directory need a platform with POSIX file locks (fcntl), got {sys.platform} and "
            f"{directory}: keep the rows in memory (leave path or scratch_dir out), and save them with "
            "dumps()."
        )
    if not hasattr(backend("cpu"), "MarkedRows"):
        raise RuntimeError(
            f"rows in a directory need compiled loops, got {directory}: leave TRL_STORAGES_BACKEND out."
        )


def damaged(path: Path, what: str) -> ValueError:
    """Returns the error that says how a directory, or a file in it, is damaged."""
    return ValueError(f"{path} is damaged: {what}. Bring it back from a copy; nothing was changed.")


def removed(directory: Path) -> FileNotFoundError:
    """Returns the error that says that a directory is gone while this process writes it."""
    return FileNotFoundError(
        f"{directory} was removed while this process wrote it, or another directory is in its place: the "
        "rows are in this process alone, and end with it. Save them by dumps(another path), and load "
        "them into a storage in another directory."
    )


def create_file(path: Path, num_words: int, num_reserved: int) -> None:
    """Creates a file of zeros and reserves space on disk for the first of them.

    Writing to a memory-mapped file without space on disk kills the process, so a full disk must be
    detected here or in `MappedWords.reserve`.

    Args:
        path: the file.
        num_words: its size.
        num_reserved: of how many words; the others are left to `MappedWords.reserve`.

    Raises:
        OSError: there is no space, or the file can't be created.
    """
    with created(path) as file:
        _reserve(path, file, 0, num_reserved)
        file.truncate(num_words * _WORD)


def _reserve(path: Path, file: BinaryIO, start: int, end: int) -> None:
    """Reserves space on disk for a range of words; those never written read as zeros."""
    nbytes = (end - start) * _WORD
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), start * _WORD, nbytes)
            return
        file.seek(start * _WORD)
        for at in range(0, nbytes, _PIECE):
            file.write(bytes(min(nbytes - at, _PIECE)))
        file.flush()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} needs {nbytes:,} bytes on disk, which can't be had: {error.strerror}. Make the "
            "storage smaller, or choose another directory; nothing was changed",
        ) from error


class MappedWords:
    """A memory-mapped file as an array of words.

    Args:
        path: the file.
        num_words: how many words it must hold.
        writable: whether writes to the array reach the file; otherwise they stay private.

    Attributes:
        array: `[num_words]` int64.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another size, or is a link, a pipe or a device.
    """

    def __init__(self, path: Path, num_words: int, *, writable: bool) -> None:
        nbytes, self._path = num_words * _WORD, path
        with opened(path, writable=writable) as file:
            self._status = os.fstat(file.fileno())
            if (size := self._status.st_size) != nbytes:
                raise damaged(path, f"it must hold {nbytes} bytes, got {size}")
            flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | NO_RESERVE
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(file.fileno(), nbytes, flags=flags, prot=access)
        self.array = np.frombuffer(self._map, dtype=np.int64)

    @property
    def is_there(self) -> bool:
        """Whether the file is still at its path."""
        return _is_at(self._path, self._status)

    def reserve(self, start: int, end: int) -> None:
        """Reserves space on disk for a range of words of a sparse file.

        Raises:
            OSError: the disk is full.
            FileNotFoundError: the file is gone, or another one is in its place.
        """
        if not self.is_there:
            raise removed(self._path.parent)
        with opened(self._path, writable=True) as file:
            _reserve(self._path, file, start, end)

    def flush(self, start: int = 0, end: int | None = None) -> None:
        """Waits until a range of words is on disk, with the pages that it lies in."""
        first = start * _WORD // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.flush(first, self.array[:end].nbytes - first)


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Returns whether the file of a status is at a path."""
    try:
        return os.path.samestat(status, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def opened(path: Path, *, writable: bool = False) -> BinaryIO:
    """Opens a regular file, without a buffer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a link, a pipe or a device.
    """
    try:
        descriptor, _ = open_regular(path, os.O_RDWR if writable else os.O_RDONLY)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: the storage in {path.parent} is damaged. Bring the file back "
            "from a copy, or make a new storage in another directory."
        ) from None
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        what = f"it must be a file, and neither lead elsewhere nor wait: {error.strerror}"
        raise damaged(path, what) from error
    return open(descriptor, "r+b" if writable else "rb", buffering=0)


class WriterLock:
    """The lock of the one process that writes to a directory; the kernel frees it when that process ends.

    Args:
        directory: an existing directory.

    Attributes:
        is_held: whether this process may write.

    Raises:
        RuntimeError: another writer holds it, or has just deleted the directory.
        OSError: the directory is not writable.
    """

    def __init__(self, directory: Path) -> None:
        self.is_held, self._path = False, directory / "lock"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{directory} must be writable, to be written by this process: {error.strerror}. Open "
                "it for reading, with mode='r'",
            ) from error
        self._descriptor, self.is_held = descriptor, True
        _HELD.add(self)
        # Storages are in reference cycles: an unused one may hold the lock until it is collected.
        if not (_locks(descriptor) or (gc.collect() >= 0 and _locks(descriptor))):
            self.forget()
            raise RuntimeError(
                f"the rows in {directory} have a writer already, and there can be one only: close() it, "
                "or open them for reading, with mode='r'."
            )
        if not os.fstat(descriptor).st_nlink:
            self.forget()
            raise RuntimeError(
                f"{directory} was being deleted by its writer when it was opened: try once more."
            )

    @property
    def is_there(self) -> bool:
        """Whether the locked directory is still at its path."""
        return _is_at(self._path, os.fstat(self._descriptor))

    def forget(self) -> None:
        """Closes this process's copy of the lock; processes that share it keep it."""
        if self.is_held:
            self.is_held = False
            os.close(self._descriptor)

    def release(self) -> None:
        """Frees the lock for another writer."""
        if self.is_held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def __del__(self) -> None:
        self.release()


def has_writer(directory: Path) -> bool:
    """Returns whether a process holds the writer's lock of a directory."""
    try:
        # A shared lock, freed at once by closing the file, so that a new writer rarely finds it taken.
        with opened(directory / "lock") as file:
            return not _locks(file.fileno(), shared=True)
    except (OSError, ValueError):
        return False


def _locks(descriptor: int, *, shared: bool = False) -> bool:
    """Takes a lock if that is possible without waiting, and returns whether it was."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def in_forked_child(act: Callable[[], None]) -> None:
    """Registers a function to run in every forked child, on platforms that can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


# A forked child shares the locks, and would keep them after this process has ended.
in_forked_child(_forget_all)
