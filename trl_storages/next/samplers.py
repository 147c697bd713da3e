"""Samplers that pull: they ask the index which rows there are when they draw.

Letters: B batch, E lanes, k goals per transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments, keys
from trl_storages.attributes import Strict
from trl_storages.callers import warn_caller
from trl_storages.functional.draws import geometric_steps, kinds_by_chance, kinds_of_batch
from trl_storages.functional.emphasis import window_size
from trl_storages.index import EpisodeIndex, Seen
from trl_storages.kernels.draws import GOAL_KINDS
from trl_storages.next.parameters import Checked, unit_interval
from trl_storages.next.priorities import Priorities
from trl_storages.samplers.hindsight import check_strategy
from trl_storages.samplers.prioritized import REDUCTIONS
from trl_storages.samplers.return_improvement import (
    ReturnImprovementEta as _ReturnImprovementEta,
)
from trl_storages.streams.packed import PackedStorage

__all__ = [
    "ERESampler",
    "HERSampler",
    "OwnSampler",
    "PERSampler",
    "ReturnImprovementEta",
    "UniformSampler",
    "checked_priorities",
    "layers_of",
]

_SHORTEST_PHASE = 1000
# Draws after which priorities that were never reported are missed.
_FORGOTTEN = 1000
_DISCOUNT = 0.99

Drawn = tuple[torch.Tensor, dict[Any, torch.Tensor]]


class OwnSampler(Strict, Sampler):  # type: ignore[misc]
    """What all samplers here have in common: they draw from the newest `window` steps of each lane."""

    @property
    def layers(self) -> list[OwnSampler]:
        """The samplers that this one is made of, itself first."""
        return [self]

    def sample(self, storage: PackedStorage, batch_size: int) -> Drawn:
        """Draws `[B]` slots, and the entries that go with them."""
        if not len(storage.episodes):
            raise RuntimeError("the storage is empty: write transitions before sampling.")
        return self.draw(storage, batch_size, None)

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws from the newest `window` steps of each lane; None is all."""
        raise NotImplementedError

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return False

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        pass

    def noise(self, size: int) -> torch.Tensor:
        """Returns `[size]` random numbers of 63 bits."""
        return torch.empty(size, dtype=torch.int64).random_(generator=self._rng)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""

    def _empty(self) -> None:
        """Does nothing: the index says that there are no rows."""

    def dumps(self, path: Any) -> None:
        """Does nothing."""

    def loads(self, path: Any) -> None:
        """Does nothing."""


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns the samplers that a sampler is made of, itself first."""
    return sampler.layers if isinstance(sampler, OwnSampler) else [sampler]


class UniformSampler(OwnSampler):
    """Draws uniformly over the live rows, whatever the fill of each lane.

    Args:
        without_replacement: whether to go through the rows in epochs, in random order: each row that is
            live when an epoch begins is drawn once, unless it is evicted before. The last batch of an
            epoch is completed by rows of the next.
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._is_by_epoch = arguments.flag("without_replacement", without_replacement)
        self._left = _Epoch.of(None, None)
        self._has_run_out = False

    @property
    def without_replacement(self) -> bool:
        """Whether rows are drawn in epochs."""
        return self._is_by_epoch

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return self._has_run_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._has_run_out = value

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws `[B]` slots."""
        if not self._is_by_epoch:
            return storage.episodes.draw(self.noise(batch_size), window), {}
        if window is not None:
            raise ValueError("UniformSampler(without_replacement=True) draws from all rows only.")
        return self._go_on(storage.episodes, batch_size), {}

    def _go_on(self, index: EpisodeIndex, batch_size: int) -> torch.Tensor:
        """Draws the next rows of the epoch, and of another one where they are not enough."""
        found: list[Any] = []
        left, has_run_out = self._left.alive(index), False
        while batch_size:
            if not len(left.slots):
                has_run_out = len(found) > 0
                left = _Epoch.of(index, self.noise(len(index)))
            found.append(left.slots[:batch_size])
            batch_size -= len(found[-1])
            left = left.without(len(found[-1]))
        self._left, self._has_run_out = left, has_run_out or not len(left.slots)
        return torch.cat(found)

    def _empty(self) -> None:
        self._left, self._has_run_out = _Epoch.of(None, None), False


class _Epoch(NamedTuple):
    """Rows that are left of an epoch, in random order: slots, and the steps of their lanes."""

    slots: torch.Tensor
    steps: torch.Tensor
    epoch: int
    """Of the index."""

    @classmethod
    def of(cls, index: EpisodeIndex | None, noise: torch.Tensor | None) -> _Epoch:
        """Returns all live rows, in the order of some noise; none without an index."""
        if index is None or noise is None:
            none = torch.zeros(0, dtype=torch.int64)
            return cls(none, none, -1)
        slots = index.live_slots()[noise.argsort(stable=True)]
        return cls(slots, index.steps_of(slots), index.since(None)[1].epoch)

    def alive(self, index: EpisodeIndex) -> _Epoch:
        """Returns those that were not evicted since."""
        if not len(self.slots) or index.since(None)[1].epoch != self.epoch:
            return self.of(None, None)
        stays = self.steps >= torch.from_numpy(index.tails)[index.lanes_of(self.slots)]
        return _Epoch(self.slots[stays], self.steps[stays], self.epoch)

    def without(self, count: int) -> _Epoch:
        """Returns all but the first ones."""
        return _Epoch(self.slots[count:], self.steps[count:], self.epoch)


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
            found = self._priorities = Priorities(storage.episodes, self.alpha, self.eps)
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


class _Wrapper(OwnSampler):
    """A sampler that changes what its `base` draws."""

    base: Any = None

    def __init__(self, base: OwnSampler | None) -> None:
        self.base = UniformSampler() if base is None else base
        arguments.instance("base", self.base, OwnSampler, what="a sampler of this library")
        super().__init__()

    @property
    def layers(self) -> list[OwnSampler]:
        """The samplers that this one is made of, itself first."""
        return [self, *self.base.layers]

    @property
    def _rng(self) -> torch.Generator | None:
        return self.base._rng

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.base._rng = generator


class ERESampler(_Wrapper):
    """Draws from a window that narrows onto recent steps with each update of a phase.

        c_k = max(N * eta^(k * 1000 / K), c_min)

    Reference: Wang & Ross 2019, arXiv:1906.04009.
    """

    updates_per_phase: int | None = None
    reference, update, num_updates = "stored", 0, 0
    eta: Any = Checked(arguments.number, above=0, at_most=1)
    c_min: Any = Checked(arguments.integer, at_least=1)

    def __init__(
        self,
        eta: float = 0.996,
        c_min: int = 5000,
        *,
        updates_per_phase: int | None = None,
        base: OwnSampler | None = None,
        reference: str = "stored",
    ) -> None:
        super().__init__(base)
        if any(isinstance(layer, HERSampler) for layer in self.base.layers):
            raise TypeError("base must draw rows, got a HERSampler: pass this sampler as its base.")
        self.eta, self.c_min = eta, c_min
        self.updates_per_phase = arguments.optional(
            arguments.integer, "updates_per_phase", updates_per_phase, at_least=1
        )
        self.reference = arguments.choice("reference", reference, ("stored", "capacity"))
        #: The updates made in this phase, and how many there are to be; 0 before the first phase.
        self.update, self.num_updates = 0, 0
        self._seen: Seen | None = None

    def begin_phase(self, num_updates: int) -> None:
        """Begins a phase: the next draw is its first, with the widest window."""
        self.num_updates = arguments.integer("num_updates", num_updates, at_least=1)
        self.update = 0

    def _next_update(self, storage: PackedStorage) -> None:
        """Counts an update; what was written since a phase was over begins the next one."""
        before, (changes, self._seen) = self._seen, storage.episodes.since(self._seen)
        if before is not None and before.epoch != self._seen.epoch:
            self.update, self.num_updates = 0, 0
        if changes is not None and self.update >= self.num_updates:
            self.begin_phase(self.updates_per_phase or max(_SHORTEST_PHASE, self.update))
        self.update += 1

    def window(self, episodes: EpisodeIndex) -> int:
        """Returns c_k, how many of the newest rows the current update draws from."""
        size: int = window_size(
            len(episodes),
            eta=self.eta,
            update=min(self.update, self.num_updates),
            num_updates=self.num_updates,
            c_min=self.c_min,
            reference_rows=episodes.capacity if self.reference == "capacity" else None,
        )
        return size

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws from the newest w steps of each lane, w the least with which they reach c_k."""
        self._next_update(storage)
        index = storage.episodes
        return self.base.draw(storage, batch_size, index.window_of(self.window(index)))


