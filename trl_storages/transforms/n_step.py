"""N-step returns: folds a transition and those that follow it into one.

Letters: B batch, n rows of a window, m of them that count, A agents.
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
    found = validation.key(name, value)
    if found[0] != "next":
        raise ValueError(f"{name} must lie under 'next', got {found!r}.")
    return found


def _next_keys(name: str, value: Any) -> NestedKey | list[NestedKey]:
    """Returns one key, or a list of different keys."""
    if not isinstance(value, list):
        return _next_key(name, value)
    found = [_next_key(name, each) for each in value]
    if not found or len({*found}) < len(found):
        raise ValueError(f"{name} must be a key or a list of different keys, got {value}.")
    return found


class NStep(ReplayTransform):
    """Folds each sampled transition with those that follow it in its episode (n-step returns).

        m = min(n, rows to the end of the episode, rows to the newest one, rows to a terminal one)
        reward_t <- Σ γ^i · reward_{t+i},  i = 0 .. m - 1
        next_t   <- next_{t+m-1}

    `done`, `terminated`, `truncated` and every other entry under `next` are taken from the last row, and
    `steps_to_next_obs`, int64 of the shape of the rewards, is m, so that TorchRL's losses bootstrap with
    γ^m: at a truncation, a cut or the newest row, but never at a terminal state. Root entries are
    unchanged.

    Rows are stored as single steps, so n and γ may change between samples. Intermediate rows are read
    for their rewards only.

    Rewards are summed in float64, in time order, and rounded once: to their own dtype if it is floating,
    to the default dtype for bool and 8- or 16-bit integers, to float64 for larger integers.

    **Several agents.** With `reward_key=("next", "agents", "reward")`, `[B, A, 1]`, each agent's rewards
    are folded separately. The row's `done` ends the window of all agents; one of a single agent is an
    ordinary entry.

    **Several rewards.** With `reward_key=[("next", "reward"), ("next", "cost")]` each of these entries is
    summed by itself, over the same window.

    **Hindsight.** In `Compose(GoalRelabel(...), NStep(...))` all rewards of a window are for the goal of
    its first row, and with a `terminated_fn` the window ends where that goal is reached.

    Args:
        n_step: n, at least 1; 1 leaves batches as they are, without `steps_to_next_obs`.
        discount: γ, in [0, 1]; must match the loss.
        reward_key: entry of the reward under `next`, one value per row or per agent; or a list of such
            entries. `steps_to_next_obs` has the shape of the first.
        terminated_key: entry of the terminal flag under `next`, which a transform before may set.
        steps_to_next_obs_key: where m is written.

    Raises:
        ValueError: `n_step` or `discount` is out of range, a key is not under `next`, or a list of keys
            is empty or repeats one.

    Reference: Sutton 1988, Learning to predict by the methods of temporal differences.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> storage = ReplayStorage(storage=PackedStorage(100), transform=NStep(3, discount=0.98))
    >>> storage.n_step = 5  # for the next batch that is drawn
    >>> storage.transform[0]
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
        """Opens the window, if n is above 1.

        Raises:
            ValueError: the rows are n-step transitions already, or lack next observations.
            RuntimeError: another `NStep` has opened one.
        """
        if self.n_step == 1:
            return
        if self.steps_to_next_obs_key in rows:
            raise ValueError(
                f"the rows hold {self.steps_to_next_obs_key!r}, so they are n-step transitions "
                "already: store single steps, without MultiStep or MultiStepTransform."
            )
        self.check_next(rows.has_next)
        rows.widen(self.n_step)

    def check_next(self, has_next: bool) -> None:
        """Raises a ValueError if n exceeds 1 and transitions have no next observations."""
        if self.n_step > 1 and not has_next:
            raise ValueError(
                "n-step returns need next observations under 'next', and the transitions have none: "
                "create the collector without compact_obs=True; each observation is stored once anyway."
            )

    def replay(self, rows: BatchRows) -> None:
        """Folds the windows.

        Raises:
            KeyError: the rows have no reward.
            RuntimeError: a transform before has set rewards of the rows, not of their windows.
            TypeError: the rewards are complex.
        """
        if self.n_step == 1:
            return
        window, reward_keys = rows.window, self.reward_key
        if not isinstance(reward_keys, list):
            reward_keys = [reward_keys]
        if window is None or not rows.changes.keys().isdisjoint(reward_keys):
            raise RuntimeError(
                f"NStep folds {self.reward_key!r} of its window: a transform before it must change that "
                "of rows.steps."
            )
        rewards = [window[key] for key in reward_keys]
        lengths, changes = rows.lengths, window.changes
        if not rows.is_on_host:
            lengths = sent(lengths, rows.device)
        # Stored terminal rows end their episode anyway; only recomputed flags can end a window earlier.
        if self.terminated_key in changes:
            flags = window[self.terminated_key]
            is_over = flags.reshape(*flags.shape[:2], -1).any(2)
            # The rows before the first terminal one, and that one.
            lengths = torch.minimum(lengths, (is_over.cumsum(0) == 0).sum(0) + 1)
            rows.follow_window(lengths - 1)
        for key in changes:
            if key[0] == "next" and key not in reward_keys:
                rows[key] = _of_row(window[key], lengths - 1)
        rows.steps, rows.window, rows.has_returns = rows, None, True
        size = rewards[0].shape[1:]
        counts = lengths.view(-1, *(1,) * (len(size) - 1))
        if size.numel() != size[0]:
            counts = counts.expand(size).clone()
        for key, values in zip(reward_keys, rewards, strict=True):
            rows.changes[key] = _folded(values, lengths, self.discount, rows.is_on_host)
        rows.changes[self.steps_to_next_obs_key] = counts

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_step={self.n_step}, discount={self.discount})"


