"""The files of a storage on disk: their names, how they are made, told apart and removed.

Letters: N rows, W words a row, E lanes (environments).
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from trl_storages.disk.files import MappedWords, WriterLock, create_file, write_text
from trl_storages.disk.header import VERSION, Header, Identity
from trl_storages.disk.undo import Undo
from trl_storages.rows.layout import Layout

__all__ = [
    "HEADER",
    "MARKS",
    "PRIORITIES",
    "PROGRESS",
    "ROWS",
    "UNDO",
    "check_is_storage",
    "create_files",
    "holds_storage",
    "read_layout",
    "remove_files",
    "size_of",
    "write_header",
]

HEADER, ROWS, MARKS, UNDO = "header.bin", "rows.bin", "marks.bin", "undo.bin"
PRIORITIES, PROGRESS = "priorities.bin", "progress.json"
_DESCRIPTION, _LOCK = "storage.json", "lock"
_CREATING = _DESCRIPTION + ".new"
_OWN_FILES = {_DESCRIPTION, HEADER, ROWS, MARKS, UNDO, _LOCK, PRIORITIES, PROGRESS}
_OWN_FILES |= {name + ".new" for name in _OWN_FILES}


def holds_storage(directory: Path) -> bool:
    """Returns whether there is a storage in a directory."""
    return (directory / _DESCRIPTION).exists()


def check_is_storage(directory: Path) -> None:
    """Raises a FileNotFoundError if there is no storage in a directory."""
    if holds_storage(directory):
        return
    there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else None
    found = "there is none" if there is None else f"got one with {there[:5]}"
    raise FileNotFoundError(
        f"{directory} must be a directory that holds a storage (with {_DESCRIPTION}), {found}; make "
        "one with path= or scratch_dir=."
    )


def create_files(
    directory: Path, layout: Layout, num_rows: int, num_lanes: int, *, has_episodes: bool
) -> WriterLock:
    """Makes the files of an empty storage, with all the space that they will need.

    Returns:
        the lock of the directory, held.

    Raises:
        FileExistsError: the directory holds anything but what is left of an interrupted making.
        OSError: the disk is full or may not be written. Nothing is left then.
        RuntimeError: another process is making or writing it.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    _check_is_free(directory)
    lock = WriterLock(directory)
    try:
        _check_is_free(directory)  # of what another process made until it let the lock go
    except FileExistsError:
        lock.release()
        raise
    text = json.dumps(
        {
            "format": "trl_storages",
            "version": VERSION,
            "num_rows": num_rows,
            "layout": layout.to_json(),
        },
        indent=1,
    )
    check = zlib.crc32(text.encode())
    try:
        # It says that the files beside it are ours, until it takes its name.
        (directory / _CREATING).write_text(text)
        create_file(directory / ROWS, num_rows * layout.num_words)
        create_file(directory / MARKS, 2 * num_rows)
        Undo.create(directory / UNDO, layout.num_words)
        write_header(
            directory, Identity(num_rows, layout.num_words, num_lanes, has_episodes, check)
        )
        write_text(directory / _DESCRIPTION, text)
    except OSError:
        remove_files(directory, and_directory=is_new)
        lock.release()
        raise
    return lock


def _check_is_free(directory: Path) -> None:
    there = {path.name for path in directory.iterdir()}
    if there - {_LOCK} and not (_CREATING in there and there <= _OWN_FILES - {_DESCRIPTION}):
        raise FileExistsError(
            f"{directory} must be empty, or hold the rows of a storage, got {sorted(there)[:5]}; "
            "choose another directory."
        )


def read_layout(directory: Path) -> tuple[Layout, Identity]:
    """Reads what the rows are.

    Returns:
        the layout of a row, and what the header says of the whole.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated, damaged or of another version.
    """
    description, check = _read_description(directory)
    layout = Layout.from_json(description["layout"])
    smallest = MappedWords(directory / HEADER, Header.num_words(1), writable=False)
    identity = Identity.from_words(smallest.array)
    found = identity.num_rows, identity.num_words, identity.description
    if found != (description["num_rows"], layout.num_words, check):
        raise ValueError(
            f"{HEADER} and {_DESCRIPTION} are not of one storage, or one is damaged. Bring both back "
            "from a copy; nothing was changed."
        )
    return layout, identity


def size_of(directory: Path) -> int:
    """Returns N, how many rows the storage in a directory has room for."""
    return _read_description(directory)[0]["num_rows"]


def _read_description(directory: Path) -> tuple[dict[str, Any], int]:
    path = directory / _DESCRIPTION
    data = path.read_bytes()
    try:
        description = json.loads(data)
        kind, version = description["format"], description["version"]
        _ = description["layout"], description["num_rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not describe a storage, or is damaged: {error!r}. Bring it back from a "
            "copy; nothing was changed."
        ) from error
    if kind != "trl_storages":
        raise ValueError(
            f"{path} describes another kind of storage, {kind!r}; choose another directory."
        )
    if version != VERSION:
        raise ValueError(
            f"the storage must be of version {VERSION} of the format, got version {version}: open it "
            "with the release that wrote it; nothing was changed."
        )
    return description, zlib.crc32(data)


def write_header(directory: Path, identity: Identity) -> None:
    """Makes the header of an empty storage, or replaces it at once."""
    new = directory / (HEADER + ".new")
    words = Header.create(identity)
    create_file(new, len(words))
    mapped = MappedWords(new, len(words), writable=True)
    mapped.array[:] = words
    mapped.flush()
    new.replace(directory / HEADER)


def remove_files(directory: Path, *, and_directory: bool) -> None:
    """Removes our own files. A process that is killed halfway leaves what `create_files` takes over."""
    if holds_storage(directory):
        (directory / _DESCRIPTION).replace(directory / _CREATING)
    last = [_CREATING, _LOCK]
    for name in [*sorted(_OWN_FILES - {*last}), *last]:
        (directory / name).unlink(missing_ok=True)
    if and_directory:
        with suppress(OSError):  # something else is in it
            directory.rmdir()
