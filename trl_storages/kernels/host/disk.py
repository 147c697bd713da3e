"""Rows that carry their step and their checksum, and words that are there as a whole or not at all.

Letters: W words of 8 bytes a row, M slots, n rows, L lanes and S steps written now, E lanes
(environments), H histories, K words of a table.

What another process, or one that is started after a kill, may see in memory is ordered by fences. See
`kernels.marks` for what marks and checksums are. Sums wrap around, as all arithmetic on int64 does here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, fenced, inlined
from trl_storages.kernels.host.ring import Ring
from trl_storages.kernels.marks import (
    BEGINS,
    ENDS,
    FINISH,
    HALF_BITS,
    HISTORY_BIT,
    LOWER_HALF,
    MOST_STEPS,
    PRESENT,
    START,
    STEP_BIT,
    factors,
)
from trl_storages.kernels.ring_tables import CURSOR, FINISHED, FIRST, LAST, OPEN, TAIL

__all__ = [
    "Commits",
    "MarkedRows",
    "checksums",
    "fence",
    "orders_stores",
    "seal_priorities",
    "unseal_priorities",
]

(_SHIFT_1, _LEFT_1, _FACTOR_1), (_SHIFT_2, _LEFT_2, _FACTOR_2), (_SHIFT_3, _LEFT_3, _) = FINISH
_STEP_MASK = MOST_STEPS - 1
# Of a selector that a fast writer moves on while its table is copied.
_MOST_TRIES = 1000


def orders_stores() -> bool:
    """Returns whether `fence` orders what other processes see on this machine."""
    return fence()


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
    """Rows with a mark and a checksum each, in memory that other processes see.

    Args:
        rows: `[M, W]` int64, contiguous, on the CPU.
        marks: `[M, 2]` int64, of each slot the mark, 0 where there is no row, and the checksum.
    """

    def __init__(self, rows: torch.Tensor, marks: torch.Tensor) -> None:
        self._rows, self._marks = rows.numpy(), marks.numpy()
        self._factors = factors(rows.shape[1])

    def clear(self, ring: Ring, num_steps: int, lanes: Sequence[int] | None = None) -> None:
        """Takes away the marks of where the next S steps go: until `seal` no row is there.

        Args:
            ring: of M slots; it is not changed.
            num_steps: S. Of more than T steps the last T find room.
            lanes: which are written; None is all of them.
        """
        most_live, room = ring.steps_per_lane, ring.ring_steps
        _clear(self._marks, ring._arrays[2], most_live, room, _written(ring, lanes), num_steps)

    def seal(
        self, ring: Ring, history: int, num_steps: int, lanes: Sequence[int] | None = None
    ) -> None:
        """Gives the newest S steps, which were written, their checksums, and then their marks.

        Args:
            ring: of M slots, that has taken them in.
            history: the number that the marks carry.
            num_steps: S, as in `clear`.
            lanes: likewise.
        """
        most_live, room = ring.steps_per_lane, ring.ring_steps
        num_marked, written = min(num_steps, most_live), _written(ring, lanes)
        table = self._rows, self._marks
        _mark(*table, *ring._arrays, room, written, num_marked, history, self._factors)

    def check(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether the checksum of each slot is right, `[n]` bool; of no row it never is."""
        out = np.empty(len(slots), bool)
        _check(self._rows, self._marks, slots.numpy(), self._factors, out)
        return torch.from_numpy(out)

    def hold(self, ring: Ring, slots: torch.Tensor) -> bool:
        """Returns whether slots hold the rows that an index takes them for, after all reads before.

        Args:
            ring: of M slots.
            slots: int64 of any shape.
        """
        _, _, lanes = ring._arrays
        return _hold(self._marks, lanes, ring.ring_steps, slots.numpy().reshape(-1))

    def flags(
        self,
        tails: torch.Tensor,
        cursors: torch.Tensor,
        histories: torch.Tensor,
        firsts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reads from marks what an index must know of rows.

        Args:
            tails: `[E]` int64, of each lane the first step that is read.
            cursors: `[E]` int64, the step after the last one.
            histories: `[H]` int64, the numbers of histories, ascending.
            firsts: `[H, E]` int64, the first step of each. A step is that of the last one that began
                before it or with it.

        Returns:
            three `[n]` bool, lane by lane and the oldest step first: whether the row ends its episode by
            `done`, whether it begins one, and whether the mark is of this step and its history.
        """
        size = int((cursors - tails).sum())
        done, begins, right = (np.empty(size, bool) for _ in range(3))
        known = (histories.numpy(), firsts.contiguous().numpy())
        _flags(self._marks, tails.numpy(), cursors.numpy(), *known, done, begins, right)
        return torch.from_numpy(done), torch.from_numpy(begins), torch.from_numpy(right)


def _written(ring: Ring, lanes: Sequence[int] | None) -> np.ndarray:
    return ring._all_lanes if lanes is None else np.asarray(lanes)


class Commits:
    """Words that are replaced as a whole: in one of two tables, which one word selects.

    Args:
        selector: `[1]` int64, the number of the last commit; its lowest bit selects the table.
        tables: `[2, K + 1]` int64, whose last words are checksums of the others and the number.
    """

    def __init__(self, selector: torch.Tensor, tables: torch.Tensor) -> None:
        self._selector, self._tables = selector.numpy(), tables.numpy()
        self._factors = factors(tables.shape[1] - 1)

    @property
    def number(self) -> int:
        """The number of the last commit."""
        return self._selector.item()

    def publish(self, words: torch.Tensor) -> None:
        """Commits `[K]` int64 words."""
        _publish(self._selector, self._tables, words.numpy(), self._factors)

    def publish_lanes(
        self, ring: Ring, history: int, write_count: int, trajectories: np.ndarray
    ) -> None:
        """Commits two numbers, and of each lane its cursor, tail, whether it is open, and a number.

        Args:
            ring: knows the lanes.
            history: the first word.
            write_count: the second one.
            trajectories: `[E]` int64.
        """
        _publish_lanes(
            self._selector,
            self._tables,
            ring._arrays[2],
            history,
            write_count,
            trajectories,
            self._factors,
        )

    def read(self) -> torch.Tensor | None:
        """Returns a copy of the words `[K]` of the last commit, or None if they are torn."""
        words = np.empty(self._tables.shape[1] - 1, np.int64)
        is_whole = _read(self._selector, self._tables, words, self._factors)
        return torch.from_numpy(words) if is_whole else None


def seal_priorities(priorities: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Returns words that hold priorities and a check over them and the marks of their rows.

    Args:
        priorities: `[n]` float32.
        marks: `[n]` int64.

    Returns:
        `[n]` int64: the priority below, the check above.
    """
    words = np.empty(len(priorities), np.int64)
    bits = priorities.contiguous().numpy().view(np.uint32)
    _seal(bits, marks.numpy(), factors(1), words)
    return torch.from_numpy(words)


def unseal_priorities(
    words: torch.Tensor, marks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `[n]` float32 priorities that words hold, and `[n]` bool: whether they are of the marks."""
    bits, valid = np.empty(len(words), np.uint32), np.empty(len(words), bool)
    _unseal(words.numpy(), marks.numpy(), factors(1), bits, valid)
    return torch.from_numpy(bits.view(np.float32)), torch.from_numpy(valid)


@compiled
def fence() -> bool:
    """Orders all reads and writes before it and after it; returns whether it does."""
    return fenced()


@inlined
def _added(total: int, word: int, factor: int) -> int:
    """Adds a word to a sum that becomes a checksum."""
    return total + factor * (word ^ ((word >> _SHIFT_3) & _LEFT_3))


@inlined
def _finished(total: int) -> int:
    total = (total ^ ((total >> _SHIFT_1) & _LEFT_1)) * _FACTOR_1
    total = (total ^ ((total >> _SHIFT_2) & _LEFT_2)) * _FACTOR_2
    return total ^ ((total >> _SHIFT_3) & _LEFT_3)


@compiled
def _checksum(words: np.ndarray, mark: int, slot: int, factors: np.ndarray) -> int:
    total = _added(_added(START, mark, factors[0]), slot, factors[1])
    for w in range(len(words)):
        total = _added(total, words[w], factors[w + 2])
    return _finished(total)


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
    most_live: int,
    room: int,
    written: np.ndarray,
    num_steps: int,
) -> None:
    for i in range(len(written)):
        lane = written[i]
        cursor = lanes[lane, CURSOR]
        for step in range(cursor + max(num_steps - most_live, 0), cursor + num_steps):
            marks[step % room * len(lanes) + lane, 0] = 0
    fenced()


@compiled
def _mark(
    table: np.ndarray,
    marks: np.ndarray,
    episode: np.ndarray,
    spans: np.ndarray,
    lanes: np.ndarray,
    room: int,
    written: np.ndarray,
    num_steps: int,
    history: int,
    factors: np.ndarray,
) -> None:
    new = np.empty((len(written), num_steps), np.int64)
    for i in range(len(written)):
        lane = written[i]
        first = lanes[lane, CURSOR] - num_steps
        for s in range(num_steps):
            step = first + s
            slot = step % room * len(lanes) + lane
            entry = episode[slot]
            mark = (history << HISTORY_BIT) + (step << STEP_BIT) + PRESENT
            if spans[entry, FIRST] == step:
                mark += BEGINS
            if spans[entry, LAST] == step and spans[entry, FINISHED] != 0:
                mark += ENDS
            new[i, s] = mark
            marks[slot, 1] = _checksum(table[slot], mark, slot, factors)
    fenced()
    for i in range(len(written)):
        first = lanes[written[i], CURSOR] - num_steps
        for s in range(num_steps):
            marks[(first + s) % room * len(lanes) + written[i], 0] = new[i, s]
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
def _hold(marks: np.ndarray, lanes: np.ndarray, room: int, slots: np.ndarray) -> bool:
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
        mark = marks[slots[i], 0]
        if mark & PRESENT == 0 or (mark >> STEP_BIT) & _STEP_MASK != step:
            return False
    return True


@compiled
def _flags(
    marks: np.ndarray,
    tails: np.ndarray,
    cursors: np.ndarray,
    histories: np.ndarray,
    firsts: np.ndarray,
    done: np.ndarray,
    begins: np.ndarray,
    right: np.ndarray,
) -> None:
    num_lanes, num_histories = len(tails), len(histories)
    room = len(marks) // num_lanes
    # From which step on the last history that owns it is this one or one after it.
    reached = np.empty(num_histories, np.int64)
    row = 0
    for lane in range(num_lanes):
        for h in range(num_histories - 1, -1, -1):
            is_last = h == num_histories - 1
            reached[h] = firsts[h, lane] if is_last else min(firsts[h, lane], reached[h + 1])
        owner = -1
        for step in range(tails[lane], cursors[lane]):
            while owner + 1 < num_histories and reached[owner + 1] <= step:
                owner += 1
            mark = marks[step % room * num_lanes + lane, 0]
            done[row], begins[row] = mark & ENDS != 0, mark & BEGINS != 0
            is_right = mark & PRESENT != 0 and (mark >> STEP_BIT) & _STEP_MASK == step
            right[row] = is_right and owner >= 0 and mark >> HISTORY_BIT == histories[owner]
            row += 1


@compiled
def _publish(
    selector: np.ndarray, tables: np.ndarray, words: np.ndarray, factors: np.ndarray
) -> None:
    number = selector[0] + 1
    table = tables[number & 1]
    if len(words) != len(table) - 1:
        raise ValueError("as many words must be published as a table holds")
    # What was written before is there before the words say so.
    fenced()
    for k in range(len(words)):
        table[k] = words[k]
    table[len(words)] = _checksum(words, number, number & 1, factors)
    fenced()
    selector[0] = number
    fenced()


@compiled
def _publish_lanes(
    selector: np.ndarray,
    tables: np.ndarray,
    lanes: np.ndarray,
    history: int,
    write_count: int,
    trajectories: np.ndarray,
    factors: np.ndarray,
) -> None:
    number, num_lanes = selector[0] + 1, len(lanes)
    table = tables[number & 1]
    num_words = len(table) - 1
    if 2 + 4 * num_lanes != num_words:
        raise ValueError("as many words must be published as a table holds")
    # What was written before is there before the words say so.
    fenced()
    table[0], table[1] = history, write_count
    for lane in range(num_lanes):
        table[2 + lane] = lanes[lane, CURSOR]
        table[2 + num_lanes + lane] = lanes[lane, TAIL]
        table[2 + 2 * num_lanes + lane] = lanes[lane, OPEN]
        table[2 + 3 * num_lanes + lane] = trajectories[lane]
    table[num_words] = _checksum(table[:num_words], number, number & 1, factors)
    fenced()
    selector[0] = number
    fenced()


@compiled
def _read(selector: np.ndarray, tables: np.ndarray, words: np.ndarray, factors: np.ndarray) -> bool:
    for _ in range(_MOST_TRIES):
        fenced()
        number = selector[0]
        fenced()
        table = tables[number & 1]
        for k in range(len(words)):
            words[k] = table[k]
        check = table[len(words)]
        if check == _checksum(words, number, number & 1, factors):
            return True
        fenced()
        # The writer may have gone on meanwhile, to where this was read.
        if selector[0] == number:
            return False
    return False


@inlined
def _priority_check(bits: int, mark: int, factors: np.ndarray) -> int:
    total = _finished(_added(_added(START, bits, factors[0]), mark, factors[1]))
    return (total >> HALF_BITS) & LOWER_HALF


@compiled
def _seal(bits: np.ndarray, marks: np.ndarray, factors: np.ndarray, words: np.ndarray) -> None:
    for i in range(len(bits)):
        value = np.int64(bits[i])
        words[i] = (_priority_check(value, marks[i], factors) << HALF_BITS) | value


@compiled
def _unseal(
    words: np.ndarray, marks: np.ndarray, factors: np.ndarray, bits: np.ndarray, valid: np.ndarray
) -> None:
    for i in range(len(words)):
        value = words[i] & LOWER_HALF
        bits[i] = value
        check = (words[i] >> HALF_BITS) & LOWER_HALF
        valid[i] = check == _priority_check(value, marks[i], factors)
