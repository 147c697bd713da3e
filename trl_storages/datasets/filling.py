"""Makes a storage and fills it with transitions, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded

from trl_storages import arguments
from trl_storages.arguments import tracker
from trl_storages.datasets.transitions import Transitions
from trl_storages.keys import ACHIEVED_GOAL, DESIRED_GOAL, REWARD, key_path, next_key
from trl_storages.replay import ReplayStorage
from trl_storages.transforms import GoalRelabel, parts_of
from trl_storages.writing.fields import OUTCOME_FIELDS, Field

__all__ = ["BLOCK", "Block", "Recipe", "filled"]

#: A class of ready-made storages, or a function with the same arguments.
Recipe = Callable[..., ReplayStorage]
#: Rows written at a time: few calls, and little extra memory.
BLOCK = 1 << 16
#: Returns steps that are written in one call.
Block = Callable[[], TensorDict]


def filled(
    recipe: Recipe,
    transitions: Transitions,
    blocks: Sequence[Block],
    *,
    num_rows: int,
    longest_episode: int,
    options: Mapping[str, Any],
    progress: bool,
) -> ReplayStorage:
    """Makes a storage and writes blocks to it. If writing fails, its files are deleted.

    Args:
        recipe: called with the specs of observations and actions, and with options.
        transitions: determine the fields.
        blocks: all of the data.
        num_rows: of all of the data; the default of `storage_size`.
        longest_episode: number of rows in the longest episode.
        options: of the recipe.
        progress: whether to show progress.

    Raises:
        TypeError: the recipe does not make a `ReplayStorage`.
        ValueError: the longest episode does not fit, or the storage holds rows already.
    """
    recipe = arguments.function("recipe", recipe, "that makes a storage, such as HERReplayStorage")
    if "num_envs" in options:
        raise TypeError("num_envs can't be chosen: the episodes of a dataset lie in one lane.")
    size = arguments.integer("storage_size", options.get("storage_size", max(num_rows, 2)))
    if size < longest_episode:
        raise ValueError(
            f"an episode must fit, and the longest has {longest_episode} steps; got storage_size={size}."
        )
    fields, seen = transitions.fields, transitions.observation_keys
    placed = {*seen, *map(next_key, seen), *transitions.action_keys, *OUTCOME_FIELDS}
    placed |= {*arguments.keys("info_keys", options.get("info_keys", ()))}
    further = {key: field for key, field in fields.items() if key not in placed}
    if fields[REWARD] != OUTCOME_FIELDS[REWARD]:
        further[REWARD] = fields[REWARD]
    observations, actions = (
        _spec({key_path(key): fields[key] for key in group})
        for group in (seen, transitions.action_keys)
    )
    actions = actions["action"] if transitions.action_keys == ["action"] else actions
    further |= options.get("extra_fields") or {}
    storage = recipe(
        *(observations, actions), **{**options, "storage_size": size, "extra_fields": further}
    )
    arguments.instance("recipe", storage, ReplayStorage, what="what makes a ReplayStorage")
    if num_stored := len(storage):
        storage.close()
        raise ValueError(
            f"the storage must be empty for a dataset, and {options.get('path')} holds {num_stored} "
            "rows: go on with them by making the storage as usual, or choose another path."
        )
    relabel = None if transitions.has_rewards else _relabel_of(storage)
    try:
        for block in tracker("writing rows", progress)(blocks):
            steps = block()
            if relabel is not None:
                steps.set(REWARD, _rewards(relabel, steps))
            storage.extend(steps)
    except BaseException:
        storage.close(keep=False)
        raise
    # Later writes do not continue the data.
    storage.end_episodes()
    return storage


def _rewards(relabel: GoalRelabel, steps: TensorDict) -> torch.Tensor:
    """Returns the rewards of the desired goals of steps."""
    achieved, goals = (steps[next_key(key)] for key in (ACHIEVED_GOAL, DESIRED_GOAL))
    infos = {key: steps[key] for key in relabel.info_keys}
    found = relabel.reward_fn(achieved, goals, infos)  # type: ignore[misc]
    return torch.as_tensor(found).to(steps[REWARD].dtype).reshape(steps[REWARD].shape)


def _relabel_of(storage: ReplayStorage) -> GoalRelabel | None:
    """Returns the transform that computes rewards of desired goals, if the storage has one."""
    for part in parts_of(storage.transform):
        if isinstance(part, GoalRelabel) and part.reward_fn is not None:
            return part
    return None


def _spec(fields: Mapping[tuple[str, ...], Field]) -> Composite:
    """Returns the spec of nested entries."""
    spec = Composite()
    for path, (dtype, shape) in fields.items():
        if dtype.is_complex:
            raise TypeError(
                f"{'.'.join(path)!r} must be of real numbers, as TorchRL's specs are, got {dtype}."
            )
        spec[path if len(path) > 1 else path[0]] = Unbounded(shape, dtype=dtype)
    return spec
