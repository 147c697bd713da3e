"""Regular files, atomic and durable replacement of text files, and locks of the operating system."""

from __future__ import annotations

import errno
import gc
import os
import stat
import tempfile
import weakref
from contextlib import AbstractContextManager, nullcontext
from io import FileIO
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:
    # Transitions in memory need no file locks.
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "NO_LINKS",
    "ProcessLock",
    "WriterLock",
    "open_regular",
    "read_text",
    "sync_directory",
    "write_text",
]

#: Flags of `os.open`: do not follow links, and do not wait until a pipe has a writer.
NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file; returns its descriptor.

    Args:
        path: the file.
        flags: as in `os.open`.

    Raises:
        OSError: the file is missing, can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | NO_LINKS)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a directory, a pipe or a device")


def read_text(path: Path, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    with open(open_regular(path), "rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes")
    return text


def write_text(path: Path, text: str) -> None:
    """Replaces a text file atomically and durably: after a crash it holds the old text or the new."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # a leftover may be a link, which must not be followed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS
    try:
        with open(os.open(new, flags, 0o644), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes renames and new files in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class WriterLock:
    """The lock of the writer of a directory; the system releases it when the process ends.

    A forked child does not hold the lock.

    Args:
        directory: an existing directory.

    Raises:
        RuntimeError: another writer holds the lock, or the platform has no file locks.
        OSError: the directory can't be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        if fcntl is None:
            raise RuntimeError("path= needs POSIX file locks: keep transitions in memory.")
        self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644)
        # A storage is in a reference cycle, so an unused one may hold the lock until it is collected. A
        # reader that calls `is_taken` holds the lock for a moment.
        if not (self._locks() or (gc.collect() >= 0 and self._locks())):
            self.forget()
            raise RuntimeError(
                f"{directory} has a writer already. close() the other writer, or open the directory with "
                "mode='r'."
            )
        _HELD.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this process may write."""
        return self._descriptor >= 0

    @staticmethod
    def is_taken(directory: Path) -> bool:
        """Returns whether a process has a directory open for writing."""
        try:
            with open(open_regular(directory / "lock"), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def _locks(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def forget(self) -> None:
        """Closes this process's copy of the lock. The lock is released once all copies are closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = forget


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class ProcessLock:
    """A lock between processes, which forked processes share; the system releases it if the holder dies.

    It is a record lock of a file. A record lock belongs to a process, so the threads of a process must
    take a lock of their own first. The lock can be pickled for a spawned process while this one lives.

    Raises:
        RuntimeError: the platform has no file locks.
    """

    def __init__(self, name: str = "") -> None:
        if fcntl is None:
            raise RuntimeError("share() needs POSIX file locks; this platform has none.")
        if name:
            self._file = os.open(name, os.O_RDWR)
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        # The context of the holder, and its process.
        self._held: tuple[Any, int] = type(None), 0

    def hold(self) -> AbstractContextManager[Any]:
        """Waits for the lock; returns the context in which this process holds it.

        A record lock is released when its process closes any descriptor of the file. The context is such
        a descriptor, because its exit is written in C: no interrupt can come between exit and release.
        """
        held, process = self._held
        file = held()
        if process == os.getpid() and file is not None and not file.closed:
            return nullcontext()  # the lock is reentrant
        file = FileIO(os.dup(self._file), "r+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
            self._held = weakref.ref(file), os.getpid()
            return file
        except BaseException:
            file.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLock, (f"/proc/{os.getpid()}/fd/{self._file}",)
