"""The episodes of an index: lists of them, and draws of whole ones.

An `index` is that of `kernels`. Letters: E lanes, n episodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages.kernels import CURSOR, DONE, FIRST, LAST, TAIL

__all__ = ["draw", "episodes_of"]

# How often episodes are drawn before all are listed.
_PATIENCE = 8


def _numbers(index: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each lane's oldest live episode, and how many are live, `[E]`."""
    _, episode, _, _, lanes, T, _, _, _ = index
    cursors, tails, begins = lanes[:, CURSOR], lanes[:, TAIL], np.arange(len(lanes)) * T
    oldest = episode[begins + tails % T]
    count = (episode[begins + (cursors - 1) % T] - oldest) % (T + 1) + 1
    return oldest, np.where(cursors > tails, count, 0)


def _look_up(index: Any, lane: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns slots of the first rows, numbers of rows, and whether episodes are finished and whole."""
    _, _, ends, spans, lanes, T, _, _, _ = index
    span = spans[lane, number % (T + 1)]
    first = np.maximum(span[:, FIRST], lanes[lane, TAIL])
    last = np.minimum(span[:, LAST], lanes[lane, CURSOR] - 1)
    finished = ends[lane * T + last % T] == DONE
    return lane * T + first % T, last - first + 1, finished, first == span[:, FIRST]


def episodes_of(index: Any) -> TensorDict:
    """Lists the live episodes; see `EpisodeIndex.episodes`."""
    oldest, counts = _numbers(index)
    lane = np.arange(len(counts)).repeat(counts)
    number = np.arange(len(lane)) + (oldest + counts - counts.cumsum())[lane]
    names = ("first", "length", "finished", "whole", "lane")
    columns = map(torch.from_numpy, (*_look_up(index, lane, number), lane))
    return TensorDict(dict(zip(names, columns, strict=True)), batch_size=[len(lane)])


def draw(index: Any, n: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draws whole, finished episodes uniformly; see `EpisodeIndex.random_episodes`."""
    oldest, counts = _numbers(index)
    ends, found = counts.cumsum(), np.full(n, -1)
    # Of all episodes few are cut, running or partly evicted: what is drawn again depends on no number
    # of rows.
    for _ in range(_PATIENCE if ends[-1] else 0):
        noise = torch.empty(n, dtype=torch.int64).random_(generator=generator).numpy()
        rank = noise % ends[-1]
        lane = ends.searchsorted(rank, side="right")
        first, _, finished, whole = _look_up(
            index, lane, oldest[lane] + rank - (ends - counts)[lane]
        )
        usable = finished & whole & (found < 0)
        found[usable] = first[usable]
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
