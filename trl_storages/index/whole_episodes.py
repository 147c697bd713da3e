"""The episodes of an index: lists of them, and draws of whole ones.

Letters: E lanes, n episodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages.kernels.words import DONE, FIRST, LAST

if TYPE_CHECKING:
    from trl_storages.index.episode_index import EpisodeIndex

__all__ = ["draw", "episode_slots", "episodes_of"]

# How often episodes are drawn before all are listed.
_PATIENCE = 8


def _numbers(index: EpisodeIndex) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each lane's oldest live episode, and how many are live, `[E]`."""
    T = index.steps_per_lane
    oldest = index.episode[np.arange(index.num_envs) * T + index.tails % T]
    count = (index.episode[index.newest_slots()] - oldest) % (T + 1) + 1
    return oldest, np.where(index.fill > 0, count, 0)


def _look_up(
    index: EpisodeIndex, lanes: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the first surviving step, the last step, and whether episodes are finished and whole."""
    T = index.steps_per_lane
    span = index.spans[lanes, numbers % (T + 1)]
    first = np.maximum(span[:, FIRST], index.tails[lanes])
    last = np.minimum(span[:, LAST], index.cursors[lanes] - 1)
    finished = index.ends[lanes * T + last % T] == DONE
    return first, last, finished, first == span[:, FIRST]


def episodes_of(index: EpisodeIndex) -> TensorDict:
    """Lists the live episodes; see `EpisodeIndex.episodes`."""
    oldest, counts = _numbers(index)
    lanes = np.arange(index.num_envs).repeat(counts)
    numbers = np.arange(len(lanes)) + (oldest + counts - counts.cumsum())[lanes]
    first, last, finished, whole = _look_up(index, lanes, numbers)
    T = index.steps_per_lane
    columns = {
        "first": lanes * T + first % T,
        "length": last - first + 1,
        "lane": lanes,
        "finished": finished,
        "whole": whole,
    }
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return TensorDict(tensors, batch_size=[len(lanes)])


def draw(index: EpisodeIndex, n: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws whole, finished episodes uniformly; see `EpisodeIndex.random_episodes`."""
    oldest, counts = _numbers(index)
    ends, found = counts.cumsum(), np.full(n, -1)
    # Of all episodes few are cut, running or partly evicted: what is drawn again depends on no number
    # of rows.
    for _ in range(_PATIENCE if ends[-1] else 0):
        noise = torch.empty(n, dtype=torch.int64).random_(generator=generator).numpy()
        rank = noise % ends[-1]
        lanes = ends.searchsorted(rank, side="right")
        numbers = oldest[lanes] + rank - (ends - counts)[lanes]
        first, _, finished, whole = _look_up(index, lanes, numbers)
        T = index.steps_per_lane
        usable = finished & whole & (found < 0)
        found[usable] = (lanes * T + first % T)[usable]
        if (found >= 0).all():
            return torch.from_numpy(found)
    listed = episodes_of(index)
    firsts: torch.Tensor = listed["first"][listed["finished"] & listed["whole"]]
    if not len(firsts):
        raise RuntimeError(
            "no finished episode is stored whole: write until one ends, or make the storage larger than "
            "an episode."
        )
    picked = torch.empty(n, dtype=torch.int64).random_(generator=generator) % len(firsts)
    return firsts[picked]


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
