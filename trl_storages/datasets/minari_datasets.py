"""Storages from Minari datasets, and Minari datasets from storages.

Letters: T steps of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiBinary
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages import arguments
from trl_storages.arguments import tracker
from trl_storages.datasets.filling import BLOCK, Recipe, filled
from trl_storages.datasets.from_arrays import join_paths
from trl_storages.datasets.transitions import Transitions
from trl_storages.index.whole_episodes import episode_slots
from trl_storages.keys import (
    ACTION,
    DONE,
    INDEX,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRAJECTORY_IDS,
    TRUNCATED,
    key_path,
    nested,
    next_key,
    shared_keys,
)
from trl_storages.recipes import UniformReplayStorage
from trl_storages.replay import ReplayStorage
from trl_storages.writing.fields import TORCH_TO_NUMPY, Field, transition_fields

__all__ = ["from_minari", "to_minari"]


def from_minari(
    dataset: Any,
    *,
    recipe: Recipe = UniformReplayStorage,
    float_dtype: torch.dtype | None = None,
    progress: bool = False,
    **options: Any,
) -> ReplayStorage:
    """Makes a storage from a Minari dataset, with its episodes.

    Args:
        dataset: a `minari.MinariDataset`, or the name of a local one.
        recipe: as in `from_arrays`.
        float_dtype: likewise.
        progress: likewise.
        **options: of the recipe. `info_keys` names the infos to store, as for `record`; the infos of
            resets are dropped.

    Returns:
        the storage.

    Raises:
        ImportError: the name of a dataset is given, and Minari is not installed.
        KeyError, TypeError, ValueError: as in `from_arrays`.
    """
    if isinstance(dataset, str):
        dataset = _minari_module("from_minari").load_dataset(dataset)
    if not hasattr(dataset, "iterate_episodes"):
        raise TypeError(
            f"dataset must be a MinariDataset or the name of one, got {type(dataset).__name__}."
        )
    info_keys = arguments.keys("info_keys", options.get("info_keys", ()))
    shapes = transition_fields(dataset.observation_space, dataset.action_space)
    del shapes[REWARD]
    numbers = [int(number) for number in dataset.episode_indices]
    described = dataset.storage.get_episode_metadata(numbers)
    lengths = [int(episode["total_steps"]) for episode in described]
    if not sum(lengths):
        raise ValueError("dataset must hold an episode at least, got none.")

    def read(episodes: Sequence[int]) -> Transitions:
        paths = [_path(episode, info_keys) for episode in dataset.iterate_episodes(episodes)]
        joined, ends = join_paths(paths)
        return Transitions(joined, ends, float_dtype=float_dtype, fields=shapes)

    def block(group: Sequence[int]) -> TensorDict:
        transitions = read([numbers[at] for at in group])
        return transitions.block(0, len(transitions))

    return filled(
        recipe,
        read(numbers[:1]),
        [partial(block, group) for group in _grouped(lengths)],
        num_rows=sum(lengths),
        longest_episode=max(lengths),
        options=options,
        progress=progress,
    )


def _grouped(lengths: Sequence[int]) -> list[list[int]]:
    """Groups the numbers of episodes, each group with about a block of steps."""
    group = (np.cumsum(lengths) - lengths) // BLOCK
    ends = np.flatnonzero(np.diff(group)) + 1
    return [part.tolist() for part in np.split(np.arange(len(lengths)), ends)]


def _path(episode: Any, info_keys: Sequence[NestedKey]) -> dict[str, Any]:
    """Returns a Minari episode in the form that `join_paths` takes.

    Raises:
        KeyError: an info is missing.
    """
    path = {
        "observations": episode.observations,
        "actions": episode.actions,
        "rewards": episode.rewards,
        "terminations": episode.terminations,
        "truncations": episode.truncations,
    }
    for key in info_keys:
        values = _info(episode.infos, key)
        # Skip the infos of the reset, which come first.
        path["/".join(key_path(key))] = values[len(values) - len(episode.rewards) :]
    return path


def _info(infos: Any, key: NestedKey) -> Any:
    value = infos
    for name in key_path(key)[key_path(key)[0] == "next" :]:
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(
                f"dataset must have the infos of info_keys, and {key!r} is missing; "
                f"there are {sorted(infos or {})}."
            )
        value = value[name]
    return value


def to_minari(
    storage: ReplayStorage,
    dataset_id: str,
    *,
    observation_space: gymnasium.Space[Any] | None = None,
    action_space: gymnasium.Space[Any] | None = None,
    progress: bool = False,
    **metadata: Any,
) -> Any:
    """Writes the stored episodes as a Minari dataset, lane by lane, oldest first.

    An episode that was cut, or is still open, is truncated, and one that has lost its first steps starts
    later. Fields other than observations, actions, rewards and flags become infos, with zeros for the
    resets.

    Args:
        storage: whose rows are written as stored.
        dataset_id: the name of the dataset, such as "pointmaze/mine-v0".
        observation_space: of the environment; None uses unbounded boxes of the stored dtypes and shapes.
        action_space: likewise; it must be given for scalar integer actions.
        progress: whether to show progress.
        **metadata: as in `minari.create_dataset_from_buffers`: env, algorithm_name, author, ... Images
            are stored as they are unless `jpeg_encoding=True`.

    Returns:
        the `minari.MinariDataset`.

    Raises:
        ImportError: Minari is not installed.
        RuntimeError: the storage is empty; or another process or thread overwrites its episodes
            meanwhile, which leaves a partial dataset.
        ValueError: a space must be given, or the observation of a row is not the next observation of the
            row before: Minari stores both as one. Nothing is written then.
    """
    arguments.instance("storage", storage, ReplayStorage)
    arguments.instance("dataset_id", dataset_id, str, what="the name of a dataset")
    progress = arguments.flag("progress", progress)
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if space is not None:
            arguments.instance(name, space, gymnasium.Space, what="a gymnasium space or None")
    if not len(storage):
        raise RuntimeError("storage must hold rows to write, and is empty.")
    minari = _minari_module("to_minari")
    episodes = _Episodes(storage)
    if observation_space is None:
        observation_space = _space(episodes.observations, OBSERVATION, "observation_space")
    if action_space is None:
        action_space = _space(episodes.actions, ACTION, "action_space")
    for group in tracker("checking rows", progress)(episodes.groups):
        for _ in episodes.read(group):
            pass
    dataset = None
    for group in tracker("writing rows", progress)(episodes.groups):
        buffers = [minari.data_collector.EpisodeBuffer(**each) for each in episodes.read(group)]
        if dataset is None:
            dataset = minari.create_dataset_from_buffers(
                dataset_id,
                buffers,
                observation_space=observation_space,
                action_space=action_space,
                **{"jpeg_encoding": False, **metadata},
            )
        else:
            dataset.update_dataset_from_buffer(buffers)
    return dataset


class _Episodes:
    """The stored episodes in Minari's form.

    Args:
        storage: that holds them.
    """

    def __init__(self, storage: ReplayStorage) -> None:
        self._storage, index = storage, storage.episodes
        table = index.episodes()
        self._first, self._length = table["first"], table["length"]
        self._first_steps = index.steps_of(self._first)
        #: Groups of episode numbers, each read in one call.
        self.groups = _grouped(self._length.tolist())
        fields = {
            key: (leaf.dtype, leaf.shape[1:])
            for key, leaf in storage[self._first[:1]].items(True, True)
            if key not in (INDEX, TRAJECTORY_IDS)
        }
        #: Key -> field of the observations, which exist before and after each step, and of actions.
        self.observations = {key: fields[key] for key in shared_keys(fields)}
        self.actions = {key: field for key, field in fields.items() if key_path(key)[0] == ACTION}
        needed = (REWARD, TERMINATED, TRUNCATED)
        if not (self.observations and self.actions) or any(key not in fields for key in needed):
            raise ValueError(
                f"storage must have observations, actions and {needed}; has {[*fields]}."
            )
        seen = {*self.observations, *map(next_key, self.observations), *self.actions}
        self._infos = [key for key in fields if key not in {*seen, *needed, DONE}]

    def _rows(self, group: Sequence[int]) -> Iterator[TensorDictBase]:
        """Yields the rows `[T]` of each episode."""
        index = self._storage.episodes
        slots, _ = episode_slots(index, self._first[group], self._length[group])
        try:
            rows = self._storage[slots].cpu()
            # Detect overwritten rows: the first ones of an episode go first.
            is_there = torch.equal(index.steps_of(self._first[group]), self._first_steps[group])
        except IndexError:
            is_there = False
        if not is_there:
            raise RuntimeError(
                "storage must keep its episodes until they are written out, and some were replaced "
                "meanwhile: pause what writes to it, or write out a copy (dumps, and loads elsewhere)."
            )
        yield from rows.split(self._length[group].tolist())

    def read(self, group: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yields episodes as arguments of `EpisodeBuffer`.

        Raises:
            ValueError: a row does not continue the row before it.
        """
        for number, rows in zip(group, self._rows(group), strict=True):
            observations = {}
            for key in self.observations:
                now, after = rows[key], rows[next_key(key)]
                observations[key] = torch.cat([now, after[-1:]])
                if not ((after[:-1] == now[1:]) | (after.isnan()[:-1] & now.isnan()[1:])).all():
                    raise ValueError(
                        f"each row must begin with the {key!r} that the row before it led to, and one of "
                        f"episode {number} does not: write the storage with on_gap='cut'."
                    )
            terminated, truncated = (rows[key].flatten() for key in (TERMINATED, TRUNCATED))
            truncated[-1] |= ~terminated[-1]
            reward = rows[REWARD]
            infos = {
                key[1:] if key_path(key)[0] == "next" else key: torch.cat(
                    [torch.zeros_like(rows[key][:1]), rows[key]]
                )
                for key in self._infos
            }
            yield {
                "observations": _tree(observations, OBSERVATION),
                "actions": _tree({key: rows[key] for key in self.actions}, ACTION),
                "rewards": (reward.flatten() if reward[0].numel() == 1 else reward).numpy(),
                "terminations": terminated.numpy(),
                "truncations": truncated.numpy(),
                "infos": _tree(infos),
            }


