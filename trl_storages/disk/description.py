"""What a directory of rows is: `storage.json`, and the names of the files beside it.

Letters: E lanes (environments), T live steps a lane at most, S spare steps, H histories, W words a row.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trl_storages.disk.files import opened, write_text
from trl_storages.kernels.marks import MOST_HISTORIES
from trl_storages.rows.layout import Layout
from trl_storages.saved import MOST_BYTES, SavedState, parse_json

__all__ = [
    "Description",
    "History",
    "check_is_free",
    "check_is_storage",
    "holds_storage",
    "own_files",
    "remove_files",
    "spare_steps",
    "stamp",
]

_NAME = "storage.json"
# What is written before it gets the name, and what says that there will be a storage.
_NEW, _CREATING = _NAME + ".new", _NAME + ".creating"
_LOCK = "lock"
_OWN = re.compile(r"(rows|marks|commits|priorities)\.\d{1,9}\.bin")
_FORMAT = 2
_MOST = 2**40  # steps of a lane, rows of a storage
_LEAST_SPARE, _SPARE_SHARE = 64, 64
# The file must stay one that can be read.
_MOST_NUMBERS = 2**18


def holds_storage(directory: Path) -> bool:
    """Returns whether there is a storage in a directory."""
    return os.path.lexists(directory / _NAME)


def check_is_storage(directory: Path) -> None:
    """Raises a FileNotFoundError if there is no storage in a directory."""
    if holds_storage(directory):
        return
    there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else None
    found = "there is none" if there is None else f"got one with {there[:5]}"
    raise FileNotFoundError(
        f"{directory} must be a directory that holds a storage (with {_NAME}), {found}; make "
        "one with path= or scratch_dir=."
    )


@dataclass(frozen=True)
class History:
    """What one writer wrote, from when it opened the directory on."""

    number: int
    first: tuple[int, ...]
    """`[E]` its first step in each lane."""


@dataclass(frozen=True)
class Description:
    """What `storage.json` says. It is never changed, but replaced by another one."""

    layout: Layout
    num_rows: int
    """Live rows at most, as the storage was made for."""
    num_lanes: int
    """E."""
    spare_steps: int
    """S."""
    tails: tuple[int, ...]
    """`[E]` no row before these steps comes back, whatever is found of it."""
    flushed: tuple[int, ...]
    """`[E]` the cursors as everything was on disk last."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Another one wherever a directory is made."""
    generation: int = 1
    """Which files count."""
    histories: tuple[History, ...] = ()
    """Those that still own live steps, the newest last."""
    is_clean: bool = True
    """Whether nothing was written since everything was flushed."""
    has_priorities: bool = False
    """Whether each row had a priority when it was closed."""
    progress: dict[str, Any] = field(default_factory=dict)
    """What else goes on where it was: generator, sampler, recorder."""

    @classmethod
    def of_new(cls, layout: Layout, num_rows: int, num_lanes: int) -> Description:
        """Describes an empty storage."""
        steps, none = num_rows // num_lanes, (0,) * num_lanes
        return cls(layout, num_rows, num_lanes, spare_steps(steps), none, none)

    @property
    def steps_per_lane(self) -> int:
        """T."""
        return self.num_rows // self.num_lanes

    @property
    def ring_steps(self) -> int:
        """R."""
        return self.steps_per_lane + self.spare_steps

    @property
    def num_slots(self) -> int:
        """R E."""
        return self.ring_steps * self.num_lanes

    @property
    def history(self) -> int:
        """The number of the newest history, 0 before there is any."""
        return self.histories[-1].number if self.histories else 0

    def owners(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `[H]` the numbers of the histories, and `[H, E]` their first steps."""
        numbers = torch.tensor([history.number for history in self.histories], dtype=torch.int64)
        firsts = torch.tensor([history.first for history in self.histories], dtype=torch.int64)
        return numbers, firsts.view(len(numbers), self.num_lanes)

    def begun(self, cursors: Sequence[int], tails: Sequence[int]) -> Description:
        """Describes the same with a new history, that owns the steps from `cursors` on.

        Raises:
            RuntimeError: there are too many.
        """
        new = History(self.history + 1, tuple(cursors))
        kept: list[History] = [new]
        # Of the steps of a lane that are left, each belongs to the newest history that began before it.
        ends = list(cursors)
        for old in reversed(self.histories):
            if any(max(a, b) < c for a, b, c in zip(old.first, tails, ends, strict=True)):
                kept.insert(0, old)
            ends = [min(a, b) for a, b in zip(ends, old.first, strict=True)]
        if new.number >= MOST_HISTORIES or len(kept) * (self.num_lanes + 2) > _MOST_NUMBERS:
            raise RuntimeError(
                f"the directory was opened and written {new.number} times, of which {len(kept)} left "
                "rows: save them with dumps(), make it anew with existsok=True, and load them."
            )
        flushed = tuple(map(min, self.flushed, cursors))
        return replace(
            self, histories=tuple(kept), tails=tuple(tails), flushed=flushed, is_clean=False
        )

    # Files

    def file(self, directory: Path, kind: str) -> Path:
        """Returns where words of a kind are: rows, marks, commits or priorities."""
        return directory / f"{kind}.{self.generation}.bin"

    def write(self, directory: Path) -> None:
        """Replaces what a directory says of itself, at once and for good.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        write_text(directory / _NAME, self._text())
        (directory / _CREATING).unlink(missing_ok=True)

    def announce(self, directory: Path) -> None:
        """Says that the files of a directory are ours, until `write` makes it a storage.

        Raises:
            OSError: the disk is full.
        """
        (directory / _CREATING).unlink(missing_ok=True)
        with (directory / _CREATING).open("x") as file:
            file.write(self._text())

    def _text(self) -> str:
        words = {
            "kind": "trl_storages",
            "format": _FORMAT,
            "id": self.identity,
            "generation": self.generation,
            "num_rows": self.num_rows,
            "num_lanes": self.num_lanes,
            "spare_steps": self.spare_steps,
            "layout": self.layout.to_json(),
            "histories": [[history.number, *history.first] for history in self.histories],
            "tails": self.tails,
            "flushed": self.flushed,
            "clean": self.is_clean,
            "has_priorities": self.has_priorities,
            "progress": self.progress,
        }
        return json.dumps({**words, "check": _check(words)})

    @classmethod
    def read(cls, directory: Path) -> Description:
        """Reads what a directory says of itself.

        Raises:
            FileNotFoundError: it holds no storage.
            ValueError: it is damaged, or of another format.
        """
        check_is_storage(directory)
        path = directory / _NAME
        with opened(path) as (descriptor, size):
            if size > MOST_BYTES:
                raise ValueError(f"{path} must have at most {MOST_BYTES} bytes, got {size}.")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                text = file.read(MOST_BYTES)
        try:
            words = parse_json(text)
            if isinstance(words, dict) and words.get("version") == 1:
                raise ValueError(
                    "it is of format 1, which was never released: delete it, or choose another"
                )
            if isinstance(words, dict) and words.get("format") != _FORMAT:
                got = str(words.get("format"))[:25]
                raise ValueError(f"it must be of format {_FORMAT}, got {got}")
            if isinstance(words, dict) and words.pop("check", None) != _check(words):
                raise ValueError("it does not match its checksum")
            return cls._from_words(words)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not describe a storage, or is damaged: {error}. Bring it back from a copy, "
                "or choose another directory; nothing was changed."
            ) from error

    @classmethod
    def _from_words(cls, words: Any) -> Description:
        names = ("kind", "format", "id", "generation", "num_rows", "num_lanes", "spare_steps")
        more = ("layout", "histories", "tails", "flushed", "clean", "has_priorities", "progress")
        saved = SavedState(words, "the description", (*names, *more))
        saved.one_of("kind", ["trl_storages"])
        num_rows = saved.integer("num_rows", 1, _MOST)
        num_lanes = saved.integer("num_lanes", 1, num_rows)
        steps = num_rows // num_lanes
        progress, identity = saved["progress"], saved["id"]
        if not isinstance(identity, str) or not isinstance(progress, dict):
            raise saved.error("id", "a name, and 'progress' a dict", repr(identity)[:50])
        if not isinstance(saved["histories"], list):
            raise saved.error("histories", "a list", repr(saved["histories"])[:50])
        histories, before = [], 0
        for history in saved["histories"]:
            number, *first = _numbers(history, num_lanes + 1)
            if not before < number < MOST_HISTORIES:
                raise saved.error("histories", "numbered upwards", number)
            histories.append(History(number, tuple(first)))
            before = number
        return cls(
            Layout.from_json(saved["layout"]),
            num_rows,
            num_lanes,
            saved.integer("spare_steps", 1, steps),
            _numbers(saved["tails"], num_lanes),
            _numbers(saved["flushed"], num_lanes),
            identity,
            saved.integer("generation", 1, 10**9 - 1),
            tuple(histories),
            saved.flag("clean"),
            saved.flag("has_priorities"),
            progress,
        )


