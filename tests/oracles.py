"""Which rows there must be, as slow Python over lists: the model that tests compare with.

A lane is the list of all the rows it ever got; what survives is its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RingOracle", "Row"]


@dataclass(frozen=True)
class Row:
    """One transition in the life of a lane."""

    lane: int
    step: int  # the first row that a lane gets is step 0
    episode: int  # unique within its lane
    done: bool


class RingOracle:
    """Lanes that keep `capacity // num_envs` rows each."""

    def __init__(self, capacity: int, num_envs: int = 1) -> None:
        self.num_envs, self.num_steps = num_envs, capacity // num_envs
        self.lanes: list[list[Row]] = [[] for _ in range(num_envs)]

    def append(self, done: Sequence[Sequence[bool]]) -> None:
        """Appends `done[i]` to lane i, one row per entry."""
        for number, (lane, flags) in enumerate(zip(self.lanes, done, strict=True)):
            for flag in flags:
                episode = lane[-1].episode + lane[-1].done if lane else 0
                lane.append(Row(number, len(lane), episode, bool(flag)))

    def live(self) -> dict[int, Row]:
        """Every surviving row, by its slot."""
        return {
            row.lane * self.num_steps + row.step % self.num_steps: row
            for lane in self.lanes
            for row in lane[-self.num_steps :]
        }
