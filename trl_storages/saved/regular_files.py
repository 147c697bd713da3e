"""Files of unknown origin are opened only where they are files: no links, pipes or devices."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from pathlib import Path

__all__ = ["NO_LINKS", "NO_RESERVE", "open_regular"]

#: Nothing is followed, and nothing waited for, that is no file.
NO_LINKS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for somebody to write to it
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
#: Files are mapped privately by who only reads them; without this flag the kernel would set memory aside
#: for a copy of the whole file.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> tuple[int, int]:
    """Opens a file, and returns its descriptor and its size in bytes.

    Args:
        path: the file.
        flags: as in `os.open`.

    Raises:
        OSError: there is none, it may not be opened, or it is no file.
    """
    descriptor = os.open(path, flags | NO_LINKS)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a directory, a pipe or a device")
