"""What a storage must hold and draw, as slow Python over lists of transitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contract.steps import Transition

__all__ = ["Fold", "Model", "Row"]


class Row(NamedTuple):
    """A transition that was written."""

    step: Transition
    lane: int
    #: Unique over all lanes and all time.
    episode: int


class Fold(NamedTuple):
    """What a transition becomes together with those after it."""

    #: The last of them, whose next observation and flags are seen.
    last: Row
    num_steps: int
    reward: float
    is_terminated: bool


class Model:
    """Lanes that keep their last steps.

    Args:
        lanes: how many there are.
        num_steps: how many steps each keeps.
        on_gap: whether a row that does not continue the row before begins an episode: "cut", "ignore".
    """

    def __init__(self, lanes: int, num_steps: int, on_gap: str = "cut") -> None:
        self.num_steps, self.on_gap = num_steps, on_gap
        self.lanes: list[list[Row]] = [[] for _ in range(lanes)]
        self._begun: list[int] = []  # the id of each episode's first step
        self._trajectories: list[int | None] = [None] * lanes
        self._cut = [False] * lanes
        self._unsure = [False] * lanes

    # Writing

    def write(self, lane: int, step: Transition, trajectory: int | None = None) -> None:
        """Writes a step, and evicts the oldest one that there is no room for."""
        before = self.lanes[lane][-1] if self.is_open(lane) else None
        may_jump = self.on_gap == "ignore" and not self._unsure[lane]
        goes_on = (
            before is not None
            and (before.step.id + 1 == step.id or may_jump)
            and self._trajectories[lane] == trajectory
        )
        if not goes_on:
            self._begun.append(step.id)
        episode = before.episode if goes_on and before else len(self._begun) - 1
        self.lanes[lane] = [*self.lanes[lane], Row(step, lane, episode)][-self.num_steps :]
        self._cut[lane] = self._unsure[lane] = False
        self._trajectories[lane] = trajectory

    def is_open(self, lane: int) -> bool:
        """Whether the episode of the lane may go on."""
        rows = self.lanes[lane]
        return bool(rows) and not rows[-1].step.end and not self._cut[lane]

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Lets the next step of each lane begin an episode."""
        for lane in lanes:
            self._cut[lane] = True

    def empty(self, keep_steps: int = 0) -> None:
        """Forgets all but the last steps of each lane."""
        self.lanes = [rows[max(len(rows) - keep_steps, 0) :] for rows in self.lanes]

    def resume(self) -> None:
        """After a load an episode goes on only with its last observation."""
        self._unsure = [True] * len(self.lanes)

    # Reading

    @property
    def live(self) -> dict[int, Row]:
        """Each row by the id of its observation."""
        return {row.step.id: row for rows in self.lanes for row in rows}

    def episode(self, row: Row) -> list[Row]:
        """What is left of the row's episode."""
        return [other for other in self.lanes[row.lane] if other.episode == row.episode]

    def begins(self, row: Row) -> bool:
        """Whether its episode begins with the row."""
        return self._begun[row.episode] == row.step.id

    def whole_episodes(self) -> list[list[Row]]:
        """The episodes that have ended and lost no row."""
        first = [row for row in self.live.values() if self.begins(row)]
        return [rows for row in first if (rows := self.episode(row))[-1].step.end]

    def goals(self, row: Row, strategy: str) -> list[Row]:
        """The rows that may lend the row their goal."""
        episode = self.episode(row)
        onward = [other for other in episode if other.step.id >= row.step.id]
        return {
            "future": onward,
            "geometric": onward,
            "final": episode[-1:],
            "episode": episode,
            "random": list(self.live.values()),
            "current": [row],
        }[strategy]

    def fold(
        self,
        row: Row,
        n_step: int,
        discount: float,
        goal: int | None = None,
        *,
        ends_at_goal: bool = False,
    ) -> Fold:
        """Adds up the rewards of a row and those after it.

        Args:
            row: the first.
            n_step: how many at most.
            discount: of a step.
            goal: the id that hindsight asks for; None leaves rewards and flags as they are.
            ends_at_goal: whether a goal that is reached ends the window.
        """
        reward, is_terminated = 0.0, False
        onward = [other for other in self.episode(row) if other.step.id >= row.step.id][:n_step]
        for number, (step, *_) in enumerate(onward):
            wanted, kind = (step.first, -1) if goal is None else (goal, 1)
            reward += discount**number * _reward(step.id, wanted, kind)
            is_terminated = step.end == "terminated"
            if goal is not None and ends_at_goal:
                is_terminated = (step.id + 1 + goal + 2) % 4 == 0
            if is_terminated:
                break
        return Fold(onward[number], number + 1, reward, is_terminated)

    def sequence(
        self, anchor: Row, burn_in: int, onward: int, boundary: str
    ) -> tuple[list[Row], list[bool]]:
        """The rows of a sequence around a row, and which of them are no padding."""
        rows = self.lanes[anchor.lane] if boundary == "cross" else self.episode(anchor)
        at = rows.index(anchor)
        if boundary == "fit":
            # As many onward as there can be, then before; the nearest such place.
            at = max(
                range(len(rows)),
                key=lambda place: (
                    min(len(rows) - place, onward),
                    min(place, burn_in),
                    -abs(place - at),
                    place,
                ),
            )
        wanted = range(at - burn_in, at + onward)
        return (
            [rows[min(max(place, 0), len(rows) - 1)] for place in wanted],
            [0 <= place < len(rows) for place in wanted],
        )


def _reward(number: int, goal: int, kind: int) -> float:
    """As `steps.reward_fn`, of the step with this id, for the goal of this id and kind."""
    return (3 * (number + 1 + 1) + 7 * (goal + kind) + number // 3) % 1021 / 8
