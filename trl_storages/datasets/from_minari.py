"""Makes a storage from a Minari dataset.

Letters: T steps of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey

from trl_storages import arguments
from trl_storages.arrays import Transitions
from trl_storages.datasets.filling import Block, Recipe, filled, grouped, info_at
from trl_storages.datasets.from_arrays import join_paths
from trl_storages.gym.fields import transition_fields
from trl_storages.keys import REWARD, key_path
from trl_storages.recipes import UniformReplayStorage
from trl_storages.replay import ReplayStorage

__all__ = ["from_minari", "minari_module"]


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
        dataset = minari_module("from_minari").load_dataset(dataset)
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
        return Transitions(joined, ends, argument="dataset", float_dtype=float_dtype, fields=shapes)

    def block(group: Sequence[int]) -> Block:
        return Block(lambda: read([numbers[at] for at in group]).tensordict())

    return filled(
        recipe,
        read(numbers[:1]),
        [block(group) for group in grouped(lengths)],
        num_rows=sum(lengths),
        longest_episode=max(lengths),
        options=options,
        progress=progress,
    )


def minari_module(what: str) -> Any:
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
        values = info_at("dataset", episode.infos, key)
        # Skip the infos of the reset, which come first.
        path["/".join(key_path(key))] = values[len(values) - len(episode.rewards) :]
    return path
