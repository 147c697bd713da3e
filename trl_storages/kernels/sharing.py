"""Rows whose next observations are stored once, as the observations of the rows that follow them.

Letters: N rows, W words of 8 bytes a row as it is seen, S words of them that are shared.

A row as it is seen is `[next S | S | others]`, all in words: the next values of its observations, the
observations in the same order, and the other fields. As it is stored, a header stands in the place of
the next values. Its first word is

    2 * entry + continues

`continues` is 1 where the next values of the row before it in its lane are its observations, bit for bit.
Where they are not, or that row is not there yet, `entry` of the row before names those next values in a
side table. So the next values of a row are the observations of the row after it in its lane where that
one continues it, and lie in the side table otherwise. Entry 0 is that of rows which need none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trl_storages.kernels.zeros import zeros

__all__ = ["NUM_FREE", "NUM_TAKEN", "Sharing", "SideTable"]

# Places of its counts.
NUM_FREE, NUM_TAKEN = 0, 1
# Entries that a GPU has room for at first.
_FIRST_ROOM = 1024


class Sharing(NamedTuple):
    """How much of a row is not stored in it."""

    num_shared: int
    """Fields that are: the first ones of a row. As many follow that they come back as."""
    shared_words: int
    """S."""
    header_words: int
    """Words that stand in their place."""


def _is_lazy(device: torch.device) -> bool:
    """Returns whether memory that was never written to takes none."""
    return device.type == "cpu"


class SideTable:
    """Next values that are not the observations of another row, and which of its entries are free.

    Args:
        num_rows: N, of which each needs an entry at most.
        shared_words: S.
        device: where it lives.
    """

    def __init__(self, num_rows: int, shared_words: int, device: torch.device) -> None:
        self.num_rows = num_rows
        # Memory of a GPU is taken at once. On the CPU it is where something was written.
        self._room = num_rows if _is_lazy(device) else min(num_rows, _FIRST_ROOM)
        # How many entries may be in use, as the host knows it without waiting for the device.
        self._most_used = 0
        self.device = device
        #: `[N + 1, S]` int64; the first one is nobody's.
        self.values = zeros(self._room + 1, shared_words, device=self.device)
        #: `[N + 1]` int64, the entries that were given up, the last one last.
        self.free = zeros(self._room + 1, device=self.device)
        #: `[2]` int64: how many were given up, and how many were ever taken.
        self.counts = zeros(2, device=self.device)

    @classmethod
    def of(cls, values: torch.Tensor) -> SideTable:
        """Returns a table that is only read, of `[*, S]` values."""
        side = cls(0, values.shape[1], values.device)
        side.values = values
        return side

    @property
    def num_used(self) -> int:
        """How many entries are in use."""
        num_free, num_taken = self.counts.tolist()
        found: int = num_taken - num_free
        return found

    @property
    def entry_nbytes(self) -> int:
        """The bytes of an entry."""
        return self.values.shape[1] * self.values.itemsize

    def make_room(self, num_entries: int) -> None:
        """Makes sure that so many entries can be taken; a GPU is asked how many are free when it must."""
        if self._room == self.num_rows:
            return
        self._most_used += num_entries
        if self._most_used <= self._room:
            return
        self._most_used = min(self.num_used + num_entries, self.num_rows)
        if self._most_used > self._room:
            self._room = min(2 * self._most_used, self.num_rows)
            for name in ("values", "free"):
                old = getattr(self, name)
                new = zeros(self._room + 1, *old.shape[1:], device=self.device)
                new[: len(old)] = old
                setattr(self, name, new)

    def clear(self) -> None:
        """Gives all entries up."""
        self.counts.zero_()

    @property
    def taken(self) -> torch.Tensor:
        """`[*, S]` the entries that were ever taken, and entry 0."""
        return self.values[: int(self.counts[NUM_TAKEN]) + 1]

    def share_memory_(self) -> None:
        """Moves it to memory that other processes see."""
        if self.values.is_shared():  # type: ignore[no-untyped-call]
            return
        num_taken = len(self.taken)
        for name in ("values", "free", "counts"):
            old = getattr(self, name)
            # Memory of no file takes none before it is written to, unlike a copy of all of it.
            memory = torch.UntypedStorage._new_shared(old.nbytes, device="cpu")  # type: ignore[no-untyped-call]
            new = torch.empty(0, dtype=torch.int64).set_(memory).view(old.shape)
            new[:num_taken] = old[:num_taken]
            setattr(self, name, new)
