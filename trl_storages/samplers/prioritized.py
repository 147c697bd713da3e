"""Draws in proportion to priorities.

Letters: B batch, N slots, E lanes (environments), T steps.
"""

from __future__ import annotations

import json
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from trl_storages.episodes import episodes_of
from trl_storages.keys import PRIORITY_STAMP, PRIORITY_WEIGHT
from trl_storages.priority_tree import ABSENT, LaneOrder, PriorityTree, priority_tree
from trl_storages.samplers.elsewhere import ElsewhereSampler
from trl_storages.samplers.late_error import LateError
from trl_storages.samplers.uniform import check_not_empty

__all__ = ["PERSampler"]

# float32 priorities to this power, and their sum, stay within float64.
_HIGHEST_ALPHA = 4.0
_INFINITY_BITS = int(np.float32(np.inf).view(np.uint32))


class PERSampler(PrioritizedSampler):
    """Prioritized experience replay: what surprised most is seen most.

        P(i) = (p_i + eps)^alpha / sum_j (p_j + eps)^alpha,   weight_i = (min_j P(j) / P(i))^beta

    It takes the place of TorchRL's `PrioritizedSampler`, in any of its replay buffers. It works on
    any device, with TorchRL's native part or without; it keeps raw priorities, so that `alpha` may
    change at any time, also from 0; and it refuses priorities that would spoil the draws.

    **New rows.** A row that is written, or overwritten, gets the largest priority reported so far
    at once, and 1 before there is any.

    **Late priorities.** Slots without a row and index -1 are left alone. A batch carries
    `priority_stamp`: hand it back as `stamp`, and rows that were overwritten since the batch was
    drawn are left alone too; without it, a late priority goes to the row that took the place.

    **On a GPU** nothing waits for the device. An update with a priority that must not be changes
    nothing there either, and the error is raised by the first later call that can know of it.

    Args:
        max_capacity: N, at least the size of the storage.
        alpha: how much priorities count, in [0, 4]: 0 draws uniformly.
        beta: how much of the bias the weights correct, in [0, 1]. Anneal it to 1.
        eps: above 0, at most 1; keeps rows without error drawable.
        reduction: how TorchRL's buffers reduce the several priorities of one row: "max", "min",
            "mean" or "median".

    `alpha`, `beta` and `eps` are plain attributes that TorchRL's schedulers may set. A new `alpha`
    or `eps` costs a pass over all rows, a new `beta` nothing.

    Raises:
        ValueError: an argument is out of range.

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.

    >>> from tensordict import TensorDict
    >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    >>> buffer = TensorDictReplayBuffer(
    ...     storage=LazyTensorStorage(100), sampler=PERSampler(100), batch_size=32
    ... )
    >>> _ = buffer.extend(TensorDict({"observation": torch.zeros(50, 3)}, [50]))
    >>> batch = buffer.sample()
    >>> batch["td_error"] = torch.rand(32)
    >>> buffer.update_tensordict_priority(batch)
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        reduction: str = "max",
    ) -> None:
        # TorchRL's constructor would make native trees, and fail where they do not load.
        if max_capacity < 1:
            raise ValueError(f"max_capacity must be at least 1, got {max_capacity}.")
        self._max_capacity = max_capacity
        self.reduction = reduction
        self._alpha = _checked("alpha", alpha, 0.0, _HIGHEST_ALPHA)
        self._beta = _checked("beta", beta, 0.0, 1.0)
        self._eps = _checked("eps", eps, 1e-30, 1.0)
        # The number of lanes is known once windows are drawn; it does not matter before.
        self._order = LaneOrder(max_capacity)
        self._place(torch.device("cpu"))

    def _place(self, device: torch.device) -> None:
        """Starts with no rows, on `device`."""
        self._device = device
        self._on_host = device.type == "cpu"
        self._has_rows = False
        self._marked: torch.Tensor | None = None
        # The largest priority reported; 0 says that there was none.
        self._largest = torch.zeros((), dtype=torch.float32, device=device)
        self._late_error = LateError(device)
        self._tree = self._plant()

    def _plant(self) -> PriorityTree:
        return priority_tree(
            self._order.num_leaves, alpha=self._alpha, eps=self._eps, device=self._device
        )

    def _all_slots(self) -> torch.Tensor:
        return torch.arange(self._max_capacity, device=self._device)

    # Parameters

    @property
    def alpha(self) -> float:
        """How much priorities count, in [0, 4]."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: SupportsFloat) -> None:
        alpha = _checked("alpha", value, 0.0, _HIGHEST_ALPHA)
        if alpha != self._alpha:
            self._alpha = alpha
            self._tree.rescale(alpha=alpha, eps=self._eps)

    @property
    def beta(self) -> float:
        """How much of the bias the weights correct, in [0, 1]."""
        return self._beta

    @beta.setter
    def beta(self, value: SupportsFloat) -> None:
        self._beta = _checked("beta", value, 0.0, 1.0)

    @property
    def eps(self) -> float:
        """What is added to priorities, above 0."""
        return self._eps

    @eps.setter
    def eps(self, value: SupportsFloat) -> None:
        eps = _checked("eps", value, 1e-30, 1.0)
        if eps != self._eps:
            self._eps = eps
            self._tree.rescale(alpha=self._alpha, eps=eps)

    @property
    def device(self) -> torch.device:
        """Where priorities live: on the device of the storage."""
        return self._device

    @property
    def priorities(self) -> torch.Tensor:
        """`[N]` float32 raw priorities by slot; inf where there is no row. A copy."""
        return self._tree.get(self._order.leaves(self._all_slots()))

    @property
    def _generations(self) -> torch.Tensor:
        return self._tree.generations[self._order.leaves(self._all_slots())]

    @property
    def default_priority(self) -> float:
        """The raw priority that new rows get. Waits for the device."""
        self._raise_late_error(wait=True)
        return float(self._largest) or 1.0

    # Drawing

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows with replacement, in proportion to their priorities.

        Returns:
            `[B]` int64 slots, and the info: `priority_weight` `[B]` float32, normalised over all
            rows, and `priority_stamp` `[B]` int32.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: the storage has more dimensions than one, or more slots than `max_capacity`.
        """
        check_not_empty(storage)
        self._settle(storage)
        return self._result(*self._tree.draw(self._uniform(batch_size), self._beta))

    def sample_window(
        self, storage: Storage, batch_size: int, window: torch.Tensor | int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws among the newest rows, in proportion to their priorities.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.
            window: `[]` int64 on the storage's device: how many of the newest rows, by
                `EpisodeIndex.ages`, to draw from, at least 1.

        Returns:
            As `sample`; the weights are normalised over the window.

        Raises:
            RuntimeError: the storage is empty or has no episode index.
        """
        check_not_empty(storage)
        episodes = episodes_of(storage)
        self._settle(storage)
        if episodes.num_envs != self._order.num_lanes:
            self._arrange(episodes.num_envs, self.priorities, self._generations)
        window = torch.as_tensor(window, device=self._device)
        start, stop = self._order.newest(episodes, window)
        uniform = self._uniform(batch_size)
        return self._result(*self._tree.draw(uniform, self._beta, start, stop))

    def _uniform(self, batch_size: int) -> torch.Tensor:
        # float64: float32 has 2^24 values, fewer than there may be rows.
        return torch.rand(batch_size, dtype=torch.float64, device=self._device, generator=self._rng)

    def _result(
        self, leaf: torch.Tensor, weight: torch.Tensor, generation: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return self._order.slots(leaf), {PRIORITY_WEIGHT: weight, PRIORITY_STAMP: generation}

    def _arrange(self, num_lanes: int, priorities: torch.Tensor, generations: torch.Tensor) -> None:
        """Plants a tree with so many lanes, and gives it `[N]` columns by slot."""
        self._order = LaneOrder(self._max_capacity, num_lanes)
        self._tree = self._plant()
        leaves = self._order.leaves(self._all_slots())
        column = torch.full_like(self._tree.priorities, ABSENT)
        column[leaves] = priorities
        self._tree.fill(column)
        self._tree.generations[leaves] = generations

    # Writing

    def add(self, index: int | torch.Tensor) -> None:
        """Gives a new row the largest priority."""
        self.extend(index)

    def extend(self, index: int | torch.Tensor) -> None:
        """Gives new rows the largest priority.

        Args:
            index: int64 slots of any shape; -1 for rows that found no room.
        """
        slots = self._as_slots(index)
        # Buffers tell of one write twice: through `mark_update`, then here.
        marked, self._marked = self._marked, None
        if marked is None or not self._on_host or not torch.equal(marked, slots):
            self._write(slots)

    def mark_update(self, index: int | torch.Tensor, *, storage: Storage | None = None) -> None:
        """Gives rows that were overwritten the largest priority."""
        taken_in = self._settle(storage)
        self._marked = self._as_slots(index)
        if not taken_in:
            self._write(self._marked)

    def _write(self, slots: torch.Tensor) -> None:
        self._has_rows = True
        if self._on_host:
            if slots.numel() and slots.numpy().min() < 0:
                slots = slots[slots >= 0]
            self._tree.renew(self._order.leaves(slots), self._largest.item() or 1.0)
        else:
            largest = torch.where(self._largest > 0, self._largest, 1.0)
            self._tree.renew(self._order.leaves(slots.clamp(min=0)), largest, slots >= 0)

    def update_priority(
        self,
        index: int | torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: Storage | None = None,
        stamp: torch.Tensor | None = None,
    ) -> None:
        """Gives drawn rows new priorities. Of an index that occurs twice, the last wins.

        Args:
            index: int64 slots of any shape, such as `[B]` or `[E, T]`; -1 is left out.
            priority: one for each index, or one for all; finite, at least 0.
            storage: where the rows are.
            stamp: `priority_stamp` of the batch, of the shape of `index`; None if unknown.

        Raises:
            ValueError: a priority is NaN, negative or infinite (in float32), or there are not as
                many as indices. Nothing has changed then.
            IndexError: an index is not below `max_capacity`. Nothing has changed then.
        """
        self._settle(storage)
        self._marked = None
        slots = self._as_slots(index)
        priority = torch.as_tensor(priority).detach().to(self._device, torch.float32).reshape(-1)
        if priority.numel() != slots.numel():
            if priority.numel() != 1:
                raise ValueError(
                    f"there must be one priority for each of the {slots.numel()} indices, or one "
                    f"for all, got {priority.numel()}."
                )
            priority = priority.expand(slots.numel())
        priority = priority.contiguous()
        if stamp is not None:
            stamp = stamp.to(self._device).reshape(-1)
        if slots.numel():
            update = self._update_on_host if self._on_host else self._update_on_device
            update(slots, priority, stamp)

    def _update_on_host(
        self, slots: torch.Tensor, priority: torch.Tensor, stamp: torch.Tensor | None
    ) -> None:
        largest = _largest_priority(priority.numpy())
        # Negative numbers are the largest unsigned ones, so that one comparison finds them too.
        if slots.numpy().view(np.uint64).max() >= self._max_capacity:
            if slots.max() >= self._max_capacity:
                raise IndexError(
                    f"index must be below max_capacity={self._max_capacity}, got "
                    f"{int(slots.max())}."
                )
            there = slots >= 0
            slots, priority = slots[there], priority[there]
            stamp = None if stamp is None else stamp[there]
        written = self._tree.set(self._order.leaves(slots), priority, stamp)
        # What was left out may have been the largest; but new records are rare.
        if largest > self._largest.item() and written.numel():
            torch.maximum(self._largest, written.max(), out=self._largest)

    def _update_on_device(
        self, slots: torch.Tensor, priority: torch.Tensor, stamp: torch.Tensor | None
    ) -> None:
        """Does what `_update_on_host` does with masks, so that the host needs to know nothing."""
        self._raise_late_error()
        low, high = torch.aminmax(priority)
        valid = (low >= 0) & (high < ABSENT) & (slots < self._max_capacity).all()
        self._late_error.note(~valid)
        leaves = self._order.leaves(slots.clamp(0, self._max_capacity - 1))
        written = self._tree.set(leaves, priority, stamp, valid & (slots >= 0))
        torch.maximum(self._largest, written.amax(), out=self._largest)

    def _raise_late_error(self, *, wait: bool = False) -> None:
        if not self._on_host and self._late_error.pop(wait=wait):
            raise ValueError(
                f"priorities must be finite and at least 0, and indices below max_capacity="
                f"{self._max_capacity}; an earlier update_priority got others, and changed "
                "nothing. Look for NaN in the loss."
            )

    def _as_slots(self, index: int | torch.Tensor) -> torch.Tensor:
        """Returns indices as contiguous int64 `[n]` on the device."""
        slots = torch.as_tensor(index)
        if slots.is_floating_point() or slots.dtype is torch.bool:
            raise TypeError(f"index must hold integers, got {slots.dtype}.")
        return slots.to(self._device, torch.int64).reshape(-1).contiguous()

    # The storage

    def _settle(self, storage: Storage | None) -> bool:
        """Moves to where the storage is, and takes in its rows if none are known yet.

        Returns:
            whether rows were taken in.
        """
        if storage is None:
            return False
        if storage.ndim != 1 or storage.max_size > self._max_capacity:
            raise ValueError(
                f"PERSampler needs a storage of ndim=1 and at most max_capacity="
                f"{self._max_capacity} rows, got ndim={storage.ndim} and {storage.max_size}."
            )
        device = getattr(storage, "device", None)
        if device is not None and device != self._device and device != "auto":
            state = self.state_dict() if self._has_rows else None
            self._place(torch.device(device))
            if state is not None:
                self.load_state_dict(state)
        if self._has_rows or not len(storage):
            return False
        episodes = getattr(storage, "episodes", None)
        rows = torch.arange(len(storage if episodes is None else episodes), device=self._device)
        self._write(rows if episodes is None else episodes.slots_by_age(rows))
        return True

    def _empty(self) -> None:
        self._has_rows = False
        self._marked = None
        self._largest.zero_()
        self._tree.clear()

    def validate(self) -> None:
        """Checks sums and minima against the priorities, walking all rows.

        Raises:
            RuntimeError: they do not fit.
            ValueError: priorities were refused on the device, and no call has told yet.
        """
        self._raise_late_error(wait=True)
        self._tree.validate()

    # State

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Trees are in the memory of one process.
        if get_spawning_popen() is not None:
            return ElsewhereSampler, ()
        return super().__reduce_ex__(protocol)

    def state_dict(self) -> dict[str, Any]:
        """Returns parameters and raw priorities; trees are derived from them."""
        self._raise_late_error(wait=True)
        return {**self._settings(), "priorities": self.priorities}

    def _settings(self) -> dict[str, Any]:
        return {
            "max_capacity": self._max_capacity,
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
            "largest": self._largest.item(),
            "num_lanes": self._order.num_lanes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Batches drawn before are gone.

        Raises:
            ValueError: the state is of another capacity. Nothing has changed then.
        """
        if state_dict["max_capacity"] != self._max_capacity:
            raise ValueError(
                f"max_capacity must be {state_dict['max_capacity']}, as it was when the state was "
                f"saved, got {self._max_capacity}."
            )
        self._alpha, self._beta = state_dict["alpha"], state_dict["beta"]
        self._eps = state_dict["eps"]
        priorities = state_dict["priorities"].to(self._device)
        self._arrange(state_dict["num_lanes"], priorities, self._generations + 1)
        self._largest.fill_(state_dict["largest"])
        self._marked = None
        self._has_rows = bool((priorities != ABSENT).any())

    def dumps(self, path: str | Path) -> None:
        """Saves the sampler in the directory `path`, as JSON and raw float32."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        state = self.state_dict()
        state.pop("priorities").cpu().numpy().astype("<f4").tofile(path / "priorities.f32")
        (path / "sampler.json").write_text(json.dumps(state))

    def loads(self, path: str | Path) -> None:
        """Restores what `dumps` saved.

        Raises:
            ValueError: the files are of another capacity. Nothing has changed then.
        """
        state = json.loads((Path(path) / "sampler.json").read_text())
        column = np.fromfile(Path(path) / "priorities.f32", dtype="<f4")
        if len(column) != state["max_capacity"]:
            raise ValueError(
                f"{path}/priorities.f32 must hold {state['max_capacity']} values, got "
                f"{len(column)}."
            )
        state["priorities"] = torch.from_numpy(column.astype(np.float32))
        self.load_state_dict(state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._max_capacity}, alpha={self._alpha}, beta={self._beta}, "
            f"eps={self._eps})"
        )


def _checked(name: str, value: SupportsFloat, low: float, high: float) -> float:
    # Schedulers set NumPy scalars or tensors.
    number = float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}.")
    return number


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
