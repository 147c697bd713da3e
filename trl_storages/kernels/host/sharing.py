"""Rows that share observations with their neighbours, written and read in compiled loops.

Letters: N rows, B rows picked, n rows put, f fields of a row, m fields of it that are shared, L lanes and
S steps written now, T live steps per lane at most, R ring steps per lane, E lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import (
    LINE,
    are_same_bytes,
    array_at,
    compiled,
    contiguous,
    copy_bytes,
    fenced,
    inlined,
    is_set,
    prefetch,
)
from trl_storages.kernels.host.rows import RowTable, not_found
from trl_storages.kernels.host.writing import Given, NewRows, row_of, tip_of
from trl_storages.kernels.memory import new_batch
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
from trl_storages.kernels.tables import CURSOR, RingTables

if TYPE_CHECKING:
    from trl_storages.kernels.host.disk import Commits
    from trl_storages.kernels.host.ring import Ring

__all__ = ["SharedTable"]

_WORD = 8  # bytes
_AHEAD = 16
_MOST_AHEAD = 1024  # bytes
_ADDRESS, _STRIDE, _START, _SIZE = range(4)
_NO_SPANS, _NO_CHOICE = np.zeros((0, 4), np.int64), np.zeros(1, np.int64)
_Array = np.ndarray
# What a loop over rows takes first, see `_pick`.
_Tables = tuple[_Array, _Array, _Array, _Array, _Array, int, int, int, int, int]
# The index of the first cursor in a table of commits.
_FIRST_CURSOR = 1


class SharedTable(RowTable):
    """A table whose rows are stored without their next observations, and read with them.

    Args:
        rows: `[N, *]` int64 as they are stored, contiguous, on the CPU.
        sharing: which part of a row is not stored in it.
        side: holds next values that are in no other row.
        ring: determines which rows follow one another.
        commits: holds the valid cursors of a directory; None takes those of the ring.
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
        # Offset in bytes of the stored fields in a row as read.
        self._next_bytes = sharing.shared_words * _WORD
        self._moved = np.array([self._next_bytes, 0, 0, 0])
        self.before = self.array, self._headers, self._values, self._next_bytes
        # The array of the ring's lanes, and what `_tables` returns for it.
        self._prepared: tuple[Any, Any] = (None, None)
        # The headers of the rows written last: what `link` returns names their address.
        self._new = self._headers[:0]

    def pick(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None = None,
        parts: tuple[np.ndarray, np.ndarray] = (_NO_SPANS, _NO_SPANS),
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies whole rows as they are read; see `RowTable.pick`."""
        out = new_batch((*slots.shape, self._num_words), pin_memory=pin_memory)
        to = out.data_ptr(), self._num_words * _WORD
        self._copy_seen(slots, following, parts[1], 0, self._next_bytes, True, *to, 0)
        return out

    def _copy(self, slots: torch.Tensor, spans: np.ndarray, out: int, where: int = 0) -> None:
        is_own = spans[:, 0] >= self._next_bytes
        super()._copy(slots, spans[is_own] - self._moved, out, where)
        for start, to, size, pitch in spans[~is_own].tolist():
            self._copy_seen(slots, None, _NO_SPANS, start, size, False, out + to, pitch, where)

    def _copy_seen(self, slots: torch.Tensor, lenders: torch.Tensor | None, *what: Any) -> None:
        """Copies bytes of next values, optionally followed by those of the stored row.

        Args:
            slots: `[*B]`.
            lenders: `[*B]`, the rows whose next values are copied; None are the same.
            *what: what to copy and where to, as `_pick` takes it.
        """
        slots = contiguous(slots)
        lenders = slots if lenders is None else contiguous(lenders)
        rows = slots.numel(), slots.data_ptr(), lenders.data_ptr()
        if (wrong := _pick(self._tables, self._next_bytes, *rows, *what)) >= 0:
            raise not_found(int(slots.view(-1)[wrong]), len(self.array))

    def next_values(self, slots: torch.Tensor) -> tuple[np.ndarray, bool]:
        """Returns where the values of rows under `next` are; see `RowTable.next_values`."""
        found = np.empty(len(slots), np.int64)
        has_tips = _locate(self._tables, slots.numpy(), found)
        # Once the next row is committed the tip may be reused.
        return found, has_tips and self._commits is not None

    @property
    def _tables(self) -> _Tables:
        """The rows and the side table, where the valid cursors are, as `_cursor` takes it, E and R."""
        lanes, commits = self._ring._arrays[2], self._commits
        # Cached: a batch is read with caches that other code has filled.
        if self._prepared[0] is not lanes:
            num_lanes, size = lanes.shape
            where: Any = lanes.reshape(-1), _NO_CHOICE, CURSOR, 0, size
            if commits is not None:
                tables, size = commits._tables.reshape(-1), commits._tables.shape[1]
                where = tables, commits._selector, _FIRST_CURSOR, size, 1
            rows = self.array, self._headers, self._values
            self._prepared = lanes, (*rows, *where, num_lanes, self._ring.ring_steps)
        return self._prepared[1]

    def link(self, rows: NewRows, ring: Ring, given: Given) -> np.ndarray:
        """Links new rows to the rows before them; takes and frees entries of the side table.

        Args:
            rows: n of them.
            ring: of the rows, in the state before the write.
            given: the steps that they are, by `Ring.given`.

        Returns:
            `[*, 4]` int64, as `NewRows.sources`, of the stored part of the rows.
        """
        self._new = np.empty(rows.num_rows, self._headers.dtype)
        sources = np.empty((len(rows.sources) - self._sharing.num_shared + 1, 4), np.int64)
        _link(
            self._tables,
            ring._arrays[2],
            ring.ring_steps,
            given,
            rows.sources,
            *self._side,
            self._sharing.num_shared,
            self._sharing.shared_bytes,
            self._next_bytes,
            self._new,
            sources,
        )
        return sources

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Overwrites rows, and keeps the next values of their neighbours; see `RowTable.put`."""
        assert ring is not None
        words = rows.words().numpy()
        # Each may take two entries: for its own next values, and for those of the row before it.
        self.side.make_room(2 * len(words))
        table = self.array, self._headers, self._values, *self._side[:2]
        size = self._sharing.shared_bytes
        _put(words, slots.numpy(), ring.lanes.numpy(), ring.ring_steps, *table, size)

    def clear(self, num_slots: int) -> None:
        """Unlinks the rows of the first slots."""
        self._headers[:num_slots] = 0
        self.side.clear()


@inlined
def _wrapped(slot: int, num_slots: int) -> int:
    """Wraps a slot beyond either end of the ring around."""
    if slot >= num_slots:
        return slot - num_slots
    return slot + num_slots if slot < 0 else slot


@inlined
def _ask_for(table: Any, start: int, size: int) -> None:
    """Prefetches bytes, up to a limit; each line once."""
    first = start - ((table.ctypes.data + start) & (LINE - 1))
    for byte in range(first, start + min(size, _MOST_AHEAD), LINE):
        prefetch(table, byte)


@inlined
def _entry_of(header: int) -> int:
    """Returns the entry that a row names for the next values of the row before it."""
    # int64, as addresses are computed from it, which would overflow the 4 bytes of a header.
    return np.int64(header) >> ENTRY_BIT


@inlined
def _cursor(tables: Any, lane: int) -> int:
    """Returns how many steps of a lane are valid, from the table that the selector picks."""
    _, _, _, counted, selector, first, table_size, stride, _, _ = tables
    return counted[(selector[0] & 1) * table_size + first + lane * stride]


@inlined
def _committed(tables: Any) -> Any:
    """Returns how many steps of each lane are valid, and the slots of the rows after them."""
    num_lanes, room = tables[8], tables[9]
    cursors, heads = np.empty(num_lanes, np.int64), np.empty(num_lanes, np.int64)
    for lane in range(num_lanes):
        cursors[lane] = _cursor(tables, lane)
        heads[lane] = cursors[lane] % room * num_lanes + lane
    return cursors, heads


@inlined
def _heads(lanes: Any, room: int) -> Any:
    """Returns the slots of the next rows of all lanes."""
    heads = np.empty(len(lanes), np.int64)
    for lane in range(len(lanes)):
        heads[lane] = lanes[lane, CURSOR] % room * len(lanes) + lane
    return heads


@inlined
def _known_next(table: Any, headers: Any, values: Any, follower: int) -> Any:
    """Returns the address of the next values that a row gives for the row before it."""
    header = headers[follower]
    # The header of a row that is being overwritten can't be trusted.
    entry = _entry_of(header) if _entry_of(header) < len(values) else 0
    source = values.ctypes.data + entry * values.shape[1] * _WORD
    if header & CONTINUES:
        source = table.ctypes.data + follower * table.shape[1] * _WORD
    return source


@compiled
def _pick(
    tables: Any,
    moved: int,
    num_slots: int,
    slots_at: int,
    lenders_at: int,
    spans: Any,
    start: int,
    size: int,
    with_own: bool,
    out: int,
    pitch: int,
    where: int,
) -> int:
    """Copies rows as they are read.

    Args:
        tables: `SharedTable._tables`.
        moved: offset in bytes of the stored fields in a row as read.
        num_slots: B.
        slots_at: address of `[B]` slots.
        lenders_at: address of `[B]` the rows whose next values are copied.
        spans: `[n, 4]` further bytes under `next`, as in `RowTable.copy_into`, that come from the stored
            rows of `lenders`.
        start: the first wanted byte of the next values.
        size: how many bytes of them.
        with_own: whether to append the stored row itself.
        out: an address.
        pitch: bytes from one row to the next at `out`.
        where: address of `[B]` bool, which rows to copy; 0 copies all.

    Returns:
        the position of the first invalid slot, or -1.
    """
    table, headers, values, _, _, _, _, _, num_lanes, room = tables
    slots = array_at(slots_at, num_slots, np.int64)
    lenders = array_at(lenders_at, num_slots, np.int64)
    num_rows, row_bytes = table.shape[0], table.shape[1] * _WORD
    address, side, entry_bytes = table.ctypes.data, values.ctypes.data, values.shape[1] * _WORD
    header_start = headers.ctypes.data - address
    own_bytes, ring_slots = row_bytes if with_own else 0, room * num_lanes
    # The header usually follows these bytes closely: a prefetch of its own would take a sixth longer.
    asked = header_start + 1 - start
    if asked > min(size + LINE, _MOST_AHEAD):
        asked = size
    cursors, heads = _committed(tables)
    for i in range(num_slots):
        ahead = i + _AHEAD
        if ahead < num_slots:
            after = _wrapped(lenders[ahead] + num_lanes, ring_slots) * row_bytes
            _ask_for(table, after + start, asked)
            if asked == size:
                prefetch(table, after + header_start)
            if with_own:
                _ask_for(table, slots[ahead] * row_bytes, row_bytes)
        if where and not is_set(where + i):
            continue
        slot, lender = slots[i], lenders[i]
        slot = slot + num_rows if slot < 0 else slot
        lender = lender + num_rows if lender < 0 else lender
        if slot < 0 or slot >= num_rows or lender < 0 or lender >= num_rows:
            return i
        to, follower = out + i * pitch, _wrapped(lender + num_lanes, ring_slots)
        # A division takes longer than all the rest.
        lane = follower % num_lanes if num_lanes > 1 else 0
        is_newest = follower == heads[lane]
        if is_newest:
            entry = tip_of(headers[lender], lane, num_lanes)
            copy_bytes(to, side + entry * entry_bytes + start, size)
            fenced()
            # Once the next row is committed the tip may be reused: read those next values again.
            is_newest = _cursor(tables, lane) == cursors[lane]
        if not is_newest:
            copy_bytes(to, _known_next(table, headers, values, follower) + start, size)
        if with_own:
            copy_bytes(to + size, address + slot * row_bytes, own_bytes)
        for s in range(spans.shape[0]):
            if spans[s, 0] >= moved:
                source = address + lender * row_bytes + spans[s, 0] - moved
                copy_bytes(to + spans[s, 1], source, spans[s, 2])
    return -1


@compiled
def _locate(
    tables: Any,
    slots: Any,
    found: Any,
) -> bool:
    """Finds the next values of rows.

    Args:
        tables: `SharedTable._tables`.
        slots: `[B]`.
        found: `[B]` output, their addresses; anything for invalid slots.

    Returns:
        whether some are tips.
    """
    table, headers, values, _, _, _, _, _, num_lanes, room = tables
    num_rows, num_slots, has_tips = table.shape[0], room * num_lanes, False
    _, heads = _committed(tables)
    for i in range(slots.shape[0]):
        ahead = slots[min(i + _AHEAD, slots.shape[0] - 1)] + num_lanes
        prefetch(headers, _wrapped(ahead, num_slots) * headers.strides[0])
        slot = slots[i] + num_rows if slots[i] < 0 else slots[i]
        slot = slot if 0 <= slot < num_rows else 0
        follower = _wrapped(slot + num_lanes, num_slots)
        lane = follower % num_lanes
        if follower == heads[lane]:
            entry, has_tips = tip_of(headers[slot], lane, num_lanes), True
            found[i] = values.ctypes.data + entry * values.shape[1] * _WORD
        else:
            found[i] = _known_next(table, headers, values, follower)
    return has_tips


@inlined
def _take_entry(free: Any, counts: Any) -> int:
    """Takes an entry into use."""
    if counts[NUM_FREE] > 0:
        counts[NUM_FREE] -= 1
        return free[counts[NUM_FREE]]
    counts[NUM_TAKEN] += 1
    return counts[NUM_TAKEN]


@inlined
def _give_up(entry: int, free: Any, counts: Any) -> None:
    """Frees an entry, unless it is 0."""
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
    """Returns the number of a tip that is no longer needed."""
    newest = (committed - 1) % room * num_lanes + lane
    used = (headers[newest] >> TIP_BIT) & NUM_TIPS
    tip = 1
    while tip in (used, held[lane, FLUSHED]):
        tip += 1
    return tip


@compiled
def _link(
    tables: Any,
    lanes: Any,
    room: int,
    given: Any,
    sources: Any,
    free: Any,
    counts: Any,
    held: Any,
    num_shared: int,
    shared_bytes: int,
    moved: int,
    new: Any,
    stored: Any,
) -> None:
    """Links new rows: those that do not continue the row before them get an entry.

    Runs before the rows are written, and may be repeated before they are committed.

    Args:
        tables: `SharedTable._tables`.
        lanes: of the index before the write.
        room: R.
        given: the steps, by `Ring.given`.
        sources: `[f, 4]` of the rows as read: m next values, the m observations they equal, others.
        free: of the side table.
        counts: of the side table.
        held: `lanes` of the side table.
        num_shared: m.
        shared_bytes: bytes of the values of these fields.
        moved: as in `_pick`.
        new: `[n]` output, the headers of the new rows.
        stored: `[f - m + 1, 4]` output, the sources of what is stored: the fields, then the header.
    """
    table, headers, values, _, _, _, _, _, _, _ = tables
    num_lanes, num_stored = len(lanes), len(stored) - 1
    written, num_steps = given[0], given[1]
    for field in range(num_stored):
        stored[field] = sources[num_shared + field]
        stored[field, _START] -= moved
    size, header_start = headers.itemsize, headers.ctypes.data - table.ctypes.data
    source = stored[num_stored]
    source[_ADDRESS], source[_STRIDE] = new.ctypes.data, size
    source[_START], source[_SIZE] = header_start, size
    # Of more than R steps, only the last R are kept.
    first = max(num_steps - room, 0)
    for i in range(len(written)):
        lane, cursor = written[i], lanes[written[i], CURSOR]
        start = (cursor + first) % room
        committed = _cursor(tables, lane)
        tip = _free_tip(headers, lane, num_lanes, committed, room, held)
        if committed > cursor:
            # These rows are committed already, and are not changed.
            for s in range(first, num_steps):
                row = row_of(given, i, s)
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
        # None if the newest row is itself overwritten: its header was just cleared.
        led_to = tip_of(headers[newest], lane, num_lanes)
        # Evicted rows are linked too: a reader may not have seen their eviction yet.
        if led_to > 0:
            row = row_of(given, i, 0)
            before = values.ctypes.data + led_to * values.shape[1] * _WORD
            continues = True
            for field in range(num_shared):
                now = num_shared + field
                at = sources[now, _ADDRESS] + row * sources[now, _STRIDE]
                known = before + sources[field, _START]
                continues = continues and are_same_bytes(at, known, sources[now, _SIZE])
            if not continues:
                entry = _take_entry(free, counts)
                copy_bytes(
                    values.ctypes.data + entry * values.shape[1] * _WORD, before, shared_bytes
                )
        for s in range(first, num_steps):
            row = row_of(given, i, s)
            header = (entry << ENTRY_BIT) + (tip << TIP_BIT) + (CONTINUES if continues else 0)
            new[row] = header
            headers[place * num_lanes + lane] = header
            place = place + 1 if place + 1 < room else 0
            if s + 1 == num_steps:
                _copy_next(sources, row, values, 1 + (tip - 1) * num_lanes + lane, num_shared)
                continue
            continues, entry = True, 0
            after = row_of(given, i, s + 1)
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
    """Overwrites rows one by one, and links them to their neighbours.

    Args:
        words: `[n, W]` the rows as read.
        slots: `[n]` where they go; rows with negative slots are skipped.
        lanes: as in `_link`.
        room: as in `_link`.
        table: as in `_link`.
        headers: as in `_link`.
        values: as in `_link`.
        free: as in `_link`.
        counts: as in `_link`.
        shared_bytes: as in `_link`.
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
                # Keep the overwritten observations: they are the next values of the row before.
                entry = _take_entry(free, counts)
                copy_bytes(side + entry * size, at, shared_bytes)
                header += entry << ENTRY_BIT
        copy_bytes(at, new + moved, row_bytes)
        headers[slot] = header
        if after == heads[lane]:
            if tip_of(header, lane, num_lanes) == 0:
                headers[slot] += 1 << TIP_BIT
            entry = tip_of(headers[slot], lane, num_lanes)
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