def _check(words: dict[str, Any]) -> int:
    """Returns a checksum of what a directory says of itself."""
    return zlib.crc32(json.dumps(words).encode())


def _numbers(value: Any, length: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ValueError(f"there must be a list of {length} numbers, got {repr(value)[:50]}")
    if not all(type(number) is int and 0 <= number <= _MOST for number in value):
        raise ValueError(f"steps must be whole numbers from 0 to {_MOST}, got {repr(value)[:50]}")
    return tuple(value)


def spare_steps(steps_per_lane: int) -> int:
    """Returns S, so that readers have time, and writes of S steps need not evict rows first."""
    return min(steps_per_lane, max(_LEAST_SPARE, steps_per_lane // _SPARE_SHARE))


# The directory as a whole


def check_is_free(directory: Path) -> None:
    """Raises a FileExistsError if there is more than what is left of an interrupted making."""
    there = {path.name for path in directory.iterdir()}
    is_left = _CREATING in there and _NAME not in there
    if there - {_LOCK} and not (
        is_left and there <= {_LOCK, _CREATING, _NEW, *own_files(directory)}
    ):
        raise FileExistsError(
            f"{directory} must be empty, or hold the rows of a storage, got {sorted(there)[:5]}; "
            "choose another directory."
        )


def own_files(directory: Path) -> list[str]:
    """Returns the names of the files of words in a directory, of whatever generation."""
    names = [path.name for path in directory.iterdir()]
    return sorted(name for name in names if _OWN.fullmatch(name.removesuffix(".new")))


def remove_files(directory: Path, *, and_directory: bool) -> None:
    """Removes our own files. A process that is killed halfway leaves what may be made anew."""
    if holds_storage(directory):
        (directory / _NAME).replace(directory / _CREATING)
    for name in [*own_files(directory), _NEW, _CREATING, _LOCK]:
        (directory / name).unlink(missing_ok=True)
    if and_directory:
        with suppress(OSError):  # something else is in it
            directory.rmdir()


def stamp(directory: Path) -> tuple[int, int, int] | None:
    """Returns what changes whenever a directory says something else of itself; None if it is gone."""
    try:
        status = (directory / _NAME).lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
