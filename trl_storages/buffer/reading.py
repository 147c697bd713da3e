"""Reads transitions as they are stored: slices of the history, slots, keys, and whole episodes.

Letters: n episodes, T steps.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from trl_storages import keys, validation
from trl_storages.storage import PackedStorage

__all__ = ["read", "sample_episodes"]


def read(storage: PackedStorage, index: Any) -> Any:
    """Reads transitions by a slice of the history, by slots or a mask; or one field of all of them.

    Args:
        storage: holds the transitions.
        index: a slice in time order, oldest transition first; slots as an int, list or tensor; a mask
            over the slots; or a key.

    Raises:
        IndexError: a slot holds no transition.
        TypeError: the index is none of these.
    """
    if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
        return read(storage, slice(None))[index]
    if isinstance(index, slice):
        view = storage.view()
        slots = torch.from_numpy(view.episodes.slots_by_age().numpy()[index].copy())
        batch, overwritten = view.read(slots), view.overwritten(slots)
        return batch if overwritten is None else batch[~overwritten]
    if isinstance(index, tuple):
        raise TypeError(
            f"an index must be a slice, an int, a list, a mask, integer slots or a key, got {index!r}."
        )
    slots = validation.values("index", index)
    is_mask = slots.dtype is torch.bool
    return storage.get(validation.slots(slots.nonzero().squeeze(-1) if is_mask else slots))


def sample_episodes(
    storage: PackedStorage, num_episodes: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Samples complete, finished episodes `[n, T]`, padded with zeros where the mask is false.

    Episodes that another process overwrites while they are read are replaced by others.
    """
    batches: list[TensorDictBase] = []
    while (missing := num_episodes - sum(map(len, batches))) > 0:
        batches.append(_sample_once(storage, missing, generator))
    if len(batches) == 1:
        return batches[0]
    longest = max(batch.shape[1] for batch in batches)
    return torch.cat([_padded(batch, longest) for batch in batches])


def _sample_once(
    storage: PackedStorage, num_episodes: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Samples episodes, and returns those that were not overwritten while they were read."""
    view = storage.view()
    first = view.episodes.random_episodes(num_episodes, generator)
    lengths = view.episodes.num_after(first) + 1
    steps = torch.arange(int(lengths.max()), device="cpu").expand(num_episodes, -1)
    slots = view.episodes.shift(first[:, None], steps.minimum(lengths[:, None] - 1))
    mask = (steps < lengths[:, None]).to(storage.device)
    batch, overwritten = view.read(slots, mask), view.overwritten(slots)
    batch = batch.set(keys.INDEX, slots.to(storage.device)).set(keys.MASK, mask)
    return batch if overwritten is None else batch[~overwritten.any(1)]


def _padded(batch: TensorDictBase, length: int) -> TensorDictBase:
    """Returns episodes `[n, T]` as `[n, length]`, with zeros at the end."""
    zeros = torch.zeros_like(batch[:, :1]).expand(-1, length - batch.shape[1])
    return torch.cat([batch, zeros], 1)
