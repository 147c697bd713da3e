"""Hindsight experience replay (HER): draws the transition that supplies the goal of each sampled one.

Letters: B batch, k goals per transition.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import keys, validation
from trl_storages.functional import even_turns, num_of_each
from trl_storages.kernels.draws import STRATEGIES
from trl_storages.samplers.base import Drawn, ReplaySampler, WrappingSampler
from trl_storages.settings import Setting
from trl_storages.storage import PackedStorage, StorageView

__all__ = ["GoalMixture", "GoalStrategy", "HERSampler"]

GoalStrategy = Literal["future", "final", "episode", "random", "geometric", "current"]
#: Strategy (a name or an enum member) -> fraction of the relabelled transitions.
GoalMixture = Mapping[Any, float]

# Number of values of the noise that chooses a strategy.
_NUM_CHANCES = 2**24
# Tolerance for the sum of the fractions.
_TOLERANCE = 1e-6


def _strategy(name: str, value: Any) -> Any:
    """Returns a strategy, or a mixture of strategies whose fractions sum to 1."""
    if not isinstance(value, Mapping):
        word = value.name if isinstance(value, Enum) else value
        return validation.choice(name, word.lower() if isinstance(word, str) else word, STRATEGIES)
    mixture = {
        _strategy(f"a name of {name}", key): validation.number(
            f"{name}[{key!r}]", fraction, at_least=0, at_most=1
        )
        for key, fraction in value.items()
    }
    if abs(sum(mixture.values()) - 1) > _TOLERANCE:
        raise ValueError(
            f"the fractions of {name} must sum to 1, got {mixture}: pass the fraction of the relabelled "
            "transitions for each strategy."
        )
    return mixture


def _num_goals(name: str, value: Any) -> float:
    return math.inf if value == math.inf else validation.integer(name, value)


class HERSampler(WrappingSampler):
    """Hindsight experience replay (HER): of k + 1 transitions, k are relabelled with an achieved goal.

    `base` draws the transitions (anchors). For `floor(B * k / (k + 1))` transitions of a batch the
    sampler draws a goal transition, whose next achieved goal `GoalRelabel` writes. The relabelled
    transitions are spread evenly: of any k + 1 neighbours k are relabelled, so that a batch which is
    split for several updates keeps the ratio in each part. For anchor t of an episode whose stored steps
    are first..last, the goal step j is uniform over

        future: t..last      final: last      episode: first..last      random: all transitions
        current: t         geometric: t + i with P(i) = (1 - γ) γ^i, or last if that comes first

    and the goal is achieved by the action of step j, so j = t is the transition's own outcome. In a
    mixture each strategy supplies the goals of exactly its fraction of the relabelled transitions
    (rounded by largest remainder), interleaved: `{"geometric": 0.5, "random": 0.3, "current": 0.2}` with
    `num_goals=inf` draws the value goals of offline goal-conditioned RL.

    In an unfinished episode, last is the newest step so far. In a batch of one transition, for which the
    floor is 0, the transition is relabelled with probability k / (k + 1), by a strategy drawn in
    proportion to the fractions.

    **Two goals** per batch, as for value and actor, need two samplers with different goal keys:
    `HERSampler(goal_key="actor_goal", base=HERSampler())`, whose second goal
    `GoalRelabel(None, goal_key="actor_goal")` writes.

    The sampler only draws goal transitions. A `ReplayStorage` raises when it samples unless one of its
    transforms writes the goals, as `GoalRelabel` does; a custom transform declares this by
    `uses_goals = True`. In TorchRL's own replay buffers `HERSampler` raises, because they cannot pass
    goals to a transform.

    Args:
        strategy: how goals are chosen: a name, or a mixture of names.
        num_goals: k, relabelled transitions per transition left as stored; 0 relabels none, `math.inf`
            all.
        discount: γ of "geometric" goals, in [0, 1]; 1 is equivalent to "final". Other strategies ignore
            `discount`.
        goal_key: key of the goal that is drawn.
        base: draws the anchors; None draws uniformly.

    The first three may be changed between samples.

    Raises:
        ValueError: the strategy is unknown, the fractions of a mixture do not sum to 1, `num_goals` is
            negative or not whole, or `base` draws the same goal.
        TypeError: `base` is not a sampler of this library, nor one of TorchRL's that can be replaced.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, sections 3.2 and 4.5; for geometric goals
    Eysenbach et al. 2021, arXiv:2011.08909; for mixtures Park et al. 2025, arXiv:2410.20092.

    >>> HERSampler("final", num_goals=2)
    HERSampler(strategy='final', num_goals=2, base=UniformSampler())
    """

    _extra_draws = 1
    strategy: Any = Setting(_strategy)
    num_goals: Any = Setting(_num_goals)
    discount: Any = Setting(validation.number, at_least=0, at_most=1)

    def __init__(
        self,
        strategy: GoalStrategy | GoalMixture = "future",
        num_goals: float = 4,
        *,
        discount: float = 0.99,
        goal_key: NestedKey = keys.DESIRED_GOAL,
        base: Sampler | None = None,
    ) -> None:
        self._goal_key = validation.root_key("goal_key", goal_key)
        # Keys of the goal slots and of the relabelling mask in a batch.
        self._drawn_keys = keys.goal_keys(self._goal_key)
        super().__init__(base)
        self.strategy, self.num_goals, self.discount = strategy, num_goals, discount

    def _check_base(self, base: ReplaySampler) -> None:
        for layer in base.components():
            if isinstance(layer, HERSampler) and {*self._drawn_keys} & {*layer._drawn_keys}:
                raise ValueError(
                    f"goal_key must differ from the goal_key of base, got {self.goal_key!r} and "
                    f"{layer.goal_key!r}: pass another goal_key, or mix strategies in one HERSampler."
                )

    @property
    def goal_key(self) -> NestedKey:
        """The key of the goal that is drawn."""
        return self._goal_key

    def sample(self, storage: PackedStorage, batch_size: int) -> NoReturn:
        """Raises a RuntimeError, because TorchRL's buffers cannot pass goals to a transform."""
        raise RuntimeError(
            "HERSampler works in a ReplayStorage only, because TorchRL's buffers cannot pass goals to a "
            "transform: use ReplayStorage(storage=..., sampler=HERSampler(), "
            "transform=GoalRelabel(reward_fn))."
        )

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws transitions of the recency window, and their goal transitions.

        Returns:
            `[B]` int64 slots, and the base's fields with `goal_index`, `[B]` int64 slots of the goal
            transitions (the same slot if a transition is not relabelled), and `her_mask`, `[B]` bool.
            With another `goal_key` both are named after the key, see `keys.goal_keys`.
        """
        slots, info = self._base.draw(view, noise[1:], window)
        goal_noise, strategy = noise[0], self.strategy
        mixture = ((strategy, 1.0),) if isinstance(strategy, str) else (*strategy.items(),)
        if len(goal_noise) > 1:
            strategies = _strategies_of_batch(len(goal_noise), self.num_goals, mixture)
        else:  # the floor would always be 0
            strategies = np.full(
                1, _random_strategy(int(goal_noise[0]), self.num_goals, mixture), np.uint8
            )
        is_geometric = "geometric" in dict(mixture)
        steps = _geometric_steps(goal_noise, self.discount) if is_geometric else None
        index_key, mask_key = self._drawn_keys
        info[index_key] = view.episodes.goals(slots, goal_noise, strategies, steps)
        info[mask_key] = strategies > 0
        return slots, info

    def __repr__(self) -> str:
        goal_key = "" if self.goal_key == keys.DESIRED_GOAL else f"goal_key={self.goal_key!r}, "
        return (
            f"{type(self).__name__}(strategy={self.strategy!r}, num_goals={self.num_goals}, {goal_key}"
            f"base={self._base})"
        )


_Mixture = tuple[tuple[str, float], ...]


def _numbers_and_fractions(mixture: _Mixture) -> tuple[list[int], list[float]]:
    """Returns the items of `STRATEGIES` with a positive fraction, and the fractions."""
    fractions = {STRATEGIES[name]: fraction for name, fraction in mixture if fraction > 0}
    return [*fractions], [*fractions.values()]


@lru_cache(maxsize=16)
def _strategies_of_batch(size: int, num_goals: float, mixture: _Mixture) -> np.ndarray:
    """Returns the goal strategy of each transition of a batch.

    floor(B k / (k + 1)) transitions are relabelled: k of any k + 1 neighbours. The strategies alternate
    among the relabelled transitions, each as often as `num_of_each` returns.

    Args:
        size: B.
        num_goals: k, 0 or more; infinite relabels all.
        mixture: strategies and their fractions of the relabelled transitions.

    Returns:
        `[B]` uint8 of `STRATEGIES`, or 0 for a transition that keeps its goal. The array is cached and
        must not be changed.

    >>> _strategies_of_batch(8, 3, (("future", 0.5), ("episode", 0.5))).tolist()
    [0, 1, 3, 1, 0, 3, 1, 3]
    """
    numbers, fractions = _numbers_and_fractions(mixture)
    # For k >= B, only the first transition of the batch keeps its goal.
    period = int(min(num_goals, size)) + 1
    is_relabelled = (np.arange(size) % period > 0) | (num_goals == math.inf)
    turns = even_turns(num_of_each(int(is_relabelled.sum()), fractions))
    strategies_of_batch = np.zeros(size, np.uint8)
    strategies_of_batch[is_relabelled] = np.array(numbers, np.uint8)[turns]
    return strategies_of_batch


def _random_strategy(noise: int, num_goals: float, mixture: _Mixture) -> int:
    """Chooses the goal strategy of a batch of one transition at random.

    Args:
        noise: a random number of 63 bits. The low bits are used, because the goal step is drawn from the
            high bits.
        num_goals: k; the transition is relabelled with probability k / (k + 1).
        mixture: strategies and their probabilities.

    Returns:
        an item of `STRATEGIES`, or 0 if the transition keeps its goal.
    """
    numbers, fractions = _numbers_and_fractions(mixture)
    if num_goals < math.inf:
        noise, remainder = divmod(noise, int(num_goals) + 1)
        if not remainder:
            return 0
    chance = noise % _NUM_CHANCES / _NUM_CHANCES
    # Without the last bound, which rounding may place below 1.
    return numbers[bisect([*accumulate(fractions[:-1])], chance)]


def _geometric_steps(noise: np.ndarray, discount: float) -> np.ndarray:
    """Draws the distances in steps to geometric goals.

        P(k) = (1 - γ) γ^k,  k = floor(log(1 - u) / log γ)

    Args:
        noise: `[B]` int64 random numbers of 63 bits.
        discount: γ in [0, 1]; 1 returns infinity.

    Returns:
        `[B]` float64, k before rounding down, which may be infinite.

    Reference: Eysenbach et al. 2021, C-Learning, arXiv:2011.08909.
    """
    if discount in (0, 1):
        return np.full(len(noise), math.inf if discount else 0.0)
    # torch's logarithm, because NumPy's may round differently on another processor.
    chance = torch.from_numpy(noise).double().mul_(-(2.0**-63))
    return chance.log1p_().div_(math.log(discount)).numpy()
