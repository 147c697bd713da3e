"""The description of a directory: `storage.json`."""

from __future__ import annotations

import errno
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trl_storages import keys
from trl_storages.directory.files import read_text, write_text
from trl_storages.entries.fields import DTYPES, NAMES, FrameStack
from trl_storages.entries.layout import Layout
from trl_storages.kernels.frames import BACK
from trl_storages.validation import warn_caller

__all__ = ["NAME", "ROWS", "UNREADABLE", "Description", "damaged", "described", "layout_of"]

NAME = "storage.json"
#: Names of files of transitions.
ROWS = re.compile(r"rows\.[1-9][0-9]{0,8}")
#: Errors that invalid JSON values of a description cause.
UNREADABLE = AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError
_KIND = {"kind": "trl_storages", "format": 3}
#: Upper bound of sizes and step numbers.
MOST = 2**48
_MOST_BYTES = 1 << 24
# Errors that mean a missing or an irregular file, or one that is too large; other errors are no damage.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO}
_NO_FILE |= {errno.EFBIG}


def damaged(path: Path, reason: str | OSError) -> Exception:
    """Returns the error for a damaged file, or the `OSError` itself if it does not mean damage."""
    if isinstance(reason, OSError):
        if reason.errno not in _NO_FILE:
            return reason
        reason = f"it must be a file: {reason.strerror}"
    return ValueError(f"{path} is damaged: {reason}. Restore it from a copy; nothing was changed.")


@dataclass(frozen=True)
class Description:
    """The contents of `storage.json`.

    Args:
        layout: the layout of a transition.
        max_size, num_envs, max_entries: see `EpisodeIndex`.
        tails: `[E]` earlier steps are evicted for good.
        cursors: `[E]` earlier steps are on the disk.
        rows: name of the file of transitions.
        boot: id of the machine's boot in which the directory was last written.
        inode: inode of the file of transitions; a copy has another one.
        is_clean: whether everything was flushed.
        state: the state of the other components; left out if it is too large to be read again.

    Raises:
        ValueError: the values do not describe a storage.
    """

    layout: Layout
    max_size: int
    num_envs: int
    max_entries: int | None
    tails: list[int]
    cursors: list[int]
    rows: str = "rows.1"
    boot: str = ""
    inode: int = 0
    is_clean: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [self.max_size, self.num_envs, *self.tails, *self.cursors]
        if self.max_entries is not None:
            numbers.append(self.max_entries)
        if not all(type(number) is int and 0 <= number < MOST for number in numbers):
            raise ValueError("sizes, tails and cursors must be integers from 0 to 2**48")
        if not len(self.tails) == len(self.cursors) == self.num_envs:
            raise ValueError("'tails' and 'cursors' must have 'num_envs' values")
        if not (isinstance(self.rows, str) and ROWS.fullmatch(self.rows)):
            raise ValueError("'rows' must be the name of a file, as in 'rows.1'")
        if not (type(self.is_clean) is bool and isinstance(self.state, dict)):
            raise ValueError("'is_clean' must be true or false, and 'state' an object")

    @staticmethod
    def has_room_for(state: Mapping[str, Any]) -> bool:
        """Returns whether a state of components is small enough to be read again."""
        return len(json.dumps(state)) < _MOST_BYTES // 2

    def write(self, directory: Path) -> None:
        """Replaces the description of a directory, atomically and durably.

        A warning is given if `state` is left out.

        Raises:
            OSError: the disk is full. Nothing was changed.
        """
        words = {**_KIND, **vars(self), "layout": described(self.layout)}
        if not self.has_room_for(self.state):
            warn_caller(
                f"{directory} stores all transitions, but not the state of samplers, transforms and "
                "generator, because it is not smaller than 8 MiB. Apply a transform with a large network "
                "to the sampled batches instead."
            )
            words["state"] = {}
        write_text(directory / NAME, json.dumps({**words, "check": _check(words)}))

    @classmethod
    def read(cls, directory: Path) -> Description:
        """Reads the description of a directory.

        Raises:
            FileNotFoundError: the directory contains no storage.
            ValueError: the description is damaged, or has another format.
        """
        path = directory / NAME
        try:
            text = read_text(path, _MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{directory} does not contain a replay buffer: {NAME} is missing. Pass the path of a "
                "buffer that was created with path=."
            ) from None
        except OSError as error:
            raise damaged(path, error) from None
        try:
            words = json.loads(text)
            if (got := {key: words.get(key) for key in _KIND}) != _KIND:
                raise ValueError(
                    f"it must have {_KIND}, got {str(got)[:50]}; 0.1 and 0.2 wrote formats 1 and 2"
                )
            if words.pop("check", None) != _check(words):
                raise ValueError("it does not match its checksum")
            values = {key: value for key, value in words.items() if key not in _KIND}
            return cls(**{**values, "layout": layout_of(values["layout"])})
        except UNREADABLE as error:
            raise damaged(path, f"it does not describe a storage: {error!s:.200}") from error


def _check(words: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(words).encode())


def described(layout: Layout) -> dict[str, Any]:
    """Returns a layout as JSON."""
    return {
        "fields": [
            {
                "key": list(keys.key_path(key)),
                "dtype": NAMES[dtype],
                "shape": list(shape),
                **({"stack": asdict(stack[0])} if stack else {}),
            }
            for key, (dtype, shape, *stack) in layout.described.items()
        ],
        "nested": [[list(path), list(size)] for path, size in layout.nested],
        **({"keyframes": layout.keyframes} if layout.keyframes else {}),
    }


def layout_of(words: Mapping[str, Any]) -> Layout:
    """Returns the layout that `described` returned as JSON.

    Raises:
        One of `UNREADABLE`: the words do not describe a layout.
    """
    fields: dict[Any, Any] = {}
    for field_words in words["fields"]:
        stack = [FrameStack(**field_words["stack"])] if "stack" in field_words else []
        kind = DTYPES[field_words["dtype"]], _shape(field_words["shape"])
        fields[tuple(field_words["key"])] = (*kind, *stack)
    nested = tuple((tuple(path), _shape(size)) for path, size in words["nested"])
    keyframes = words.get("keyframes", 0)
    if type(keyframes) is not int or not 0 <= keyframes <= BACK:
        raise ValueError(f"keyframes must be a number of entries, got {keyframes!r:.50}")
    layout = Layout(fields, nested, keyframes)
    if described(layout) != words or layout.row_words > MOST:
        raise ValueError("its fields must be those of transitions")
    return layout


def _shape(sizes: list[int]) -> torch.Size:
    if not all(type(size) is int and 0 <= size < MOST for size in sizes):
        raise ValueError(f"a shape must be a list of sizes, got {sizes!r:.50}")
    return torch.Size(sizes)
