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
        num_leaves: some of them may have no slot.

    >>> order = LaneOrder(6, num_lanes=2)
    >>> order.leaves(torch.arange(6)).tolist()
    [0, 3, 1, 4, 2, 5]
    """

    def __init__(self, capacity: int, num_lanes: int = 1) -> None:
        self.num_lanes = num_lanes
        self._length = -(-capacity // num_lanes)
        self.num_leaves = self._length * num_lanes

    def leaves(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the leaves of `[B]` slots, int64; below 0 of slots below 0."""
        if self.num_lanes == 1:
            return slots
        leaves = slots % self.num_lanes * self._length + slots // self.num_lanes
        return torch.where(slots < 0, slots, leaves)

    def slots(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of `[B]` leaves; the inverse of `leaves`."""
        if self.num_lanes == 1:
            return leaves
        return leaves % self._length * self.num_lanes + leaves // self._length

    def newest(
        self, lengths: torch.Tensor, cursors: torch.Tensor, room: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the newest rows of each lane lie.

        Args:
            lengths: `[E]` int64, how many rows of each lane.
            cursors: `[E]` int64, steps written to each lane since the beginning.
            room: R.

        Returns:
            `[2 E]` int64 first leaves and `[2 E]` ends of disjoint ranges, of which some are empty.
        """
        start = (cursors - lengths) % room
        # The newest rows of a lane may go over the end of its ring, on to its beginning.
        over = (start + lengths - room).clamp(min=0)
        lane_start = torch.arange(self.num_lanes, device=lengths.device) * self._length
        starts = torch.cat([lane_start + start, lane_start])
        return starts, torch.cat([lane_start + start + lengths - over, lane_start + over])
