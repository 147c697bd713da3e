"""Files that a crash leaves either as they were or as they are meant to be."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

from trl_storages.directory.untrusted import NO_LINKS

__all__ = ["created", "sync_directory", "sync_file", "write_text"]


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
