"""Frames that are stored once: gathers them as stacks, and checks new stacks, in tensor operations.

Letters: N rows, E lanes (environments), D steps of the past, B rows picked, p stacks of k frames of F
bytes, L lanes and S steps written now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.kernels.device.writing import NewRows
from trl_storages.kernels.memory import on_device
from trl_storages.kernels.stack_fields import COUNT, NOT_CONTINUED, NOT_PADDED, NOT_SHIFTED, SIZE
from trl_storages.kernels.tables import Block

if TYPE_CHECKING:
    from trl_storages.kernels.device.ring import Ring
    from trl_storages.kernels.device.rows import RowTable

__all__ = ["FrameTable"]


class FrameTable:
    """Builds stacks from single frames; see `kernels.host.frames.FrameTable`.

    Args:
        rows: `[N, *]` int64 as they are stored, contiguous.
        past: `[D * E, *]` int64, contiguous.
        fields: `[p, 8]` int64, the stacks.
    """

    def __init__(self, rows: torch.Tensor, past: torch.Tensor, fields: np.ndarray) -> None:
        self._fields, self._num_rows, self._num_past = fields, len(rows), len(past)
        self._rows, self._past = rows.view(torch.uint8), past.view(torch.uint8)

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
        """Writes stacks to `seen`, and those under `next`, all but their newest frames, to `after`."""
        for stack, now, later in zip(stacks.tolist(), seen, after, strict=True):
            found = self._before(ring, slots, stack)
            if now is not None:
                now.copy_(found.flatten(1))
            if later is None:
                continue
            if following is not None:
                found = self._before(ring, following, stack)
            later[:, : -stack[SIZE]] = found[:, 1:].flatten(1)
        return False

    def _before(self, ring: Ring, slots: torch.Tensor, stack: Sequence[int]) -> torch.Tensor:
        """Returns the newest frames of rows, `[B, k, F]` bytes."""
        at = torch.where(slots < 0, slots + self._num_rows, slots)
        # Slots beyond those of the lanes hold no row.
        inside = at.clamp(max=ring.num_slots - 1)
        step, first = ring.steps(inside), ring.span(inside)[:, 0]
        tail = ring.oldest(inside)
        is_live = (step >= tail) & (inside == at)
        depth = torch.where(is_live, step - first, 0)
        step = torch.where(is_live, step, at // ring.num_envs)
        tail = torch.where(is_live, tail, 0)
        return self._frames(ring, at % ring.num_envs, step, tail, depth, stack[COUNT], stack)

    def _frames(
        self,
        ring: Ring,
        lane: torch.Tensor,
        step: torch.Tensor,
        tail: torch.Tensor,
        depth: torch.Tensor,
        count: int,
        stack: Sequence[int],
    ) -> torch.Tensor:
        """Returns the frames of each lane up to a step, `[B, count, F]` bytes.

        Args:
            ring: of the rows.
            lane: `[B]`.
            step: `[B]` the newest one.
            tail: `[B]` the oldest live step.
            depth: `[B]` how many steps of its episode precede `step`.
            count: how many frames.
            stack: `[8]`, the description of the stack.
        """
        _, _, size, _, is_constant, stored, past, _ = stack
        num_lanes = ring.num_envs
        back, lane = torch.arange(count, device=step.device).flip(0), lane.unsqueeze(1)
        at = step.unsqueeze(1) - torch.minimum(back, depth.unsqueeze(1))
        row = ring.slots_at(at, lane).reshape(-1)
        gone = (at % (self._num_past // num_lanes) * num_lanes + lane).reshape(-1)
        is_gone = (at < tail.unsqueeze(1)).reshape(-1, 1)
        found = torch.where(
            is_gone,
            self._past[:, past : past + size].index_select(0, gone),
            self._rows[:, stored : stored + size].index_select(0, row),
        ).view(*at.shape, size)
        return (
            found.masked_fill((back > depth.unsqueeze(1)).unsqueeze(2), 0) if is_constant else found
        )

    def find_breaks(self, ring: Ring, rows: NewRows, block: Block) -> torch.Tensor | None:
        """Finds rows whose stacks can't be rebuilt from single frames."""
        lanes, cut = ring.named(block.lanes), block.cut
        words, done = rows.steps(block)
        now, newest = words.view(torch.uint8), ring.cursors[lanes] - 1
        goes_on = torch.cat([ring.is_open[lanes].unsqueeze(1) != 0, ~done[:, :-1]], 1)
        if cut is not None:
            goes_on &= ~on_device(cut, goes_on.device)
        depth = newest - ring.span(ring.slots_at(newest, lanes))[:, 0]
        before = (ring, lanes, newest, ring.tails[lanes], depth)
        breaks = torch.zeros_like(done, dtype=torch.int64)
        for row in self._fields.tolist():
            place, root, size, count, is_constant, *_ = row
            stack, followed = (
                now[..., start : start + num_bytes].view(*done.shape, count, size)
                for start, num_bytes in rows.places[[place, root]].tolist()
            )
            older = stack[..., :-1, :]
            if place != root:
                wrong = (older != followed[..., 1:, :]).flatten(2).any(2) * NOT_SHIFTED
            else:
                past = self._frames(*before, count, row).unsqueeze(1)
                past = torch.cat([past, stack[:, :-1]], 1)[..., 1:, :]
                differs = (older != past).flatten(2).any(2) * NOT_CONTINUED
                padding = torch.zeros_like(older) if is_constant else stack[..., -1:, :]
                is_amiss = (older != padding).flatten(2).any(2) * NOT_PADDED
                wrong = torch.where(goes_on, differs, is_amiss)
            breaks = torch.where((breaks == 0) & (wrong > 0), place * 4 + wrong, breaks)
        return breaks
