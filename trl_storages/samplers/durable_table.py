"""Priorities stored on disk with their rows.

Letters: B batch, N slots, E lanes (environments).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from trl_storages.priorities import ABSENT, PriorityTable

__all__ = ["DurableTable"]

_NO_SLOTS = torch.empty(0, dtype=torch.int64)
_NO_WEIGHT = torch.zeros(1, dtype=torch.float64)
# Marks a word that was not read yet.
_UNSEEN = 0x2545F4917FC00001
# From this share of changed rows on, the tree is rebuilt instead of updated leaf by leaf.
_MANY = 0.05


class DurableTable(PriorityTable):
    """A `PriorityTable` that loads priorities from a directory and writes updates through.

    A row's stamp is the same in every process that has the directory open, so priorities reported
    for another process's batch reach the right rows. Once priorities exist, a writer sets a row's
    priority before it commits the row; one that is missing or damaged means the largest.

    Args:
        storage: a storage whose rows are on disk.
        **options: as in `PriorityTable`; the table is on the CPU.

    Raises:
        FileNotFoundError: there are no priorities, and this process only reads.
    """

    def __init__(self, storage: Any, **options: Any) -> None:
        self._storage, self._files = storage, storage.files.source
        words = self._files.words
        self._words = words.priorities
        if self._words.is_new and storage.reader is not None:
            raise FileNotFoundError(
                f"{storage.scratch_dir} holds no priorities: its writer does not draw by priority. Read "
                "it with another sampler."
            )
        super().__init__(len(words.rows), **options, device=torch.device("cpu"))
        self.refreshes = storage.files.refreshes
        # The largest priority is stored after those of the rows.
        self._largest_at = torch.tensor([self.capacity])
        #: `[E]` steps before which rows are known to be evicted.
        self._tails = storage.episodes.host_tails.copy()
        #: `[N]` the last word read of each row; None in the writer, which makes all changes itself.
        self._known = None if storage.reader is None else torch.full((self.capacity,), _UNSEEN)
        self._follow()
        if storage.reader is None:
            self._mend()

    def _mend(self) -> None:
        """Permanently sets missing and damaged priorities to the largest one."""
        # Includes rows of a load in progress, which are not in the index yet.
        every = torch.arange(self.capacity)
        missing = every[self._words.get(every).isnan()]
        self._words.put(missing, torch.full((len(missing),), self.new_priority))
        self._keep_largest()

    def _keep_largest(self) -> None:
        self._words.put(self._largest_at, self._rows.largest.reshape(1))

    # Following

    def follow(self, storage: Any) -> bool:
        """Reads another process's updates; see `PriorityTable.follow`."""
        files = storage.files.source
        if self._files is not files or self._words is not files.words.priorities:
            return False
        self.refreshes = storage.files.refreshes
        self._follow()
        return True

    def _follow(self) -> None:
        """Reads updates."""
        words, episodes, table = self._words, self._storage.episodes, self._rows
        _, evicted = words.renew(table, _NO_SLOTS, episodes.ring, self._tails)
        slots, seen, priority = words.news(episodes.ring, self._known)
        largest, is_damaged = words.get(self._largest_at), priority.isnan()
        # A damaged one is that of the rows read before, and now.
        largest = torch.where(largest.isnan(), table.largest, largest)
        # A power loss may have destroyed the largest priority, but not those of the rows.
        most = torch.cat([largest, priority[~is_damaged]]).amax()
        largest = torch.where(most > largest.clamp(min=1.0), most, largest)
        priority[is_damaged] = torch.where(largest > 0, largest, 1.0)
        table.largest.copy_(largest.squeeze())
        table.priorities[slots], table.stamps[slots] = priority, words.stamps(slots)
        self.has_rows |= len(slots) > 0
        if len(evicted) + len(slots) > _MANY * self.capacity:
            self._tree.renew(self._all_weights())
        else:
            self._tree.set(evicted, _NO_WEIGHT)
            self._tree.set(slots, self._weigh(priority))
        if self._known is not None:
            self._known[evicted], self._known[slots] = _UNSEEN, seen
        self._tails[:] = episodes.host_tails

    # Drawing

    def draw(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws as `PriorityTable.draw` does."""
        try:
            return super().draw(*args, **options)
        except ZeroDivisionError:
            # All rows may have been overwritten before their priorities were read.
            self._storage.files.note(self._storage.episodes.live_slots())
            raise

    # Writing

    def _renew(self, slots: torch.Tensor) -> bool:
        episodes = self._storage.episodes
        priority, evicted = self._words.renew(self._rows, slots, episodes.ring, self._tails)
        if priority < 0:
            return True
        self.has_rows = True
        self._tree.set(slots, self._weight_of_new(priority))
        if evicted.numel():
            self._tree.set(evicted, _NO_WEIGHT)
        self._tails[:] = episodes.host_tails
        return False

    def update(
        self, slots: torch.Tensor, priority: torch.Tensor, stamp: torch.Tensor | None
    ) -> None:
        """Applies reported priorities; see `PriorityTable.update`.

        Raises:
            RuntimeError: another process owns the directory.
        """
        self._storage.files.check_writable()
        super().update(slots, priority, stamp)

    def _report(
        self, slots: torch.Tensor, priority: torch.Tensor, stamp: torch.Tensor | None
    ) -> bool:
        is_wrong = super()._report(slots, priority, stamp)
        if not is_wrong:
            slots = slots[slots >= 0]
            # Slots that were skipped are rewritten unchanged.
            kept = self._rows.priorities[slots]
            there = kept < ABSENT
            # First, so that after a kill no row exceeds the largest priority.
            self._keep_largest()
            self._words.put(slots[there], kept[there])
        return is_wrong

    # The whole of it

    def clear(self) -> None:
        """Removes all rows and resets the largest priority."""
        self._storage.files.check_writable()
        super().clear()
        self._keep_largest()

    def takes(self, state_dict: dict[str, Any]) -> bool:
        """Returns whether a state can replace this one: it must have the same rows, and we must write."""
        rows = state_dict["priorities"] != ABSENT
        return self._storage.reader is None and torch.equal(rows, self.priorities != ABSENT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. All rows get a new stamp."""
        self._storage.files.check_writable()
        super().load_state_dict(state_dict)
        slots = (self._rows.priorities < ABSENT).nonzero().squeeze(1)
        self._rows.stamps[slots] = self._words.stamps(slots)
        self._files.words.keep_priorities(self._rows.priorities, self._rows.largest.item())
        # A load may restore priorities before their episodes.
        self._tails.fill(0)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy holds the same priorities in memory; the files stay with the storage.
        alpha, eps = self._wanted
        table = PriorityTable(self.capacity, alpha=alpha, eps=eps, device=self.device)
        table.load_state_dict(self.state_dict())
        return copy.copy, (table,)
