"""Hindsight relabelling: replaces goals by achieved ones and recomputes rewards.

Letters: B batch, n further rows per transition, G goal shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, unravel_key

from trl_storages import arguments, keys
from trl_storages.arguments import counted
from trl_storages.functional.returns import relabelled_dtype
from trl_storages.ring import episodes_of
from trl_storages.rows import RowView, read_fields
from trl_storages.transforms.base import ReplayTransform

__all__ = ["GoalRelabel", "RelabelAudit", "own_rewards"]

# The rows whose achieved goals are drawn, and what `RowView.define` returned for the goals.
_Drawn = tuple[RowView, Mapping[NestedKey, torch.Tensor]]
GoalFunction = Callable[[torch.Tensor, torch.Tensor, Mapping[NestedKey, torch.Tensor]], Any]


class GoalRelabel(ReplayTransform):
    """Writes the goals that a `HERSampler` drew into the batch and recomputes rewards and flags.

    Where `her_mask` is true, `desired_goal` and `("next", "desired_goal")` become the next achieved goal
    of the row `goal_index`, and the reward is `reward_fn(next achieved goal, goal, transition)`. The
    flags stay as stored unless `terminated_fn` is given; then `terminated` is recomputed, and `done` is
    terminated or truncated. Other rows of the batch, and the storage, are never changed.

    Later transforms see the further rows of a relabelled transition with its goal too, so that
    `Compose(GoalRelabel(...), NStep(...))` sums rewards for one goal.

    Floating rewards keep their dtype. Rewards stored as bool or integer get a dtype that also holds
    what `reward_fn` returns.

    Each function is called once with R rows: those of the batch, or of its n-step windows. Its results
    for rows that keep their own goal are discarded.

    Args:
        reward_fn: `(achieved_goal [R, *G], desired_goal [R, *G], transition) -> [R]` or `[R, 1]`;
            `transition` maps each of `info_keys` to a tensor `[R, ...]`. None, allowed with a `goal_key`,
            leaves the rewards as stored.
        terminated_fn: the same, returning bool; requires `reward_fn`. None leaves the flags as stored.
        goal_key: which drawn goal to write, and where, as in `HERSampler(goal_key=...)`; None is the
            desired goal. If the rows do not store this goal, rows without a drawn goal get
            `desired_goal`.
        info_keys: further entries passed to the functions.
        achieved_goal_key: entry of the achieved goal.
        desired_goal_key: entry of the desired goal.
        reward_key: entry of the reward, `[..., 1]`.
        done_key: entry of the flag that ends an episode, `[..., 1]` bool.
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

    def __init__(
        self,
        reward_fn: GoalFunction | None,
        *,
        terminated_fn: GoalFunction | None = None,
        goal_key: NestedKey | None = None,
        info_keys: Sequence[NestedKey] = (),
        achieved_goal_key: NestedKey = keys.ACHIEVED_GOAL,
        desired_goal_key: NestedKey = keys.DESIRED_GOAL,
        reward_key: NestedKey = keys.REWARD,
        done_key: NestedKey = keys.DONE,
        terminated_key: NestedKey = keys.TERMINATED,
        truncated_key: NestedKey = keys.TRUNCATED,
    ) -> None:
        super().__init__()
        what = "(achieved_goal, desired_goal, transition)"
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        if reward_fn is not None or goal_key is None:
            needed = what if reward_fn is not None else f"{what}, None only with a goal_key"
            arguments.function("reward_fn", reward_fn, needed, takes=3)
        if terminated_fn is not None:
            arguments.function("terminated_fn", terminated_fn, f"{what}, or None", takes=3)
        self.info_keys = tuple(arguments.keys("info_keys", info_keys))
        if reward_fn is None and (terminated_fn is not None or self.info_keys):
            name = "info_keys" if terminated_fn is None else "terminated_fn"
            raise ValueError(
                f"reward_fn must be given with {name}, got None, which leaves rewards and flags as those "
                f"of another goal: leave {name} out."
            )
        achieved_goal_key = arguments.root_key("achieved_goal_key", achieved_goal_key)
        self.next_achieved_goal_key = unravel_key(keys.next_key(achieved_goal_key))
        self.desired_goal_key = arguments.root_key("desired_goal_key", desired_goal_key)
        self.next_desired_goal_key = keys.next_key(self.desired_goal_key)
        #: The goal that is written, as named in `HERSampler`; None is the desired goal.
        self.goal_key = arguments.optional(arguments.root_key, "goal_key", goal_key)
        if achieved_goal_key in (self.goal_key, self.desired_goal_key):
            raise ValueError(
                f"achieved_goal_key must be another entry than the goal that is written, got "
                f"{achieved_goal_key!r} for both."
            )
        written = self.goal_key or self.desired_goal_key
        self._written = written, keys.next_key(written)
        self._desired = self.desired_goal_key, self.next_desired_goal_key
        self._index_key, self._mask_key = keys.goal_entries(self.goal_key or keys.DESIRED_GOAL)
        self.reward_key = arguments.key("reward_key", reward_key)
        self.done_key = arguments.key("done_key", done_key)
        self.terminated_key = arguments.key("terminated_key", terminated_key)
        self.truncated_key = arguments.key("truncated_key", truncated_key)

    def __repr__(self) -> str:
        named = {"terminated_fn": self.terminated_fn, "goal_key": self.goal_key}
        shown = [f"{name}={_shown(value)}" for name, value in named.items() if value is not None]
        return f"{type(self).__name__}({', '.join([_shown(self.reward_fn), *shown])})"

    @property
    def written_keys(self) -> tuple[NestedKey, ...]:
        """The entries that this transform writes; goals under `next` are not listed."""
        found = [self._written[0]]
        if self.reward_fn is not None:
            found.append(self.reward_key)
        if self.terminated_fn is not None:
            found += [self.terminated_key, self.done_key]
        return tuple(found)

    def replay(self, rows: RowView) -> None:
        """Relabels the goals, and recomputes rewards and flags.

        Raises:
            KeyError: the batch has no drawn goals, or the rows have no goal entries.
            ValueError: goals differ in shape, a function did not return one value per row, or rewards
                or flags are stored with more than one value per row.
            TypeError: achieved goals are floating but desired goals are not, or `terminated_fn` did not
                return bool.
        """
        try:
            index, mask = rows[self._index_key], rows[self._mask_key]
        except KeyError:
            of_key = "" if self.goal_key is None else f"goal_key={self.goal_key!r}, "
            raise KeyError(
                f"the batch has no {self._index_key!r}: GoalRelabel writes the goals that a HERSampler "
                f"draws; pass sampler=HERSampler({of_key}...) to the ReplayStorage, with the HERSampler "
                "of other goals, if there is one, as base= of it."
            ) from None
        written, following = self._written
        stored = self._written
        if self.goal_key is not None and written not in rows:
            # A goal under its own key falls back to the desired goal if it was neither stored nor drawn.
            stored = self._desired
        before = dict(zip(self._written, stored, strict=True))
        has_next = stored[1] in rows
        others, achieved = rows.at(index), self.next_achieved_goal_key
        targets = self._written if has_next else (written,)
        copied = (achieved, index, mask) if stored is self._written else None
        goals = partial(self._goals, others, mask, before)
        drawn = others, rows.define(targets, goals, copied=copied)
        if not has_next:
            # Without a stored next goal, the goal is constant.
            rows.define((following,), lambda seen, key: {key: _repeated(rows[written], seen)})
        if self.reward_fn is not None:
            reads = achieved, self.reward_key, *self.info_keys
            rows.define((self.reward_key,), partial(self._rewards, drawn, mask), reads=reads)
        if self.terminated_fn is not None:
            flags = self.terminated_key, self.done_key
            reads = achieved, self.truncated_key, *flags, *self.info_keys
            rows.define(flags, partial(self._flags, drawn, mask), reads=reads)

    def _goals(
        self,
        others: RowView,
        mask: torch.Tensor,
        before: Mapping[NestedKey, NestedKey],
        seen: RowView,
        key: NestedKey,
    ) -> dict[NestedKey, torch.Tensor]:
        """Returns desired goals `[*n, B, *G]`, replaced by those that others achieved where drawn.

        Args:
            others: `[B]` the rows whose achieved goals are drawn.
            mask: `[B]` bool, where they are.
            before: key -> the entry that holds the goals that are not replaced.
            seen: the rows.
            key: of the goals.
        """
        goals, stored = others[self.next_achieved_goal_key], seen[before[key]]
        if goals.dtype is not stored.dtype:
            if goals.is_floating_point() and not stored.is_floating_point():
                raise TypeError(
                    "the desired goal must be floating, as the achieved goal is "
                    f"({goals.dtype}), got {stored.dtype}: goals that were reached would be truncated."
                )
            goals = goals.to(stored.dtype)
        shape = stored.shape[stored.ndim - goals.ndim + 1 :]
        if goals.shape[1:] != shape:
            raise ValueError(
                f"the achieved goal must have the desired goal's shape {list(shape)}, got "
                f"{list(goals.shape[1:])}."
            )
        return {key: torch.where(mask.view(-1, *(1,) * len(shape)), goals, stored)}

    def _rewards(
        self, drawn: _Drawn, mask: torch.Tensor, seen: RowView, key: NestedKey
    ) -> dict[NestedKey, torch.Tensor]:
        stored = _one_a_row(seen, key)
        computed = self._ask("reward_fn", seen, self._drawn(*drawn), seen.slots.shape)
        if stored.dtype is not computed.dtype:
            dtype = relabelled_dtype(stored.dtype, computed.dtype)
            stored, computed = stored.to(dtype), computed.to(dtype)
        return {key: torch.where(mask.unsqueeze(-1), computed, stored)}

    def _flags(
        self, drawn: _Drawn, mask: torch.Tensor, seen: RowView, _: NestedKey
    ) -> dict[NestedKey, torch.Tensor]:
        truncated = seen[self.truncated_key]
        terminated = self._ask("terminated_fn", seen, self._drawn(*drawn), seen.slots.shape)
        if terminated.dtype is not torch.bool:
            # As bool, a reward of -1 or a distance would be true nearly everywhere.
            raise TypeError(
                f"terminated_fn must return bool, got {terminated.dtype}: compare, as in "
                "`distance < 0.05`."
            )
        done, mask = terminated | truncated, mask.unsqueeze(-1)
        flags = {self.terminated_key: terminated, self.done_key: done}
        return {key: torch.where(mask, flag, _one_a_row(seen, key)) for key, flag in flags.items()}

    def _drawn(self, others: RowView, gathered: Mapping[NestedKey, torch.Tensor]) -> torch.Tensor:
        """Returns goals `[B, *G]`, the drawn ones where there are any."""
        goals = gathered.get(self._written[0])
        return others[self.next_achieved_goal_key] if goals is None else goals

    def _ask(
        self,
        name: str,
        rows: RowView | Mapping[NestedKey, torch.Tensor],
        goals: torch.Tensor,
        batch: torch.Size,
    ) -> torch.Tensor:
        """Evaluates the goal function of this name on rows `[*n, B]`, and checks what it returns.

        Args:
            name: "reward_fn" or "terminated_fn".
            rows: achieved goals `[*n, B, *G]` under `next`, and the `info_keys`.
            goals: `[B, *G]`.
            batch: the shape of the rows.

        Returns:
            `[*n, B, 1]`.
        """
        achieved, last = rows[self.next_achieved_goal_key], len(batch) - 1
        if last:
            # The function gets one flat batch, also for n-step windows. `cat` is slow for views of rows.
            goals = torch.cat([goals.contiguous()] * batch[:-1].numel())
            achieved = achieved.flatten(0, last)
        infos = {}
        for key in self.info_keys:
            infos[key] = rows[key].flatten(0, last)
        result = getattr(self, name)(achieved, goals, infos)
        size = achieved.shape[0]
        if not isinstance(result, torch.Tensor) or result.device != achieved.device:
            try:
                result = torch.as_tensor(result, device=achieved.device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"{name} must return a tensor or an array of numbers, shape [{size}] or "
                    f"[{size}, 1]; got {type(result).__name__}."
                ) from error
        if result.shape not in ((size,), (size, 1)):
            raise ValueError(
                f"{name} must return one value a row, shape [{size}] or [{size}, 1]; got "
                f"{list(result.shape)}."
            )
        if result.is_complex():
            raise TypeError(f"{name} must return real numbers, got {result.dtype}.")
        return result.reshape(*batch, 1)

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
        num_rows = arguments.integer("num_rows", num_rows, at_least=1)
        if self.reward_fn is None:
            raise RuntimeError(
                "there is no reward_fn to audit, this GoalRelabel leaves the rewards."
            )
        storage = getattr(storage, "storage", storage)
        compare = partial(self._compare, storage, num_rows)
        if (files := getattr(storage, "files", None)) is None:
            return compare()
        return files.read_consistently(compare)

    def _compare(self, storage: Any, num_rows: int) -> RelabelAudit:
        episodes = episodes_of(storage)
        if not len(episodes):
            raise RuntimeError("there are no rows to audit: write transitions first.")
        ranks = torch.arange(min(num_rows, len(episodes)), device=episodes.device)
        slots = episodes.slots_by_age(ranks)
        wanted = [
            self.next_achieved_goal_key,
            self.next_desired_goal_key,
            self.reward_key,
            *self.info_keys,
        ]
        fields = read_fields(storage, slots, wanted)
        stored = fields[self.reward_key]
        if stored.shape != (*slots.shape, 1):
            raise _not_one_a_row(self.reward_key, stored, slots.ndim)
        computed = own_rewards(self, fields)
        # In the dtype of a relabelled reward, which never truncates.
        computed = computed.to(relabelled_dtype(stored.dtype, computed.dtype))
        stored = stored.to(computed.dtype)
        near = torch.isclose(computed.double(), stored.double(), rtol=1e-5, atol=1e-6)
        # Compare integers exactly: from 2^53 on, neighbours are equal in float64.
        differs = ~(near if computed.is_floating_point() else computed == stored).reshape(-1)
        return RelabelAudit(
            num_rows=slots.shape[0],
            slots=slots[differs],
            stored=stored.reshape(-1)[differs],
            computed=computed.reshape(-1)[differs],
        )


