"""Raw access to stored rows: reads, episode lists and draws of whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import expand_as_right
from torchrl.data import Storage, Trajectory, filter_trajectories

from trl_storages import keys
from trl_storages.kernels.memory import on_device
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.ring.naming import episode_slots, is_key, slots_of

__all__ = ["draw_episodes", "list_trajectories", "read_rows", "refuse_changes"]


def read_rows(storage: Storage, index: Any) -> Any:
    """Reads rows or an entry; `index` is as in `ReplayStorage.__getitem__`."""
    episodes = episodes_of(storage)
    if is_key(index):
        return _rows(storage, slots_of(episodes, slice(None)))[index]
    return _rows(storage, slots_of(episodes, index))


def refuse_changes() -> NoReturn:
    """Raises the error for a change of stored rows."""
    raise RuntimeError(
        "stored rows are never changed in place: write others by extend() or record()."
    )


def _rows(storage: Storage, slots: torch.Tensor) -> TensorDictBase:
    # Always gather: a single slot would otherwise return a view of the storage.
    return storage.get(slots.reshape(-1)).reshape(slots.shape)


def list_trajectories(
    storage: Storage,
    predicate: Callable[[Trajectory], bool] | None,
    trajectory_key: NestedKey | None,
) -> list[Trajectory]:
    """Lists episodes, lane by lane; the arguments are as in `ReplayStorage.query`."""
    episodes: EpisodeIndex = episodes_of(storage)
    if not len(episodes):
        return []
    listed = episodes.episodes()
    slots, number = episode_slots(episodes, listed["first"], listed["length"])
    rows = storage.get(slots)
    if trajectory_key is None:
        trajectory_key = keys.TRAJECTORY_IDS
        rows.set(trajectory_key, on_device(number, rows.device))
    return filter_trajectories(rows, predicate, trajectory_key=trajectory_key)


def draw_episodes(storage: Storage, n: int, generator: torch.Generator | None) -> TensorDictBase:
    """Draws whole episodes `[n, T]`; see `ReplayStorage.sample_episodes`."""
    episodes = episodes_of(storage)
    first = episodes.random_episodes(n, generator).unsqueeze(1)
    length = episodes.ahead(first) + 1
    step = torch.arange(int(length.max()), device=first.device)
    index = episodes.shift(first, step.minimum(length - 1))
    batch = storage.get(index)
    mask = on_device(step < length, batch.device)
    # `where` supports more dtypes than `masked_fill`.
    batch = batch.apply(
        lambda leaf: torch.where(expand_as_right(mask, leaf), leaf, leaf.new_zeros(()))
    )
    return batch.set(keys.INDEX, on_device(index, batch.device)).set(keys.MASK, mask)
