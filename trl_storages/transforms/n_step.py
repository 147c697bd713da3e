"""Shows a transition and the few after it as one long step.

Letters: B batch, n steps looked ahead at most, m steps taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from tensordict import NestedKey

from trl_storages import arguments, keys
from trl_storages.functional.returns import discounts, window_length
from trl_storages.functional.rewards import return_dtype
from trl_storages.kernels import backend
from trl_storages.rows import RowView
from trl_storages.transforms.base import ReplayTransform

__all__ = ["NStep"]

_ONE_FOR_ALL = (
    "store what the team gets as one reward and one flag a row, such as the mean of their rewards, "
    "or take single steps (n_steps=1), which leave each agent's own as it is"
)


class NStep(ReplayTransform):
    """Folds each sampled transition with those that follow it in its episode.

        m = min(n, rows to the end of the episode, rows to the newest one)
        reward_t <- Σ γ^i · reward_{t+i},  i = 0 .. m - 1
        next_t   <- next_{t+m-1}

    `done`, `terminated`, `truncated` and every other entry under `next` are those of the last row, and
    `steps_to_next_obs`, `[B, 1]` int64, is m, so that TorchRL's losses bootstrap with γ^m: past a
    truncation, a cut and the newest row, never past a terminal state. The entries at the root stay.

    Stored rows stay single steps, so n and γ may change between samples. Of the rows in between only
    the rewards are read, of the last one what lies under `next`.

    Rewards are summed in float64, the first one first, whatever their dtype, and rounded once: to their
    own dtype if it is floating, to the default dtype for bool and integers of 8 or 16 bits, to float64
    for larger integers. With n = 1 they stay as they are.

    Behind `GoalRelabel` a window has one goal: `Compose(GoalRelabel(...), NStep(...))`. Each reward in
    it is the one for the goal of its first row, and with a `terminated_fn` the window ends where
    that goal is reached.

    Args:
        n_steps: n, at least 1; 1 only adds `steps_to_next_obs`.
        gamma: γ, from 0 to 1; the one of the loss.
        reward_key: entry of the reward, `[..., 1]`, under `next`; one value a row.
        terminated_key: entry of the flag of a terminal state, `[..., 1]` bool, under `next`.
        steps_to_next_obs_key: where m is written.

    Raises:
        ValueError: `n_steps` or `gamma` is out of its range.

    Reference: Sutton 1988, Learning to predict by the methods of temporal differences.
    """

    live_parameters: ClassVar[Mapping[str, str]] = {"n_step": "n_steps", "discount": "gamma"}

    def __init__(
        self,
        n_steps: int = 3,
        gamma: float = 0.99,
        *,
        reward_key: NestedKey = keys.REWARD,
        terminated_key: NestedKey = keys.TERMINATED,
        steps_to_next_obs_key: NestedKey = keys.STEPS_TO_NEXT_OBS,
    ) -> None:
        super().__init__()
        self.n_steps = n_steps
        self.gamma = gamma
        self.reward_key = arguments.key("reward_key", reward_key)
        self.terminated_key = arguments.key("terminated_key", terminated_key)
        self.steps_to_next_obs_key = arguments.key("steps_to_next_obs_key", steps_to_next_obs_key)
        self._made_for: tuple | None = None
        for name in ("reward_key", "terminated_key"):
            if getattr(self, name)[0] != "next":
                raise ValueError(f"{name} must lie under 'next', got {getattr(self, name)!r}.")

    @property
    def n_steps(self) -> int:
        """n, the longest window; may be changed between samples."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._n_steps: int = arguments.integer("n_steps", value, at_least=1)

    @property
    def gamma(self) -> float:
        """γ, the discount of a step; may be changed between samples."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = arguments.number("gamma", value, at_least=0, at_most=1)

    def replay(self, rows: RowView) -> None:
        """Folds the window of each transition.

        Raises:
            KeyError: the rows have no reward, or something was set under `next` that they lack.
            ValueError: the reward is not one value a row, or the rows are n-step transitions already.
            TypeError: the rewards are complex.
        """
        if self.steps_to_next_obs_key in rows:
            raise ValueError(
                f"the rows hold {self.steps_to_next_obs_key!r}, so they are n-step transitions "
                "already: store single steps, without MultiStep or MultiStepTransform."
            )
        if self.n_steps == 1:
            length = torch.ones(rows.batch_size, dtype=torch.int64, device=rows.device)
        else:
            length = self._fold(rows)
        rows[self.steps_to_next_obs_key] = length.unsqueeze(-1)

    def _fold(self, rows: RowView) -> torch.Tensor:
        """Replaces what lies under `next`, and returns how many rows were folded, `[B]`."""
        # Past `length` the window repeats the last row.
        window, length = rows.episodes.windows(rows.slots, self.n_steps)
        length, further = length.to(rows.device), rows.at(window)
        if self.reward_key not in rows:
            raise KeyError(
                f"NStep folds {self.reward_key!r}, which the rows lack; they have "
                f"{sorted(map(str, rows.keys()))}. Name it by NStep(reward_key=...); of several agents, "
                f"{_ONE_FOR_ALL}."
            )
        rewards, last = self._light(further, self.reward_key), window[-1]
        # Stored terminal rows end their episode; only those seen so by a transform end it earlier.
        if rows.is_defined(self.terminated_key):
            length = window_length(length, self._light(further, self.terminated_key))
            last = window.gather(0, length.to(window.device).unsqueeze(0) - 1).squeeze(0)
        # In float64: powers in the dtype of the rewards are off by percents, or 0.
        dtype, fold = return_dtype(rewards.dtype), backend(rewards.device).fold
        reward = fold(rewards.double(), length, self._discounts(rewards.device)).to(dtype)
        rows.follow(
            last,
            reason=(
                "NStep folds the sampled rows only: put it behind the transforms that read further "
                "ones, as in Compose(GoalRelabel(...), NStep(...))."
            ),
        )
        rows[self.reward_key] = reward.unsqueeze(-1)
        return length

    def _light(self, further: RowView, key: NestedKey) -> torch.Tensor:
        """Returns `[n, B]` an entry that has one value a row."""
        entry = further[key]
        if entry.shape != (*further.batch_size, 1):
            raise ValueError(
                f"{key!r} must be one value a row, shape {[*further.batch_size[1:], 1]}; got "
                f"{list(entry.shape[1:])}. Of several agents, {_ONE_FOR_ALL}."
            )
        return entry.squeeze(-1)

    def _discounts(self, device: torch.device) -> torch.Tensor:
        """Returns the table of `discounts`, which only a new n or γ changes."""
        made_for = (self.n_steps, self.gamma, device)
        if self._made_for != made_for:
            self._table = discounts(self.n_steps, self.gamma, device=device)
            self._made_for = made_for
        return self._table

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self.n_steps}, gamma={self.gamma})"
