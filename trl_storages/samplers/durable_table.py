"""Priorities of rows that are on disk, kept there as well.

Letters: B batch, N slots.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch

from trl_storages.disk import PriorityColumn
from trl_storages.interrupts import finish
from trl_storages.priorities import ABSENT, PriorityTable

__all__ = ["DurableTable"]


class DurableTable(PriorityTable):
    """A `PriorityTable` that begins with what a directory holds, and writes it through.

    The generation of a row is the same in every process that has the directory open, so that
    priorities of batches which another process drew come to the right rows.

    Args:
        storage: whose rows are on disk.
        **options: as in `PriorityTable`, which is on the CPU.

    Raises:
        OSError, ValueError: as in `PriorityColumn`.
    """

    def __init__(self, storage: Any, **options: Any) -> None:
        capacity = len(storage.words.rows)
        super().__init__(capacity, **options, device=torch.device("cpu"))
        self._column = column = PriorityColumn(storage)
        #: `[E]` up to which steps rows are known to be evicted.
        self._tails: np.ndarray
        self._episodes = episodes = storage.episodes
        slots = episodes.live_slots()
        known, largest = column.get(slots), column.largest
        # A loss of power may have taken the largest one, and left those of rows.
        if len(known) and known.nan_to_num(nan=0.0).max() > max(largest, 1.0):
            largest = known.nan_to_num(nan=0.0).max().item()
        num_missing = int(known.isnan().sum()) + (not column.knows_largest)
        if num_missing and column.must_be_whole:
            warnings.warn(
                f"the priorities of {num_missing} rows in {storage.scratch_dir} are damaged: they get "
                "the largest one, as if they were written now.",
                RuntimeWarning,
                stacklevel=2,
            )
        # Rows that were committed by a writer which was killed then have no priority yet.
        known = known.nan_to_num(nan=largest or 1.0)
        largest = max(largest, known.max().item() if column.must_be_whole and num_missing else 0.0)
        self._take_in(slots, known, largest, num_lanes=1)
        if column.is_writable:
            column.put(slots, known)
            column.largest = largest

    def _take_in(
        self, slots: torch.Tensor, priority: torch.Tensor, largest: float, num_lanes: int
    ) -> None:
        priorities = torch.full((self.capacity,), ABSENT)
        priorities[slots] = priority
        super().load_state_dict(
            {"priorities": priorities, "largest": largest, "num_lanes": num_lanes}
        )
        self._rows.generations[slots] = self._column.generations(slots)
        # A load may bring priorities before it brings the episodes that they are of.
        self._tails = np.zeros_like(self._episodes.host_tails)

    def write(self, slots: torch.Tensor) -> None:
        """Gives rows that were written the largest priority; see `PriorityTable.write`."""
        super().write(slots)
        self._drop_evicted()
        if slots.numel() and slots.numpy().min() < 0:
            slots = slots[slots >= 0]
        self._rows.generations.numpy()[slots.numpy()] = self._column.generations(slots).numpy()
        self._column.put(slots, torch.full((len(slots),), self.new_priority))

    def _drop_evicted(self) -> None:
        """Forgets the rows that writes have evicted: there are more slots than live rows."""
        episodes = self._episodes
        tails, known = episodes.host_tails, self._tails
        if not (tails > known).any():
            return
        # Where the writer has come around meanwhile, other rows lie.
        first = np.maximum(known, episodes.host_steps - episodes.ring_steps)
        evicted = [
            np.arange(first[lane], tails[lane]) % episodes.ring_steps * len(tails) + lane
            for lane in np.flatnonzero(tails > first)
        ]
        if evicted:
            self.drop(torch.from_numpy(np.concatenate(evicted)))
        self._tails = tails.copy()

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
