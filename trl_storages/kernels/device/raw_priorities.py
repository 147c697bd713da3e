"""Priorities as they were reported, in tensor operations.

Letters: B batch, N slots.
"""

from __future__ import annotations

import torch

from trl_storages.kernels.device.tree import only_last
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
        # Writes for invalid slots go to a spare element behind the last.
        self._spare = num_slots
        self._priorities = torch.full((num_slots + 1,), ABSENT, device=device)
        self._stamps = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.priorities = self._priorities[:num_slots]
        self.stamps = self._stamps[:num_slots]
        self.largest = torch.zeros((), device=device)

    def renew(self, slots: torch.Tensor) -> torch.Tensor:
        """Takes in new rows, with the largest priority, or 1 before the first report.

        Args:
            slots: `[B]` int64; negative ones are ignored.

        Returns:
            their priority, `[]` float32; -1, with nothing changed, if a slot is not below N. This is not
            checked on a GPU, to avoid waiting for it.
        """
        if slots.device.type == "cpu" and bool((slots >= self._spare).any()):
            return torch.tensor(-1.0)
        at = torch.where(slots < 0, self._spare, slots)
        priority = torch.where(self.largest > 0, self.largest, 1.0)
        self._stamps[at] = self._stamps.index_select(0, at) + 1
        self._priorities[at] = torch.where(slots < 0, ABSENT, priority)
        return priority

    def report(
        self,
        slots: torch.Tensor,
        priorities: torch.Tensor,
        eps: float,
        stamps: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Updates the priorities of rows. If a slot occurs twice, the last priority counts.

        Slots that are negative or have no row are ignored. Nothing changes if any priority is NaN,
        negative or infinite, or any slot is not below N.

        Args:
            slots: `[B]` int64.
            priorities: `[B]` float32.
            eps: added to them in the result.
            stamps: `[B]` int32 as of the draw: slots written since then are ignored.

        Returns:
            `[B]` int64 slots, -1 for ignored ones; `[B]` float64 the priorities plus `eps`; and `[]` bool
            whether the report was rejected.
        """
        low, high = torch.aminmax(priorities)
        right = (low >= 0) & (high < ABSENT) & (slots < self._spare).all()
        at = torch.where((slots >= 0) & right, slots, self._spare)
        there = self._priorities.index_select(0, at) < ABSENT
        if stamps is not None:
            there &= self._stamps.index_select(0, at) == stamps
        at = torch.where(there, at, self._spare)
        last, order = only_last(at, self._spare)
        new = torch.where(last == self._spare, ABSENT, priorities[order])
        self._priorities[last] = new
        torch.maximum(self.largest, torch.where(there, priorities, 0.0).amax(), out=self.largest)
        return torch.where(there, at, -1), priorities.double() + eps, ~right
