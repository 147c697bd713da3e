"""Storages from Minari datasets, and Minari datasets from storages.

Letters: T steps of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiBinary
from tensordict import TensorDict, TensorDictBase

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.datasets.arrays import (
    BLOCK,
    Preset,
    blocks_of,
    columns_of,
    entries_of,
    filled,
    joined,
)
from trl_storages.presets import UniformReplayStorage
from trl_storages.writing.spaces import OUTCOME_FIELDS, TORCH_TO_NUMPY

__all__ = ["from_minari", "to_minari"]


def from_minari(
    dataset: Any,
    *,
    preset: Preset = UniformReplayStorage,
    float_dtype: torch.dtype | None = None,
    progress: bool = False,
    **options: Any,
) -> ReplayStorage:
    """Makes a storage from a Minari dataset, with its episodes.

    Args:
        dataset: a `minari.MinariDataset`, or the name of a local one.
        preset: as in `from_arrays`.
        float_dtype: likewise.
        progress: likewise.
        **options: of the preset. `info_keys` names the infos to store, as for `record`; the infos of
            resets are dropped.

    Returns:
        the storage.

    Raises:
        ImportError: the name of a dataset is given, and Minari is not installed.
        KeyError, TypeError, ValueError: as in `from_arrays`.
    """
    if isinstance(dataset, str):
        dataset = _minari_module().load_dataset(dataset)
    named = validation.keys("info_keys", options.get("info_keys", ()))
    infos = [keys.key_path(keys.info_key(key)) for key in named]
    numbers = dataset.episode_indices
    # Episodes of about one block are read together.
    at_once = max(1, BLOCK * len(numbers) // max(1, dataset.total_steps))

    def blocks() -> Iterator[TensorDict]:
        for start in range(0, len(numbers), at_once):
            group = dataset.iterate_episodes(numbers[start : start + at_once])
            paths = [entries_of(_path(episode, infos)) for episode in group]
            yield from blocks_of(columns_of(*joined(paths)), float_dtype)

    return filled(preset, blocks(), int(dataset.total_steps), options, progress=progress)


def _path(episode: Any, infos: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Returns a Minari episode as a dictionary of arrays.

    Raises:
        KeyError: an info is missing.
    """
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    path = {name: getattr(episode, name) for name in names}
    for key in infos:
        values = reduce(getitem, key[key[0] == "next" :], episode.infos)
        # Skip the infos of the reset, which come first.
        path["/".join(key)] = values[len(values) - len(episode.rewards) :]
    return path


def to_minari(
    storage: ReplayStorage,
    dataset_id: str,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    **metadata: Any,
) -> Any:
    """Writes the stored episodes as a Minari dataset, lane by lane, oldest first.

    An episode that was cut, or is still open, is truncated, and one that has lost its first steps starts
    later. Fields other than observations, actions, rewards and flags become infos, with zeros for the
    resets. Fields of a dtype that NumPy does not have, such as bfloat16, are written as float32.

    Args:
        storage: whose rows are written as stored; nothing else may write to it meanwhile.
        dataset_id: the name of the dataset, such as "pointmaze/mine-v0".
        observation_space: of the environment; None uses unbounded boxes of the stored dtypes and shapes.
        action_space: likewise; give it for discrete actions.
        **metadata: as in `minari.create_dataset_from_buffers`: env, algorithm_name, author, ... Images
            are stored as they are unless `jpeg_encoding=True`.

    Returns:
        the `minari.MinariDataset`.

    Raises:
        ImportError: Minari is not installed.
        RuntimeError: the storage is empty.
        ValueError: the observation of a row is not the next observation of the
            row before: Minari stores both as one. Nothing is written then.
    """
    index = storage.episodes
    table = index.table()
    if not len(table["first"]):
        raise RuntimeError("storage must hold rows to write, and is empty.")
    minari = _minari_module()
    buffers = [
        minari.data_collector.EpisodeBuffer(**_episode(rows))
        for rows in storage[index.live_slots()].cpu().split(table["length"].tolist())
    ]
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffers,
        observation_space=observation_space or _space(buffers[0].observations),
        action_space=action_space or _space(buffers[0].actions),
        **{"jpeg_encoding": False, **metadata},
    )


def _episode(rows: TensorDictBase) -> dict[str, Any]:
    """Returns the rows `[T]` of an episode as arguments of `EpisodeBuffer`."""
    fields = dict(rows.items(include_nested=True, leaves_only=True))
    observations, actions, infos = {}, {}, {}
    shared = keys.shared_keys(fields)
    known = {keys.INDEX, keys.TRAJECTORY_IDS, *OUTCOME_FIELDS, *map(keys.next_key, shared)}
    for key, values in fields.items():
        path = keys.key_path(key)
        if key in shared:
            after = fields[keys.next_key(key)]
            observations[path] = _array(torch.cat([values, after[-1:]]))
            if not ((after[:-1] == values[1:]) | (after.isnan()[:-1] & values.isnan()[1:])).all():
                raise ValueError(
                    f"each row must begin with the {key!r} that the row before it led to: write the "
                    "storage with on_gap='cut'."
                )
        elif path[0] == keys.ACTION:
            actions[path] = _array(values)
        elif key not in known:
            infos[path[path[0] == "next" :]] = _array(
                torch.cat([torch.zeros_like(values[:1]), values])
            )
    reward = rows[keys.REWARD]
    terminated, truncated = (rows[key].flatten() for key in (keys.TERMINATED, keys.TRUNCATED))
    truncated[-1] |= ~terminated[-1]
    seen = keys.nested(observations.items())
    return {
        "observations": seen[keys.OBSERVATION] if [*seen] == [keys.OBSERVATION] else seen,
        "actions": keys.nested(actions.items())[keys.ACTION],
        "rewards": _array(reward.flatten() if reward[0].numel() == 1 else reward),
        "terminations": terminated.numpy(),
        "truncations": truncated.numpy(),
        "infos": keys.nested(infos.items()),
    }


def _array(values: torch.Tensor) -> np.ndarray:
    """Returns values as an array; those of a dtype that NumPy lacks in single precision."""
    if values.dtype not in TORCH_TO_NUMPY:
        values = values.to(torch.complex64 if values.is_complex() else torch.float32)
    return values.numpy()


def _space(arrays: Any) -> gymnasium.Space[Any]:
    """Returns an unbounded space of stored entries."""
    if isinstance(arrays, Mapping):
        return Dict({name: _space(part) for name, part in arrays.items()})
    shape, kind = arrays.shape[1:], arrays.dtype.kind
    if kind == "b":
        return MultiBinary(shape)
    info = np.iinfo(arrays.dtype) if kind in "iu" else None
    low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
    return Box(low, high, shape, arrays.dtype.type)


def _minari_module() -> Any:
    try:
        import minari.data_collector
    except ImportError as error:
        raise ImportError(f"pip install 'trl-storages[minari]' (got {error}).") from error
    return minari
