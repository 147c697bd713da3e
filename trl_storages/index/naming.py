"""Lanes and rows as users name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from trl_storages.index.episode_index import EpisodeIndex

__all__ = ["Lanes", "episode_slots", "is_key", "named_lanes"]

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
