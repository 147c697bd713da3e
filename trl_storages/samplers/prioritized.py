"""Draws by priority.

Letters: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from trl_storages import arguments, keys
from trl_storages.attributes import Checked, unit_interval
from trl_storages.callers import warn_caller
from trl_storages.packed import PackedStorage
from trl_storages.samplers.base import Drawn, OwnSampler
from trl_storages.samplers.priorities import Priorities

__all__ = ["REDUCTIONS", "PERSampler", "checked_priorities"]

#: TorchRL's names for how to reduce several priorities of one row.
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
    "median": lambda priority, dim: priority.median(dim).values,
}


# Draws after which priorities that were never reported are missed.
_FORGOTTEN = 1000


class PERSampler(OwnSampler):
    """Draws rows in proportion to their priorities.

        P(i) = (p_i + eps)^alpha / Σ_j (p_j + eps)^alpha,   weight_i = (min_j P(j) / P(i))^beta

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.
    """

    max_capacity, reduction = 0, "max"
    alpha: Any = Checked(arguments.number, at_least=0, at_most=4)
    beta: Any = Checked(unit_interval)
    eps: Any = Checked(arguments.number, at_least=1e-12, at_most=1)
    normalize: Any = Checked(arguments.choice, ("batch", "storage", "none"))

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        normalize: str = "batch",
        reduction: str = "max",
    ) -> None:
        super().__init__()
        self.max_capacity = arguments.integer("max_capacity", max_capacity, at_least=1)
        self.reduction = arguments.choice("reduction", reduction, REDUCTIONS)
        self.alpha, self.beta, self.eps, self.normalize = alpha, beta, eps, normalize
        self._priorities: Priorities | None = None
        # Draws so far; -inf once priorities have been reported.
        self._unanswered = 0.0

    def _of(self, storage: PackedStorage) -> Priorities:
        """Returns the priorities of a storage's rows, which know all of them."""
        found = self._priorities
        if found is None or found.index is not storage.episodes:
            if storage.max_size > self.max_capacity:
                raise ValueError(
                    f"max_capacity must be at least that of the storage, {storage.max_size}, got "
                    f"{self.max_capacity}."
                )
            found = self._priorities = Priorities(storage, self.alpha, self.eps)
        if (found.alpha, found.eps) != (self.alpha, self.eps):
            found.rescale(self.alpha, self.eps)
        found.catch_up()
        return found

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws `[B]` slots and their `priority_weight`."""
        priorities = self._of(storage)
        self._unanswered += 1
        if self._unanswered == _FORGOTTEN:
            warn_caller(
                f"{_FORGOTTEN:,} batches were drawn by priority, and no priority was ever reported: all "
                "rows are still drawn alike. Call update_tensordict_priority(batch) after each loss, "
                "which needs its td_error; or draw uniformly, with alpha=0."
            )
        ranges = priorities.ranges(window)
        drawn, weights, total = priorities.draw(self.noise(batch_size).numpy(), ranges)
        slots, weight = torch.from_numpy(drawn), torch.from_numpy(weights)
        if self.normalize == "none":
            count = len(storage.episodes)
            if window is not None:
                count = int(storage.episodes.fill.clip(max=window).sum())
            ratio = total / (count * weight)
        else:
            least = weight.min() if self.normalize == "batch" else priorities.least(ranges)
            ratio = least / weight
        return slots, {
            keys.PRIORITY_WEIGHT: ratio.pow(self.beta).float(),
            keys.PRIORITY_STAMP: storage.episodes.steps_of(slots),
        }

    @property
    def priorities(self) -> torch.Tensor:
        """`[N]` float32 raw priorities by slot, inf where there is no row; a copy."""
        if self._priorities is None:
            return torch.full((self.max_capacity,), math.inf)
        return torch.from_numpy(self._priorities.by_slot())

    def begin_anew(self) -> None:
        """Forgets all priorities: rows that are there count as new."""
        self._priorities = None

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
        storage.check_writable()
        slots = arguments.values("index", slots).reshape(-1).cpu()
        if slots.is_floating_point() or slots.dtype is torch.bool:
            raise TypeError(f"index must hold integers, got {slots.dtype}.")
        if len(slots) and not -1 <= slots.min() <= slots.max() < storage.max_size:
            raise IndexError(f"slots must be below {storage.max_size}, got {int(slots.max())}.")
        values = checked_priorities(priority, len(slots))
        there = slots >= 0
        if not there.all():
            slots, values = slots[there], values[there]
            steps = None if steps is None else steps.reshape(-1).cpu()[there]
        known, self._unanswered = self._of(storage), -math.inf
        steps = storage.episodes.steps_of(slots) if steps is None else steps.reshape(-1).cpu()
        known.update(slots.numpy(), steps.numpy(), values.numpy())


def checked_priorities(priority: Any, num_rows: int) -> torch.Tensor:
    """Returns `[num_rows]` float32 priorities on the host.

    Raises:
        ValueError: one is negative or not finite, or there is another number of them.
    """
    values = arguments.values("priority", priority).detach().reshape(-1).float().cpu()
    if len(values) not in (1, num_rows):
        raise ValueError(
            f"there must be one priority a row, for {num_rows} rows, got {len(values)}."
        )
    if not ((values >= 0) & (values < math.inf)).all():
        raise ValueError(
            "priorities must be finite and at least 0, got others: nothing was changed."
        )
    return values.expand(num_rows)