def _strategy(name: str, value: Any) -> Any:
    return check_strategy(name, value)[0]


def _num_goals(name: str, value: Any) -> float:
    return math.inf if value == math.inf else arguments.integer(name, value)


class HERSampler(_Wrapper):
    """Draws a goal row along with k of k + 1 transitions.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495.
    """

    goal_key: NestedKey = keys.DESIRED_GOAL
    strategy: Any = Checked(_strategy)
    num_goals: Any = Checked(_num_goals)
    discount: Any = Checked(unit_interval)

    def __init__(
        self,
        strategy: str | Mapping[str, float] = "future",
        num_goals: float = 4,
        *,
        discount: float = _DISCOUNT,
        goal_key: NestedKey = keys.DESIRED_GOAL,
        base: OwnSampler | None = None,
    ) -> None:
        super().__init__(base)
        self.strategy, self.num_goals, self.discount = strategy, num_goals, discount
        self.goal_key = arguments.root_key("goal_key", goal_key)
        self._made: tuple[Any, torch.Tensor, torch.Tensor] | None = None
        drawn = [it.goal_key for it in self.layers[1:] if isinstance(it, HERSampler)]
        if self.goal_key in drawn:
            raise ValueError(f"base must draw another goal, got {self.goal_key!r} for both.")

    @property
    def _mixture(self) -> Mapping[str, float]:
        return self.strategy if isinstance(self.strategy, Mapping) else {self.strategy: 1.0}

    def _kinds(
        self, batch_size: int, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Returns how each goal is drawn, which rows get one, and whether any is geometric."""
        mixture = self._mixture
        kinds, shares = [GOAL_KINDS[name] for name in mixture], [*mixture.values()]
        geometric = "geometric" in mixture
        if batch_size == 1:
            found = kinds_by_chance(noise, self.num_goals, kinds, shares)
            return found, found > 0, geometric
        key = batch_size, self.num_goals, tuple(mixture.items())
        if self._made is None or self._made[0] != key:
            listed = kinds_of_batch(batch_size, self.num_goals, kinds, shares)
            made = torch.tensor(listed, dtype=torch.uint8)
            self._made = key, made, made > 0
        return self._made[1], self._made[2].clone(), geometric

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws `[B]` slots, and with them `goal_index` and `her_mask`."""
        slots, info = self.base.draw(storage, batch_size, window)
        noise = self.noise(batch_size)
        kinds, mask, geometric = self._kinds(batch_size, noise)
        steps = geometric_steps(noise, self.discount) if geometric else None
        index_key, mask_key = keys.goal_entries(self.goal_key)
        info[index_key] = storage.episodes.goals(slots, noise, kinds, steps)
        info[mask_key] = mask
        return slots, info


class ReturnImprovementEta(_ReturnImprovementEta):
    """Sets `eta` of an `ERESampler` by how much returns improve, also below other samplers."""

    def __init__(self, obj: Any, **options: Any) -> None:
        sampler = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        if isinstance(sampler, OwnSampler):
            with_eta = [layer for layer in sampler.layers if isinstance(layer, ERESampler)]
            sampler = with_eta[0] if with_eta else sampler
        super().__init__(sampler, **options)
