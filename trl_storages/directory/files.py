"""Files: regular ones alone, JSON within bounds, after a crash the old text or the new, one writer."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import stat
import sys
import weakref
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

try:
    import fcntl
except ImportError:
    # Rows in memory need no file locks.
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "MOST_BYTES",
    "NO_LINKS",
    "WriterLock",
    "created",
    "open_regular",
    "parse_json",
    "sync_directory",
    "sync_file",
    "write_text",
]

#: Flags of `os.open`: do not follow links, do not block.
NO_LINKS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # opening a pipe would block until it has a writer
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> tuple[int, int]:
    """Opens a regular file; returns its descriptor and its size in bytes.

    Args:
        path: the file.
        flags: as in `os.open`.

    Raises:
        OSError: the file is missing, can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, flags | NO_LINKS)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a directory, a pipe or a device")


MOST_BYTES = 1 << 24
_MOST_VALUES = 1 << 20
_MOST_DEPTH = 32
_LARGEST = 2**63 - 1


def parse_json(text: bytes) -> Any:
    """Parses JSON within bounds on size, depth and numbers.

    Raises:
        ValueError: it is truncated or damaged, or exceeds a bound.

    >>> parse_json(b'{"steps": [1, 2]}')
    {'steps': [1, 2]}
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"at most {MOST_BYTES} bytes are read, got more")
    try:
        value = json.loads(
            text,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_bounded,
            object_pairs_hook=_without_twins,
        )
    except RecursionError as error:
        raise ValueError(str(error)) from error
    _check_size(value)
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, got {text}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _bounded(text: str) -> int:
    # Python refuses to parse very many digits, or is very slow.
    if len(text) > 20 or not -_LARGEST <= int(text) <= _LARGEST:
        raise ValueError(f"whole numbers must be below 2^63, got {text[:25]}")
    return int(text)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an entry occurs twice")
    return value


def _check_size(value: Any) -> None:
    level, depth, count = [value], 0, 1
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth, count = depth + 1, count + len(level)
        if depth > _MOST_DEPTH or count > _MOST_VALUES:
            raise ValueError(f"at most {_MOST_VALUES} values, {_MOST_DEPTH} deep, are read")


def created(path: Path) -> BinaryIO:
    """Opens a new file to write, in the place of what may be there."""
    path.unlink(missing_ok=True)  # a leftover, perhaps a link, which must not be followed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS
    return open(os.open(path, flags, 0o644), "wb")


def write_text(path: Path, text: str) -> None:
    """Replaces a text file atomically and durably: after a crash it holds the old text or the new."""
    new = path.with_name(path.name + ".new")
    try:
        with created(new) as file:
            file.write(text.encode())
            sync_file(file)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Waits until what was written to a file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Makes renames and new files in a directory durable, on platforms where that takes a call."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()


class WriterLock:
    """The lock of the writer of a directory; the system frees it when the process ends.

    A forked child does not hold it.

    Args:
        directory: an existing directory.

    Raises:
        RuntimeError: another writer holds it, or the platform has no locks.
        OSError: the directory can't be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        if fcntl is None:
            raise RuntimeError("rows in a directory need POSIX file locks; keep them in memory.")
        self._descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644)
        # Storages are in reference cycles: an unused one may hold the lock until it is collected.
        if not (self._locks() or (gc.collect() >= 0 and self._locks())):
            self.forget()
            raise RuntimeError(
                f"{directory} has a writer already, and there can be one only: close() it, or open the "
                "directory with mode='r'."
            )
        _HELD.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this process may write."""
        return self._descriptor >= 0

    def _locks(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def forget(self) -> None:
        """Closes this process's copy of the lock; it is free when all are closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = forget


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
