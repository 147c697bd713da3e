"""Priorities of rows that are on disk, kept there as well.

Letters: B batch, N slots.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torchrl.data import Storage

from trl_storages.interrupts import finish
from trl_storages.priorities import ABSENT, PriorityTable
from trl_storages.rows import PriorityColumn

__all__ = ["DurableTable"]


class DurableTable(PriorityTable):
    """A `PriorityTable` that begins with what a directory holds, and writes it through.

    The generation of a row is the same in every process that has the directory open, so that
    priorities of batches which another process drew come to the right rows.

    Args:
        storage: whose rows are on disk.
        capacity: as in `PriorityTable`.
        **options: as in `PriorityTable`, which is on the CPU.

    Raises:
        OSError, ValueError: as in `PriorityColumn`.
    """

    def __init__(self, storage: Any, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options, device=torch.device("cpu"))
        self._column = column = PriorityColumn(storage.journal)
        slots = _live_slots(storage)
        largest = column.largest
        # Rows that were committed by a writer which was killed then have no priority yet.
        known = column.get(slots).nan_to_num(nan=largest or 1.0)
        self._take_in(slots, known, largest, num_lanes=1)
        if column.is_writable:
            column.put(slots, known)

    def _take_in(
        self, slots: torch.Tensor, priority: torch.Tensor, largest: float, num_lanes: int
    ) -> None:
        priorities = torch.full((self.capacity,), ABSENT)
        priorities[slots] = priority
        super().load_state_dict(
            {"priorities": priorities, "largest": largest, "num_lanes": num_lanes}
        )
        self._rows.generations[slots] = self._column.generations(slots)

    def write(self, slots: torch.Tensor) -> None:
        """Gives rows that were written the largest priority; see `PriorityTable.write`."""
        super().write(slots)
        slots = slots[slots >= 0]
        self._rows.generations[slots] = self._column.generations(slots)
        self._column.put(slots, torch.tensor(self.new_priority))

    def update(
        self, slots: torch.Tensor, priority: torch.Tensor, generation: torch.Tensor | None
    ) -> None:
        """Takes in reported priorities; see `PriorityTable.update`.

        Raises:
            RuntimeError: another process writes the rows, and their priorities.
        """
        self._column.check_writable()
        # Files and memory hold the same, wherever an interrupt comes.
        finish(partial(self._update, slots, priority, generation))

    def _update(
        self, slots: torch.Tensor, priority: torch.Tensor, generation: torch.Tensor | None
    ) -> None:
        super().update(slots, priority, generation)
        slots = slots[slots >= 0]
        # What was left alone is written as it is.
        priority = self._rows.priorities[slots]
        there = priority != ABSENT
        # First, so that no row of a killed writer has a larger one.
        self._column.largest = self._rows.largest.item()
        self._column.put(slots[there], priority[there])

    def clear(self) -> None:
        """Forgets all rows and what was reported."""
        self._column.check_writable()
        finish(self._clear_all)

    def _clear_all(self) -> None:
        super().clear()
        self._column.clear()

    def takes(self, state_dict: dict[str, Any]) -> bool:
        """Returns whether a state may take the place of what is known: it has the same rows."""
        rows = state_dict["priorities"] != ABSENT
        return self._column.is_writable and torch.equal(rows, self.priorities != ABSENT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. All rows count as written anew."""
        self._column.check_writable()
        priorities = state_dict["priorities"]
        slots = (priorities != ABSENT).nonzero().squeeze(1)
        self._take_in(slots, priorities[slots], state_dict["largest"], state_dict["num_lanes"])
        self._column.clear()
        self._column.put(slots, priorities[slots])
        self._column.largest = self._rows.largest.item()

    def in_memory(self) -> PriorityTable:
        """Returns a table that holds the same and knows of no files."""
        options: Any = {"alpha": self._alpha, "eps": self._eps, "normalize": self._normalize}
        table = PriorityTable(self.capacity, **options, device=self.device)
        table.load_state_dict(self.state_dict())
        return table


def _live_slots(storage: Storage) -> torch.Tensor:
    rows = torch.arange(len(storage))
    episodes = getattr(storage, "episodes", None)
    return rows if episodes is None else episodes.slots_by_age(rows)
