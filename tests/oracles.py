"""What the storages must do, as slow Python over lists: the model the tests compare with.

Nothing here knows tensors, clamping or modulo episode numbers. A lane is the list of all the rows
it ever got; what survives is a slice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["RingOracle", "Row"]


@dataclass(frozen=True)
class Row:
    """One transition in the life of a lane."""

    lane: int
    step: int  # the first row that a lane gets is step 0
    episode: int  # unique over all lanes and all time
    done: bool
    payload: Any = None


@dataclass
class RingOracle:
    """A ring of `num_envs` lanes that keep `capacity // num_envs` rows each, and have spare places."""

    capacity: int
    num_envs: int = 1
    spare_steps: int = 0
    lanes: list[list[Row]] = field(init=False)
    torn: set[int] = field(default_factory=set)  # episodes that lost rows when it was cleared
    episodes_begun: int = 0

    def __post_init__(self) -> None:
        self.places = self.capacity // self.num_envs
        self.lanes = [[] for _ in range(self.num_envs)]
        self.tails = [0] * self.num_envs  # steps before these are evicted, whatever else is

    def append(
        self,
        done: Sequence[Sequence[bool]],
        cut: Sequence[Sequence[bool]] | None = None,
        lanes: Sequence[int] | None = None,
        payload: Sequence[Sequence[Any]] | None = None,
    ) -> list[list[int]]:
        """Appends `done[i]` to lane `lanes[i]`, one row per entry; returns the slots."""
        slots = []
        for i, lane in enumerate(range(self.num_envs) if lanes is None else lanes):
            history = self.lanes[lane]
            slots.append([])
            for s, row_done in enumerate(done[i]):
                goes_on = self.surviving(lane) and not history[-1].done
                goes_on = goes_on and not (cut is not None and cut[i][s])
                if not goes_on:
                    self.episodes_begun += 1
                episode = history[-1].episode if goes_on else self.episodes_begun
                row_payload = None if payload is None else payload[i][s]
                row = Row(lane, len(history), episode, bool(row_done), row_payload)
                history.append(row)
                slots[-1].append(self.slot(row))
        return slots

    def clear(self, keep_steps: int = 0) -> None:
        """Forgets all but the last `keep_steps` rows of each lane, which begin its life anew."""
        for lane in range(self.num_envs):
            kept = self.surviving(lane)[-keep_steps:] if keep_steps else []
            self.torn |= {row.episode for row in kept if not self.is_whole(row)}
            self.torn |= {row.episode for row in kept if self.episode(row)[0] not in kept}
            self.lanes[lane] = [replace(row, step=step) for step, row in enumerate(kept)]
            self.tails[lane] = 0

    def evict(self, tails: Sequence[int]) -> None:
        """Evicts the rows before a step of each lane, whose steps go on."""
        for lane, tail in enumerate(tails):
            self.tails[lane] = min(max(tail, self.tails[lane]), len(self.lanes[lane]))

    def slot(self, row: Row) -> int:
        """Where the row lies in the ring."""
        return row.step % (self.places + self.spare_steps) * self.num_envs + row.lane

    def surviving(self, lane: int) -> list[Row]:
        """The rows of a lane that are not evicted, oldest first."""
        return self.lanes[lane][self.tails[lane] :][-self.places :]

    def live(self) -> dict[int, Row]:
        """Every surviving row, by its slot."""
        return {
            self.slot(row): row for lane in range(self.num_envs) for row in self.surviving(lane)
        }

    def episode(self, row: Row) -> list[Row]:
        """The surviving rows of the row's episode, oldest first."""
        return [other for other in self.surviving(row.lane) if other.episode == row.episode]

    def behind(self, row: Row) -> int:
        """How many surviving rows of the episode come before this one."""
        return sum(other.step < row.step for other in self.episode(row))

    def ahead(self, row: Row) -> int:
        """How many surviving rows of the episode come after this one."""
        return sum(other.step > row.step for other in self.episode(row))

    def is_finished(self, row: Row) -> bool:
        """Whether the episode was ended by a done row."""
        return any(other.done for other in self.lanes[row.lane] if other.episode == row.episode)

    def is_whole(self, row: Row) -> bool:
        """Whether no row of the episode is lost."""
        ever = sum(other.episode == row.episode for other in self.lanes[row.lane])
        return ever == len(self.episode(row)) and row.episode not in self.torn

    def begins(self, row: Row) -> bool:
        """Whether the episode begins with this row."""
        ever = [other for other in self.lanes[row.lane] if other.episode == row.episode]
        return row.step == ever[0].step and row.episode not in self.torn

    def sequence(
        self, row: Row, burn_in: int, onward: int, boundary: str = "pad"
    ) -> tuple[list[Row], list[bool]]:
        """The rows around this one, `burn_in` before it and `onward` from it on, and which are valid.

        "fit" looks for the nearest row of the episode around which they all lie in it.
        """
        rows = self.surviving(row.lane) if boundary == "cross" else self.episode(row)
        first, last, anchor = rows[0].step, rows[-1].step, row.step
        if boundary == "fit":
            # Else from which as many as there can be follow; of these, with most before it.
            places = [
                (
                    min(last - step + 1, onward),
                    min(step - first, burn_in),
                    -abs(step - row.step),
                    step,
                )
                for step in range(first, last + 1)
            ]
            anchor = max(places)[-1]
        by_step = {other.step: other for other in rows}
        wanted = range(anchor - burn_in, anchor + onward)
        chosen = [by_step[min(max(step, first), last)] for step in wanted]
        return chosen, [step in by_step for step in wanted]

    def by_age(self) -> list[Row]:
        """The live rows, newest first: steps behind the lane's cursor, fuller lane, higher lane."""

        def age(row: Row) -> tuple[int, int, int]:
            steps_behind = len(self.lanes[row.lane]) - row.step
            return steps_behind, -len(self.surviving(row.lane)), -row.lane

        return sorted(self.live().values(), key=age)

    def goals(self, row: Row, strategy: str) -> list[Row]:
        """The rows that may lend `row` their goal, equally likely but for "geometric"."""
        if strategy == "random":
            return list(self.live().values())
        episode = self.episode(row)
        if strategy == "final":
            return episode[-1:]
        if strategy == "current":
            return [row]
        if strategy in ("future", "geometric"):
            return [other for other in episode if other.step >= row.step]
        if strategy == "episode":
            return episode
        raise ValueError(strategy)