def _of_row(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Returns the values `[B, ...]` of row `at` `[B]` of each window, of `[n, B, ...]`."""
    return values[at, torch.arange(len(at), device=at.device)]


def _folded(
    rewards: torch.Tensor, lengths: torch.Tensor, discount: float, is_on_host: bool
) -> torch.Tensor:
    """Sums the first `lengths` `[B]` of rewards `[n, B, ...]`, discounted."""
    dtype = return_dtype(rewards.dtype)
    if is_on_host:
        # The loop is compiled for two dtypes; it sums in float64 in any case.
        if not rewards.dtype is dtype is torch.float32:
            rewards = rewards.double()
        flat = rewards.contiguous().numpy().reshape(*rewards.shape[:2], -1)
        total = np.empty(flat.shape[1:], flat.dtype)
        draws.fold(flat, lengths.numpy(), _discounts(len(flat), discount), total)
        folded = torch.from_numpy(total).view(rewards.shape[1:])
        return folded if folded.dtype is dtype else folded.to(dtype)
    values = rewards.reshape(*rewards.shape[:2], -1)
    weights = sent(_discounts(len(values), discount), rewards.device)[:, None, None]
    rank = torch.arange(len(values), device=rewards.device)[:, None, None]
    # where, not a product: what lies outside of a window may be infinite.
    summed = (torch.where(rank < lengths[:, None], values, 0).double() * weights).sum(0)
    return summed.to(dtype).view(rewards.shape[1:])


@lru_cache(maxsize=16)
def _discounts(num_rows: int, gamma: float) -> np.ndarray:
    """Tabulates the weight of each reward of a window.

        R = Σ γ^i · r_i,  i = 0 .. m - 1

    Args:
        num_rows: n, the longest window.
        gamma: γ in [0, 1].

    Returns:
        `[n]` float64 γ^i, whatever the dtype of the rewards; γ^0 is 1 for γ = 0 too.

    Reference: Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without the bootstrap term.

    >>> _discounts(3, 0.5).tolist()
    [1.0, 0.5, 0.25]
    """
    exponents = torch.arange(num_rows, dtype=torch.float64, device="cpu")
    return torch.pow(gamma, exponents).numpy()
