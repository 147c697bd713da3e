"""Creates a replay buffer for batches of transitions, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torchrl.data import Composite, Unbounded

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.keys import ACHIEVED_GOAL, ACTION, DESIRED_GOAL, REWARD, next_key
from trl_storages.transforms import GoalRelabel, goal_values
from trl_storages.writing.spaces import OUTCOME_FIELDS, as_field

__all__ = ["Preset", "create_and_fill"]

#: A class of replay buffers, or a function with the same arguments.
Preset = Callable[..., ReplayStorage]


def create_and_fill(
    preset: Preset,
    batches: Iterator[TensorDict],
    num_transitions: int,
    options: Mapping[str, Any],
    *,
    progress: bool,
) -> ReplayStorage:
    """Creates a replay buffer and writes batches of transitions. If writing fails, its files are deleted.

    Raises:
        ValueError: the replay buffer already holds transitions, or has several environments.
    """
    if (first := next(batches, None)) is None:
        raise ValueError("a dataset must have steps, got none.")
    extra_fields = {**(options.get("extra_fields") or {})}
    storage = _create(preset, first, {"storage_size": max(num_transitions, 2), **options})
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


def _create(preset: Preset, batch: TensorDict, options: Mapping[str, Any]) -> ReplayStorage:
    """Creates an empty replay buffer for the fields of a batch.

    Raises:
        ValueError: the replay buffer already holds transitions, or has several environments.
    """
    info_keys = {*map(keys.info_key, validation.keys("info_keys", options.get("info_keys", ())))}
    extra_fields = {**(options.get("extra_fields") or {})}
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
    options = {**options, "extra_fields": {**detected, **extra_fields}}
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
