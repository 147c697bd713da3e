"""What the files of a directory hold at every line of the code that writes them.

A killed process leaves behind what it has stored until then, in the same order for everyone who looks. So
the files as they are at a line are what a kill at that line leaves, and one run has all of them.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import trl_storages
from trl_storages.disk.description import Description
from trl_storages.disk.words import places

__all__ = ["Files", "Moments", "files_in", "parts_of", "put_back", "subsets"]

#: Name -> what the file holds.
Files = dict[str, bytes]

PACKAGE = str(Path(trl_storages.__file__).parent)
WORD = 8


def files_in(folder: Path) -> Files:
    """Reads all regular files of a directory."""
    files = {}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return {}
    for entry in entries:
        if entry.is_file(follow_symlinks=False):
            with open(entry.path, "rb", buffering=0) as file:
                files[entry.name] = file.read()
    return files


def put_back(files: Files, folder: Path) -> None:
    """Makes a directory of these files, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


class Moments:
    """Collects what the files of a directory hold at each line that runs of the package.

    Args:
        folder: the directory.

    Attributes:
        all: what the files held, each different state once, in order.
        lines: how many lines ran.
    """

    def __init__(self, folder: Path) -> None:
        self.all: list[Files] = []
        self.lines = 0
        self._folder, self._seen = folder, set()

    def look(self) -> None:
        files = files_in(self._folder)
        key = hash(tuple(files.items()))
        if key not in self._seen:
            self._seen.add(key)
            self.all.append(files)

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Moments | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            self.look()
        return self

    def __enter__(self) -> Moments:
        self.look()
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self.look()


def parts_of(folder: Path) -> dict[str, slice]:
    """Returns which bytes of the file of rows are those of what."""
    found = places(Description.read(folder))
    return {
        part: slice(WORD * at.start, WORD * at.stop)
        for part, at in found.items()
        if at.stop > at.start
    }


def subsets(before: Files, after: Files, rng: random.Random, number: int) -> Iterator[Files]:
    """Yields files where some of the words that changed have changed already, and others not.

    Args:
        before: the files at a fence.
        after: the same files at the next fence.
        rng: chooses the words.
        number: how many choices.
    """
    changed = [
        (name, at)
        for name, data in after.items()
        if name.endswith(".rows") and len(before.get(name, b"")) == len(data)
        for at in range(0, len(data), WORD)
        if before[name][at : at + WORD] != data[at : at + WORD]
    ]
    if len(changed) < 2:
        return
    for _ in range(number):
        share = rng.choice([0.05, 0.5, 0.95])
        files = {name: bytearray(data) for name, data in before.items()}
        for name, at in changed:
            if rng.random() < share:
                files[name][at : at + WORD] = after[name][at : at + WORD]
        yield {name: bytes(data) for name, data in files.items()}
