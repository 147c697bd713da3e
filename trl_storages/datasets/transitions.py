"""From the arrays of a dataset to a replay buffer: finds its transitions, and writes them.

A field of n transitions is a *column*: an array `[N, ...]`, and the position in it of each transition's
value. Columns can share an array: next observations take the observations of the following positions,
and desired goals take the goals that are achieved at the ends of episodes.

Letters: N steps of the arrays, n transitions, B transitions of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict
from torchrl.data import Composite, Unbounded

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, REWARD, next_key
from trl_storages.transforms import GoalRelabel, goal_values
from trl_storages.writing.spaces import OUTCOME_FIELDS, as_field, as_tensor

__all__ = ["BATCH_STEPS", "FLAGS", "Arrays", "Preset", "columns_of", "create_and_fill"]

#: A class of replay buffers, or a function with the same arguments.
Preset = Callable[..., ReplayStorage]
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


#: `[N, ...]` values, and `[n]` the position in them of each transition's value.
Column = tuple[np.ndarray, np.ndarray]


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
    columns = {key: (array, positions) for key, array in fields.items()}
    if shares_next:
        following = positions + ~is_last[positions]
        columns |= {next_key(key): (fields[key], following) for key in observation_keys}
    if sets_goals:
        ranks = np.where(done[positions], np.arange(len(positions)), len(positions) - 1)
        end_ranks = np.minimum.accumulate(ranks[::-1])[::-1]
        achieved, achieved_at = columns[next_key(ACHIEVED_GOAL)]
        goals = achieved, achieved_at[end_ranks]
        columns |= {DESIRED_GOAL: goals, next_key(DESIRED_GOAL): goals}
    return columns


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


def create_and_fill(
    preset: Preset,
    parts: Iterable[Mapping[NestedKey, Column]],
    num_transitions: int,
    options: dict[str, Any],
    *,
    float_dtype: torch.dtype | None,
    progress: bool,
) -> ReplayStorage:
    """Creates a replay buffer and writes transitions. If writing fails, its files are deleted.

    Args:
        preset: the class of the replay buffer.
        parts: columns of transitions, from `columns_of`, one part after another.
        num_transitions: number of transitions, or more.
        options: keywords of the preset.
        float_dtype: dtype to which float64 values are converted; None keeps float64.
        progress: whether to show a progress bar.

    Raises:
        ValueError: the replay buffer already holds transitions, or has several environments.
    """
    batches = (batch for columns in parts for batch in _batches_of(columns, float_dtype))
    if (first := next(batches, None)) is None:
        raise ValueError("a dataset must have steps, got none.")
    validation.replace_deprecated(options, recipe="preset")
    extra_fields = {**(options.pop("extra_fields", None) or {})}
    options = {"storage_size": max(num_transitions, 2), "preset": preset, **options}
    storage = _create(first, extra_fields, **options)
    relabel = next((part for part in storage.components() if isinstance(part, GoalRelabel)), None)
    steps: Iterable[TensorDict] = chain([first], batches)
    try:
        for batch in _with_progress(steps, num_transitions) if progress else steps:
            for key, (dtype, shape) in extra_fields.items():
                values = validation.values(repr(key), batch[key])
                batch[key] = as_field(values, dtype, (len(batch), *shape), repr(key))
            if REWARD not in batch.keys(True):
                batch[REWARD] = _rewards(relabel, batch)
            storage.extend(batch)
    except BaseException:
        storage.close(keep=False)
        raise
    # Later writes do not continue the data.
    storage.end_episodes()
    return storage


def _batches_of(
    columns: Mapping[NestedKey, Column], float_dtype: torch.dtype | None
) -> Iterator[TensorDict]:
    """Yields the transitions in batches; float64 values are converted to `float_dtype`, if given."""
    num_transitions = len(columns[keys.DONE][1])
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


def _create(
    batch: TensorDict, extra_fields: dict[NestedKey, Any], *, preset: Preset, **options: Any
) -> ReplayStorage:
    """Creates an empty replay buffer for the fields of a batch.

    Raises:
        ValueError: the replay buffer already holds transitions, or has several environments.
    """
    info_keys = {*map(keys.info_key, validation.keys("info_keys", options.get("info_keys", ())))}
    fields = {key: (leaf.dtype, leaf.shape[1:]) for key, leaf in batch.items(True, True)}
    observation_keys = {*keys.shared_keys(fields)} - info_keys - extra_fields.keys()
    next_keys = {*map(next_key, observation_keys)}
    observations, actions = Composite(), Composite()
    detected: dict[NestedKey, Any] = {}
    for key, (dtype, shape) in fields.items():
        if key in observation_keys:
            observations[key] = Unbounded(shape, dtype=dtype)
        elif keys.key_path(key)[0] == ACTION:
            actions[key] = Unbounded(shape, dtype=dtype)
        elif key not in info_keys | next_keys and OUTCOME_FIELDS.get(key) != fields[key]:
            detected[key] = dtype, shape
    options["extra_fields"] = detected | extra_fields
    storage = preset(observations, actions, **options)
    num_stored, num_envs = len(storage), storage.episodes.num_envs
    if num_stored or num_envs > 1:
        storage.close(keep=num_stored > 0)
        raise ValueError(
            "a dataset needs an empty replay buffer with one environment, but this replay buffer holds "
            f"{num_stored} transitions and has num_envs={num_envs}. Pass another path, and no num_envs."
        )
    return storage


def _with_progress(batches: Iterable[TensorDict], num_transitions: int) -> Iterator[TensorDict]:
    from tqdm import tqdm

    with tqdm(total=num_transitions, desc="writing transitions", leave=False) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch))


def _rewards(relabel: GoalRelabel | None, batch: TensorDict) -> torch.Tensor:
    """Returns the rewards `[B, 1]` for the desired goals of a batch, NaN without a `reward_fn`."""
    if relabel is None or relabel.reward_fn is None:
        return torch.full((len(batch), 1), torch.nan, device="cpu")
    achieved, goals = (batch[next_key(key)] for key in (ACHIEVED_GOAL, DESIRED_GOAL))
    stored = batch.keys(True)
    infos = {key: batch[keys.stored_info(key, stored)] for key in relabel.info_keys}
    rewards = goal_values("reward_fn", relabel.reward_fn, achieved, goals, infos)
    return rewards.float().reshape(-1, 1)
