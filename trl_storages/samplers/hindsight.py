"""Draws, beside each transition, the row whose outcome will be its goal.

Letters: B batch, k goals per transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torchrl.data import SliceSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.functional.goals import kinds_by_chance, kinds_of_batch
from trl_storages.ring import GOAL_KINDS, episodes_of
from trl_storages.samplers.base import WrappingSampler
from trl_storages.samplers.drawing import Noise, draw_from
from trl_storages.saved import SavedState

__all__ = ["GoalStrategy", "HERSampler"]

GoalStrategy = Literal["future", "final", "episode", "random", "current"]


class HERSampler(WrappingSampler):
    """Hindsight experience replay: of k + 1 transitions, k are seen with a goal that was reached.

    `base` draws the transitions (anchors). `floor(B * k / (k + 1))` of a batch are given a goal row;
    `GoalRelabel` writes its next achieved goal into them. They are spread evenly: of any k + 1 neighbours
    k are relabelled, so that a batch which is split for several updates keeps the ratio in each part.
    With anchor t of an episode whose surviving rows are first..last, the goal row j is uniform over

        future: t..last      final: last      episode: first..last      random: all live rows

    An unfinished episode lends what has been seen so far. The floor is 0 for a batch of one, which
    is relabelled with probability k / (k + 1) instead.

    The sampler draws goal rows and changes nothing: a `ReplayStorage` samples with it if one of its
    transforms writes the goals, as `GoalRelabel` does, and says so otherwise. A transform of one's own
    that does declares it by `uses_goals = True`. TorchRL's replay buffers can't hand the storage to a
    transform; there the batch is as stored, and `goal_index` and `her_mask` are what was drawn for it.

    Args:
        strategy: where goals come from.
        num_goals: k, relabelled transitions for each one that stays as stored; 0 relabels none,
            `math.inf` all.
        base: the sampler that draws the anchors; None draws uniformly.

    Raises:
        ValueError: the strategy is unknown or `num_goals` negative or not whole.
        TypeError: `base` draws slices.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, sections 3.2 and 4.5.

    >>> HERSampler("final", num_goals=2)
    HERSampler(strategy='final', num_goals=2, base=UniformSampler())
    """

    live_parameters: ClassVar[Mapping[str, str]] = {
        "strategy": "strategy",
        "num_goals": "num_goals",
    }

    def __init__(
        self,
        strategy: GoalStrategy = "future",
        num_goals: float = 4,
        *,
        base: Sampler | None = None,
    ) -> None:
        if isinstance(base, SliceSampler):
            raise TypeError(
                f"base must draw single transitions, got {type(base).__name__}: each step of a slice "
                "would get another goal; for sequences with one goal each pass "
                "sample_unit=EpisodeSequence(...) to the ReplayStorage."
            )
        super().__init__(base)
        self.strategy = strategy
        self.num_goals = num_goals
        # How goals of the last batch were drawn, as those of the next one are as a rule.
        self._made_for: tuple[Any, ...] | None = None

    @property
    def strategy(self) -> GoalStrategy:
        """Where goals come from; may be changed between samples."""
        return self._strategy

    @strategy.setter
    def strategy(self, value: GoalStrategy) -> None:
        self._strategy = arguments.choice("strategy", value, get_args(GoalStrategy))

    @property
    def num_goals(self) -> float:
        """k, relabelled transitions for each one as stored; may be changed between samples."""
        return self._num_goals

    @num_goals.setter
    def num_goals(self, value: float) -> None:
        k = arguments.number("num_goals", value, at_least=0, infinite=True)
        if k != math.inf and k != int(k):
            raise ValueError(f"num_goals must be a whole number or inf, got {value}.")
        self._num_goals = k if k == math.inf else int(k)

    @property
    def draws_goals(self) -> bool:
        """Whether batches name goal rows: not with `num_goals` 0."""
        return self.num_goals > 0

    @property
    def noise_per_sample(self) -> int:
        """One random number more than the base."""
        return super().noise_per_sample + 1

    def draw(
        self,
        storage: Storage,
        batch_size: int,
        noise: Noise,
        window: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws transitions and their goal rows.

        Returns:
            `[B]` int64 slots, and the base's info with `goal_index`, `[B]` int64 slots (the row's own
            slot where it is not relabelled), and `her_mask`, `[B]` bool.
        """
        episodes, (*noise, own) = episodes_of(storage), noise
        index, info = draw_from(self.base, storage, batch_size, noise)
        if own.shape != index.shape:
            # Samplers without replacement end an epoch with fewer rows than were asked for.
            own = own[: index.shape[0]]
        device = index.device
        slots = index if own.device == device else index.to(own.device)
        goals, mask = episodes.goals(slots, own, self._kinds(own), (self._strategy,))
        info["goal_index"] = goals if goals.device == device else goals.to(device)
        info["her_mask"] = mask if mask.device == device else mask.to(device)
        return index, info

    def _kinds(self, noise: torch.Tensor) -> torch.Tensor:
        """Returns `[B]` uint8, how the goal of each transition is drawn; 0 where it stays as stored."""
        size, num_goals, strategy = noise.shape[0], self._num_goals, self._strategy
        kinds, shares = [GOAL_KINDS[strategy]], [1.0]
        if size == 1 and num_goals > 0:
            # The floor would always be 0.
            return kinds_by_chance(noise, num_goals, kinds, shares)
        made_for = (size, num_goals, strategy, noise.device)
        if self._made_for != made_for:
            found = kinds_of_batch(size, num_goals, kinds, shares)
            self._prepared = torch.tensor(found, dtype=torch.uint8, device=noise.device)
            self._made_for = made_for
        return self._prepared

    def _own_state(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "num_goals": self.num_goals}

    def _check_own_state(self, saved: SavedState) -> None:
        saved.one_of("strategy", get_args(GoalStrategy))
        if saved["num_goals"] != math.inf:
            saved.integer("num_goals")

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self.strategy, self.num_goals = state["strategy"], state["num_goals"]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(strategy={self.strategy!r}, num_goals={self.num_goals}, "
            f"base={self.base})"
        )
