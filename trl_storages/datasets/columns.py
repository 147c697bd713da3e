"""The columns of transitions, from arrays that are known by their names.

A column is an array of N rows, and which row each of n transitions takes from it. So a next observation
may be that of the following row, and a desired goal the one that is reached at the end of the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, unravel_key

from trl_storages import arguments, keys
from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, OBSERVATION, REWARD, next_key
from trl_storages.writing.fields import as_tensor

__all__ = [
    "BLOCK",
    "Columns",
    "Entries",
    "GoalOf",
    "blocks_of",
    "columns_of",
    "entries_of",
    "joined",
]

#: Returns the goals `[N, *G]` that observations `[N, ...]` have reached.
GoalOf = Callable[[Any], torch.Tensor]
Columns = dict[NestedKey, tuple[np.ndarray, np.ndarray]]
#: Rows written at a time: few calls, and little extra memory.
BLOCK = 1 << 16

# Role -> its names in D4RL, OGBench, Minari, garage, Stable-Baselines3, tianshou, jaxrl, TorchRL...
_NAMES = {
    "observation": "observations obs",
    "action": "actions acts act",
    "reward": "rewards rews rew",
    "achieved_goal": "achieved_goals",
    "desired_goal": "desired_goals",
    "terminals": "terminal terminations terminateds terminated",
    "timeouts": "timeout truncations truncateds truncated",
    "dones": "done dones_float",
    "masks": "",
}
_ROLES = {name: role for role, names in _NAMES.items() for name in (role, *names.split())}
_FLAGS = ("terminals", "timeouts", "dones", "masks")


class Entries(NamedTuple):
    """Arrays under the keys that transitions have, and flags of ends by their roles."""

    fields: dict[NestedKey, np.ndarray]
    observations: list[NestedKey]
    """Keys of the observations; the following row holds those that are not under "next"."""


def entries_of(data: Any, goal_fn: GoalOf | None = None) -> Entries:
    """Sorts the arrays of a dataset by their names.

    Raises:
        KeyError: there are no observations or actions, or only some have next values.
        TypeError: an entry is not an array of numbers.
        ValueError: two entries have the same role, or lengths differ.

    >>> [*entries_of({"obs": np.zeros(2), "acts": np.ones(2), "infos/x": np.ones(2)}).fields]
    ['observation', 'action', ('infos', 'x')]
    """
    fields: dict[NestedKey, np.ndarray] = {}
    seen: list[NestedKey] = []
    after: list[NestedKey] = []

    def add(key: NestedKey, values: Any) -> None:
        keys.check_free(key, (*fields, keys.DONE, keys.TERMINATED, keys.TRUNCATED))
        array = np.asarray(values)
        if not array.ndim or array.dtype.kind not in "biuf":
            got = arguments.shown(values)
            raise TypeError(f"data must be numbers, a row for each step, got {key!r}: {got}.")
        fields[key] = array

    for name, value in arguments.mapping("data", data, "a dictionary of arrays").items():
        base = name.removeprefix("next_").removesuffix("_next")
        role = _ROLES.get(base, base)
        path = () if role == OBSERVATION and isinstance(value, Mapping) else tuple(role.split("/"))
        if base != name or role == "reward":
            path = ("next", *path)
        # D4RL's files describe their origin there.
        for found, leaf in keys.leaves(value, "data", path) if path[:1] != ("metadata",) else ():
            key = unravel_key(found)
            add(key, leaf)
            if role in (OBSERVATION, ACHIEVED_GOAL, DESIRED_GOAL):
                (seen if base == name else after).append(key)
    actions = [key for key in fields if keys.key_path(key)[0] == ACTION]
    if not (seen and actions):
        raise KeyError(f"data must have the entries observations and actions, has {[*data]}.")
    num_rows = len(fields[actions[0]])
    for key in seen:
        if not after and len(fields[key]) == num_rows + 1:
            fields[next_key(key)], fields[key] = fields[key][1:], fields[key][:-1]
    if goal_fn is not None:
        for is_next in {False, next_key(seen[0]) in fields}:
            places = {key: next_key(key) if is_next else key for key in (*seen, ACHIEVED_GOAL)}
            tree = keys.nested(
                (keys.key_path(key), as_tensor(fields[places[key]], repr(key))) for key in seen
            )
            goals = goal_fn(tree[OBSERVATION] if seen == [OBSERVATION] else tree)
            add(places[ACHIEVED_GOAL], as_tensor(goals, "the result of goal_fn"))
        seen.append(ACHIEVED_GOAL)
    following = {next_key(key) for key in seen}
    if {*after} - following or following & {*fields} not in (following, set()):
        raise KeyError(f"data must have the same observations now and next, got {[*fields]}.")
    if wrong := {key: len(values) for key, values in fields.items() if len(values) != num_rows}:
        raise ValueError(f"data must have one row for each of {num_rows} steps, got {wrong}.")
    return Entries(fields, seen)


def joined(paths: Sequence[Entries]) -> tuple[Entries, np.ndarray]:
    """Concatenates episodes; returns also `[N]` bool, where they end.

    Raises:
        KeyError: an episode has other entries than the first.
        ValueError: there are none, or their shapes differ.
    """
    lengths = [len(next(iter(path.fields.values()))) for path in paths]
    ends = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    first = paths[0]
    for number, (fields, _) in enumerate(paths):
        if fields.keys() != first.fields.keys():
            raise KeyError(
                f"all episodes must have the entries {[*first.fields]}, number {number} has {[*fields]}."
            )
    fields = {key: np.concatenate([path.fields[key] for path in paths]) for key in first.fields}
    return first._replace(fields=fields), ends


def columns_of(entries: Entries, ends: Any = None, *, sets_goals: bool = False) -> Columns:
    """Returns the columns of transitions.

    If there are no next observations, these are the observations of the following rows. The last row of
    an episode then has none, and is dropped: the episode ends with the row before it. Only a terminal
    row is kept, for its reward, with its own observation as the next one, from which nothing bootstraps.

    Args:
        entries: the arrays.
        ends: `[N]` bool, where episodes end; None looks for flags.
        sets_goals: adds desired goals, the last that are reached in their episodes.

    Raises:
        ValueError: nothing tells where episodes end, or no transition is left.
    """
    fields, num_rows = dict(entries.fields), len(next(iter(entries.fields.values())))
    flags = {role: _flags(role, fields.pop(role), num_rows) for role in _FLAGS if role in fields}
    if ends is not None:
        flags["ends"] = _flags("ends", ends, num_rows)
    if not flags:
        raise ValueError(
            "data must tell where episodes end (terminals, timeouts, dones...): pass ends=, a flag for "
            "each row; np.zeros(N) for a single trajectory."
        )
    terminated, truncated, leads_nowhere = _ends_of(flags, num_rows, REWARD in fields)
    at, follows = np.arange(num_rows), next_key(entries.observations[0]) not in fields
    kept = ~leads_nowhere | terminated if follows else at >= 0
    # An episode that ends with a dropped row ends with the last kept one before it.
    before = np.maximum.accumulate(np.where(kept, at, -1))[~kept & (terminated | truncated)]
    before = before[before >= 0]
    truncated[before] |= ~terminated[before]
    rows = at[kept]
    if not len(rows):
        raise ValueError(f"data must hold a transition at least, got {num_rows} rows.")
    following = rows + (follows & ~leads_nowhere[rows])
    done = terminated | truncated
    fields |= {keys.DONE: done, keys.TERMINATED: terminated, keys.TRUNCATED: truncated}
    columns = {key: (values, rows) for key, values in fields.items()}
    for key in entries.observations if follows else ():
        columns[next_key(key)] = fields[key], following
    if sets_goals:
        last = np.where(done[rows], np.arange(len(rows)), len(rows) - 1)
        reached, where = columns[next_key(ACHIEVED_GOAL)]
        goals = reached, where[np.minimum.accumulate(last[::-1])[::-1]]
        columns |= {DESIRED_GOAL: goals, next_key(DESIRED_GOAL): goals}
    return columns


def blocks_of(columns: Columns, float_dtype: torch.dtype | None = None) -> Iterator[TensorDict]:
    """Yields the transitions, some at a time."""
    num_rows = len(next(iter(columns.values()))[1])
    for start in range(0, num_rows, BLOCK):
        steps = TensorDict({}, batch_size=[min(BLOCK, num_rows - start)])
        for key, (values, rows) in columns.items():
            taken = as_tensor(values[rows[start : start + BLOCK]], repr(key))
            if taken.dtype == torch.float64 and float_dtype is not None:
                taken = taken.to(float_dtype)
            if taken.ndim == 1 and (
                key == REWARD or taken.is_floating_point() or taken.dtype == torch.bool
            ):
                taken = taken.unsqueeze(-1)
            steps.set(key, taken)
        yield steps


def _ends_of(flags: Mapping[str, np.ndarray], num_rows: int, has_rewards: bool) -> Any:
    """Returns which rows are terminated, which truncated, and which lead to none of their episode.

    `terminals` are terminal states, except in OGBench's data (recognized by `masks`, or by having neither
    rewards nor `timeouts`), where they only mark the last rows of episodes. `dones` are ends of either
    kind if other flags mark terminal states, and terminal states if none do.
    """
    ends, terminated = np.zeros((2, num_rows), bool)
    timeouts = flags.get("timeouts", terminated)
    for name, flag in flags.items():
        ends = ends if name == "masks" else ends | flag
    if "masks" in flags:
        terminated = ~flags["masks"]
        # An episode may continue after its goal is reached.
        ends = ends if ends.any() else terminated
    elif "terminals" in flags:
        terminated = flags["terminals"] if has_rewards or "timeouts" in flags else terminated
    elif "dones" in flags:
        terminated = flags["dones"] & ~timeouts
    is_last = np.arange(num_rows) == num_rows - 1
    return terminated, timeouts | (ends & ~terminated), ends | is_last


def _flags(name: str, value: Any, num_rows: int) -> np.ndarray:
    """Returns flags, bool or 0 and 1 of any dtype, as `[N]` bool."""
    array = np.asarray(value)
    if array.size != num_rows or not ((array == 0) | (array == 1)).all():
        raise ValueError(
            f"{name} must be 0 or 1 for each of {num_rows} steps, got {arguments.shown(value)}."
        )
    return array.reshape(-1) != 0
