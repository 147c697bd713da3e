"""Draws whole episodes: finished ones, of which no row was overwritten.

Letters: T steps per lane, E lanes (environments).
"""

from __future__ import annotations

import torch

from trl_storages.episodes.ring import Ring
from trl_storages.episodes.tables import Tables
from trl_storages.functional.draws import random_below

__all__ = ["draw_whole_episodes"]

# How often whole episodes are drawn anew before the caller must list all of them.
_PATIENCE = 32


def draw_whole_episodes(
    ring: Ring, tables: Tables, n: int, generator: torch.Generator | None
) -> torch.Tensor | None:
    """Draws `n` whole episodes uniformly with replacement, at a cost that no episode adds to.

    Returns:
        `[n]` int64 slots of their first rows, or None if it was out of luck.
    """
    lanes, begun, void = ring.lane_ids(), tables.begun, ring.capacity
    # Live episodes of a lane bear the numbers `oldest .. begun - 1`.
    start = (ring.cursors - ring.steps_per_lane).clamp(min=0)
    start_slot = start % ring.steps_per_lane * ring.num_envs + lanes
    entry = tables.episode[start_slot].long()
    oldest = begun - 1 - (begun - 1 - entry + lanes * ring.steps_per_lane) % ring.steps_per_lane
    # One that began before the oldest row has lost its beginning.
    oldest += tables.first_step[entry] < start
    counts = torch.where(ring.cursors > 0, begun - oldest, 0).clamp(min=0)
    ends = counts.cumsum(0)
    found = torch.full((n,), void, device=ring.device)
    # Cut and running episodes are drawn too, and drawn again. They are few as a rule.
    for _ in range(_PATIENCE if int(ends[-1]) else 0):
        draw = random_below(ends[-1], n, generator=generator, device=ring.device)
        lane = torch.searchsorted(ends, draw, right=True)
        number = oldest[lane] + draw - (ends - counts)[lane]
        drawn = lane * ring.steps_per_lane + number % ring.steps_per_lane
        usable = tables.finished[drawn] & (found == void)
        found = torch.where(usable, drawn, found)
        if bool((found != void).all()):
            return tables.first[found].long()
    return None
