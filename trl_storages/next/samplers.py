"""Samplers that pull: they ask the index which rows there are when they draw.

Letters: B batch, E lanes, k goals per transition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import keys
from trl_storages.functional.draws import geometric_steps, kinds_by_chance, kinds_of_batch
from trl_storages.functional.emphasis import window_size
from trl_storages.index import Seen
from trl_storages.kernels.draws import GOAL_KINDS
from trl_storages.next.priorities import Priorities
from trl_storages.streams.packed import PackedStorage

__all__ = ["ERESampler", "HERSampler", "PERSampler", "UniformSampler"]

Drawn = tuple[torch.Tensor, dict[Any, torch.Tensor]]


class _Sampler(Sampler):  # type: ignore[misc]
    """What all samplers here have in common: they draw from the newest `window` steps of each lane."""

    def sample(self, storage: PackedStorage, batch_size: int) -> Drawn:
        """Draws `[B]` slots, and the entries that go with them."""
        if not len(storage.episodes):
            raise RuntimeError("the storage is empty: write transitions before sampling.")
        return self.draw(storage, batch_size, None)

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws from the newest `window` steps of each lane; None is all."""
        raise NotImplementedError

    def noise(self, size: int) -> torch.Tensor:
        """Returns `[size]` random numbers of 63 bits."""
        return torch.empty(size, dtype=torch.int64).random_(generator=self._rng)

    def update(self, storage: PackedStorage, slots: Any, steps: Any, priority: Any) -> bool:
        """Takes priorities; returns whether there are any to take."""
        return False

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


class UniformSampler(_Sampler):
    """Draws uniformly over the live rows, whatever the fill of each lane."""

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws `[B]` slots."""
        return storage.episodes.draw(self.noise(batch_size), window), {}


class PERSampler(_Sampler):
    """Draws rows in proportion to their priorities.

        P(i) = (p_i + eps)^alpha / Σ_j (p_j + eps)^alpha,   weight_i = (min_j P(j) / P(i))^beta

    Reference: Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952.
    """

    def __init__(
        self, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6, *, normalize: str = "batch"
    ) -> None:
        super().__init__()
        self.alpha, self.beta, self.eps, self.normalize = alpha, beta, eps, normalize
        self._priorities: Priorities | None = None

    def _of(self, storage: PackedStorage) -> Priorities:
        """Returns the priorities of a storage's rows, which know all of them."""
        found = self._priorities
        if found is None or found.index is not storage.episodes:
            found = self._priorities = Priorities(storage.episodes, self.alpha, self.eps)
        if (found.alpha, found.eps) != (self.alpha, self.eps):
            found.rescale(self.alpha, self.eps)
        found.catch_up()
        return found

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws `[B]` slots and their `priority_weight`."""
        priorities = self._of(storage)
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
        return slots, {keys.PRIORITY_WEIGHT: ratio.pow(self.beta).float()}

    def update(self, storage: PackedStorage, slots: Any, steps: Any, priority: Any) -> bool:
        """Sets the priorities of rows that were drawn as `steps` of their lanes."""
        self._of(storage).update(slots, steps, priority)
        return True


class _Wrapper(_Sampler):
    """A sampler that changes what its `base` draws."""

    def __init__(self, base: _Sampler | None) -> None:
        self.base = UniformSampler() if base is None else base
        super().__init__()

    @property
    def _rng(self) -> torch.Generator | None:
        return self.base._rng

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.base._rng = generator

    def update(self, storage: PackedStorage, slots: Any, steps: Any, priority: Any) -> bool:
        """Passes priorities on."""
        return self.base.update(storage, slots, steps, priority)


class ERESampler(_Wrapper):
    """Draws from a window that narrows onto recent steps with each update of a phase.

        c_k = max(N * eta^(k * 1000 / K), c_min)

    Reference: Wang & Ross 2019, arXiv:1906.04009.
    """

    def __init__(
        self,
        eta: float = 0.996,
        c_min: int = 5000,
        *,
        updates_per_phase: int = 1000,
        base: _Sampler | None = None,
    ) -> None:
        super().__init__(base)
        self.eta, self.c_min, self.updates_per_phase = eta, c_min, updates_per_phase
        self._update = 0
        self._seen: Seen | None = None

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws from the newest w steps of each lane, w the least with which they reach c_k."""
        index = storage.episodes
        changes, self._seen = index.since(self._seen)
        self._update = 1 if changes is not None else min(self._update + 1, self.updates_per_phase)
        count = window_size(
            len(index),
            eta=self.eta,
            update=self._update,
            num_updates=self.updates_per_phase,
            c_min=self.c_min,
        )
        return self.base.draw(storage, batch_size, index.window_of(count))


class HERSampler(_Wrapper):
    """Draws a goal row along with k of k + 1 transitions.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495.
    """

    def __init__(
        self,
        strategy: str | Mapping[str, float] = "future",
        num_goals: float = 4,
        *,
        discount: float = 0.99,
        goal_key: NestedKey = keys.DESIRED_GOAL,
        base: _Sampler | None = None,
    ) -> None:
        super().__init__(base)
        self.strategy, self.num_goals, self.discount = strategy, num_goals, discount
        self.goal_key = goal_key
        self._made: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def _kinds(
        self, batch_size: int, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Returns how each goal is drawn, which rows get one, and whether any is geometric."""
        mixture = self.strategy if isinstance(self.strategy, Mapping) else {self.strategy: 1.0}
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
