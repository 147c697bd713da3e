"""The layout of a sum tree in one table, and the priority of slots without a row."""

from __future__ import annotations

__all__ = ["ABSENT", "FAN_OUT", "level_starts"]

#: The priority of a slot without a row: never drawn, and never the least weight.
ABSENT = float("inf")
#: Children of a node: eight float64 numbers fill a cache line.
FAN_OUT = 8


def level_starts(num_leaves: int) -> list[int]:
    """Returns where each level begins in the table of a tree, and finally where the table ends.

    The root is level 0. The children of node i of a level are nodes 8 i to 8 i + 7 of the next one,
    and leaf i is node i of the last. Levels are rounded up to whole nodes, so that a node is one
    cache line; after the last leaf there is at least one spare leaf, whose weight stays 0.

    >>> level_starts(10)
    [0, 8, 16, 32]
    """
    sizes = [_rounded_up(num_leaves + 1)]
    while sizes[0] > FAN_OUT:
        sizes.insert(0, _rounded_up(sizes[0] // FAN_OUT))
    starts = [0, FAN_OUT]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _rounded_up(n: int) -> int:
    return -(-n // FAN_OUT) * FAN_OUT
