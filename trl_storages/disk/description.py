"""How a directory of rows describes itself: `storage.json`, and the name of the file beside it.

Letters: E lanes (environments), T live steps per lane at most, S spare steps, R = T + S, D steps before a
row whose frames it is read with.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from trl_storages.disk.files import damaged, opened
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout
from trl_storages.saved.durable import write_text
from trl_storages.saved.untrusted import MOST_BYTES, parse_json

__all__ = [
    "Description",
    "check_is_free",
    "fingerprint",
    "holds_storage",
    "remove_files",
    "remove_rows",
    "spare_steps",
]

_NAME = "storage.json"
_NEW = _NAME + ".new"
# Unlike any file of somebody else: without a description beside them, such files are leftovers.
_OWN = re.compile(r"storage\.\d{1,9}\.rows")
_KIND = {"kind": "trl_storages", "format": 2}
_MOST = 2**40  # steps of a lane, rows of a storage
_LEAST_SPARE, _SPARE_SHARE = 64, 64


@dataclass(frozen=True)
class Description:
    """The contents of `storage.json`. Never changed: a change makes a new one.

    Args:
        layout: of a row.
        num_rows: live rows at most, as requested when the storage was created.
        num_lanes: E.
        tails: `[E]` the first steps that may be live; earlier rows are never recovered.
        flushed: `[E]` the cursors at the last flush.
        identity: unique to each creation of a directory, and to each recovery that lost rows.
        generation: of the files in use.
        is_clean: whether nothing was written since the last flush.
        progress: other state to resume from: generator, sampler, recorder.

    Raises:
        TypeError, ValueError: it can't be that of a storage.
    """

    layout: Layout
    num_rows: int
    num_lanes: int
    tails: list[int]
    flushed: list[int]
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    generation: int = 1
    is_clean: bool = True
    progress: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [
            (self.num_rows, 1, _MOST),
            (self.num_lanes, 1, self.num_rows),
            (self.generation, 1, 10**9 - 1),
            *((step, 0, _MOST) for step in (*self.tails, *self.flushed)),
        ]
        fits = all(type(it) is int and least <= it <= most for it, least, most in numbers)
        if not (fits and len(self.tails) == len(self.flushed) == self.num_lanes):
            raise ValueError("its numbers are not those of rows and lanes")
        if type(self.is_clean) is not bool:
            raise TypeError("'is_clean' must be true or false")

    @property
    def steps_per_lane(self) -> int:
        """T."""
        return self.num_rows // self.num_lanes

    @property
    def spare_steps(self) -> int:
        """S."""
        return spare_steps(self.steps_per_lane, self.layout.past_steps)

    @property
    def ring_steps(self) -> int:
        """R."""
        return self.steps_per_lane + self.spare_steps

    @cached_property
    def most_steps(self) -> int:
        """The most steps of a lane that a write can put in slots without a live row or a frame in use."""
        return self.spare_steps - self.layout.past_steps

    def new_index(self) -> EpisodeIndex:
        """Returns an index of no rows."""
        return EpisodeIndex(self.num_rows, self.num_lanes, spare_steps=self.spare_steps)

    @property
    def data_name(self) -> str:
        """The name of the file of rows."""
        return f"storage.{self.generation}.rows"

    def write(self, directory: Path) -> None:
        """Replaces the description of a directory, atomically and durably.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        own = {it.name: getattr(self, it.name) for it in fields(self)}
        words = {**_KIND, **own, "layout": self.layout.to_json()}
        write_text(directory / _NAME, json.dumps({**words, "check": _check(words)}))

    @classmethod
    def read(cls, directory: Path) -> Description:
        """Reads the description of a directory.

        Raises:
            FileNotFoundError: it holds no storage.
            ValueError: it is damaged, or of another format.
        """
        path = directory / _NAME
        if not holds_storage(directory):
            found = f"got one with {_names(directory)[:5]}" if directory.is_dir() else "got none"
            raise FileNotFoundError(
                f"{directory} must be a directory that holds a storage (with {_NAME}), {found}; make "
                "one with path= or scratch_dir=. What dumps() saved is restored by a storage's loads()."
            )
        with opened(path) as file:
            text = file.read(MOST_BYTES + 1)
        try:
            words = parse_json(text)
            if (got := {key: words.get(key) for key in _KIND}) != _KIND:
                raise ValueError(
                    f"it must be of {_KIND}, got {str(got)[:50]} (format 1 was never released: delete it)"
                )
            if words.pop("check", None) != _check(words):
                raise ValueError("it does not match its checksum")
            own = {key: value for key, value in words.items() if key not in _KIND}
            return cls(**{**own, "layout": Layout.from_json(own["layout"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"it does not describe a storage: {error!s:.200}") from error


def _check(words: dict[str, Any]) -> int:
    """Returns the checksum of a description."""
    return zlib.crc32(json.dumps(words).encode())


def spare_steps(steps_per_lane: int, past_steps: int) -> int:
    """Returns S: slack for readers, and room for writes of S - D steps that evict nothing beforehand."""
    return past_steps + min(steps_per_lane, max(_LEAST_SPARE, steps_per_lane // _SPARE_SHARE))


# The directory as a whole


def holds_storage(directory: Path) -> bool:
    """Returns whether a directory holds a storage."""
    return os.path.lexists(directory / _NAME)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def check_is_free(directory: Path) -> None:
    """Raises a FileExistsError unless the directory is empty but for an interrupted creation."""
    found = _names(directory)
    if not all(name in ("lock", _NEW) or _OWN.fullmatch(name) for name in found):
        raise FileExistsError(
            f"{directory} must be empty, or hold the rows of a storage, got {found[:5]}; choose another "
            "directory, or take what dumps() wrote by loads()."
        )


def remove_rows(directory: Path, *, but: str = "") -> None:
    """Removes files of rows but one, such as those left by loads and creations, completed or not."""
    for name in filter(_OWN.fullmatch, _names(directory)):
        if name != but:
            (directory / name).unlink(missing_ok=True)


def remove_files(directory: Path, *, and_directory: bool) -> None:
    """Removes our own files. After a kill halfway, the rest counts as an interrupted creation."""
    (directory / _NAME).unlink(missing_ok=True)
    remove_rows(directory)
    for name in (_NEW, "lock"):
        (directory / name).unlink(missing_ok=True)
    if and_directory:
        with suppress(OSError):  # something else is in it
            directory.rmdir()


def fingerprint(directory: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes with every new description of a directory; None if it is gone."""
    try:
        status = (directory / _NAME).lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
