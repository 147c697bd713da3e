"""Shows transitions as if a goal that was reached had been the goal all along.

Letters: B batch, n further rows of each transition, G goal shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from trl_storages import keys
from trl_storages._torchrl import set_entry
from trl_storages.episodes import episodes_of
from trl_storages.storages import read_fields
from trl_storages.transforms.base import ReplayTransform, SeenRows
from trl_storages.transforms.relabelled_rows import RelabelledRows

__all__ = ["GoalRelabel", "RelabelAudit"]

GoalFunction = Callable[[torch.Tensor, torch.Tensor, Mapping[NestedKey, torch.Tensor]], Any]


class GoalRelabel(ReplayTransform):
    """Writes the goals that a `HERSampler` drew into the batch and recomputes what follows from them.

    Where `her_mask` is true, `desired_goal` and `("next", "desired_goal")` become the next achieved goal
    of the row `goal_index`, and the reward is `reward_fn(next achieved goal, goal, transition)`. The
    flags stay as stored unless `terminated_fn` is given; then `terminated` is recomputed, and `done` is
    terminated or truncated. Other rows of the batch, and the storage, are never changed.

    Transforms behind this one see further rows of a relabelled transition with its goal too, so that
    `Compose(GoalRelabel(...), NStep(...))` sums rewards for one goal.

    Args:
        reward_fn: `(achieved_goal [B, *G], desired_goal [B, *G], transition) -> [B]` or `[B, 1]`;
            `transition` maps each of `info_keys` to a tensor `[B, ...]`.
        terminated_fn: the same, returning bool; None leaves the flags.
        info_keys: further entries of the rows that the functions read.
        achieved_goal_key: entry of the goal that a state achieves.
        desired_goal_key: entry of the goal that is pursued.
        reward_key: entry of the reward, `[..., 1]`.
        done_key: entry of the flag that ends an episode, `[..., 1]` bool.
        terminated_key: entry of the flag of a terminal state.
        truncated_key: entry of the flag of an episode cut short.

    Raises:
        TypeError: `reward_fn` or `terminated_fn` cannot be called.

    Reference: Andrychowicz et al. 2017, arXiv:1707.01495, algorithm 1.
    """

    def __init__(
        self,
        reward_fn: GoalFunction,
        *,
        terminated_fn: GoalFunction | None = None,
        info_keys: Sequence[NestedKey] = (),
        achieved_goal_key: NestedKey = keys.ACHIEVED_GOAL,
        desired_goal_key: NestedKey = keys.DESIRED_GOAL,
        reward_key: NestedKey = keys.REWARD,
        done_key: NestedKey = keys.DONE,
        terminated_key: NestedKey = keys.TERMINATED,
        truncated_key: NestedKey = keys.TRUNCATED,
    ) -> None:
        super().__init__()
        if not callable(reward_fn):
            raise TypeError(f"reward_fn must be callable, got {type(reward_fn).__name__}.")
        if terminated_fn is not None and not callable(terminated_fn):
            raise TypeError(f"terminated_fn must be callable, got {type(terminated_fn).__name__}.")
        self.reward_fn = reward_fn
        self.terminated_fn = terminated_fn
        self.info_keys = tuple(unravel_key(key) for key in info_keys)
        self.next_achieved_goal_key = unravel_key(keys.next_key(achieved_goal_key))
        self.desired_goal_key = unravel_key(desired_goal_key)
        self.next_desired_goal_key = keys.next_key(self.desired_goal_key)
        self.reward_key = unravel_key(reward_key)
        self.done_key = unravel_key(done_key)
        self.terminated_key = unravel_key(terminated_key)
        self.truncated_key = unravel_key(truncated_key)

        self._flag_keys = frozenset({self.terminated_key, self.done_key})
        self._always_changed = frozenset(
            {self.desired_goal_key, self.next_desired_goal_key, self.reward_key}
        )
        self._changed_with_flags = self._always_changed | self._flag_keys
        # What `_reads` has worked out, by what it depends on: it is asked with every batch.
        self._known_reads: dict[tuple, frozenset[NestedKey]] = {}

    @property
    def changed_keys(self) -> frozenset[NestedKey]:  # type: ignore[override]
        """The entries that are seen differently from what is stored."""
        return self._always_changed if self.terminated_fn is None else self._changed_with_flags

    def replay(self, batch: TensorDictBase, rows: SeenRows) -> TensorDictBase:
        """Relabels the rows of `batch` where `her_mask` is true.

        Raises:
            KeyError: the batch has no drawn goals, or the rows no goal entries.
            ValueError: goals differ in shape, or a function returned another shape than the batch's.
        """
        if batch.get(keys.GOAL_INDEX, None) is None:
            raise KeyError(
                "the batch has no 'goal_index': GoalRelabel writes the goals that a HERSampler draws; "
                "pass sampler=HERSampler(...) to the ReplayStorage."
            )
        drawn = rows.read(batch, batch.get(keys.GOAL_INDEX), (self.next_achieved_goal_key,))
        goal = drawn[self.next_achieved_goal_key]
        pursued = self._entry(batch, self.desired_goal_key)
        if goal.shape != pursued.shape:
            raise ValueError(
                f"the achieved goal must have the desired goal's shape {list(pursued.shape)}, got "
                f"{list(goal.shape)}."
            )
        changed, relabelled = (
            rows.needed(self.changed_keys),
            RelabelledRows(batch.get(keys.HER_MASK)),
        )
        fields = {
            self.desired_goal_key: pursued,
            # Rows without a next desired goal pursue one goal throughout.
            self.next_desired_goal_key: batch.get(self.next_desired_goal_key, pursued),
        }
        for key in self._reads(changed):
            if key not in fields:
                fields[key] = self._entry(batch, key)
        for key, field in self._relabel(fields, changed, goal, relabelled).items():
            set_entry(batch, key, field)
        return batch

    def show(
        self,
        batch: TensorDictBase,
        slots: torch.Tensor,
        wanted: Collection[NestedKey],
        rows: SeenRows,
    ) -> dict[NestedKey, torch.Tensor]:
        """Reads further rows of each transition, seen with the goal that it was given.

        Raises:
            KeyError, ValueError: as in `replay`.
        """
        changed = self.changed_keys.intersection(wanted)
        if not changed:
            return rows.read(batch, slots, wanted)
        goal = batch.get(self.desired_goal_key)
        goal = goal.expand(*slots.shape, *goal.shape[1:])
        lacking = {self.next_desired_goal_key}.difference(rows.keys)
        reads = self._reads(changed).union(wanted) - lacking
        fields = rows.read(batch, slots, reads) | dict.fromkeys(lacking, goal)
        relabelled = RelabelledRows(batch.get(keys.HER_MASK), batch_dims=slots.ndim)
        return fields | self._relabel(fields, changed, goal, relabelled)

    def _reads(self, changed: frozenset[NestedKey]) -> frozenset[NestedKey]:
        """Returns the entries of a row that it takes to relabel those in `changed`."""
        known = self._known_reads.get((changed, tuple(self.info_keys)))
        if known is not None:
            return known
        reads = set(changed)
        if not self._flag_keys.isdisjoint(changed):
            reads |= {self.next_achieved_goal_key, self.truncated_key, *self.info_keys}
        elif self.reward_key in changed:
            reads |= {self.next_achieved_goal_key, *self.info_keys}
        self._known_reads[changed, tuple(self.info_keys)] = frozenset(reads)
        return frozenset(reads)

    def _relabel(
        self,
        fields: Mapping[NestedKey, torch.Tensor],
        changed: Collection[NestedKey],
        goal: torch.Tensor,
        relabelled: RelabelledRows,
    ) -> dict[NestedKey, torch.Tensor]:
        """Returns the entries `changed` of rows `[B]` or `[n, B]`, for one goal each.

        Args:
            fields: what is stored in these rows: `changed`, and what `_reads` says.
            changed: some of `changed_keys`.
            goal: `[B, *G]` or `[n, B, *G]`.
            relabelled: which samples it is for; the others are as stored.
        """
        seen = {self.desired_goal_key: goal, self.next_desired_goal_key: goal}
        batch_dims = relabelled.batch_dims
        if self.reward_key in changed:
            seen[self.reward_key] = self._ask("reward_fn", self.reward_fn, fields, goal, batch_dims)
        if self.terminated_fn is not None and not self._flag_keys.isdisjoint(changed):
            reached = self._ask("terminated_fn", self.terminated_fn, fields, goal, batch_dims)
            seen[self.terminated_key] = terminated = reached.bool()
            seen[self.done_key] = terminated | fields[self.truncated_key]
        return {key: relabelled.put(seen[key], fields[key]) for key in changed}

    def _ask(
        self,
        name: str,
        function: GoalFunction,
        fields: Mapping[NestedKey, torch.Tensor],
        goal: torch.Tensor,
        batch_dims: int,
    ) -> torch.Tensor:
        """Returns what a goal function says of rows `[B]` or `[n, B]`, with a trailing 1."""
        achieved = fields[self.next_achieved_goal_key]
        infos = {key: fields[key] for key in self.info_keys}
        if batch_dims == 1:
            return _judge(name, function, achieved, goal, infos)
        # The function sees one flat batch, however many rows of a transition there are.
        infos = {key: info.flatten(0, 1) for key, info in infos.items()}
        judged = _judge(name, function, achieved.flatten(0, 1), goal.flatten(0, 1), infos)
        return judged.view(*goal.shape[:2], 1)

    def _entry(self, batch: TensorDictBase, key: NestedKey) -> torch.Tensor:
        entry = batch.get(key, None)
        if entry is None:
            there = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"GoalRelabel needs {key!r} in the stored rows; they have {there}.")
        return entry

    def audit(self, storage: Any, num_rows: int = 10_000) -> RelabelAudit:
        """Compares `reward_fn` with stored rewards: on rows as they are, they must be equal.

        A reward function that disagrees with its environment is the commonest mistake with
        hindsight, and silent: relabelled rows then teach another task than the stored ones.

        Args:
            storage: a `ReplayStorage`, or the storage of one.
            num_rows: how many of the newest rows to compare.

        Returns:
            what was compared, and where it differs.

        Raises:
            RuntimeError: there are no rows.
        """
        storage = getattr(storage, "storage", storage)
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
        computed = _judge(
            "reward_fn",
            self.reward_fn,
            fields[self.next_achieved_goal_key],
            fields[self.next_desired_goal_key],
            {key: fields[key] for key in self.info_keys},
        ).to(stored.dtype)
        differs = ~torch.isclose(computed, stored, rtol=1e-5, atol=1e-6).reshape(-1)
        return RelabelAudit(
            num_rows=slots.shape[0],
            slots=slots[differs],
            stored=stored.reshape(-1)[differs],
            computed=computed.reshape(-1)[differs],
        )


@dataclass(frozen=True)
class RelabelAudit:
    """What `GoalRelabel.audit` found: the D rows on which function and storage disagree."""

    #: How many rows were compared.
    num_rows: int
    #: `[D]` int64, where they lie.
    slots: torch.Tensor
    #: `[D]` the stored rewards.
    stored: torch.Tensor
    #: `[D]` what the function returns for them.
    computed: torch.Tensor

    @property
    def passed(self) -> bool:
        """Whether all rows agree."""
        return not len(self.slots)

    def __str__(self) -> str:
        if self.passed:
            return f"reward_fn agrees with the stored rewards on all {self.num_rows} rows."
        lines = [
            f"reward_fn differs from the stored reward on {len(self.slots)} of {self.num_rows} rows:"
        ]
        worst = (self.stored - self.computed).abs().argsort(descending=True)[:5]
        lines += [
            f"  slot {int(self.slots[at])}: stored {float(self.stored[at]):g}, computed "
            f"{float(self.computed[at]):g}"
            for at in worst.tolist()
        ]
        return "\n".join(lines)


def _judge(
    name: str,
    function: GoalFunction,
    achieved_goal: torch.Tensor,
    desired_goal: torch.Tensor,
    transition: Mapping[NestedKey, torch.Tensor],
) -> torch.Tensor:
    """Calls a goal function on `[B, *G]` and brings what it returned to `[B, 1]`."""
    batch = achieved_goal.shape[0]
    result = function(achieved_goal, desired_goal, transition)
    try:
        result = torch.as_tensor(result, device=achieved_goal.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must return a tensor or an array of numbers, shape [{batch}] or [{batch}, 1]; "
            f"got {type(result).__name__}."
        ) from error
    if result.shape not in ((batch,), (batch, 1)):
        raise ValueError(
            f"{name} must return one value a row, shape [{batch}] or [{batch}, 1]; got "
            f"{list(result.shape)}."
        )
    return result.reshape(batch, 1)
