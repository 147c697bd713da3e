"""Frames that are stored once, gathered as stacks and compared with them, in compiled loops.

Letters: N rows, E lanes (environments), D steps of the past, B rows picked, p stacks of k frames, L lanes
and S steps written now. In the loops `room` is R, the ring steps per lane.

The frames of step s of lane l, if it is one of the last D before the oldest live row, lie in row
`(s % D) * E + l` of the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled, inlined, prefetch
from trl_storages.kernels.host.memory import are_same_bytes, copy_bytes, is_set
from trl_storages.kernels.host.rows import check_found
from trl_storages.kernels.host.writing import NewRows
from trl_storages.kernels.ring_tables import CURSOR, FIRST, OPEN, TAIL
from trl_storages.kernels.stack_fields import (
    COUNT,
    IS_CONSTANT,
    NOT_CONTINUED,
    NOT_PADDED,
    NOT_SHIFTED,
    PAST,
    PLACE,
    ROOT,
    SIZE,
    STORED,
)

if TYPE_CHECKING:
    from trl_storages.kernels.host.ring import Ring

__all__ = ["FrameTable"]

_WORD = 8  # bytes
_ADDRESS, _STRIDE = 0, 1
_LINE = 64  # bytes that memory delivers at once
_MOST_AHEAD = 512  # bytes of a frame that are asked for early, the processor goes on by itself
_NO_CUTS, _NO_ORDER = np.zeros((0, 0), bool), np.zeros((0, 0), np.int64)


class FrameTable:
    """Puts stacks together from single frames.

    Args:
        rows: `[N, *]` int64 as they are stored, contiguous, on the CPU.
        past: `[D * E, *]` int64, likewise.
        fields: `[p, 7]` int64, the stacks, as `kernels.stack_fields` describes them.
    """

    def __init__(self, rows: torch.Tensor, past: torch.Tensor, fields: np.ndarray) -> None:
        self._rows, self._past, self._fields = rows.numpy(), past.numpy(), fields
        # What stands for a frame of zeros.
        self._zeros = np.zeros(int(fields[:, SIZE].max()) // _WORD + 1, np.int64)

    def fill(
        self,
        ring: Ring,
        stacks: np.ndarray,
        slots: torch.Tensor,
        following: torch.Tensor,
        newest: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
    ) -> None:
        """Copies stacks to where they are wanted.

        Args:
            ring: of the rows.
            stacks: `[q, 7]`, those of `fields` that are wanted.
            slots: `[B]` int64; negative ones count from the end.
            following: `[B]` int64, the rows that lend what lies under `next`.
            newest: q of `[B, *]`, of which each row is contiguous: the newest frames of stacks under
                `next`; others are not looked at.
            out: q of `[B, *]`, likewise.

        Raises:
            IndexError: a slot lies beyond the rows.
        """
        pairs = zip(out, newest, strict=True)
        targets = np.array([(*_lie(to), *_lie(last)) for to, last in pairs], np.int64)
        arrays = (self._rows, self._past, self._zeros.ctypes.data)
        at, lent = slots.numpy(), following.numpy()
        wrong = _fill(*ring._arrays, ring.ring_steps, *arrays, stacks, targets, at, lent)
        check_found(wrong, at, len(self._rows))

    def find_breaks(
        self,
        ring: Ring,
        rows: NewRows,
        num_steps: int,
        cut: torch.Tensor | None = None,
        lanes: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Finds rows whose stacks are none that can be put together from single frames.

        Args:
            ring: of the rows.
            rows: that are to be written, as they are seen.
            num_steps: S.
            cut: `[L, S]` bool: this row begins an episode anyway; or None.
            lanes: `[L]` int64; None is all of them.
            order: `[L, S]` int64, which of the rows these steps are; None is all of them, in order.

        Returns:
            `[L, S]` int64: 0, or the place of the field times 4 and what is wrong with it, as
            `kernels.stack_fields` says. None may stand for zeros.
        """
        written = ring._all_lanes if lanes is None else lanes.numpy()
        breaks = np.empty((len(written), num_steps), np.int64)
        found = _find_breaks(
            *ring._arrays,
            ring.ring_steps,
            self._rows,
            self._past,
            self._zeros.ctypes.data,
            self._fields,
            written,
            num_steps,
            rows.sources,
            *rows.ends,
            _NO_CUTS if cut is None else cut.numpy(),
            _NO_ORDER if order is None else order.numpy(),
            breaks,
        )
        return torch.from_numpy(breaks) if found else None


