"""Transitions from the arrays of a dataset.

A field of n transitions is a *column*: an array `[N, ...]`, and the position in it of each transition's
value. Columns can share an array: next observations take the observations of the following positions,
and desired goals take the goals that are achieved at the ends of episodes.

Letters: N steps of the arrays, n transitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

from trl_storages import keys, validation
from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, REWARD, next_key
from trl_storages.writing.spaces import OUTCOME_FIELDS, as_tensor

__all__ = ["BATCH_STEPS", "FLAGS", "Arrays", "Column", "batches_of", "columns_of"]

#: Transitions per batch: few calls, and little extra memory.
BATCH_STEPS = 1 << 16
#: Roles of flags that tell where episodes end.
FLAGS = ("terminals", "timeouts", "dones", "masks", "is_first", "is_last", "is_terminal")


class Arrays(NamedTuple):
    """The arrays of a dataset."""

    fields: dict[NestedKey, np.ndarray]
    """Arrays `[N, ...]` by the keys of transitions, and flags of ends by their roles."""
    observation_keys: list[NestedKey]
    """Keys outside of "next". Without next values in `fields`, the following step holds them."""


class Column(NamedTuple):
    """A field of n transitions."""

    array: np.ndarray
    """`[N, ...]` values."""
    positions: np.ndarray
    """`[n]` position of each transition's value in the array."""


def columns_of(
    arrays: Arrays, ends: Any = None, *, sets_goals: bool = False
) -> dict[NestedKey, Column]:
    """Returns the columns of transitions.

    Without next observations, the observations of the following steps take their place. The last step of
    an episode then has no next observation and is dropped, so that the episode ends with the step before
    it. Only a terminal step is kept, because of its reward. Its next observation is its own observation,
    which no target uses, since the state is terminal.

    Args:
        arrays: the arrays.
        ends: `[N]` bool, where episodes end; None looks for flags.
        sets_goals: whether to add desired goals, the last ones that are achieved in their episodes.

    Raises:
        ValueError: nothing tells where episodes end, or no transition is left.
    """
    fields, observation_keys = {**arrays.fields}, arrays.observation_keys
    num_steps = len(next(iter(fields.values())))
    flags = {role: _as_flags(role, fields.pop(role), num_steps) for role in FLAGS if role in fields}
    if ends is not None:
        flags["ends"] = _as_flags("ends", ends, num_steps)
    if not flags:
        raise ValueError(
            "data must tell where episodes end (terminals, timeouts, dones...): pass ends=, a flag for "
            "each step; np.zeros(N) for a single trajectory."
        )
    steps, shares_next = np.arange(num_steps), next_key(observation_keys[0]) not in fields
    terminated, truncated, is_last = _ends_of(flags, num_steps, REWARD in fields, shares_next)
    is_kept = ~is_last | terminated if shares_next else np.ones(num_steps, bool)
    # An episode that ends with a dropped step ends with the last kept step before it.
    last_kept = np.maximum.accumulate(np.where(is_kept, steps, -1))
    new_ends = last_kept[~is_kept & (terminated | truncated)]
    new_ends = new_ends[new_ends >= 0]
    truncated[new_ends] |= ~terminated[new_ends]
    positions = steps[is_kept]
    if not len(positions):
        raise ValueError(f"data must hold at least one transition, got {num_steps} steps.")
    done = terminated | truncated
    fields |= {keys.DONE: done, keys.TERMINATED: terminated, keys.TRUNCATED: truncated}
    columns = {key: Column(array, positions) for key, array in fields.items()}
    if shares_next:
        following = positions + ~is_last[positions]
        columns |= {next_key(key): Column(fields[key], following) for key in observation_keys}
    if sets_goals:
        ranks = np.where(done[positions], np.arange(len(positions)), len(positions) - 1)
        end_ranks = np.minimum.accumulate(ranks[::-1])[::-1]
        achieved = columns[next_key(ACHIEVED_GOAL)]
        goals = Column(achieved.array, achieved.positions[end_ranks])
        columns |= {DESIRED_GOAL: goals, next_key(DESIRED_GOAL): goals}
    return columns


def batches_of(
    columns: Mapping[NestedKey, Column], float_dtype: torch.dtype | None = None
) -> Iterator[TensorDict]:
    """Yields the transitions in batches; float64 values are converted to `float_dtype`, if given."""
    num_transitions = len(next(iter(columns.values())).positions)
    observation_keys = keys.shared_keys(columns)
    # Scalars of these fields have the shape `[1]`, as with spaces; infos keep their shapes.
    has_space = {*OUTCOME_FIELDS, *observation_keys, *map(next_key, observation_keys)}
    for start in range(0, num_transitions, BATCH_STEPS):
        batch = TensorDict({}, batch_size=[min(BATCH_STEPS, num_transitions - start)])
        for key, (array, positions) in columns.items():
            values = as_tensor(array[positions[start : start + BATCH_STEPS]], repr(key))
            if values.dtype == torch.float64 and float_dtype is not None:
                values = values.to(float_dtype)
            is_scalar = values.ndim == 1 and (key in has_space or keys.key_path(key)[0] == ACTION)
            if is_scalar and (
                key == REWARD or values.is_floating_point() or values.dtype == torch.bool
            ):
                values = values.unsqueeze(-1)
            batch.set(key, values)
        yield batch


def _ends_of(
    flags: Mapping[str, np.ndarray], num_steps: int, has_rewards: bool, shares_next: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `[N]` bool each: terminated steps, truncated steps, and last steps of episodes.

    `terminals` are terminal states, except in OGBench's data (recognized by `masks`, or by having neither
    rewards nor `timeouts`), where they only mark the last steps of episodes. `dones` are ends of either
    kind if other flags mark terminal states, and terminal states if none do. `is_terminal` marks terminal
    observations: if `shares_next`, the step before leads to the marked one.
    """
    ends, terminated = np.zeros((2, num_steps), bool)
    if "is_first" in flags:
        flags = {**flags, "is_first": np.append(flags["is_first"][1:], False)}
    timeouts = flags.get("timeouts", terminated)
    for role, flag in flags.items():
        ends = ends if role == "masks" else ends | flag
    if "masks" in flags:
        terminated = ~flags["masks"]
        # An episode may continue after its goal is reached.
        ends = ends if ends.any() else terminated
    elif "terminals" in flags:
        terminated = flags["terminals"] if has_rewards or "timeouts" in flags else terminated
    elif "is_terminal" in flags:
        terminated = flags["is_terminal"]
        if shares_next:
            terminated = np.append(terminated[1:], False) & ~ends
    elif "dones" in flags:
        terminated = flags["dones"] & ~timeouts
    is_newest = np.arange(num_steps) == num_steps - 1
    return terminated, timeouts | (ends & ~terminated), ends | is_newest


def _as_flags(name: str, value: Any, num_steps: int) -> np.ndarray:
    """Returns flags, bool or 0 and 1 of any dtype, as `[N]` bool."""
    array = np.asarray(value)
    if array.size != num_steps or not ((array == 0) | (array == 1)).all():
        raise ValueError(
            f"{name} must be 0 or 1 for each of {num_steps} steps, got {validation.shown(value)}."
        )
    return array.reshape(-1) != 0
