"""Hindsight: writes drawn goals into rows, with the rewards that they would have had.

Letters: B batch, n rows of a window, G goal size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey

from trl_storages import arguments, keys
from trl_storages.functional.returns import relabelled_dtype
from trl_storages.packed import RowView
from trl_storages.transforms.base import ReplayTransform

__all__ = ["GoalFunction", "GoalRelabel"]

GoalFunction = Callable[[torch.Tensor, torch.Tensor, dict[NestedKey, torch.Tensor]], Any]


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