def _lie(rows: torch.Tensor) -> tuple[int, int]:
    """Returns where rows begin, and how many bytes it is from one to the next."""
    return rows.data_ptr(), rows.stride(0) * rows.itemsize


@inlined
def _frame_at(
    rows: Any, past: Any, num_lanes: int, room: int, lane: int, step: int, tail: int, at: Any
) -> Any:
    """Returns the address of the frame of a step, of the stack `at`."""
    if step >= tail:
        row = step % room * num_lanes + lane
        return rows.ctypes.data + row * rows.shape[1] * _WORD + at[STORED]
    row = step % (len(past) // num_lanes) * num_lanes + lane
    return past.ctypes.data + row * past.shape[1] * _WORD + at[PAST]


@compiled
def _fill(
    episode: Any,
    spans: Any,
    lanes: Any,
    room: int,
    rows: Any,
    past: Any,
    zeros: int,
    stacks: Any,
    targets: Any,
    slots: Any,
    following: Any,
) -> int:
    """Returns which of the slots is of no row, or -1."""
    num_lanes, num_rows, row_bytes = len(lanes), len(rows), rows.shape[1] * _WORD
    for b in range(len(slots)):
        if b + 1 < len(slots):
            for back in range(stacks[0, COUNT]):
                start = (slots[b + 1] - back * num_lanes) % num_rows * row_bytes
                for byte in range(0, min(stacks[0, SIZE], _MOST_AHEAD), _LINE):
                    prefetch(rows, start + stacks[0, STORED] + byte)
        for f in range(len(stacks)):
            size, count = stacks[f, SIZE], stacks[f, COUNT]
            # What lies under `next` is one step ahead.
            is_next = stacks[f, PLACE] != stacks[f, ROOT]
            slot, num_known = slots[b], count
            if is_next:
                slot, num_known = following[b], count - 1
            slot = slot + num_rows if slot < 0 else slot
            if slot < 0 or slot >= num_rows:
                return b
            lane, place = slot % num_lanes, slot // num_lanes
            newest, tail = lanes[lane, CURSOR] - 1, lanes[lane, TAIL]
            step, depth = newest - (newest - place) % room, 0
            if step >= tail:
                depth = step - spans[episode[slot], FIRST]
            else:
                # There is no live row.
                step, tail = place, 0
            to = targets[f, 0] + b * targets[f, 1]
            for j in range(num_known):
                back, source = num_known - 1 - j, zeros
                if back <= depth or stacks[f, IS_CONSTANT] == 0:
                    at = step - min(back, depth)
                    source = _frame_at(rows, past, num_lanes, room, lane, at, tail, stacks[f])
                copy_bytes(to + j * size, source, size)
            if is_next:
                copy_bytes(to + num_known * size, targets[f, 2] + b * targets[f, 3], size)
    return -1


@compiled
def _find_breaks(
    episode: Any,
    spans: Any,
    lanes: Any,
    room: int,
    rows: Any,
    past: Any,
    zeros: int,
    stacks: Any,
    written: Any,
    num_steps: int,
    sources: Any,
    first_end: int,
    end_stride: int,
    cut: Any,
    order: Any,
    breaks: Any,
) -> bool:
    found, num_lanes = False, len(lanes)
    for i in range(len(written)):
        lane, previous = written[i], 0
        goes_on, tail = lanes[lane, OPEN] != 0, lanes[lane, TAIL]
        newest = lanes[lane, CURSOR] - 1
        depth = newest - spans[episode[newest % room * num_lanes + lane], FIRST]
        for s in range(num_steps):
            row = order[i, s] if order.size > 0 else i * num_steps + s
            begins = not goes_on or (cut.size > 0 and cut[i, s])
            breaks[i, s] = 0
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
                if wrong and breaks[i, s] == 0:
                    breaks[i, s] = place * 4 + wrong
                    found = True
            goes_on = not is_set(first_end + row * end_stride)
            previous = row
    return found
