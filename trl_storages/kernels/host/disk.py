"""Marked and checksummed rows, and words that are replaced atomically, in compiled loops.

Letters: W words of 8 bytes a row, M slots, n rows, L lanes and S steps written now, E lanes
(environments), K words of a table.

Fences order the stores that another process, or one started after a kill, may see in memory. Marks and
checksums are defined in `kernels.marks`. int64 arithmetic wraps around.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, fenced, inlined
from trl_storages.kernels.host.raw_priorities import RawPriorities
from trl_storages.kernels.host.ring import Ring
from trl_storages.kernels.host.writing import tip_of
from trl_storages.kernels.marks import (
    BEGINS,
    ENDS,
    FINISH,
    INFINITY_BITS,
    LOWER_HALF,
    MOST_STAMP,
    NAN_BITS,
    NEGATIVE_ZERO_BITS,
    ONE_BITS,
    PRESENT,
    STAMP_BIT,
    STAMP_FACTOR,
    START,
    STEP_BIT,
    factors,
)
from trl_storages.kernels.sharing import CONTINUES, ENTRY_BIT
from trl_storages.kernels.tables import ABSENT, CURSOR, FINISHED, FIRST, LAST, OPEN, TAIL

__all__ = [
    "Commits",
    "MarkedRows",
    "PriorityWords",
    "checksums",
]

(_SHIFT_1, _LEFT_1, _FACTOR_1), (_SHIFT_2, _LEFT_2, _FACTOR_2), (_SHIFT_3, _LEFT_3, _) = FINISH
_NO_WORDS, _NO_VALUES = np.zeros(0, np.int64), np.zeros((0, 1), np.int64)
# Strided like real headers, so that no loop is compiled twice.
_NO_HEADERS = np.zeros((2, 2), np.int32)[:, 0]
_Commit = tuple[np.ndarray, np.ndarray, np.ndarray]
_NO_COMMIT: _Commit = _NO_WORDS, _NO_VALUES, _NO_WORDS
# Retries while a fast writer moves on as its table is copied.
_MOST_TRIES = 1000


def checksums(rows: torch.Tensor, marks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the checksums of rows.

    Args:
        rows: `[n, W]` int64.
        marks: `[n]` int64.
        slots: `[n]` int64, where the rows are.

    Returns:
        `[n]` int64.
    """
    out = np.empty(len(rows), np.int64)
    _checksums(rows.numpy(), marks.numpy(), slots.numpy(), factors(rows.shape[1]), out)
    return torch.from_numpy(out)


