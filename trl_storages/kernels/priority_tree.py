"""Raw priorities of rows, their weights (p + eps)^alpha, and the tree from which rows are drawn.

A raw priority is finite and above 0. Any other value in a column means that no priority was set.

The tree is 8-ary, over the slots of all lanes, and holds sums of weights or least weights. A node is
always computed from its eight children, in float64 and in the same order. Therefore sums do not drift,
and equal weights make equal trees. Level l of the table begins at `starts[l]`, the root is level 0, the
leaves are the last level, and the last number of `starts` `[depth + 2]` is the size of the table.

Letters: B batch, E lanes, T leaves a lane, R ranges of leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CURSOR, TAIL, Index
from trl_storages.kernels.compile import inlined, loop, prefetch
from trl_storages.kernels.draws import lane_of

__all__ = [
    "are_priorities",
    "draw_leaves",
    "every_leaf",
    "least_within",
    "level_starts",
    "newest_ranges",
    "set_leaves",
    "set_priorities",
    "set_weights",
]

FAN_OUT = 8
_INFINITY = np.inf
# A priority of 0 is stored as this one.
_LEAST = float(np.finfo(np.float32).tiny)


@loop
def set_priorities(tables: Any, slots: Any, steps: Any, priorities: Any, changed: Any) -> Any:
    """Sets raw priorities of rows that were not overwritten since they were drawn.

    Args:
        tables: of the index, see `kernels.Index`.
        slots: `[B]`; -1 is skipped. If a slot occurs several times, the last priority counts.
        steps: `[B]` the step of each row in its lane when the row was drawn.
        priorities: `[B]`, finite and at least 0.
        changed: `[B]`, the result: the slots whose priorities were set, in order.

    Returns:
        the number of slots in `changed`, or -1 if a slot is out of range, in which case no priority is
        set; and the largest priority that was set.
    """
    index = Index(*tables)
    lane_bounds, column = index.lane_bounds, index.priorities
    E, T = len(lane_bounds), index.num_steps
    count, largest = 0, 0.0
    for i in range(len(slots)):
        if not -1 <= slots[i] < E * T:
            return -1, largest
    for i in range(len(slots)):
        slot = slots[i]
        e = lane_of(slot, E, T)
        if slot >= 0 and lane_bounds[e, TAIL] <= steps[i] < lane_bounds[e, CURSOR]:
            column[slot] = raw = max(np.float64(priorities[i]), _LEAST)
            largest = max(largest, raw)
            changed[count] = slot
            count += 1
    return count, largest


@loop
def are_priorities(raw: Any) -> bool:
    """Returns whether numbers are finite and at least 0."""
    is_valid = True
    for i in range(len(raw)):
        is_valid &= 0 <= raw[i] < _INFINITY
    return is_valid


def level_starts(num_leaves: int) -> np.ndarray:
    """Returns where the levels of a tree begin, `[depth + 2]` int64.

    >>> level_starts(20).tolist()
    [0, 8, 16, 40]
    """
    sizes = [-(-num_leaves // FAN_OUT) * FAN_OUT]
    while sizes[-1] > FAN_OUT:
        sizes.append(-(-sizes[-1] // FAN_OUT // FAN_OUT) * FAN_OUT)
    # The root takes a whole cache line, so that eight children never straddle two cache lines.
    return np.cumsum([0, FAN_OUT, *sizes[::-1]])


def every_leaf(starts: np.ndarray) -> np.ndarray:
    """Returns the range `[2, 1]` of all leaves of a tree, which its root covers."""
    return np.array([[0], [FAN_OUT ** (len(starts) - 2)]])


@inlined
def _find_child(sums: Any, first: int, mass: float) -> Any:
    """Finds the last of eight children of positive weight whose mass begins at or below `mass`.

    Returns:
        the position of the child among the eight, and the mass at which it begins.
    """
    # The loop has no branches, because the processor could not predict them.
    chosen, begins, ends = 0, 0.0, 0.0
    for j in range(FAN_OUT):
        ends += sums[first + j]
        is_before = ends <= mass
        chosen += is_before
        begins = ends if is_before else begins
    if chosen == FAN_OUT:  # due to rounding `mass` lies beyond the last child
        chosen, ends = 0, 0.0
        for j in range(FAN_OUT):
            if ends + sums[first + j] > ends:
                chosen, begins = j, ends
            ends += sums[first + j]
    return chosen, begins


@inlined
def _join(nodes: Any, first: int, is_least: bool) -> float:
    """Returns the least of eight children if `is_least`, else their sum."""
    if is_least:
        minimum = nodes[first]
        for j in range(1, FAN_OUT):
            minimum = min(minimum, nodes[first + j])
        return minimum
    # By halves: 0 and 4, 1 and 5, 2 and 6, 3 and 7; then these four sums, then the last two.
    even = (nodes[first] + nodes[first + 4]) + (nodes[first + 2] + nodes[first + 6])
    odd = (nodes[first + 1] + nodes[first + 5]) + (nodes[first + 3] + nodes[first + 7])
    return even + odd


@loop
def set_leaves(nodes: Any, starts: Any, is_least: bool, leaves: Any, weights: Any) -> None:
    """Sets the weights `[B]` of `leaves` `[B]`, and recomputes the nodes above them.

    If a leaf occurs several times, its last weight counts. A tree of least weights ignores weights of 0.
    """
    depth, changed = len(starts) - 2, np.empty(len(leaves), np.int64)
    for i in range(len(leaves)):
        weight = weights[i]
        nodes[starts[depth] + leaves[i]] = weight if weight > 0 or not is_least else _INFINITY
        changed[i] = leaves[i]
    for level in range(depth, 0, -1):
        # In a small level to recompute all nodes is cheaper than one node for each leaf.
        if starts[level + 1] - starts[level] <= len(leaves) * FAN_OUT:
            for node in range((starts[level + 1] - starts[level]) // FAN_OUT):
                children = starts[level] + node * FAN_OUT
                nodes[starts[level - 1] + node] = _join(nodes, children, is_least)
        else:
            for i in range(len(leaves)):
                changed[i] >>= 3
                children = starts[level] + changed[i] * FAN_OUT
                nodes[starts[level - 1] + changed[i]] = _join(nodes, children, is_least)


@loop
def set_weights(
    column: Any,
    last_raw: Any,
    sums: Any,
    starts: Any,
    slots: Any,
    default: float,
    alpha: float,
    eps: float,
    can_set: bool,
) -> None:
    """Sets the weights of rows `[B]`, and copies the raw priorities in `column` `[E T]` to `last_raw`.

    A row without a raw priority gets the weight of `default`. If `can_set`, `default` also becomes its
    raw priority.
    """
    weights = np.empty(len(slots))
    for i in range(len(slots)):
        last_raw[slots[i]] = raw = np.float64(column[slots[i]])
        if not 0 < raw < _INFINITY:
            raw = default
            if can_set:
                column[slots[i]] = last_raw[slots[i]] = raw
        weights[i] = (raw + eps) ** alpha
    set_leaves(sums, starts, False, slots, weights)


@loop
def newest_ranges(lane_bounds: Any, T: int, window: int, ranges: Any) -> None:
    """Writes the leaf ranges of the newest `window` steps of each lane.

    The ranges include evicted steps, whose weight is 0.

    Args:
        lane_bounds: `[E, 2]` cursors and tails as of the last update of the tree.
        T: steps a lane.
        window: number of steps, at most T.
        ranges: `[2, 2 E]`, the result: first leaves and ends.
    """
    for e in range(len(lane_bounds)):
        cursor = lane_bounds[e, CURSOR]
        count = min(cursor, window)
        first = (cursor - count) % T
        end = first + count
        ranges[0, 2 * e], ranges[1, 2 * e] = e * T + first, e * T + min(end, T)
        ranges[0, 2 * e + 1], ranges[1, 2 * e + 1] = e * T, e * T + max(end - T, 0)


@loop
def _cover(starts: Any, ranges: Any) -> Any:
    """Returns the largest nodes that lie within some ranges, at most 14 for each level and range.

    Args:
        starts: where the levels of the table begin.
        ranges: `[2, R]` disjoint ranges of leaves: first leaves and ends.

    Returns:
        `[2, n]` the levels of the nodes, and their numbers within the level. Nodes are in the order of
        their leaves, so that equal sequences of weights are drawn alike wherever they lie in the tree.
    """
    depth, R = len(starts) - 2, ranges.shape[1]
    n = 0
    nodes = np.empty((2, 2 * FAN_OUT * depth * R), np.int64)
    right_nodes = np.empty((2, FAN_OUT * depth), np.int64)
    for r in range(R):
        left, right = ranges[0, r], ranges[1, r]
        level, num_right = depth, 0
        while left < right:
            # Take single nodes until eight neighbours are one node of the level above.
            while left < right and left % FAN_OUT:
                nodes[0, n], nodes[1, n] = level, left
                left, n = left + 1, n + 1
            while left < right and right % FAN_OUT:
                right -= 1
                right_nodes[0, num_right], right_nodes[1, num_right] = level, right
                num_right += 1
            left, right = left // FAN_OUT, right // FAN_OUT
            level -= 1
        for j in range(num_right - 1, -1, -1):
            nodes[:, n] = right_nodes[:, j]
            n += 1
    return nodes[:, :n]


@loop
def draw_leaves(
    sums: Any, starts: Any, ranges: Any, noise: Any, leaves: Any, weights: Any
) -> float:
    """Draws leaves in proportion to their weights, and returns the total weight of the ranges.

    The loop descends level by level with the whole batch, so that the reads of a level overlap. At each
    node it takes the last child of positive weight that begins at or below the remaining mass. Therefore
    the weight of a drawn leaf is positive and the leaf lies within the ranges, despite rounding.

    Args:
        sums: the table of the tree.
        starts: where the levels of the table begin.
        ranges: `[2, R]` disjoint ranges of leaves to draw from.
        noise: `[B]` random numbers of 63 bits.
        leaves: `[B]` int64, the result.
        weights: `[B]` float64, the result: the weights of the leaves.
    """
    nodes = _cover(starts, ranges)
    depth, batch = len(starts) - 2, len(noise)
    ends = np.empty(nodes.shape[1])
    total, highest = 0.0, 0
    for n in range(len(ends)):
        ends[n] = total + sums[starts[nodes[0, n]] + nodes[1, n]]
        if ends[n] > total:
            highest = n
        total = ends[n]
    # By draw: the level of its node, and its remaining mass there.
    levels, mass = np.empty(batch, np.int64), weights
    for i in range(batch):
        mass[i] = (noise[i] >> 10) * 2.0**-53 * total  # uniform in [0, total)
        n = min(np.searchsorted(ends, mass[i], side="right"), highest)
        mass[i] -= ends[n - 1] if n else 0.0
        levels[i], leaves[i] = nodes[0, n], nodes[1, n]
    for level in range(1, depth + 1):
        for i in range(batch):
            if levels[i] < level:
                first = starts[level] + leaves[i] * FAN_OUT
                chosen, begins = _find_child(sums, first, mass[i])
                mass[i] -= begins
                leaves[i] = leaves[i] * FAN_OUT + chosen
                if level < depth:
                    prefetch(sums, starts[level + 1] + leaves[i] * FAN_OUT)
    for i in range(batch):
        weights[i] = sums[starts[depth] + leaves[i]]
    return total


@loop
def least_within(minima: Any, starts: Any, ranges: Any) -> float:
    """Returns the least positive weight in the union of `ranges` `[2, R]`."""
    nodes, low = _cover(starts, ranges), _INFINITY
    for n in range(nodes.shape[1]):
        low = min(low, minima[starts[nodes[0, n]] + nodes[1, n]])
    return low
