"""Rows that share observations with their neighbours, written and read in compiled loops.

Letters: N rows, B rows picked, n rows put, f fields of a row, m fields of it that are shared, L lanes and
S steps written now, T live steps per lane at most, R ring steps per lane, E lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, fenced, inlined, prefetch
from trl_storages.kernels.host.memory import are_same_bytes, copy_bytes, is_set
from trl_storages.kernels.host.rows import RowTable, not_found
from trl_storages.kernels.host.writing import Given, NewRows
from trl_storages.kernels.ring_tables import CURSOR, OPEN, RingTables
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
)

if TYPE_CHECKING:
    from trl_storages.kernels.host.disk import Commits
    from trl_storages.kernels.host.ring import Ring

__all__ = ["SharedTable"]

_WORD = 8  # bytes
_LINE = 64  # bytes that memory delivers at once
_AHEAD = 16
_MOST_AHEAD = 1024  # bytes
_ADDRESS, _STRIDE, _START, _SIZE = range(4)
_NO_SPANS, _NO_CHOICE = np.zeros((0, 4), np.int64), np.zeros(1, np.int64)
# Of a table of commits.
_FIRST_CURSOR = 2


class SharedTable(RowTable):
    """Copies rows out of a table and into it that are stored otherwise than they are seen.

    Args:
        rows: `[N, *]` int64 as they are stored, contiguous, on the CPU.
        sharing: what of a row is not stored in it.
        side: has next values that are not in other rows.
        ring: says which rows follow one another.
        commits: says up to where rows count, of a directory; None if the ring does.
    """

    is_plain = False

    def __init__(
        self,
        rows: torch.Tensor,
        sharing: Sharing,
        side: SideTable,
        ring: Ring,
        commits: Commits | None = None,
    ) -> None:
        super().__init__(rows)
        self._commits = commits
        self.side, self._sharing, self._ring = side, sharing, ring
        self._headers, self._values = sharing.headers(rows).numpy(), side.values.numpy()
        self._side = (side.free.numpy(), side.counts.numpy(), side.lanes.numpy())
        self._num_words += sharing.shared_words
        # Fields lie so many bytes further on in a row as it is seen.
        self._next_bytes = sharing.shared_words * _WORD
        self.before = self.array, self._headers, self._values, self._next_bytes
        # The lanes of the index, and what `_cursors` found of them.
        self._counted: tuple[Any, Any] = (None, None)
        # The sources of the rows written last, the headers of these, and where what is stored comes from:
        # a step is written from the same block each time.
        self._known: tuple[np.ndarray, ...] = (_NO_SPANS, _NO_SPANS, _NO_SPANS)

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        spans: np.ndarray = _NO_SPANS,
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows as they are seen; see `RowTable.pick`."""
        shape = (*slots.shape, self._num_words)
        out = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
        lenders, lent = (slots, _NO_SPANS) if following is None else (following, spans)
        to = out.data_ptr(), self._num_words * _WORD
        self._copy_seen(slots, lenders, lent, 0, self._next_bytes, True, *to)
        return out

    def _copy(self, slots: torch.Tensor, spans: np.ndarray, out: int) -> None:
        is_own = spans[:, 0] >= self._next_bytes
        if is_own.any():
            super()._copy(slots, spans[is_own] - [self._next_bytes, 0, 0, 0], out)
        for start, to, size, pitch in spans[~is_own].tolist():
            self._copy_seen(slots, slots, _NO_SPANS, start, size, False, out + to, pitch)

    def _copy_seen(self, slots: torch.Tensor, lenders: torch.Tensor, *what: Any) -> None:
        """Copies bytes of what is next, and perhaps those of the row behind them.

        Args:
            slots: `[*B]`.
            lenders: `[*B]`, the rows that lend what is next.
            *what: and where to, as `_pick` takes it.
        """
        flat, lent = slots.numpy().reshape(-1), lenders.numpy().reshape(-1)
        table = self.array, self._headers, self._values, *self._cursors, self._ring.ring_steps
        if (wrong := _pick(*table, self._next_bytes, flat, lent, *what)) >= 0:
            raise not_found(flat[wrong], len(self.array))

    @property
    def _cursors(self) -> tuple[np.ndarray, np.ndarray, int, int, int, int]:
        """Where the cursors are that count, as `_cursor` finds them, and E."""
        known, commits = self._ring._arrays[2], self._commits
        # To see an array in another shape takes longer than to link a row.
        if self._counted[0] is not known:
            num_lanes, size = known.shape
            where: Any = known.reshape(-1), _NO_CHOICE, CURSOR, 0, size, num_lanes
            if commits is not None:
                tables, size = commits._tables.reshape(-1), commits._tables.shape[1]
                where = tables, commits._selector, _FIRST_CURSOR, size, 1, num_lanes
            self._counted = known, where
        return self._counted[1]

    def sources(self, rows: NewRows, ring: Ring, given: Given) -> np.ndarray:
        """Links rows that are about to be written to those before them; see `RowTable.sources`."""
        if rows.sources is not self._known[0]:
            headers = np.zeros(rows.num_rows, self._headers.dtype)
            self._known = rows.sources, headers, self._stored(rows.sources, headers)
        _, headers, sources = self._known
        _link(
            ring._arrays[2],
            ring.ring_steps,
            *given,
            rows.sources,
            rows.is_compact,
            *self._cursors[:-1],
            self.array,
            self._headers,
            self._values,
            *self._side,
            self._sharing.num_shared,
            self._sharing.shared_bytes,
            headers,
        )
        return sources

    def _stored(self, seen: np.ndarray, headers: np.ndarray) -> np.ndarray:
        """Returns where what is stored of rows comes from, and where it belongs."""
        own = seen[self._sharing.num_shared :]
        sources = np.empty((len(own) + 1, 4), np.int64)
        sources[:-1] = own
        sources[:-1, _START] -= self._next_bytes
        size = headers.itemsize
        sources[-1] = headers.ctypes.data, size, self._sharing.header_start * size, size
        return sources

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Copies rows over others, whose neighbours are read as before; see `RowTable.put`."""
        assert ring is not None
        words = rows.words().numpy()
        # Each may part two neighbours.
        self.side.make_room(2 * len(words))
        table = self.array, self._headers, self._values, *self._side[:2]
        size = self._sharing.shared_bytes
        _put(words, slots.numpy(), ring.lanes.numpy(), ring.ring_steps, *table, size)

    def clear(self, num_slots: int) -> None:
        """Forgets how the rows of the first slots hang together."""
        self._headers[:num_slots] = 0
        self.side.clear()


@inlined
def _wrapped(slot: int, num_slots: int) -> int:
    """Returns a slot beyond either end of the ring, or within it, as one within it."""
    if slot >= num_slots:
        return slot - num_slots
    return slot + num_slots if slot < 0 else slot


@inlined
def _ask_for(table: Any, start: int, size: int) -> None:
    """Asks for bytes that will be read soon, if they are not too many."""
    asked = min(size, _MOST_AHEAD)
    for byte in range(0, asked, _LINE):
        prefetch(table, start + byte)
    # It may be in a further line.
    prefetch(table, start + asked - 1)


@inlined
def _entry_of(header: int) -> int:
    """Returns the entry that a row names for the next values of the row before it."""
    # Addresses are made of it, which headers of 4 bytes have no room for.
    return np.int64(header) >> ENTRY_BIT


@inlined
def _tip_of(header: int, lane: int, num_lanes: int) -> int:
    """Returns the entry of the tip that a row of a lane has, 0 if it has none."""
    tip = (np.int64(header) >> TIP_BIT) & NUM_TIPS
    return 1 + (tip - 1) * num_lanes + lane if tip > 0 else 0


@inlined
def _cursor(lane: int, tables: Any, selector: Any, first: int, table_size: int, stride: int) -> int:
    """Returns how many steps of a lane count: in that of some tables which a word selects."""
    return tables[(selector[0] & 1) * table_size + first + lane * stride]


@inlined
def _heads(lanes: Any, room: int) -> Any:
    """Returns the slots of the next rows of all lanes."""
    heads = np.empty(len(lanes), np.int64)
    for lane in range(len(lanes)):
        heads[lane] = lanes[lane, CURSOR] % room * len(lanes) + lane
    return heads


@inlined
def _known_next(table: Any, headers: Any, values: Any, follower: int) -> Any:
    """Returns the address of what a row says is next of the row before it."""
    header = headers[follower]
    # Of a row that is being overwritten nothing is believed.
    entry = _entry_of(header) if _entry_of(header) < len(values) else 0
    source = values.ctypes.data + entry * values.shape[1] * _WORD
    if header & CONTINUES:
        source = table.ctypes.data + follower * table.shape[1] * _WORD
    return source


@compiled
def _pick(
    table: Any,
    headers: Any,
    values: Any,
    tables: Any,
    selector: Any,
    first_cursor: int,
    table_size: int,
    stride: int,
    num_lanes: int,
    room: int,
    moved: int,
    slots: Any,
    lenders: Any,
    spans: Any,
    start: int,
    size: int,
    with_own: bool,
    out: int,
    pitch: int,
) -> int:
    """Copies rows as they are seen.

    Args:
        table: `[N, *]`.
        headers: `[N]` of these rows.
        values: `[*, *]` of the side table.
        tables: as in `_cursor`, as the four that follow.
        selector: likewise.
        first_cursor: likewise.
        table_size: likewise.
        stride: likewise.
        num_lanes: E.
        room: R.
        moved: bytes by which fields lie further on in a row as it is seen.
        slots: `[B]`.
        lenders: `[B]` the rows that lend what is next.
        spans: `[n, 4]` further bytes that they lend, as in `RowTable.copy_into`, of what is stored in the
            row.
        start: the first byte of what is next that is wanted.
        size: how many bytes of it.
        with_own: whether the fields of the row itself are wanted behind them.
        out: an address.
        pitch: bytes from one row to the next there.

    Returns:
        which of `slots` is of no row, or -1.
    """
    num_rows, row_bytes = table.shape[0], table.shape[1] * _WORD
    address, side, entry_bytes = table.ctypes.data, values.ctypes.data, values.shape[1] * _WORD
    header_start = headers.ctypes.data - address
    own_bytes, num_slots = row_bytes if with_own else 0, room * num_lanes
    cursors, heads = np.empty(num_lanes, np.int64), np.empty(num_lanes, np.int64)
    for lane in range(num_lanes):
        cursors[lane] = _cursor(lane, tables, selector, first_cursor, table_size, stride)
        heads[lane] = cursors[lane] % room * num_lanes + lane
    for i in range(slots.shape[0]):
        ahead = i + _AHEAD
        if ahead < slots.shape[0]:
            after = _wrapped(lenders[ahead] + num_lanes, num_slots) * row_bytes
            prefetch(table, after + header_start)
            _ask_for(table, after + start, size)
            if with_own:
                _ask_for(table, slots[ahead] * row_bytes, row_bytes)
        slot, lender = slots[i], lenders[i]
        slot = slot + num_rows if slot < 0 else slot
        lender = lender + num_rows if lender < 0 else lender
        if slot < 0 or slot >= num_rows or lender < 0 or lender >= num_rows:
            return i
        to, follower = out + i * pitch, _wrapped(lender + num_lanes, num_slots)
        # To divide takes longer than all the rest.
        lane = follower % num_lanes if num_lanes > 1 else 0
        is_newest = follower == heads[lane]
        if is_newest:
            entry = _tip_of(headers[lender], lane, num_lanes)
            copy_bytes(to, side + entry * entry_bytes + start, size)
            fenced()
            # Once the next row counts, the tip may be taken by others, and is not looked at any more.
            now = _cursor(lane, tables, selector, first_cursor, table_size, stride)
            is_newest = now == cursors[lane]
        if not is_newest:
            copy_bytes(to, _known_next(table, headers, values, follower) + start, size)
        if with_own:
            copy_bytes(to + size, address + slot * row_bytes, own_bytes)
        for s in range(spans.shape[0]):
            if spans[s, 0] >= moved:
                source = address + lender * row_bytes + spans[s, 0] - moved
                copy_bytes(to + spans[s, 1], source, spans[s, 2])
    return -1


@inlined
def _take_entry(free: Any, counts: Any) -> int:
    """Returns an entry that is in use from now on."""
    if counts[NUM_FREE] > 0:
        counts[NUM_FREE] -= 1
        return free[counts[NUM_FREE]]
    counts[NUM_TAKEN] += 1
    return counts[NUM_TAKEN]


@inlined
def _give_up(entry: int, free: Any, counts: Any) -> None:
    """Gives up an entry, if it is one."""
    if entry > 0:
        free[counts[NUM_FREE]] = entry
        counts[NUM_FREE] += 1


@compiled
def _copy_next(sources: Any, row: int, values: Any, entry: int, num_shared: int) -> None:
    """Copies the next values of a new row to an entry."""
    to = values.ctypes.data + entry * values.shape[1] * _WORD
    for field in range(num_shared):
        at = sources[field, _ADDRESS] + row * sources[field, _STRIDE]
        copy_bytes(to + sources[field, _START], at, sources[field, _SIZE])


@compiled
def _free_tip(headers: Any, lane: int, num_lanes: int, committed: int, room: int, held: Any) -> int:
    """Returns the number of a tip that holds nothing which may still be wanted."""
    newest = (committed - 1) % room * num_lanes + lane
    used = (headers[newest] >> TIP_BIT) & NUM_TIPS
    tip = 1
    while tip in (used, held[lane, FLUSHED]):
        tip += 1
    return tip


@compiled
def _link(
    lanes: Any,
    room: int,
    written: Any,
    num_steps: int,
    cut: Any,
    order: Any,
    first_end: int,
    end_stride: int,
    sources: Any,
    is_compact: bool,
    tables: Any,
    selector: Any,
    first_cursor: int,
    table_size: int,
    stride: int,
    table: Any,
    headers: Any,
    values: Any,
    free: Any,
    counts: Any,
    held: Any,
    num_shared: int,
    shared_bytes: int,
    new: Any,
) -> None:
    """Finds out which rows continue the rows before them, and gives the others an entry.

    It is done before the rows are written, and may be done again before they count.

    Args:
        lanes: of the index before the write.
        room: R.
        written: `[L]` the lanes.
        num_steps: S.
        cut: `[L, S]` bool, rows that begin an episode anyway; empty if none does.
        order: `[L, S]` which row is which step; empty if they come as they are written.
        first_end: the address of the first flag that ends an episode.
        end_stride: how far it is to the next one.
        sources: `[f, 4]` of the rows as they are seen: the m next values, what they come back as, others.
        is_compact: whether next values are not known, and a row goes on unless its episode ends.
        tables: as in `_cursor`, as the four that follow.
        selector: likewise.
        first_cursor: likewise.
        table_size: likewise.
        stride: likewise.
        table: `[N, *]`.
        headers: `[N]` of these rows.
        values: of the side table, as the three that follow.
        free: likewise.
        counts: likewise.
        held: its `lanes`.
        num_shared: m.
        shared_bytes: what their values take.
        new: `[n]` the answer, the headers of the new rows.
    """
    num_lanes = len(lanes)
    # Of more than R steps, the last R find room.
    first = max(num_steps - room, 0)
    for i in range(len(written)):
        lane, cursor = written[i], lanes[written[i], CURSOR]
        start = (cursor + first) % room
        committed = _cursor(lane, tables, selector, first_cursor, table_size, stride)
        tip = _free_tip(headers, lane, num_lanes, committed, room, held)
        if committed > cursor:
            # They count already, and stay as they are.
            for s in range(first, num_steps):
                row = order[i, s] if order.size > 0 else i * num_steps + s
                new[row] = headers[(cursor + s) % room * num_lanes + lane]
            continue
        for step in range(cursor + first, cursor + num_steps):
            slot, lay = step % room * num_lanes + lane, cursor - 1 - (cursor - 1 - step) % room
            if lay >= held[lane, OWNED] or step < held[lane, LINKED]:
                _give_up(_entry_of(headers[slot]), free, counts)
            headers[slot] = 0
        held[lane, LINKED] = max(held[lane, LINKED], cursor + num_steps)
        place, continues, entry = start, False, 0
        newest = (cursor - 1) % room * num_lanes + lane
        # None, where it is overwritten.
        led_to = _tip_of(headers[newest], lane, num_lanes)
        # Of rows that were evicted it is said, too: who reads them may not have heard of it yet.
        if led_to > 0:
            row = order[i, 0] if order.size > 0 else i * num_steps
            before = values.ctypes.data + led_to * values.shape[1] * _WORD
            continues = True
            for field in range(num_shared):
                now = num_shared + field
                at = sources[now, _ADDRESS] + row * sources[now, _STRIDE]
                known = before + sources[field, _START]
                continues = continues and are_same_bytes(at, known, sources[now, _SIZE])
            if is_compact and lanes[lane, OPEN] and not (cut.size > 0 and cut[i, 0]):
                # What stands in the place of an unknown value is the row's own.
                own = table.ctypes.data + newest * table.shape[1] * _WORD
                continues = continues or are_same_bytes(before, own, shared_bytes)
            if not continues:
                entry = _take_entry(free, counts)
                copy_bytes(
                    values.ctypes.data + entry * values.shape[1] * _WORD, before, shared_bytes
                )
        for s in range(first, num_steps):
            row = order[i, s] if order.size > 0 else i * num_steps + s
            header = (entry << ENTRY_BIT) + (tip << TIP_BIT) + (CONTINUES if continues else 0)
            new[row] = header
            headers[place * num_lanes + lane] = header
            place = place + 1 if place + 1 < room else 0
            if s + 1 == num_steps:
                _copy_next(sources, row, values, 1 + (tip - 1) * num_lanes + lane, num_shared)
                continue
            continues, entry = True, 0
            if is_compact:
                continues = not is_set(first_end + row * end_stride)
                continues = continues and not (cut.size > 0 and cut[i, s + 1])
            else:
                after = order[i, s + 1] if order.size > 0 else row + 1
                for field in range(num_shared):
                    now = num_shared + field
                    at = sources[now, _ADDRESS] + after * sources[now, _STRIDE]
                    led_to = sources[field, _ADDRESS] + row * sources[field, _STRIDE]
                    continues = continues and are_same_bytes(at, led_to, sources[now, _SIZE])
            if not continues:
                entry = _take_entry(free, counts)
                _copy_next(sources, row, values, entry, num_shared)


@compiled
def _put(
    words: Any,
    slots: Any,
    lanes: Any,
    room: int,
    table: Any,
    headers: Any,
    values: Any,
    free: Any,
    counts: Any,
    shared_bytes: int,
) -> None:
    """Copies rows over others, one by one, and links them to their neighbours.

    Args:
        words: `[n, W]` the rows as they are seen.
        slots: `[n]` where they go; those of negative slots are left out.
        lanes: as in `_link`, as all that is not named here.
        room: likewise.
        table: likewise.
        headers: likewise.
        values: likewise.
        free: likewise.
        counts: likewise.
        shared_bytes: likewise.
    """
    num_lanes, num_slots, heads = len(lanes), room * len(lanes), _heads(lanes, room)
    row_bytes, side, size = table.shape[1] * _WORD, values.ctypes.data, values.shape[1] * _WORD
    moved = words.shape[1] * _WORD - row_bytes
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0:
            continue
        lane, after = slot % num_lanes, _wrapped(slot + num_lanes, num_slots)
        at, new = (
            table.ctypes.data + slot * row_bytes,
            words.ctypes.data + i * words.shape[1] * _WORD,
        )
        header = headers[slot]
        if header & CONTINUES:
            header -= CONTINUES
            if slot != heads[lane]:
                # What it was the next value of is kept.
                entry = _take_entry(free, counts)
                copy_bytes(side + entry * size, at, shared_bytes)
                header += entry << ENTRY_BIT
        copy_bytes(at, new + moved, row_bytes)
        headers[slot] = header
        if after == heads[lane]:
            if _tip_of(header, lane, num_lanes) == 0:
                headers[slot] += 1 << TIP_BIT
            entry = _tip_of(headers[slot], lane, num_lanes)
        else:
            if _entry_of(headers[after]) == 0:
                headers[after] &= -1 - CONTINUES
                headers[after] += _take_entry(free, counts) << ENTRY_BIT
            entry = _entry_of(headers[after])
        copy_bytes(side + entry * size, new, shared_bytes)
        for other in (slot, after):
            entry, row = _entry_of(headers[other]), table.ctypes.data + other * row_bytes
            is_same = are_same_bytes(side + entry * size, row, shared_bytes)
            if entry > 0 and other != heads[lane] and is_same:
                headers[other] += CONTINUES - (entry << ENTRY_BIT)
                _give_up(entry, free, counts)