class MarkedRows:
    """Rows with a mark and a checksum each, in memory shared with other processes.

    Args:
        rows: `[M, W]` int64, contiguous, on the CPU.
        marks: `[M, 2]` int64, for each slot the mark, 0 if it has no row, and the checksum.
        values: `[*, X + 1]` int64, the side table of rows that share X words: the last word of an entry
            is a checksum of the others, and checksum and slot of the row that names it; None if rows
            share none.
        headers: `[M]` of the rows; None if rows share none.
        past_steps: how many preceding rows of its episode a row is read with.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        marks: torch.Tensor,
        values: torch.Tensor | None = None,
        headers: torch.Tensor | None = None,
        past_steps: int = 0,
    ) -> None:
        self._rows, self._marks, self._past_steps = rows.numpy(), marks.numpy(), past_steps
        self._values = _NO_VALUES if values is None else values.numpy()
        self._headers = _NO_HEADERS if headers is None else headers.numpy()
        self._factors = factors(rows.shape[1])

    def clear(
        self, ring: Ring, num_steps: int, lanes: Sequence[int] | None, commits: Commits
    ) -> None:
        """Clears the marks of the slots of the next S steps: they hold no row until `seal`.

        Steps that are committed already are left alone.

        Args:
            ring: of M slots; not changed.
            num_steps: S.
            lanes: the lanes that are written; None is all of them.
            commits: of the lanes, by `Commits.publish_lanes`.
        """
        room, known = ring.ring_steps, ring._arrays[2]
        committed = commits._selector, commits._tables
        _clear(self._marks, known, *committed, room, _written(ring, lanes), num_steps)

    def seal(
        self,
        ring: Ring,
        num_steps: int,
        lanes: Sequence[int] | None = None,
        priorities: PriorityWords | None = None,
        commits: Commits | None = None,
        write_count: int = 0,
        trajectories: np.ndarray = _NO_WORDS,
    ) -> None:
        """Seals the newest S steps, which were written: first their checksums, then their marks.

        Args:
            ring: of M slots, with these steps.
            num_steps: S. Of more than T steps, those before the last T serve at most as frames.
            lanes: the lanes that were written; None is all of them.
            priorities: of the rows, if they are kept; the new rows get the largest.
            commits: where all lanes are committed afterwards, as by `Commits.publish_lanes`; None leaves
                that for later.
            write_count: of the commit.
            trajectories: of the commit.
        """
        num_marked = min(num_steps, ring.steps_per_lane + self._past_steps)
        written = _written(ring, lanes)
        words = _NO_WORDS if priorities is None else priorities._words
        table = self._rows, self._marks, self._values, self._headers, words
        commit: _Commit = _NO_COMMIT if commits is None else commits._arrays
        _mark(
            *table,
            *ring._arrays,
            written,
            num_marked,
            self._factors,
            *commit,
            write_count,
            trajectories,
        )

    def check(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether the checksum of each slot is right, `[n]` bool; False if it has no row."""
        out = np.empty(len(slots), bool)
        _check(self._rows, self._marks, slots.numpy(), self._factors, out)
        return torch.from_numpy(out)

    def check_next(self, slots: torch.Tensor, num_lanes: int, *, tips: bool) -> torch.Tensor:
        """Returns whether the next values that rows name are intact, `[n]` bool.

        Args:
            slots: `[n]` int64.
            num_lanes: E.
            tips: whether to check the rows' own next values, in tips; otherwise those of the rows before.
        """
        out = np.empty(len(slots), bool)
        table = self._headers, self._marks, self._values, num_lanes
        _check_next(*table, slots.numpy(), tips, self._factors, out)
        return torch.from_numpy(out)

    def hold(self, ring: Ring, slots: torch.Tensor) -> bool:
        """Returns whether slots hold the rows that an index expects; ordered after all earlier reads.

        Args:
            ring: of M slots.
            slots: int64 of any shape.
        """
        where = slots.numpy().reshape(-1), self._past_steps
        return _hold(self._marks, *ring._arrays, *where)


def _written(ring: Ring, lanes: Sequence[int] | None) -> np.ndarray:
    return ring._all_lanes if lanes is None else np.asarray(lanes)


class Commits:
    """Words that are replaced atomically: there are two tables, and a selector word picks one.

    Args:
        selector: `[1]` int64, the number of the last commit; its lowest bit selects the table.
        tables: `[2, K + 1]` int64, whose last word is a checksum of the others and the number.
    """

    def __init__(self, selector: torch.Tensor, tables: torch.Tensor) -> None:
        self._selector, self._tables = selector.numpy(), tables.numpy()
        self._factors = factors(tables.shape[1] - 1)
        self._arrays = self._selector, self._tables, self._factors

    @property
    def number(self) -> int:
        """The number of the last commit."""
        found: int = self._selector.item()
        return found

    def publish(self, words: torch.Tensor) -> None:
        """Commits `[K]` int64 words."""
        _publish(*self._arrays, words.numpy())

    def publish_lanes(self, ring: Ring, write_count: int, trajectories: np.ndarray) -> None:
        """Commits a number, and for each lane its cursor, tail, open flag and trajectory number.

        Args:
            ring: holds the lanes.
            write_count: the number.
            trajectories: `[E]` int64.
        """
        _publish_lanes(*self._arrays, ring._arrays[2], write_count, trajectories)

    def read(self) -> torch.Tensor | None:
        """Returns a copy of the words `[K]` of the last commit, or None if its checksum is wrong."""
        words = np.empty(self._tables.shape[1] - 1, np.int64)
        is_whole = _read(*self._arrays, words)
        return torch.from_numpy(words) if is_whole else None


