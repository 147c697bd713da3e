"""Priorities as they were reported, in compiled loops.

Letters: B batch, N slots.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from trl_storages.kernels.host.compiling import address, array_at, compiled
from trl_storages.kernels.tables import ABSENT

__all__ = ["RawPriorities"]


class RawPriorities:
    """The priorities of rows as they were reported, and the stamps of slots.

    Args:
        num_slots: N. All are empty at first.
        device: of the tables.

    Attributes:
        priorities: `[N]` float32, `ABSENT` where there is no row.
        stamps: `[N]` int32, numbers that change when another row takes a slot: how often it was
            written, or in files a hash of the step.
        largest: `[]` float32, the largest priority reported so far; 0 before the first.
    """

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.priorities = torch.full((num_slots,), ABSENT, device=device)
        self.stamps = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.largest = torch.zeros((), device=device)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tables as the loops take them."""
        return self.priorities.numpy(), self.stamps.numpy(), self.largest.reshape(1).numpy()

    def renew(self, slots: torch.Tensor) -> float:
        """Takes in new rows, with the largest priority, or 1 before the first report.

        Args:
            slots: `[B]` int64; negative ones are ignored.

        Returns:
            their priority, a float32; -1, with nothing changed, if a slot is not below N.
        """
        return float(_renew_rows(*self._arrays, slots.numel(), address(slots)))

    def report(
        self,
        slots: torch.Tensor,
        priorities: torch.Tensor,
        eps: float,
        stamps: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Updates the priorities of rows. If a slot occurs twice, the last priority counts.

        Slots that are negative or have no row are ignored. Nothing changes if any priority is NaN,
        negative or infinite, or any slot is not below N.

        Args:
            slots: `[B]` int64.
            priorities: `[B]` float32.
            eps: added to them in the result.
            stamps: `[B]` int32 as of the draw: slots written since then are ignored.

        Returns:
            `[B]` int64 slots, -1 for ignored ones; `[B]` float64 the priorities plus `eps`; and whether
            the report was rejected.
        """
        written, raised = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.float64)
        stamps_at = 0 if stamps is None else address(stamps)
        batch = stamps_at, *map(address, (slots, priorities, written, raised))
        return written, raised, _report_rows(*self._arrays, slots.numel(), eps, *batch)


@compiled
def _renew_rows(
    priorities: np.ndarray,
    stamps: np.ndarray,
    largest: np.ndarray,
    num_slots: int,
    slots_at: int,
) -> float:
    """Takes in new rows, and returns their priority, or -1 if a slot is not below N."""
    slots = array_at(slots_at, num_slots, np.int64)
    for i in range(slots.shape[0]):
        if slots[i] >= priorities.shape[0]:
            return np.float32(-1)
    priority = largest[0] if largest[0] > 0 else np.float32(1)
    # A slot that occurs twice counts as written once.
    new = np.empty(slots.shape[0], dtype=np.int32)
    for i in range(slots.shape[0]):
        if slots[i] >= 0:
            new[i] = stamps[slots[i]] + 1
    for i in range(slots.shape[0]):
        if slots[i] >= 0:
            priorities[slots[i]] = priority
            stamps[slots[i]] = new[i]
    return priority


@compiled
def _report_rows(
    old: np.ndarray,
    old_stamps: np.ndarray,
    largest: np.ndarray,
    size: int,
    eps: float,
    stamps_at: int,
    slots_at: int,
    new_at: int,
    written_at: int,
    raised_at: int,
) -> bool:
    """Updates the priorities of rows, and returns whether the report was rejected."""
    slots, written = array_at(slots_at, size, np.int64), array_at(written_at, size, np.int64)
    new, stamps = array_at(new_at, size, np.float32), array_at(stamps_at, size, np.int32)
    raised = array_at(raised_at, size, np.float64)
    wrong = False
    for i in range(slots.shape[0]):
        raised[i] = np.float64(new[i]) + eps
        # NaN fails both comparisons.
        wrong |= not (new[i] >= 0 and new[i] < ABSENT) or slots[i] >= old.shape[0]
    for i in range(slots.shape[0]):
        slot = slots[i]
        there = not wrong and slot >= 0 and old[slot] < ABSENT
        if there and stamps_at:
            there = old_stamps[slot] == stamps[i]
        written[i] = slot if there else -1
        if there:
            old[slot] = new[i]
            largest[0] = max(largest[0], new[i])
    return wrong
