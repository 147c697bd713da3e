"""Shows a transition and the few after it as one long step.

Letters: B batch, n steps looked ahead at most, m steps taken.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages import keys
from trl_storages._torchrl import set_entry
from trl_storages.functional.returns import n_step_return, window_length
from trl_storages.storages import nest
from trl_storages.transforms.base import ReplayTransform, SeenRows

__all__ = ["NStep"]


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

    Behind `GoalRelabel` a window has one goal: `Compose(GoalRelabel(...), NStep(...))`. Each reward in
    it is the one for the goal of its first row, and with a `terminated_fn` the window ends where
    that goal is reached.

    Args:
        n_steps: n, at least 1; 1 only adds `steps_to_next_obs`.
        gamma: γ, from 0 to 1; the one of the loss.
        reward_key: entry of the reward, `[..., 1]`, under `next`.
        terminated_key: entry of the flag of a terminal state, `[..., 1]` bool, under `next`.
        steps_to_next_obs_key: where m is written.

    Raises:
        ValueError: `n_steps` or `gamma` is out of its range.

    Reference: Sutton 1988, Learning to predict by the methods of temporal differences.
    """

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
        self.reward_key = unravel_key(reward_key)
        self.terminated_key = unravel_key(terminated_key)
        self.steps_to_next_obs_key = unravel_key(steps_to_next_obs_key)

    @property
    def n_steps(self) -> int:
        """n, the longest window; may be changed between samples."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"n_steps must be a whole number, 1 or more; got {value!r}.")
        self._n_steps = value

    @property
    def gamma(self) -> float:
        """γ, the discount of a step; may be changed between samples."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"gamma must be from 0 to 1, got {value}.")
        self._gamma = float(value)

    def replay(self, batch: TensorDictBase, rows: SeenRows) -> TensorDictBase:
        """Folds the window of each transition of `batch`.

        Raises:
            KeyError: the batch has no reward, or something under `next` that the rows lack.
            ValueError: the reward is not one value a row, or the rows are n-step transitions already.
        """
        reward = self._reward(batch)
        episodes = rows.episodes
        first = batch.get(keys.INDEX).to(episodes.device)
        length = (episodes.ahead(first) + 1).clamp_(max=self.n_steps)
        if self.n_steps > 1:
            # Steps past the end repeat the last row of the window: every row read is of the episode.
            step = torch.arange(1, self.n_steps, device=first.device)
            offset = torch.minimum(step, length.unsqueeze(-1) - 1)
            window = episodes.shift(first.unsqueeze(-1), offset)
            last = window[..., -1]
            # The episode ends at terminal rows anyway, unless a transform sees others as terminal.
            may_end_early = rows.changes(self.terminated_key)
            wanted = [self.reward_key, self.terminated_key][: 1 + may_end_early]
            later = rows.read(batch, window, wanted)
            rewards = torch.cat([reward, later[self.reward_key].squeeze(-1)], -1)
            length = length.to(reward.device)
            if may_end_early:
                terminated = torch.cat(
                    [batch.get(self.terminated_key), later[self.terminated_key].squeeze(-1)], -1
                )
                length = window_length(length, terminated)
                last = episodes.shift(first, length.to(first.device) - 1)
            reward = n_step_return(rewards, length, self.gamma).unsqueeze(-1)
            self._set_next(batch, rows, last, reward)
        set_entry(batch, self.steps_to_next_obs_key, length.to(reward.device).unsqueeze(-1))
        return batch

    def _reward(self, batch: TensorDictBase) -> torch.Tensor:
        reward = batch.get(self.reward_key, None)
        if reward is None:
            there = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"NStep needs {self.reward_key!r} in the batch; it has {there}.")
        if reward.shape != (*batch.batch_size, 1):
            raise ValueError(
                f"{self.reward_key!r} must be one value a row, shape {[*batch.batch_size, 1]}; got "
                f"{list(reward.shape)}."
            )
        if batch.get(self.steps_to_next_obs_key, None) is not None:
            raise ValueError(
                f"the rows hold {self.steps_to_next_obs_key!r}, so they are n-step transitions already: "
                "store single steps, without MultiStep or MultiStepTransform."
            )
        return reward

    def _set_next(
        self, batch: TensorDictBase, rows: SeenRows, last: torch.Tensor, reward: torch.Tensor
    ) -> None:
        """Replaces what lies under `next` by that of the rows `last`, with the folded reward."""
        wanted = [key for key in rows.keys if key[0] == "next" and key != self.reward_key]
        fields = rows.read(batch, last, wanted)
        following = {key[1:]: fields[key] for key in wanted}
        following[self.reward_key[1:]] = reward
        replaced = batch.get("next")
        if len(replaced.keys()) != len({key[0] for key in following}):
            there = sorted(map(str, following))
            raise KeyError(
                f"the batch has {sorted(replaced.keys())} under 'next', the rows have {there}: what is "
                "not stored cannot be read from a later row; put the transform that adds it behind NStep."
            )
        batch.set("next", nest(following, replaced.batch_size, replaced.device))

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
                "NStep folds the sampled rows only: put it behind the transforms that read further ones, "
                "as in Compose(GoalRelabel(...), NStep(...))."
            )
        return rows.read(batch, slots, wanted)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self.n_steps}, gamma={self.gamma})"