class PriorityWords:
    """Priorities of rows, each packed into one word with a check of it and the mark of its row.

    A word is stored atomically, so a killed process leaves the old priority or the new one. And a
    priority of the previous row in a slot is never taken for that of the present one.

    Args:
        words: `[M + 1]` int64, in memory shared with other processes: for each slot, and for the largest
            priority.
        marks: `[M, 2]` int64, as in `MarkedRows`.
    """

    def __init__(self, words: torch.Tensor, marks: torch.Tensor) -> None:
        self._words, self._marks = words.numpy(), marks.numpy()
        self._factors = factors(1)

    @property
    def is_new(self) -> bool:
        """Whether the largest priority was never set: the file is all zeros there."""
        return not self._words[-1]

    def put(self, slots: torch.Tensor, priorities: torch.Tensor) -> None:
        """Stores priorities of rows: `[n]` int64 slots, M for the largest priority, and `[n]` float32."""
        bits = priorities.contiguous().numpy().view(np.uint32)
        _put(self._words, self._marks, slots.numpy(), bits, self._factors)

    def get(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the stored priorities `[n]` float32 of slots as in `put`; NaN if damaged or missing."""
        bits = np.empty(len(slots), np.uint32)
        _get(self._words, self._marks, slots.numpy(), self._factors, bits)
        return torch.from_numpy(bits.view(np.float32))

    def stamps(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns a number for the row in each slot, `[n]` int32; another row there has another one."""
        found = np.empty(len(slots), np.int32)
        _stamps(self._marks, slots.numpy(), found)
        return torch.from_numpy(found)

    def renew(
        self, table: RawPriorities, slots: torch.Tensor, ring: Ring, tails: np.ndarray
    ) -> tuple[float, torch.Tensor]:
        """Takes in rows that were sealed, with the largest priority, and drops evicted rows.

        Args:
            table: of M slots; gets the new rows' priority and `stamps`.
            slots: `[B]` int64; negative ones are ignored.
            ring: of the M slots.
            tails: `[E]` int64, the tails when evicted rows were last dropped.

        Returns:
            the priority of the new rows, or -1, with nothing changed, if a slot is not below M; and the
            slots of the dropped rows.
        """
        known = ring._arrays[2], ring.ring_steps
        priority, evicted = _renew(*table._arrays, self._marks, slots.numpy(), *known, tails)
        return float(priority), torch.from_numpy(evicted)

    def news(
        self, ring: Ring, known: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the priorities of live rows that another process has changed.

        Args:
            ring: of the M slots.
            known: `[M]` int64, the words at the last call; None before the first.

        Returns:
            `[n]` int64 slots whose words differ, `[n]` int64 these words, and `[n]` float32 their
            priorities as in `get`.
        """
        slots, words, bits = _news(
            self._words,
            self._marks,
            ring._arrays[2],
            ring.ring_steps,
            _NO_WORDS if known is None else known.numpy(),
            self._factors,
        )
        found = torch.from_numpy(bits.view(np.float32))
        return torch.from_numpy(slots), torch.from_numpy(words), found


@inlined
def _added(total: int, word: int, factor: int) -> int:
    """Adds a word to the sum of a checksum."""
    return total + factor * (word ^ ((word >> _SHIFT_3) & _LEFT_3))


@inlined
def _finished(total: int) -> int:
    total = (total ^ ((total >> _SHIFT_1) & _LEFT_1)) * _FACTOR_1
    total = (total ^ ((total >> _SHIFT_2) & _LEFT_2)) * _FACTOR_2
    return total ^ ((total >> _SHIFT_3) & _LEFT_3)


@inlined
def _sealed(bits: int, mark: int, factors: np.ndarray) -> int:
    """Returns the word of a priority: its bits below, the check above."""
    total = _finished(_added(_added(START, bits, factors[0]), mark, factors[1]))
    return (total & ~LOWER_HALF) | bits


@inlined
def _opened(word: int, mark: int, factors: np.ndarray) -> int:
    """Returns the priority bits of a word; those of NaN if its check does not match the mark."""
    bits = word & LOWER_HALF
    is_one = bits < INFINITY_BITS or bits == NEGATIVE_ZERO_BITS
    return bits if is_one and word == _sealed(bits, mark, factors) else NAN_BITS


@compiled
def _largest(words: np.ndarray, factors: np.ndarray) -> int:
    """Returns the bits of the priority of new rows: the largest, 1 before there is any."""
    bits = _opened(words[len(words) - 1], 0, factors)
    return bits if 0 < bits < INFINITY_BITS else ONE_BITS


@compiled
def _checksum(words: np.ndarray, mark: int, slot: int, factors: np.ndarray) -> int:
    total = _added(_added(START, mark, factors[0]), slot, factors[1])
    for w in range(len(words)):
        total = _added(total, words[w], factors[w + 2])
    return _finished(total)


@inlined
def _is_of(mark: int, step: int) -> bool:
    """Returns whether a mark is that of a row with this step."""
    return mark & PRESENT != 0 and mark >> STEP_BIT == step


@inlined
def _step_in(lanes: np.ndarray, room: int, lane: int, slot: int) -> int:
    """Returns the newest step that belongs in a slot of a lane."""
    newest = lanes[lane, CURSOR] - 1
    return newest - (newest - slot // len(lanes)) % room


@compiled
def _checksums(
    rows: np.ndarray, marks: np.ndarray, slots: np.ndarray, factors: np.ndarray, out: np.ndarray
) -> None:
    for i in range(len(rows)):
        out[i] = _checksum(rows[i], marks[i], slots[i], factors)


@compiled
def _clear(
    marks: np.ndarray,
    lanes: np.ndarray,
    selector: np.ndarray,
    tables: np.ndarray,
    room: int,
    written: np.ndarray,
    num_steps: int,
) -> None:
    for i in range(len(written)):
        lane = written[i]
        cursor = lanes[lane, CURSOR]
        if tables[selector[0] & 1, 1 + lane] > cursor:
            continue
        # Of more than R steps, the last R reach every slot.
        start = cursor + max(num_steps - room, 0)
        place = start % room
        for _ in range(start, cursor + num_steps):
            marks[place * len(lanes) + lane, 0] = 0
            # A division takes longer than all the rest.
            place = place + 1 if place + 1 < room else 0
    fenced()


@compiled
def _publish(
    selector: np.ndarray, tables: np.ndarray, factors: np.ndarray, words: np.ndarray
) -> None:
    number = selector[0] + 1
    table = tables[number & 1]
    if len(words) != len(table) - 1:
        raise ValueError("as many words must be published as a table holds")
    # All earlier stores come before those to the table.
    fenced()
    table[: len(words)] = words
    table[len(words)] = _checksum(words, number, number & 1, factors)
    fenced()
    selector[0] = number
    fenced()


@compiled
def _publish_lanes(
    selector: np.ndarray,
    tables: np.ndarray,
    factors: np.ndarray,
    lanes: np.ndarray,
    write_count: int,
    trajectories: np.ndarray,
) -> None:
    words = np.empty(1 + 4 * len(lanes), np.int64)
    words[0] = write_count
    for lane in range(len(lanes)):
        words[1 + lane] = lanes[lane, CURSOR]
        words[1 + len(lanes) + lane] = lanes[lane, TAIL]
        words[1 + 2 * len(lanes) + lane] = lanes[lane, OPEN]
        words[1 + 3 * len(lanes) + lane] = trajectories[lane]
    _publish(selector, tables, factors, words)


@compiled
def _mark(
    table: np.ndarray,
    marks: np.ndarray,
    values: np.ndarray,
    headers: np.ndarray,
    words: np.ndarray,
    episode: np.ndarray,
    spans: np.ndarray,
    lanes: np.ndarray,
    room: int,
    written: np.ndarray,
    num_steps: int,
    factors: np.ndarray,
    selector: np.ndarray,
    tables: np.ndarray,
    table_factors: np.ndarray,
    write_count: int,
    trajectories: np.ndarray,
) -> None:
    new = np.empty((len(written), num_steps), np.int64)
    largest = _largest(words, factors) if len(words) else 0
    for i in range(len(written)):
        lane, tail = written[i], lanes[written[i], TAIL]
        first = lanes[lane, CURSOR] - num_steps
        place = first % room
        for s in range(num_steps):
            step, slot = first + s, place * len(lanes) + lane
            place = place + 1 if place + 1 < room else 0
            # Evicted rows belong to the episode of the oldest live row, or to none that is known.
            entry = episode[slot if step >= tail else tail % room * len(lanes) + lane]
            if step < max(spans[entry, FIRST], 0):
                new[i, s] = 0
                continue
            mark = (step << STEP_BIT) + PRESENT
            if spans[entry, FIRST] == step:
                mark += BEGINS
            if spans[entry, LAST] == step and spans[entry, FINISHED] != 0:
                mark += ENDS
            new[i, s] = mark
            marks[slot, 1] = _checksum(table[slot], mark, slot, factors)
            if values.size:
                entry, check = headers[slot] >> ENTRY_BIT, marks[slot, 1]
                if entry > 0:
                    values[entry, -1] = _checksum(values[entry, :-1], check, slot, factors)
                if s + 1 == num_steps:
                    tip = tip_of(headers[slot], lane, len(lanes))
                    values[tip, -1] = _checksum(values[tip, :-1], check, slot, factors)
            if len(words):
                words[slot] = _sealed(largest, mark, factors)
    fenced()
    for i in range(len(written)):
        place = (lanes[written[i], CURSOR] - num_steps) % room
        for s in range(num_steps):
            marks[place * len(lanes) + written[i], 0] = new[i, s]
            place = place + 1 if place + 1 < room else 0
    if len(selector):
        _publish_lanes(selector, tables, table_factors, lanes, write_count, trajectories)
    fenced()


@compiled
def _check(
    table: np.ndarray, marks: np.ndarray, slots: np.ndarray, factors: np.ndarray, out: np.ndarray
) -> None:
    for i in range(len(slots)):
        slot = slots[i]
        if not 0 <= slot < len(table):
            raise IndexError("slots must be those of the ring, below the number of its slots")
        mark = marks[slot, 0]
        is_right = _checksum(table[slot], mark, slot, factors) == marks[slot, 1]
        out[i] = mark & PRESENT != 0 and is_right


@compiled
def _check_next(
    headers: np.ndarray,
    marks: np.ndarray,
    values: np.ndarray,
    num_lanes: int,
    slots: np.ndarray,
    tips: bool,
    factors: np.ndarray,
    out: np.ndarray,
) -> None:
    for i in range(len(slots)):
        slot = slots[i]
        header = headers[slot]
        entry = tip_of(header, slot % num_lanes, num_lanes) if tips else header >> ENTRY_BIT
        out[i] = not tips and header & CONTINUES != 0
        if 0 < entry < len(values):
            check = _checksum(values[entry, :-1], marks[slot, 1], slot, factors)
            out[i] = values[entry, -1] == check


@compiled
def _hold(
    marks: np.ndarray,
    episode: np.ndarray,
    spans: np.ndarray,
    lanes: np.ndarray,
    room: int,
    slots: np.ndarray,
    past_steps: int,
) -> bool:
    newest = np.empty(len(lanes), np.int64)
    for lane in range(len(lanes)):
        newest[lane] = (lanes[lane, CURSOR] - 1) % room
    fenced()
    for i in range(len(slots)):
        if not 0 <= slots[i] < len(marks):
            raise IndexError("slots must be those of the ring, below the number of its slots")
        lane, place = 0, slots[i]
        if len(lanes) > 1:
            place = slots[i] // len(lanes)
            lane = slots[i] - place * len(lanes)
        back = newest[lane] - place
        step = lanes[lane, CURSOR] - 1 - (back if back >= 0 else back + room)
        first, slot = step, slots[i]
        if past_steps > 0 and step >= lanes[lane, TAIL]:
            first = max(step - past_steps, spans[episode[slot], FIRST])
        while step >= first:
            if not _is_of(marks[slot, 0], step):
                return False
            step -= 1
            slot = slot - len(lanes) if slot >= len(lanes) else slot - len(lanes) + len(marks)
    return True


@compiled
def _read(selector: np.ndarray, tables: np.ndarray, factors: np.ndarray, words: np.ndarray) -> bool:
    for _ in range(_MOST_TRIES):
        fenced()
        number = selector[0]
        fenced()
        table = tables[number & 1]
        words[:] = table[: len(words)]
        check = table[len(words)]
        if check == _checksum(words, number, number & 1, factors):
            return True
        fenced()
        # The writer may have moved on meanwhile, and reused this table.
        if selector[0] == number:
            return False
    return False


@inlined
def _stamp(mark: int) -> int:
    # From 1: 0 is the stamp of a slot that never held a row.
    mixed = (mark >> STEP_BIT) * STAMP_FACTOR >> STAMP_BIT
    return (mixed & MOST_STAMP) | 1


@compiled
def _put(
    words: np.ndarray, marks: np.ndarray, slots: np.ndarray, bits: np.ndarray, factors: np.ndarray
) -> None:
    for i in range(len(slots)):
        mark = marks[slots[i], 0] if slots[i] < len(marks) else 0
        words[slots[i]] = _sealed(np.int64(bits[i]), mark, factors)


@compiled
def _get(
    words: np.ndarray, marks: np.ndarray, slots: np.ndarray, factors: np.ndarray, bits: np.ndarray
) -> None:
    for i in range(len(slots)):
        mark = marks[slots[i], 0] if slots[i] < len(marks) else 0
        bits[i] = _opened(words[slots[i]], mark, factors)


@compiled
def _stamps(marks: np.ndarray, slots: np.ndarray, found: np.ndarray) -> None:
    for i in range(len(slots)):
        found[i] = _stamp(marks[slots[i], 0])


@compiled
def _renew(
    priorities: np.ndarray,
    stamps: np.ndarray,
    largest: np.ndarray,
    marks: np.ndarray,
    slots: np.ndarray,
    lanes: np.ndarray,
    room: int,
    tails: np.ndarray,
) -> tuple[float, np.ndarray]:
    num_lanes, num_evicted = len(lanes), 0
    for i in range(len(slots)):
        if slots[i] >= len(priorities):
            return np.float32(-1), slots[:0].copy()
    for lane in range(num_lanes):
        first = max(tails[lane], lanes[lane, CURSOR] - room)
        num_evicted += max(lanes[lane, TAIL] - first, 0)
    evicted, row = np.empty(num_evicted, np.int64), 0
    given = largest[0] if largest[0] > 0 else np.float32(1)
    for i in range(len(slots)):
        slot = slots[i]
        if slot >= 0:
            priorities[slot], stamps[slot] = given, _stamp(marks[slot, 0])
    for lane in range(num_lanes):
        # Skips steps that the writer has overwritten since.
        for step in range(max(tails[lane], lanes[lane, CURSOR] - room), lanes[lane, TAIL]):
            evicted[row] = step % room * num_lanes + lane
            priorities[evicted[row]] = ABSENT
            row += 1
    return given, evicted


@compiled
def _news(
    words: np.ndarray,
    marks: np.ndarray,
    lanes: np.ndarray,
    room: int,
    known: np.ndarray,
    factors: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    slots, found = np.empty(len(marks), np.int64), np.empty(len(marks), np.int64)
    bits, num = np.empty(len(marks), np.uint32), 0
    fenced()
    for slot in range(len(marks)):
        word = words[slot]
        if len(known) and word == known[slot]:
            continue
        lane = slot % len(lanes)
        step = _step_in(lanes, room, lane, slot)
        mark = marks[slot, 0]
        # A row that is not committed yet is returned later.
        if _is_of(mark, step) and step >= lanes[lane, TAIL]:
            slots[num], found[num], bits[num] = slot, word, _opened(word, mark, factors)
            num += 1
    return slots[:num].copy(), found[:num].copy(), bits[:num].copy()
