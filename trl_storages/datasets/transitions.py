"""Transitions from a dictionary of arrays.

Letters: N rows of the arrays, n transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages import arguments
from trl_storages.datasets.names import (
    Ends,
    Entries,
    as_dictionary,
    as_flags,
    ends_of,
    last_rows,
    may_be_flags,
    sort_entries,
    whole_rows,
)
from trl_storages.keys import (
    ACHIEVED_GOAL,
    DESIRED_GOAL,
    DONE,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    check_free,
    next_key,
)
from trl_storages.streams.layout import Layout
from trl_storages.writing.fields import Field
from trl_storages.writing.values import as_tensor

__all__ = ["GoalOf", "Transitions", "steps_of"]

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
        argument: the name of the data in messages.
        float_dtype: converts float64 entries; None leaves them.
        goal_fn: returns the goal that an observation has reached, for data without goals. The desired
            goal of a transition is then the last goal reached in its episode.
        computes_rewards: whether missing rewards are computed later, from the goals; they are NaN until
            then (`has_rewards`).
        fields: of the rows to write, as far as known: values are reshaped to theirs if only dimensions
            of size 1 differ, and rewards are cast to their dtype.

    Raises:
        KeyError: an entry is missing; the message lists what there is.
        TypeError: an entry is not numeric.
        ValueError: lengths differ, two entries have the same role, or no transition is left.
    """

    def __init__(
        self,
        data: Any,
        ends: Any = None,
        *,
        argument: str = "data",
        float_dtype: torch.dtype | None = None,
        goal_fn: GoalOf | None = None,
        computes_rewards: bool = False,
        fields: Mapping[NestedKey, Field] | None = None,
    ) -> None:
        data = as_dictionary(argument, data)
        if float_dtype is not None:
            what = "a torch.dtype or None"
            arguments.instance("float_dtype", float_dtype, torch.dtype, what=what)
            if not float_dtype.is_floating_point:
                raise ValueError(
                    f"float_dtype must be a dtype of floating point, got {float_dtype}."
                )
        if isinstance(ends, str):
            if ends not in (names := may_be_flags(data)):
                raise KeyError(
                    f"ends must be flags or the name of such an entry, got {ends!r}; there are {names}."
                )
            data, ends = {name: data[name] for name in data if name != ends}, data[ends]
        entries = sort_entries(data, argument)
        num_rows = _num_rows(entries, argument)
        flags = {
            role: as_flags(f"{argument}[{entries.names[role]!r}]", value, num_rows)
            for role, value in entries.flags.items()
        }
        #: Whether the data mark the ends of episodes.
        self.has_ends = ends is not None or bool(flags)
        #: Whether the data hold rewards.
        self.has_rewards = "rewards" in entries.names
        if ends is not None:
            ends = as_flags("ends", arguments.values("ends", ends), num_rows)
        has_goals = goal_fn is not None or {ACHIEVED_GOAL, DESIRED_GOAL} <= {*entries.observations}
        if not (self.has_rewards or (has_goals and computes_rewards)):
            raise KeyError(
                f"{argument} must have the entry 'rewards'; there are {sorted(map(str, data))}. "
                "trl_storages.datasets.from_arrays(..., reward_fn=...) computes them from "
                "achieved_goals and desired_goals, or from goal_fn=... for data without goals."
            )
        self._goal_fn, self._float_dtype = goal_fn, float_dtype
        self._fields = {} if fields is None else fields
        self._columns: dict[NestedKey, _Column] = {}
        self._lay_out(entries)
        ends = ends_of(flags, ends, num_rows, has_rewards=self.has_rewards)
        self._choose_rows(ends)
        if not len(self):
            raise ValueError(
                f"{argument} must hold a transition at least, got {num_rows} rows that hold none."
            )
        #: Key -> (dtype, shape) of a transition.
        self.fields: dict[NestedKey, Field] = {
            key: (value.dtype, value.shape[1:])
            for key, value in self.block(0, 1).items(include_nested=True, leaves_only=True)
        }

    def _lay_out(self, entries: Entries) -> None:
        """Sets up the columns of the transitions."""
        for key, values in entries.fields:
            self._add(key, values)
        #: Keys of the observations.
        self.observation_keys = entries.observations
        #: Keys of the actions.
        self.action_keys = entries.actions
        given = dict(entries.fields)
        for key in self.observation_keys:
            if next_key(key) not in given:
                self._add(next_key(key), given[key], is_next=True)
        if self._goal_fn is not None:
            if goals := {ACHIEVED_GOAL, DESIRED_GOAL} & {*self._columns}:
                raise ValueError(
                    f"goal_fn is for data without goals, and there are {sorted(goals, key=str)}: leave "
                    "goal_fn out; rewards that are missing are computed from these goals by reward_fn."
                )
            self.observation_keys += [ACHIEVED_GOAL, DESIRED_GOAL]

    def _add(self, key: NestedKey, values: Any, *, is_next: bool = False) -> None:
        check_free(key, self._columns)
        sample = as_tensor(values[:1], repr(key))
        dtype, shape = sample.dtype, sample.shape[1:]
        if not shape and (key == REWARD or dtype.is_floating_point or dtype == torch.bool):
            shape = torch.Size([1])
        if dtype == torch.float64 and self._float_dtype is not None:
            dtype = self._float_dtype
        if (known := self._fields.get(key)) is not None:
            if [size for size in known[1] if size != 1] == [size for size in shape if size != 1]:
                shape = known[1]
            if key == REWARD:
                dtype = known[0]
        self._columns[key] = _Column(values, is_next, (dtype, shape))

    def _choose_rows(self, ends: Ends) -> None:
        """Selects the rows that are transitions."""
        has_following = any(column.is_next for column in self._columns.values())
        kept = ~ends.leads_nowhere | ends.terminated if has_following else ends.done | True
        self._rows, ends = whole_rows(ends, kept)
        self._terminated = ends.terminated[self._rows]
        self._truncated = ends.truncated[self._rows]
        self._following = self._rows + (has_following & ~ends.leads_nowhere[self._rows])
        self._last = None if self._goal_fn is None else last_rows(self.done)

    @property
    def done(self) -> np.ndarray:
        """`[n]` bool, whether the episode ends with the transition."""
        found: np.ndarray = self._terminated | self._truncated
        return found

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest_episode(self) -> int:
        """Number of transitions in the longest episode."""
        ends = np.flatnonzero(self.done)
        bounds = np.concatenate([[-1], ends, [len(self) - 1]])
        return int(np.diff(bounds).max())

    def block(self, start: int, stop: int) -> TensorDict:
        """Returns the transitions from `start` up to `stop` (exclusive) as a TensorDict."""
        which = slice(start, stop)
        steps = self._entries(which)
        terminated, truncated = self._terminated[which], self._truncated[which]
        for key, flag in (
            (DONE, terminated | truncated),
            (TERMINATED, terminated),
            (TRUNCATED, truncated),
        ):
            steps.set(key, torch.from_numpy(flag).unsqueeze(-1))
        if self._goal_fn is not None:
            self._set_goals(steps, self._last[which])  # type: ignore[index]
        if not self.has_rewards:
            dtype, shape = self._fields.get(REWARD, (torch.float32, torch.Size([1])))
            steps.set(REWARD, torch.full((len(steps), *shape), torch.nan, dtype=dtype))
        return steps

    def tensordict(self) -> TensorDict:
        """Returns all transitions as a TensorDict `[n]`."""
        return self.block(0, len(self))

    def _entries(self, which: Any) -> TensorDict:
        """Returns the entries of some transitions, without flags and goals."""
        steps = TensorDict({}, batch_size=[len(self._rows[which])])
        for key, column in self._columns.items():
            rows = self._following if column.is_next else self._rows
            steps.set(key, _taken(column, rows[which]))
        return steps

    def _set_goals(self, steps: TensorDict, last: np.ndarray) -> None:
        """Sets the achieved goals, and the last one of each episode as its desired goal."""
        # Computed once per episode, as a block has many rows of few episodes.
        ends, of_row = np.unique(last, return_inverse=True)
        reached = self._goals_of(self._entries(ends)["next"])
        desired = reached[torch.from_numpy(of_row.reshape(-1))]
        steps.set(ACHIEVED_GOAL, self._goals_of(steps))
        steps.set(next_key(ACHIEVED_GOAL), self._goals_of(steps["next"]))
        steps.set(DESIRED_GOAL, desired)
        steps.set(next_key(DESIRED_GOAL), desired.clone())

    def _goals_of(self, steps: TensorDictBase) -> torch.Tensor:
        seen = [key for key in self.observation_keys if key not in (ACHIEVED_GOAL, DESIRED_GOAL)]
        observations = (
            steps.select(*seen).to_dict() if seen != [OBSERVATION] else steps[OBSERVATION]
        )
        goals = self._goal_fn(observations)  # type: ignore[misc]
        if not isinstance(goals, torch.Tensor) or goals.shape[:1] != steps.batch_size:
            raise ValueError(
                "goal_fn must return a tensor with one goal for each observation, for "
                f"{len(steps)} of them got {getattr(goals, 'shape', type(goals).__name__)}."
            )
        return goals if goals.ndim > 1 else goals.unsqueeze(-1)


