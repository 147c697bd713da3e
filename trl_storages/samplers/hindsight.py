"""Hindsight experience replay: draws a goal row along with each transition.

Letters: B batch, k goals per transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments, keys
from trl_storages.attributes import Setting
from trl_storages.functional.draws import (
    geometric_steps,
    kinds_by_chance,
    kinds_of_batch,
    random_noise,
)
from trl_storages.kernels.memory import on_device
from trl_storages.ring import GOAL_KINDS
from trl_storages.samplers.base import Drawn, WrappingSampler, check_live, checked_draw, layers_of

__all__ = ["GoalMixture", "GoalStrategy", "HERSampler", "check_strategy"]

GoalStrategy = Literal["future", "final", "episode", "random", "geometric", "current"]
#: Strategy (a name or an enum member) -> its share of the relabelled transitions.
GoalMixture = Mapping[Any, float]

# Tolerance for the sum of the shares.
_NEAR = 1e-6


def _check_num_goals(name: str, value: Any) -> float:
    k = arguments.number(name, value, at_least=0, infinite=True)
    if k != math.inf and k != int(k):
        raise ValueError(f"{name} must be a whole number or inf, got {value}.")
    return k if k == math.inf else int(k)


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

    Raises:
        ValueError: the strategy is unknown, the shares of a mixture do not sum to 1, `num_goals` is
            negative or not whole, or `base` draws the same goal.
        TypeError: `base` is a sampler of TorchRL's that has no equal here.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, sections 3.2 and 4.5; for geometric goals
    Eysenbach et al. 2021, arXiv:2011.08909; for mixtures Park et al. 2025, arXiv:2410.20092.

    >>> HERSampler("final", num_goals=2)
    HERSampler(strategy='final', num_goals=2, base=UniformSampler())
    """

    live_parameters: ClassVar[tuple[str, ...]] = ("strategy", "num_goals", "discount")

    discount = Setting[float](
        partial(arguments.number, at_least=0, at_most=1),
        "γ of geometric goals; may be changed between samples.",
    )
    num_goals = Setting[float](
        _check_num_goals,
        "k, relabelled transitions for each one as stored; may be changed between samples.",
    )

    def __init__(
        self,
        strategy: GoalStrategy | GoalMixture = "future",
        num_goals: float = 4,
        *,
        discount: float = 0.99,
        goal_key: NestedKey = keys.DESIRED_GOAL,
        base: Sampler | None = None,
    ) -> None:
        self._goal_key = arguments.root_key("goal_key", goal_key)
        self._index_key, self._mask_key = keys.goal_entries(self._goal_key)
        super().__init__(base)
        self.strategy = strategy
        self.num_goals = num_goals
        self.discount = discount
        # Cache of the last batch's goal kinds, which the next batch usually shares.
        self._made: tuple[tuple[Any, ...], torch.Tensor] | None = None

    def _check_base(self, base: Sampler) -> None:
        for layer in layers_of(base):
            if not isinstance(layer, HERSampler):
                continue
            if {self._index_key, self._mask_key} & {layer._index_key, layer._mask_key}:
                raise ValueError(
                    f"base must draw no goals under {self._index_key!r} and {self._mask_key!r}, as this "
                    f"sampler of goal_key={self._goal_key!r} does, got one of "
                    f"goal_key={layer.goal_key!r}: give one of them another goal_key, or draw goals of "
                    "several kinds by a mixture as strategy."
                )

    @property
    def strategy(self) -> GoalStrategy | dict[GoalStrategy, float]:
        """Where goals come from; may be changed between samples."""
        return self._strategy if isinstance(self._strategy, str) else dict(self._strategy)

    @strategy.setter
    def strategy(self, value: GoalStrategy | GoalMixture) -> None:
        self._strategy, shares = check_strategy("strategy", value)
        # Names, kinds and their shares, replaced together: another thread may be drawing.
        self._mixture = tuple(shares), [GOAL_KINDS[name] for name in shares], [*shares.values()]

    @property
    def goal_key(self) -> NestedKey:
        """Which goal of the batch is drawn."""
        return self._goal_key

    @property
    def draws_goals(self) -> bool:
        """Whether goal rows are drawn, which a transform must write: False if `num_goals` is 0."""
        return self.num_goals > 0

    def sample(self, storage: Any, batch_size: int) -> Drawn:
        """Draws transitions and their goal rows.

        Returns:
            `[B]` int64 slots, and the base's info with `goal_index`, `[B]` int64 slots (the row's own
            slot if it is not relabelled), and `her_mask`, `[B]` bool; with another `goal_key` both are
            named after it.

        Raises:
            RuntimeError: the storage is empty, or has no episode index.
        """
        batch_size, episodes = checked_draw(storage, batch_size)
        if not storage.is_replayed:
            raise RuntimeError(
                "HERSampler draws goals that a transform of a ReplayStorage must write, got another "
                "buffer, which hands them to none: use ReplayStorage(storage=..., "
                "sampler=HERSampler(), transform=GoalRelabel(reward_fn))."
            )
        index, info = self.base.sample(storage, batch_size)
        check_live(self.base, index, batch_size, storage)
        noise = random_noise(batch_size, generator=self._rng, device=episodes.device)
        names, numbers, shares = self._mixture
        kinds = self._kinds(noise, numbers, shares)
        steps = geometric_steps(noise, self.discount) if "geometric" in names else None
        if index.device != noise.device:
            index = on_device(index, noise.device)
        goals = episodes.ring.goals(index, noise, kinds, names, steps)
        info[self._index_key], info[self._mask_key] = goals
        return index, info

    def _kinds(self, noise: torch.Tensor, numbers: list[int], shares: list[float]) -> torch.Tensor:
        """Returns `[B]` uint8, the goal kind of each transition; 0 leaves it as stored."""
        size, num_goals = noise.shape[0], self.num_goals
        if size == 1 and num_goals > 0:
            # The floor would always be 0.
            return kinds_by_chance(noise, num_goals, numbers, shares)
        made_for = (size, num_goals, numbers, shares, noise.device)
        if (made := self._made) is not None and made[0] == made_for:
            return made[1]
        found = kinds_of_batch(size, num_goals, numbers, shares)
        kinds = on_device(torch.tensor(found, dtype=torch.uint8), noise.device)
        self._made = made_for, kinds
        return kinds

    def __repr__(self) -> str:
        more = f"discount={self.discount}, " if "geometric" in self._mixture[0] else ""
        if self._goal_key != keys.DESIRED_GOAL:
            more += f"goal_key={self._goal_key!r}, "
        return (
            f"{type(self).__name__}(strategy={self.strategy!r}, num_goals={self.num_goals}, {more}"
            f"base={self.base})"
        )


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
