"""Frames that are stored once: gathers them as stacks, and checks new stacks, in compiled loops.

Letters: N rows, E lanes (environments), D steps of the past, B rows picked, p stacks of k frames, L lanes
and S steps written now. In the loops `room` is R, the ring steps per lane.

The frames of the last steps before the oldest live row of lane l are in the past: those of step s in its
row `(s % D) * E + l`. The past may be the table of the rows itself, with D its ring steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import (
    LINE,
    address,
    are_same_bytes,
    array_at,
    compiled,
    contiguous,
    copy_bytes,
    fenced,
    inlined,
    prefetch,
    stream_line,
)
from trl_storages.kernels.host.rows import RowTable, not_found
from trl_storages.kernels.host.writing import NewRows, is_cut, is_last, row_of
from trl_storages.kernels.stack_fields import (
    COUNT,
    IS_CONSTANT,
    NEXT,
    NOT_CONTINUED,
    NOT_PADDED,
    NOT_SHIFTED,
    PAST,
    PLACE,
    ROOT,
    SIZE,
    STORED,
)
from trl_storages.kernels.tables import CURSOR, FIRST, OPEN, TAIL, Block

if TYPE_CHECKING:
    from trl_storages.kernels.host.ring import Ring

__all__ = ["FrameTable"]

_WORD = 8  # bytes
_ADDRESS, _STRIDE = 0, 1
_MOST_AHEAD = 512  # bytes of a frame to prefetch; the processor prefetches the rest itself
# Larger batches leave the caches before they are used, so they are written past them.
_LARGE = 1 << 22  # bytes


class FrameTable:
    """Builds stacks from single frames.

    Args:
        rows: `[N, *]` int64 as they are stored, contiguous, on the CPU.
        past: `[D * E, *]` int64, contiguous, on the CPU.
        fields: `[p, 8]` int64, the stacks, as `kernels.stack_fields` describes them.
    """

    def __init__(self, rows: torch.Tensor, past: torch.Tensor, fields: np.ndarray) -> None:
        self._rows, self._past, self._fields = rows.numpy(), past.numpy(), fields
        # A frame of zeros, and its address.
        self._zeros = np.zeros(int(fields[:, SIZE].max()) // _WORD + 1, np.int64)
        self._zeros_at = self._zeros.ctypes.data

    def fill(
        self,
        ring: Ring,
        table: RowTable,
        stacks: np.ndarray,
        slots: torch.Tensor,
        following: torch.Tensor | None,
        seen: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
    ) -> bool:
        """Writes stacks to `seen`, and those under `next` to `after`.

        Args:
            ring: of the rows.
            table: of the rows, with their newest frames.
            stacks: `[q, 8]`, the root stacks of `fields` that are wanted themselves or under `next`.
            slots: `[B]` int64; negative ones count from the end.
            following: `[B]` int64, the rows whose stacks go under `next`; None takes the rows themselves.
            seen: q of `[B, *]` bytes, each row contiguous, or None where not wanted.
            after: the same, for the stacks under `next`.

        Returns:
            whether the newest frames are all in `after`; if not, `table` has to copy them.

        Raises:
            IndexError: a slot is outside of the rows.
        """
        slots = contiguous(slots)
        lenders = slots if following is None else contiguous(following)
        targets = np.array([[_lie(to) for to in pair] for pair in zip(seen, after, strict=True)])
        arrays = (self._rows, self._past, self._zeros_at)
        newest, may_move = table.next_values(lenders)
        batch: Any = slots.numel(), address(slots), address(lenders), newest
        if (wrong := _fill(ring._arrays, *arrays, stacks, targets, *batch)) >= 0:
            raise not_found(int(slots[wrong]), len(self._rows))
        return not may_move

    def find_breaks(self, ring: Ring, rows: NewRows, block: Block) -> torch.Tensor | None:
        """Finds rows whose stacks can't be rebuilt from single frames.

        Args:
            ring: of the rows.
            rows: the rows to be written, as they are read.
            block: which of them are which steps.

        Returns:
            `[L, S]` int64: 0, or 4 times the index of the field plus what is wrong with it, as listed in
            `kernels.stack_fields`. May be None if all are 0.
        """
        given = ring.given(rows, block)
        breaks = torch.empty(len(given[0]), block.num_steps, dtype=torch.int64)
        arrays = self._rows, self._past, self._zeros_at, self._fields
        is_any = _find_breaks(ring._arrays, given, rows.sources, *arrays, address(breaks))
        return breaks if is_any else None


def _lie(rows: torch.Tensor | None) -> tuple[int, int]:
    """Returns the address of the first row and the stride in bytes; zeros for None."""
    return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0) * rows.itemsize)


@inlined
def _past_frame_at(past: Any, num_lanes: int, lane: int, step: int, at: Any) -> Any:
    """Returns the address of the frame of stack `at` for a step before the oldest live row."""
    row = step % (len(past) // num_lanes) * num_lanes + lane
    return past.ctypes.data + row * past.shape[1] * _WORD + at[PAST]


@inlined
def _frame_at(
    rows: Any, past: Any, num_lanes: int, room: int, lane: int, step: int, tail: int, at: Any
) -> Any:
    """Returns the address of the frame of stack `at` for a step."""
    if step >= tail:
        row = step % room * num_lanes + lane
        return rows.ctypes.data + row * rows.shape[1] * _WORD + at[STORED]
    return _past_frame_at(past, num_lanes, lane, step, at)


@inlined
def _copy_past_caches(to: int, source: int, size: int, ahead: int) -> None:
    """Copies bytes that are not read again soon, and prefetches as many."""
    start = min(-to % LINE, size)
    end = size - (size - start) % LINE
    copy_bytes(to, source, start)
    for byte in range(start, end, LINE):
        stream_line(to + byte, source + byte, ahead + byte)
    copy_bytes(to + end, source + end, size - end)


@compiled
def _fill(
    ring: Any,
    rows: Any,
    past: Any,
    zeros: int,
    stacks: Any,
    targets: Any,
    num_slots: int,
    slots_at: int,
    following_at: int,
    newest_next: Any,
) -> int:
    """Returns the position of the first invalid slot, or -1."""
    episode, spans, lanes, room = ring
    slots = array_at(slots_at, num_slots, np.int64)
    following = array_at(following_at, num_slots, np.int64)
    num_lanes, num_rows, row_bytes = len(lanes), len(rows), rows.shape[1] * _WORD
    ring_slots, step_bytes = room * num_lanes, num_lanes * row_bytes
    is_large = len(slots) * (targets[:, 0, 1].sum() + targets[:, 1, 1].sum()) >= _LARGE
    for b in range(len(slots)):
        if b + 2 < len(slots):
            prefetch(episode, slots[b + 2] * _WORD)
        near = min(b + 1, len(slots) - 1)
        for under_next in range(2):
            slot = following[b] if under_next else slots[b]
            slot = slot + num_rows if slot < 0 else slot
            if slot < 0 or slot >= num_rows:
                return b
            lane, place = slot % num_lanes, slot // num_lanes
            newest, tail = lanes[lane, CURSOR] - 1, lanes[lane, TAIL]
            step, depth = newest - (newest - place) % room, 0
            if step >= tail:
                depth = step - spans[episode[slot], FIRST]
            else:
                # The slot holds no live row.
                step, tail = place, 0
            for f in range(len(stacks)):
                stack, size, count = stacks[f], stacks[f, SIZE], stacks[f, COUNT]
                to = targets[f, under_next, 0] + b * targets[f, under_next, 1]
                address = rows.ctypes.data + slot * row_bytes + stack[STORED]
                # The stack under `next` has not the oldest frame of a row, but one more.
                for j in range(under_next, count + under_next if to != 0 else 0):
                    back, source = count - 1 - j, zeros
                    if back < 0:
                        source = newest_next[b] + stack[NEXT]
                    elif back <= depth or stack[IS_CONSTANT] == 0:
                        at = step - min(back, depth)
                        source = address - (step - at) * step_bytes
                        if at < tail:
                            source = _past_frame_at(past, num_lanes, lane, at, stack)
                        elif place < step - at:
                            source += room * step_bytes
                    # Of the next row ask for each frame once, the newest under `next` included.
                    ahead = ((slots[near] - back * num_lanes) % ring_slots) * row_bytes
                    ahead += rows.ctypes.data + stack[STORED]
                    if under_next:
                        ahead = newest_next[near] + stack[NEXT] if back < 0 else source
                    if is_large:
                        _copy_past_caches(to, source, size, ahead)
                    else:
                        ahead -= rows.ctypes.data
                        for byte in range(0, min(size, _MOST_AHEAD), LINE):
                            prefetch(rows, ahead + byte)
                        copy_bytes(to, source, size)
                    to += size
    fenced()
    return -1


@compiled
def _find_breaks(
    ring: Any,
    given: Any,
    sources: Any,
    rows: Any,
    past: Any,
    zeros: int,
    stacks: Any,
    breaks_at: int,
) -> bool:
    episode, spans, lanes, room = ring
    written, num_steps = given[0], given[1]
    breaks = array_at(breaks_at, len(written) * num_steps, np.int64)
    found, num_lanes = False, len(lanes)
    for i in range(len(written)):
        lane, previous = written[i], 0
        goes_on, tail = lanes[lane, OPEN] != 0, lanes[lane, TAIL]
        newest = lanes[lane, CURSOR] - 1
        depth = newest - spans[episode[newest % room * num_lanes + lane], FIRST]
        for s in range(num_steps):
            row, step = row_of(given, i, s), i * num_steps + s
            begins = not goes_on or is_cut(given, i, s)
            breaks[step] = 0
            for f in range(len(stacks)):
                place, size, count = stacks[f, PLACE], stacks[f, SIZE], stacks[f, COUNT]
                root, is_constant = stacks[f, ROOT], stacks[f, IS_CONSTANT] != 0
                stack = sources[place, _ADDRESS] + row * sources[place, _STRIDE]
                wrong = 0
                if place != root:
                    before = sources[root, _ADDRESS] + row * sources[root, _STRIDE]
                    if not are_same_bytes(stack, before + size, (count - 1) * size):
                        wrong = NOT_SHIFTED
                elif begins:
                    padding = zeros if is_constant else stack + (count - 1) * size
                    for j in range(count - 1):
                        if not are_same_bytes(stack + j * size, padding, size):
                            wrong = NOT_PADDED
                elif s > 0:
                    before = sources[place, _ADDRESS] + previous * sources[place, _STRIDE]
                    if not are_same_bytes(stack, before + size, (count - 1) * size):
                        wrong = NOT_CONTINUED
                else:
                    for j in range(count - 1):
                        back, frame = count - 2 - j, zeros
                        if back <= depth or not is_constant:
                            at = newest - min(back, depth)
                            frame = _frame_at(
                                rows, past, num_lanes, room, lane, at, tail, stacks[f]
                            )
                        if not are_same_bytes(stack + j * size, frame, size):
                            wrong = NOT_CONTINUED
                if wrong and breaks[step] == 0:
                    breaks[step] = place * 4 + wrong
                    found = True
            goes_on = not is_last(given, row)
            previous = row
    return found
