"""Prioritized experience replay: draws in proportion to priorities.

Letters: B batch, N slots, E lanes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torchrl.data import PrioritizedSampler

from trl_storages import keys, validation
from trl_storages.kernels import priority_tree
from trl_storages.samplers.base import Drawn, ReplaySampler
from trl_storages.serialization import Adopt, State, entries_of
from trl_storages.settings import Setting
from trl_storages.storage import PackedStorage, StorageView
from trl_storages.validation import warn_caller

__all__ = ["REDUCTIONS", "PERSampler", "Priorities", "checked_priorities"]

Normalization = Literal["batch", "storage", "none"]

#: TorchRL's names for how to reduce several priorities of one row.
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
    "median": lambda priority, dim: priority.median(dim).values,
}

_MOST = torch.finfo(torch.float32).max
# Draws after which priorities that were never reported are missed.
_FORGOTTEN = 1000


class PERSampler(ReplaySampler, PrioritizedSampler):  # type: ignore[misc]
    """Prioritized experience replay: draws rows in proportion to their priorities.

        P(i) = (p_i + eps)^alpha / Σ_j (p_j + eps)^alpha,   weight_i = (min_j P(j) / P(i))^beta

    where the minimum over j runs over the batch, or as `normalize` says. The batch has the weights as
    `priority_weight`, `[B]` float32.

    Takes the place of TorchRL's `PrioritizedSampler`, also in TorchRL's buffers over a `PackedStorage`
    with an `EpisodeWriter`. It needs no native extension; keeps raw priorities, so that `alpha` may
    change at any time, also from 0; and rejects invalid priorities. The tree is on the host wherever the
    rows are.

    **Weights.** `normalize="batch"` divides by the largest weight of the batch, as dopamine, Acme and
    tianshou do; "storage" by the largest over all rows (within an `ERESampler`, over the window), as
    TorchRL does; "none" does not divide: (N P(i))^-beta, with mean 1 for beta = 1. They differ by a
    factor common to the batch, and so in the effective step size. With "storage" a single row with a
    small error makes all other weights small.

    **New rows.** A row that is written, or overwritten, gets the largest priority reported so far, or 1
    before any was reported.

    **Late priorities.** The batch's `priority_stamp` says which step a row was, so that a priority which
    comes after the row was overwritten is skipped; without it, it goes to the row that is now there.

    **Forgotten priorities.** A warning says once that the first 1,000 batches were drawn without any
    priority being reported.

    Args:
        max_capacity: N, at least the size of the storage.
        alpha: priority exponent, in [0, 4]; 0 draws uniformly.
        beta: exponent of the importance weights, in [0, 1]. Anneal it to 1.
        eps: in (0, 1]; keeps rows with priority 0 drawable.
        normalize: whose largest weight is 1: "batch", "storage" or "none".
        reduction: how several priorities of one row are reduced: "max", "min", "mean" or "median".
        refresh_ms: a reader of a directory takes in the priorities that the writer has set at most once
            in so many milliseconds; 0 does so before each batch. Each time it compares those of all rows.

    `alpha`, `beta`, `eps` and `normalize` are attributes that may be set at any time, the first three by
    TorchRL's schedulers. After a change of `alpha` or `eps`, and with `normalize="storage"` at first, a
    draw costs a pass over all rows.

    Raises:
        ValueError: an argument is out of range.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    >>> from tensordict import TensorDict
    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> storage = ReplayStorage(storage=PackedStorage(100), sampler=PERSampler(100), batch_size=32)
    >>> done = torch.zeros(50, 1, dtype=torch.bool)
    >>> _ = storage.extend(TensorDict({"observation": torch.zeros(50), "next": {"done": done}}, [50]))
    >>> batch = storage.sample()
    >>> batch["td_error"] = torch.rand(32)
    >>> storage.update_tensordict_priority(batch)
    """

    alpha: Any = Setting(validation.number, at_least=0, at_most=4)
    beta: Any = Setting(validation.number, at_least=0, at_most=1)
    eps: Any = Setting(validation.number, at_least=1e-12, at_most=1)
    normalize: Any = Setting(validation.choice, get_args(Normalization))
    reduction: Any = Setting(validation.choice, REDUCTIONS)
    #: As given; may be set at any time. It is no part of a state.
    refresh_ms = 0.0

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        normalize: Normalization = "batch",
        reduction: str = "max",
        refresh_ms: float = 0,
    ) -> None:
        # TorchRL's constructor is not called: it builds native trees, and fails where they do not load.
        self._max_capacity = validation.integer("max_capacity", max_capacity, at_least=1)
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self.normalize, self.reduction = normalize, reduction
        self.refresh_ms = validation.number("refresh_ms", refresh_ms, at_least=0, at_most=math.inf)
        self._priorities: Priorities | None = None
        # The largest priority so far, for the priorities to be made; None is not known.
        self._largest: float | None = None

    def priorities_of(self, view: StorageView) -> Priorities:
        """Returns the priorities of all transitions, up to date with a view.

        Raises:
            ValueError: the storage has more slots than `max_capacity`.
        """
        known, index = self._priorities, view.episodes
        made_for = self.alpha, self.eps, view.is_exclusive
        if known is None or known.index is not index:
            if index.capacity > self._max_capacity:
                raise ValueError(
                    f"max_capacity must be at least that of the storage, {index.capacity}, got "
                    f"{self._max_capacity}."
                )
            self._priorities = known = Priorities(view, self.alpha, self.eps, self._largest)
            self._largest = None
        elif (known.alpha, known.eps, known.can_set) != made_for:
            self._priorities = known = Priorities(view, self.alpha, self.eps, known.largest)
        known.catch_up(0 if view.is_exclusive else self.refresh_ms)
        return known

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots in proportion to their priorities.

        Returns:
            `[B]` int64 slots; and `priority_weight` `[B]` float32 and `priority_stamp` `[B]` int64.
        """
        priorities = self.priorities_of(view)
        # Who only reads a directory has no say.
        is_missed = priorities.num_batches == _FORGOTTEN and not priorities.largest
        priorities.num_batches += 1
        if is_missed and view.is_exclusive:
            warn_caller(
                f"{_FORGOTTEN:,} batches were drawn by priority, and no priority was ever reported: all "
                "rows are still drawn alike. Call update_tensordict_priority(batch) after each loss, "
                "which needs its td_error; or draw uniformly, with alpha=0."
            )
        slots, weights, total, ranges = priorities.draw(noise[0], window)
        if self.normalize == "none":
            within = view.episodes.steps_per_lane if window is None else window
            top = total / view.episodes.fill.clip(max=within).sum()
        else:
            top = weights.min() if self.normalize == "batch" else priorities.least(ranges)
        weight = ((top / weights) ** self.beta).astype(np.float32)
        stamp = view.episodes.steps_of(slots)
        return slots, {keys.PRIORITY_WEIGHT: weight, keys.PRIORITY_STAMP: stamp}

    @property
    def priorities(self) -> torch.Tensor:
        """`[N]` float32 raw priorities by slot, inf where there is no row; a copy.

        Of the storage that was last drawn from.
        """
        if self._priorities is None:
            return torch.full((self._max_capacity,), math.inf, device="cpu")
        return torch.from_numpy(self._priorities.by_slot())

    def _empty(self) -> None:
        """Forgets all priorities: rows that are there count as new."""
        self._priorities, self._largest = None, 0.0

    def state(self) -> State:
        """Returns the largest priority so far, None where rows tell it; priorities are with the rows."""
        known = self._priorities
        return {"largest": self._largest if known is None else known.largest}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        (largest,) = entries_of("PERSampler", state, ("largest",))
        largest = validation.optional(validation.number, "largest", largest, at_most=_MOST)

        def adopt() -> None:
            self._priorities, self._largest = None, largest

        return adopt

    def __getstate__(self) -> State:
        # A copy takes the rows that it draws from.
        known = {"_largest": self.state()["largest"]}
        return {**self.__dict__, "_rng": None, "_priorities": None, **known}

    def set_priorities(
        self, storage: PackedStorage, slots: Any, priority: Any, steps: Any = None
    ) -> None:
        """Sets priorities of rows, of equal ones the last counts.

        Args:
            storage: holds the rows.
            slots: `[B]` int64; -1 is skipped.
            priority: `[B]` numbers, or one for all.
            steps: `[B]` which steps of their lanes they were; rows that others have replaced since are
                skipped. None takes the rows that are there.

        Raises:
            ValueError: a priority is negative or not finite, or their number differs from that of the
                slots. Nothing is changed then.
            TypeError, IndexError: the slots are not numbers of slots.
        """
        storage.backend.check_writer()
        at = validation.slots(slots).numpy().reshape(-1)
        values = checked_priorities(priority, len(at))
        known = self.priorities_of(storage.view())
        if steps is None:
            taken = storage.episodes.steps_of(at.clip(0, storage.max_size - 1))
        else:
            taken = steps.cpu().numpy().reshape(-1)
        known.update(at, taken, values)

    # What TorchRL's buffers call

    @property
    def max_size(self) -> int:
        """N."""
        return self._max_capacity

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Sets the priorities of rows that `storage` holds; see `set_priorities`."""
        self.set_priorities(storage, index, priority)

    def add(self, index: Any) -> None:
        """Does nothing: new rows are found when rows are drawn."""

    extend = add

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Does nothing: rows are never overwritten in place."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"normalize={self.normalize!r})"
        )


class Priorities:
    """Raw priorities `[N]` of a storage's rows, and their weights (p + eps)^alpha in a tree.

    It catches up with the index when it is used: rows that are new get the largest raw priority so far
    unless they have one, those that are gone no weight. The raw ones are a table of the index, where a
    slot that is written holds 0; whatever can't be a priority counts as 0, as it may come from a file.

    Args:
        view: of the storage.
        alpha, eps: of the weights.
        largest: the largest raw priority that was ever reported, 0 if none was; what new rows got does
            not count. None takes it from the rows, as does who follows another process.
    """

    def __init__(self, view: StorageView, alpha: float, eps: float, largest: float | None) -> None:
        index = self.index = view.episodes
        self.alpha, self.eps = alpha, eps
        self.raw = index.priorities
        #: Whether this process may set them.
        self.can_set = view.is_exclusive
        # What was seen of them, and the number of updates until then.
        self._known, self._num_updates = self.raw.copy(), int(index.num_updates[0])
        self._refreshed = time.monotonic()
        self.starts = priority_tree.level_starts(index.capacity)
        self._every_leaf = priority_tree.every_leaf(self.starts)
        self.sums = np.zeros(self.starts[-1])
        self._least: np.ndarray | None = None
        # What was taken in of the index, a `Snapshot`.
        self._seen: Any = None
        if largest is None or not self.can_set:
            largest = self._largest_of(index.live_slots().numpy())
        #: The largest raw priority so far, 0 before one is set.
        self.largest = largest
        #: How many batches were drawn.
        self.num_batches = 0

    @property
    def of_new(self) -> float:
        """The raw priority of new rows: the largest so far, 1 before one is set."""
        return self.largest or 1.0

    def catch_up(self, refresh_ms: float = 0) -> None:
        """Takes in which rows are new and which are gone, and what other processes have set.

        The latter only if the last time was so many milliseconds ago.
        """
        # What was seen is stored last: an interrupt leaves what must be taken in again.
        missed, now = int(self.index.num_updates[0]) - self._num_updates, time.monotonic()
        if missed and now >= self._refreshed + refresh_ms / 1e3:
            changed = np.flatnonzero(self.raw != self._known)
            self.largest = max(self.largest, self._largest_of(changed))
            self._take_in(changed[self.sums[self.starts[-2] + changed] > 0])
            self._num_updates, self._refreshed = self._num_updates + missed, now
        changes, seen = self.index.since(self._seen)
        if changes is not None:
            nothing = np.zeros(len(changes.gone))
            priority_tree.set_leaves(self.sums, self.starts, False, changes.gone, nothing)
            self._set_least(changes.gone)
            self._take_in(changes.new)
        self._seen = seen

    def _largest_of(self, slots: np.ndarray) -> float:
        """Returns the largest raw priority of some rows, 0 if none was set."""
        raw = self.raw[slots]
        return float(raw.max(initial=0, where=raw < np.inf))

    def _take_in(self, slots: np.ndarray) -> None:
        """Sets the weights of live rows; who may set priorities keeps the raw one of new ones."""
        if not len(slots):
            return
        of_weights = self.of_new, self.alpha, self.eps
        table = self.sums, self.starts
        priority_tree.weigh(self.raw, self._known, *table, slots, *of_weights, self.can_set)
        self._set_least(slots)
        if self.can_set:
            self.index.num_updates[0] += 1
            self._num_updates += 1

    def _set_least(self, slots: np.ndarray) -> None:
        """Sets the weights of some rows in the tree of least ones, if there is one."""
        if self._least is not None:
            weights = self.sums[self.starts[-2] + slots]
            priority_tree.set_leaves(self._least, self.starts, True, slots, weights)

    def update(self, slots: np.ndarray, steps: np.ndarray, priority: np.ndarray) -> None:
        """Sets priorities `[B]` float32 of rows that were drawn as `steps` of their lanes.

        Slots of -1, and rows that others have replaced since, are skipped; of equal slots the last one
        counts. It must have caught up.

        Raises:
            IndexError: there is no such slot. Nothing is changed then.
        """
        kept = np.empty(len(slots), np.int64)
        # Until the weights follow, the count differs from what was seen.
        self.index.num_updates[0] += 1
        count, largest = priority_tree.report(self.index.tables, slots, steps, priority, kept)
        if count < 0:
            self.index.num_updates[0] -= 1
            most = self.index.capacity
            raise IndexError(f"slots must be below {most}, got {slots.min()} to {slots.max()}.")
        self.largest = max(self.largest, float(largest))
        self._take_in(kept[:count])
        self._num_updates += 1

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
        ranges = self._every_leaf
        if window is not None:
            ranges = np.empty((2, 2 * self.index.num_envs), np.int64)
            # The newest that the tree knows: another process may be writing.
            priority_tree.newest_ranges(self._seen.lanes, self.index.steps_per_lane, window, ranges)
        slots, weights = np.empty(len(noise), np.int64), np.empty(len(noise))
        total = priority_tree.draw_leaves(self.sums, self.starts, ranges, noise, slots, weights)
        return slots, weights, total, ranges

    def least(self, ranges: np.ndarray) -> float:
        """Returns the least weight within ranges of leaves."""
        if self._least is None:
            self._least, every = np.full(len(self.sums), np.inf), np.arange(self.index.capacity)
            priority_tree.set_leaves(
                self._least, self.starts, True, every, self.sums[self.starts[-2] :]
            )
        return priority_tree.least_within(self._least, self.starts, ranges)


def checked_priorities(priority: Any, num_rows: int) -> np.ndarray:
    """Returns `[num_rows]` float32 priorities on the host.

    Raises:
        ValueError: one is negative or not finite, or there is another number of them.
    """
    given = validation.values("priority", priority).detach()
    values = given.float().cpu().numpy().reshape(-1)
    if len(values) not in (1, num_rows):
        raise ValueError(
            f"there must be one priority a row, for {num_rows} rows, got {len(values)}."
        )
    if not priority_tree.are_priorities(values):
        if (least := values[~np.isnan(values)].min(initial=0)) < 0:
            what = f"must be at least 0, got {least:g}: pass td_error.abs()"
        else:
            wrong = values[~np.isfinite(values)][0]
            what = f"must be finite, got {wrong}: the loss or the network has diverged"
        raise ValueError(f"priorities {what}. No priority was updated.")
    return values if len(values) == num_rows else values.repeat(num_rows)
