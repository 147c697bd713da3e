"""A sum tree in compiled loops: weights of leaves and the sums over them.

Letters: B batch, N leaves, E lanes (environments), R leaves of a lane or ranges of leaves, L levels below
the root.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import pad

from trl_storages.kernels.host.compiling import address, array_at, compiled, inlined, prefetch
from trl_storages.kernels.tables import FAN_OUT, level_starts

__all__ = ["SumTree"]

_INFINITY = np.inf


class SumTree:
    """Draws leaves in proportion to their weights.

    A node is the sum of its eight children, always recomputed in float64 and in the same order, so
    nothing drifts, and equal weights make equal trees, whatever their history.

    A draw starts at the root with a mass below the total, and descends. At each node it takes the last
    child of positive weight that begins at or below what is left of the mass. Every node of positive
    weight has such a child, so whatever is rounded on the way, the leaf drawn has a positive weight; and
    a draw within ranges never leaves them, as anything outside counts as 0.

    Slots are time-major, leaves lane-major: slot `t * E + l` is leaf `l * R + t`. So the newest rows of a
    lane are at most two ranges of leaves, whatever the fill of each lane.

    Args:
        num_slots: with weight 0 at first.
        num_lanes: E.
        device: of the tree.

    Attributes:
        num_lanes: E.
        lane_leaves: R, the number of slots over E, rounded up.
        num_leaves: N = E R; some leaves may have no slot.
        weights: `[N]` float64 weights of the leaves. Read-only.
        total: `[]` float64 sum of all weights. Read-only.
    """

    def __init__(
        self, num_slots: int, num_lanes: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.num_lanes, self.lane_leaves = num_lanes, -(-num_slots // num_lanes)
        self.num_leaves = self.lane_leaves * num_lanes
        self._starts = np.array(level_starts(self.num_leaves))
        first, size = self._starts[-2:]
        self._table = torch.zeros(int(size), dtype=torch.float64, device=device)
        self.weights = self._table[first : first + self.num_leaves]
        self.total = self._table[0]
        self._least: np.ndarray | None = None

    @cached_property
    def _sums(self) -> np.ndarray:
        """The table as the loops take it."""
        return self._table.numpy()

    def set(self, slots: torch.Tensor, weights: torch.Tensor) -> None:
        """Sets the weights of some slots. If a slot occurs twice, the last weight counts.

        Args:
            slots: `[B]` int64; negative ones are ignored.
            weights: `[B]` float64, at least 0; `[1]` sets all to the same.
        """
        lanes = self.num_lanes, self.lane_leaves
        new = *lanes, slots.numel(), weights.numel(), address(slots), address(weights)
        _set_leaves(self._sums, self._starts, False, *new)
        if self._least is not None:
            _set_leaves(self._least, self._starts, True, *new)

    def renew(self, weights: torch.Tensor) -> None:
        """Sets the weights of all slots.

        Args:
            weights: float64, at least 0, one for each slot.
        """
        by_slot = pad(weights, (0, self.num_leaves - len(weights))).view(-1, self.num_lanes)
        self.weights.view(self.num_lanes, -1).copy_(by_slot.T)
        _renew(self._sums, self._starts, False)
        if self._least is not None:
            self._renew_least(self._least)

    def _renew_least(self, least: np.ndarray) -> None:
        weights = self._sums[self._starts[-2] :]
        least[self._starts[-2] :] = np.where(weights > 0, weights, _INFINITY)
        _renew(least, self._starts, True)

    def range_sums(self, ranges: torch.Tensor) -> torch.Tensor:
        """Returns the sum of each of some ranges of leaves.

        Args:
            ranges: `[2, R]` int64, their first leaves and their ends.

        Returns:
            `[R]` float64.
        """
        _, _, sums = _find_edges(self._sums, self._starts, ranges.shape[1], address(ranges))
        return torch.from_numpy(sums)

    def draw(
        self,
        noise: torch.Tensor,
        ranges: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws slots in proportion to their weights, with replacement.

        Args:
            noise: `[B]` int64 random numbers of 63 bits.
            ranges: `[2, R]` int64, the first leaves and the ends of disjoint ranges to draw within; None
                is all.
            reference: `[]` float64, above 0; None is the least weight that is drawn.

        Returns:
            `[B]` int64 slots, and `[B]` float64 the reference divided by their weights. Some slot must
            have a positive weight.
        """
        slots, ratios = torch.empty_like(noise), torch.empty_like(noise, dtype=torch.float64)
        within = (0, 0) if ranges is None else (ranges.shape[1], address(ranges))
        above = 0.0 if reference is None else reference.item()
        batch = noise.numel(), *map(address, (noise, slots, ratios))
        _draw(self._sums, self._starts, self.num_lanes, self.lane_leaves, *within, above, *batch)
        return slots, ratios

    @property
    def tracks_least(self) -> bool:
        """Whether the least weight below each node is kept up to date, as it is once it was asked for."""
        return self._least is not None

    def least(self, ranges: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the least positive weight in the union of some ranges, `[]`; infinity if none.

        The first call takes a pass over all leaves, and each `set` twice the time from then on.

        Args:
            ranges: `[2, R]` int64, their first leaves and their ends; None takes all leaves.
        """
        if self._least is None:
            least = np.full_like(self._sums, _INFINITY)
            self._renew_least(least)
            self._least = least
        low = self._least[0]
        if ranges is not None:
            low = _least_within(self._least, self._starts, ranges.shape[1], address(ranges))
        return torch.tensor(low, dtype=torch.float64)


@inlined
def _transposed(index: int, width: int, length: int) -> int:
    """Maps an index into a table `[length, width]` to its transpose."""
    row = index // width
    return (index - row * width) * length + row


@inlined
def _mass_of(x: int, total: float) -> float:
    """Turns 63 random bits into a mass, uniform in [0, total)."""
    return (x >> 10) * 2.0**-53 * total


@inlined
def _child_at(weights: np.ndarray, first: int, rest: float) -> tuple[int, float]:
    """Finds the last of eight children with positive weight that begins at or below `rest`.

    Returns:
        its index among the eight, and where it begins.
    """
    # Without branches, as none could be predicted.
    chosen, begins, ends = 0, 0.0, 0.0
    for j in range(FAN_OUT):
        ends += weights[first + j]
        is_before = ends <= rest
        chosen += is_before
        begins = ends if is_before else begins
    if chosen == FAN_OUT:
        # Rounding has left a mass beyond the last child.
        chosen, ends = 0, 0.0
        for j in range(FAN_OUT):
            if ends + weights[first + j] > ends:
                chosen, begins = j, ends
            ends += weights[first + j]
    return chosen, begins


@inlined
def _sum_of(weights: np.ndarray, first: int) -> float:
    """Adds eight children by halves: 0 and 4, 1 and 5, and so on; then these sums likewise."""
    even = (weights[first] + weights[first + 4]) + (weights[first + 2] + weights[first + 6])
    odd = (weights[first + 1] + weights[first + 5]) + (weights[first + 3] + weights[first + 7])
    return even + odd


@compiled
def _find_edges(
    sums: np.ndarray, starts: np.ndarray, num_ranges: int, ranges_at: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums ranges, and returns the weights within them of the nodes on their edges.

    A range has two edges: the path from the root to its first leaf, and that to its last. Every other
    node is wholly inside the range or wholly outside.

    Args:
        sums: the table of the tree.
        starts: where its levels begin.
        num_ranges: R.
        ranges_at: the address of `[2, R]` first leaves and ends.

    Returns:
        `[2, L, R]` the nodes on the edges, by the level of their children; `[2 L R 8]` the weights of
        their children within the range; and `[R]` the sums of the ranges.
    """
    depth, ranges = starts.shape[0] - 2, array_at(ranges_at, 2 * num_ranges, np.int64)
    nodes = np.empty((2, depth, num_ranges), dtype=np.int64)
    parts, totals = np.empty(nodes.size * FAN_OUT), np.empty(num_ranges)
    both = np.empty(2)
    for r in range(num_ranges):
        left, right = ranges[r], ranges[num_ranges + r] - 1
        if right < left:
            totals[r] = 0.0
            continue
        both[0], both[1] = sums[starts[depth] + left], sums[starts[depth] + right]
        for level in range(depth, 0, -1):
            left_weight, right_weight = both[0], both[1]
            for side in range(2):
                node = (right if side else left) >> 3
                nodes[side, level - 1, r] = node
                at = ((side * depth + level - 1) * num_ranges + r) * FAN_OUT
                for j in range(FAN_OUT):
                    child = node * FAN_OUT + j
                    if child < left or child > right:
                        part = 0.0
                    elif child == left:
                        part = left_weight
                    elif child == right:
                        part = right_weight
                    else:
                        part = sums[starts[level] + child]
                    parts[at + j] = part
                both[side] = _sum_of(parts, at)
            left, right = left >> 3, right >> 3
        totals[r] = both[0]
    return nodes, parts, totals


@compiled
def _draw(
    sums: np.ndarray,
    starts: np.ndarray,
    num_lanes: int,
    lane_leaves: int,
    num_ranges: int,
    ranges_at: int,
    reference: float,
    batch: int,
    noise_at: int,
    slots_at: int,
    ratios_at: int,
) -> None:
    """Draws `[B]` slots within R ranges, or from all leaves if there are none.

    Goes level by level over the whole batch, so that the reads of a level do not wait for one another.

    Args:
        sums: the table of the tree.
        starts: where its levels begin.
        num_lanes: E.
        lane_leaves: leaves per lane.
        num_ranges: R.
        ranges_at: as in `_find_edges`.
        reference: divided by the weights of the drawn leaves; 0 is the least of these.
        batch: B.
        noise_at: the address of `[B]` noise.
        slots_at: the address of the output, `[B]` slots.
        ratios_at: the address of the output, `[B]` ratios.
    """
    noise, slots = array_at(noise_at, batch, np.int64), array_at(slots_at, batch, np.int64)
    ratios = array_at(ratios_at, batch, np.float64)
    nodes, parts, totals = _find_edges(sums, starts, num_ranges, ranges_at)
    depth = nodes.shape[1]
    ends = np.empty(num_ranges)
    total, highest = 0.0 if num_ranges else sums[0], 0
    for r in range(num_ranges):
        ends[r] = total + totals[r]
        if ends[r] > total:
            highest = r
        total = ends[r]
    # The range of each draw as long as it is on one of its edges, then -1.
    which = np.empty(batch, dtype=np.int64)
    # Working memory until the leaves are known.
    leaves, rest = slots, ratios
    for i in range(batch):
        rest[i] = _mass_of(noise[i], total)
        # The last range of positive weight that begins at or below the mass.
        r, above = 0, highest
        while r < above:
            middle = (r + above) >> 1
            if ends[middle] > rest[i]:
                above = middle
            else:
                r = middle + 1
        if r > 0:
            rest[i] -= ends[r - 1]
        which[i] = r if num_ranges else -1
        leaves[i] = 0
    for level in range(1, depth + 1):
        for i in range(batch):
            node, r, at = leaves[i], which[i], -1
            if r >= 0:
                if node == nodes[0, level - 1, r]:
                    at = ((level - 1) * num_ranges + r) * FAN_OUT
                elif node == nodes[1, level - 1, r]:
                    at = ((depth + level - 1) * num_ranges + r) * FAN_OUT
                else:
                    which[i] = -1  # everything below is inside the range
            if at >= 0:
                chosen, begins = _child_at(parts, at, rest[i])
            else:
                chosen, begins = _child_at(sums, starts[level] + node * FAN_OUT, rest[i])
            rest[i] -= begins
            leaves[i] = node * FAN_OUT + chosen
            if level < depth:
                prefetch(sums, (starts[level + 1] + leaves[i] * FAN_OUT) * 8)
    least = _INFINITY
    for i in range(batch):
        ratios[i] = sums[starts[depth] + leaves[i]]
        least = min(least, ratios[i])
        if num_lanes > 1:
            slots[i] = _transposed(leaves[i], lane_leaves, num_lanes)
    dividend = reference if reference > 0 else least
    for i in range(batch):
        ratios[i] = dividend / ratios[i]


@inlined
def _joined(nodes: np.ndarray, first: int, is_least: bool) -> float:
    """Returns the sum of eight children, or their least weight."""
    if not is_least:
        return _sum_of(nodes, first)
    least = nodes[first]
    for j in range(1, FAN_OUT):
        least = min(least, nodes[first + j])
    return least


@inlined
def _join_level(nodes: np.ndarray, starts: np.ndarray, level: int, is_least: bool) -> None:
    """Recomputes the parents of a whole level."""
    for node in range((starts[level + 1] - starts[level]) // FAN_OUT):
        nodes[starts[level - 1] + node] = _joined(nodes, starts[level] + node * FAN_OUT, is_least)


@compiled
def _set_leaves(
    nodes: np.ndarray,
    starts: np.ndarray,
    is_least: bool,
    num_lanes: int,
    lane_leaves: int,
    num_slots: int,
    num_weights: int,
    slots_at: int,
    weights_at: int,
) -> None:
    """Sets the weights of slots, and recomputes the nodes above their leaves."""
    slots = array_at(slots_at, num_slots, np.int64)
    weights = array_at(weights_at, num_weights, np.float64)
    depth = starts.shape[0] - 2
    changed = np.empty(slots.shape[0], dtype=np.int64)
    count, last = 0, weights.shape[0] - 1
    for i in range(slots.shape[0]):
        leaf = slots[i]
        if leaf >= 0:
            if num_lanes > 1:
                leaf = _transposed(leaf, num_lanes, lane_leaves)
            weight = weights[min(i, last)]
            # The least weight ignores leaves of weight 0.
            counts = weight > 0.0 or not is_least
            nodes[starts[depth] + leaf] = weight if counts else _INFINITY
            changed[count] = leaf
            count += 1
    for level in range(depth, 0, -1):
        # Recomputing all of a small level costs less than one node per leaf.
        if starts[level + 1] - starts[level] <= count * FAN_OUT:
            _join_level(nodes, starts, level, is_least)
        else:
            for i in range(count):
                changed[i] >>= 3
                children = starts[level] + changed[i] * FAN_OUT
                nodes[starts[level - 1] + changed[i]] = _joined(nodes, children, is_least)


@compiled
def _renew(nodes: np.ndarray, starts: np.ndarray, is_least: bool) -> None:
    """Recomputes all nodes above the leaves."""
    for level in range(starts.shape[0] - 2, 0, -1):
        _join_level(nodes, starts, level, is_least)


@compiled
def _least_within(least: np.ndarray, starts: np.ndarray, num_ranges: int, ranges_at: int) -> float:
    """Returns the least positive weight in the union of ranges."""
    ranges, low = array_at(ranges_at, 2 * num_ranges, np.int64), _INFINITY
    for r in range(num_ranges):
        left, right = ranges[r], ranges[num_ranges + r] - 1
        if right < left:
            continue
        level = starts.shape[0] - 2
        low = min(low, least[starts[level] + left], least[starts[level] + right])
        # Up to where both edges meet: at each level, the children that lie between the two edges.
        while left < right:
            for node in range(left + 1, min(right, (left | 7) + 1)):
                low = min(low, least[starts[level] + node])
            for node in range(max(left + 1, right & ~7), right):
                low = min(low, least[starts[level] + node])
            left, right, level = left >> 3, right >> 3, level - 1
    return low
