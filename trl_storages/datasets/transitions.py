"""Transitions from a dictionary of arrays.

Letters: N rows of the arrays, n transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages import arguments, keys
from trl_storages.datasets.names import Ends, as_dictionary, as_flags, ends_of, sort_entries
from trl_storages.keys import ACHIEVED_GOAL, DESIRED_GOAL, OBSERVATION, REWARD, next_key
from trl_storages.writing.fields import Field, as_tensor

__all__ = ["GoalOf", "Transitions"]

#: Returns the goals `[n, *G]` that observations `[n, ...]` have reached.
GoalOf = Callable[[Any], torch.Tensor]


class _Column(NamedTuple):
    """A field of the transitions, and the array with its values."""

    values: Any
    is_next: bool
    """Whether a transition's value is in the following row."""
    field: Field


class Transitions:
    """Reads arrays of N rows as n transitions, block by block.

    If the arrays lack next observations, these are the observations of the following rows. The last row
    of an episode then has none, and is dropped: the episode ends with the row before it. Only a terminal
    row is kept, for its reward, with its own observation as the next one, from which nothing bootstraps.

    Args:
        data: name -> `[N, ...]` array, as `sort_entries` knows them.
        ends: `[N]` bool, where episodes end, or the name of any entry that holds it; None looks for
            entries of known names.
        float_dtype: converts float64 entries; None leaves them.
        goal_fn: returns the goal that an observation has reached, for data without goals. The desired
            goal of a transition is then the last goal reached in its episode.
        computes_rewards: whether missing rewards are computed later, from the goals; they are NaN until
            then (`has_rewards`).
        fields: of the rows to write, as far as known: values are reshaped to theirs if only dimensions
            of size 1 differ.

    Raises:
        KeyError: an entry is missing; the message lists what there is.
        TypeError: an entry is not numeric.
        ValueError: lengths differ, two entries have the same role, nothing tells where episodes end, or
            no transition is left.
    """

    def __init__(
        self,
        data: Any,
        ends: Any = None,
        *,
        float_dtype: torch.dtype | None = None,
        goal_fn: GoalOf | None = None,
        computes_rewards: bool = False,
        fields: Mapping[NestedKey, Field] | None = None,
    ) -> None:
        data = as_dictionary("data", data)
        if isinstance(ends, str):
            if ends not in data:
                raise KeyError(f"ends must be flags or the name of an entry, got {ends!r}.")
            data, ends = {name: data[name] for name in data if name != ends}, data[ends]
        entries = sort_entries(data)
        num_rows = entries.num_rows
        if ends is not None:
            ends = as_flags("ends", ends, num_rows)
        elif not entries.flags:
            raise ValueError(
                "data must tell where episodes end (terminals, timeouts, dones...): pass ends=, a flag "
                "for each row or the name of an entry; np.zeros(N) for a single trajectory."
            )
        #: Whether the data hold rewards.
        self.has_rewards = REWARD in entries.fields
        has_goals = goal_fn is not None or {ACHIEVED_GOAL, DESIRED_GOAL} <= {*entries.observations}
        if not (self.has_rewards or (has_goals and computes_rewards)):
            raise KeyError(
                f"data must have the entry 'rewards', there are {sorted(map(str, data))}; or goals (or "
                "goal_fn=), and a recipe with reward_fn=, which computes them."
            )
        self._goal_fn, self._float_dtype, self._shapes = goal_fn, float_dtype, fields or {}
        self._columns: dict[NestedKey, _Column] = {}
        for key, values in entries.fields.items():
            self._add(key, values)
        #: Keys of the observations, and of the actions.
        self.observation_keys, self.action_keys = entries.observations, entries.actions
        for key in self.observation_keys:
            if next_key(key) not in entries.fields:
                self._add(next_key(key), entries.fields[key], is_next=True)
        if goal_fn is not None:
            if goals := {ACHIEVED_GOAL, DESIRED_GOAL} & {*self._columns}:
                raise ValueError(f"goal_fn is for data without goals, and there are {goals}.")
            self.observation_keys += [ACHIEVED_GOAL, DESIRED_GOAL]
        self._choose_rows(ends_of(entries.flags, ends, num_rows, has_rewards=self.has_rewards))
        if not len(self):
            raise ValueError(f"data must hold a transition at least, got {num_rows} rows.")
        #: Key -> (dtype, shape) of a transition.
        self.fields: dict[NestedKey, Field] = {
            key: (value.dtype, value.shape[1:]) for key, value in self.block(0, 1).items(True, True)
        }

    def _add(self, key: NestedKey, values: Any, *, is_next: bool = False) -> None:
        keys.check_free(key, (*self._columns, keys.DONE, keys.TERMINATED, keys.TRUNCATED))
        sample = as_tensor(values[:1], repr(key))
        dtype, shape = sample.dtype, sample.shape[1:]
        if not shape and (key == REWARD or dtype.is_floating_point or dtype == torch.bool):
            shape = torch.Size([1])
        if dtype == torch.float64 and self._float_dtype is not None:
            dtype = self._float_dtype
        if (known := self._shapes.get(key)) is not None and known[1].numel() == shape.numel():
            shape = known[1]
        self._columns[key] = _Column(values, is_next, (dtype, shape))

    def _choose_rows(self, ends: Ends) -> None:
        """Selects the rows that are transitions."""
        has_following = any(column.is_next for column in self._columns.values())
        done, at = ends.terminated | ends.truncated, np.arange(len(ends.terminated))
        kept = ~ends.leads_nowhere | ends.terminated if has_following else done | True
        # An episode that ends with a dropped row ends with the last kept one before it.
        before = np.maximum.accumulate(np.where(kept, at, -1))[~kept & done]
        before = before[before >= 0]
        truncated = ends.truncated.copy()
        truncated[before] |= ~ends.terminated[before]
        self._rows = at[kept]
        self._terminated, self._truncated = ends.terminated[kept], truncated[kept]
        self._following = self._rows + (has_following & ~ends.leads_nowhere[kept])
        #: `[n]` the last transition of the episode of each.
        last = np.where(self._terminated | self._truncated, np.arange(len(self)), len(self) - 1)
        self._last = np.minimum.accumulate(last[::-1])[::-1]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest_episode(self) -> int:
        """Number of transitions in the longest episode."""
        return int(np.bincount(self._last).max())

    def block(self, start: int, stop: int) -> TensorDict:
        """Returns the transitions from `start` up to `stop` (exclusive) as a TensorDict."""
        which = slice(start, stop)
        steps = self._entries(which)
        terminated, truncated = self._terminated[which], self._truncated[which]
        for key, flag in (
            (keys.DONE, terminated | truncated),
            (keys.TERMINATED, terminated),
            (keys.TRUNCATED, truncated),
        ):
            steps.set(key, torch.from_numpy(flag).unsqueeze(-1))
        if self._goal_fn is not None:
            self._set_goals(steps, self._last[which])
        if not self.has_rewards:
            steps.set(REWARD, torch.full((len(steps), 1), torch.nan))
        return steps

    def _entries(self, which: Any) -> TensorDict:
        """Returns the entries of some transitions, without flags and goals."""
        steps = TensorDict({}, batch_size=[len(self._rows[which])])
        for key, column in self._columns.items():
            rows = (self._following if column.is_next else self._rows)[which]
            dtype, shape = column.field
            if isinstance(column.values, torch.Tensor):
                taken = column.values[torch.from_numpy(rows).to(column.values.device)]
            else:
                taken = as_tensor(np.take(column.values, rows, axis=0), repr(key))
            steps.set(key, taken.to(dtype).reshape(len(rows), *shape))
        return steps

    def _set_goals(self, steps: TensorDict, last: np.ndarray) -> None:
        """Sets the achieved goals, and the last one of each episode as its desired goal."""
        # Computed once per episode, as a block has many rows of few episodes.
        ends, of_row = np.unique(last, return_inverse=True)
        reached = self._goals_of(self._entries(ends)["next"])
        desired = reached[torch.from_numpy(of_row.reshape(-1))]
        for key, goals in (
            (ACHIEVED_GOAL, self._goals_of(steps)),
            (next_key(ACHIEVED_GOAL), self._goals_of(steps["next"])),
            (DESIRED_GOAL, desired),
            (next_key(DESIRED_GOAL), desired),
        ):
            steps.set(key, goals)

    def _goals_of(self, steps: TensorDictBase) -> torch.Tensor:
        seen = [key for key in self.observation_keys if key not in (ACHIEVED_GOAL, DESIRED_GOAL)]
        is_plain = seen == [OBSERVATION]
        found = self._goal_fn(steps[OBSERVATION] if is_plain else steps.select(*seen).to_dict())  # type: ignore[misc]
        goals = arguments.tensor("the result of goal_fn", found)
        if goals.shape[:1] != steps.batch_size:
            got = list(goals.shape)
            raise ValueError(f"goal_fn must return one goal for each of {len(steps)}, got {got}.")
        return goals if goals.ndim > 1 else goals.unsqueeze(-1)
