"""Shows a transition and the few after it as one long step.

Letters: B batch, n steps looked ahead at most, m steps taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import ClassVar

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from trl_storages import arguments, keys
from trl_storages._torchrl import set_entry
from trl_storages.functional.returns import discounts, window_length
from trl_storages.functional.rewards import return_dtype
from trl_storages.kernels import backend
from trl_storages.storages import nest, nested_under
from trl_storages.transforms.base import ReplayTransform, SeenRows

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

    def replaces(self, key: NestedKey) -> bool:
        """Returns whether the key lies under `next`, unless the window is a single step."""
        return self.n_steps > 1 and key[0] == "next"

    def hides_next(self, follower: Transform | None) -> bool:
        """Returns whether a window has more steps than one."""
        return self.n_steps > 1

    def replay(self, batch: TensorDictBase, rows: SeenRows) -> TensorDictBase:
        """Folds the window of each transition of `batch`.

        Raises:
            KeyError: the rows have no reward, or lack something that the batch has under `next`.
            ValueError: the reward is not one value a row, or the rows are n-step transitions already.
            TypeError: the rewards are complex.
        """
        if batch.get(self.steps_to_next_obs_key, None) is not None:
            raise ValueError(
                f"the rows hold {self.steps_to_next_obs_key!r}, so they are n-step transitions "
                "already: store single steps, without MultiStep or MultiStepTransform."
            )
        index = batch.get(keys.INDEX)
        if self.n_steps == 1:
            length = torch.ones_like(index)
        else:
            episodes = rows.episodes
            window, length = episodes.windows(index.to(episodes.device), self.n_steps)
            length = self._fold(batch, rows, window, length.to(index.device))
        set_entry(batch, self.steps_to_next_obs_key, length.unsqueeze(-1))
        return batch

    def _fold(
        self, batch: TensorDictBase, rows: SeenRows, window: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        """Replaces what lies under `next`, and returns how many rows were folded, `[B]`.

        Args:
            batch: `[B]`.
            rows: the rows as they are seen.
            window: `[n, B]` slots; past `length` they repeat the last row.
            length: `[B]`, from 1 to n.
        """
        # Stored terminal rows end their episode; only those seen so by a transform end it earlier.
        may_end_early = rows.changes(self.terminated_key)
        wanted = [self.reward_key, self.terminated_key] if may_end_early else [self.reward_key]
        if self.reward_key not in rows.keys:
            raise KeyError(
                f"NStep folds {self.reward_key!r}, which the rows lack; they have "
                f"{sorted(map(str, rows.keys))}. Name it by NStep(reward_key=...); of several agents, "
                f"{_ONE_FOR_ALL}."
            )
        light = rows.read(batch, window, wanted)
        for key, entry in light.items():
            if key in wanted and entry.shape != (*window.shape, 1):
                raise ValueError(
                    f"{key!r} must be one value a row, shape {[*length.shape, 1]}; got "
                    f"{list(entry.shape[1:])}. Of several agents, {_ONE_FOR_ALL}."
                )
        rewards = light[self.reward_key]
        last = window[-1]
        if may_end_early:
            length = window_length(length, light[self.terminated_key].squeeze(-1))
            last = window.gather(0, length.to(window.device).unsqueeze(0) - 1).squeeze(0)
        # In float64: powers in the dtype of the rewards are off by percents, or 0.
        rewards, dtype = rewards.squeeze(-1), return_dtype(rewards.dtype)
        fold = backend(rewards.device).fold
        reward = fold(rewards.double(), length, self._discounts(rewards.device))
        reward = reward.to(dtype).unsqueeze(-1)

        heavy, names = _under_next(rows.keys, self.reward_key)
        following = {key[1:]: field for key, field in rows.read(batch, last, heavy).items()}
        replaced = batch.get("next", None)
        if replaced is not None and not names.issuperset(replaced.keys()):
            raise KeyError(
                f"the batch has {sorted(replaced.keys())} under 'next', the rows have "
                f"{sorted(names)}: what is not stored cannot be read from a later row; put the "
                "transform that adds it behind NStep."
            )
        following[self.reward_key[1:]] = reward
        nested = nested_under(rows.storage, "next")
        set_entry(batch, "next", nest(following, batch.batch_size, batch.device, nested))
        return length

    def _discounts(self, device: torch.device) -> torch.Tensor:
        """Returns the table of `discounts`, which only a new n or γ changes."""
        made_for = (self.n_steps, self.gamma, device)
        if self._made_for != made_for:
            self._table = discounts(self.n_steps, self.gamma, device=device)
            self._made_for = made_for
        return self._table

    def show(
        self,
        batch: TensorDictBase,
        slots: torch.Tensor,
        wanted: Collection[NestedKey],
        rows: SeenRows,
    ) -> dict[NestedKey, torch.Tensor]:
        """Refuses to show further rows: only the sampled ones are folded.

        Raises:
            RuntimeError: what lies under `next` is wanted.
        """
        if any(key[0] == "next" for key in wanted):
            raise RuntimeError(
                "NStep folds the sampled rows only: put it behind the transforms that read further "
                "ones, as in Compose(GoalRelabel(...), NStep(...))."
            )
        return rows.read(batch, slots, wanted)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self.n_steps}, gamma={self.gamma})"


@cache
def _under_next(
    entries: tuple[NestedKey, ...], reward_key: NestedKey
) -> tuple[tuple[NestedKey, ...], frozenset[str]]:
    """Returns the entries under `next` but the reward, and the names right under it, with it."""
    following = [key for key in entries if key[0] == "next"]
    others = tuple(key for key in following if key != reward_key)
    return others, frozenset(key[1] for key in following)
