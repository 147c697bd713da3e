"""Compiled loops over arrays: nothing above them loops over rows, steps or lanes.

Letters: E lanes, T steps a lane, M entries a lane, k frames a stack.

Here is what the words of an index mean. An `index` is the tuple of these tables:

- `where` `[E T]`: the entry of the step in each slot. Step s of lane e is in slot `e T + s mod T`.
- `episode` `[E T]`: the number of its episode in its lane, modulo T + 1.
- `ends` `[E T]` uint8: whether the step is done, or its lane was cut when it was the newest. A row that
  begins an episode for another reason, as behind a gap, changes `spans` alone.
- `spans` `[E, T + 1, 2]`: the first and the last step of each episode.
- `lanes` `[E, 2]`: the steps written, and the oldest live step.
- T, M, k.
- `priorities` `[E T]` float32: raw ones, see `kernels.priority_tree`; 0 where none was set.
- the depth: how many entries up to its own a step needs; k, and more where frames are stored as what
  changed.
"""

from __future__ import annotations

__all__ = [
    "CONTINUES",
    "CURSOR",
    "DEPTH",
    "DISCONTINUITY",
    "DONE",
    "ENDS",
    "FIRST",
    "LANES",
    "LAST",
    "PRIORITIES",
    "SEPARATE",
    "SHARED",
    "SPLIT",
    "STACK",
    "STEPS",
    "TAIL",
    "WHERE",
]

#: Places in an index.
WHERE, _, ENDS, _, LANES, STEPS, _, STACK, PRIORITIES, DEPTH = range(10)
#: Of `lanes`, and of `spans`.
CURSOR, TAIL = range(2)
FIRST, LAST = range(2)
#: Of `ends`.
CONTINUES, DONE, SPLIT = range(3)
#: How an observation compares with what the stream ends with. Any but the same is stored as an entry of
#: its own: one that differs but continues the row before, as with a recurrent state that was computed
#: anew, or one that lies elsewhere; and one that does not continue it.
SHARED, SEPARATE, DISCONTINUITY = range(3)
