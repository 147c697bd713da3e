"""N-step returns.

Letters: B batch, n steps of an n-step window, m valid steps, A agents.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import keys, validation
from trl_storages.entries.device import sent
from trl_storages.functional import return_dtype
from trl_storages.kernels import draws
from trl_storages.settings import Setting
from trl_storages.storage import BatchRows
from trl_storages.transforms.base import ReplayTransform

__all__ = ["NStep"]


def _next_key(name: str, value: Any) -> NestedKey:
    key = validation.key(name, value)
    if key[0] != "next":
        raise ValueError(f"{name} must be under 'next', got {key!r}.")
    return key


def _next_keys(name: str, value: Any) -> NestedKey | list[NestedKey]:
    """Returns one key, or a list of different keys."""
    if not isinstance(value, list):
        return _next_key(name, value)
    next_keys = [_next_key(name, key) for key in value]
    if not next_keys or len({*next_keys}) < len(next_keys):
        raise ValueError(f"{name} must be a key or a list of different keys, got {value}.")
    return next_keys


class NStep(ReplayTransform):
    """Computes n-step returns: sums rewards, and replaces the next observation by that n steps later.

        m = min(n, steps to the end of the episode, to the newest step, to a terminal step)
        reward_t <- Σ γ^i · reward_{t+i},  i = 0 .. m - 1
        next_t   <- next_{t+m-1}

    `done`, `terminated`, `truncated` and every other field under `next` come from the last step of the
    n-step window. `steps_to_next_obs`, int64 of the shape of the rewards, is m, so that TorchRL's losses
    bootstrap with γ^m: at a truncation, a split or the newest step, but never at a terminal state. Root
    fields are unchanged.

    Transitions are stored as single steps, so n and γ may change between samples. Only the rewards of
    intermediate steps are read.

    Rewards are summed in float64, in time order, and rounded once: to their dtype if it is floating, to
    the default dtype for bool and 8- or 16-bit integers, to float64 for larger integers.

    **Several agents.** With `reward_key=("next", "agents", "reward")`, `[B, A, 1]`, the rewards of each
    agent are summed separately. The transition's `done` ends the n-step window of all agents; the `done`
    of a single agent is an ordinary field.

    **Several rewards.** With `reward_key=[("next", "reward"), ("next", "cost")]` each field is summed
    separately, over the same n-step window.

    **HER.** In `Compose(GoalRelabel(...), NStep(...))` all rewards of an n-step window are for the goal
    of its first step, and with a `terminated_fn` the n-step window ends where the goal is reached.

    Args:
        n_step: n, at least 1; 1 leaves batches unchanged, without `steps_to_next_obs`.
        discount: γ, in [0, 1]; must be the discount of the loss.
        reward_key: key of the reward under `next`, one value per transition or per agent; or a list of
            keys. `steps_to_next_obs` has the shape of the first reward.
        terminated_key: key of the terminal flag under `next`, which an earlier transform may set.
        steps_to_next_obs_key: key of m.

    Raises:
        ValueError: `n_step` or `discount` is out of range, a key is not under `next`, or a list of keys
            is empty or repeats a key.

    Reference: Sutton 1988, Learning to predict by the methods of temporal differences.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> buffer = ReplayStorage(storage=PackedStorage(100), transform=NStep(3, discount=0.98))
    >>> buffer.n_step = 5  # from the next batch on
    >>> buffer.transform[0]
    NStep(n_step=5, discount=0.98)
    """

    n_step: Any = Setting(validation.integer, at_least=1)
    discount: Any = Setting(validation.number, at_least=0, at_most=1)
    reward_key: Any = Setting(_next_keys)
    terminated_key: Any = Setting(_next_key)
    steps_to_next_obs_key: Any = Setting(validation.key)

    def __init__(
        self,
        n_step: int = 3,
        discount: float = 0.99,
        *,
        reward_key: NestedKey | list[NestedKey] = keys.REWARD,
        terminated_key: NestedKey = keys.TERMINATED,
        steps_to_next_obs_key: NestedKey = keys.STEPS_TO_NEXT_OBS,
    ) -> None:
        super().__init__()
        self.n_step, self.discount = n_step, discount
        self.reward_key, self.terminated_key = reward_key, terminated_key
        self.steps_to_next_obs_key = steps_to_next_obs_key

    def prepare(self, rows: BatchRows) -> None:
        """Requests n-step windows, if n is above 1.

        Raises:
            ValueError: the data are already n-step transitions, or have no next observations.
            RuntimeError: another `NStep` has requested n-step windows.
        """
        if self.n_step == 1:
            return
        if self.steps_to_next_obs_key in rows:
            raise ValueError(
                f"NStep needs 1-step transitions, but the data contain {self.steps_to_next_obs_key!r} "
                "(already n-step): store single steps, without MultiStep or MultiStepTransform."
            )
        self.check_next(rows.has_next)
        rows.widen(self.n_step)

    def check_next(self, has_next: bool) -> None:
        """Raises a ValueError if n is above 1 and transitions have no next observations."""
        if self.n_step > 1 and not has_next:
            raise ValueError(
                "n-step returns need next observations under 'next', and the transitions have none: "
                "create the collector without compact_obs=True; each observation is stored once anyway."
            )

    def replay(self, rows: BatchRows) -> None:
        """Computes the n-step returns.

        Raises:
            KeyError: the transitions have no reward.
            RuntimeError: an earlier transform has set rewards of the batch instead of the n-step window.
            TypeError: the rewards are complex.
        """
        if self.n_step == 1:
            return
        window, reward_keys = rows.window, self.reward_key
        if not isinstance(reward_keys, list):
            reward_keys = [reward_keys]
        if window is None or not rows.changes.keys().isdisjoint(reward_keys):
            raise RuntimeError(
                f"NStep sums {self.reward_key!r} over its n-step window, but an earlier transform "
                "changed the rewards of the batch: change those of rows.steps."
            )
        rewards, changes = [window[key] for key in reward_keys], window.changes
        lengths = rows.lengths if rows.is_on_host else sent(rows.lengths, rows.device)
        # A stored terminal step ends its episode, so only a recomputed flag can end a window earlier.
        if self.terminated_key in changes:
            flags = window[self.terminated_key]
            is_terminal = flags.reshape(*flags.shape[:2], -1).any(2)
            # The number of steps before the first terminal step, plus 1.
            lengths = torch.minimum(lengths, (is_terminal.cumsum(0) == 0).sum(0) + 1)
            rows.follow_window(lengths - 1)
        for key in changes:
            if key[0] == "next" and key not in reward_keys:
                batch = torch.arange(len(lengths), device=lengths.device)
                rows[key] = window[key][lengths - 1, batch]
        rows.close_windows()
        shape = rewards[0].shape[1:]
        counts = lengths.view(-1, *(1,) * (len(shape) - 1))
        if shape.numel() != shape[0]:
            counts = counts.expand(shape).clone()
        for key, values in zip(reward_keys, rewards, strict=True):
            rows.changes[key] = _discounted_sums(values, lengths, self.discount, rows.is_on_host)
        rows.changes[self.steps_to_next_obs_key] = counts

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_step={self.n_step}, discount={self.discount})"


def _discounted_sums(
    rewards: torch.Tensor, lengths: torch.Tensor, discount: float, is_on_host: bool
) -> torch.Tensor:
    """Returns the discounted sums `[B, ...]` of the first `lengths` `[B]` of rewards `[n, B, ...]`."""
    dtype = return_dtype(rewards.dtype)
    if is_on_host:
        # The loop is compiled for two dtypes. It sums both in float64.
        if not rewards.dtype is dtype is torch.float32:
            rewards = rewards.double()
        flat = rewards.contiguous().numpy().reshape(*rewards.shape[:2], -1)
        output = np.empty(flat.shape[1:], flat.dtype)
        draws.sum_windows(flat, lengths.numpy(), _discounts(len(flat), discount), output)
        returns = torch.from_numpy(output).view(rewards.shape[1:])
        return returns if returns.dtype is dtype else returns.to(dtype)
    values = rewards.reshape(*rewards.shape[:2], -1)
    weights = sent(_discounts(len(values), discount), rewards.device)[:, None, None]
    step = torch.arange(len(values), device=rewards.device)[:, None, None]
    # `where`, not a product, because rewards outside of an n-step window may be infinite.
    sums = (torch.where(step < lengths[:, None], values, 0).double() * weights).sum(0)
    return sums.to(dtype).view(rewards.shape[1:])


@lru_cache(maxsize=16)
def _discounts(num_steps: int, gamma: float) -> np.ndarray:
    """Returns the weight of each reward of an n-step window.

        R = Σ γ^i · r_i,  i = 0 .. m - 1

    Args:
        num_steps: n, the longest n-step window.
        gamma: γ in [0, 1].

    Returns:
        `[n]` float64 γ^i, whatever the dtype of the rewards; γ^0 is 1 for γ = 0 too.

    Reference: Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without the bootstrap term.

    >>> _discounts(3, 0.5).tolist()
    [1.0, 0.5, 0.25]
    """
    exponents = torch.arange(num_steps, dtype=torch.float64, device="cpu")
    return torch.pow(gamma, exponents).numpy()
