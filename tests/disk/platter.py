"""A disk that keeps what was synced, and of everything since then what chance leaves.

Pages of a file that was written since it was synced hold what they held then, or anything later; names of
a directory that were changed since it was synced are those of then, or of any later moment.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from disk.moments import Files

__all__ = ["Platter"]


class _File:
    """One file, whatever it is called.

    Attributes:
        pages: of each page what it held since the last sync, the oldest first.
    """

    def __init__(self, descriptor: int, page: int) -> None:
        self._descriptor, self._page = descriptor, page
        self.pages: list[list[bytes]] = []
        self._size = 0

    def look(self) -> None:
        self._size = os.fstat(self._descriptor).st_size
        data = os.pread(self._descriptor, self._size, 0)
        for place, at in enumerate(range(0, len(data), self._page)):
            held = data[at : at + self._page]
            if place == len(self.pages):
                # Of a file that was never synced nothing need be there.
                self.pages.append([bytes(len(held))])
            if self.pages[place][-1] != held:
                self.pages[place].append(held)

    def sync(self, part: slice = slice(None)) -> None:
        self.look()
        start, stop, _ = part.indices(self._size)
        for place in range(start // self._page, -(-stop // self._page)):
            self.pages[place] = self.pages[place][-1:]

    def after_cut(self, rng: random.Random, newest: float) -> bytes:
        """What is left of it; `newest` is how likely a page is as it was last."""
        chosen = [
            versions[-1] if rng.random() < newest else rng.choice(versions)
            for versions in self.pages
        ]
        return b"".join(chosen)[: self._size]

    def close(self) -> None:
        os.close(self._descriptor)


class Platter:
    """What a disk holds of one directory.

    Args:
        folder: the directory that is written.
        page: bytes that are written as a whole.
    """

    def __init__(self, folder: Path, page: int) -> None:
        self._folder, self._page = folder, page
        self._files: dict[tuple[int, int], _File] = {}
        self._names: list[dict[str, tuple[int, int]]] = [{}]

    def look(self) -> None:
        """Takes in what has been written since the last look."""
        names = {}
        if self._folder.is_dir():
            for entry in os.scandir(self._folder):
                try:
                    descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
                except FileNotFoundError:
                    continue
                status = os.fstat(descriptor)
                key = (status.st_dev, status.st_ino)
                # A file that is held open has a number that no other gets.
                if key in self._files:
                    os.close(descriptor)
                else:
                    self._files[key] = _File(descriptor, self._page)
                names[entry.name] = key
        if names != self._names[-1]:
            self._names.append(names)
        for file in self._files.values():
            file.look()

    def sync(self, path_or_descriptor: Any, part: slice = slice(None)) -> None:
        """Takes in that a file, or these bytes of it, or the directory is synced."""
        self.look()
        try:
            status = os.stat(path_or_descriptor)
        except FileNotFoundError:
            return
        key = (status.st_dev, status.st_ino)
        if key in self._files:
            self._files[key].sync(part)
        elif self._folder.is_dir() and os.path.samestat(status, os.stat(self._folder)):
            self._names = self._names[-1:]

    def sync_all(self) -> None:
        """Takes in that the machine was shut down in peace."""
        self.look()
        self._names = self._names[-1:]
        for file in self._files.values():
            file.sync()

    def after_cut(self, rng: random.Random) -> Files:
        """What may be left when the power is cut now."""
        newest = rng.choice([0.0, 0.2, 0.5, 0.8])
        names = rng.choice(self._names)
        return {name: self._files[key].after_cut(rng, newest) for name, key in names.items()}

    def as_old_as_can_be(self, name: str, part: slice) -> Files:
        """What is left by a cut now that takes all it can from whole pages of a file, else nothing."""
        old = range(part.start // self._page, -(-part.stop // self._page))
        return {
            known: b"".join(
                it[0 if known == name and place in old else -1]
                for place, it in enumerate(self._files[key].pages)
            )
            for known, key in self._names[-1].items()
        }

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
