"""What a write is about to replace, kept until the write is committed.

Letters: n rows that are replaced, W words a row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trl_storages.disk.files import WORD, MappedWords, create_file

__all__ = ["Undo"]

# So much room is made at first, or for one row.
_ROOM = 1 << 16  # bytes
_OWN_WORDS = 3  # a row: its slot, its mark and its checksum


class Undo:
    """A file of slots, marks and rows as they were.

    It may grow, before anything is written: should the disk be full by then, nothing has changed.

    Args:
        path: the file.
        num_words: W.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file was truncated.
    """

    def __init__(self, path: Path, num_words: int) -> None:
        self._path, self._width = path, _OWN_WORDS + num_words
        self._words = MappedWords(path, None, writable=True)
        array = self._words.array
        self._room, over = divmod(len(array) - 1, self._width)
        if self._room < 1 or over:
            raise ValueError(
                f"{path} must hold a word, and {self._width} for each of some rows, got {len(array)}: it "
                "was truncated. Bring it back from a copy; nothing was changed."
            )
        self._slots = array[1 : 1 + self._room]
        self._marks = array[1 + self._room : 1 + 3 * self._room].reshape(-1, 2)
        self._rows = array[1 + 3 * self._room : 1 + self._width * self._room]
        self._rows = self._rows.reshape(self._room, -1)

    @staticmethod
    def create(path: Path, num_words: int, num_rows: int = 0) -> None:
        """Makes a file with room for so many rows, or a few more.

        Raises:
            OSError: the disk is full.
        """
        width = _OWN_WORDS + num_words
        create_file(path, 1 + width * max(num_rows, _ROOM // (width * WORD), 1))

    def make_room(self, num_rows: int) -> None:
        """Makes room for so many rows. What was kept is lost.

        Raises:
            OSError: the disk is full.
        """
        if num_rows > self._room:
            new = self._path.with_name(self._path.name + ".new")
            self.create(new, self._width - _OWN_WORDS, num_rows)
            new.replace(self._path)
            # All of it at once: what is kept must not go to the file that is gone.
            self.__dict__.update(Undo(self._path, self._width - _OWN_WORDS).__dict__)

    def keep(self, slots: np.ndarray, marks: np.ndarray, rows: np.ndarray) -> None:
        """Keeps rows.

        Args:
            slots: `[n]` int64; none says that nothing is replaced.
            marks: `[N, 2]` int64 of all slots.
            rows: `[N, W]` int64 of all slots.
        """
        size = len(slots)
        self._words.array[0] = size
        if size:
            self._slots[:size] = slots
            marks.take(slots, 0, out=self._marks[:size], mode="clip")
            rows.take(slots, 0, out=self._rows[:size], mode="clip")

    def restore(self, marks: np.ndarray, rows: np.ndarray) -> None:
        """Puts back what was kept; doing it twice does no harm.

        Raises:
            ValueError: the file is damaged. Nothing was changed then.
        """
        size = int(self._words.array[0])
        slots = self._slots[:size]
        if not 0 <= size <= self._room or (
            size and not 0 <= slots.min() <= slots.max() < len(rows)
        ):
            raise ValueError(
                f"{self._path} is damaged: it does not hold the rows that an interrupted write was "
                "replacing. Bring it back from a copy; nothing was changed."
            )
        rows[slots] = self._rows[:size]
        marks[slots] = self._marks[:size]
