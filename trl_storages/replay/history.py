"""Rows as they were stored: by slot or in time order, and whole episodes.

Letters: n episodes, T steps of the longest.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, pad
from tensordict.utils import expand_as_right

from trl_storages import keys
from trl_storages.index.naming import is_key
from trl_storages.packed.storage import PackedStorage

__all__ = ["draw_episodes", "read"]


def read(storage: PackedStorage, index: Any) -> Any:
    """Reads rows by a slice of the history, oldest first, by slots or a mask; or an entry of all.

    Raises:
        IndexError: a slot holds no row.
        TypeError: the index is none of these.
    """
    if is_key(index):
        return read(storage, slice(None))[index]
    if isinstance(index, slice):
        seen = storage.look()
        slots = storage.episodes.slots_by_age()
        slots = slots[torch.tensor([*range(len(slots))[index]], dtype=torch.int64)]
        batch, gone = storage.read(slots, seen)
        return batch if gone is None else batch[~gone]
    if isinstance(index, tuple) or index is None or index is Ellipsis:
        raise TypeError(
            "rows have one dimension: index them by a slice, an int, a list, a mask or a tensor of "
            f"slots, or by a key; got {index!r}."
        )
    slots = torch.as_tensor(index, device="cpu")
    if slots.dtype is torch.bool:
        slots = slots.nonzero().squeeze(-1)
    if slots.numel() and (slots.is_floating_point() or slots.is_complex()):
        raise TypeError(f"slots must be integers, got {index!r}.")
    return storage.get(slots.long())


def draw_episodes(
    storage: PackedStorage, n: int, generator: torch.Generator | None
) -> TensorDictBase:
    """Draws whole, finished episodes `[n, T]`, padded with zeros where the mask says so.

    Those that gave way while they were read are drawn again.
    """
    parts: list[TensorDictBase] = []
    while (missing := n - sum(map(len, parts))) > 0:
        seen = storage.look()
        batch, gone = _draw_episodes(storage, seen, missing, generator)
        parts.append(batch if gone is None else batch[~gone])
    longest = max(part.shape[1] for part in parts)
    padded = [pad(part, [0, 0, 0, longest - part.shape[1]]) for part in parts]
    return torch.cat(padded) if len(parts) > 1 else parts[0]


def _draw_episodes(
    storage: PackedStorage, seen: Any, n: int, generator: torch.Generator | None
) -> tuple[TensorDictBase, torch.Tensor | None]:
    """Returns episodes `[n, T]`, and which of them `[n]` gave way."""
    episodes = storage.episodes
    first = episodes.random_episodes(n, generator)
    length = episodes.ahead(first) + 1
    step = torch.arange(int(length.max())).expand(n, -1)
    offset = step.minimum(length[:, None] - 1)
    slots = episodes.shift(first[:, None].expand_as(step).flatten(), offset.flatten()).view(n, -1)
    batch, gone = storage.read(slots, seen)
    mask = (step < length[:, None]).to(storage.device)
    batch = batch.apply(
        lambda leaf: torch.where(expand_as_right(mask, leaf), leaf, leaf.new_zeros(()))
    )
    batch = batch.set(keys.INDEX, slots.to(storage.device)).set(keys.MASK, mask)
    return batch, None if gone is None else gone.any(1)
