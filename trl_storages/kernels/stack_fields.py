"""How frame stacks are described to the loops: one row of numbers per stack.

A row as read has a stack's k frames one after another, the newest last. A stored row holds only the
newest. The frames before it are those of the preceding rows in the lane; or, for the k - 1 steps before
the oldest live row of a lane, those in a table of the past, which is the ring itself if it has room.
"""

from __future__ import annotations

__all__ = [
    "COUNT",
    "IS_CONSTANT",
    "NEXT",
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

#: The index of the field in a row; that of the root field it shifts if it is under `next`, else its own;
#: bytes per frame; k; whether frames before the episode are zeros (else copies of its first frame); the
#: first byte of the root's frame in a stored row; the same in a row of the past; and that of the newest
#: frame under `next` in a row as read, with single frames.
PLACE, ROOT, SIZE, COUNT, IS_CONSTANT, STORED, PAST, NEXT = range(8)
NUM_COLUMNS = 8

#: What is wrong with a stack: it does not continue the stack of the row before; it begins an episode with
#: frames other than its padding; or, under `next`, it is not its root's stack shifted by one frame.
NOT_CONTINUED, NOT_PADDED, NOT_SHIFTED = 1, 2, 3
