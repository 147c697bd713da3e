"""Rows that share observations with their neighbours, written and read in compiled loops.

Letters: N rows, B rows picked, n rows put, f fields of a row, m fields of it that are shared, L lanes and
S steps written now, T live steps per lane at most, R ring steps per lane, E lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, inlined, prefetch
from trl_storages.kernels.host.memory import are_same_bytes, copy_bytes, is_set
from trl_storages.kernels.host.rows import RowTable, check_found
from trl_storages.kernels.host.writing import NewRows
from trl_storages.kernels.ring_tables import CURSOR, OPEN, TAIL, RingTables
from trl_storages.kernels.sharing import NUM_FREE, NUM_TAKEN, Sharing, SideTable

if TYPE_CHECKING:
    from trl_storages.kernels.host.ring import Ring

__all__ = ["SharedTable"]

_WORD = 8  # bytes
_LINE = 64  # bytes that memory delivers at once
_AHEAD = 16
_MOST_AHEAD = 1024  # bytes
_ADDRESS, _STRIDE, _START, _SIZE = range(4)
_NO_SPANS = np.zeros((0, 2), np.int64)


class SharedTable(RowTable):
    """Copies rows out of a table and into it that are stored otherwise than they are seen.

    Args:
        rows: `[N, *]` int64 as they are stored, contiguous, on the CPU.
        sharing: what of a row is not stored in it.
        side: has next values that are not in other rows.
        lanes: E and R * E, of the ring that says which rows follow one another.
    """

    looks = False

    def __init__(
        self, rows: torch.Tensor, sharing: Sharing, side: SideTable, lanes: tuple[int, int]
    ) -> None:
        super().__init__(rows)
        self.side, self._sharing = side, sharing
        self._side = (side.values.numpy(), side.free.numpy(), side.counts.numpy())
        self._num_words += sharing.shared_words - sharing.header_words
        self._shared_bytes = sharing.shared_words * _WORD
        # Bytes by which fields lie further on in a row as it is seen.
        self._moved = (sharing.shared_words - sharing.header_words) * _WORD
        #: As given.
        self.lanes = lanes
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
        pitch = self._num_words * _WORD
        size = self._shared_bytes
        self._copy_seen(slots, following, spans, 0, size, True, out.data_ptr(), pitch)
        return out

    def pick_field(
        self, slots: torch.Tensor, start_byte: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Copies one field of rows; see `RowTable.pick_field`."""
        if start_byte >= self._shared_bytes:
            return super().pick_field(slots, start_byte - self._moved, dtype, shape)
        out = torch.empty((*slots.shape, *shape), dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        self._copy_seen(slots, None, _NO_SPANS, start_byte, size, False, out.data_ptr(), size)
        return out

    def pick_into(self, out: torch.Tensor, slots: torch.Tensor, start_byte: int) -> None:
        """Copies neighbouring fields of rows to where they are wanted; see `RowTable.pick_into`."""
        if start_byte >= self._shared_bytes:
            super().pick_into(out, slots, start_byte - self._moved)
            return
        place = start_byte, out.shape[1], False, out.data_ptr(), out.stride(0)
        self._copy_seen(slots, None, _NO_SPANS, *place)

    def _copy_seen(
        self,
        slots: torch.Tensor,
        following: torch.Tensor | None,
        spans: np.ndarray,
        start: int,
        size: int,
        with_own: bool,
        out: int,
        pitch: int,
    ) -> None:
        """Copies bytes of what is next, and perhaps what is stored in the row behind them."""
        flat = slots.numpy().reshape(-1)
        lenders = flat if following is None else following.numpy().reshape(-1)
        spans = _NO_SPANS if following is None else spans
        table = self.array, self._side[0], *self.lanes, *self._sharing
        wrong = _pick(*table, flat, lenders, spans, start, size, with_own, out, pitch)
        check_found(wrong, flat, len(self.array))

    def newest(self, ring: Ring, written: np.ndarray) -> tuple[np.ndarray, bool]:
        """Returns where the newest rows of `[L]` lanes are; see `RowTable.newest`."""
        rows, values = np.empty((len(written), self._num_words), np.int64), self._side[0]
        header_words = self._sharing.header_words
        _newest(ring._arrays[2], ring.ring_steps, written, self.array, values, header_words, rows)
        return rows, False

    def sources(
        self,
        rows: NewRows,
        ring: Ring,
        num_steps: int,
        written: np.ndarray,
        order: np.ndarray,
        cut: np.ndarray,
    ) -> np.ndarray:
        """Links rows that are about to be written to those before them; see `RowTable.sources`."""
        if rows.sources is not self._known[0]:
            headers = np.zeros(rows.num_rows, np.int64)
            self._known = rows.sources, headers, self._stored(rows.sources, headers)
        _, headers, sources = self._known
        _link(
            ring._arrays[2],
            ring.steps_per_lane,
            ring.ring_steps,
            written,
            num_steps,
            rows.sources,
            order,
            rows.is_compact,
            *rows.ends,
            cut,
            self.array,
            *self._side,
            *self._sharing,
            headers,
        )
        return sources

    def _stored(self, seen: np.ndarray, headers: np.ndarray) -> np.ndarray:
        """Returns where what is stored of rows comes from, and where it belongs."""
        own = seen[self._sharing.num_shared :]
        sources = np.empty((len(own) + 1, 4), np.int64)
        sources[:-1] = own
        sources[:-1, _START] -= self._moved
        sources[-1] = headers.ctypes.data, _WORD, 0, _WORD
        return sources

    def put(self, slots: torch.Tensor, rows: NewRows, ring: RingTables | None = None) -> None:
        """Copies rows over others, whose neighbours are read as before; see `RowTable.put`."""
        assert ring is not None
        table = self.array, *self._side, *self.lanes, *self._sharing
        _put(rows.words().numpy(), slots.numpy(), ring.heads().numpy(), *table)

    def clear(self, num_slots: int) -> None:
        """Forgets how the rows of the first slots hang together."""
        self.array[:num_slots, 0] = 0
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


@compiled
def _pick(
    table: Any,
    values: Any,
    num_lanes: int,
    num_slots: int,
    num_shared: int,
    shared_words: int,
    header_words: int,
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
        values: `[*, S]` of the side table.
        num_lanes: E.
        num_slots: R * E.
        num_shared: not needed, as one of the numbers of `Sharing`.
        shared_words: S.
        header_words: likewise.
        slots: `[B]`.
        lenders: `[B]` the rows that lend what is next.
        spans: `[n, 2]` further bytes that they lend.
        start: the first byte of what is next that is wanted.
        size: how many bytes of it.
        with_own: whether the fields of the row itself are wanted behind them.
        out: an address.
        pitch: bytes from one row to the next there.

    Returns:
        which of `slots` is of no row, or -1.
    """
    num_rows, row_bytes = table.shape[0], table.shape[1] * _WORD
    header_bytes, shared_bytes = header_words * _WORD, shared_words * _WORD
    address, side = table.ctypes.data, values.ctypes.data
    own_bytes = row_bytes - header_bytes if with_own else 0
    moved = shared_bytes - header_bytes
    for i in range(slots.shape[0]):
        ahead = i + _AHEAD
        if ahead < slots.shape[0]:
            after = _wrapped(lenders[ahead] + num_lanes, num_slots) * row_bytes
            prefetch(table, after)
            _ask_for(table, after + header_bytes + start, size)
            if with_own:
                _ask_for(table, slots[ahead] * row_bytes, row_bytes)
        slot, lender = slots[i], lenders[i]
        slot = slot + num_rows if slot < 0 else slot
        lender = lender + num_rows if lender < 0 else lender
        if slot < 0 or slot >= num_rows or lender < 0 or lender >= num_rows:
            return i
        to, follower = out + i * pitch, _wrapped(lender + num_lanes, num_slots)
        if table[follower, 0] & 1:
            copy_bytes(to, address + follower * row_bytes + header_bytes + start, size)
        else:
            copy_bytes(to, side + (table[lender, 0] >> 1) * shared_bytes + start, size)
        if with_own:
            copy_bytes(to + size, address + slot * row_bytes + header_bytes, own_bytes)
        for s in range(spans.shape[0]):
            at = spans[s, 0]
            copy_bytes(to + at, address + lender * row_bytes + at - moved, spans[s, 1])
    return -1


@compiled
def _newest(
    lanes: Any, room: int, written: Any, table: Any, values: Any, header_words: int, rows: Any
) -> None:
    """Copies the newest rows of lanes as they are seen: no row follows them, so they have an entry."""
    shared = values.shape[1] * _WORD
    for i in range(len(written)):
        slot = (lanes[written[i], CURSOR] - 1) % room * len(lanes) + written[i]
        entry = table[slot, 0] >> 1
        to, row = rows.ctypes.data + i * rows.shape[1] * _WORD, slot * table.shape[1] + header_words
        copy_bytes(to, values.ctypes.data + entry * shared, shared)
        copy_bytes(to + shared, table.ctypes.data + row * _WORD, rows.shape[1] * _WORD - shared)


@inlined
def _take_entry(free: Any, counts: Any) -> int:
    """Returns an entry that is in use from now on."""
    if counts[NUM_FREE] > 0:
        counts[NUM_FREE] -= 1
        return free[counts[NUM_FREE]]
    counts[NUM_TAKEN] += 1
    return counts[NUM_TAKEN]


@inlined
def _give_up(table: Any, slot: int, free: Any, counts: Any) -> None:
    """Gives up the entry of a row, if it has one."""
    entry = table[slot, 0] >> 1
    if entry > 0:
        table[slot, 0] &= 1
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
def _link(
    lanes: Any,
    most_live: int,
    room: int,
    written: Any,
    num_steps: int,
    sources: Any,
    order: Any,
    is_compact: bool,
    first_end: int,
    end_stride: int,
    cut: Any,
    table: Any,
    values: Any,
    free: Any,
    counts: Any,
    num_shared: int,
    shared_words: int,
    header_words: int,
    headers: Any,
) -> None:
    """Finds out which rows are continued by the rows after them, and gives the others an entry.

    It is done before the rows are written, and may be done again in between: a row that is the newest and
    has no entry was continued then.

    Args:
        lanes: of the index before the write.
        most_live: T.
        room: R.
        written: `[L]` the lanes.
        num_steps: S.
        sources: `[f, 4]` of the rows as they are seen: the m next values, what they come back as, others.
        order: `[L, S]` which row is which step; empty if they come as they are written.
        is_compact: whether next values are not known, and a row goes on unless its episode ends.
        first_end: the address of the first flag that ends an episode.
        end_stride: how far it is to the next one.
        cut: `[L, S]` bool, rows that begin an episode anyway; empty if none does.
        table: `[N, *]`.
        values: of the side table, as the two that follow.
        free: likewise.
        counts: likewise.
        num_shared: m.
        shared_words: of `Sharing`, as `header_words`.
        header_words: likewise.
        headers: `[n]` the answer.
    """
    num_lanes = len(lanes)
    # Of more than T steps, the last T find room.
    first = max(num_steps - most_live, 0)
    for i in range(len(written)):
        lane, cursor = written[i], lanes[written[i], CURSOR]
        start = (cursor + first) % room
        place = start
        for _ in range(first, num_steps):
            _give_up(table, place * num_lanes + lane, free, counts)
            place = place + 1 if place + 1 < room else 0
        continues = False
        if num_steps < most_live and cursor > lanes[lane, TAIL]:
            newest = (cursor - 1) % room * num_lanes + lane
            entry = table[newest, 0] >> 1
            if entry == 0:
                continues = table[start * num_lanes + lane, 0] & 1 == 1
            else:
                row = order[i, 0] if order.size > 0 else i * num_steps
                before = values.ctypes.data + entry * values.shape[1] * _WORD
                continues = True
                for field in range(num_shared):
                    now = num_shared + field
                    at = sources[now, _ADDRESS] + row * sources[now, _STRIDE]
                    led_to = before + sources[field, _START]
                    continues = continues and are_same_bytes(at, led_to, sources[now, _SIZE])
                if is_compact and lanes[lane, OPEN] and not (cut.size > 0 and cut[i, 0]):
                    # What stands in the place of an unknown value is the row's own.
                    own = table.ctypes.data + (newest * table.shape[1] + header_words) * _WORD
                    continues = continues or are_same_bytes(before, own, shared_words * _WORD)
            if continues:
                _give_up(table, newest, free, counts)
        place = start
        for s in range(first, num_steps):
            row = order[i, s] if order.size > 0 else i * num_steps + s
            goes_on = s + 1 < num_steps
            if goes_on and is_compact:
                goes_on = not is_set(first_end + row * end_stride)
                goes_on = goes_on and not (cut.size > 0 and cut[i, s + 1])
            elif goes_on:
                after = order[i, s + 1] if order.size > 0 else row + 1
                for field in range(num_shared):
                    now = num_shared + field
                    at = sources[now, _ADDRESS] + after * sources[now, _STRIDE]
                    led_to = sources[field, _ADDRESS] + row * sources[field, _STRIDE]
                    goes_on = goes_on and are_same_bytes(at, led_to, sources[now, _SIZE])
            header = 1 if continues else 0
            if not goes_on:
                entry = _take_entry(free, counts)
                _copy_next(sources, row, values, entry, num_shared)
                header += 2 * entry
            headers[row] = header
            table[place * num_lanes + lane, 0] = header
            place = place + 1 if place + 1 < room else 0
            continues = goes_on
        # What is there now does not continue the newest row.
        table[place * num_lanes + lane, 0] &= -2


@compiled
def _put(
    words: Any,
    slots: Any,
    heads: Any,
    table: Any,
    values: Any,
    free: Any,
    counts: Any,
    num_lanes: int,
    num_slots: int,
    num_shared: int,
    shared_words: int,
    header_words: int,
) -> None:
    """Copies rows over others, one by one, and links them to their neighbours.

    Args:
        words: `[n, W]` the rows as they are seen.
        slots: `[n]` where they go; those of negative slots are left out.
        heads: `[E]` where the next row of each lane will lie.
        table: as in `_link`, as all that is not named here.
        values: likewise.
        free: likewise.
        counts: likewise.
        num_lanes: E.
        num_slots: R * E.
        num_shared: likewise.
        shared_words: S.
        header_words: of `Sharing`.
    """
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0:
            continue
        before = _wrapped(slot - num_lanes, num_slots)
        after = _wrapped(slot + num_lanes, num_slots)
        if table[slot, 0] & 1:
            # What it was the next value of is kept.
            entry = _take_entry(free, counts)
            for word in range(shared_words):
                values[entry, word] = table[slot, header_words + word]
            table[before, 0] += 2 * entry
            table[slot, 0] -= 1
        if table[slot, 0] >> 1 == 0:
            table[slot, 0] += 2 * _take_entry(free, counts)
        table[after, 0] &= -2
        entry = table[slot, 0] >> 1
        for word in range(shared_words):
            values[entry, word] = words[i, word]
        for word in range(words.shape[1] - shared_words):
            table[slot, header_words + word] = words[i, shared_words + word]
        for one, other in ((before, slot), (slot, after)):
            entry = table[one, 0] >> 1
            is_same = entry > 0 and other != heads[other % num_lanes]
            for word in range(shared_words):
                is_same = is_same and values[entry, word] == table[other, header_words + word]
            if is_same:
                table[other, 0] += 1
                _give_up(table, one, free, counts)
