"""Transforms that read further rows: each prepares what it needs, then all replay in order.

Letters: B batch, n rows of a window, G goal size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from trl_storages import arguments, keys
from trl_storages.attributes import Strict
from trl_storages.functional.returns import discounts, relabelled_dtype, return_dtype
from trl_storages.kernels import folds
from trl_storages.next.parameters import Checked, unit_interval
from trl_storages.streams.row_view import RowView

__all__ = ["GoalRelabel", "NStep", "ReplayTransform"]

GoalFunction = Callable[[torch.Tensor, torch.Tensor, dict[NestedKey, torch.Tensor]], Any]


class ReplayTransform(Strict, Transform):  # type: ignore[misc]
    """A transform that reads rows of its storage beside those of the batch."""

    #: Whether it writes the goals that a `HERSampler` draws.
    uses_goals = False

    def prepare(self, rows: RowView) -> None:
        """Says what further rows it needs, before any transform replays."""

    def replay(self, rows: RowView) -> None:
        """Changes the drawn rows; what changes rewards or flags changes those of `rows.steps`."""
        raise NotImplementedError

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raises a RuntimeError: only a `ReplayStorage` hands it the rows."""
        raise RuntimeError(f"{type(self).__name__} works in a ReplayStorage only.")


class NStep(ReplayTransform):
    """Folds each transition with those that follow it in its episode.

        m = min(n, rows to the end of the episode, rows to the newest one)
        reward_t <- Σ γ^i · reward_{t+i}, i = 0 .. m - 1;   next_t <- next_{t+m-1}

    `steps_to_next_obs` is m. Sums are made in float64, and rounded once.
    """

    reward_key: NestedKey = keys.REWARD
    n_step: Any = Checked(arguments.integer, at_least=1)
    discount: Any = Checked(unit_interval)

    def __init__(
        self, n_step: int = 3, discount: float = 0.99, *, reward_key: NestedKey = keys.REWARD
    ) -> None:
        super().__init__()
        self.n_step, self.discount, self.reward_key = n_step, discount, reward_key
        self._lengths = torch.empty(0, dtype=torch.int64)

    def prepare(self, rows: RowView) -> None:
        """Finds the window of each row, and takes what stands under `next` from its last one."""
        window, self._lengths = rows.episodes.windows(rows.slots, self.n_step)
        rows.window = rows.at(window)
        rows.follow(window[-1])

    def replay(self, rows: RowView) -> None:
        """Folds the windows."""
        window, lengths = rows.steps, self._lengths.to(rows.device)
        rows.window = None
        reward = window[self.reward_key]
        if window.is_set(keys.TERMINATED):  # a goal may be reached within the window
            flags = window[keys.TERMINATED].flatten(1)
            first = torch.where(flags.any(0), flags.long().argmax(0) + 1, self.n_step)
            lengths = torch.minimum(lengths, first)
            last = (lengths - 1).unsqueeze(0)
            rows.follow(window.slots.gather(0, last.cpu()).squeeze(0))
            for key in (keys.TERMINATED, keys.DONE):
                flag = window[key]
                rows[key] = flag.gather(0, last.view(1, -1, *(1,) * (flag.ndim - 2))).squeeze(0)
        size = reward.shape[1:]
        rows[self.reward_key] = self._folded(reward, lengths)
        rows[keys.STEPS_TO_NEXT_OBS] = (
            lengths.view(-1, *(1,) * (len(size) - 1)).expand(size).clone()
        )

    def _folded(self, reward: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Sums rewards `[n, B, *]` of windows of some lengths."""
        weights = discounts(len(reward), self.discount, device=reward.device)
        flat = reward.reshape(*reward.shape[:2], -1)
        if reward.device.type == "cpu":
            total = np.empty(flat.shape[1:])
            folds.fold(flat.double().numpy(), lengths.numpy(), weights.numpy(), total)
            folded = torch.from_numpy(total)
        else:
            counts = (
                torch.arange(len(reward), device=reward.device)[:, None, None] < lengths[:, None]
            )
            folded = (torch.where(counts, flat, 0).double() * weights[:, None, None]).sum(0)
        return folded.to(return_dtype(reward.dtype)).view(reward.shape[1:])


class GoalRelabel(ReplayTransform):
    """Writes drawn goals into the rows, and computes the rewards, and flags, that they would have had.

    Args:
        reward_fn: `(achieved_goal [N, G], desired_goal [N, G], infos) -> [N] or [N, 1]`; None, allowed
            with a `goal_key`, keeps rewards.
        terminated_fn: likewise whether a goal is reached; None keeps flags as they are stored.
        goal_key: which drawn goal to write, and where, as in `HERSampler(goal_key=...)`. If the rows do
            not store it, rows without a drawn goal get `desired_goal`.
        info_keys: entries that the functions get.

    Raises:
        TypeError: a function is not callable.
        ValueError: `terminated_fn` or `info_keys` is given without `reward_fn`.
    """

    uses_goals = True
    goal_key: NestedKey = keys.DESIRED_GOAL
    reward_fn: GoalFunction | None = None
    terminated_fn: GoalFunction | None = None
    info_keys: tuple[NestedKey, ...] = ()

    def __init__(
        self,
        reward_fn: GoalFunction | None,
        *,
        terminated_fn: GoalFunction | None = None,
        goal_key: NestedKey = keys.DESIRED_GOAL,
        info_keys: Sequence[NestedKey] = (),
    ) -> None:
        super().__init__()
        what = "(achieved_goal, desired_goal, infos)"
        self.goal_key = arguments.root_key("goal_key", goal_key)
        if reward_fn is not None or self.goal_key == keys.DESIRED_GOAL:
            arguments.function("reward_fn", reward_fn, what, takes=3)
        if terminated_fn is not None:
            arguments.function("terminated_fn", terminated_fn, what, takes=3)
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        self.info_keys = tuple(arguments.keys("info_keys", info_keys))
        if reward_fn is None and (terminated_fn is not None or self.info_keys):
            raise ValueError("reward_fn must be given with terminated_fn and info_keys, got None.")

    def prepare(self, rows: RowView) -> None:
        """Checks that no `NStep` stands before it."""
        if rows.window is not None:
            raise RuntimeError("GoalRelabel must stand before NStep, which folds its rewards.")

    def replay(self, rows: RowView) -> None:
        """Writes goals, rewards and flags."""
        index_key, mask_key = keys.goal_entries(self.goal_key)
        mask, achieved_key = rows[mask_key], keys.next_key(keys.ACHIEVED_GOAL)
        targets = self.goal_key, keys.next_key(self.goal_key)
        if all(rows.is_alike(target, achieved_key) for target in targets):
            rows.paste(targets, achieved_key, rows[index_key], mask)
        else:
            self._write_apart(rows, rows[index_key], mask)
        steps, goals = rows.steps, rows[self.goal_key]
        mask = mask.to(rows.device).view(-1, 1)
        if self.reward_fn is not None:
            stored, reward = steps[keys.REWARD], self._ask(self.reward_fn, steps, goals)
            if stored.dtype is not reward.dtype:
                dtype = relabelled_dtype(stored.dtype, reward.dtype)
                stored, reward = stored.to(dtype), reward.to(dtype)
            steps[keys.REWARD] = torch.where(mask, reward, stored)
        if self.terminated_fn is not None:
            reached = self._ask(self.terminated_fn, steps, goals)
            if reached.dtype is not torch.bool:
                raise TypeError(f"terminated_fn must return bool, got {reached.dtype}.")
            done = reached | steps[keys.TRUNCATED]
            steps[keys.DONE] = torch.where(mask, done, steps[keys.DONE])
            steps[keys.TERMINATED] = torch.where(mask, reached, steps[keys.TERMINATED])

    def _write_apart(self, rows: RowView, index: torch.Tensor, mask: torch.Tensor) -> None:
        """Writes a goal that rows do not store, or not for their next observation."""
        stored = self.goal_key if self.goal_key in rows else keys.DESIRED_GOAL
        goals = rows.at(index)[keys.next_key(keys.ACHIEVED_GOAL)]
        before = rows[stored]
        if goals.is_floating_point() and not before.is_floating_point():
            raise TypeError(
                f"{stored!r} must be floating as achieved goals are, got {before.dtype}."
            )
        if goals.shape != before.shape:
            raise ValueError(
                f"achieved goals must have the shape of {stored!r}, {list(before.shape[1:])}, got "
                f"{list(goals.shape[1:])}."
            )
        mask = mask.to(rows.device).view(-1, *(1,) * (before.ndim - 1))
        goals = torch.where(mask, goals.to(before.dtype), before)
        rows[self.goal_key] = rows[keys.next_key(self.goal_key)] = goals

    def _ask(self, function: GoalFunction, steps: RowView, goals: torch.Tensor) -> torch.Tensor:
        """Evaluates a goal function on rows `[*n, B]`, `[*n, B, 1]`."""
        achieved, batch = steps[keys.next_key(keys.ACHIEVED_GOAL)], steps.slots.shape
        goals = goals.expand(*batch, *goals.shape[1:]).reshape(-1, *goals.shape[1:])
        last = len(batch) - 1
        infos = {key: steps[key].flatten(0, last) for key in self.info_keys}
        result = function(achieved.flatten(0, last), goals, infos)
        if result is None or isinstance(result, str):
            raise TypeError(f"a goal function must return numbers, got {result!r}.")
        result = torch.as_tensor(result, device=goals.device)
        if result.shape not in ((batch.numel(),), (batch.numel(), 1)):
            raise ValueError(
                f"a goal function must return one value a row, [{batch.numel()}] or "
                f"[{batch.numel()}, 1], got {list(result.shape)}."
            )
        return result.view(*batch, 1)