@dataclass(frozen=True)
class RelabelAudit:
    """The result of `GoalRelabel.audit`: the D rows on which `reward_fn` and storage disagree."""

    #: How many rows were compared.
    num_rows: int
    #: `[D]` int64 slots.
    slots: torch.Tensor
    #: `[D]` the stored rewards, in a dtype that holds the computed ones too.
    stored: torch.Tensor
    #: `[D]` the rewards that the function returns for them.
    computed: torch.Tensor

    @property
    def passed(self) -> bool:
        """Whether all rows agree."""
        return not len(self.slots)

    def __str__(self) -> str:
        if self.passed:
            return (
                f"reward_fn agrees with the stored rewards on all {counted(self.num_rows, 'row')}."
            )
        lines = [
            f"reward_fn differs from the stored reward on {len(self.slots)} of "
            f"{counted(self.num_rows, 'row')}:"
        ]
        worst = (self.stored.double() - self.computed.double()).abs().argsort(descending=True)[:5]
        lines += [
            f"  slot {int(self.slots[at])}: stored {float(self.stored[at]):g}, computed "
            f"{float(self.computed[at]):g}"
            for at in worst.tolist()
        ]
        return "\n".join(lines)


def own_rewards(relabel: GoalRelabel, rows: Mapping[NestedKey, torch.Tensor]) -> torch.Tensor:
    """Evaluates the `reward_fn` of a transform on rows with their own goals.

    Args:
        relabel: a transform with a `reward_fn`.
        rows: entries `[B, ...]`: achieved and desired goal under `next`, and the `info_keys`.

    Returns:
        `[B, 1]` rewards.
    """
    goals = rows[relabel.next_desired_goal_key]
    return relabel._ask("reward_fn", rows, goals, goals.shape[:1])


def _repeated(entry: torch.Tensor, seen: RowView) -> torch.Tensor:
    """Repeats an entry `[B, ...]` of the samples for all rows of `seen`, in new memory."""
    return entry.expand(*seen.batch_size, *entry.shape[1:]).clone()


def _one_a_row(seen: RowView, key: NestedKey) -> torch.Tensor:
    """Returns an entry, checked to have one value per row, `[*B, 1]`."""
    entry = seen[key]
    if entry.shape != (*seen.slots.shape, 1):
        raise _not_one_a_row(key, entry, seen.slots.ndim)
    return entry


def _not_one_a_row(key: NestedKey, stored: torch.Tensor, batch_dims: int) -> ValueError:
    """Returns the error for an entry against which computed values would be broadcast."""
    return ValueError(
        f"{key!r} must be stored with shape [1] a row, as what is computed for a goal is, got "
        f"{list(stored.shape[batch_dims:])}. Of several agents, store what the team gets as one "
        "reward and one flag a row."
    )


def _shown(part: Any) -> str:
    """Returns the name of a function, or the repr of anything else."""
    name = getattr(part, "__name__", None)
    return repr(part) if name is None else str(name)
