"""Prioritized experience replay (PER): samples in proportion to priorities.

Letters: B batch, N slots, E lanes, R ranges of slots.
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
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import priority_tree
from trl_storages.samplers.base import Drawn, ReplaySampler
from trl_storages.serialization import Adopt, State, required_items
from trl_storages.settings import Setting
from trl_storages.storage import PackedStorage, StorageView
from trl_storages.validation import warn_caller

__all__ = ["REDUCTIONS", "PERSampler", "Priorities", "checked_priorities"]

Normalization = Literal["batch", "storage", "none"]

#: TorchRL's names of the reductions of several priorities of one transition.
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
    "median": lambda priority, dim: priority.median(dim).values,
}

_MAX_PRIORITY = torch.finfo(torch.float32).max
# Number of batches without a priority update after which a warning is given.
_NUM_BATCHES_WARNED = 1000


class PERSampler(ReplaySampler, PrioritizedSampler):  # type: ignore[misc]
    """Prioritized experience replay (PER): samples transitions in proportion to their priorities.

        P(i) = (p_i + eps)^alpha / Σ_j (p_j + eps)^alpha,   weight_i = (min_j P(j) / P(i))^beta

    where the minimum over j is over the batch, or as `normalize` specifies. The batch contains the
    importance weights as `priority_weight`, `[B]` float32.

    Replaces TorchRL's `PrioritizedSampler`, also in TorchRL's buffers over a `PackedStorage` with an
    `EpisodeWriter`. `PERSampler` needs no native extension; stores raw priorities, so that `alpha` may
    change at any time, also from 0; and rejects invalid priorities. The priority tree is on the host for
    transitions on any device.

    **Weights.** `normalize="batch"` divides by the largest weight of the batch, as dopamine, Acme and
    tianshou do; "storage" by the largest weight of all transitions (within an `ERESampler`, of the
    recency window), as TorchRL does; "none" does not divide: (N P(i))^-beta, with mean 1 for beta = 1.
    The weights differ by a factor common to the batch, and therefore in the effective step size. With
    "storage" a single transition with a small error makes all other weights small.

    **New transitions.** A transition that is written, also over an older one, gets the largest priority
    so far, or 1 before the first update.

    **Overwritten transitions.** A priority for a transition that has been overwritten since it was
    sampled is skipped. In a batch without `index_generation` the transition that is now in the slot gets
    the priority.

    **Missing updates.** A warning is given once if the first 1,000 batches are sampled without an update
    of priorities.

    Args:
        max_capacity: N, at least the size of the storage.
        alpha: priority exponent, in [0, 4]; 0 samples uniformly.
        beta: exponent of the importance weights, in [0, 1]. Anneal it to 1.
        eps: in (0, 1]; is added to each priority, so that transitions with priority 0 are sampled.
        normalize: how weights are normalised: "batch", "storage" or "none".
        reduction: how several priorities of one transition are reduced: "max", "min", "mean" or
            "median".
        refresh_ms: shortest time in milliseconds between two updates of a reader from the priorities
            that the writer of the directory set; 0 updates before each batch. An update compares the
            priorities of all transitions.

    All arguments except `max_capacity` are attributes that may be set at any time, `alpha`, `beta` and
    `eps` also by TorchRL's schedulers. The first batch after a change of `alpha` or `eps`, and the first
    batch with `normalize="storage"`, cost a pass over all transitions.

    Raises:
        ValueError: an argument is out of range.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    >>> from tensordict import TensorDict
    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> buffer = ReplayStorage(storage=PackedStorage(100), sampler=PERSampler(100), batch_size=32)
    >>> done = torch.zeros(50, 1, dtype=torch.bool)
    >>> _ = buffer.extend(TensorDict({"observation": torch.zeros(50), "next": {"done": done}}, [50]))
    >>> batch = buffer.sample()
    >>> batch["td_error"] = torch.rand(32)
    >>> buffer.update_tensordict_priority(batch)
    """

    alpha: Any = Setting(validation.number, at_least=0, at_most=4)
    beta: Any = Setting(validation.number, at_least=0, at_most=1)
    eps: Any = Setting(validation.number, at_least=1e-12, at_most=1)
    normalize: Any = Setting(validation.choice, get_args(Normalization))
    reduction: Any = Setting(validation.choice, REDUCTIONS)
    refresh_ms: Any = Setting(validation.number, at_least=0, at_most=math.inf, saved=False)

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
        # TorchRL's constructor is not called, because it builds native trees and fails where their
        # extension does not load.
        self._max_capacity = validation.integer("max_capacity", max_capacity, at_least=1)
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self.normalize, self.reduction = normalize, reduction
        self.refresh_ms = refresh_ms
        self._priorities: Priorities | None = None
        # The largest priority so far, for the next `Priorities`; None takes it from the transitions.
        self._largest: float | None = None
        # The number of batches sampled.
        self._num_batches = 0

    def update_priorities_from(self, view: StorageView) -> Priorities:
        """Gives new transitions of a view their priorities; returns the priorities of all transitions.

        Raises:
            ValueError: the storage has more slots than `max_capacity`.
        """
        priorities, index = self._priorities, view.episodes
        options = index, self.alpha, self.eps, view.is_exclusive
        if priorities is None or priorities.options != options:
            if index.capacity > self._max_capacity:
                raise ValueError(
                    f"max_capacity must be at least that of the storage, {index.capacity}, got "
                    f"{self._max_capacity}."
                )
            is_same = priorities is not None and priorities.index is index
            largest = priorities.largest if is_same else self._largest  # type: ignore[union-attr]
            priorities = Priorities(*options, largest)
            self._priorities, self._largest = priorities, None
        priorities.update_from_index(0 if view.is_exclusive else self.refresh_ms)
        return priorities

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots of the recency window in proportion to their priorities.

        Returns:
            `[B]` int64 slots; and `priority_weight` `[B]` float32.
        """
        priorities = self.update_priorities_from(view)
        # A reader of a directory cannot update priorities and gets no warning.
        is_missing = self._num_batches == _NUM_BATCHES_WARNED and not priorities.largest
        self._num_batches += 1
        if is_missing and view.is_exclusive:
            warn_caller(
                f"{_NUM_BATCHES_WARNED:,} batches were sampled by priority, but priorities were never "
                "updated, so sampling is still uniform. Call update_tensordict_priority(batch) after "
                "each loss, with the td_error in the batch; or pass alpha=0 to sample uniformly."
            )
        slots, weights, total, ranges = priorities.draw(noise[0], window)
        if self.normalize == "none":
            max_steps = view.episodes.steps_per_lane if window is None else window
            scale = total / view.episodes.fill.clip(max=max_steps).sum()
        else:
            scale = weights.min() if self.normalize == "batch" else priorities.least(ranges)
        weight = ((scale / weights) ** self.beta).astype(np.float32)
        return slots, {keys.PRIORITY_WEIGHT: weight}

    def reload_priorities(self) -> None:
        """Reads the priorities from the index again at their next use; call it before its tables move.

        The largest priority so far is kept, even if no stored transition has it.
        """
        self._priorities, self._largest = None, self.state()["largest"]

    @property
    def priorities(self) -> torch.Tensor:
        """A copy `[N]` float32 of the raw priorities by slot at the last sample; inf in empty slots."""
        if self._priorities is None:
            return torch.full((self._max_capacity,), math.inf, device="cpu")
        return torch.from_numpy(self._priorities.by_slot())

    def _empty(self) -> None:
        """Discards all priorities, so that all transitions count as new."""
        self._priorities, self._largest = None, 0.0

    def state(self) -> State:
        """Returns the largest priority so far; None if it follows from the stored transitions.

        The state of the storage contains the priorities of the transitions.
        """
        priorities = self._priorities
        return {"largest": self._largest if priorities is None else priorities.largest}

    def prepare_load(self, state: Any) -> Adopt:
        """Checks a state, and returns a function that adopts the state."""
        (largest,) = required_items("PERSampler", state, ("largest",))
        largest = validation.optional(validation.number, "largest", largest, at_most=_MAX_PRIORITY)

        def adopt() -> None:
            self._priorities, self._largest = None, largest

        return adopt

    def __getstate__(self) -> State:
        # A copy reads the priorities of the storage from which it samples.
        largest = self.state()["largest"]
        return {**self.__dict__, "_rng": None, "_priorities": None, "_largest": largest}

    def set_priorities(
        self, storage: PackedStorage, slots: Any, priority: Any, steps: Any = None
    ) -> None:
        """Sets priorities of transitions; if a slot occurs several times, the last priority counts.

        Args:
            storage: holds the transitions.
            slots: `[B]` int64; -1 is skipped.
            priority: `[B]` numbers, or one number for all slots.
            steps: `[B]` the step of each transition in its lane; transitions that have been overwritten
                are skipped. None sets the priorities of the transitions now in the slots.

        Raises:
            ValueError: a priority is negative or not finite, or their number differs from that of the
                slots. Nothing is changed.
            TypeError, IndexError: `slots` are not integers, or too large. Nothing is changed.
        """
        storage.backend.check_writer()
        indices = validation.slots(slots).numpy().reshape(-1)
        values = checked_priorities(priority, len(indices))
        priorities = self.update_priorities_from(storage.view())
        if steps is None:
            expected_steps = storage.episodes.steps_of(indices.clip(0, storage.max_size - 1))
        else:
            expected_steps = steps.cpu().numpy().reshape(-1)
        priorities.update(indices, expected_steps, values)

    # Called by TorchRL's buffers

    @property
    def max_size(self) -> int:
        """N, the largest number of slots of a storage."""
        return self._max_capacity

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Sets the priorities of transitions of `storage`; see `set_priorities`."""
        self.set_priorities(storage, index, priority)

    def add(self, index: Any) -> None:
        """Does nothing, because each batch reads new transitions from the episode index."""

    extend = add

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Does nothing, because transitions are never changed in place."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"normalize={self.normalize!r})"
        )


class Priorities:
    """Raw priorities `[N]` of a storage's transitions, and their weights (p + eps)^alpha in a tree.

    The raw priorities are a table of the index, in which a slot that is written gets 0. Invalid raw
    priorities, which a damaged file may contain, count as 0. `update_from_index` follows the index:
    evicted transitions get weight 0, and new transitions without a priority get the largest so far.

    Args:
        index: the episode index of the storage.
        alpha: exponent of the weights.
        eps: is added to each priority.
        can_set: whether this process may set priorities.
        largest: the largest priority ever set by an update, 0 if there was no update. None takes the
            largest one of the stored transitions, as does a reader of another process's directory.
    """

    def __init__(
        self, index: EpisodeIndex, alpha: float, eps: float, can_set: bool, largest: float | None
    ) -> None:
        #: The first four arguments.
        self.options = index, alpha, eps, can_set
        self.index, self.raw = index, index.priorities
        # The raw priorities that the tree contains, the number of updates until then, and its time.
        self._last_raw, self._num_updates = self.raw.copy(), int(index.num_updates[0])
        self._refresh_time = time.monotonic()
        self.starts = priority_tree.level_starts(index.capacity)
        self._every_leaf = priority_tree.every_leaf(self.starts)
        self.sums = np.zeros(self.starts[-1])
        # The tree of least weights; None until `least` needs it.
        self._minima: np.ndarray | None = None
        # A `Snapshot` of the transitions that the tree contains; None before `update_from_index`.
        self._snapshot: Any = None
        if largest is None or not can_set:
            largest = self._largest_of(index.live_slots().numpy())
        #: The largest raw priority so far, 0 before the first update.
        self.largest = largest

    @property
    def of_new(self) -> float:
        """The raw priority of new transitions: the largest so far, 1 before the first update."""
        return self.largest or 1.0

    def update_from_index(self, refresh_ms: float = 0) -> None:
        """Adds new transitions and the priorities that other processes set; removes evicted transitions.

        Args:
            refresh_ms: shortest time in milliseconds between two comparisons of all priorities.
        """
        # Snapshot and number of updates are stored last, so that an interrupted update is repeated.
        missed, now = int(self.index.num_updates[0]) - self._num_updates, time.monotonic()
        if missed and now >= self._refresh_time + refresh_ms / 1e3:
            changed = np.flatnonzero(self.raw != self._last_raw)
            self.largest = max(self.largest, self._largest_of(changed))
            self._set_weights(changed[self.sums[self.starts[-2] + changed] > 0])
            self._num_updates, self._refresh_time = self._num_updates + missed, now
        changes, snapshot = self.index.changes_since(self._snapshot)
        if changes is not None:
            zeros = np.zeros(len(changes.evicted))
            priority_tree.set_leaves(self.sums, self.starts, False, changes.evicted, zeros)
            self._set_minima(changes.evicted)
            self._set_weights(changes.written)
        self._snapshot = snapshot

    def _largest_of(self, slots: np.ndarray) -> float:
        """Returns the largest raw priority of some slots, 0 if none is set."""
        raw = self.raw[slots]
        return float(raw.max(initial=0, where=raw < np.inf))

    def _set_weights(self, slots: np.ndarray) -> None:
        """Sets the weights of valid transitions, and the raw priorities of new ones if `can_set`."""
        if not len(slots):
            return
        index, alpha, eps, can_set = self.options
        tables = self.raw, self._last_raw, self.sums, self.starts
        priority_tree.set_weights(*tables, slots, self.of_new, alpha, eps, can_set)
        self._set_minima(slots)
        if can_set:
            index.num_updates[0] += 1
            self._num_updates += 1

    def _set_minima(self, slots: np.ndarray) -> None:
        """Copies the weights of some slots to the tree of least weights, if there is one."""
        if self._minima is not None:
            weights = self.sums[self.starts[-2] + slots]
            priority_tree.set_leaves(self._minima, self.starts, True, slots, weights)

    def update(self, slots: np.ndarray, steps: np.ndarray, priority: np.ndarray) -> None:
        """Sets priorities of transitions; `update_from_index` must have been called.

        Args:
            slots: `[B]` int64; -1 is skipped. If a slot occurs several times, the last priority counts.
            steps: `[B]` the step of each transition in its lane; overwritten transitions are skipped.
            priority: `[B]` float32.

        Raises:
            IndexError: a slot is too large. Nothing is changed.
        """
        output = np.empty(len(slots), np.int64)
        # The index counts the update before the tree does, so that an interrupted update is repeated.
        self.index.num_updates[0] += 1
        size, largest = priority_tree.set_priorities(
            self.index.tables, slots, steps, priority, output
        )
        if size < 0:
            self.index.num_updates[0] -= 1
            capacity = self.index.capacity
            raise IndexError(f"slots must be below {capacity}, got {slots.min()} to {slots.max()}.")
        self.largest = max(self.largest, float(largest))
        self._set_weights(output[:size])
        self._num_updates += 1

    def by_slot(self) -> np.ndarray:
        """Returns the raw priority of each slot, `[N]` float32, inf in empty slots."""
        self.update_from_index()
        priorities, slots = np.full_like(self.raw, np.inf), self.index.live_slots().numpy()
        raw = self.raw[slots]
        priorities[slots] = np.where((raw > 0) & (raw < np.inf), raw, self.of_new)
        return priorities

    def draw(
        self, noise: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
        """Draws slots in proportion to their weights.

        Args:
            noise: `[B]` int64 random numbers.
            window: the recency window: how many of the newest steps of each lane to draw from; None
                draws from all steps.

        Returns:
            `[B]` slots; `[B]` float64 weights of the slots; the total weight of the ranges; and the
            ranges `[2, R]` of leaves that were drawn from, firsts and ends.
        """
        ranges = self._every_leaf
        if window is not None:
            ranges = np.empty((2, 2 * self.index.num_envs), np.int64)
            # The newest steps in the tree, because another process may be writing newer ones.
            lane_bounds = self._snapshot.lane_bounds
            priority_tree.newest_ranges(lane_bounds, self.index.steps_per_lane, window, ranges)
        slots, weights = np.empty(len(noise), np.int64), np.empty(len(noise))
        total = priority_tree.draw_leaves(self.sums, self.starts, ranges, noise, slots, weights)
        return slots, weights, total, ranges

    def least(self, ranges: np.ndarray) -> float:
        """Returns the least weight of ranges `[2, R]` of leaves."""
        if self._minima is None:
            minima, slots = np.full(len(self.sums), np.inf), np.arange(self.index.capacity)
            weights = self.sums[self.starts[-2] :]
            priority_tree.set_leaves(minima, self.starts, True, slots, weights)
            self._minima = minima
        return priority_tree.least_within(self._minima, self.starts, ranges)


def checked_priorities(priority: Any, num_slots: int) -> np.ndarray:
    """Returns `[num_slots]` float32 priorities on the host.

    Raises:
        ValueError: a priority is negative or not finite, or their number is neither 1 nor `num_slots`.
    """
    priorities = validation.values("priority", priority).detach()
    values = priorities.float().cpu().numpy().reshape(-1)
    if len(values) not in (1, num_slots):
        raise ValueError(
            f"expected one priority per transition, {num_slots}, got {len(values)}. No priority was "
            "updated."
        )
    if not priority_tree.are_priorities(values):
        if (smallest := values[~np.isnan(values)].min(initial=0)) < 0:
            problem = f"must be at least 0, got {smallest:g}: pass td_error.abs()"
        else:
            non_finite = values[~np.isfinite(values)][0]
            problem = f"must be finite, got {non_finite}: the loss or the network has diverged"
        raise ValueError(f"priorities {problem}. No priority was updated.")
    return values if len(values) == num_slots else values.repeat(num_slots)
