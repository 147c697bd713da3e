"""What always holds in an episode index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trl_storages.kernels.words import DONE, FIRST, LAST

if TYPE_CHECKING:
    from trl_storages.index.episode_index import EpisodeIndex

__all__ = ["check"]


def check(index: EpisodeIndex) -> None:
    """Raises a RuntimeError if the tables of an index contradict one another."""
    T, M, spans = index.steps_per_lane, index.entries_per_lane, index.spans
    for lane in range(index.num_envs):
        tail, cursor = int(index.tails[lane]), int(index.cursors[lane])
        steps = np.arange(tail, cursor)
        slots = lane * T + steps % T
        where, number = index.where[slots] - lane * M, index.episode[slots]
        _hold(
            f"lane {lane}: its tail is at most {T} steps behind its cursor", 0 <= cursor - tail <= T
        )
        inside = (where >= index.stack - 1) & (where + 1 < M)
        _hold(f"lane {lane}: its entries lie within it", inside.all())
        _hold(f"lane {lane}: no two steps share an entry", np.diff(np.sort(where)).all())
        first, last = spans[lane, number, FIRST], np.minimum(spans[lane, number, LAST], cursor - 1)
        _hold(
            f"lane {lane}: each step is one of its episode",
            ((first <= steps) & (steps <= last)).all(),
        )
        same = number[1:] == number[:-1]
        _hold(
            f"lane {lane}: an episode goes on to its last step, and only there to the next",
            (same == (steps[:-1] < last[:-1])).all(),
        )
        is_done = index.ends[slots] == DONE
        _hold(
            f"lane {lane}: only the last step of an episode is done",
            (~is_done | (steps == last)).all(),
        )


def _hold(what: str, holds: bool | np.bool_) -> None:
    if not holds:
        raise RuntimeError(f"the episode index is damaged; it does not hold that {what}.")
