"""The order of leaves in which the newest rows lie together, in tensor operations.

Letters: E lanes (environments), R ring steps per lane.
"""

from __future__ import annotations

import torch

__all__ = ["LaneOrder"]


class LaneOrder:
    """Maps slots, which are time-major, to leaves, which lie lane by lane.

    Slot `t * E + l` is leaf `l * R + t`, so that the newest rows of a lane are two ranges of leaves
    at most, also where the lanes are filled unequally.

    Args:
        capacity: number of slots, E R or a little more.
        num_lanes: E.

    Attributes:
        lane_leaves: R.
        num_leaves: some of them may have no slot.

    >>> order = LaneOrder(6, num_lanes=2)
    >>> order.leaves(torch.arange(6)).tolist()
    [0, 3, 1, 4, 2, 5]
    """

    def __init__(self, capacity: int, num_lanes: int = 1) -> None:
        self.num_lanes = num_lanes
        self.lane_leaves = -(-capacity // num_lanes)
        self.num_leaves = self.lane_leaves * num_lanes

    def leaves(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the leaves of `[B]` slots, int64; below 0 of slots below 0."""
        if self.num_lanes == 1:
            return slots
        leaves = slots % self.num_lanes * self.lane_leaves + slots // self.num_lanes
        return torch.where(slots < 0, slots, leaves)

    def slots(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of `[B]` leaves; the inverse of `leaves`."""
        if self.num_lanes == 1:
            return leaves
        return leaves % self.lane_leaves * self.num_lanes + leaves // self.lane_leaves
