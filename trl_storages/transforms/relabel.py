"""Hindsight relabelling: replaces goals by achieved ones and recomputes rewards.

Letters: B batch, n rows of a window, G goal shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey

from trl_storages import keys, validation
from trl_storages.functional import relabelled_dtype
from trl_storages.settings import Unsaved
from trl_storages.storage import BatchRows, PackedStorage, Rows
from trl_storages.transforms.audit import RelabelAudit
from trl_storages.transforms.base import ReplayTransform
from trl_storages.validation import warn_caller

__all__ = ["GoalFunction", "GoalRelabel", "goal_values"]

GoalFunction = Callable[[torch.Tensor, torch.Tensor, dict[NestedKey, torch.Tensor]], Any]

_WHAT = "(achieved_goal, desired_goal, transition)"
# How many of the newest transitions are audited without being asked for.
_NUM_AUDITED = 1000


class GoalRelabel(ReplayTransform):
    """Writes the goals that a `HERSampler` drew into the batch and recomputes rewards and flags.

    Where `her_mask` is true, `desired_goal` and `("next", "desired_goal")` become the next achieved goal
    of the row `goal_index`, and the reward is `reward_fn(next achieved goal, goal, transition)`. The
    flags stay as stored unless `terminated_fn` is given; then `terminated` is recomputed, and `done` is
    terminated or truncated. Other rows of the batch, and the storage, are never changed.

    In `Compose(GoalRelabel(...), NStep(...))` all rows of a window get the goal of its first one, and
    their rewards are summed for it.

    Floating rewards keep their dtype. Rewards stored as bool or integer get a dtype that also holds
    what `reward_fn` returns.

    Each function is called once with R rows: those of the batch, or of its n-step windows. Its results
    for rows that keep their own goal are discarded.

    Args:
        reward_fn: `(achieved_goal [R, *G], desired_goal [R, *G], transition) -> [R]` or `[R, 1]`;
            `transition` maps each of `info_keys` to a tensor `[R, ...]`. None, allowed with a `goal_key`,
            leaves the rewards as stored. A network stays a function: it is neither saved nor moved here.
        terminated_fn: the same, returning bool; requires `reward_fn`. None leaves the flags as stored.
        goal_key: which drawn goal to write, and where, as in `HERSampler(goal_key=...)`; None is the
            desired goal. If the rows do not store this goal, rows without a drawn goal get
            `desired_goal`.
        info_keys: further entries passed to the functions, under the names given here. A plain name is
            read under `next`, where infos are stored, or at the root if it is not stored there, as
            "action" is.
        audit: whether the first batch after 1,000 stored transitions warns, once, if `reward_fn` differs
            from the rewards of the newest 1,000, or if their episodes end at success and `terminated_fn`
            is None. Only the process that made this transform audits, and only if it may write.
        achieved_goal_key: entry of the achieved goal.
        desired_goal_key: entry of the desired goal.
        reward_key: entry of the reward under `next`, one value a row.
        done_key: entry of the flag that ends an episode.
        terminated_key: entry of the terminal flag.
        truncated_key: entry of the truncation flag.

    Raises:
        TypeError: `reward_fn` or `terminated_fn` is not callable.
        ValueError: `terminated_fn` or `info_keys` is given without `reward_fn`; or a goal key equals
            `achieved_goal_key` or lies under `next`.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, algorithm 1.

    >>> def reached(achieved_goal, desired_goal, transition):
    ...     return (achieved_goal == desired_goal).all(-1).float() - 1
    >>> GoalRelabel(reached)
    GoalRelabel(reached)
    """

    uses_goals = True
    reward_fn: Any = Unsaved(partial(validation.optional, validation.function), _WHAT)
    terminated_fn: Any = Unsaved(partial(validation.optional, validation.function), _WHAT)

    def __init__(
        self,
        reward_fn: GoalFunction | None,
        *,
        terminated_fn: GoalFunction | None = None,
        goal_key: NestedKey | None = None,
        info_keys: Sequence[NestedKey] = (),
        audit: bool = True,
        achieved_goal_key: NestedKey = keys.ACHIEVED_GOAL,
        desired_goal_key: NestedKey = keys.DESIRED_GOAL,
        reward_key: NestedKey = keys.REWARD,
        done_key: NestedKey = keys.DONE,
        terminated_key: NestedKey = keys.TERMINATED,
        truncated_key: NestedKey = keys.TRUNCATED,
    ) -> None:
        super().__init__()
        if goal_key is None:
            validation.function("reward_fn", reward_fn, _WHAT)
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        self._info_keys = tuple(validation.keys("info_keys", info_keys))
        if reward_fn is None and (terminated_fn is not None or self._info_keys):
            raise ValueError("reward_fn must be given with terminated_fn and info_keys, got None.")
        # The process that is to audit, None once it has.
        self._auditor = os.getpid() if validation.flag("audit", audit) else None
        achieved = validation.root_key("achieved_goal_key", achieved_goal_key)
        self._desired = validation.root_key("desired_goal_key", desired_goal_key)
        self._goal_key = validation.optional(validation.root_key, "goal_key", goal_key)
        #: Where goals are written now and under `next`, where they come from, and where a batch has them.
        written = self._goal_key or self._desired
        if achieved in (written, self._desired):
            raise ValueError(
                "achieved_goal_key must be another entry than the goal that is written, got "
                f"{achieved!r} for both."
            )
        self._written = written, keys.next_key(written)
        self._achieved = keys.next_key(achieved)
        self._index_key, self._mask_key = keys.goal_entries(self.goal_key)
        self._reward_key = validation.key("reward_key", reward_key)
        self._done_key = validation.key("done_key", done_key)
        self._terminated_key = validation.key("terminated_key", terminated_key)
        self._truncated_key = validation.key("truncated_key", truncated_key)

    @property
    def goal_key(self) -> NestedKey:
        """Which drawn goal is written, as named in `HERSampler`."""
        return self._goal_key or keys.DESIRED_GOAL

    @property
    def info_keys(self) -> tuple[NestedKey, ...]:
        """Further entries passed to the functions."""
        return self._info_keys

    def replay(self, rows: BatchRows) -> None:
        """Relabels the goals, and recomputes rewards and flags.

        Raises:
            KeyError: the batch has no drawn goals, or the rows have no goal entries.
            ValueError: goals differ in shape, a function did not return one value per row, or rewards
                or flags are stored with more than one value per row.
            TypeError: achieved goals are floating but desired goals are not, or `terminated_fn` did not
                return bool.
            RuntimeError: an `NStep` stands before it.
        """
        if rows.has_returns:
            raise RuntimeError("GoalRelabel must stand before NStep, which folds its rewards.")
        try:
            index, mask = rows.drawn[self._index_key], rows.drawn[self._mask_key]
        except KeyError as error:
            of_goal = "" if self._goal_key is None else f"goal_key={self._goal_key!r}"
            raise KeyError(
                f"the batch has no {error}: GoalRelabel writes the goals that a HERSampler draws; pass "
                f"sampler=HERSampler({of_goal}) to the ReplayStorage."
            ) from None
        rows.paste(self._written, self._achieved, index, mask, default=self._desired)
        if self.reward_fn is None:
            return
        steps, goals, drawn = rows.steps, rows[self._written[0]], rows.changes[self._mask_key]
        stored = steps[self._reward_key]
        reward = self._ask("reward_fn", steps, goals, stored)
        if stored.dtype is not reward.dtype:
            dtype = relabelled_dtype(stored.dtype, reward.dtype)
            stored, reward = stored.to(dtype), reward.to(dtype)
        steps.changes[self._reward_key] = torch.where(_spread(drawn, steps, stored), reward, stored)
        if self.terminated_fn is None:
            return
        stored, done = steps[self._terminated_key], steps[self._done_key]
        reached = self._ask("terminated_fn", steps, goals, stored)
        if reached.dtype is not torch.bool:
            # As bool, a reward of -1 or a distance would be true nearly everywhere.
            raise TypeError(
                f"terminated_fn must return bool, got {reached.dtype}: compare, as in "
                "`distance < 0.05`."
            )
        over = reached | steps[self._truncated_key].view(reached.shape)
        chosen = _spread(drawn, steps, stored)
        steps.changes[self._terminated_key] = torch.where(chosen, reached, stored)
        steps.changes[self._done_key] = torch.where(chosen, over.view(done.shape), done)

    def _ask(
        self, name: str, rows: Rows, goals: torch.Tensor, stored: torch.Tensor
    ) -> torch.Tensor:
        """Evaluates the goal function of this name on rows `[*n, B]`, and checks what it returns.

        Args:
            name: "reward_fn" or "terminated_fn".
            rows: achieved goals `[*n, B, *G]` under `next`, and the `info_keys`.
            goals: `[B, *G]`.
            stored: `[*n, B]` or `[*n, B, 1]`, whose shape the result gets.
        """
        achieved, batch = rows[self._achieved], rows.slots.shape
        if stored.numel() != batch.numel():
            raise ValueError(
                f"rewards and flags must be stored with one value a row, {[*batch, 1]}, as what is "
                f"computed for a goal is, got {[*stored.shape]}: store what the team gets as one."
            )
        infos = {}
        for key in self._info_keys:
            infos[key] = rows[keys.stored_info(key, rows)].flatten(0, len(batch) - 1)
        if len(batch) > 1:  # of windows the function gets one flat batch
            goals, achieved = goals.expand_as(achieved).flatten(0, 1), achieved.flatten(0, 1)
        return goal_values(name, getattr(self, name), achieved, goals, infos).view(stored.shape)

    def audit(self, storage: Any, num_rows: int = 10_000) -> RelabelAudit:
        """Compares `reward_fn` with the stored rewards; for the stored goals they must agree.

        A reward function that disagrees with its environment is the most common mistake with hindsight,
        and a silent one: relabelled rows then teach a different task than the stored ones.

        Args:
            storage: a `ReplayStorage`, or its `storage`.
            num_rows: how many of the newest rows to compare.

        Returns:
            the number of rows compared, and where they differ.

        Raises:
            RuntimeError: there are no rows, or no `reward_fn`.
        """
        num_rows = validation.integer("num_rows", num_rows, at_least=1)
        if self.reward_fn is None:
            raise RuntimeError(
                "there is no reward_fn to audit, this GoalRelabel leaves the rewards."
            )
        packed: PackedStorage = storage if isinstance(storage, PackedStorage) else storage.storage
        view = packed.view()
        slots = view.episodes.slots_by_age()[-num_rows:]
        if not len(slots):
            raise RuntimeError("there are no rows to audit: write transitions first.")
        rows = Rows(view, slots)
        stored = rows[self._reward_key]
        computed = self._ask("reward_fn", rows, rows[self._desired], stored)
        # In the dtype of a relabelled reward, which never truncates.
        dtype = relabelled_dtype(stored.dtype, computed.dtype)
        stored, computed = stored.to(dtype).reshape(-1), computed.to(dtype).reshape(-1)
        differs = stored != computed  # of integers; from 2^53 on, neighbours are equal in float64
        if dtype.is_floating_point:
            differs = ~torch.isclose(computed.double(), stored.double(), rtol=1e-5, atol=1e-6)
        num_ends = 0
        if self._terminated_key in rows:
            ends = rows[self._terminated_key].reshape(-1)
            is_split = ends.any() and not ends.all()
            if is_split and stored[ends].double().min() > stored[~ends].double().max():
                num_ends = int(ends.sum())
        return RelabelAudit(
            len(slots), slots[differs.cpu()], stored[differs], computed[differs], num_ends
        )

    @property
    def is_audit_due(self) -> bool:
        """Whether this process is to audit the stored rewards, and has not."""
        return self.reward_fn is not None and self._auditor == os.getpid()

    def audit_once(self, storage: PackedStorage, *, mixes_rewards: bool) -> None:
        """Warns of mistakes that the newest transitions show; the audit is not due afterwards.

        Args:
            storage: holds the transitions.
            mixes_rewards: whether batches also contain rewards as stored.
        """
        if self._desired not in storage.layout.described:
            self._auditor = None
            return
        with torch.random.fork_rng(devices=[]):  # a reward_fn may draw random numbers
            audit = self.audit(storage, _NUM_AUDITED)
        self._auditor = None  # before the warnings, which may be errors
        if mixes_rewards and not audit.passed:
            warn_caller(
                f"reward_fn differs from the stored reward on {len(audit.slots):,} of "
                f"{audit.num_rows:,} transitions, such as {audit.examples(1)[0]}. Batches would mix both "
                "rewards. Pass a reward_fn that returns the rewards of the environment, wrappers "
                "included, or audit=False if the difference is intended."
            )
        if audit.num_ends and self.terminated_fn is None:
            warn_caller(
                f"episodes end at success: the rewards of {audit.num_ends} terminated transitions are "
                "larger than those of all others. Without terminated_fn a relabelled success is not "
                "terminal, and its target bootstraps beyond the end. Pass terminated_fn, such as "
                "gym_terminated(env), or audit=False if this is intended."
            )

    def __repr__(self) -> str:
        named = {"terminated_fn": self.terminated_fn, "goal_key": self._goal_key}
        shown = [f"{name}={_shown(value)}" for name, value in named.items() if value is not None]
        return f"{type(self).__name__}({', '.join([_shown(self.reward_fn), *shown])})"


def goal_values(
    name: str,
    function: GoalFunction,
    achieved: torch.Tensor,
    goals: torch.Tensor,
    infos: dict[NestedKey, torch.Tensor],
) -> torch.Tensor:
    """Calls a goal function with a batch, and checks what it returns.

    Args:
        name: of the function, for messages.
        function: as in `GoalRelabel`.
        achieved: `[B, *G]`.
        goals: `[B, *G]`.
        infos: `[B, ...]` each.

    Returns:
        `[B]` or `[B, 1]` on the device of the goals, without gradients.

    Raises:
        TypeError, ValueError, RuntimeError: the function failed with one of these, or did not return one
            value per transition.
    """
    size = len(achieved)

    def message(outcome: str) -> str:
        return (
            f"{name} is called with batches, achieved_goal {[*achieved.shape]} and desired_goal "
            f"{[*goals.shape]}, and must return one value per transition, shape [{size}] or [{size}, 1]. "
            f"It {outcome}. Compare goals as in `(achieved_goal == desired_goal).all(-1)`."
        )

    try:
        result = function(achieved, goals, infos)
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in (TypeError, ValueError, RuntimeError):  # such as out of memory
            raise
        raise type(error)(message(f"raised {error!r}")) from error
    if not isinstance(result, torch.Tensor) or result.device != achieved.device:
        try:
            result = torch.as_tensor(result, device=achieved.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(message(f"returned a {type(result).__name__}")) from error
    if result.requires_grad:  # as that of a learned model
        result = result.detach()
    if result.shape not in ((size,), (size, 1)):
        raise ValueError(message(f"returned the shape {[*result.shape]}"))
    return result


def _spread(mask: torch.Tensor, rows: Rows, values: torch.Tensor) -> torch.Tensor:
    """Returns a mask `[B]` with the further dimensions of values `[*n, B, ...]`."""
    return mask.view(-1, *(1,) * (values.ndim - rows.slots.ndim))


def _shown(part: Any) -> str:
    """Returns the name of a function, or the repr of anything else."""
    return getattr(part, "__name__", repr(part))
