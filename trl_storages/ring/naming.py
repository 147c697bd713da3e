"""Resolves user-given lanes and row indices: numbers, masks, slots, and slices of the history by age.

Letters: E lanes (environments), B any shape of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from trl_storages.ring.index import EpisodeIndex

__all__ = ["Lanes", "episode_slots", "is_key", "named_lanes", "slots_of"]

Lanes = Sequence[int] | torch.Tensor | None


def named_lanes(lanes: Lanes, num_envs: int) -> Sequence[int]:
    """Resolves lanes to their numbers, checked on the host.

    Args:
        lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all.
        num_envs: number of lanes E.

    Raises:
        ValueError: `lanes` is something else, or names an unknown lane or one twice.
    """
    if lanes is None:
        return range(num_envs)
    try:
        ids = np.asarray(lanes.cpu() if isinstance(lanes, torch.Tensor) else lanes)
    except ValueError:  # lists of unequal lengths
        ids = np.asarray(None)
    if ids.dtype == bool:
        if ids.shape != (num_envs,):
            raise ValueError(
                f"a mask of lanes must have shape [{num_envs}], got {list(ids.shape)}."
            )
        named: list[int] = ids.nonzero()[0].tolist()
        return named
    values = ids.reshape(-1).tolist() if ids.dtype.kind in "iu" else []
    if (
        ids.ndim != 1
        or not values
        or len(set(values)) != len(values)
        or not all(0 <= lane < num_envs for lane in values)
    ):
        is_number = ids.ndim == 0 and values and 0 <= values[0] < num_envs
        hint = f": pass [{values[0]}]" if is_number else ""
        raise ValueError(
            f"lanes must be a list of distinct numbers in 0..{num_envs - 1}, got {lanes}{hint}."
        )
    return values


def is_key(index: Any) -> bool:
    """Returns whether an index is the key of an entry rather than a selection of rows.

    >>> is_key("reward"), is_key(("next", "reward")), is_key(3), is_key((3, 4))
    (True, True, False, False)
    """
    if isinstance(index, tuple):
        return bool(index) and all(map(is_key, index))
    return isinstance(index, str)


def slots_of(episodes: EpisodeIndex, index: Any) -> torch.Tensor:
    """Resolves an index to slots.

    Args:
        episodes: the episode index of the rows.
        index: a slice of the history in time order, oldest row first; or slots, as an int, a list, an
            integer tensor of any shape B, or a mask.

    Returns:
        int64 slots, `[]` for an int, all of them live.

    Raises:
        IndexError: a slot holds no row.
        TypeError: it is none of these.

    >>> from trl_storages import EpisodeIndex
    >>> episodes = EpisodeIndex(4)
    >>> _ = episodes.append(torch.zeros(1, 6, dtype=torch.bool))
    >>> slots_of(episodes, slice(None)).tolist(), slots_of(episodes, slice(-1, None)).tolist()
    ([2, 3, 0, 1], [1])
    """
    if isinstance(index, slice):
        size = len(episodes)
        places = range(size)[index]
        # torch.arange(start, stop, step) rejects some empty ranges.
        place = places.start + places.step * torch.arange(len(places), device=episodes.device)
        return episodes.slots_by_age(size - 1 - place)
    if isinstance(index, tuple) or index is None or index is Ellipsis:
        raise TypeError(
            f"rows have one dimension: index them by a slice, an int, a list, a mask or a tensor of "
            f"slots, or by a key; got {index!r}."
        )
    slots = torch.as_tensor(index, device=episodes.device)
    if slots.dtype is torch.bool:
        slots = slots.nonzero().squeeze(-1)
    if slots.numel() and (slots.is_floating_point() or slots.is_complex()):
        raise TypeError(f"slots must be integers, got {index!r}.")
    slots = slots.long()
    there = episodes.is_live(slots)
    if not bool(there.all()):
        raise IndexError(
            f"slots must be those of the {len(episodes)} rows stored, got {slots[~there].tolist()}; "
            "a slice names rows by age, such as storage[-1:] for the newest."
        )
    return slots


def episode_slots(
    episodes: EpisodeIndex, first: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the slots of whole episodes, one after another.

    Args:
        episodes: the episode index of the rows.
        first: `[n]` int64, the slots they begin at, as in `episodes.episodes()`.
        length: `[n]` int64, their numbers of rows.

    Returns:
        int64 slots, and for each the position of its episode in `first`.
    """
    number = torch.arange(len(length), device=length.device).repeat_interleave(length)
    step = torch.arange(len(number), device=length.device) - (length.cumsum(0) - length)[number]
    return episodes.shift(first[number], step), number
