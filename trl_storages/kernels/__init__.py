"""Compiled loops over rows, steps and lanes.

Other modules loop in Python over lanes only where it is rare (after ends of episodes, to save, to load,
to reserve room on a disk), and over rows only to call a reward function that takes one transition.

Letters: E lanes, T steps a lane, M entries a lane, k frames a stack.

A loop receives the tables of an index as a plain tuple, because numba passes plain tuples faster than
named ones. Its first line gives the tables their names: `index = Index(*tables)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = [
    "CONTINUES",
    "CURSOR",
    "DISCONTINUITY",
    "DONE",
    "FIRST",
    "LAST",
    "SEPARATE",
    "SHARED",
    "SPLIT",
    "TAIL",
    "Index",
    "Sizes",
]


class Index(NamedTuple):
    """The tables of an `EpisodeIndex`."""

    where: Any
    """`[E T]` int64, the entry of the step in each slot. Step s of lane e is in slot `e T + s mod T`."""
    episode: Any
    """`[E T]` int64, the number of the step's episode in its lane, modulo T + 1."""
    ends: Any
    """`[E T]` uint8: DONE, SPLIT if the lane was split when the step was its newest, else CONTINUES. A
    discontinuity before a later step changes `spans` alone."""
    spans: Any
    """`[E, T + 1, 2]` int64, the FIRST and the LAST step of each episode."""
    lane_bounds: Any
    """`[E, 2]` int64: CURSOR, the number of steps written, and TAIL, the oldest valid step."""
    num_steps: int
    """T."""
    num_entries: int
    """M."""
    stack: int
    """k."""
    priorities: Any
    """`[E T]` float32 raw priorities, see `kernels.priority_tree`; 0 where none was set."""
    depth: int
    """How many entries, its own included, a step needs: k, and more where frames are compressed."""


class Sizes(NamedTuple):
    """Sizes of entries and rows in words of 8 bytes; see `kernels.entries`."""

    frame: int
    """F, of one frame of the stacks."""
    observation: int
    """O, of the observation in an entry."""
    first: int
    """Words `first` to `end` of an observation decide whether a row continues the row before."""
    end: int
    root: int
    """R: from this word on an entry holds values of the step that stand under `next`."""


#: Columns of `Index.lane_bounds` and of `Index.spans`.
CURSOR, TAIL = range(2)
FIRST, LAST = range(2)
#: Values of `Index.ends`.
CONTINUES, DONE, SPLIT = range(3)
#: Continuity: how the observation of a row compares with that at the end of the stream. A shared one is
#: bitwise identical and is not stored again. A separate one differs but continues the row before, for
#: example with a recomputed recurrent state, or with an entry elsewhere. All but shared ones are stored.
SHARED, SEPARATE, DISCONTINUITY = range(3)
