"""Files of words: reserved on disk when they are made, then read and written as arrays.

A word is an int64.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from trl_storages.saved.regular_files import NO_LINKS, NO_RESERVE, open_regular

try:
    import fcntl
except ImportError:
    # Rows in memory need no files.
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "WORD",
    "MappedWords",
    "WriterLock",
    "check_platform",
    "create_file",
    "has_writer",
    "in_forked_child",
    "opened",
    "sync_directory",
    "write_text",
]

WORD = 8  # bytes
_NO_FILE = (
    "{} must be a file, and neither lead elsewhere nor wait for anybody: {}. Bring it back from a copy; "
    "nothing was changed."
)


def check_platform(directory: Path) -> None:
    """Raises a RuntimeError if this platform lacks what a directory of rows is made with."""
    if fcntl is None:
        raise RuntimeError(
            f"rows in a directory need a platform with POSIX file locks (fcntl), got {sys.platform} and "
            f"{directory}: keep the rows in memory (leave path or scratch_dir out), and save them with "
            "dumps()."
        )


def create_file(path: Path, num_words: int) -> None:
    """Makes a file of zeros whose space on disk is taken now.

    A memory-mapped file that finds no space when it is written kills the process, so a full disk must
    be found here.

    Raises:
        OSError: there is no space, or the file can't be made. It does not exist then.
    """
    nbytes = num_words * WORD
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | NO_LINKS, 0o644)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
            else:
                _write_zeros(descriptor, nbytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} needs {nbytes:,} bytes on disk, which can't be had: {error.strerror}. Make the "
            "storage smaller, or choose another directory; nothing of it was kept",
        ) from error


def _write_zeros(descriptor: int, nbytes: int) -> None:
    zeros = bytes(1 << 20)
    while nbytes > 0:
        nbytes -= os.write(descriptor, zeros[:nbytes])


def write_text(path: Path, text: str) -> None:
    """Replaces a text file at once: it holds the old text or the new one, also after a crash."""
    new = path.with_name(path.name + ".new")
    data = text.encode()
    with suppress(FileNotFoundError):
        new.unlink()  # whatever it is, it is not followed
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o644)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    new.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names of the files in a directory last through a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MappedWords:
    """A file seen as an array of words.

    Args:
        path: the file.
        num_words: how many words it must hold.
        writable: whether what is written into the array goes to the file; if not it goes nowhere.

    Attributes:
        array: `[num_words]` int64.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is shorter or longer, or it is a link, a pipe or a device.
    """

    def __init__(self, path: Path, num_words: int, *, writable: bool) -> None:
        with opened(path, writable=writable) as (descriptor, size):
            if size != num_words * WORD:
                raise ValueError(
                    f"{path} must hold {num_words * WORD} bytes, got {size}: it was truncated, or is of "
                    "another storage. Bring it back from a copy; nothing was changed."
                )
            self._map = mmap.mmap(
                descriptor,
                num_words * WORD,
                flags=mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        self.array = np.frombuffer(self._map, dtype=np.int64)

    def flush(self) -> None:
        """Waits until what was written is on disk."""
        self._map.flush()


@contextmanager
def opened(path: Path, *, writable: bool = False) -> Iterator[tuple[int, int]]:
    """Opens a file: yields its descriptor and its size in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a link, a pipe or a device.
    """
    try:
        descriptor, size = open_regular(path, os.O_RDWR if writable else os.O_RDONLY)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: the storage in {path.parent} is damaged. Bring the file back "
            "from a copy, or make a new storage in another directory."
        ) from None
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ValueError(_NO_FILE.format(path, error.strerror)) from error
    try:
        yield descriptor, size
    finally:
        os.close(descriptor)


class WriterLock:
    """Held by the one process that writes to a directory; the kernel frees it when the process ends.

    Args:
        directory: an existing directory.

    Raises:
        RuntimeError: another writer holds it, or has just deleted the directory.
        OSError: the directory may not be written.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None
        path = directory / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{directory} must be writable, to be written by this process: {error.strerror}. Open "
                "it for reading with ReplayStorage.open(path, mode='r')",
            ) from error
        self._descriptor = descriptor
        try:
            if not _lock(descriptor):
                # Storages are parts of cycles: one that nobody uses may still be in memory.
                gc.collect()
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._forget()
            raise RuntimeError(
                f"the rows in {directory} have a writer already, and there can be one only: close() it, "
                "or open them for reading with ReplayStorage.open(path, mode='r')."
            ) from None
        if not os.fstat(descriptor).st_nlink:
            self._forget()
            raise RuntimeError(
                f"{directory} was being deleted by its writer when it was opened: try once more."
            )
        _HELD.add(self)

    def _forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @property
    def is_held(self) -> bool:
        """Whether this process may write."""
        return self._descriptor is not None

    def release(self) -> None:
        """Lets another writer in."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._forget()

    def __del__(self) -> None:
        self.release()


def has_writer(directory: Path) -> bool:
    """Returns whether a process holds a directory to write it."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY | NO_LINKS)
    except OSError:
        return False
    try:
        # Held for no time at all, so that nobody who comes to write finds it taken.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock._forget()


def in_forked_child(act: Callable[[], None]) -> None:
    """Calls something first in every child that this process forks, where processes can be forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)


# A forked child shares the locks; it must not keep them when this process ends.
in_forked_child(_forget_all)
