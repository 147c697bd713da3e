"""Priorities of rows, and the tree by which they are drawn.

Letters: N slots, B batch, E lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import tree
from trl_storages.packed import PackedStorage

__all__ = ["Priorities"]


class Priorities:
    """Raw priorities `[N]` of a storage's rows, and their weights (p + eps)^alpha in a tree.

    It catches up with the index when it is used: rows that are new get the largest raw priority so far
    unless they have one, those that are gone no weight. The raw ones are a table of the index, where a
    slot that is written holds 0; whatever can't be a priority counts as 0, as it may come from a file.

    Args:
        storage: holds the rows.
        alpha, eps: of the weights.
        largest: the largest raw priority that was ever reported, 0 if none was; what new rows got does
            not count. None takes it from the rows, as does who follows another process.
    """

    def __init__(
        self, storage: PackedStorage, alpha: float, eps: float, largest: float | None
    ) -> None:
        index = self.index = storage.episodes
        self.alpha, self.eps = alpha, eps
        self.raw = index.priorities
        #: Whether this process may set them.
        self.is_own = storage.place.is_writer
        # What was seen of them, and the number of updates until then.
        self._known, self._num_updates = self.raw.copy(), int(index.num_updates[0])
        self.starts = tree.level_starts(index.capacity)
        self._every_leaf = tree.every_leaf(self.starts)
        self.sums = np.zeros(self.starts[-1])
        self._least: np.ndarray | None = None
        # What was taken in of the index, a `Seen`.
        self._seen: Any = None
        if largest is None or not self.is_own:
            largest = self._largest_of(index.live_slots().numpy())
        #: The largest raw priority so far, 0 before one is set.
        self.largest = largest
        #: How many batches were drawn.
        self.num_draws = 0

    @property
    def of_new(self) -> float:
        """The raw priority of new rows: the largest so far, 1 before one is set."""
        return self.largest or 1.0

    def catch_up(self) -> None:
        """Takes in what other processes have set, and which rows are new and which are gone."""
        if self._num_updates != self.index.num_updates[0]:
            self._num_updates = int(self.index.num_updates[0])
            changed = np.flatnonzero(self.raw != self._known)
            self.largest = max(self.largest, self._largest_of(changed))
            self._take_in(changed[self.sums[self.starts[-2] + changed] > 0])
        changes, self._seen = self.index.since(self._seen)
        if changes is not None:
            self._set(changes.gone, np.zeros(len(changes.gone)))
            self._take_in(changes.new)

    def _largest_of(self, slots: np.ndarray) -> float:
        """Returns the largest raw priority of some rows, 0 if none was set."""
        raw = self.raw[slots]
        return float(raw.max(initial=0, where=raw < np.inf))

    def _take_in(self, slots: np.ndarray) -> None:
        """Sets the weights of live rows; who may set priorities keeps the raw one of new ones."""
        of_weights = self.of_new, self.alpha, self.eps
        weights = tree.weigh(self.raw, self._known, slots, *of_weights, self.is_own)
        if self.is_own and len(slots):
            self.index.num_updates[0] += 1
            self._num_updates += 1
        self._set(slots, weights)

    def _set(self, slots: np.ndarray, weights: np.ndarray) -> None:
        if len(slots):
            tree.set_leaves(self.sums, self.starts, False, slots, weights)
            if self._least is not None:
                tree.set_leaves(self._least, self.starts, True, slots, weights)

    def update(self, slots: np.ndarray, steps: np.ndarray, priority: np.ndarray) -> None:
        """Sets priorities `[B]` float32 of rows that were drawn as `steps` of their lanes.

        Slots of -1, and rows that others have replaced since, are skipped; of equal slots the last one
        counts. It must have caught up.

        Raises:
            IndexError: there is no such slot. Nothing is changed then.
        """
        kept = np.empty(len(slots), np.int64)
        count, largest = tree.report(self.index.tables, slots, steps, priority, kept)
        if count < 0:
            most = self.index.capacity
            raise IndexError(f"slots must be below {most}, got {slots.min()} to {slots.max()}.")
        self.largest = max(self.largest, float(largest))
        self._take_in(kept[:count])

    def by_slot(self) -> np.ndarray:
        """Returns the raw priority of each slot, `[N]` float32, inf where there is no row."""
        self.catch_up()
        found, live = np.full_like(self.raw, np.inf), self.index.live_slots().numpy()
        raw = self.raw[live]
        found[live] = np.where((raw > 0) & (raw < np.inf), raw, self.of_new)
        return found

    def draw(
        self, noise: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
        """Draws `[B]` slots in proportion to their weights, of the newest `window` steps of each lane.

        Returns:
            the slots; their weights, `[B]` float64; the total of all weights; and the leaves that were
            drawn from, `[2, R]` firsts and ends.
        """
        self.num_draws += 1
        ranges = self._every_leaf
        if window is not None:
            ranges = np.empty((2, 2 * self.index.num_envs), np.int64)
            # The newest that the tree knows: another process may be writing.
            tree.newest_ranges(self._seen.lanes, self.index.steps_per_lane, window, ranges)
        slots, weights = np.empty(len(noise), np.int64), np.empty(len(noise))
        total = tree.draw_leaves(self.sums, self.starts, ranges, noise, slots, weights)
        return slots, weights, total, ranges

    def least(self, ranges: np.ndarray) -> float:
        """Returns the least weight within ranges of leaves."""
        if self._least is None:
            self._least, every = np.full(len(self.sums), np.inf), np.arange(self.index.capacity)
            tree.set_leaves(self._least, self.starts, True, every, self.sums[self.starts[-2] :])
        return tree.least_within(self._least, self.starts, ranges)
