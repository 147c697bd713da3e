"""The lock of the one process that writes to a directory."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

from trl_storages.directory.files import NO_LINKS

try:
    import fcntl
except ImportError:
    # Rows in memory need no file locks.
    fcntl = None  # type: ignore[assignment]

__all__ = ["WriterLock"]

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
