"""Rows whose next observations are stored once, as the observations of the rows that follow them.

Letters: N rows, W words of 8 bytes of a row as read, S words of them that are shared, E lanes.

A row as read is `[next S | stored]`, in words: the next values of its observations, then the row as it is
stored, which begins with the observations in the same order. Further on in it is a header,

    entry << 3 | tip << 1 | continues

`continues` is 1 if the next values of the preceding row in the lane equal its observations, bit for bit.
If not, `entry` names those next values in a side table. So a row is written only once: its next values
are found through the row after it. Until that row is written, they are in one of the three tips of the
lane, number `tip`. A write takes a tip that holds the next values of neither the row that was the newest
before the write, nor the one that was the newest at the last flush to disk.

The side table begins with the tips: number t of lane l is entry `1 + (t - 1) * E + l`. Entry 0 belongs to
no row. In files, an entry has one more word: a checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trl_storages.kernels.memory import zeros

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

#: Bits of a header.
CONTINUES, TIP_BIT, ENTRY_BIT = 1, 1, 3
NUM_TIPS = 3
# Indices of a side table's counts.
NUM_FREE, NUM_TAKEN = 0, 1
#: Columns of a side table's lanes: the tip to keep until the next flush to disk, 0 if none; the first
#: step whose row owns its entry, which is freed as the row is overwritten; and the step after the last
#: written.
FLUSHED, OWNED, LINKED = range(3)
# For up to so many rows, 4 bytes can name every entry, with the tips and the spare rows of files.
_MOST_NARROW = 2**25
# Entries for which a GPU allocates memory at first.
_FIRST_ROOM = 1024
_MOST_STEPS = 2**62


class Sharing(NamedTuple):
    """Which part of a row is shared, and so not stored in it."""

    num_shared: int
    """How many fields are shared: the first of a row as read. The matching observations follow them."""
    shared_bytes: int
    """Bytes of their values."""
    shared_words: int
    """S, with padding."""
    header_dtype: torch.dtype
    """Of a header."""
    header_start: int
    """Where the header begins in a stored row, in elements of this dtype."""

    def headers(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns a view of the headers `[N]` of stored rows `[N, *]`."""
        return rows.view(self.header_dtype)[:, self.header_start]


def header_dtype(num_rows: int) -> torch.dtype:
    """Returns the narrower dtype whose headers can name an entry for each row."""
    return torch.int32 if num_rows <= _MOST_NARROW else torch.int64


def _is_lazy(device: torch.device) -> bool:
    """Returns whether zeros take no memory until they are written to."""
    return device.type == "cpu"


def tips_of(headers: Any, lanes: Any, num_lanes: int) -> Any:
    """Returns the entries of the tips of rows; 0 for rows without one. Loops inline it.

    Args:
        headers: of the rows, `[n]` or a number.
        lanes: of the rows, int64.
        num_lanes: E.
    """
    tip = headers >> TIP_BIT & NUM_TIPS
    return (tip > 0) * (1 + (tip - 1) * num_lanes + lanes)


class SideTable:
    """Next values that are not the observations of another row, with a list of free entries.

    Args:
        num_rows: N; each needs at most one entry.
        num_lanes: E.
        values: `[1 + 3 E + N, *]` int64, S words of values first; or only the first entries of it.
        room: how many entries have memory; None if all do, as memory is taken on first write.
        enlarge: provides memory for the first `num_entries` entries, and returns the new `values`.
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
        #: How many entries have memory.
        self.room = self._num_entries if room is None else room
        # An upper bound of the entries in use, known without waiting for a GPU.
        self._most_used = self._num_tips
        #: `[*, S]` int64, or with one more word; the first entry belongs to no row.
        self.values = values
        #: `[N + 1]` int64, a stack of freed entries.
        self.free = zeros(num_rows + 1, device=device, sparse=True)
        #: `[2]` int64: the height of that stack, and how many entries were ever taken.
        self.counts = zeros(2, device=device)
        #: `[E, 3]` int64, columns `FLUSHED`, `OWNED`, `LINKED`.
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
        """Returns a read-only table of `[*, S]` values."""
        return cls(0, 0, values)

    @property
    def num_used(self) -> int:
        """How many entries are in use, tips included."""
        num_free, num_taken = self.counts.tolist()
        found: int = num_taken - num_free
        return found

    @property
    def entry_nbytes(self) -> int:
        """The bytes of an entry."""
        return self.values.shape[1] * self.values.itemsize

    def make_room(self, num_entries: int) -> None:
        """Makes sure that `num_entries` more entries can be taken; waits for a GPU only if it must.

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
        """Frees all entries."""
        self.counts[NUM_FREE].zero_()
        self.counts[NUM_TAKEN].fill_(self._num_tips)

    def take_up(self, entries: torch.Tensor) -> None:
        """Sets which entries are in use, besides the tips: int64, on the CPU; all others are free."""
        num_taken = max([self._num_tips, *entries.tolist()])
        is_free = torch.ones(num_taken + 1, dtype=torch.bool)
        is_free[: self._num_tips + 1] = is_free[entries] = False
        # The lowest entry is on top of the stack.
        free = is_free.nonzero().squeeze(1).flip(0)
        self.free[: len(free)] = free
        self.counts[NUM_FREE], self.counts[NUM_TAKEN] = len(free), num_taken
        self._most_used, self.room = num_taken, num_taken + 1

    @property
    def taken(self) -> torch.Tensor:
        """`[*, S]` the entries that were ever taken, and entry 0."""
        return self.values[: int(self.counts[NUM_TAKEN]) + 1]

    def share_memory_(self) -> None:
        """Moves the table to memory shared with other processes."""
        if self.values.is_shared():  # type: ignore[no-untyped-call]
            return
        num_taken = len(self.taken)
        for name in ("values", "free", "counts", "lanes"):
            old = getattr(self, name)
            # Fresh shared memory takes pages on first write, unlike a copy of the whole table.
            memory = torch.UntypedStorage._new_shared(old.nbytes, device="cpu")  # type: ignore[no-untyped-call]
            new = torch.empty(0, dtype=torch.int64).set_(memory).view(old.shape)
            new[:num_taken] = old[:num_taken]
            setattr(self, name, new)
