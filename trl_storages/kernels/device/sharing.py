"""Rows that share observations with their neighbours, written and read in tensor operations.

Letters: N rows, W words of 8 bytes a row, V of them as it is stored, S that are shared, B rows picked,
n rows put, L lanes and k steps written now, E lanes, R ring steps of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.kernels.device.rows import RowTable
from trl_storages.kernels.device.scattering import only_last
from trl_storages.kernels.device.writing import NewRows
from trl_storages.kernels.ring_tables import RingTables
from trl_storages.kernels.sharing import NUM_FREE, NUM_TAKEN, Sharing, SideTable

if TYPE_CHECKING:
    from trl_storages.kernels.device.ring import Ring

__all__ = ["SharedTable"]

_WORD = 8  # bytes
_NO_SPANS = np.zeros((0, 2), np.int64)


class SharedTable(RowTable):
    """See `kernels.host.SharedTable`: the same methods, the same answers bit for bit.

    Writes read nothing on the host. Where they must leave out some rows, these go to entry 0.

    Args:
        rows: `[N, V]` int64 as they are stored, contiguous.
        sharing: what of a row is not stored in it.
        side: has next values that are not in other rows.
        lanes: E and R * E, of the ring that says which rows follow one another.
    """

    def __init__(
        self, rows: torch.Tensor, sharing: Sharing, side: SideTable, lanes: tuple[int, int]
    ) -> None:
        super().__init__(rows)
        self.side, self._sharing = side, sharing
        self._shared_bytes = sharing.shared_words * _WORD
        # Bytes by which fields lie further on in a row as it is seen.
        self._moved = (sharing.shared_words - sharing.header_words) * _WORD
        #: As given.
        self.lanes = lanes

    # Reading

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        spans: np.ndarray = _NO_SPANS,
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows as they are seen, `[*B]` slots to `[*B, W]`."""
        own = self.rows.index_select(0, self._counted(slots))
        lent = own if following is None else self.rows.index_select(0, self._counted(following))
        following = slots if following is None else following
        header = self._sharing.header_words
        after = self._next(following, lent[:, 0], self.rows, self.side.values, header)
        picked = torch.cat([after, own[:, header:]], 1)
        if lent is not own:
            into, lent = picked.view(torch.uint8), lent.view(torch.uint8)
            for start, size in spans.tolist():
                at = start - self._moved
                into[:, start : start + size] = lent[:, at : at + size]
        picked = picked.view((*slots.shape, picked.shape[1]))
        return picked.pin_memory() if pin_memory else picked

    def pick_field(
        self, slots: torch.Tensor, start_byte: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Copies one field of rows, `[*B]` slots to `[*B, *shape]`."""
        if start_byte >= self._shared_bytes:
            return super().pick_field(slots, start_byte - self._moved, dtype, shape)
        size = torch.Size(shape).numel() * dtype.itemsize
        headers = self.rows[:, 0].index_select(0, self._counted(slots))
        side = self.side.values.view(torch.uint8)[:, start_byte : start_byte + size]
        start = self._sharing.header_words * _WORD + start_byte
        picked = self._next(slots, headers, self._bytes, side, start)
        return picked.reshape(-1).view(dtype).view((*slots.shape, *shape))

    def _next(
        self,
        slots: torch.Tensor,
        headers: torch.Tensor,
        rows: torch.Tensor,
        side: torch.Tensor,
        start: int,
    ) -> torch.Tensor:
        """Returns what is next of some rows: columns of those after them, or of the side table.

        Args:
            slots: `[*B]`.
            headers: `[B]` of these.
            rows: the rows, in columns of any size.
            side: `[*, s]` the columns of the side table that are wanted.
            start: of the columns of the rows that are.
        """
        after = self._wrapped(self._counted(slots) + self.lanes[0])
        continues = self.rows[:, 0].index_select(0, after) & 1
        found = rows[:, start : start + side.shape[1]].index_select(0, after)
        aside = side.index_select(0, headers >> 1)
        return torch.where(continues.unsqueeze(1) == 1, found, aside)

    # Writing

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns rows `[L, W]` as they are seen."""
        return self.pick(slots)

    def write(
        self,
        ring: Ring,
        lanes: torch.Tensor,
        slots: torch.Tensor,
        words: torch.Tensor,
        compact: torch.Tensor | None = None,
    ) -> None:
        """Copies steps to where they belong, and links them to those before; see `RowTable.write`.

        Entries are given up after no row names them, and taken before one does: what was interrupted in
        between may be done again.
        """
        num_steps, shared = words.shape[1], self._sharing.shared_words
        after, now = words[..., :shared], words[..., shared : 2 * shared]
        newest = ring.newest_slots(lanes)
        first, before = self.rows[slots[:, 0], 0], self.rows[newest, 0]
        # The newest row has no entry only where this was done before.
        led_to = self.side.values.index_select(0, before >> 1)
        follows, goes_on = (led_to == now[:, 0]).all(1), (after[:, :-1] == now[:, 1:]).all(2)
        if compact is not None:
            # What stands in the place of an unknown value is the row's own.
            header, goes_on = self._sharing.header_words, compact[:, 1:]
            own = self.rows[newest, header : header + shared]
            follows |= (led_to == own).all(1) & compact[:, 0]
        follows = torch.where(before > 1, follows, first & 1 == 1)
        if num_steps < ring.steps_per_lane:
            follows &= ring.fill[lanes] > 0
        else:
            follows = torch.zeros_like(follows)
        continues = torch.cat([follows.unsqueeze(1), goes_on], 1)
        is_wanted = torch.ones_like(continues)
        is_wanted[:, :-1] = ~continues[:, 1:]

        self._forget(slots.reshape(-1), torch.ones_like(is_wanted).reshape(-1))
        entries = self._taken(is_wanted.reshape(-1))
        self.side.values[entries] = after.reshape(-1, shared)
        headers = 2 * entries + continues.reshape(-1)
        self._put(slots.reshape(-1), words.reshape(-1, words.shape[2]), headers)
        # What is behind the newest rows does not continue them.
        self.rows[self._wrapped(slots[:, -1] + self.lanes[0]), 0] &= -2
        self._forget(newest, follows)

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Copies rows over others, whose neighbours are read as before; see `RowTable.put`."""
        assert ring is not None
        slots, places = only_last(slots, spare=-1)
        slots, places = slots[slots >= 0], places[slots >= 0]
        words, heads = rows.words()[places], ring.heads().to(slots.device)
        header, shared = self._sharing.header_words, self._sharing.shared_words
        before, after = (self._wrapped(slots + step) for step in (-self.lanes[0], self.lanes[0]))
        is_other = ~torch.isin(before, slots)
        # What they were the next values of is kept, where they change.
        was = self.rows[slots, header : header + shared]
        changes = (was != words[:, shared : 2 * shared]).any(1)
        is_lost = changes & is_other & (self.rows[slots, 0] & 1 == 1)
        entries = self._taken(is_lost)
        self.side.values[entries[is_lost]] = was[is_lost]
        self.rows[before[is_lost], 0] += 2 * entries[is_lost]
        self.rows[slots[is_lost], 0] &= -2
        self.rows[slots, header:] = words[:, shared:]

        now = self.rows[after, header : header + shared]
        goes_on = (words[:, :shared] == now).all(1) & (after != heads[after % self.lanes[0]])
        self.rows[after, 0] = self.rows[after, 0] & -2 | goes_on.long()
        self._forget(slots, goes_on)
        headers = self.rows[slots, 0]
        headers += 2 * self._taken(~goes_on & (headers <= 1))
        self.side.values[headers[~goes_on] >> 1] = words[~goes_on, :shared]
        self.rows[slots, 0] = headers
        self._join(before[is_other], heads)

    def _join(self, slots: torch.Tensor, heads: torch.Tensor) -> None:
        """Gives up the entries of rows whose next values are the observations of the rows after them."""
        header, shared = self._sharing.header_words, self._sharing.shared_words
        after, entries = self._wrapped(slots + self.lanes[0]), self.rows[slots, 0] >> 1
        is_same = self.side.values[entries] == self.rows[after, header : header + shared]
        is_same = is_same.all(1) & (entries > 0) & (after != heads[after % self.lanes[0]])
        self.rows[after, 0] |= is_same.long()
        self._forget(slots, is_same)

    def _wrapped(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns slots beyond either end of the ring as those within it."""
        num_slots = self.lanes[1]
        slots = torch.where(slots < 0, slots + num_slots, slots)
        return torch.where(slots >= num_slots, slots - num_slots, slots)

    def _put(self, slots: torch.Tensor, words: torch.Tensor, headers: torch.Tensor) -> None:
        """Copies what is stored of rows `[n, W]`, with their headers."""
        stored = torch.zeros(len(words), self._num_words, dtype=torch.int64, device=words.device)
        stored[:, 0] = headers
        stored[:, self._sharing.header_words :] = words[:, self._sharing.shared_words :]
        self.rows[slots] = stored

    def _taken(self, is_wanted: torch.Tensor) -> torch.Tensor:
        """Returns `[n]` entries that are in use from now on; 0 where none is wanted."""
        self.side.make_room(len(is_wanted))
        counts = self.side.counts
        num_free, num_taken = counts[NUM_FREE].clone(), counts[NUM_TAKEN].clone()
        number = is_wanted.cumsum(0)
        place = num_free - number
        entries = torch.where(place >= 0, self.side.free[place.clamp(min=0)], num_taken - place)
        total = is_wanted.sum()
        counts.copy_(
            torch.stack(
                [(num_free - total).clamp(min=0), num_taken + (total - num_free).clamp(min=0)]
            )
        )
        return torch.where(is_wanted, entries, 0)

    def _forget(self, slots: torch.Tensor, is_over: torch.Tensor) -> None:
        """Gives up the entries of `[n]` rows, where they have one and need it no more."""
        entries = self.rows[slots, 0] >> 1
        is_over = is_over & (entries > 0)
        self.rows[slots, 0] &= torch.where(is_over, 1, -1)
        counts = self.side.counts
        place = counts[NUM_FREE] + is_over.cumsum(0) - 1
        # The others go behind the last.
        self.side.free[torch.where(is_over, place, len(self.side.free) - 1)] = entries
        counts[NUM_FREE] += is_over.sum()

    def clear(self, num_slots: int) -> None:
        """Forgets how the rows of the first slots hang together."""
        self.rows[:num_slots, 0] = 0
        self.side.clear()
