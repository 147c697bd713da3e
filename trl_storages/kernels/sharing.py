"""Rows whose next observations are stored once, as the observations of the rows that follow them.

Letters: N rows, W words of 8 bytes a row as it is seen, S words of them that are shared.

A row as it is seen is `[next S | stored]`, in words: the next values of its observations, and the row as
it is stored. That begins with the observations in the same order. Somewhere behind them is a header,

    entry << 3 | tip << 1 | continues

`continues` is 1 where the next values of the row before it in its lane are its observations, bit for bit.
Where they are not, `entry` names those next values in a side table. So a row is written once: what is
next of it is said by the row after it. Before that row is there, they lie in one of three tips of the
lane, that of the number `tip`. A write takes the tip that holds what is next of neither the row which was
the newest before the write, nor the one which was when all was brought to disk last.

The side table has the tips first: that of number t of lane l is entry `1 + (t - 1) * E + l`. Entry 0 is
nobody's. Where rows are in files, an entry has one word more: a checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from trl_storages.kernels.zeros import zeros

__all__ = [
    "CONTINUES",
    "ENTRY_BIT",
    "FLUSHED",
    "LINKED",
    "NUM_FREE",
    "NUM_TAKEN",
    "NUM_TIPS",
    "OWNED",
    "TIP_BIT",
    "Sharing",
    "SideTable",
    "header_dtype",
    "tips_of",
]

#: Of a header.
CONTINUES, TIP_BIT, ENTRY_BIT = 1, 1, 3
NUM_TIPS = 3
# Places of its counts.
NUM_FREE, NUM_TAKEN = 0, 1
#: Of each lane: the tip that must stay until all is brought to disk once more, 0 if none must; the first
#: step whose row has its entry to itself, whatever lies there of others; and the step after the last one
#: that was written since.
FLUSHED, OWNED, LINKED = range(3)
# So many rows have fewer entries than 4 bytes can name, with the tips and the spare rows of files.
_MOST_NARROW = 2**25
# Entries that a GPU has room for at first.
_FIRST_ROOM = 1024
_MOST_STEPS = 2**62


class Sharing(NamedTuple):
    """How much of a row is not stored in it."""

    num_shared: int
    """Fields that are: the first ones of a row. As many follow that they come back as."""
    shared_bytes: int
    """What their values take."""
    shared_words: int
    """S, with padding."""
    header_dtype: torch.dtype
    """Of a header."""
    header_start: int
    """Where it begins in a stored row, in elements of this dtype."""

    def headers(self, rows: torch.Tensor) -> torch.Tensor:
        """Sees the headers `[N]` of stored rows `[N, *]`."""
        return rows.view(self.header_dtype)[:, self.header_start]


def header_dtype(num_rows: int) -> torch.dtype:
    """Returns what headers need, so that they can name an entry for each of so many rows."""
    return torch.int32 if num_rows <= _MOST_NARROW else torch.int64


def _is_lazy(device: torch.device) -> bool:
    """Returns whether memory that was never written to takes none."""
    return device.type == "cpu"


def tips_of(headers: torch.Tensor, lanes: torch.Tensor, num_lanes: int) -> torch.Tensor:
    """Returns the entries of the tips that rows have; 0 where they have none.

    Args:
        headers: `[n]` of the rows.
        lanes: `[n]` int64, of the rows.
        num_lanes: E.
    """
    tip = headers >> TIP_BIT & NUM_TIPS
    return torch.where(tip > 0, 1 + (tip - 1) * num_lanes + lanes, 0)


class SideTable:
    """Next values that are not the observations of another row, and which of its entries are free.

    Args:
        num_rows: N, of which each needs an entry at most.
        num_lanes: E.
        values: `[1 + 3 E + N, *]` int64, of which S words count; or only the first so many of them.
        room: for how many entries there is memory; None is all, where it is taken as it is written to.
        enlarge: makes sure that there is memory for the first entries, so many, and returns `values` of
            them.
    """

    def __init__(
        self,
        num_rows: int,
        num_lanes: int,
        values: torch.Tensor,
        room: int | None = None,
        enlarge: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._num_tips = NUM_TIPS * num_lanes
        self._num_entries = 1 + self._num_tips + num_rows
        self._enlarge, device = enlarge, values.device
        #: How many entries there is memory for.
        self.room = self._num_entries if room is None else room
        # How many entries may be in use, as known without waiting for a GPU.
        self._most_used = self._num_tips
        #: `[*, S]` int64, or with one word more; the first one is nobody's.
        self.values = values
        #: `[N + 1]` int64, the entries that were given up, the last one last.
        self.free = zeros(num_rows + 1, device=device, sparse=True)
        #: `[2]` int64: how many were given up, and how many were ever taken.
        self.counts = zeros(2, device=device)
        #: `[E, 3]` int64.
        self.lanes = zeros(num_lanes, 3, device=device)
        self.lanes[:, OWNED] = -_MOST_STEPS
        self.clear()

    @classmethod
    def in_memory(
        cls, num_rows: int, num_lanes: int, shared_words: int, device: torch.device
    ) -> SideTable:
        """Returns an empty table in memory."""
        size = 1 + NUM_TIPS * num_lanes + num_rows
        if _is_lazy(device):
            values = zeros(size, shared_words, device=device, sparse=True)
            return cls(num_rows, num_lanes, values)

        def enlarge(num_entries: int) -> torch.Tensor:
            new = zeros(num_entries, shared_words, device=device)
            new[: len(side.values)] = side.values
            return new

        room = min(max(2 * NUM_TIPS * num_lanes, _FIRST_ROOM), size)
        values = zeros(room, shared_words, device=device)
        side = cls(num_rows, num_lanes, values, room, enlarge)
        return side

    @classmethod
    def of(cls, values: torch.Tensor) -> SideTable:
        """Returns a table that is only read, of `[*, S]` values."""
        return cls(0, 0, values)

    @property
    def num_used(self) -> int:
        """How many entries are in use, with the tips."""
        num_free, num_taken = self.counts.tolist()
        found: int = num_taken - num_free
        return found

    @property
    def entry_nbytes(self) -> int:
        """The bytes of an entry."""
        return self.values.shape[1] * self.values.itemsize

    def make_room(self, num_entries: int) -> None:
        """Makes sure that so many entries can be taken; a GPU is asked how many are free when it must.

        Raises:
            OSError: the disk is full. Nothing has changed then.
        """
        if self.room == self._num_entries:
            return
        most_used = self._most_used + num_entries
        if most_used >= self.room:
            most_used = self.num_used + num_entries
        if most_used >= self.room:
            room = min(2 * most_used, self._num_entries)
            self.values = self._enlarge(room)  # type: ignore[misc]
            self.room = room
        self._most_used = most_used

    def clear(self) -> None:
        """Gives all entries up."""
        self.counts[NUM_FREE], self.counts[NUM_TAKEN] = 0, self._num_tips

    def take_up(self, entries: torch.Tensor) -> None:
        """Notes which entries are in use, int64, on the CPU; others but the tips are free."""
        num_taken = max([self._num_tips, *entries.tolist()])
        is_free = torch.ones(num_taken + 1, dtype=torch.bool)
        is_free[: self._num_tips + 1] = is_free[entries] = False
        # The lowest ones are taken first.
        free = is_free.nonzero().squeeze(1).flip(0)
        self.free[: len(free)] = free
        self.counts[NUM_FREE], self.counts[NUM_TAKEN] = len(free), num_taken
        self._most_used, self.room = num_taken, num_taken + 1

    @property
    def taken(self) -> torch.Tensor:
        """`[*, S]` the entries that were ever taken, and entry 0."""
        return self.values[: int(self.counts[NUM_TAKEN]) + 1]

    def share_memory_(self) -> None:
        """Moves it to memory that other processes see."""
        if self.values.is_shared():  # type: ignore[no-untyped-call]
            return
        num_taken = len(self.taken)
        for name in ("values", "free", "counts", "lanes"):
            old = getattr(self, name)
            # Memory of no file takes none before it is written to, unlike a copy of all of it.
            memory = torch.UntypedStorage._new_shared(old.nbytes, device="cpu")  # type: ignore[no-untyped-call]
            new = torch.empty(0, dtype=torch.int64).set_(memory).view(old.shape)
            new[:num_taken] = old[:num_taken]
            setattr(self, name, new)
