"""How a directory of rows describes itself: `storage.json`, and the name of the file beside it.

Letters: E lanes (environments), T live steps per lane at most, S spare steps, R = T + S, H histories, D
steps before a row whose frames it is read with.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_storages.disk.files import damaged, opened, write_text
from trl_storages.kernels.marks import MOST_HISTORIES
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout
from trl_storages.saved.parts import SavedState
from trl_storages.saved.untrusted import MOST_BYTES, parse_json

__all__ = [
    "Description",
    "announce",
    "check_is_free",
    "holds_storage",
    "remove_files",
    "remove_other_files",
    "spare_steps",
    "stamp",
]

_NAME = "storage.json"
# Marks a directory whose storage is being created or removed.
_CREATING = _NAME + ".creating"
_OWN = re.compile(r"rows\.\d{1,9}\.bin")
_KIND = {"kind": "trl_storages", "format": 2}
_MOST = 2**40  # steps of a lane, rows of a storage
_LEAST_SPARE, _SPARE_SHARE = 64, 64
# Keeps the file small enough to be read back.
_MOST_NUMBERS = 2**18

Steps = list[int]


@dataclass(frozen=True)
class Description:
    """The contents of `storage.json`. Never changed: a change makes a new one.

    Args:
        layout: of a row.
        num_rows: live rows at most, as requested when the storage was created.
        num_lanes: E.
        spare_steps: S.
        tails: `[E]` the first steps that may be live; earlier rows are never recovered.
        flushed: `[E]` the cursors at the last flush.
        identity: unique to each creation of a directory.
        generation: of the files in use.
        histories: for each writer that still owns live steps, its number and `[E]` its first step in each
            lane; the newest last.
        is_clean: whether nothing was written since the last flush.
        progress: other state to resume from: generator, sampler, recorder.
    """

    layout: Layout
    num_rows: int
    num_lanes: int
    spare_steps: int
    tails: Steps
    flushed: Steps
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    generation: int = 1
    histories: list[Steps] = field(default_factory=list)
    is_clean: bool = True
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_per_lane(self) -> int:
        """T."""
        return self.num_rows // self.num_lanes

    @property
    def ring_steps(self) -> int:
        """R."""
        return self.steps_per_lane + self.spare_steps

    @property
    def past_steps(self) -> int:
        """D."""
        return self.layout.past_steps

    @cached_property
    def most_steps(self) -> int:
        """The most steps of a lane that a write can put in slots without a live row or a frame in use."""
        return self.spare_steps - self.past_steps

    @cached_property
    def history(self) -> int:
        """The number of the newest history, 0 before the first."""
        return self.histories[-1][0] if self.histories else 0

    def new_index(self) -> EpisodeIndex:
        """Returns an index of no rows."""
        return EpisodeIndex(self.num_rows, self.num_lanes, spare_steps=self.spare_steps)

    @property
    def data_name(self) -> str:
        """The name of the file of rows."""
        return f"rows.{self.generation}.bin"

    def owners(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the numbers of the histories `[H]`, and their first steps `[H, E]`."""
        known = torch.tensor(self.histories, dtype=torch.int64).view(-1, self.num_lanes + 1)
        return known[:, 0], known[:, 1:]

    def begun(self, cursors: np.ndarray, tails: np.ndarray) -> Description:
        """Returns this description with a new history that owns the steps from `cursors` on.

        Raises:
            RuntimeError: there would be too many histories.
        """
        number = self.history + 1
        known = np.array([*self.histories, [number, *cursors]])
        # A step belongs to the newest history that began at or before it: drop the histories that own
        # neither a live step nor one whose frame is in use.
        firsts, oldest = known[:, 1:], tails - self.past_steps
        ends = np.minimum.accumulate(firsts[:0:-1])[::-1]
        owns_some = (np.maximum(firsts[:-1], oldest) < ends).any(1)
        kept = known[np.append(owns_some, True)].tolist()
        if number >= MOST_HISTORIES or len(kept) * (self.num_lanes + 2) > _MOST_NUMBERS:
            raise RuntimeError(
                f"the directory was opened and written {number} times, of which {len(kept)} left "
                "rows: save them with dumps(), delete it by close(keep=False), make it anew, and load "
                "them."
            )
        flushed = np.minimum(self.flushed, cursors).tolist()
        steps: Any = {"histories": kept, "flushed": flushed, "tails": tails.tolist()}
        return replace(self, **steps, is_clean=False)

    def write(self, directory: Path) -> None:
        """Replaces the description of a directory, atomically and durably.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        own = {it.name: getattr(self, it.name) for it in fields(self)}
        words = {**_KIND, **own, "layout": self.layout.to_json()}
        write_text(directory / _NAME, json.dumps({**words, "check": _check(words)}))
        (directory / _CREATING).unlink(missing_ok=True)

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
            return cls._from_words(parse_json(text))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"it does not describe a storage: {error}") from error

    @classmethod
    def _from_words(cls, words: Any) -> Description:
        if not isinstance(words, dict):
            raise TypeError(f"it must be an object of JSON, got {str(words)[:25]}")
        if (got := {key: words.get(key) for key in _KIND}) != _KIND:
            raise ValueError(
                f"it must be of {_KIND}, got {str(got)[:50]} (format 1 was never released: delete it)"
            )
        if words.pop("check", None) != _check(words):
            raise ValueError("it does not match its checksum")
        names = [it.name for it in fields(cls)]
        saved = SavedState(words, "the description", [*_KIND, *names])
        num_rows = saved.integer("num_rows", 1, _MOST)
        num_lanes = saved.integer("num_lanes", 1, num_rows)
        layout = Layout.from_json(saved["layout"])
        most_spare = num_rows // num_lanes + layout.past_steps
        saved.integer("spare_steps", 1 + layout.past_steps, most_spare)
        saved.integer("generation", 1, 10**9 - 1)
        saved.flag("is_clean")
        for steps in (saved["tails"], saved["flushed"]):
            _check_numbers(steps, num_lanes)
        for history in saved["histories"]:
            _check_numbers(history, num_lanes + 1)
        numbers = [0, *(number for number, *_ in saved["histories"]), MOST_HISTORIES]
        if numbers != sorted(set(numbers)):
            raise saved.error("histories", "numbered upwards", str(numbers)[:50])
        return cls(**{**{name: saved[name] for name in names}, "layout": layout})


def _check(words: dict[str, Any]) -> int:
    """Returns the checksum of a description."""
    return zlib.crc32(json.dumps(words).encode())


def _check_numbers(value: Any, length: int) -> None:
    is_list = isinstance(value, list) and len(value) == length
    if not (is_list and all(type(it) is int and 0 <= it <= _MOST for it in value)):
        got = repr(value)[:50]
        raise ValueError(f"there must be {length} whole numbers from 0 to {_MOST}, got {got}")


def spare_steps(steps_per_lane: int, past_steps: int) -> int:
    """Returns S: slack for readers, and room for writes of S - D steps that evict nothing beforehand."""
    return past_steps + min(steps_per_lane, max(_LEAST_SPARE, steps_per_lane // _SPARE_SHARE))


# The directory as a whole


def holds_storage(directory: Path) -> bool:
    """Returns whether a directory holds a storage."""
    return os.path.lexists(directory / _NAME)


def _own_files(directory: Path) -> list[str]:
    """Returns the names of the files of rows in a directory, of every generation."""
    return [name for name in _names(directory) if _OWN.fullmatch(name)]


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def check_is_free(directory: Path) -> None:
    """Raises a FileExistsError unless the directory is empty but for an interrupted creation."""
    known, found = {"lock"}, _names(directory)
    if _CREATING in found and _NAME not in found:
        known |= {_CREATING, _NAME + ".new", *_own_files(directory)}
    if not known.issuperset(found):
        raise FileExistsError(
            f"{directory} must be empty, or hold the rows of a storage, got {found[:5]}; choose another "
            "directory, or take what dumps() wrote by loads()."
        )


def announce(directory: Path) -> None:
    """Marks the files of a directory as ours until `storage.json` is written."""
    (directory / _CREATING).unlink(missing_ok=True)
    (directory / _CREATING).touch(exist_ok=False)


def remove_other_files(directory: Path, description: Description) -> None:
    """Removes files of other generations, left by loads whether completed or not."""
    for name in _own_files(directory):
        if name != description.data_name:
            (directory / name).unlink(missing_ok=True)


def remove_files(directory: Path, *, and_directory: bool) -> None:
    """Removes our own files. After a kill halfway, the rest counts as an interrupted creation."""
    if holds_storage(directory):
        (directory / _NAME).replace(directory / _CREATING)
    for name in [*_own_files(directory), _NAME + ".new", _CREATING, "lock"]:
        (directory / name).unlink(missing_ok=True)
    if and_directory:
        with suppress(OSError):  # something else is in it
            directory.rmdir()


def stamp(directory: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes with every new description of a directory; None if it is gone."""
    try:
        status = (directory / _NAME).lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
