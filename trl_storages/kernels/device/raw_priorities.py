"""What was reported of rows, in tensor operations.

Letters: B batch, N slots.
"""

from __future__ import annotations

import torch

from trl_storages.kernels.device.scattering import only_last
from trl_storages.kernels.tree_tables import ABSENT

__all__ = ["RawPriorities"]


class RawPriorities:
    """The priorities of rows as they were reported, and how often each slot was written.

    Args:
        num_slots: N. None holds a row at first.
        device: where the tables live.

    Attributes:
        priorities: `[N]` float32, `ABSENT` where there is no row.
        generations: `[N]` int32, how often each slot was written.
        largest: `[]` float32, the largest priority reported; 0 before there is any.
    """

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        # What names no slot is written behind the last one.
        self._spare = num_slots
        self._priorities = torch.full((num_slots + 1,), ABSENT, device=device)
        self._generations = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.priorities = self._priorities[:num_slots]
        self.generations = self._generations[:num_slots]
        self.largest = torch.zeros((), device=device)

    def renew(self, slots: torch.Tensor) -> torch.Tensor:
        """Takes in rows that were written, with the largest priority, or 1 before there is any.

        Args:
            slots: `[B]` int64; those below 0 name none.

        Returns:
            the priority that they got, `[]` float32; -1 where a slot is not below N, and nothing has
            changed. On a GPU, which nothing waits for, all slots must be below N.
        """
        if slots.device.type == "cpu" and bool((slots >= self._spare).any()):
            return torch.tensor(-1.0)
        at = torch.where(slots < 0, self._spare, slots)
        priority = torch.where(self.largest > 0, self.largest, 1.0)
        self._generations[at] = self._generations.index_select(0, at) + 1
        self._priorities[at] = torch.where(slots < 0, ABSENT, priority)
        return priority

    def report(
        self,
        slots: torch.Tensor,
        priorities: torch.Tensor,
        generations: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in the priorities of rows. Of a slot that occurs twice, the last one stays.

        Slots without a row and those below 0 are left alone. If one priority is NaN, negative or
        infinite, or one slot is not below N, all are.

        Args:
            slots: `[B]` int64.
            priorities: `[B]` float32.
            generations: `[B]` int32 as drawn: slots that were written since are left alone.

        Returns:
            `[B]` int64 slots, -1 for those that were left alone, and `[]` bool whether the report was
            wrong.
        """
        low, high = torch.aminmax(priorities)
        right = (low >= 0) & (high < ABSENT) & (slots < self._spare).all()
        at = torch.where((slots >= 0) & right, slots, self._spare)
        there = self._priorities.index_select(0, at) < ABSENT
        if generations is not None:
            there &= self._generations.index_select(0, at) == generations
        at = torch.where(there, at, self._spare)
        last, order = only_last(at, self._spare)
        new = torch.where(last == self._spare, ABSENT, priorities[order])
        self._priorities[last] = new
        torch.maximum(self.largest, torch.where(there, priorities, 0.0).amax(), out=self.largest)
        return torch.where(there, at, -1), ~right
