"""The priorities of rows, by slot, and draws in proportion to them.

A `PriorityTable` holds the priorities as they were reported, and a sum tree that is derived from them.

Letters: B batch, N slots, E lanes (environments), R ring steps per lane.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from trl_storages.kernels import backend
from trl_storages.kernels.memory import sendable
from trl_storages.kernels.tables import ABSENT
from trl_storages.ring import EpisodeIndex

__all__ = [
    "ABSENT",
    "DeferredFlag",
    "Normalization",
    "PriorityTable",
    "check_priorities",
    "leaf_weights",
]


class DeferredFlag:
    """An error flag on a device, with a host copy that is updated asynchronously.

    Reading the flag itself would wait for all work queued on the device. The host copy may lag behind,
    but is correct once the device has caught up.

    Args:
        device: where errors are detected.
    """

    def __init__(self, device: torch.device) -> None:
        # Only copies to pinned memory are asynchronous.
        pinned = sendable(device)
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self._host_flag = torch.zeros((), dtype=torch.bool, pin_memory=pinned)

    def note(self, wrong: torch.Tensor) -> None:
        """Records an error if `wrong`, bool `[]` on the device, is true."""
        self._flag.logical_or_(wrong)
        self._host_flag.copy_(self._flag, non_blocking=True)

    def pop(self, *, wait: bool = False) -> bool:
        """Returns whether there was an error, and clears the flag.

        Args:
            wait: whether to synchronise with the device, so that no error so far is missed.
        """
        source = self._flag if wait else self._host_flag
        # Tensors of a simulated device (a subclass) have no value to read.
        if type(source) is not torch.Tensor or not bool(source):
            return False
        self._flag.zero_()
        self._host_flag.zero_()
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # Pinned memory can't be copied or pickled: a copy starts afresh, without an error.
        return type(self), (self._flag.device,)


# torch.pow is vectorised over up to `_VECTOR` numbers; the remainder takes a scalar path, which may
# differ in the last bit. Above `_SERIAL` numbers it uses several threads.
_VECTOR = 16
_SERIAL = 32_768


def leaf_weights(raised: torch.Tensor, alpha: float) -> torch.Tensor:
    """Returns `(p + eps)^alpha`, bitwise equal for equal priorities at any position.

    So weights do not depend on whether they are computed one by one or all at once.

    Args:
        raised: `[n]` float64, p + eps.
        alpha: priority exponent.

    Returns:
        `[n]` float64.
    """
    size = raised.numel()
    if left_over := -size % _VECTOR:
        raised = torch.cat([raised, raised.new_ones(left_over)])
    if size > _SERIAL:
        return torch.cat([part**alpha for part in raised.split(_SERIAL)])[:size]  # type: ignore[no-untyped-call]
    weights = raised**alpha
    return weights[:size] if left_over else weights


def check_priorities(priority: torch.Tensor) -> None:
    """Raises a ValueError if a priority, `[B]` float32, is NaN, negative or infinite."""
    bad = priority[~((priority >= 0) & (priority < ABSENT))]
    if bad.numel():
        raise ValueError(
            f"priorities must be finite and at least 0, got {bad[0].item()} and "
            f"{bad.numel() - 1} more such; nothing was changed. "
            + ("Pass td_error.abs()." if bad[0] < 0 else "Look for NaN in the loss.")
        )


#: What importance weights are divided by: the batch maximum, the maximum over all drawable rows, or
#: nothing.
Normalization = Literal["batch", "storage", "none"]


class PriorityTable:
    """Stores and validates priorities, and draws in proportion to them.

    A written row gets the largest priority reported so far, or 1 if there is none. Reported priorities
    are checked: on the CPU immediately; on a GPU without synchronising, so an invalid report changes
    nothing, but a later call raises the error.

    Args:
        capacity: N.
        alpha: priority exponent.
        eps: added to priorities.
        device: device of the table.

    Attributes:
        has_rows: whether any slot has held a row since the table was made or cleared.
        refreshes: the storage's refresh count when the table last followed it; 0 without a directory.
    """

    refreshes = 0

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float,
        eps: float,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.device = device
        self.has_rows = False
        # Those of the weights in the tree, and those of the next draw.
        self._alpha, self._eps = self._wanted = alpha, eps
        self._on_host = device.type == "cpu"
        self._rows = backend(device).RawPriorities(capacity, device)
        self._deferred_error = DeferredFlag(device)
        self._new_weight = (ABSENT, torch.zeros(1))
        # The number of lanes is only needed, and known, once windows are drawn.
        self._plant(num_lanes=1)

    def _plant(self, num_lanes: int) -> None:
        """Makes an empty tree."""
        self._tree = backend(self.device).SumTree(self.capacity, num_lanes, self.device)

    # Columns by slot

    @property
    def priorities(self) -> torch.Tensor:
        """`[N]` float32 raw priorities, `ABSENT` for empty slots. A copy."""
        return self._rows.priorities.clone()

    @property
    def stamps(self) -> torch.Tensor:
        """`[N]` int32, a number for each slot that changes when another row takes it. A copy.

        Drawn rows carry theirs as `priority_stamp`. TorchRL's writers count the same as generations.
        """
        return self._rows.stamps.clone()

    @property
    def new_priority(self) -> float:
        """The priority of newly written rows. Synchronises with the device."""
        self.raise_deferred_error(wait=True)
        return self._rows.largest.item() or 1.0

    def _weigh(self, priorities: torch.Tensor) -> torch.Tensor:
        return leaf_weights(priorities.double() + self._eps, self._alpha)

    def _all_weights(self) -> torch.Tensor:
        """Returns the weight of each slot, computed from the raw priorities."""
        priorities = self._rows.priorities
        return torch.where(priorities < ABSENT, self._weigh(priorities), 0.0)

    # Drawing

    def draw(
        self,
        noise: torch.Tensor,
        beta: float,
        num_rows: int | torch.Tensor,
        newest_of: EpisodeIndex | None = None,
        *,
        normalize: Normalization = "batch",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws among all rows, or among the newest.

        Args:
            noise: `[B]` int64 random numbers of 63 bits.
            beta: exponent of the importance weights.
            num_rows: the number of rows to draw among, on the host or the device.
            newest_of: the episode index of the rows, to draw among the newest; None draws among all.
            normalize: whose largest importance weight is 1.

        Returns:
            `[B]` int64 slots, `[B]` float32 weights, `[B]` int32 stamps.
        """
        ranges: torch.Tensor | None = None
        reference: torch.Tensor | None = None
        if (self._alpha, self._eps) != self._wanted:
            self._reweigh()
        if newest_of is not None:
            if newest_of.num_envs != self._tree.num_lanes:
                self._arrange(newest_of.num_envs)
            ranges = newest_of.ring.newest_ranges(num_rows, self._tree.lane_leaves)
        if normalize == "storage":
            reference = self._tree.least(ranges)
        elif normalize == "none" and ranges is None:
            reference = self._tree.total / num_rows
        elif ranges is not None and normalize == "none":
            reference = self._tree.range_sums(ranges).sum() / ranges.diff(dim=0).sum()
        slots, ratios = self._tree.draw(noise, ranges, reference)
        return slots, ratios.pow_(beta).float(), self._rows.stamps.index_select(0, slots)

    def _arrange(self, num_lanes: int) -> None:
        self._plant(num_lanes)
        self._tree.renew(self._all_weights())

    def rescale(self, *, alpha: float, eps: float) -> None:
        """Changes `alpha` and `eps`: on a GPU at once, so that captured draws see it.

        On the CPU the next draw recomputes all weights, since one may be going on in another thread.
        """
        self._wanted = alpha, eps
        if not self._on_host:
            self._reweigh()

    def _reweigh(self) -> None:
        """Recomputes all weights from the raw priorities."""
        self._alpha, self._eps = self._wanted
        self._new_weight = (ABSENT, torch.zeros(1))
        self._tree.renew(self._all_weights())

    # Writing

    def write(self, slots: torch.Tensor) -> None:
        """Gives rows that were written the largest priority.

        Args:
            slots: `[B]` int64, contiguous; -1 is skipped.

        Raises:
            IndexError: a slot is not below N. Nothing has changed then.
        """
        if self._renew(slots):
            raise self._no_slot(slots)

    def _renew(self, slots: torch.Tensor) -> bool:
        """Gives rows the largest priority; returns whether slots were found out of range (CPU only)."""
        priority = self._rows.renew(slots)
        if self._on_host and priority < 0:
            return True
        self.has_rows = True
        weight = self._weight_of_new(priority)
        self._tree.set(slots, weight)
        return False

    def _weight_of_new(self, priority: Any) -> torch.Tensor:
        """Returns the weight, `[1]`, of new rows with this priority."""
        if not self._on_host:
            return self._weigh(priority.reshape(1))
        # Cached: steps are often written one by one, and the priority rarely changes.
        if self._new_weight[0] != (priority := float(priority)):
            self._new_weight = priority, self._weigh(torch.tensor([priority]))
        return self._new_weight[1]

    def update(
        self, slots: torch.Tensor, priority: torch.Tensor, stamp: torch.Tensor | None
    ) -> None:
        """Applies reported priorities. For repeated slots the last one wins.

        Args:
            slots: `[B]` int64, contiguous; slots without a row and below 0 are skipped.
            priority: `[B]` float32, contiguous.
            stamp: `[B]` int32 as drawn, contiguous: slots written since are skipped; None skips
                none.

        Raises:
            ValueError: a priority is NaN, negative or infinite. Nothing has changed then.
            IndexError: a slot is not below N. Nothing has changed then.
        """
        if not slots.numel():
            return
        self.raise_deferred_error()
        if self._report(slots, priority, stamp):
            check_priorities(priority)
            raise self._no_slot(slots)

    def _report(
        self, slots: torch.Tensor, priority: torch.Tensor, stamp: torch.Tensor | None
    ) -> bool:
        """Applies priorities; returns whether they were rejected (CPU only)."""
        written, raised, wrong = self._rows.report(slots, priority, self._eps, stamp)
        if not self._on_host:
            self._deferred_error.note(wrong)
        elif wrong:
            return True
        self._tree.set(written, leaf_weights(raised, self._alpha))
        return False

    def _no_slot(self, slots: torch.Tensor) -> IndexError:
        return IndexError(
            f"index must be below max_capacity={self.capacity}, got {int(slots.max())}."
        )

    def raise_deferred_error(self, *, wait: bool = False) -> None:
        """Raises the error of an earlier update, if it has reached the host.

        Args:
            wait: whether to synchronise with the device, so that none is missed.
        """
        if not self._on_host and self._deferred_error.pop(wait=wait):
            raise ValueError(
                f"priorities must be finite and at least 0, and indices below max_capacity="
                f"{self.capacity}; an earlier update_priority got others, and changed nothing. "
                "Pass td_error.abs(), and look for NaN in the loss."
            )

    # State

    def follow(self, storage: Any) -> bool:
        """Reads another process's updates to the priorities of a storage on disk.

        Returns:
            False if this table does not hold the priorities of that storage on disk.
        """
        del storage
        return False

    def clear(self) -> None:
        """Removes all rows and resets the largest priority."""
        self.has_rows = False
        self._fill(torch.full_like(self._rows.priorities, ABSENT), largest=0.0)

    def _fill(self, priorities: torch.Tensor, largest: float) -> None:
        """Replaces all priorities and the largest one; all rows get a new stamp."""
        self._rows.priorities.copy_(priorities)
        self._rows.stamps.add_(1)
        self._rows.largest.fill_(largest)
        self._tree.renew(self._all_weights())

    def validate(self) -> None:
        """Checks priorities, and the sums and minima over them, in a pass over all rows.

        Raises:
            RuntimeError: a priority is negative or NaN, or sums or minima are wrong.
            ValueError: the device rejected priorities, and no call has raised that error yet.
        """
        self.raise_deferred_error(wait=True)
        largest, priorities = self._rows.largest.item(), self._rows.priorities
        if not 0 <= largest < ABSENT:
            raise RuntimeError(
                f"the largest priority must be finite and at least 0, got {largest}."
            )
        wrong = (~(priorities >= 0)).nonzero().squeeze(1)
        if len(wrong):
            raise RuntimeError(
                f"priorities must be at least 0, got {priorities[wrong[0]].item()} at the slot "
                f"{int(wrong[0])} and {len(wrong) - 1} more such."
            )
        tree = backend(self.device).SumTree(self.capacity, self._tree.num_lanes, self.device)
        tree.renew(self._all_weights())
        first = torch.arange(0, tree.num_leaves, 64, device=self.device)
        blocks = torch.stack([first, (first + 64).clamp(max=tree.num_leaves)])
        answers = [
            ("sum", self._tree.total, tree.total),
            ("sum of 64 leaves", self._tree.range_sums(blocks), tree.range_sums(blocks)),
            ("weight", self._tree.weights, tree.weights),
        ]
        if self._tree.tracks_least:
            answers.append(("minimum", self._tree.least(), tree.least()))
        for name, got, want in answers:
            if not torch.equal(got, want):
                at = int((got != want).reshape(-1).nonzero()[0])
                one, other = got.reshape(-1)[at].item(), want.reshape(-1)[at].item()
                raise RuntimeError(f"the {name} over the priorities is {one}, must be {other}.")

    def state_dict(self) -> dict[str, Any]:
        """Returns the raw priorities, the largest one and the number of lanes."""
        self.raise_deferred_error(wait=True)
        return {
            "priorities": self.priorities,
            "largest": self._rows.largest.item(),
            "num_lanes": self._tree.num_lanes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. All rows get a new stamp."""
        self._plant(state_dict["num_lanes"])
        self._fill(state_dict["priorities"], float(state_dict["largest"]))
        self.has_rows = bool((self._rows.priorities < ABSENT).any())

    # Copies and pickles carry the rows only and choose their own backend: the tree is derived, and
    # compiled loops hold views of tensors.

    def __getstate__(self) -> dict[str, Any]:
        own = {name: it for name, it in vars(self).items() if name not in ("_rows", "_tree")}
        return {**own, "state": self.state_dict(), "stamps": self.stamps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, stamps = state.pop("state"), state.pop("stamps")
        vars(self).update(state)
        self._rows = backend(self.device).RawPriorities(self.capacity, self.device)
        self.load_state_dict(saved)
        self._rows.stamps.copy_(stamps)
