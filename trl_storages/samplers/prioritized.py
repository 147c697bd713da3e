"""Prioritized experience replay: draws in proportion to priorities.

Letters: B batch, N slots, E lanes (environments), T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, get_args

import torch
from torchrl.data import RandomSampler, Storage
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler

from trl_storages import arguments
from trl_storages.attributes import Setting, Strict
from trl_storages.callers import warn_caller
from trl_storages.functional.draws import random_noise
from trl_storages.kernels.memory import on_device
from trl_storages.keys import PRIORITY_STAMP, PRIORITY_WEIGHT
from trl_storages.priorities import ABSENT, Normalization, PriorityTable, check_priorities
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.samplers.base import Drawn, checked_draw, layers_of
from trl_storages.samplers.durable_table import DurableTable
from trl_storages.saved.parts import SavedPart, SavedState

__all__ = ["REDUCTIONS", "PERSampler", "WriteOnlySampler", "prioritized_of"]

# Up to this exponent, powers of float32 priorities and their sum fit into float64.
_HIGHEST_ALPHA = 4.0
_LEAST_EPS = 1e-30
# After so many draws without a reported priority, the user is warned.
_FORGOTTEN = 1_000
#: TorchRL's names for how to reduce several priorities of one row.
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
    "median": lambda priority, dim: priority.median(dim).values,
}


def _rescale(sampler: PERSampler) -> None:
    sampler._table.rescale(alpha=sampler.alpha, eps=sampler.eps)


class PERSampler(SavedPart, Strict, PrioritizedSampler):  # type: ignore[misc]
    """Prioritized experience replay: draws rows in proportion to their priorities.

        P(i) = (p_i + eps)^alpha / sum_j (p_j + eps)^alpha,   weight_i = (min_j P(j) / P(i))^beta

    where the minimum over j runs over the batch, or as `normalize` says.

    Replaces TorchRL's `PrioritizedSampler`, also in TorchRL's buffers over a `PackedStorage` with an
    `EpisodeWriter`. It works on any device, without TorchRL's native extension; it keeps raw priorities,
    so that `alpha` may change at any time, also from 0; and it rejects invalid priorities.

    **Weights.** `normalize="batch"` divides by the largest weight of the batch, as dopamine, Acme and
    tianshou do; "storage" by the largest over all rows (within an `ERESampler`, over the window), as
    TorchRL does; "none" does not divide: (N P(i))^-beta, with mean 1 for beta = 1. They differ by a
    factor common to the batch, and so in the effective step size. With "storage" a single row with a
    small error makes all other weights small.

    **New rows.** A row that is written, or overwritten, gets the largest priority reported so far, or 1
    before any above 0 was reported.

    **Forgotten priorities.** A warning says once that the first 1,000 batches were drawn without any
    priority being reported, unless the priorities were loaded or come from a directory.

    **Late priorities.** Slots without a row and index -1 are skipped. Pass a batch's `priority_stamp`
    back as `stamp` to also skip rows overwritten since the draw; without it, a late priority goes to
    the row that is now in the slot.

    **On a GPU** nothing synchronises with the device. An update with an invalid priority changes nothing
    there either; a later call raises the error, once the host knows of it.

    Args:
        max_capacity: N, at least the size of the storage.
        alpha: priority exponent, in [0, 4]; 0 draws uniformly.
        beta: exponent of the importance weights, in [0, 1]. Anneal it to 1.
        eps: in (0, 1]; keeps rows with priority 0 drawable.
        normalize: whose largest weight is 1: "batch", "storage" or "none".
        reduction: how TorchRL's buffers reduce several priorities of one row: "max", "min", "mean" or
            "median".
        device: device of the priorities until the first storage is seen, then the storage's.

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

    live_parameters: ClassVar[tuple[str, ...]] = ("alpha", "beta", "eps", "normalize")
    reduction = "max"

    alpha = Setting[float](
        partial(arguments.number, at_least=0, at_most=_HIGHEST_ALPHA),
        "How much priorities count, in [0, 4].",
        _rescale,
    )
    beta = Setting[float](
        partial(arguments.number, at_least=0, at_most=1),
        "How much of the bias the weights correct, in [0, 1].",
    )
    eps = Setting[float](
        partial(arguments.number, at_least=_LEAST_EPS, at_most=1),
        "What is added to priorities, above 0.",
        _rescale,
    )
    normalize = Setting[Normalization](
        partial(arguments.choice, names=get_args(Normalization)),
        'Whose largest importance weight is 1: "batch", "storage" or "none".',
    )

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        normalize: Normalization = "batch",
        reduction: str = "max",
        device: torch.device | str = "cpu",
    ) -> None:
        # TorchRL's constructor is not called: it builds native trees, and fails where they do not load.
        self._max_capacity = arguments.integer("max_capacity", max_capacity, at_least=1)
        self.reduction = arguments.choice("reduction", reduction, REDUCTIONS)
        self.alpha, self.beta, self.eps, self.normalize = alpha, beta, eps, normalize
        self._marked: int | torch.Tensor | None = None
        self._table = self._make_table(arguments.device("device", device))
        self._is_loaded = False
        # Set while a batch is drawn of which other storages supply a part.
        self._draws_plain_weights = False
        # While another sampler draws: the restarts of the index, and `[E]` the steps written before.
        self._left_at: tuple[int, torch.Tensor] | None = None
        #: Draws so far; -inf once priorities have been reported, or were there from the beginning.
        self._unanswered = 0.0

    def _make_table(self, device: torch.device) -> PriorityTable:
        return PriorityTable(self._max_capacity, alpha=self.alpha, eps=self.eps, device=device)

    @property
    def device(self) -> torch.device:
        """The device of the priorities: that of the storage."""
        return self._table.device

    @property
    def priorities(self) -> torch.Tensor:
        """`[N]` float32 raw priorities by slot, inf for empty slots. A copy."""
        return self._table.priorities

    @property
    def default_priority(self) -> float:
        """The raw priority of new rows. Synchronises with the device."""
        return self._table.new_priority

    # Drawing

    def sample(self, storage: Any, batch_size: int) -> Drawn:
        """Draws rows with replacement, in proportion to their priorities.

        Returns:
            `[B]` int64 slots, and the info: `priority_weight` `[B]` float32, normalised as
            `normalize` says, and `priority_stamp` `[B]` int32.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: the storage has more dimensions than one, or more slots than `max_capacity`.
        """
        return self._draw(storage, batch_size)

    def sample_window(self, storage: Storage, batch_size: int, window: torch.Tensor | int) -> Drawn:
        """Draws among the newest rows, in proportion to their priorities.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.
            window: `[]` int64 on the storage's device: how many of the newest rows, by
                `EpisodeIndex.ages`, to draw from, at least 1.

        Returns:
            As `sample`, with the window's rows in place of all rows.

        Raises:
            RuntimeError: the storage is empty or has no episode index.
        """
        return self._draw(storage, batch_size, window)

    def _draw(
        self, storage: Storage, batch_size: int, window: torch.Tensor | int | None = None
    ) -> Drawn:
        batch_size, episodes = checked_draw(storage, batch_size)
        self.attach(storage)
        # `Strict.__setattr__` would take longer.
        self.__dict__["_unanswered"] += 1
        if self._unanswered == _FORGOTTEN:
            _warn_of_forgotten(storage)
        noise = random_noise(batch_size, generator=self._rng, device=self.device)
        among: Any = (_num_rows(episodes), None) if window is None else (window, episodes)
        normalize = "none" if self._draws_plain_weights else self.normalize
        slots, weight, stamp = self._table.draw(noise, self.beta, *among, normalize=normalize)
        return slots, {PRIORITY_WEIGHT: weight, PRIORITY_STAMP: stamp}

    @contextmanager
    def plain_weights(self) -> Iterator[None]:
        """Context in which weights are (N P(i))^-beta, whatever `normalize` is."""
        self.__dict__["_draws_plain_weights"] = True
        try:
            yield
        finally:
            self.__dict__["_draws_plain_weights"] = False

    # Writing

    def add(self, index: int | torch.Tensor) -> None:
        """Gives a new row the largest priority."""
        self.extend(index)

    def extend(self, index: int | torch.Tensor) -> None:
        """Gives new rows the largest priority.

        Args:
            index: int64 slots of any shape; -1 for rows that were not kept.

        Raises:
            IndexError: an index is not below `max_capacity`. Nothing has changed then.
        """
        # Buffers notify of each write twice: by `mark_update`, then here.
        marked, self.__dict__["_marked"] = self._marked, None
        if marked is not None and marked is index:
            return
        slots = self._as_slots(index)
        # On a GPU the comparison would synchronise with the device.
        on_host = self.device.type == "cpu"
        if marked is None or not on_host or not torch.equal(self._as_slots(marked), slots):
            self._table.write(slots)

    def mark_update(self, index: int | torch.Tensor, *, storage: Storage | None = None) -> None:
        """Gives rows that were overwritten the largest priority."""
        if not self.attach(storage):
            self._table.write(self._as_slots(index))
        self.__dict__["_marked"] = index

    def update_priority(
        self,
        index: int | torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: Storage | None = None,
        stamp: torch.Tensor | None = None,
    ) -> None:
        """Updates the priorities of drawn rows. For repeated indices the last one wins.

        Args:
            index: int64 slots of any shape, such as `[B]` or `[E, T]`; -1 is skipped.
            priority: one per index, or one for all; finite, at least 0.
            storage: holds the rows.
            stamp: `priority_stamp` of the batch, of the shape of `index`; None if unknown.

        Raises:
            ValueError: a priority is NaN, negative or infinite (in float32), or their number differs
                from that of the indices. Nothing has changed then.
            IndexError: an index is not below `max_capacity`. Nothing has changed then.
        """
        # First, as the table may move to the storage's device.
        self.attach(storage)
        slots, device = self._as_slots(index), self.device
        priority = on_device(_one_each(priority, slots.numel()), device)
        if stamp is not None:
            if arguments.tensor("stamp", stamp).numel() != slots.numel():
                raise ValueError(_not_one_each("stamp", stamp, slots.numel()))
            stamp = on_device(stamp, device, torch.int32).flatten().contiguous()
        # `Strict.__setattr__` would take longer.
        self.__dict__.update(_marked=None, _unanswered=-math.inf)
        self._table.update(slots, priority.contiguous(), stamp)

    def check_priorities(self, priority: Any, num_rows: int) -> None:
        """Checks the priorities that rows are to be written with; of those on a GPU only the number.

        Args:
            priority: as in `update_priority`.
            num_rows: how many rows there are.

        Raises:
            ValueError: as in `update_priority`.
        """
        if (priority := _one_each(priority, num_rows)).is_cpu:
            check_priorities(priority)

    def _as_slots(self, index: int | torch.Tensor) -> torch.Tensor:
        """Returns indices as contiguous int64 `[n]` on the device."""
        slots = arguments.values("index", index)
        if slots.is_floating_point() or slots.dtype is torch.bool:
            raise TypeError(f"index must hold integers, got {slots.dtype}.")
        return on_device(slots, self.device, torch.int64).flatten().contiguous()

    # The storage

    def attach(self, storage: Storage | None) -> bool:
        """Moves to a storage's device or directory, and gives its rows priorities if it has none yet.

        Args:
            storage: the storage; None does nothing.

        Returns:
            whether the priorities of the stored rows were just initialised.
        """
        if storage is None:
            return False
        episodes = episodes_of(storage)
        if storage.max_size > self._max_capacity:
            raise ValueError(
                f"PERSampler needs a storage of at most max_capacity={self._max_capacity} rows, got "
                f"{storage.max_size}."
            )
        if storage.device != self._table.device:
            table = self._make_table(storage.device)
            if self._table.has_rows:
                table.load_state_dict(self._table.state_dict())
            self._table = table
        files = storage.files
        if (0 if files is None else files.refreshes) != self._table.refreshes:
            if self._table.follow(storage):
                return False
            state = self._table.state_dict() if self._is_loaded else None
            self._is_loaded = False
            self._table = table = DurableTable(storage, alpha=self.alpha, eps=self.eps)
            if state is not None and table.takes(state):
                # Loaded with the rows, before the files were attached.
                table.load_state_dict(state)
            if table.has_rows:
                self._unanswered = -math.inf
            return table.has_rows
        if self._table.has_rows or not len(episodes):
            return False
        self._table.write(episodes.live_slots())
        return True

    def leave(self, storage: Any) -> None:
        """Notes which rows are known, as another sampler replaces this one."""
        episodes = episodes_of(storage)
        self._left_at = episodes.num_restarts, episodes.num_steps_written.clone()

    def catch_up(self, storage: Any) -> None:
        """Gives rows that were written while another sampler drew the largest priority.

        If the stored rows are not those that this sampler has priorities of, all begin anew.
        """
        before, self._left_at = self._left_at, None
        if self._table.has_rows:
            self.attach(storage)
        table, episodes = self._table, episodes_of(storage)
        if not table.has_rows or storage.reader is not None:
            return
        live, goes_on = episodes.live_slots().cpu(), True
        if before is not None:
            (restarts, steps), written = before, episodes.num_steps_written
            goes_on = restarts == episodes.num_restarts and steps.shape == written.shape
            if goes_on := goes_on and bool((steps <= written).all()):
                table.write(episodes.slots_since(steps))
        if not goes_on or self.inconsistent_slots(self.priorities, live):
            table.clear()
            table.write(live.to(self.device))

    def _empty(self) -> None:
        self._marked = None
        self._table.clear()

    def validate(self, live: torch.Tensor | None = None) -> None:
        """Checks sums and minima against the priorities, walking all rows.

        Args:
            live: int64 slots of all rows, which must be exactly those with a priority; None skips this
                check.

        Raises:
            RuntimeError: they are inconsistent.
            ValueError: the device rejected priorities, and no call has raised that error yet.
        """
        live = arguments.optional(arguments.slots, "live", live)
        self._table.validate()
        if live is not None and (wrong := self.inconsistent_slots(self.priorities, live.cpu())):
            raise RuntimeError(
                f"the slots {wrong[:5]} have a priority without a row, or a row without a priority."
            )

    # State

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The trees are not in shared memory.
        if get_spawning_popen() is not None:
            return WriteOnlySampler, ()
        return super().__reduce_ex__(protocol)

    def state_dict(self) -> dict[str, Any]:
        """Returns parameters and raw priorities, from which the trees are rebuilt."""
        own = {name: getattr(self, name) for name in self.live_parameters}
        return {"max_capacity": self._max_capacity, **own, **self._table.state_dict()}

    def check_state(self, state_dict: Any) -> None:
        """Checks a state; see `SavedPart.check_state`."""
        what, size = f"the saved {type(self).__name__}", self._max_capacity
        keys = ("max_capacity", *self.live_parameters, "largest", "num_lanes", "priorities")
        saved = SavedState(state_dict, what, keys)
        if saved.integer("max_capacity", 1) != size:
            raise saved.error("max_capacity", f"{size}, as here", saved["max_capacity"])
        saved.check_parameters(type(self), self.live_parameters)
        saved.number("largest", 0.0, torch.finfo(torch.float32).max)
        saved.integer("num_lanes", 1, size)
        # Empty slots have an infinite priority.
        priorities = saved.tensor("priorities", torch.float32)
        # A directory has spare slots with priorities too; their number is checked against the index.
        if priorities.ndim != 1 or len(priorities) < size:
            must = f"one for each of {size} slots"
            raise saved.error("priorities", must, list(priorities.shape))
        if bad := int((~(priorities >= 0)).sum()):
            raise saved.error("priorities", "finite and at least 0", f"{bad} others")

    def inconsistent_slots(self, priorities: torch.Tensor, live: torch.Tensor) -> list[int]:
        """Returns the slots that have a priority but no row, or a row but no priority.

        Args:
            priorities: `[N]`, of a state of this sampler.
            live: int64 slots of all rows, on the CPU.

        Returns:
            the slots; empty if there are no priorities at all, as the next draw will initialise them.
        """
        size = max(len(priorities), int(live.max()) + 1 if len(live) else 0)
        has_row = torch.zeros(size, dtype=torch.bool)
        has_row[live] = True
        has_priority = torch.zeros(size, dtype=torch.bool)
        has_priority[: len(priorities)] = priorities.cpu() != ABSENT
        if not has_priority.any():
            return []
        return (has_priority != has_row).nonzero().squeeze(1).tolist()

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a state that was checked. Stamps of earlier batches become invalid."""
        if len(state["priorities"]) != self._table.capacity:
            raise ValueError(
                f"the saved priorities must be of {self._table.capacity} slots, as here, got "
                f"{len(state['priorities'])}: load them together with their rows, by "
                "ReplayStorage.loads() or load_state_dict(). Nothing was changed."
            )
        for name in self.live_parameters:
            setattr(self, name, state[name])
        self._marked, self._unanswered = None, -math.inf
        self._table.load_state_dict(state)
        self._is_loaded = not self._table.refreshes

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._max_capacity}, alpha={self.alpha}, beta={self.beta}, "
            f"eps={self.eps}, normalize={self.normalize!r})"
        )


class WriteOnlySampler(RandomSampler):  # type: ignore[misc]
    """Stands in for a `PERSampler` in other processes that write to a shared storage.

    Priorities stay in the process that shared the storage; writing does not need them.
    """

    def sample(
        self, storage: Storage, batch_size: int, *window: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Raises: this process can't draw.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "draws by priority must be made in the process that shared the storage, this is one that it "
            "was sent to: sample there, or use a storage with alpha=0."
        )

    sample_window = sample


def prioritized_of(sampler: Sampler) -> PERSampler | None:
    """Returns the innermost sampler if it is a `PERSampler`, else None."""
    innermost = layers_of(sampler)[-1]
    return innermost if isinstance(innermost, PERSampler) else None


def _warn_of_forgotten(storage: Storage) -> None:
    """Warns that no priority was reported, except in a process that only reads the rows of another."""
    if storage.reader is None:
        warn_caller(
            f"{_FORGOTTEN:,} batches were drawn by priority, and no priority was ever reported, so all "
            "rows are still drawn alike. Call update_tensordict_priority(batch) after each loss, which "
            "needs its td_error; or draw uniformly, with alpha=0."
        )


def _one_each(priority: float | torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns priorities of rows as `[n]` float32; a single one is that of each row."""
    given = arguments.values("priority", priority)
    found = given.detach().float().flatten()
    if found.numel() == 1:
        return found.expand(num_rows)
    if found.numel() != num_rows:
        raise ValueError(_not_one_each("priority", given, num_rows))
    return found


def _not_one_each(name: str, given: torch.Tensor, num_indices: int) -> str:
    """Returns the error message for a wrong number of values."""
    return (
        f"there must be one {name} for each of the {num_indices} indices, got {given.numel()}, of "
        f"shape {list(given.shape)}; nothing was updated."
    )


def _num_rows(episodes: EpisodeIndex) -> int | torch.Tensor:
    """Returns how many rows can be drawn, as a device tensor where the host would have to synchronise."""
    return len(episodes) if episodes.device.type == "cpu" else episodes.num_rows
