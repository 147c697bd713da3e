"""Makes a storage from a replay buffer of Stable-Baselines3.

Letters: T steps of each environment, E environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages import arguments
from trl_storages.arrays import Transitions
from trl_storages.datasets.filling import Recipe, blocks_of, filled, info_at
from trl_storages.gym.fields import transition_fields
from trl_storages.keys import REWARD, key_path
from trl_storages.recipes import UniformReplayStorage
from trl_storages.replay import ReplayStorage
from trl_storages.signatures import answers_names

__all__ = ["from_stable_baselines3"]

_PARTS = ("observations", "actions", "rewards", "dones", "timeouts", "pos", "full", "buffer_size")


@answers_names
def from_stable_baselines3(
    buffer: Any,
    *,
    recipe: Recipe = UniformReplayStorage,
    float_dtype: torch.dtype | None = None,
    progress: bool = False,
    **options: Any,
) -> ReplayStorage:
    """Makes a storage from a replay buffer of Stable-Baselines3, with one lane for each environment.

    A lane holds the rows of its environment in time order, with the same episodes: a `done` that is not
    a timeout is terminal. A buffer with `optimize_memory_usage=True` does not know which ends are
    timeouts, nor the final observations: the last step of an episode gets its own observation as next.

    Args:
        buffer: `ReplayBuffer`, `DictReplayBuffer` or `HerReplayBuffer`.
        recipe: as in `from_arrays`.
        float_dtype: likewise.
        progress: likewise.
        **options: of the recipe. `storage_size` counts over all environments, by default the number of
            transitions in the buffer. `info_keys` are read from the infos of a
            `HerReplayBuffer(copy_info_dict=True)`.

    Returns:
        the storage.

    Raises:
        KeyError: no such info.
        TypeError: it is not such a buffer.
        ValueError: the buffer is empty; otherwise as in `from_arrays`.
    """
    if missing := [name for name in _PARTS if not hasattr(buffer, name)]:
        raise TypeError(
            "buffer must be a ReplayBuffer, DictReplayBuffer or HerReplayBuffer of Stable-Baselines3, "
            f"got {type(buffer).__name__}, which has no {missing}."
        )
    order = _order(buffer)
    if not len(order):
        raise ValueError("buffer must hold a transition at least, and is empty.")
    shapes = transition_fields(buffer.observation_space, buffer.action_space)
    del shapes[REWARD]
    infos = arguments.keys("info_keys", options.get("info_keys", ()))
    lanes = [
        Transitions(
            _lane(buffer, order, lane, infos),
            argument="buffer",
            float_dtype=float_dtype,
            fields=shapes,
        )
        for lane in range(buffer.n_envs)
    ]
    return filled(
        recipe,
        lanes[0],
        [
            block
            for number, lane in enumerate(lanes)
            for block in blocks_of(lane, [number] if len(lanes) > 1 else None)
        ],
        num_rows=sum(map(len, lanes)),
        longest_episode=max(lane.longest_episode for lane in lanes),
        num_envs=len(lanes),
        options=options,
        progress=progress,
    )


def _order(buffer: Any) -> np.ndarray:
    """Returns the positions of the T steps, oldest first."""
    if not buffer.full:
        return np.arange(buffer.pos)
    order = np.arange(buffer.pos, buffer.pos + buffer.buffer_size) % buffer.buffer_size
    # The next observation of the newest step overwrote the observation of the oldest one.
    found: np.ndarray = order[1:] if _is_compact(buffer) else order
    return found


def _is_compact(buffer: Any) -> bool:
    """Whether next observations are stored as the observations of the following position."""
    return getattr(buffer, "next_observations", None) is None


def _lane(buffer: Any, order: np.ndarray, lane: int, infos: list[NestedKey]) -> dict[str, Any]:
    """Returns the entries of one environment, by the names that `Transitions` knows."""

    def taken(values: Any, places: np.ndarray = order) -> Any:
        if isinstance(values, Mapping):
            return {name: part[places, lane] for name, part in values.items()}
        return values[places, lane]

    data = {
        name: taken(getattr(buffer, name)) for name in ("actions", "rewards", "dones", "timeouts")
    }
    data["observations"] = taken(buffer.observations)
    if not _is_compact(buffer):
        data["next_observations"] = taken(buffer.next_observations)
    else:
        # The final observation of an episode is unknown: use the last step's own observation.
        following = np.where(data["dones"] != 0, order, (order + 1) % buffer.buffer_size)
        data["next_observations"] = taken(buffer.observations, following)
    if infos and getattr(buffer, "infos", None) is None:
        raise KeyError(
            f"buffer must keep the infos {infos}, and keeps none: only HerReplayBuffer does, with "
            "copy_info_dict=True; leave info_keys out."
        )
    for key in infos:
        values = [info_at("buffer", info, key) for info in buffer.infos[order, lane]]
        data["/".join(key_path(key))] = np.asarray(values)
    return data
