"""Draws whole episodes: finished ones, no row of which was evicted.

Letters: E lanes (environments).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trl_storages.functional.draws import random_noise
from trl_storages.kernels.ring_tables import BEGUN, FINISHED, FIRST

if TYPE_CHECKING:
    from trl_storages.ring.answers import EpisodeAnswers

__all__ = ["draw_whole_episodes", "first_of_whole_episodes"]

# Attempts before the caller falls back to listing all whole episodes.
_PATIENCE = 32


def draw_whole_episodes(
    index: EpisodeAnswers, n: int, generator: torch.Generator | None
) -> torch.Tensor | None:
    """Draws `n` whole episodes uniformly with replacement, at a cost independent of their number.

    Returns:
        `[n]` int64 slots of their first rows, or None if too few draws were whole episodes.
    """
    ring, most_live, room = index.ring, index.steps_per_lane, index.ring_steps
    begun = ring.lanes[:, BEGUN]
    lanes = torch.arange(index.num_envs, device=index.device)
    # The live episodes of a lane are numbered `oldest .. begun - 1`.
    start = index.tails
    entry = ring.entries(start % room * index.num_envs + lanes)
    oldest = begun - 1 - (begun - 1 - entry + lanes * most_live) % most_live
    # Skip an oldest episode that has lost its first rows.
    oldest += ring.spans[entry, FIRST] < start
    counts = torch.where(index.fill > 0, begun - oldest, 0).clamp(min=0)
    ends = counts.cumsum(0)
    found = torch.full((n,), -1, device=index.device)
    # Rejection sampling: cut and running episodes are usually few.
    for _ in range(_PATIENCE if int(ends[-1]) else 0):
        draw = random_noise(n, generator=generator, device=index.device) % ends[-1]
        lane = torch.searchsorted(ends, draw, right=True)
        number = oldest[lane] + draw - (ends - counts)[lane]
        drawn = lane * most_live + number % most_live
        usable = (ring.spans[drawn, FINISHED] != 0) & (found < 0)
        found = torch.where(usable, ring.spans[drawn, FIRST] % room * index.num_envs + lane, found)
        if bool((found >= 0).all()):
            return found
    return None


def first_of_whole_episodes(index: EpisodeAnswers) -> torch.Tensor:
    """Returns the slots of the first rows of all whole episodes, in a pass over the rows."""
    episodes = index.episodes()
    found: torch.Tensor = episodes["first"][episodes["finished"] & episodes["whole"]]
    return found
