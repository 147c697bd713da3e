"""The priorities of the rows of a storage, by slot, on one device.

Letters: B batch, N slots.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from trl_storages.episodes import EpisodeIndex
from trl_storages.functional.priorities import importance_weight, raw_importance_weight
from trl_storages.priority_tree.base import ABSENT, PriorityTree
from trl_storages.priority_tree.choice import priority_tree
from trl_storages.priority_tree.lane_order import LaneOrder
from trl_storages.priority_tree.late_error import LateError

__all__ = ["Normalization", "PriorityTable"]

#: Whose largest weight is 1: that of the batch, that of all rows that could have been drawn, or none.
Normalization = Literal["batch", "storage", "none"]

_INFINITY_BITS = int(np.float32(np.inf).view(np.uint32))


class PriorityTable:
    """Decides which priorities are taken in, and keeps them in a tree.

    A row that is written gets the largest priority reported so far, 1 before there is any. What is
    reported later is checked: on the CPU at once; on a GPU without waiting for it, so that a wrong
    report changes nothing there either, and raises in a later call.

    Args:
        capacity: N.
        alpha: exponent of the draws.
        eps: added to priorities.
        device: where the table lives.

    Attributes:
        has_rows: whether any slot has held a row since the table was made or cleared.
    """

    def __init__(self, capacity: int, *, alpha: float, eps: float, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.has_rows = False
        self._alpha, self._eps = alpha, eps
        self._on_host = device.type == "cpu"
        # The largest priority reported; 0 says that there was none.
        self._largest = torch.zeros((), dtype=torch.float32, device=device)
        self._late_error = LateError(device)
        # The number of lanes is known once windows are drawn; it does not matter before.
        self._order = LaneOrder(capacity)
        self._tree = self._plant()

    def _plant(self) -> PriorityTree:
        return priority_tree(
            self._order.num_leaves, alpha=self._alpha, eps=self._eps, device=self.device
        )

    # Columns by slot

    def _leaves(self) -> torch.Tensor:
        return self._order.leaves(torch.arange(self.capacity, device=self.device))

    @property
    def priorities(self) -> torch.Tensor:
        """`[N]` float32 raw priorities, `ABSENT` where there is no row. A copy."""
        return self._tree.priorities[self._leaves()]

    @property
    def generations(self) -> torch.Tensor:
        """`[N]` int32, how often each slot was written. A copy."""
        return self._tree.generations[self._leaves()]

    @property
    def new_priority(self) -> float:
        """The priority that rows get when they are written. Waits for the device."""
        self.raise_late_error(wait=True)
        return self._largest.item() or 1.0

    # Drawing

    def draw(
        self,
        uniform: torch.Tensor,
        beta: float,
        normalize: Normalization,
        num_rows: int | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws among all rows.

        Args:
            uniform: `[B]` float64 random numbers in [0, 1).
            beta: exponent of the importance weights.
            normalize: whose largest weight is 1.
            num_rows: how many rows there are, on the host or the device.

        Returns:
            `[B]` int64 slots, `[B]` float32 weights, `[B]` int32 generations.
        """
        leaf, priority, generation = self._tree.draw(uniform)
        weight = self._weights(priority, beta, normalize, num_rows)
        return self._order.slots(leaf), weight, generation

    def draw_newest(
        self,
        uniform: torch.Tensor,
        beta: float,
        normalize: Normalization,
        episodes: EpisodeIndex,
        window: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws among the newest rows only, `[]` int64 `window` of them; see `draw`."""
        if episodes.num_envs != self._order.num_lanes:
            self._arrange(episodes.num_envs, self.priorities, self.generations)
        start, stop = self._order.newest(episodes, window)
        leaf, priority, generation = self._tree.draw(uniform, start, stop)
        num_rows = (stop - start).sum()
        weight = self._weights(priority, beta, normalize, num_rows, start, stop)
        return self._order.slots(leaf), weight, generation

    def _weights(
        self,
        priority: torch.Tensor,
        beta: float,
        normalize: Normalization,
        num_rows: int | torch.Tensor,
        *ranges: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the importance weights of drawn `[B]` priorities, float32.

        Args:
            priority: `[B]` float32.
            beta: as in `draw`.
            normalize: as in `draw`.
            num_rows: how many rows could have been drawn.
            *ranges: `[R]` first leaves and ends of where they lie; none for all.
        """
        exponents = {"alpha": self._alpha, "beta": beta, "eps": self._eps}
        if normalize == "none":
            mean = self._tree.total(*ranges)
            mean = (mean.sum() if ranges else mean) / num_rows
            # In float64: the weights of rows without error are large.
            return raw_importance_weight(priority.double(), mean, **exponents).float()
        least = priority.amin() if normalize == "batch" else self._tree.least(*ranges)
        return importance_weight(priority, least, **exponents)

    def rescale(self, *, alpha: float, eps: float) -> None:
        """Changes the exponent, exactly, in a pass over all rows."""
        self._alpha, self._eps = alpha, eps
        self._tree.rescale(alpha=alpha, eps=eps)

    # Writing

    def write(self, slots: torch.Tensor) -> None:
        """Gives rows that were written the largest priority.

        Args:
            slots: `[B]` int64, contiguous; -1 names none.
        """
        self.has_rows = True
        if self._on_host:
            if slots.numel() and slots.numpy().min() < 0:
                slots = slots[slots >= 0]
            self._tree.renew(self._order.leaves(slots), self._largest.item() or 1.0)
        else:
            largest = torch.where(self._largest > 0, self._largest, 1.0)
            self._tree.renew(self._order.leaves(slots.clamp(min=0)), largest, slots >= 0)

    def update(
        self, slots: torch.Tensor, priority: torch.Tensor, generation: torch.Tensor | None
    ) -> None:
        """Takes in reported priorities. Of a slot that occurs twice, the last wins.

        Args:
            slots: `[B]` int64, contiguous; slots without a row and below 0 are left alone.
            priority: `[B]` float32, contiguous.
            generation: `[B]` int32 as drawn: slots that were written since are left alone.

        Raises:
            ValueError: a priority is NaN, negative or infinite. Nothing has changed then.
            IndexError: a slot is not below N. Nothing has changed then.
        """
        if not slots.numel():
            return
        if self._on_host:
            self._update_on_host(slots, priority, generation)
        else:
            self._update_on_device(slots, priority, generation)

    def _update_on_host(
        self, slots: torch.Tensor, priority: torch.Tensor, generation: torch.Tensor | None
    ) -> None:
        largest = _largest_priority(priority.numpy())
        # Negative numbers are the largest unsigned ones, so that one comparison finds them too.
        if slots.numpy().view(np.uint64).max() >= self.capacity:
            if slots.max() >= self.capacity:
                raise IndexError(
                    f"index must be below max_capacity={self.capacity}, got {int(slots.max())}."
                )
            there = slots >= 0
            slots, priority = slots[there], priority[there]
            generation = None if generation is None else generation[there]
        written = self._tree.set(self._order.leaves(slots), priority, generation)
        # What was left out may have been the largest; but new records are rare.
        if largest > self._largest.item() and written.numel():
            torch.maximum(self._largest, written.max(), out=self._largest)

    def _update_on_device(
        self, slots: torch.Tensor, priority: torch.Tensor, generation: torch.Tensor | None
    ) -> None:
        """Does what `_update_on_host` does with masks, so that the host needs to know nothing."""
        self.raise_late_error()
        low, high = torch.aminmax(priority)
        valid = (low >= 0) & (high < ABSENT) & (slots < self.capacity).all()
        self._late_error.note(~valid)
        leaves = self._order.leaves(slots.clamp(0, self.capacity - 1))
        written = self._tree.set(leaves, priority, generation, valid & (slots >= 0))
        torch.maximum(self._largest, written.amax(), out=self._largest)

    def raise_late_error(self, *, wait: bool = False) -> None:
        """Raises the error of an earlier update, if the host knows of one.

        Args:
            wait: whether to wait for the device, and so hear of all of them.
        """
        if not self._on_host and self._late_error.pop(wait=wait):
            raise ValueError(
                f"priorities must be finite and at least 0, and indices below max_capacity="
                f"{self.capacity}; an earlier update_priority got others, and changed nothing. "
                "Look for NaN in the loss."
            )

    # The whole of it

    def clear(self) -> None:
        """Forgets all rows and what was reported."""
        self.has_rows = False
        self._largest.zero_()
        self._tree.clear()

    def _arrange(self, num_lanes: int, priorities: torch.Tensor, generations: torch.Tensor) -> None:
        """Plants a tree with so many lanes, and gives it `[N]` columns by slot."""
        self._order = LaneOrder(self.capacity, num_lanes)
        self._tree = self._plant()
        leaves = self._leaves()
        column = torch.full_like(self._tree.priorities, ABSENT)
        column[leaves] = priorities
        self._tree.fill(column)
        self._tree.generations[leaves] = generations

    def validate(self) -> None:
        """Checks sums and minima against the priorities, walking all rows.

        Raises:
            RuntimeError: they do not fit.
            ValueError: priorities were refused on the device, and no call has told yet.
        """
        self.raise_late_error(wait=True)
        self._tree.validate()

    def state_dict(self) -> dict[str, Any]:
        """Returns the raw priorities and two numbers; trees are derived from them."""
        self.raise_late_error(wait=True)
        return {
            "priorities": self.priorities,
            "largest": self._largest.item(),
            "num_lanes": self._order.num_lanes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. All rows count as written anew."""
        priorities = state_dict["priorities"].to(self.device)
        self._arrange(state_dict["num_lanes"], priorities, self.generations + 1)
        self._largest.fill_(state_dict["largest"])
        self.has_rows = bool((priorities != ABSENT).any())


def _largest_priority(priority: np.ndarray) -> float:
    # The bits of float32 numbers, as integers, are ordered as the numbers are from 0 to infinity;
    # those of NaN and of negative numbers are above.
    largest = priority.view(np.uint32).max()
    if largest < _INFINITY_BITS:
        return largest.view(np.float32)
    bad = ~((priority >= 0) & (priority < ABSENT))
    if bad.any():
        raise ValueError(
            f"priorities must be finite and at least 0, got {priority[bad][0]} and "
            f"{int(bad.sum()) - 1} more such; nothing was changed. Look for NaN in the loss."
        )
    return priority.max()  # -0 is no less than 0
