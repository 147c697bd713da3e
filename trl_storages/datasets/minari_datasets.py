"""Replay buffers from Minari datasets, and Minari datasets from replay buffers.

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
from tensordict import TensorDictBase

from trl_storages import keys, validation
from trl_storages.buffer import ReplayStorage
from trl_storages.datasets.arrays import concatenate, read_arrays
from trl_storages.datasets.transitions import BATCH_STEPS, Preset, columns_of, create_and_fill
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
    """Creates a replay buffer with the episodes of a Minari dataset.

    Args:
        dataset: a `minari.MinariDataset`, or the name of a local one.
        preset: as in `from_arrays`.
        float_dtype: as in `from_arrays`.
        progress: as in `from_arrays`.
        **options: keywords of the preset. `info_keys` names the infos to store, as for `record`; the
            infos of resets are dropped.

    Returns:
        the replay buffer.

    Raises:
        ImportError: `dataset` is a name, and Minari is not installed.
        KeyError, TypeError, ValueError: as in `from_arrays`.
    """
    if isinstance(dataset, str):
        dataset = _minari_module().load_dataset(dataset)
    info_keys = validation.keys("info_keys", options.get("info_keys", ()))
    info_paths = [keys.key_path(keys.info_key(key)) for key in info_keys]
    numbers = dataset.episode_indices
    # The episodes of about one batch are read together.
    num_episodes = max(1, BATCH_STEPS * len(numbers) // max(1, dataset.total_steps))

    def parts() -> Iterator[Any]:
        for start in range(0, len(numbers), num_episodes):
            episodes = dataset.iterate_episodes(numbers[start : start + num_episodes])
            paths = [read_arrays(_arrays_of(episode, info_paths)) for episode in episodes]
            yield columns_of(*concatenate(paths))

    size = int(dataset.total_steps)
    return create_and_fill(
        preset, parts(), size, options, float_dtype=float_dtype, progress=progress
    )


def _arrays_of(episode: Any, info_paths: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Returns a Minari episode as a dictionary of arrays.

    Raises:
        KeyError: an info is missing.
    """
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    arrays = {name: getattr(episode, name) for name in names}
    for path in info_paths:
        values = reduce(getitem, path[path[0] == "next" :], episode.infos)
        # Skip the infos of the reset, which come first.
        arrays["/".join(path)] = values[len(values) - len(episode.rewards) :]
    return arrays


def to_minari(
    storage: ReplayStorage,
    dataset_id: str,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    **metadata: Any,
) -> Any:
    """Writes the stored episodes as a Minari dataset, lane by lane, oldest first.

    A split or running episode is written as a truncated one. If the first steps of an episode were
    evicted, the dataset's episode begins with the oldest stored step. Fields other than observations,
    actions, rewards and flags become infos, with zeros for the resets. Fields of a dtype that NumPy
    lacks, such as bfloat16, are written as float32.

    Args:
        storage: the replay buffer. Nothing may be written to it until this function returns.
        dataset_id: the name of the dataset, such as "pointmaze/mine-v0".
        observation_space: space of the environment's observations; None uses unbounded boxes of the
            stored dtypes and shapes.
        action_space: space of the environment's actions; None as for observations, so pass it for
            discrete actions.
        **metadata: keywords of `minari.create_dataset_from_buffers`: env, algorithm_name, author, ...
            Images are stored without compression unless `jpeg_encoding=True`.

    Returns:
        the `minari.MinariDataset`.

    Raises:
        ImportError: Minari is not installed.
        RuntimeError: the replay buffer is empty.
        ValueError: an observation is not the next observation of the transition before: Minari stores
            both as one. Nothing is written then.
    """
    index = storage.episodes
    table = index.table()
    if not len(table["first"]):
        raise RuntimeError("the replay buffer is empty: nothing can be written to a dataset.")
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
    """Returns the transitions `[T]` of an episode as arguments of `EpisodeBuffer`."""
    fields = dict(rows.items(include_nested=True, leaves_only=True))
    observations, actions, infos = {}, {}, {}
    observation_keys = keys.shared_keys(fields)
    next_keys = map(keys.next_key, observation_keys)
    not_infos = {keys.INDEX, keys.TRAJECTORY_IDS, *OUTCOME_FIELDS, *next_keys}
    for key, values in fields.items():
        path = keys.key_path(key)
        if key in observation_keys:
            ends = fields[keys.next_key(key)]
            observations[path] = _array(torch.cat([values, ends[-1:]]))
            if not ((ends[:-1] == values[1:]) | (ends.isnan()[:-1] & values.isnan()[1:])).all():
                raise ValueError(
                    f"{key!r} of a transition is not the next value of the transition before it. Minari "
                    "stores both as one: write the transitions with on_gap='cut', which splits episodes."
                )
        elif path[0] == keys.ACTION:
            actions[path] = _array(values)
        elif key not in not_infos:
            infos[path[path[0] == "next" :]] = _array(
                torch.cat([torch.zeros_like(values[:1]), values])
            )
    reward = rows[keys.REWARD]
    terminated, truncated = (rows[key].flatten() for key in (keys.TERMINATED, keys.TRUNCATED))
    truncated[-1] |= ~terminated[-1]
    tree = keys.nested(observations.items())
    return {
        "observations": tree[keys.OBSERVATION] if [*tree] == [keys.OBSERVATION] else tree,
        "actions": keys.nested(actions.items())[keys.ACTION],
        "rewards": _array(reward.flatten() if reward[0].numel() == 1 else reward),
        "terminations": terminated.numpy(),
        "truncations": truncated.numpy(),
        "infos": keys.nested(infos.items()),
    }


def _array(values: torch.Tensor) -> np.ndarray:
    """Returns values as an array, in single precision if NumPy lacks their dtype."""
    if values.dtype not in TORCH_TO_NUMPY:
        values = values.to(torch.complex64 if values.is_complex() else torch.float32)
    return values.numpy()


def _space(arrays: Any) -> gymnasium.Space[Any]:
    """Returns an unbounded space for stored arrays."""
    if isinstance(arrays, Mapping):
        return Dict({name: _space(array) for name, array in arrays.items()})
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
