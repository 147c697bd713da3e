"""Rows that share observations with their neighbours, written and read in tensor operations.

Letters: N rows, W words of 8 bytes of a row as read, V of it as stored, S of its next values, B rows
picked, n rows put, L lanes and k steps written now, E lanes, R ring steps of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trl_storages.kernels.device.rows import RowTable
from trl_storages.kernels.device.tree import only_last
from trl_storages.kernels.device.writing import NewRows
from trl_storages.kernels.memory import on_device
from trl_storages.kernels.sharing import (
    CONTINUES,
    ENTRY_BIT,
    FLUSHED,
    LINKED,
    NUM_FREE,
    NUM_TAKEN,
    NUM_TIPS,
    OWNED,
    TIP_BIT,
    Sharing,
    SideTable,
    tips_of,
)
from trl_storages.kernels.tables import RingTables

if TYPE_CHECKING:
    from trl_storages.kernels.device.ring import Ring

__all__ = ["SharedTable"]

_WORD = 8  # bytes


class SharedTable(RowTable):
    """See `kernels.host.SharedTable`: the same methods, with bit-identical results.

    Writes read nothing on the host. What must not be written goes to entry 0 instead.

    Args:
        rows: `[N, V]` int64 as they are stored, contiguous.
        sharing: which part of a row is not stored in it.
        side: holds next values that are in no other row.
        ring: determines which rows follow one another.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        sharing: Sharing,
        side: SideTable,
        ring: RingTables,
    ) -> None:
        super().__init__(rows)
        self.side, self._sharing, self._ring = side, sharing, ring
        self._headers = sharing.headers(rows)
        # Offset in bytes of the stored fields in a row as read.
        self._next_bytes = sharing.shared_words * _WORD
        # Masks out the end of the last word, where a stored row may have other fields.
        self._mask = torch.zeros(self._next_bytes, dtype=torch.uint8, device=rows.device)
        self._mask[: sharing.shared_bytes] = 255
        self._mask = self._mask.view(torch.int64)

    # Reading

    def _rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        own, values = super()._rows_of(slots), self.side.values[:, : self._sharing.shared_words]
        after = self._next(slots, self._sharing.headers(own).long(), self.rows, values)
        return torch.cat([after, own], 1)

    def _pick_field(
        self, slots: torch.Tensor, start_byte: int, dtype: torch.dtype, shape: torch.Size
    ) -> torch.Tensor:
        if start_byte >= self._next_bytes:
            return super()._pick_field(slots, start_byte - self._next_bytes, dtype, shape)
        size = shape.numel() * dtype.itemsize
        headers = self._header_of(self._counted(slots))
        side = self.side.values.view(torch.uint8)[:, start_byte : start_byte + size]
        picked = self._next(slots, headers, self._bytes, side, start_byte)
        return picked.reshape(-1).view(dtype).view((*slots.shape, *shape))

    def _next(
        self,
        slots: torch.Tensor,
        headers: torch.Tensor,
        rows: torch.Tensor,
        side: torch.Tensor,
        start: int = 0,
    ) -> torch.Tensor:
        """Returns next values of rows: columns of the rows after them, or of the side table.

        Args:
            slots: `[*B]`.
            headers: `[B]` of these.
            rows: the stored rows, in columns of any size.
            side: `[*, s]` the wanted columns of the side table.
            start: the first of the wanted columns of `rows`.
        """
        slots = self._counted(slots)
        after, lane = self._wrapped(slots + self._num_lanes), slots % self._num_lanes
        named = self._header_of(after)
        # After the newest row comes an old one.
        heads = self._ring.slots_at(on_device(self._ring.cursors, lane.device), 0)
        is_newest = after == (heads.index_select(0, lane) + lane)
        entries = torch.where(is_newest, self._tips(headers, lane), named >> ENTRY_BIT)
        # The header of a row that is being overwritten can't be trusted.
        entries = torch.where(entries < len(side), entries, 0)
        found = rows[:, start : start + side.shape[1]].index_select(0, after)
        continues = (named & CONTINUES == 1) & ~is_newest
        return torch.where(continues.unsqueeze(1), found, side.index_select(0, entries))

    def _header_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the headers of rows `[B]`, int64."""
        return self._headers.index_select(0, slots).long()

    def _set_headers(
        self, slots: torch.Tensor, headers: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Sets headers together with the counts of the entries that they name, as in `write`."""
        self._headers[slots], self.side.counts[:] = headers.to(self._headers.dtype), counts

    def _are_same(self, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Returns whether next values are equal, `[*, S]` words to `[*]` bool."""
        return ((values ^ others) & self._mask == 0).all(-1)

    @property
    def _num_lanes(self) -> int:
        return self._ring.num_envs

    def _tips(self, headers: torch.Tensor, lane: torch.Tensor) -> torch.Tensor:
        """Returns the entries of the tips of rows of lanes; 0 where there is none."""
        return tips_of(headers, lane, self._num_lanes)

    # Writing

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns rows `[L, W]` as they are read."""
        return self.pick(slots)

    def write(
        self,
        ring: Ring,
        lanes: torch.Tensor,
        steps: torch.Tensor,
        words: torch.Tensor,
    ) -> None:
        """Copies steps, and links each to the row before it; see `RowTable.write`."""
        step, shared = steps[:, -ring.ring_steps :], self._sharing.shared_words
        slots = self._slots_of(step, lanes)
        after, now = words[..., :shared], words[..., shared : 2 * shared]
        values, held = self.side.values[:, :shared], self.side.lanes[lanes]
        newest, tips = ring.newest_slots(lanes), self._free_tips(ring, held, lanes)
        led_to = values.index_select(0, tip := self._tips(self._header_of(newest), lanes))
        follows = self._are_same(led_to, now[:, 0])
        goes_on = self._are_same(after[:, :-1], now[:, 1:])
        # Evicted rows are linked too: a reader may not have seen their eviction yet.
        is_after = (tip > 0) & (steps.shape[1] < ring.ring_steps)
        follows &= is_after
        continues = torch.cat([follows.unsqueeze(1), goes_on], 1)
        is_wanted = torch.cat([(~follows & is_after).unsqueeze(1), ~goes_on], 1)

        bounds, newest_step = held.unsqueeze(1).unbind(-1), ring.cursors[lanes].unsqueeze(1) - 1
        lay = newest_step - (newest_step - step) % ring.ring_steps
        is_owned = (lay >= bounds[OWNED]) | (step < bounds[LINKED])
        old = self._header_of(slots.reshape(-1)).view(slots.shape)
        num_free = self._put_back((old >> ENTRY_BIT).reshape(-1), is_owned.reshape(-1))
        entries, counts = self._taken(is_wanted.reshape(-1), num_free)
        entries = entries.view(is_wanted.shape)
        values[entries] = torch.cat([led_to.unsqueeze(1), after[:, :-1]], 1)
        values[1 + (tips - 1) * self._num_lanes + lanes] = after[:, -1]
        headers = (entries << ENTRY_BIT) + (tips << TIP_BIT).unsqueeze(1) + continues
        stored = self._stored(words, headers)
        linked = torch.maximum(held[:, LINKED], steps[:, -1] + 1)
        self.rows[slots] = stored
        self.side.counts[:] = counts
        self.side.lanes[lanes, LINKED] = linked

    def _slots_of(self, steps: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
        """Returns the slots of steps `[L, k]` of lanes."""
        return self._ring.slots_at(steps, lanes.unsqueeze(1))

    def _free_tips(self, ring: Ring, held: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
        """Returns the number of a tip of each lane that is no longer needed."""
        newest = ring.slots_at(self._ring.cursors[lanes] - 1, lanes)
        used = self._header_of(newest) >> TIP_BIT & NUM_TIPS
        tip = torch.ones_like(used)
        for _ in range(NUM_TIPS - 1):
            tip += ((tip == used) | (tip == held[:, FLUSHED])).long()
        return tip

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Overwrites rows, and keeps the next values of their neighbours; see `RowTable.put`."""
        assert ring is not None
        slots, places = only_last(slots, spare=-1)
        slots, places = slots[slots >= 0], places[slots >= 0]
        words, lane = rows.words()[places], slots % self._num_lanes
        # Each may take two entries: for its own next values, and for those of the row before it.
        self.side.make_room(2 * len(slots))
        shared = self._sharing.shared_words
        values, heads = self.side.values[:, :shared], ring.heads().to(slots.device)
        before, after = (
            self._wrapped(slots + step) for step in (-self._num_lanes, self._num_lanes)
        )
        is_newest, is_other = after == heads[lane], ~torch.isin(before, slots)
        # Keep the overwritten observations if they are the next values of the row before.
        headers = self._header_of(slots)
        is_linked = (headers & CONTINUES == 1) & is_other
        is_lost = is_linked & (slots != heads[lane])
        entries, counts = self._taken(is_lost, self.side.counts[NUM_FREE])
        values[entries[is_lost]] = self.rows[slots[is_lost], :shared]
        headers += (entries << ENTRY_BIT) - torch.where(is_linked, CONTINUES, 0)
        headers += torch.where(is_newest & (headers >> TIP_BIT & NUM_TIPS == 0), 1 << TIP_BIT, 0)
        self.rows[slots], self.side.counts[:] = self._stored(words, headers), counts

        values[self._tips(headers[is_newest], lane[is_newest])] = words[is_newest, :shared]
        after, led_to = after[~is_newest], words[~is_newest, :shared]
        named = self._header_of(after)
        entries, tips = named >> ENTRY_BIT, named & NUM_TIPS << TIP_BIT
        goes_on = self._are_same(led_to, self.rows[after, :shared])
        num_free = self._put_back(entries, goes_on)
        new, counts = self._taken(~goes_on & (entries == 0), num_free)
        entries = torch.where(goes_on, 0, entries + new)
        self._set_headers(after, tips + (entries << ENTRY_BIT) + goes_on, counts)
        values[entries] = led_to
        self._join(slots[is_other], heads)

    def _join(self, slots: torch.Tensor, heads: torch.Tensor) -> None:
        """Frees entries that equal the observations of the rows naming them; those continue instead."""
        shared, headers = self._sharing.shared_words, self._header_of(slots)
        entries = headers >> ENTRY_BIT
        named = self.side.values[entries, :shared]
        is_same = self._are_same(named, self.rows[slots, :shared]) & (entries > 0)
        is_same &= slots != heads[slots % self._num_lanes]
        headers += torch.where(is_same, CONTINUES - (entries << ENTRY_BIT), 0)
        counts = self.side.counts.clone()
        counts[NUM_FREE] = self._put_back(entries, is_same)
        self._set_headers(slots, headers, counts)

    def _wrapped(self, slots: torch.Tensor) -> torch.Tensor:
        """Wraps slots beyond either end of the ring around."""
        num_slots = self._ring.num_slots
        slots = torch.where(slots < 0, slots + num_slots, slots)
        return torch.where(slots >= num_slots, slots - num_slots, slots)

    def _stored(self, words: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
        """Returns the stored part of rows `[*B, W]`, with their headers `[*B]`."""
        stored = words[..., self._sharing.shared_words :].clone()
        self._sharing.headers(stored.view(-1, stored.shape[-1])).copy_(headers.reshape(-1))
        return stored

    def _taken(
        self, is_wanted: torch.Tensor, num_free: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds entries to take into use `[n]`, 0 where none is wanted.

        Args:
            is_wanted: `[n]` bool.
            num_free: as `_put_back` returned it.

        Returns:
            the entries, and the counts `[2]` to set with the headers that name them.
        """
        num_taken = self.side.counts[NUM_TAKEN]
        place = num_free - is_wanted.cumsum(0)
        entries = torch.where(place >= 0, self.side.free[place.clamp(min=0)], num_taken - place)
        left = num_free - is_wanted.sum()
        counts = torch.stack([left.clamp(min=0), num_taken - left.clamp(max=0)])
        return torch.where(is_wanted, entries, 0), counts

    def _put_back(self, entries: torch.Tensor, is_over: torch.Tensor) -> torch.Tensor:
        """Pushes entries onto the stack of free ones, and returns its new height without storing it."""
        is_over = is_over & (entries > 0)
        num_free = self.side.counts[NUM_FREE]
        place = num_free + is_over.cumsum(0) - 1
        # Entries that are not freed are written to the last element, which is spare.
        self.side.free[torch.where(is_over, place, len(self.side.free) - 1)] = entries
        return num_free + is_over.sum()

    def clear(self, num_slots: int) -> None:
        """Unlinks the rows of the first slots."""
        self._headers[:num_slots] = 0
        self.side.clear()
