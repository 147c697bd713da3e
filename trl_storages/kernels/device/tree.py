"""A sum tree in tensor operations: weights of leaves and the sums over them.

Letters: B batch, N leaves, E lanes (environments), R leaves of a lane or ranges of leaves, L levels below
the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch.nn.functional import pad

from trl_storages.kernels.memory import on_device
from trl_storages.kernels.tables import FAN_OUT, level_starts, take

__all__ = ["SumTree", "only_last"]

_INFINITY = float("inf")


class SumTree:
    """Draws leaves in proportion to their weights, as `kernels.host.SumTree` does, on any device.

    On the CPU draws are bit-identical. Another device may add up the shares of children in another order
    as it draws; no guarantee depends on the last bit.

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
        starts = level_starts(self.num_leaves)
        self._starts = starts
        self._table = torch.zeros(starts[-1], dtype=torch.float64, device=device)
        self._sums = self._levels(self._table)
        self.weights = self._sums[-1].view(-1)[: self.num_leaves]
        self.total = self._table[0]
        # Writes for invalid leaves go to this one, with weight 0.
        self._spare = self.num_leaves
        self._child = torch.arange(FAN_OUT, device=device)
        # Of each level, from the lowest up: bits to shift a leaf by, and where the level begins.
        depth = len(self._sums)
        self._shifts = 3 * torch.arange(depth, device=device).view(-1, 1, 1)
        self._firsts = on_device(torch.tensor(starts[-2:0:-1]), self._table.device).view(
            -1, 1, 1, 1
        )
        self._least: list[torch.Tensor] | None = None

    def _levels(self, table: torch.Tensor) -> list[torch.Tensor]:
        """Returns the levels below the root, `[nodes above, 8]` each."""
        bounds = zip(self._starts[1:-1], self._starts[2:], strict=True)
        return [table[first:last].view(-1, FAN_OUT) for first, last in bounds]

    def set(self, slots: torch.Tensor, weights: torch.Tensor) -> None:
        """Sets the weights of some slots. If a slot occurs twice, the last weight counts.

        Args:
            slots: `[B]` int64; negative ones are ignored.
            weights: `[B]` float64, at least 0; `[1]` sets all to the same.
        """
        weights = weights.expand(slots.shape)
        leaves = slots
        if self.num_lanes > 1:
            leaves = _transposed(slots, self.num_lanes, self.lane_leaves)
        leaves, order = only_last(torch.where(slots < 0, self._spare, leaves), self._spare)
        weights = torch.where(leaves == self._spare, 0.0, weights[order])
        self._sums[-1].view(-1)[leaves] = weights
        if self._least is not None:
            self._least[-1].view(-1)[leaves] = torch.where(weights > 0, weights, _INFINITY)
        for level in range(len(self._sums) - 1, -1, -1):
            leaves = leaves // FAN_OUT
            self._above(self._sums, level)[leaves] = _sums_of(self._sums[level][leaves])
            if self._least is not None:
                self._above(self._least, level)[leaves] = self._least[level][leaves].amin(1)

    def _above(self, levels: list[torch.Tensor], level: int) -> torch.Tensor:
        """Returns the parents of `levels[level]`, perhaps followed by padding."""
        if level:
            return levels[level - 1].view(-1)
        return self._table[:1] if levels is self._sums else self._lowest

    def renew(self, weights: torch.Tensor) -> None:
        """Sets the weights of all slots.

        Args:
            weights: float64, at least 0, one for each slot.
        """
        by_slot = pad(weights, (0, self.num_leaves - len(weights))).view(-1, self.num_lanes)
        self.weights.view(self.num_lanes, -1).copy_(by_slot.T)
        for level in range(len(self._sums) - 1, -1, -1):
            children = self._sums[level]
            self._above(self._sums, level)[: len(children)] = _sums_of(children)
        if self._least is not None:
            self._renew_least(self._least)

    def _renew_least(self, least: list[torch.Tensor]) -> None:
        least[-1].copy_(torch.where(self._sums[-1] > 0, self._sums[-1], _INFINITY))
        for level in range(len(least) - 1, -1, -1):
            self._above(least, level)[: len(least[level])] = least[level].amin(1)

    def range_sums(self, ranges: torch.Tensor) -> torch.Tensor:
        """Returns the sum of each of some ranges of leaves.

        Args:
            ranges: `[2, R]` int64, their first leaves and their ends.

        Returns:
            `[R]` float64.
        """
        return self._edges(ranges)[0]

    def _edges(self, ranges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums ranges, and returns the weights within them of the nodes on their edges.

        A range has two edges: the path from the root to its first leaf, and that to its last. Every other
        node is wholly inside the range or wholly outside.

        Returns:
            `[R]` sums; then, by the level of the children, from the root down: `[L, R, 2]` the nodes on
            the edges, and `[L, R, 2, 8]` the weights of their children within the range.
        """
        start, stop = ranges
        # An empty range stands for a leaf of weight 0.
        edge = torch.stack([start, torch.maximum(stop - 1, start)], 1)
        is_any = (start < stop).unsqueeze(1)
        weight = torch.where(is_any, take(self._sums[-1].view(-1), edge), 0.0)
        # For all levels at once, `[L, R, 2, 8]`: what does not depend on the level below.
        edges = edge >> self._shifts
        nodes = edges // FAN_OUT
        child = torch.add(self._child, nodes.unsqueeze(3), alpha=FAN_OUT)
        left, right = edges.view(*edges.shape, 1, 1).unbind(2)
        is_inside = (child > left) & (child < right)
        inside = torch.where(is_inside, take(self._table, child + self._firsts), 0.0)
        levels = zip(
            inside.unbind(), (child == left).unbind(), (child == right).unbind(), strict=True
        )
        parts = []
        for part, is_left, is_right in levels:
            left_weight, right_weight = weight.view(-1, 2, 1, 1).unbind(1)
            part = torch.where(is_right, right_weight, part)
            part = torch.where(is_left, left_weight, part)
            parts.append(part)
            weight = _sums_of(part)
        return weight[:, 0], nodes.flip(0), torch.stack(parts[::-1])

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
        uniform = ((noise >> 10).double() * 2.0**-53).unsqueeze(1)
        if ranges is None:
            leaf = self._descend(uniform * self.total, repeat((), len(self._sums)))
        else:
            totals, nodes, parts = self._edges(ranges)
            which, mass = _part_at(totals.unsqueeze(0), uniform * totals.cumsum(0)[-1])
            nodes, parts = nodes.index_select(1, which), parts.index_select(1, which)
            edges = zip(*nodes.unbind(2), *parts.unbind(2), strict=True)
            leaf = self._descend(mass, edges)
        weights = self.weights.index_select(0, leaf)
        ratios = (weights.amin() if reference is None else reference) / weights
        if self.num_lanes == 1:
            return leaf, ratios
        return _transposed(leaf, self.lane_leaves, self.num_lanes), ratios

    def _descend(self, rest: torch.Tensor, edges: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Descends from the root with a `[B, 1]` mass each, and returns the leaves reached.

        Args:
            rest: the masses.
            edges: for each level, if draws are within ranges: `[B]` the nodes on the left and on the
                right edge of each draw's range, and `[B, 8]` the weights of their children.
        """
        node = torch.zeros_like(rest[:, 0], dtype=torch.int64)
        for sums, edge in zip(self._sums, edges, strict=True):
            weights = sums.index_select(0, node)
            if edge:
                left, right, left_part, right_part = edge
                weights = torch.where((right == node).unsqueeze(1), right_part, weights)
                weights = torch.where((left == node).unsqueeze(1), left_part, weights)
            chosen, rest = _part_at(weights, rest)
            node = torch.add(chosen, node, alpha=FAN_OUT)
        return node

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
            table = torch.full_like(self._table, _INFINITY)
            self._lowest, levels = table[:1], self._levels(table)
            self._renew_least(levels)
            self._least = levels
        if ranges is None:
            return self._lowest[0].clone()
        start, stop = ranges
        edge = torch.stack([start, torch.maximum(stop - 1, start)])
        low = torch.where(start < stop, take(self._least[-1].view(-1), edge), _INFINITY).amin()
        # Up to where both edges meet: at each level, the children that lie between the two edges.
        for least in reversed(self._least):
            node = edge // FAN_OUT
            child = torch.add(self._child, node.unsqueeze(2), alpha=FAN_OUT)
            left, right = edge.unsqueeze(2)
            between = (child > left) & (child < right)
            low = torch.minimum(low, torch.where(between, take(least, node), _INFINITY).amin())
            edge = node
        return low


def _transposed(index: torch.Tensor, width: int, length: int) -> torch.Tensor:
    """Maps indices `[B]` into a table `[length, width]` to its transpose."""
    return index % width * length + index // width


def _sums_of(weights: torch.Tensor) -> torch.Tensor:
    """Adds `[..., 8]` children in the order of `kernels.host.SumTree`.

    `sum` and `cumsum` add in an order of their own, on a GPU in one that depends on the shape.
    """
    while (half := weights.shape[-1] // 2) > 0:
        weights = weights[..., :half] + weights[..., half:]
    return weights[..., 0]


def _part_at(weights: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last part of positive weight that begins at or below `rest`.

    Args:
        weights: `[B, n]` or `[1, n]`, of the parts.
        rest: `[B, 1]` masses.

    Returns:
        `[B]` the index of the part, and `[B, 1]` how far into it the mass reaches.
    """
    ends = weights.cumsum(1)
    begins = pad(ends[:, :-1], (1, 0))
    # As rounding may differ from sum to sum, only the weight says for sure that there is something.
    is_part = (weights > 0) & (ends > begins) & (begins <= rest)
    number = torch.arange(weights.shape[1], device=weights.device)
    chosen = torch.where(is_part, number, 0).amax(1, keepdim=True)
    return chosen.squeeze(1), rest - begins.expand(len(rest), -1).gather(1, chosen)


def only_last(index: torch.Tensor, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the last of equal indices, and replaces the others.

    On a GPU, the order of writes to the same index is undefined.

    Args:
        index: `[B]` int64.
        spare: the replacement.

    Returns:
        `[B]` indices in another order, and `[B]` the position of each in `index`.

    >>> only_last(torch.tensor([5, 3, 5]), spare=9)
    (tensor([3, 9, 5]), tensor([1, 0, 2]))
    """
    index, order = torch.sort(index, stable=True)
    goes_on = torch.zeros_like(index, dtype=torch.bool)
    torch.eq(index[1:], index[:-1], out=goes_on[:-1])
    return index.masked_fill(goes_on, spare), order
