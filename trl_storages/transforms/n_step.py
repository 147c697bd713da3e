"""N-step returns: folds a transition and those that follow it into one.

Letters: B batch, n steps looked ahead at most, m steps taken, A agents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import NestedKey

from trl_storages import arguments, keys
from trl_storages.attributes import Setting, Strict
from trl_storages.functional.returns import discounts, return_dtype, window_length
from trl_storages.kernels import backend
from trl_storages.kernels.memory import on_device
from trl_storages.rows import RowView
from trl_storages.transforms.base import ReplayTransform

__all__ = ["NStep"]

# The function that sums rewards, the table of discounts, and the dtype of the sums.
_Folding = tuple[Callable[..., torch.Tensor], torch.Tensor, torch.dtype]


class NStep(Strict, ReplayTransform):
    """Folds each sampled transition with those that follow it in its episode (n-step returns).

        m = min(n, rows to the end of the episode, rows to the newest one)
        reward_t <- Σ γ^i · reward_{t+i},  i = 0 .. m - 1
        next_t   <- next_{t+m-1}

    `done`, `terminated`, `truncated` and every other entry under `next` are taken from the last row, and
    `steps_to_next_obs`, `[B, 1]` int64, is m, so that TorchRL's losses bootstrap with γ^m: at a
    truncation, a cut or the newest row, but never at a terminal state. Root entries are unchanged.

    Rows are stored as single steps, so n and γ may change between samples. Intermediate rows are read
    for their rewards only, the last row for its entries under `next`.

    Rewards are summed in float64, in time order, and rounded once: to their own dtype if it is floating,
    to the default dtype for bool and 8- or 16-bit integers, to float64 for larger integers. With n = 1
    they are unchanged.

    **Several agents.** With `reward_key=("next", "agents", "reward")`, `[B, A, 1]`, each agent's rewards
    are folded separately, and `steps_to_next_obs` has the shape of the rewards, as TorchRL's losses
    expect. The row's `done` ends the window of all agents; one of a single agent is an ordinary entry.

    After `GoalRelabel` a window has one goal: in `Compose(GoalRelabel(...), NStep(...))` all its rewards
    are for the goal of its first row, and with a `terminated_fn` the window ends where that goal is
    reached.

    Args:
        n_step: n, at least 1; 1 only adds `steps_to_next_obs`.
        discount: γ, in [0, 1]; must match the loss.
        reward_key: entry of the reward, `[..., 1]`, under `next`; one value per row or per agent.
        terminated_key: entry of the terminal flag, `[..., 1]` bool, under `next`.
        steps_to_next_obs_key: where m is written.

    Raises:
        ValueError: `n_step` or `discount` is out of range, or a key is not under `next`.

    Reference: Sutton 1988, Learning to predict by the methods of temporal differences.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> storage = ReplayStorage(storage=PackedStorage(100), transform=NStep(3, discount=0.98))
    >>> storage.n_step = 5  # for the next batch that is drawn
    >>> storage.transform[0]
    NStep(n_step=5, discount=0.98)
    """

    live_parameters: ClassVar[tuple[str, ...]] = ("n_step", "discount")
    reward_key: NestedKey = keys.REWARD
    terminated_key: NestedKey = keys.TERMINATED
    steps_to_next_obs_key: NestedKey = keys.STEPS_TO_NEXT_OBS

    n_step = Setting[int](
        partial(arguments.integer, at_least=1),
        "n, the longest window; may be changed between samples.",
    )
    discount = Setting[float](
        partial(arguments.number, at_least=0, at_most=1),
        "γ, the discount of a step; may be changed between samples.",
    )

    def __init__(
        self,
        n_step: int = 3,
        discount: float = 0.99,
        *,
        reward_key: NestedKey = keys.REWARD,
        terminated_key: NestedKey = keys.TERMINATED,
        steps_to_next_obs_key: NestedKey = keys.STEPS_TO_NEXT_OBS,
    ) -> None:
        super().__init__()
        self.n_step = n_step
        self.discount = discount
        self.reward_key = arguments.key("reward_key", reward_key)
        self.terminated_key = arguments.key("terminated_key", terminated_key)
        self.steps_to_next_obs_key = arguments.key("steps_to_next_obs_key", steps_to_next_obs_key)
        # Cache (key, value), replaced as one tuple: storages that draw in different threads may share
        # this transform.
        self._made: tuple[tuple[Any, ...], _Folding] | None = None
        for name in ("reward_key", "terminated_key"):
            if (key := getattr(self, name))[0] != "next":
                raise ValueError(f"{name} must lie under 'next', got {key!r}.")

    def replay(self, rows: RowView) -> None:
        """Folds the window of each transition.

        Raises:
            KeyError: the rows have no reward, or a transform set an entry under `next` that they lack.
            ValueError: the reward lacks a trailing dimension, the flags do not match its shape, or the
                rows are n-step transitions already.
            TypeError: the rewards are complex.
        """
        if self.steps_to_next_obs_key in rows:
            if rows.is_defined(self.steps_to_next_obs_key):
                raise ValueError(
                    f"a transform has set {self.steps_to_next_obs_key!r} already: use one NStep, whose "
                    "n_step may be changed at any time."
                )
            raise ValueError(
                f"the rows hold {self.steps_to_next_obs_key!r}, so they are n-step transitions "
                "already: store single steps, without MultiStep or MultiStepTransform."
            )
        # Read once, as another thread may set it.
        if (n_step := self.n_step) > 1:
            length = self._fold(rows, n_step)
        else:
            of_a_row = rows[self.reward_key].shape[1:] if self.reward_key in rows else ()
            size = rows.batch_size + (of_a_row or (1,))
            length = torch.ones(size, dtype=torch.int64, device=rows.device)
        rows[self.steps_to_next_obs_key] = length

    def _fold(self, rows: RowView, n_step: int) -> torch.Tensor:
        """Replaces the entries under `next`, and returns m in the shape of the rewards."""
        # Beyond `length` the window repeats its last row.
        window, length = rows.episodes.ring.windows(rows.slots, n_step)
        if length.device != rows.device:
            length = on_device(length, rows.device)
        wanted = [self.reward_key]
        if ends := rows.is_defined(self.terminated_key):
            wanted.append(self.terminated_key)
        try:
            further = rows.at(window, wanted)
        except KeyError:
            if self.reward_key in rows:
                raise
            raise KeyError(
                f"NStep folds {self.reward_key!r}, which the rows lack; they have "
                f"{sorted(rows.keys(), key=str)}. Name it by NStep(reward_key=...), as "
                "('next', 'agents', 'reward') of several agents."
            ) from None
        last = window[-1]
        # Stored terminal rows end their episode anyway; only recomputed flags can end the window earlier.
        if ends:
            length = window_length(length, self._terminated(further, window.shape[1:]))
            last = window.gather(0, on_device(length, window.device).unsqueeze(0) - 1).squeeze(0)
        # Before rewards are computed, which then find the goals among the gathered rows.
        rows.follow(
            last,
            reason=(
                "NStep folds the sampled rows only: put it behind the transforms that read further "
                "ones, as by Compose(GoalRelabel(...), NStep(...)) or insert_transform(0, "
                "GoalRelabel(...))."
            ),
        )
        rewards = further[self.reward_key]
        size = rewards.shape[1:]
        if len(size) == 1:
            raise ValueError(
                f"{self.reward_key!r} must have a dimension of its own, such as {[*size, 1]}, got "
                f"{[*size]}: store reward.unsqueeze(-1)."
            )
        length = length.repeat_interleave(size[1:].numel()) if size[1:] != (1,) else length
        # In float64: in a narrow reward dtype, powers of γ would be off by percents, or 0.
        fold, *folding = self._folding(rewards, n_step)
        # Several ints are parsed faster than a size.
        reward, length = fold(rewards, length, *folding), length.view(*size)
        rows[self.reward_key] = reward
        return length

    def _terminated(self, further: RowView, size: torch.Size) -> torch.Tensor:
        """Returns the terminal flags `[n, B]` of the windows."""
        flags = further[self.terminated_key]
        if flags.shape[1:] != (*size, 1):
            raise ValueError(
                f"{self.terminated_key!r} must have the shape {[*size, 1]}, one value a row, got "
                f"{list(flags.shape[1:])}."
            )
        return flags.flatten(1)

    def _folding(self, rewards: torch.Tensor, n_step: int) -> _Folding:
        """Returns how rewards are summed, cached until n, γ or the kind of rewards changes."""
        made_for = (n_step, discount := self.discount, rewards.dtype, device := rewards.device)
        made = self._made
        if made is None or made[0] != made_for:
            weights = discounts(n_step, discount, device=device)
            made = made_for, (backend(device).fold, weights, return_dtype(rewards.dtype))
            self._made = made
        return made[1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_step={self.n_step}, discount={self.discount})"
