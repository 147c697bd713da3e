"""The order of leaves in which the newest rows lie together, in compiled loops.

Letters: E lanes (environments), R ring steps per lane.
"""

from __future__ import annotations

import numpy as np
import torch

from trl_storages.kernels.host.compiling import compiled

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
        return slots if self.num_lanes == 1 else _mapped(slots, self.num_lanes, self.lane_leaves)

    def slots(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of `[B]` leaves; the inverse of `leaves`."""
        return leaves if self.num_lanes == 1 else _mapped(leaves, self.lane_leaves, self.num_lanes)


def _mapped(index: torch.Tensor, width: int, length: int) -> torch.Tensor:
    mapped = np.empty(index.shape[0], np.int64)
    _transpose(index.numpy(), width, length, mapped)
    return torch.from_numpy(mapped)


@compiled
def _transpose(index: np.ndarray, width: int, length: int, mapped: np.ndarray) -> None:
    """Turns places in `[length, width]` into those in `[width, length]`."""
    for i in range(len(index)):
        row = index[i] // width
        column = index[i] - row * width
        mapped[i] = column * length + row if index[i] >= 0 else index[i]
