"""Raw priorities of rows, their weights (p + eps)^alpha, and the tree by which rows are drawn.

A raw priority is finite and above 0; whatever else a column holds says that none was set.

The tree is an 8-ary one of sums, or of least weights, over the slots of lanes. A node is joined from its
eight children, always in float64 and in the same order, so that nothing drifts and equal weights make
equal trees. `starts` `[depth + 2]` says where its levels begin in the table, the root's first and that of
the leaves last; the last number is the size of the table.

Letters: B batch, E lanes, T leaves a lane, R ranges of leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_storages.kernels import CURSOR, LANES, PRIORITIES, STEPS, TAIL
from trl_storages.kernels.compile import inlined, loop, prefetch
from trl_storages.kernels.draws import lane_of

__all__ = [
    "are_priorities",
    "draw_leaves",
    "every_leaf",
    "least_within",
    "level_starts",
    "newest_ranges",
    "report",
    "set_leaves",
    "weigh",
]

FAN_OUT = 8
_INFINITY = np.inf
# What a priority of 0 is stored as.
_LEAST = float(np.finfo(np.float32).tiny)


@loop
def report(index: Any, slots: Any, steps: Any, priorities: Any, kept: Any) -> Any:
    """Sets raw priorities of those rows that are still what they were.

    Args:
        index: as in `kernels`.
        slots: `[B]`; -1 is skipped. Of equal ones the last counts.
        steps: `[B]` which steps of their lanes the rows were.
        priorities: `[B]`, finite and at least 0.
        kept: the result, `[B]`: the slots that were set, in order.

    Returns:
        how many were set, -1 if there is no such slot, where nothing is done; and the largest of them.
    """
    lanes, T, column = index[LANES], index[STEPS], index[PRIORITIES]
    E, count, largest = len(lanes), 0, 0.0
    for i in range(len(slots)):
        if not -1 <= slots[i] < E * T:
            return -1, largest
    for i in range(len(slots)):
        slot = slots[i]
        e = lane_of(slot, E, T)
        if slot >= 0 and lanes[e, TAIL] <= steps[i] < lanes[e, CURSOR]:
            column[slot] = raw = max(np.float64(priorities[i]), _LEAST)
            largest = max(largest, raw)
            kept[count] = slot
            count += 1
    return count, largest


@loop
def are_priorities(raw: Any) -> bool:
    """Returns whether numbers are finite and at least 0."""
    found = True
    for i in range(len(raw)):
        found &= 0 <= raw[i] < _INFINITY
    return found


def level_starts(num_leaves: int) -> np.ndarray:
    """Returns where the levels of a tree begin, `[depth + 2]` int64.

    >>> level_starts(20).tolist()
    [0, 8, 16, 40]
    """
    sizes = [-(-num_leaves // FAN_OUT) * FAN_OUT]
    while sizes[-1] > FAN_OUT:
        sizes.append(-(-sizes[-1] // FAN_OUT // FAN_OUT) * FAN_OUT)
    # The root takes a cache line too, so that children never straddle two.
    return np.cumsum([0, FAN_OUT, *sizes[::-1]])


def every_leaf(starts: np.ndarray) -> np.ndarray:
    """Returns the range `[2, 1]` of all leaves of a tree, which its root covers."""
    return np.array([[0], [FAN_OUT ** (len(starts) - 2)]])


@inlined
def _child_at(sums: Any, first: int, rest: float) -> Any:
    """Finds the last of eight children of positive weight that begins at or below `rest`.

    Returns:
        its place among the eight, and where it begins.
    """
    # Without branches, as none could be predicted.
    chosen, begins, ends = 0, 0.0, 0.0
    for j in range(FAN_OUT):
        ends += sums[first + j]
        is_before = ends <= rest
        chosen += is_before
        begins = ends if is_before else begins
    if chosen == FAN_OUT:  # rounding has left a mass beyond the last child
        chosen, ends = 0, 0.0
        for j in range(FAN_OUT):
            if ends + sums[first + j] > ends:
                chosen, begins = j, ends
            ends += sums[first + j]
    return chosen, begins


@inlined
def _joined(nodes: Any, first: int, is_least: bool) -> float:
    """Returns the least of eight children, or their sum."""
    if is_least:
        least = nodes[first]
        for j in range(1, FAN_OUT):
            least = min(least, nodes[first + j])
        return least
    # By halves: 0 and 4, 1 and 5, and so on; then these sums likewise.
    even = (nodes[first] + nodes[first + 4]) + (nodes[first + 2] + nodes[first + 6])
    odd = (nodes[first + 1] + nodes[first + 5]) + (nodes[first + 3] + nodes[first + 7])
    return even + odd


@loop
def set_leaves(nodes: Any, starts: Any, is_least: bool, leaves: Any, weights: Any) -> None:
    """Sets the weights `[B]` of `leaves` `[B]`, and joins what is above them.

    Of equal leaves the last one counts. A tree of least weights ignores leaves of weight 0.
    """
    depth, changed = len(starts) - 2, np.empty(len(leaves), np.int64)
    for i in range(len(leaves)):
        weight = weights[i]
        nodes[starts[depth] + leaves[i]] = weight if weight > 0 or not is_least else _INFINITY
        changed[i] = leaves[i]
    for level in range(depth, 0, -1):
        # All of a small level cost less than one node for each leaf.
        if starts[level + 1] - starts[level] <= len(leaves) * FAN_OUT:
            for node in range((starts[level + 1] - starts[level]) // FAN_OUT):
                children = starts[level] + node * FAN_OUT
                nodes[starts[level - 1] + node] = _joined(nodes, children, is_least)
        else:
            for i in range(len(leaves)):
                changed[i] >>= 3
                children = starts[level] + changed[i] * FAN_OUT
                nodes[starts[level - 1] + changed[i]] = _joined(nodes, children, is_least)


@loop
def weigh(
    column: Any,
    known: Any,
    sums: Any,
    starts: Any,
    slots: Any,
    otherwise: float,
    alpha: float,
    eps: float,
    sets: bool,
) -> None:
    """Sets the weights of rows `[B]`, and keeps as `known` `[N]` the raw priorities they are of.

    The weight of a row without one is of `otherwise`; `sets` says whether this becomes its raw priority.
    """
    weights = np.empty(len(slots))
    for i in range(len(slots)):
        known[slots[i]] = raw = np.float64(column[slots[i]])
        if not 0 < raw < _INFINITY:
            raw = otherwise
            if sets:
                column[slots[i]] = known[slots[i]] = raw
        weights[i] = (raw + eps) ** alpha
    set_leaves(sums, starts, False, slots, weights)


@loop
def newest_ranges(lanes: Any, T: int, window: int, ranges: Any) -> None:
    """Writes the leaves of the newest `window` steps of each lane, `[2, 2 E]`: firsts and ends.

    Those that have given way are among them, and have no weight.

    Args:
        lanes: `[E, 2]` cursors and tails as the tree knows them.
        T: the steps of each.
        window: at most T.
        ranges: the result.
    """
    for e in range(len(lanes)):
        cursor = lanes[e, CURSOR]
        count = min(cursor, window)
        first = (cursor - count) % T
        end = first + count
        ranges[0, 2 * e], ranges[1, 2 * e] = e * T + first, e * T + min(end, T)
        ranges[0, 2 * e + 1], ranges[1, 2 * e + 1] = e * T, e * T + max(end - T, 0)


@loop
def _cover(starts: Any, ranges: Any) -> Any:
    """Returns the largest nodes that lie wholly within some ranges, at most 14 a level and range.

    Args:
        starts: where the levels of the table begin.
        ranges: `[2, R]` disjoint ranges of leaves, firsts and ends.

    Returns:
        `[2, n]` their levels, 0 of the root, and their numbers there; in the order of their leaves, so
        that the same weights elsewhere are drawn alike.
    """
    depth, R, n = len(starts) - 2, ranges.shape[1], 0
    nodes = np.empty((2, 2 * FAN_OUT * depth * R), np.int64)
    ending = np.empty((2, FAN_OUT * depth), np.int64)
    for r in range(R):
        left, right, level, num_ending = ranges[0, r], ranges[1, r], depth, 0
        while left < right:
            # Up to where eight neighbours are one node of the level above.
            while left < right and left % FAN_OUT:
                nodes[0, n], nodes[1, n] = level, left
                left, n = left + 1, n + 1
            while left < right and right % FAN_OUT:
                right -= 1
                ending[0, num_ending], ending[1, num_ending] = level, right
                num_ending += 1
            left, right, level = left // FAN_OUT, right // FAN_OUT, level - 1
        for j in range(num_ending - 1, -1, -1):
            nodes[:, n] = ending[:, j]
            n += 1
    return nodes[:, :n]


@loop
def draw_leaves(
    sums: Any, starts: Any, ranges: Any, noise: Any, leaves: Any, weights: Any
) -> float:
    """Draws `leaves` `[B]` in proportion to their weights, and returns these and their total.

    Goes level by level over the batch, so that the reads of a level do not wait for one another. At each
    node it takes the last child of positive weight that begins at or below what is left of the mass: so
    whatever is rounded on the way, the weight of a leaf is positive, and a draw never leaves its ranges.

    Args:
        sums: the table of the tree.
        starts: where its levels begin.
        ranges: `[2, R]` disjoint ranges to draw within.
        noise: `[B]` random numbers of 63 bits.
        leaves: the result.
        weights: the result, `[B]` float64.
    """
    nodes, depth, batch = _cover(starts, ranges), len(starts) - 2, len(noise)
    ends, total, highest = np.empty(nodes.shape[1]), 0.0, 0
    for n in range(len(ends)):
        ends[n] = total + sums[starts[nodes[0, n]] + nodes[1, n]]
        if ends[n] > total:
            highest = n
        total = ends[n]
    # The level of the node in which each draw is, and what is left of its mass there.
    levels, rest = np.empty(batch, np.int64), weights
    for i in range(batch):
        rest[i] = (noise[i] >> 10) * 2.0**-53 * total  # uniform in [0, total)
        n = min(np.searchsorted(ends, rest[i], side="right"), highest)
        rest[i] -= ends[n - 1] if n else 0.0
        levels[i], leaves[i] = nodes[0, n], nodes[1, n]
    for level in range(1, depth + 1):
        for i in range(batch):
            if levels[i] < level:
                first = starts[level] + leaves[i] * FAN_OUT
                chosen, begins = _child_at(sums, first, rest[i])
                rest[i] -= begins
                leaves[i] = leaves[i] * FAN_OUT + chosen
                if level < depth:
                    prefetch(sums, starts[level + 1] + leaves[i] * FAN_OUT)
    for i in range(batch):
        weights[i] = sums[starts[depth] + leaves[i]]
    return total


@loop
def least_within(least: Any, starts: Any, ranges: Any) -> float:
    """Returns the least positive weight in the union of `ranges` `[2, R]`."""
    nodes, low = _cover(starts, ranges), _INFINITY
    for n in range(nodes.shape[1]):
        low = min(low, least[starts[nodes[0, n]] + nodes[1, n]])
    return low