def steps_of(argument: str, value: Any, layout: Layout | None = None) -> TensorDictBase:
    """Returns steps given as a TensorDict, or as a dictionary of a dataset's arrays.

    Args:
        argument: the name of the steps in messages.
        value: the steps.
        layout: of the rows, if known.

    Raises:
        KeyError, TypeError, ValueError: as in `Transitions`.
    """
    if isinstance(value, TensorDictBase):
        return value
    if isinstance(value, Mapping):
        fields = None if layout is None else layout.described
        return Transitions(value, argument=argument, fields=fields).tensordict()
    return arguments.steps(argument, value)


def _num_rows(entries: Entries, argument: str) -> int:
    """Returns N.

    Raises:
        ValueError: lengths differ.
    """
    flags = ((entries.names[role], value) for role, value in entries.flags.items())
    lengths = {key: len(value) for key, value in (*entries.fields, *flags)}
    if len({*lengths.values()}) > 1:
        raise ValueError(
            f"{argument} must have one row for each step, got {lengths}; leave out what is not of steps."
        )
    return next(iter(lengths.values()))


def _taken(column: _Column, rows: np.ndarray) -> torch.Tensor:
    """Returns the values of some rows."""
    dtype, shape = column.field
    values = column.values
    if isinstance(values, torch.Tensor):
        taken = values[torch.from_numpy(rows).to(values.device)]
    else:
        taken = as_tensor(np.take(values, rows, axis=0), "")
    return taken.to(dtype).reshape(len(rows), *shape)
