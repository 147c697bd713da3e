"""Hindsight experience replay: draws a goal row along with each transition.

Letters: B batch, k goals per transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey

from trl_storages import arguments, keys
from trl_storages.attributes import Checked, unit_interval
from trl_storages.functional.draws import geometric_steps, kinds_by_chance, kinds_of_batch
from trl_storages.kernels.draws import GOAL_KINDS
from trl_storages.packed import PackedStorage
from trl_storages.samplers.base import Drawn, OwnSampler, WrappingSampler
from trl_storages.samplers.uniform import UniformSampler

__all__ = ["GoalMixture", "GoalStrategy", "HERSampler", "check_strategy"]

GoalStrategy = Literal["future", "final", "episode", "random", "geometric", "current"]


#: Strategy (a name or an enum member) -> its share of the relabelled transitions.
GoalMixture = Mapping[Any, float]


# Tolerance for the sum of the shares.
_NEAR = 1e-6


_DISCOUNT = 0.99


def _strategy(name: str, value: Any) -> Any:
    return check_strategy(name, value)[0]


def _num_goals(name: str, value: Any) -> float:
    return math.inf if value == math.inf else arguments.integer(name, value)


class HERSampler(WrappingSampler):
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
        super().__init__(UniformSampler() if base is None else base)
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


def check_strategy(
    name: str, value: GoalStrategy | GoalMixture
) -> tuple[GoalStrategy | dict[GoalStrategy, float], dict[GoalStrategy, float]]:
    """Returns a strategy or mixture, and the share of each name.

    Raises:
        ValueError: a strategy is unknown, or the shares do not sum to 1.
        TypeError: it is neither a name nor a mapping from names to numbers.

    >>> check_strategy("strategy", {"future": 0.5, "random": 0.5})[1]
    {'future': 0.5, 'random': 0.5}
    """
    names = get_args(GoalStrategy)
    if not isinstance(value, Mapping):
        strategy = arguments.choice(name, value, names)
        return strategy, {strategy: 1.0}
    mixture: dict[GoalStrategy, float] = {}
    for key, share in value.items():
        strategy = arguments.choice(f"a name of {name}", key, names)
        share = arguments.number(f"{name}[{strategy!r}]", share, at_least=0, at_most=1)
        mixture[strategy] = share
    total = sum(mixture.values())
    if abs(total - 1) > _NEAR:
        raise ValueError(
            f"the shares of {name} must add up to 1, got {mixture}, which is {total:g}: name the part "
            "that each has among the relabelled transitions."
        )
    return mixture, {kind: share / total for kind, share in mixture.items() if share > 0}
