"""What a directory must hold, kept in plain Python beside it.

Letters: E lanes, T live steps of a lane at most.
"""

from __future__ import annotations

import copy

import torch
from disk.rows import Found, new_serials, transitions
from tensordict import TensorDict

__all__ = ["History"]


class History:
    """The rows of each lane, and which of them a loss of power may not take.

    Attributes:
        cursors: `[E]` the step that comes next.
        tails: `[E]` the oldest step that is live.
        rows: `[E]` step -> serial number of the row that counts, those before the tail included.
        durable: `[E]` steps before it must never come back, whatever is cut.
        flushed: `[E]` the cursors of the last flush.
    """

    def __init__(self, num_lanes: int, size: int) -> None:
        self.num_lanes, self.per_lane = num_lanes, size // num_lanes
        # Steps that a writer may write before it touches the slot of a live row.
        self.spare = min(self.per_lane, max(64, self.per_lane // 64))
        self.cursors, self.tails = [0] * num_lanes, [0] * num_lanes
        self.durable, self.flushed = [0] * num_lanes, [0] * num_lanes
        self.rows: list[dict[int, int]] = [{} for _ in range(num_lanes)]

    def copy(self) -> History:
        return copy.deepcopy(self)

    # Writes

    def block(self, num_steps: int, lanes: list[int]) -> TensorDict:
        """The next steps of some lanes `[L, S]`, with serial numbers of their own."""
        steps = torch.tensor([[self.cursors[lane] + s for s in range(num_steps)] for lane in lanes])
        of_lane = torch.tensor(lanes)[:, None].expand_as(steps)
        return transitions(new_serials(*steps.shape), steps, of_lane)

    def write(self, block: TensorDict, lanes: list[int]) -> None:
        """Takes in a block that was written."""
        for lane, numbers in zip(lanes, block["serial"].tolist(), strict=True):
            for number in numbers:
                self.rows[lane][self.cursors[lane]] = number
                self.cursors[lane] += 1
            self.tails[lane] = max(self.tails[lane], self.cursors[lane] - self.per_lane)

    def keep(self, num_steps: int) -> None:
        """Forgets all but the newest steps of each lane."""
        for lane, cursor in enumerate(self.cursors):
            # This is on disk when it returns.
            self.tails[lane] = self.durable[lane] = max(self.tails[lane], cursor - num_steps)

    def load(self, other: History) -> None:
        """Takes the place of what was there by what another storage holds."""
        taken = other.copy()
        self.cursors, self.tails, self.rows = taken.cursors, taken.tails, taken.rows
        # A load is on disk when it returns.
        self.durable = list(self.tails)
        self.flush()

    def flush(self) -> None:
        self.flushed = list(self.cursors)

    # What must be found

    @property
    def live(self) -> Found:
        """All that is committed: what is found after a kill."""
        return (
            [
                [(step, self.rows[lane][step]) for step in range(tail, cursor)]
                for lane, (tail, cursor) in enumerate(zip(self.tails, self.cursors, strict=True))
            ],
            list(self.cursors),
        )

    def check_after_cut(self, got: Found, now: History | None = None) -> None:
        """Asserts that what was found after a loss of power may be so.

        Args:
            got: what was found.
            now: what would be if the write that was going on had been completed; None if there was none.
        """
        now = self if now is None else now
        lanes, cursors = got
        if not lanes:
            assert not any(self.flushed), "all that was flushed is gone"
            return
        for lane, rows in enumerate(lanes):
            known = {**self.rows[lane]}
            for step, serial in rows:
                wanted = {known.get(step), now.rows[lane].get(step)}
                assert serial in wanted, f"lane {lane}, step {step}: {serial}, not {wanted}"
            assert len(rows) <= self.per_lane, f"lane {lane} holds {len(rows)} rows"
            steps = {step for step, _ in rows}
            oldest = max(self.durable[lane], now.tails[lane])
            flushed = set(range(oldest, self.flushed[lane]))
            assert flushed <= steps, f"lane {lane} lost the flushed steps {sorted(flushed - steps)}"
            assert all(step >= self.durable[lane] for step in steps), (
                f"lane {lane} brings back what was forgotten: {sorted(steps)}, {self.durable}"
            )
            assert cursors[lane] <= max(now.cursors[lane], self.cursors[lane])

    def adopt(self, got: Found) -> None:
        """Goes on from what was found after a loss of power."""
        lanes, cursors = got
        for lane in range(self.num_lanes):
            rows = lanes[lane] if lanes else []
            cursor = cursors[lane] if lanes else 0
            self.cursors[lane], self.tails[lane] = cursor, cursor - len(rows)
            # What was written beyond is of a writer that is gone, and must never be found again.
            self.rows[lane] = {s: n for s, n in self.rows[lane].items() if s < cursor} | dict(rows)
            self.flushed[lane] = min(self.flushed[lane], cursor)
