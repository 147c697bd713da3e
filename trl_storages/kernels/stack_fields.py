"""How stacks of frames are described to the loops: a row of numbers each.

A stack lies in a row as it is seen with its k frames one after another, the newest last. A stored row
holds the newest one. The frames before it are those of the rows before in the lane, or, of the k - 1
steps before the oldest live row of each lane, in a table of the past: the ring itself, if it has room.
"""

from __future__ import annotations

__all__ = [
    "COUNT",
    "IS_CONSTANT",
    "NOT_CONTINUED",
    "NOT_PADDED",
    "NOT_SHIFTED",
    "NUM_COLUMNS",
    "PAST",
    "PLACE",
    "ROOT",
    "SIZE",
    "STORED",
]

#: Which field of the row it is, and which one it follows under `next`: itself if it is at the root.
#: The bytes of a frame, and k. Whether zeros stand for frames before the episode, or its first one.
#: The first byte of the root's frame in a stored row, and in a row of the past.
PLACE, ROOT, SIZE, COUNT, IS_CONSTANT, STORED, PAST = range(7)
NUM_COLUMNS = 7

#: What is wrong with a stack: it does not continue that of the row before, it begins an episode with
#: other frames than its padding, or it does not continue the stack that it follows under `next`.
NOT_CONTINUED, NOT_PADDED, NOT_SHIFTED = 1, 2, 3
