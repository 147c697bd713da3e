"""Shows transitions as if a goal that was reached had been the goal all along.

Letters: B batch, n further rows of each transition, G goal shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.envs.transforms import Transform

from trl_storages import arguments, keys
from trl_storages._torchrl import set_entry
from trl_storages.episodes import episodes_of
from trl_storages.functional.rewards import relabelled_dtype
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

    The reward of a batch keeps its dtype if that is floating. One that was stored as bool or as an
    integer gets a dtype that holds what `reward_fn` returned as well.

    The functions are asked about the relabelled rows R; on a GPU, where the host cannot know which
    these are, about all of the batch.

    Args:
        reward_fn: `(achieved_goal [R, *G], desired_goal [R, *G], transition) -> [R]` or `[R, 1]`;
            `transition` maps each of `info_keys` to a tensor `[R, ...]`.
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

    uses_goals = True

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
        what = "(achieved_goal, desired_goal, transition)"
        self.reward_fn = arguments.function("reward_fn", reward_fn, what)
        self.terminated_fn = terminated_fn
        if terminated_fn is not None:
            arguments.function("terminated_fn", terminated_fn, f"{what}, or None")
        self.info_keys = tuple(arguments.keys("info_keys", info_keys))
        achieved_goal_key = arguments.key("achieved_goal_key", achieved_goal_key)
        self.next_achieved_goal_key = unravel_key(keys.next_key(achieved_goal_key))
        self.desired_goal_key = arguments.key("desired_goal_key", desired_goal_key)
        self.next_desired_goal_key = keys.next_key(self.desired_goal_key)
        self.reward_key = arguments.key("reward_key", reward_key)
        self.done_key = arguments.key("done_key", done_key)
        self.terminated_key = arguments.key("terminated_key", terminated_key)
        self.truncated_key = arguments.key("truncated_key", truncated_key)

        self._flag_keys = frozenset({self.terminated_key, self.done_key})
        self._always_changed = frozenset(
            {self.desired_goal_key, self.next_desired_goal_key, self.reward_key}
        )
        self._changed_with_flags = self._always_changed | self._flag_keys

    @property
    def changed_keys(self) -> frozenset[NestedKey]:  # type: ignore[override]
        """The entries that are seen differently from what is stored."""
        return self._always_changed if self.terminated_fn is None else self._changed_with_flags

    def hides_next(self, follower: Transform | None) -> bool:
        """Returns whether the follower overwrites all that is relabelled under `next`, unread."""
        if not isinstance(follower, ReplayTransform) or not follower.hides_next(None):
            return False
        relabelled = self.changed_keys - {self.desired_goal_key}
        return all(follower.replaces(key) for key in relabelled)

    def replay(self, batch: TensorDictBase, rows: SeenRows) -> TensorDictBase:
        """Relabels the rows of `batch` where `her_mask` is true.

        Raises:
            KeyError: the batch has no drawn goals, or the rows no goal entries.
            ValueError: goals differ in shape, or a function returned another shape than the batch's, or
                reward or flags are stored as more than one value a row.
            TypeError: achieved goals are floating, desired ones are not.
        """
        goal_index = batch.get(keys.GOAL_INDEX, None)
        if goal_index is None:
            raise KeyError(
                "the batch has no 'goal_index': GoalRelabel writes the goals that a HERSampler draws; "
                "pass sampler=HERSampler(...) to the ReplayStorage."
            )
        relabelled = _relabelled_rows(batch, rows)
        changed = rows.needed(self.changed_keys)
        stored = {key: self._stored(batch, key) for key in changed}
        if relabelled.is_none:
            return batch
        wanted = (self.next_achieved_goal_key,)
        goal = rows.read(batch, relabelled.pick(goal_index), wanted)[self.next_achieved_goal_key]
        pursued = stored.get(self.desired_goal_key)
        if pursued is None:
            pursued = self._entry(batch, self.desired_goal_key)
        if goal.is_floating_point() and not pursued.is_floating_point():
            raise TypeError(
                f"the desired goal must be floating, as the achieved goal is ({goal.dtype}), got "
                f"{pursued.dtype}: goals that were reached would be truncated."
            )
        if goal.shape[1:] != pursued.shape[1:]:
            raise ValueError(
                "the achieved goal must have the desired goal's shape "
                f"{list(pursued.shape[1:])}, got {list(goal.shape[1:])}."
            )
        inputs = self._inputs(changed)
        seen = {key: relabelled.pick(self._entry(batch, key)) for key in inputs}
        for key, new in self._relabel(seen, changed, goal).items():
            set_entry(batch, key, relabelled.put(new, self._fitting(key, stored[key], new)))
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
        dims = slots.ndim
        relabelled = _relabelled_rows(batch, rows)
        pursued = batch.get(self.desired_goal_key)
        lacking = {self.next_desired_goal_key}.difference(rows.keys)
        inputs = self._inputs(changed)
        stored = [key for key in wanted if key not in lacking]
        fields = rows.read(batch, slots, [*stored, *inputs.difference(stored)])
        for key in lacking.intersection(wanted):
            fields[key] = pursued.expand(*slots.shape, *pursued.shape[1:]).clone()
        if relabelled.is_none:
            return fields
        seen = {key: relabelled.pick(fields[key], dims) for key in inputs}
        goal = relabelled.pick(pursued)
        goal = goal.expand(*slots.shape[:-1], *goal.shape)
        for key, new in self._relabel(seen, changed, goal, dims).items():
            fields[key] = relabelled.put(new, self._fitting(key, fields[key], new, dims), dims)
        return fields

    def _fitting(
        self, key: NestedKey, stored: torch.Tensor, new: torch.Tensor, batch_dims: int = 1
    ) -> torch.Tensor:
        """Returns an entry as it was stored, in a dtype that holds computed rewards too.

        Raises:
            ValueError: what was computed would be broadcast.
        """
        shape, wanted = list(stored.shape[batch_dims:]), list(new.shape[batch_dims:])
        if shape != wanted:
            raise ValueError(
                f"{key!r} must be stored with shape {wanted} a row, as what is computed for a goal is, "
                f"got {shape}. Of several agents, store what the team gets as one reward and one flag a "
                "row."
            )
        if key != self.reward_key:
            return stored
        return stored.to(relabelled_dtype(stored.dtype, new.dtype))

    def _inputs(self, changed: frozenset[NestedKey]) -> frozenset[NestedKey]:
        """Returns the entries of a row from which those in `changed` follow, with a goal."""
        if not self._flag_keys.isdisjoint(changed):
            return frozenset({self.next_achieved_goal_key, self.truncated_key, *self.info_keys})
        if self.reward_key in changed:
            return frozenset({self.next_achieved_goal_key, *self.info_keys})
        return frozenset()

    def _relabel(
        self,
        seen: Mapping[NestedKey, torch.Tensor],
        changed: Collection[NestedKey],
        goal: torch.Tensor,
        batch_dims: int = 1,
    ) -> dict[NestedKey, torch.Tensor]:
        """Returns what the entries `changed` of rows `[B]` or `[n, B]` become, for one goal each.

        Args:
            seen: the entries of `_inputs`.
            changed: some of `changed_keys`.
            goal: `[B, *G]` or `[n, B, *G]`.
            batch_dims: 1 or 2 accordingly.
        """
        new = {self.desired_goal_key: goal, self.next_desired_goal_key: goal}
        if self.reward_key in changed:
            new[self.reward_key] = self._ask("reward_fn", self.reward_fn, seen, goal, batch_dims)
        if self.terminated_fn is not None and not self._flag_keys.isdisjoint(changed):
            reached = self._ask("terminated_fn", self.terminated_fn, seen, goal, batch_dims)
            terminated = reached.bool()
            new[self.terminated_key] = terminated
            new[self.done_key] = terminated | seen[self.truncated_key]
        return {key: new[key] for key in changed}

    def _ask(
        self,
        name: str,
        function: GoalFunction,
        seen: Mapping[NestedKey, torch.Tensor],
        goal: torch.Tensor,
        batch_dims: int,
    ) -> torch.Tensor:
        """Returns what a goal function says of rows `[B]` or `[n, B]`, with a trailing 1."""
        achieved = seen[self.next_achieved_goal_key]
        infos = {key: seen[key] for key in self.info_keys}
        if batch_dims == 1:
            return _judge(name, function, achieved, goal, infos)
        # The function sees one flat batch, however many rows of a transition there are.
        infos = {key: info.flatten(0, 1) for key, info in infos.items()}
        judged = _judge(name, function, achieved.flatten(0, 1), goal.flatten(0, 1), infos)
        return judged.view(*goal.shape[:2], 1)

    def _stored(self, batch: TensorDictBase, key: NestedKey) -> torch.Tensor:
        """Returns an entry of the batch that is to be relabelled, made where the rows have none."""
        entry = batch.get(key, None)
        if entry is None and key == self.next_desired_goal_key:
            # Rows without a next desired goal pursue one goal throughout.
            entry = self._entry(batch, self.desired_goal_key).clone()
            set_entry(batch, key, entry)
        return self._entry(batch, key) if entry is None else entry

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
        )
        # Rounded as they would be stored, but never truncated.
        computed = computed.to(relabelled_dtype(stored.dtype, computed.dtype))
        stored = self._fitting(self.reward_key, stored, computed)
        near = torch.isclose(computed.double(), stored.double(), rtol=1e-5, atol=1e-6)
        # Of integers from 2^53 on, the next one looks the same in float64.
        differs = ~(near if computed.is_floating_point() else computed == stored).reshape(-1)
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
    #: `[D]` the stored rewards, in a dtype that holds the computed ones too.
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
        worst = (self.stored.double() - self.computed.double()).abs().argsort(descending=True)[:5]
        lines += [
            f"  slot {int(self.slots[at])}: stored {float(self.stored[at]):g}, computed "
            f"{float(self.computed[at]):g}"
            for at in worst.tolist()
        ]
        return "\n".join(lines)


def _relabelled_rows(batch: TensorDictBase, rows: SeenRows) -> RelabelledRows:
    """Returns which samples are relabelled, looking again if the batch has another mask meanwhile."""
    mask = batch.get(keys.HER_MASK)
    if rows.found is None or rows.found.mask is not mask:
        rows.found = RelabelledRows(mask, in_place=rows.untouched)
    return rows.found


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
    if result.is_complex():
        raise TypeError(f"{name} must return real numbers, got {result.dtype}.")
    return result.reshape(batch, 1)