def _tree(leaves: Mapping[NestedKey, torch.Tensor], single: NestedKey = "") -> Any:
    """Nests arrays; a sole entry with the key `single` is returned as its array."""
    return _nested({key: leaf.numpy() for key, leaf in leaves.items()}, single)


def _space(fields: Mapping[NestedKey, Field], single: NestedKey, argument: str) -> Any:
    """Returns the space of stored entries, nested as by `_tree`."""
    spaces = {key: _leaf_space(key, field, argument) for key, field in fields.items()}
    return _dict_space(_nested(spaces, single))


def _nested(leaves: Mapping[NestedKey, Any], single: NestedKey) -> Any:
    if [*leaves] == [single]:
        return leaves[single]
    paths = ((key_path(key), leaf) for key, leaf in leaves.items())
    # All actions are under "action".
    return nested((path[path[0] == single :] or path, leaf) for path, leaf in paths)


def _dict_space(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return Dict({name: _dict_space(part) for name, part in tree.items()})


def _leaf_space(key: NestedKey, field: Field, argument: str) -> gymnasium.Space[Any]:
    dtype, shape = field
    if dtype is torch.bool:
        return MultiBinary(shape)
    if dtype.is_floating_point and dtype in TORCH_TO_NUMPY:
        return Box(-np.inf, np.inf, shape, TORCH_TO_NUMPY[dtype].type)
    if dtype not in TORCH_TO_NUMPY or dtype.is_complex or not shape:
        raise ValueError(
            f"{argument} must be given, as what is stored does not tell it: {key!r} is {dtype} "
            f"{list(shape)}; pass that of the environment."
        )
    info = np.iinfo(TORCH_TO_NUMPY[dtype])
    return Box(info.min, info.max, shape, TORCH_TO_NUMPY[dtype].type)


def _minari_module(what: str) -> Any:
    """Imports Minari, with everything that the function `what` needs.

    Raises:
        ImportError: Minari is not installed.
    """
    try:
        import minari.data_collector
    except ImportError as error:
        raise ImportError(
            f"{what} needs Minari: pip install 'trl-storages[minari]' (got {error})."
        ) from error
    return minari
