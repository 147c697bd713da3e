"""The order of leaves in which the newest rows lie together.

Letters: E lanes (environments), T steps per lane.
"""

from __future__ import annotations

import torch

from trl_storages.episodes import EpisodeIndex

__all__ = ["LaneOrder"]


class LaneOrder:
    """Maps slots, which are time-major, to leaves, which lie lane by lane.

    Slot `t * E + l` is leaf `l * T + t`, so that the newest rows of a lane are two ranges of leaves
    at most, also where the lanes are filled unequally.

    Args:
        capacity: number of slots, E T or a little more.
        num_lanes: E.

    >>> order = LaneOrder(6, num_lanes=2)
    >>> order.leaves(torch.arange(6)).tolist()
    [0, 3, 1, 4, 2, 5]
    """

    def __init__(self, capacity: int, num_lanes: int = 1) -> None:
        self.num_lanes = num_lanes
        self._length = -(-capacity // num_lanes)
        #: Number of leaves; some may have no slot.
        self.num_leaves = self._length * num_lanes

    def leaves(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the leaves of slots, int64 of any shape; below 0 of slots below 0."""
        if self.num_lanes == 1:
            return slots
        leaves = slots % self.num_lanes * self._length + slots // self.num_lanes
        return torch.where(slots < 0, -1, leaves)

    def slots(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of leaves; the inverse of `leaves`."""
        if self.num_lanes == 1:
            return leaves
        return leaves % self._length * self.num_lanes + leaves // self._length

    def newest(
        self, episodes: EpisodeIndex, window: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the newest rows lie.

        Args:
            episodes: of a ring of E lanes.
            window: `[]` int64: how many rows, by the order of `EpisodeIndex.ages`.

        Returns:
            `[R]` int64 first leaves and `[R]` ends of disjoint ranges, of which some may be empty;
            R is 2 E at most.
        """
        if self.num_lanes == 1 and episodes.device.type == "cpu":
            return self._newest_on_host(episodes, int(window))
        length, ring = episodes.newest_per_lane(window), episodes.steps_per_lane
        start = (episodes.cursors - length) % ring
        # A lane's window may go over the end of its ring, on to its beginning.
        over = (start + length - ring).clamp(min=0)
        lane_start = torch.arange(self.num_lanes, device=length.device) * self._length
        starts = torch.cat([lane_start + start, lane_start])
        return starts, torch.cat([lane_start + start + length - over, lane_start + over])

    def _newest_on_host(
        self, episodes: EpisodeIndex, window: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does the same for one lane, in plain numbers, which take a tenth of the time."""
        length, ring = min(window, len(episodes)), episodes.steps_per_lane
        start = (int(episodes.cursors) - length) % ring
        over = max(start + length - ring, 0)
        ranges = [[start, 0], [ring, over]] if over else [[start], [start + length]]
        starts, ends = torch.tensor(ranges)
        return starts, ends
