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
        return slots if self.num_lanes == 1 else _mapped(slots, self.num_lanes, self._length)

    def slots(self, leaves: torch.Tensor) -> torch.Tensor:
        """Returns the slots of `[B]` leaves; the inverse of `leaves`."""
        return leaves if self.num_lanes == 1 else _mapped(leaves, self._length, self.num_lanes)

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
        starts = np.empty(2 * self.num_lanes, np.int64)
        stops = np.empty_like(starts)
        _newest(lengths.numpy(), cursors.numpy(), room, self._length, starts, stops)
        return torch.from_numpy(starts), torch.from_numpy(stops)


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


@compiled
def _newest(
    lengths: np.ndarray,
    cursors: np.ndarray,
    room: int,
    length: int,
    starts: np.ndarray,
    stops: np.ndarray,
) -> None:
    num_lanes = len(lengths)
    for lane in range(num_lanes):
        first = lane * length
        start = (cursors[lane] - lengths[lane]) % room
        # The newest rows of a lane may go over the end of its ring, on to its beginning.
        over = max(start + lengths[lane] - room, 0)
        starts[lane], stops[lane] = first + start, first + start + lengths[lane] - over
        starts[num_lanes + lane], stops[num_lanes + lane] = first, first + over
