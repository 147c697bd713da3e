"""Which episode a row belongs to, in the compiled loops that ask for it.

Loops see changes in this file only when they are compiled anew.
"""

from __future__ import annotations

from typing import Any

from trl_storages.kernels.host.compiling import inlined
from trl_storages.kernels.ring_tables import STRETCH

__all__ = ["entry_of"]


@inlined
def entry_of(episode: Any, stretches: Any, most_live: int, slot: int, lane: int, step: int) -> int:
    """Returns the entry of the episode that a row belongs to.

    Args:
        episode: of the index.
        stretches: `[E, K]` of the index.
        most_live: T.
        slot: of the row, as its lane and step.
        lane: likewise.
        step: likewise.
    """
    place = stretches[lane, step // STRETCH & (stretches.shape[1] - 1)] + episode[slot]
    while place >= most_live:
        place -= most_live
    return lane * most_live + place
