"""Hindsight experience replay: draws a goal row along with each transition.

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
from trl_storages.kernels.draws import GOAL_KINDS
from trl_storages.samplers.base import Drawn, ReplaySampler, WrappingSampler
from trl_storages.settings import Setting
from trl_storages.storage import PackedStorage, StorageView

__all__ = ["GoalMixture", "GoalStrategy", "HERSampler"]

GoalStrategy = Literal["future", "final", "episode", "random", "geometric", "current"]
#: Strategy (a name or an enum member) -> its share of the relabelled transitions.
GoalMixture = Mapping[Any, float]

# Of the noise that chooses a kind.
_CHANCES = 2**24
# Tolerance for the sum of the shares.
_NEAR = 1e-6


def _strategy(name: str, value: Any) -> Any:
    """Returns a strategy, or a mixture of them whose shares sum to 1."""
    if not isinstance(value, Mapping):
        word = value.name if isinstance(value, Enum) else value
        return validation.choice(name, word.lower() if isinstance(word, str) else word, GOAL_KINDS)
    mixture = {
        _strategy(f"a name of {name}", key): validation.number(
            f"{name}[{key!r}]", share, at_least=0, at_most=1
        )
        for key, share in value.items()
    }
    if abs(sum(mixture.values()) - 1) > _NEAR:
        raise ValueError(
            f"the shares of {name} must add up to 1, got {mixture}: name the part that each has among "
            "the relabelled transitions."
        )
    return mixture


def _num_goals(name: str, value: Any) -> float:
    return math.inf if value == math.inf else validation.integer(name, value)


class HERSampler(WrappingSampler):
    """Hindsight experience replay: of k + 1 transitions, k are relabelled with an achieved goal.

    `base` draws the transitions (anchors). `floor(B * k / (k + 1))` of a batch get a goal row, whose
    next achieved goal `GoalRelabel` writes into them. They are spread evenly: of any k + 1 neighbours k
    are relabelled, so a batch that is split for several updates keeps the ratio in each part. For
    anchor t of an episode whose surviving rows are first..last, the goal row j is uniform over

        future: t..last      final: last      episode: first..last      random: all live rows
        current: t         geometric: t + i with P(i) = (1 - γ) γ^i, or last if that comes first

    and the goal is the one achieved by the action of row j, so j = t is the transition's own outcome.
    A mixture gives each strategy its share of the relabelled transitions, exactly (rounded by largest
    remainder) and interleaved: `{"geometric": 0.5, "random": 0.3, "current": 0.2}` with `num_goals=inf`
    draws the value goals of offline goal-conditioned RL.

    An unfinished episode provides goals from its rows so far. A batch of one, for which the floor is 0,
    is relabelled with probability k / (k + 1) instead, by a strategy drawn in proportion to the shares.

    **Two goals** per batch, as for value and actor, need two samplers with different goal keys:
    `HERSampler(goal_key="actor_goal", base=HERSampler())`, whose second goal
    `GoalRelabel(None, goal_key="actor_goal")` writes.

    The sampler only draws goal rows. A `ReplayStorage` refuses to sample unless one of its transforms
    writes the goals, as `GoalRelabel` does; a custom transform declares this by `uses_goals = True`.
    TorchRL's own replay buffers can't hand them to a transform, so there it raises.

    Args:
        strategy: where goals come from: a name, or a mixture of names.
        num_goals: k, relabelled transitions per one left as stored; 0 relabels none, `math.inf` all.
        discount: γ of "geometric" goals, in [0, 1]; 1 is equivalent to "final". No other goals have one.
        goal_key: which goal of the batch is drawn.
        base: the sampler that draws the anchors; None draws uniformly.

    The first three may be changed between samples.

    Raises:
        ValueError: the strategy is unknown, the shares of a mixture do not sum to 1, `num_goals` is
            negative or not whole, or `base` draws the same goal.
        TypeError: `base` is a sampler of TorchRL's that has no equal here.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, sections 3.2 and 4.5; for geometric goals
    Eysenbach et al. 2021, arXiv:2011.08909; for mixtures Park et al. 2025, arXiv:2410.20092.

    >>> HERSampler("final", num_goals=2)
    HERSampler(strategy='final', num_goals=2, base=UniformSampler())
    """

    _own_draws = 1
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
        # Where a batch has the goal rows, and says which transitions are relabelled.
        self._entries = keys.goal_entries(self._goal_key)
        super().__init__(base)
        self.strategy, self.num_goals, self.discount = strategy, num_goals, discount

    def _check_base(self, base: ReplaySampler) -> None:
        for layer in base.layers:
            if isinstance(layer, HERSampler) and {*self._entries} & {*layer._entries}:
                raise ValueError(
                    f"base must draw another goal, got {layer.goal_key!r} there and {self.goal_key!r} "
                    "here: name another goal_key, or draw goals of several kinds by a mixture."
                )

    @property
    def goal_key(self) -> NestedKey:
        """Which goal of the batch is drawn."""
        return self._goal_key

    def sample(self, storage: PackedStorage, batch_size: int) -> NoReturn:
        """Raises a RuntimeError: TorchRL's buffers cannot pass drawn goals to a transform."""
        raise RuntimeError(
            "HERSampler works in a ReplayStorage only, as TorchRL's buffers cannot pass drawn goals to a "
            "transform: use ReplayStorage(storage=..., sampler=HERSampler(), "
            "transform=GoalRelabel(reward_fn))."
        )

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws transitions and their goal rows.

        Returns:
            `[B]` int64 slots, and the base's entries with `goal_index`, `[B]` int64 slots (the row's own
            slot if it is not relabelled), and `her_mask`, `[B]` bool; with another `goal_key` both are
            named after it.
        """
        slots, info = self._base.draw(view, noise[1:], window)
        own, strategy = noise[0], self.strategy
        mixture = ((strategy, 1.0),) if isinstance(strategy, str) else (*strategy.items(),)
        if len(own) > 1:
            kinds = _kinds_of_batch(len(own), self.num_goals, mixture)
        else:  # the floor would always be 0
            kinds = np.full(1, _kind_by_chance(int(own[0]), self.num_goals, mixture), np.uint8)
        is_geometric = "geometric" in dict(mixture)
        steps = _geometric_steps(own, self.discount) if is_geometric else None
        index_key, mask_key = self._entries
        info[index_key] = view.episodes.goals(slots, own, kinds, steps)
        info[mask_key] = kinds > 0
        return slots, info

    def __repr__(self) -> str:
        of_goal = "" if self.goal_key == keys.DESIRED_GOAL else f"goal_key={self.goal_key!r}, "
        return (
            f"{type(self).__name__}(strategy={self.strategy!r}, num_goals={self.num_goals}, {of_goal}"
            f"base={self._base})"
        )


_Mixture = tuple[tuple[str, float], ...]


def _numbered(mixture: _Mixture) -> tuple[list[int], list[float]]:
    """Returns the numbers of the strategies that have a share, and the shares."""
    shares = {GOAL_KINDS[name]: share for name, share in mixture if share > 0}
    return [*shares], [*shares.values()]


@lru_cache(maxsize=16)
def _kinds_of_batch(size: int, num_goals: float, mixture: _Mixture) -> np.ndarray:
    """Returns how the goal of each transition of a batch is drawn.

    floor(B k / (k + 1)) transitions are relabelled: k of any k + 1 neighbours. The strategies alternate
    among them, each as often as `num_of_each` returns.

    Args:
        size: B.
        num_goals: k, 0 or more; infinite relabels all.
        mixture: strategies and their shares of the relabelled transitions.

    Returns:
        `[B]` uint8 of `GOAL_KINDS`, or 0 for a transition that keeps its goal. It must not be changed.

    >>> _kinds_of_batch(8, 3, (("future", 0.5), ("episode", 0.5))).tolist()
    [0, 1, 3, 1, 0, 3, 1, 3]
    """
    kinds, shares = _numbered(mixture)
    # For k >= B, only the first transition of the batch keeps its goal.
    period = int(min(num_goals, size)) + 1
    relabelled = [at for at in range(size) if at % period or num_goals == math.inf]
    found = np.zeros(size, np.uint8)
    for at, place in zip(relabelled, even_turns(num_of_each(len(relabelled), shares)), strict=True):
        found[at] = kinds[place]
    return found


def _kind_by_chance(noise: int, num_goals: float, mixture: _Mixture) -> int:
    """Chooses at random how the goal of a single transition is drawn, as `_kinds_of_batch` of many.

    Args:
        noise: a random number of 63 bits; the lowest are used, nearly independent of what else is drawn
            from it.
        num_goals: k: the transition is relabelled with probability k / (k + 1).
        mixture: strategies and their probabilities.
    """
    kinds, shares = _numbered(mixture)
    if num_goals < math.inf:
        noise, rest = divmod(noise, int(num_goals) + 1)
        if not rest:
            return 0
    chance = noise % _CHANCES / _CHANCES
    # The last one has what the others leave.
    return kinds[bisect([*accumulate(shares[:-1])], chance)]


def _geometric_steps(noise: np.ndarray, discount: float) -> np.ndarray:
    """Draws how many steps ahead geometric goals lie.

        P(k) = (1 - γ) γ^k,  k = floor(log(1 - u) / log γ)

    Args:
        noise: `[B]` int64 random numbers of 63 bits.
        discount: γ in [0, 1]; 1 returns infinity.

    Returns:
        `[B]` float64, k before rounding down; may be infinite.

    Reference: Eysenbach et al. 2021, C-Learning, arXiv:2011.08909.
    """
    if discount in (0, 1):
        return np.full(len(noise), math.inf if discount else 0.0)
    # By torch: NumPy's logarithm may round otherwise on another processor.
    chance = torch.from_numpy(noise).double().mul_(-(2.0**-63))
    return chance.log1p_().div_(math.log(discount)).numpy()
