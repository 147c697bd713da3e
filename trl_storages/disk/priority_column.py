"""Raw priorities on disk, a word a row.

Letters: N rows, n of them.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch

from trl_storages.disk.directory import PRIORITIES
from trl_storages.disk.files import MappedWords, create_file
from trl_storages.disk.journal import Journal
from trl_storages.disk.marks import steps

__all__ = ["PriorityColumn"]

_HALF = 32  # bits
# Steps are counted anew when rows were forgotten; a large odd number keeps the generations apart.
_EPOCH = 0x9E3779B1
_LARGEST_GENERATION = 2**31 - 1


class PriorityColumn:
    """Keeps the priority of each row together with the generation of the row, in one word.

    A word is written at once, so a killed process leaves the old priority or the new one; and a row
    that was committed without a priority is told apart from the row that lay there before.

    Args:
        journal: the files of the storage. A writer makes the column if it is missing.

    Raises:
        OSError: the disk is full.
        FileNotFoundError: there is no column, and this process only reads.
        ValueError: the column is truncated.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        size = len(journal.rows) + 1
        path = journal.directory / PRIORITIES
        if not path.exists():
            if not journal.is_writer:
                raise FileNotFoundError(
                    f"{journal.directory} holds no priorities: its writer does not draw by priority. "
                    "Read it with another sampler."
                )
            new = path.with_name(path.name + ".new")
            create_file(new, size)
            new.replace(path)
        if journal.column is None:
            journal.column = MappedWords(path, size, writable=journal.is_writer)
        words = journal.column.array
        self._column, self._largest = words[:-1], words[-1:].view(np.float64)

    @property
    def is_writable(self) -> bool:
        """Whether this process may write priorities."""
        return self._journal.is_writer

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write priorities."""
        self._journal.check_writable()

    def generations(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns a number for the row in each slot, int32 `[n]`: another row has another one.

        Args:
            slots: `[n]` int64.
        """
        return torch.from_numpy(self._generations(slots.numpy()).astype(np.int32))

    def _generations(self, slots: np.ndarray) -> np.ndarray:
        step = steps(self._journal.marks[:, 0].take(slots))
        offset = self._journal.state.epoch * _EPOCH % _LARGEST_GENERATION
        # From 1, so that a word of zeros belongs to no row.
        return (step + offset) % _LARGEST_GENERATION + 1

    def put(self, slots: torch.Tensor, priority: torch.Tensor) -> None:
        """Keeps the priorities of rows that are committed.

        Args:
            slots: `[n]` int64.
            priority: `[n]` float32, or `[]` for all.
        """
        at, bits = slots.numpy(), priority.numpy().view(np.uint32).astype(np.int64)
        self._column[at] = self._generations(at) << _HALF | bits

    def get(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the priorities of rows.

        Args:
            slots: `[n]` int64.

        Returns:
            `[n]` float32; NaN where the row has none yet.

        Raises:
            ValueError: the file is damaged: a priority is negative or not finite.
        """
        at = slots.numpy()
        words = self._column.take(at)
        priority = words.astype(np.uint32).view(np.float32)
        known = words >> _HALF == self._generations(at)
        wrong = known & ~((priority >= 0) & (priority < np.inf))
        if wrong.any():
            self._refuse(f"that of the row in slot {at[wrong][0]} is {priority[wrong][0]}")
        return torch.from_numpy(np.where(known, priority, np.float32(np.nan)))

    def clear(self) -> None:
        """Forgets all priorities."""
        self._column[:] = 0
        self._largest[:] = 0

    @property
    def largest(self) -> float:
        """The largest priority reported so far; 0 if there was none.

        Raises:
            ValueError: the file is damaged: it is negative or not finite.
        """
        largest = float(self._largest[0])
        if not 0 <= largest < np.inf:
            self._refuse(f"the largest is {largest}")
        return largest

    @largest.setter
    def largest(self, value: float) -> None:
        self._largest[0] = value

    def _refuse(self, found: str) -> NoReturn:
        raise ValueError(
            f"{self._journal.directory / PRIORITIES} is damaged: priorities must be finite and at least "
            f"0, {found}. Bring it back from a copy, or delete it: all rows then get the same priority."
        )
