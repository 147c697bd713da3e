"""Raw priorities on disk, a word a row.

Letters: M slots, n rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_storages.disk.words import Words
from trl_storages.kernels import backend
from trl_storages.kernels.marks import STEP_BIT

__all__ = ["PriorityColumn", "has_all"]

# Of the multiplication that spreads history and step of a row over the 31 bits of its generation.
_FACTOR, _SHIFT, _LARGEST_GENERATION = 0x9E3779B97F4A7C15 - 2**64, 33, 2**31 - 1
_NO_MARK = torch.zeros(1, dtype=torch.int64)


class PriorityColumn:
    """Keeps the priority of each row together with a check over it and the mark of the row, in one word.

    A word is written at once, so a killed process leaves the old priority or the new one; and a row
    that was committed without a priority is told apart from the row that lay there before.

    Args:
        storage: whose rows are in a directory. Its writer makes the column if it is missing.

    Raises:
        OSError: the disk is full.
        FileNotFoundError: there is no column, and this process only reads.
        ValueError: the column is truncated, or no file.
    """

    def __init__(self, storage: Any) -> None:
        self._storage, self._words = storage, storage.words
        words = self._words.column(make=self.is_writable)
        self._column, self._largest = words[:-1].numpy(), words[-1:]
        self._marks = self._words.marks[:, 0].numpy()

    @property
    def is_writable(self) -> bool:
        """Whether this process may write priorities."""
        directory = self._storage.directory
        return directory is not None and directory.is_writer

    def check_writable(self) -> None:
        """Raises a RuntimeError if this process may not write priorities."""
        self._storage.check_writable()

    @property
    def must_be_whole(self) -> bool:
        """Whether each row had a priority when the directory was closed, and nothing came since."""
        if not self.is_writable:
            return False
        description = self._storage.directory.description
        return description.is_clean and description.has_priorities

    def generations(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns a number for the row in each slot, int32 `[n]`: another row has another one.

        Args:
            slots: `[n]` int64.
        """
        row = self._marks[slots.numpy()] >> STEP_BIT
        # From 1, so that none is that of a slot that never held a row.
        found = (row * _FACTOR >> _SHIFT) & _LARGEST_GENERATION | 1
        return torch.from_numpy(found.astype(np.int32))

    def put(self, slots: torch.Tensor, priority: torch.Tensor) -> None:
        """Keeps the priorities of rows that are committed.

        Args:
            slots: `[n]` int64.
            priority: `[n]` float32.
        """
        at = slots.numpy()
        marks = torch.from_numpy(self._marks[at])
        self._column[at] = backend("cpu").seal_priorities(priority, marks).numpy()

    def get(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the priorities of rows.

        Args:
            slots: `[n]` int64.

        Returns:
            `[n]` float32; NaN where the row has none yet, or it is damaged.
        """
        at = slots.numpy()
        return _unsealed(torch.from_numpy(self._column[at]), torch.from_numpy(self._marks[at]))

    def clear(self) -> None:
        """Forgets all priorities."""
        self._column.fill(0)
        self.largest = 0.0

    @property
    def knows_largest(self) -> bool:
        """Whether the largest priority is there, and not damaged."""
        return not bool(_unsealed(self._largest, _NO_MARK).isnan())

    @property
    def largest(self) -> float:
        """The largest priority reported so far; 0 if there was none."""
        return _unsealed(self._largest, _NO_MARK).nan_to_num(nan=0.0).item()

    @largest.setter
    def largest(self, value: float) -> None:
        self._largest.copy_(backend("cpu").seal_priorities(torch.tensor([value]), _NO_MARK))


def has_all(words: Words, slots: torch.Tensor) -> bool:
    """Returns whether each of some rows has a priority in the column that there is."""
    column, marks = words.column(make=False), words.marks
    return not bool(_unsealed(column[slots], marks[slots, 0]).isnan().any())


def _unsealed(words: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    priority, is_right = backend("cpu").unseal_priorities(words, marks)
    return torch.where(is_right & (priority >= 0) & priority.isfinite(), priority, torch.nan)
