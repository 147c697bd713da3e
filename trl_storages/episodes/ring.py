"""Where the steps of several lanes lie in a ring of slots, and how old each of them is.

Letters: T steps per lane, E lanes (environments), M = T * E slots, B any shape of slots.

A lane is the stream of one environment. The ring is time-major: step s of lane l lives in slot
`(s % T) * E + l`, and each lane has a cursor of its own, so a lane may skip a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from trl_storages import arguments
from trl_storages.episodes.tables import Array, take
from trl_storages.functional.draws import random_integers

__all__ = ["Lanes", "Ring"]

Lanes = Sequence[int] | torch.Tensor | None


class Ring:
    """Slots of several lanes, with the rows that live in them.

    Args:
        capacity: slots of the ring; rounded down to a multiple of `num_envs`.
        num_envs: number of lanes E.
        device: where it lives and answers.

    Raises:
        ValueError: `num_envs` is below 1 or `capacity` below `num_envs`.
    """

    def __init__(
        self, capacity: int, num_envs: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        capacity = arguments.integer("capacity", capacity, at_least=1)
        if capacity < num_envs:
            raise ValueError(
                f"capacity must be at least num_envs, so that every lane holds a row; got capacity "
                f"{capacity} for {num_envs} lanes."
            )
        self.num_envs = num_envs
        self.steps_per_lane = capacity // num_envs
        self.capacity = self.steps_per_lane * num_envs
        self.device = arguments.device("device", device)
        #: `[E]` int64, on the device: steps written to each lane since the beginning.
        self.cursors = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        #: `[]` int64, on the device: rows that are live now.
        self.num_rows = torch.zeros((), dtype=torch.int64, device=self.device)
        self._lane_ids = torch.arange(num_envs, device=self.device)

    # Size

    def __len__(self) -> int:
        """Number of live rows, known to the host."""
        if self.num_envs == 1:
            return min(self.host_steps.item(), self.steps_per_lane)
        return int(np.minimum(self.host_steps, self.steps_per_lane).sum())

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a row."""
        return len(self) == self.capacity

    @property
    def num_steps_written(self) -> torch.Tensor:
        """`[E]` int64 on the host: steps written to each lane since the beginning."""
        return torch.from_numpy(self.host_steps)

    @property
    def _in_step(self) -> bool:
        """Whether all lanes were written equally often, as far as the host may decide it.

        On a GPU this is left open for several lanes, so that a captured graph takes the general path,
        which stays right when a lane skips a step later.
        """
        if self.num_envs == 1:
            return True
        return self.device.type == "cpu" and self._was_in_step

    @cached_property
    def host_steps(self) -> np.ndarray:
        """`[E]` int64, the cursors as the host knows them without asking the device."""
        # On the CPU they are the same memory.
        on_host = self.device.type == "cpu"
        return self.cursors.numpy() if on_host else np.zeros(self.num_envs, np.int64)

    @property
    def _was_in_step(self) -> bool:
        """Whether all lanes were written equally often, as the host knows."""
        steps = self.host_steps
        return not np.count_nonzero(steps != steps[0])

    # Lanes and steps

    def lane_ids(self, lanes: Lanes = None) -> torch.Tensor:
        """Returns the lanes that `lanes` names, checked on the host.

        Args:
            lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all.

        Returns:
            `[L]` int64.

        Raises:
            ValueError: `lanes` is something else, or names an unknown lane or one twice.
        """
        if lanes is None:
            return self._lane_ids
        return torch.tensor(self.named_lanes(lanes), device=self.device)

    def named_lanes(self, lanes: Lanes = None) -> Sequence[int]:
        """Returns the numbers of the lanes that `lanes` names, as `lane_ids` does."""
        if lanes is None:
            return range(self.num_envs)
        try:
            ids = np.asarray(lanes.cpu() if isinstance(lanes, torch.Tensor) else lanes)
        except ValueError:  # lists of unequal lengths
            ids = np.asarray(None)
        if ids.dtype == bool:
            if ids.shape != (self.num_envs,):
                raise ValueError(
                    f"a mask of lanes must have shape [{self.num_envs}], got {list(ids.shape)}."
                )
            ids = ids.nonzero()[0]
        values = ids.reshape(-1).tolist() if ids.dtype.kind in "iu" else []
        if (
            ids.ndim != 1
            or not values
            or len(set(values)) != len(values)
            or not all(0 <= lane < self.num_envs for lane in values)
        ):
            raise ValueError(
                f"lanes must be a list of distinct numbers in 0..{self.num_envs - 1}, got {lanes}."
            )
        return values

    def next_slots(self, num_steps: int, lanes: Lanes = None) -> torch.Tensor:
        """Returns the slots that the next `num_steps` steps of the lanes will take.

        Args:
            num_steps: S.
            lanes: the L lanes that are written; None is all of them.

        Returns:
            `[L, S]` int64 slots. Of more than T steps only the last T are kept; the others are given
            slot -1.
        """
        num_steps = arguments.integer("num_steps", num_steps)
        run = self.next_run(num_steps, lanes)
        if run is not None:
            slots = torch.arange(run.start, run.stop, device=self.device)
            return slots.view(self.num_envs, num_steps)
        lane = self.lane_ids(lanes).unsqueeze(1)
        offset = torch.arange(num_steps, device=self.device)
        slots = (self.cursors[lane] + offset) % self.steps_per_lane * self.num_envs + lane
        if num_steps > self.steps_per_lane:
            slots[:, : -self.steps_per_lane] = -1
        return slots

    def next_run(self, num_steps: int, lanes: Lanes = None) -> range | None:
        """Returns what `next_slots` does, where these are neighbours in the order of the rows.

        Args:
            num_steps: S.
            lanes: the L lanes that are written; None is all of them.

        Returns:
            the slots, or None if they are no neighbours.
        """
        if lanes is not None:
            return None
        if self.num_envs > 1 and (num_steps > 1 or not self._was_in_step):
            return None
        first = self.host_steps.item(0) % self.steps_per_lane
        if first + num_steps > self.steps_per_lane:
            return None
        return range(first * self.num_envs, (first + num_steps) * self.num_envs)

    def newest_slot(self, lanes: Lanes = None) -> int:
        """Returns the slot of the newest row of the last one of `lanes`, without asking the device."""
        lane = self.named_lanes(lanes)[-1]
        return (self.host_steps.item(lane) - 1) % self.steps_per_lane * self.num_envs + lane

    def slots_since(self, num_steps: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the surviving rows that were written after so many steps.

        Args:
            num_steps: `[E]` int64 on the host, a former `num_steps_written`.

        Returns:
            int64 slots `[n]`, lane by lane, the oldest row first.
        """
        written = self.host_steps
        steps = [
            torch.arange(max(before, now - self.steps_per_lane), now)
            for before, now in zip(num_steps.tolist(), written.tolist(), strict=True)
        ]
        slots = [step % self.steps_per_lane * self.num_envs + at for at, step in enumerate(steps)]
        return torch.cat(slots).to(self.device)

    def steps(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the absolute step of each slot in its lane, int64, counted from 0."""
        newest = take(self.cursors, arguments.slots("slots", slots) % self.num_envs) - 1
        return newest - (newest - slots // self.num_envs) % self.steps_per_lane

    def is_live(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether each slot, of any number at all, is one that holds a row, bool."""
        arguments.slots("slots", slots)
        inside = (slots >= 0) & (slots < self.capacity)
        # Counted back from the cursor, a slot not yet written comes out before step 0.
        return inside & (self.steps(slots.clamp(0, self.capacity - 1)) >= 0)

    def shift(self, slots: Array, steps: Array | int) -> Array:
        """Returns the slots `steps` later (negative: earlier) in the same lane, unchecked.

        Args:
            slots: int64 of any shape B, a tensor or, on the CPU, a NumPy array.
            steps: of the same kind.
        """
        arguments.slots("slots", slots)
        if not isinstance(steps, int) or isinstance(steps, bool):
            arguments.slots("steps", steps)
        distance = steps if self.num_envs == 1 else steps * self.num_envs
        return (slots + distance) % self.capacity

    def own(self, tensor: torch.Tensor) -> Array:
        """Brings a tensor to the device, and sees it as a NumPy array if that is the CPU."""
        if self.device.type != "cpu":
            return tensor.to(self.device)
        return (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()

    # Age

    def ages(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rank by age of each slot among all live rows: 0 is the newest.

        Rows are ordered by how many steps they lie behind the cursor of their own lane, and in one
        such step by lane: those that hold more rows first, of equal ones the last lane first.

        Args:
            slots: int64 slots of live rows, any shape B.

        Returns:
            int64 ranks of shape B.
        """
        arguments.slots("slots", slots)
        if self._in_step:
            return (self.cursors[0] * self.num_envs - 1 - slots) % self.capacity
        lane = slots % self.num_envs
        age = (take(self.cursors, lane) - 1 - slots // self.num_envs) % self.steps_per_lane
        fill, lanes = self._by_fill()
        # Rows that are younger: those of lanes emptied before this age, and `age` of each other lane.
        place = torch.empty_like(lanes).scatter_(0, lanes, self._lane_ids)
        num_emptied = torch.searchsorted(fill, age, right=True)
        shorter = torch.cat([fill.new_zeros(1), fill.cumsum(0)])
        younger = take(shorter, num_emptied) + (self.num_envs - num_emptied) * age
        return younger + self.num_envs - 1 - take(place, lane)

    def slots_by_age(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the rows with these ranks by age; the inverse of `ages`.

        Args:
            ranks: int64 in `[0, num_rows)`, any shape B. The c newest rows have ranks `0 .. c - 1`.

        Returns:
            int64 slots of shape B.
        """
        arguments.slots("ranks", ranks)
        if self._in_step:
            return (self.cursors[0] * self.num_envs - 1 - ranks) % self.capacity
        fill, lanes = self._by_fill()
        # Level j holds the ages at which exactly the j emptiest lanes have no row left. Its first
        # rank is the number of rows younger than its first age.
        first_age = torch.cat([fill.new_zeros(1), fill[:-1]])
        rows_in_level = (fill - first_age) * (self.num_envs - self._lane_ids)
        end_rank = rows_in_level.cumsum(0)
        level = torch.searchsorted(end_rank, ranks, right=True)
        offset = ranks - take(end_rank - rows_in_level, level)
        width = self.num_envs - level
        age = take(first_age, level) + offset // width
        lane = take(lanes, self.num_envs - 1 - offset % width)
        step = take(self.cursors, lane) - 1 - age
        return step % self.steps_per_lane * self.num_envs + lane

    def newest_per_lane(self, window: torch.Tensor) -> torch.Tensor:
        """Counts how many of the `window` newest rows each lane holds.

        Args:
            window: `[]` int64, rows by the order of `ages`.

        Returns:
            `[E]` int64: the newest so many rows of each lane make up the window.
        """
        if self._in_step:
            # Whole steps, and of one step more the last lanes.
            length = (window + self._lane_ids) // self.num_envs
            return torch.minimum(length, self.cursors.clamp(max=self.steps_per_lane))
        fill, lanes = self._by_fill()
        # With `emptied` of the lanes in the window as a whole, the others share what is left of it.
        end = fill.cumsum(0) + fill * (self.num_envs - 1 - self._lane_ids)
        emptied = torch.searchsorted(end, window, right=True)
        # Not indexed: an index without dimensions would be read on the host.
        whole = take(torch.cat([fill.new_zeros(1), fill.cumsum(0)]), emptied)
        sharing = (self.num_envs - emptied).clamp(min=1)
        left = window - whole
        # Of equally old rows, those of the fullest lanes come first.
        place = self.num_envs - 1 - self._lane_ids
        share = left // sharing + (place < left % sharing)
        length = torch.where(self._lane_ids < emptied, fill, share)
        return torch.empty_like(length).scatter_(0, lanes, length)

    def _by_fill(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lanes' numbers of live rows, ascending, and the lanes in that order."""
        return torch.sort(self.cursors.clamp(max=self.steps_per_lane), stable=True)

    def random_slots(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws `n` live slots uniformly with replacement, whatever the lanes' fill.

        Returns:
            `[n]` int64 slots.
        """
        n = arguments.integer("n", n)
        arguments.generator("generator", generator)
        noise = random_integers(n, generator=generator, device=self.device)
        ranks = torch.as_tensor(self.own(noise) % self.own(self.num_rows))
        # In step, the live rows are a prefix of the slots, so any rank is a slot as it stands.
        return ranks if self._in_step else self.slots_by_age(ranks)
