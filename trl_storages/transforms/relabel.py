"""HER relabelling: replaces goals by achieved goals and recomputes rewards.

Letters: B batch, n of n-step windows, R transitions of a call, D transitions that differ, G goal shape.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey

from trl_storages import keys, validation
from trl_storages.functional import relabelled_dtype
from trl_storages.settings import Setting
from trl_storages.storage import BatchRows, PackedStorage, Rows
from trl_storages.transforms.audit import RelabelAudit
from trl_storages.transforms.base import ReplayTransform
from trl_storages.validation import warn_caller

__all__ = ["GoalFunction", "GoalRelabel", "goal_values"]

GoalFunction = Callable[[torch.Tensor, torch.Tensor, dict[NestedKey, torch.Tensor]], Any]

_optional_function = partial(validation.optional, validation.function)
_PARAMETERS = "(achieved_goal, desired_goal, transition)"
# Number of the newest transitions that the automatic audit compares.
_NUM_AUDITED = 1000


class GoalRelabel(ReplayTransform):
    """Writes the goals that a `HERSampler` drew into the batch and recomputes rewards and flags.

    Where `her_mask` is true, `desired_goal` and `("next", "desired_goal")` become the next achieved goal
    of the transition in slot `goal_index`, and the reward becomes `reward_fn(next achieved goal, goal,
    transition)`. The flags stay as stored unless `terminated_fn` is given; then `terminated` is
    recomputed, and `done` is terminated or truncated. The other transitions of the batch, and the stored
    transitions, are never changed.

    In `Compose(GoalRelabel(...), NStep(...))` all steps of an n-step window get the goal of the first
    step, and their rewards are summed for this goal.

    Floating rewards keep their dtype. Rewards stored as bool or integer get a dtype that can also hold
    the results of `reward_fn`.

    Each function is called once with R transitions: those of the batch, or of its n-step windows. The
    results for transitions that keep their goal are discarded.

    Args:
        reward_fn: `(achieved_goal [R, *G], desired_goal [R, *G], transition) -> [R]` or `[R, 1]`;
            `transition` maps each of `info_keys` to a tensor `[R, ...]`. None, allowed with a `goal_key`,
            leaves the rewards as stored. A network is a function here: it is neither saved nor moved to a
            device.
        terminated_fn: a function with the same arguments that returns bool; requires `reward_fn`. None
            leaves the flags as stored.
        goal_key: the drawn goal that is written, and its key, as in `HERSampler(goal_key=...)`; None is
            the desired goal. If the transitions do not contain this key, transitions that are not
            relabelled get `desired_goal`.
        info_keys: further fields passed to the functions, under the names given here. A plain name is
            read under `next`, where infos are stored, or at the root if `next` does not contain the name,
            as with "action".
        audit: whether the first batch after 1,000 stored transitions warns, once, if `reward_fn` differs
            from the rewards of the newest 1,000, or if their episodes end at success and `terminated_fn`
            is None. Without `terminated_fn` later batches repeat the audit, ever more rarely, because
            success can be rare at first. Only the process that created the transform audits, and only if
            it may write.
        achieved_goal_key: key of the achieved goal.
        desired_goal_key: key of the desired goal.
        reward_key: key of the reward under `next`, one value per transition.
        done_key: key of the flag that ends an episode.
        terminated_key: key of the terminal flag.
        truncated_key: key of the truncation flag.

    Raises:
        TypeError: `reward_fn` or `terminated_fn` is not callable.
        ValueError: `terminated_fn` or `info_keys` is given without `reward_fn`; or a goal key equals
            `achieved_goal_key` or is under `next`.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, algorithm 1.

    >>> def reached(achieved_goal, desired_goal, transition):
    ...     return (achieved_goal == desired_goal).all(-1).float() - 1
    >>> GoalRelabel(reached)
    GoalRelabel(reached)
    """

    uses_goals = True
    reward_fn: Any = Setting(_optional_function, _PARAMETERS, saved=False)
    terminated_fn: Any = Setting(_optional_function, _PARAMETERS, saved=False)

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
            validation.function("reward_fn", reward_fn, _PARAMETERS)
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        self._info_keys = tuple(validation.keys("info_keys", info_keys))
        if reward_fn is None and (terminated_fn is not None or self._info_keys):
            raise ValueError(
                "terminated_fn and info_keys need a reward_fn, got None: pass reward_fn."
            )
        # The process that audits; None after the audit.
        self._audit_process = os.getpid() if validation.flag("audit", audit) else None
        achieved_key = validation.root_key("achieved_goal_key", achieved_goal_key)
        self._desired_key = validation.root_key("desired_goal_key", desired_goal_key)
        self._goal_key = validation.optional(validation.root_key, "goal_key", goal_key)
        written_key = self._goal_key or self._desired_key
        if achieved_key in (written_key, self._desired_key):
            raise ValueError(
                "achieved_goal_key must differ from desired_goal_key and goal_key, got "
                f"{achieved_key!r} for both."
            )
        # Goals are copied from the next achieved goal to these keys.
        self._written_keys = written_key, keys.next_key(written_key)
        self._achieved_key = keys.next_key(achieved_key)
        self._index_key, self._mask_key = keys.goal_keys(self.goal_key)
        self._reward_key = validation.key("reward_key", reward_key)
        self._done_key = validation.key("done_key", done_key)
        self._terminated_key = validation.key("terminated_key", terminated_key)
        self._truncated_key = validation.key("truncated_key", truncated_key)

    @property
    def goal_key(self) -> NestedKey:  # type: ignore[override]
        """The drawn goal that is written, as in `HERSampler(goal_key=...)`."""
        return self._goal_key or keys.DESIRED_GOAL

    @property
    def info_keys(self) -> tuple[NestedKey, ...]:
        """Further fields passed to the functions."""
        return self._info_keys

    def replay(self, rows: BatchRows) -> None:
        """Relabels the goals, and recomputes rewards and flags.

        Raises:
            KeyError: the batch has no drawn goals, or the transitions have no goals.
            ValueError: goals differ in shape, a function did not return one value per transition, or
                rewards or flags are stored with several values per transition.
            TypeError: achieved goals are floating but desired goals are not, or `terminated_fn` did not
                return bool.
            RuntimeError: an `NStep` precedes this transform.
        """
        if rows.has_returns:
            raise RuntimeError(
                "GoalRelabel must precede NStep: Compose(GoalRelabel(...), NStep(...))."
            )
        try:
            slots, mask = rows.drawn[self._index_key], rows.drawn[self._mask_key]
        except KeyError as error:
            argument = "" if self._goal_key is None else f"goal_key={self._goal_key!r}"
            raise KeyError(
                f"the batch has no {error}: GoalRelabel writes the goals that a HERSampler draws; pass "
                f"sampler=HERSampler({argument}) to the ReplayStorage."
            ) from None
        rows.paste(self._written_keys, self._achieved_key, slots, mask, default=self._desired_key)
        if self.reward_fn is None:
            return
        steps, goals = rows.steps, rows[self._written_keys[0]]
        stored, is_relabelled = steps[self._reward_key], rows.changes[self._mask_key]
        reward = self._values("reward_fn", steps, goals, stored)
        if stored.dtype is not reward.dtype:
            dtype = relabelled_dtype(stored.dtype, reward.dtype)
            stored, reward = stored.to(dtype), reward.to(dtype)
        is_chosen = _expand_mask(is_relabelled, steps, stored)
        steps.changes[self._reward_key] = torch.where(is_chosen, reward, stored)
        if self.terminated_fn is None:
            return
        stored, done = steps[self._terminated_key], steps[self._done_key]
        terminated = self._values("terminated_fn", steps, goals, stored)
        if terminated.dtype is not torch.bool:
            # As bool, a reward of -1 or a distance would be true nearly everywhere.
            raise TypeError(
                f"terminated_fn must return bool, got {terminated.dtype}: compare, as in "
                "`distance < 0.05`."
            )
        is_done = terminated | steps[self._truncated_key].view(terminated.shape)
        mask = _expand_mask(is_relabelled, steps, stored)
        steps.changes[self._terminated_key] = torch.where(mask, terminated, stored)
        steps.changes[self._done_key] = torch.where(mask, is_done.view(done.shape), done)

    def _values(
        self, name: str, rows: Rows, goals: torch.Tensor, stored: torch.Tensor
    ) -> torch.Tensor:
        """Calls a goal function with transitions `[*n, B]`, and checks the result.

        Args:
            name: "reward_fn" or "terminated_fn".
            rows: transitions with achieved goals `[*n, B, *G]` under `next`, and the `info_keys`.
            goals: `[B, *G]`.
            stored: the stored values `[*n, B]` or `[*n, B, 1]`.

        Returns:
            the values, in the shape of `stored`.
        """
        achieved, batch = rows[self._achieved_key], rows.slots.shape
        if stored.numel() != batch.numel():
            raise ValueError(
                f"{name} returns one value per transition, {[*batch, 1]}, but the stored values have the "
                f"shape {[*stored.shape]}: store one value for all agents."
            )
        infos = {}
        for key in self._info_keys:
            infos[key] = rows[keys.stored_info(key, rows)].flatten(0, len(batch) - 1)
        if len(batch) > 1:  # the function gets n-step windows as one flat batch
            goals, achieved = goals.expand_as(achieved).flatten(0, 1), achieved.flatten(0, 1)
        return goal_values(name, getattr(self, name), achieved, goals, infos).view(stored.shape)

    def audit(self, storage: Any, num_rows: int = 10_000) -> RelabelAudit:
        """Compares `reward_fn` with the stored rewards, which must be equal for the stored goals.

        A reward function that differs from the environment is the most common mistake with HER, and a
        silent one: relabelled transitions then train a different task than the stored transitions.

        Args:
            storage: a `ReplayStorage`, or its `storage`.
            num_rows: number of the newest transitions to compare.

        Returns:
            the number of transitions that were compared, and those that differ.

        Raises:
            RuntimeError: there are no transitions, or no `reward_fn`.
        """
        num_rows = validation.integer("num_rows", num_rows, at_least=1)
        if self.reward_fn is None:
            raise RuntimeError("there is no reward_fn to audit: pass reward_fn to GoalRelabel.")
        packed: PackedStorage = storage if isinstance(storage, PackedStorage) else storage.storage
        view = packed.view()
        slots = view.episodes.slots_by_age()[-num_rows:]
        if not len(slots):
            raise RuntimeError("there are no transitions to audit: write transitions first.")
        rows = Rows(view, slots)
        stored = rows[self._reward_key]
        computed = self._values("reward_fn", rows, rows[self._desired_key], stored)
        # In the dtype of a relabelled reward, which never truncates.
        dtype = relabelled_dtype(stored.dtype, computed.dtype)
        stored, computed = stored.to(dtype).reshape(-1), computed.to(dtype).reshape(-1)
        differs = stored != computed  # for integers, which float64 rounds from 2^53 on
        if dtype.is_floating_point:
            differs = ~torch.isclose(computed.double(), stored.double(), rtol=1e-5, atol=1e-6)
        num_ends = 0
        if self._terminated_key in rows:
            is_end = rows[self._terminated_key].reshape(-1)
            has_both = is_end.any() and not is_end.all()
            if has_both and stored[is_end].double().min() > stored[~is_end].double().max():
                num_ends = int(is_end.sum())
        return RelabelAudit(
            len(slots), slots[differs.cpu()], stored[differs], computed[differs], num_ends
        )

    @property
    def is_audit_due(self) -> bool:
        """Whether this process must audit the stored rewards."""
        return self.reward_fn is not None and self._audit_process == os.getpid()

    def audit_newest(self, storage: PackedStorage, num_goals: float) -> None:
        """Warns of mistakes that the newest transitions show, once.

        Success can be rare at first, so the audit stays due until a warning, or until episodes are known
        to end because there is a `terminated_fn`.

        Args:
            storage: the storage of the transitions.
            num_goals: relabelled transitions per transition with a stored reward; 0 audits nothing.
        """
        if num_goals == 0 or not self.is_audit_due:
            return
        if storage.layout is None or self._desired_key not in storage.layout.described:
            self._audit_process = None
            return
        with torch.random.fork_rng(devices=[]):  # a reward_fn may draw random numbers
            audit = self.audit(storage, _NUM_AUDITED)
        differs = num_goals < math.inf and not audit.passed
        if differs or audit.num_ends or self.terminated_fn is not None:
            self._audit_process = None  # before the warnings, which may be errors
        if differs:
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
        options = {"terminated_fn": self.terminated_fn, "goal_key": self._goal_key}
        arguments = [
            f"{name}={_repr(value)}" for name, value in options.items() if value is not None
        ]
        return f"{type(self).__name__}({', '.join([_repr(self.reward_fn), *arguments])})"


def goal_values(
    name: str,
    function: GoalFunction,
    achieved: torch.Tensor,
    goals: torch.Tensor,
    infos: dict[NestedKey, torch.Tensor],
) -> torch.Tensor:
    """Calls a goal function with a batch, and checks the result.

    Args:
        name: name of the function, for messages.
        function: as in `GoalRelabel`.
        achieved: `[B, *G]`.
        goals: `[B, *G]`.
        infos: `[B, ...]` each.

    Returns:
        `[B]` or `[B, 1]` on the device of the goals, without gradients.

    Raises:
        TypeError, ValueError, RuntimeError: the function raised such an error, or did not return one
            value per transition.
    """
    size = achieved.shape[0]

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
    if result.requires_grad:  # a learned reward model
        result = result.detach()
    if result.shape not in ((size,), (size, 1)):
        raise ValueError(message(f"returned the shape {[*result.shape]}"))
    return result


def _expand_mask(mask: torch.Tensor, rows: Rows, values: torch.Tensor) -> torch.Tensor:
    """Returns a mask `[B]` with the trailing dimensions of values `[*n, B, ...]`."""
    return mask.view(-1, *(1,) * (values.ndim - rows.slots.ndim))


def _repr(value: Any) -> str:
    """Returns the name of a function, or the repr of any other value."""
    return getattr(value, "__name__", repr(value))
