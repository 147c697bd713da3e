"""The queries of an episode index: positions and ages of rows, and draws of rows and episodes.

Letters: T live steps per lane at most, E lanes (environments), B any shape of slots.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages import arguments
from trl_storages.functional.draws import random_noise
from trl_storages.kernels import backend
from trl_storages.kernels.tables import BEGUN, FINISHED, FIRST

__all__ = ["EpisodeAnswers"]

# Attempts to draw whole episodes before all of them are listed.
_PATIENCE = 32


class EpisodeAnswers:
    """Answers where each row is in its episode and how old it is, and draws rows.

    Args:
        capacity: as in `EpisodeIndex`.
        num_envs: as in `EpisodeIndex`.
        device: as in `EpisodeIndex`.
        spare_steps: as in `EpisodeIndex`.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int = 1,
        device: torch.device | str = "cpu",
        *,
        spare_steps: int = 0,
    ) -> None:
        num_envs = arguments.integer("num_envs", num_envs, at_least=1)
        capacity = arguments.integer("capacity", capacity, at_least=1)
        if capacity < num_envs:
            raise ValueError(
                f"capacity must be at least num_envs, so that every lane holds a row; got capacity "
                f"{capacity} for {num_envs} lanes."
            )
        spare_steps = arguments.integer("spare_steps", spare_steps)
        self.device = arguments.device("device", device)
        self._on_host = self.device.type == "cpu"
        kernels = backend(self.device)
        #: The tables, for use by kernels.
        self.ring = kernels.Ring(capacity, num_envs, self.device, spare_steps=spare_steps)
        self.num_envs = num_envs
        self.spare_steps = spare_steps
        self.steps_per_lane: int = self.ring.steps_per_lane
        self.capacity: int = self.ring.capacity
        self.ring_steps: int = self.ring.ring_steps
        self.num_slots: int = self.ring.num_slots
        self._lane_ids = torch.arange(num_envs, device=self.device)

    # Size

    def __len__(self) -> int:
        """Number of live rows, known to the host."""
        if self.num_envs == 1:
            found: int = self.host_steps.item() - self.host_tails.item()
            return found
        # For a few numbers, Python's sum is three times as fast as NumPy's.
        return int(sum(self.host_steps.tolist()) - sum(self.host_tails.tolist()))

    @property
    def is_full(self) -> bool:
        """Whether every lane holds its maximum of live rows."""
        return len(self) == self.capacity

    @property
    def num_slots_reached(self) -> int:
        """The number of slots up to and including the last live one."""
        fill, start = self.host_fill, self.host_tails % self.ring_steps
        # Lanes that wrap around reach the end of the ring.
        last = np.minimum(start + fill, self.ring_steps) - 1
        last = last * self.num_envs + np.arange(self.num_envs)
        return int(last[fill > 0].max(initial=-1)) + 1

    @property
    def num_rows(self) -> torch.Tensor:
        """`[]` int64, on the device: the number of live rows."""
        return self.ring.fill.sum()

    @property
    def cursors(self) -> torch.Tensor:
        """`[E]` int64, on the device: steps written to each lane since the beginning."""
        return self.ring.cursors

    @property
    def tails(self) -> torch.Tensor:
        """`[E]` int64, on the device: the oldest live step of each lane, its cursor if it has none."""
        return self.ring.tails

    @property
    def fill(self) -> torch.Tensor:
        """`[E]` int64, on the device: the live rows of each lane."""
        return self.ring.fill

    @property
    def num_steps_written(self) -> torch.Tensor:
        """`[E]` int64 on the host: steps written to each lane since the beginning."""
        return torch.from_numpy(self.host_steps)

    @property
    def is_open(self) -> torch.Tensor:
        """`[E]` bool, whether the next row of the lane continues its last episode. A copy."""
        return self.ring.is_open.bool()

    @cached_property
    def host_steps(self) -> np.ndarray:
        """`[E]` int64, the host's copy of the cursors."""
        # On the CPU both share memory.
        return self.cursors.numpy() if self._on_host else np.zeros(self.num_envs, np.int64)

    @cached_property
    def host_tails(self) -> np.ndarray:
        """`[E]` int64, the host's copy of the tails."""
        return self.tails.numpy() if self._on_host else np.zeros(self.num_envs, np.int64)

    @property
    def host_fill(self) -> np.ndarray:
        """`[E]` int64, the live rows of each lane, on the host."""
        found: np.ndarray = self.host_steps - self.host_tails
        return found

    # Queries by slot

    def steps(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the absolute step of each slot in its lane, int64, counted from 0."""
        return self.ring.steps(_slots("slots", slots))

    def is_live(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether each slot holds a live row, bool. Accepts any integers."""
        slots = _slots("slots", slots)
        inside = (slots >= 0) & (slots < self.num_slots)
        slots = slots.clamp(0, self.num_slots - 1)
        # Counted back from the cursor, the step of a slot without a live row is before the tail.
        return inside & (self.ring.steps(slots) >= self.ring.oldest(slots))

    def shift(self, slots: torch.Tensor, steps: torch.Tensor | int) -> torch.Tensor:
        """Returns the slots `steps` later (negative: earlier) in the same lane, unchecked.

        Args:
            slots: int64 of any shape B.
            steps: int64 that broadcasts against B.
        """
        if not isinstance(steps, int) or isinstance(steps, bool):
            steps = _slots("steps", steps)
        return self.ring.shift(_slots("slots", slots), steps)

    def extent(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns how many surviving rows of the same episode come before and after each slot.

        Args:
            slots: int64 slots of live rows, any shape B.

        Returns:
            two int64 tensors of shape B.
        """
        return self.ring.extent(_slots("slots", slots))

    def behind(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns how many surviving rows of the same episode come before each slot, int64."""
        return self.extent(slots)[0]

    def ahead(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns how many rows of the same episode come after each slot, int64."""
        return self.extent(slots)[1]

    def windows(self, slots: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each row and those that follow it in its episode.

        Args:
            slots: int64 slots of live rows, `[B]`.
            num_rows: n, at least 1.

        Returns:
            `[n, B]` int64 slots, the row itself first, padded by repeating the episode's last row; and
            `[B]` int64, the number of distinct rows, from 1 to n.
        """
        num_rows = arguments.integer("num_rows", num_rows, at_least=1)
        return self.ring.windows(_slots("slots", slots), num_rows)

    def sequences(
        self, slots: torch.Tensor, burn_in: int, num_steps: int, boundary: str = "pad"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the rows around each slot, within its episode or its lane.

        Args:
            slots: int64 slots of live rows, `[B]`.
            burn_in: how many rows before it.
            num_steps: S, how many rows in total.
            boundary: "pad", "fit" or "cross", as in `EpisodeSequence`.

        Returns:
            `[B, S]` int64 slots in time order, padded by repeating the first or last row; `[B, S]` bool,
            False for padding; and `[B, S]` bool, whether an episode begins with the row.
        """
        return self.ring.sequences(_slots("slots", slots), burn_in, num_steps, boundary)

    def episode_id(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns an int64 number per slot, equal exactly for rows of the same live episode."""
        return self.ring.entries(_slots("slots", slots))

    def is_end(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether each row ended its episode by `done`, bool."""
        return self.is_finished(slots) & (self.ahead(slots) == 0)

    def is_finished(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether the slot's episode was ended by `done`, bool."""
        return self.ring.span(_slots("slots", slots))[..., FINISHED].bool()

    def is_whole(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether no row of the slot's episode has been evicted, bool."""
        slots = _slots("slots", slots)
        return self.ring.span(slots)[..., FIRST] >= self.ring.oldest(slots)

    # Age

    def ages(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rank by age of each slot among all live rows: 0 is the newest.

        Rows are ordered by how many steps they are behind their lane's cursor. Ties are broken by lane:
        lanes with more rows first, then higher lane numbers first.

        Args:
            slots: int64 slots of live rows, any shape B.

        Returns:
            int64 ranks of shape B.
        """
        return self.ring.ages(_slots("slots", slots))

    def slots_by_age(self, ranks: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the rows with these ranks by age; the inverse of `ages`.

        Args:
            ranks: int64 in `[0, num_rows)`, any shape B. The c newest rows have ranks `0 .. c - 1`.

        Returns:
            int64 slots of shape B.
        """
        return self.ring.slots_by_age(_slots("ranks", ranks))

    def live_slots(self) -> torch.Tensor:
        """Returns the slots of all rows, `[num_rows]` int64, newest first."""
        return self.slots_by_age(torch.arange(len(self), device=self.device))

    # Draws

    def random_slots(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws `n` live slots uniformly with replacement, whatever the fill of each lane.

        Returns:
            `[n]` int64 slots.
        """
        n = arguments.integer("n", n)
        arguments.generator("generator", generator)
        return self.ring.draw(random_noise(n, generator=generator, device=self.device))

    def random_episodes(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws `n` whole episodes (finished, no row evicted) uniformly with replacement.

        Returns:
            `[n]` int64 slots of their first rows.

        Raises:
            RuntimeError: there is no such episode.
        """
        n = arguments.integer("n", n)
        arguments.generator("generator", generator)
        drawn = self._try_to_draw(n, generator)
        if drawn is not None:
            return drawn
        first = self._first_of_whole()
        if not len(first):
            raise RuntimeError(
                "no finished episode is stored whole: write until one ends, or make the storage larger "
                "than an episode."
            )
        return first[random_noise(n, generator=generator, device=self.device) % len(first)]

    def has_whole_episode(self) -> bool:
        """Returns whether there is an episode that `random_episodes` can draw."""
        # Random trials are fastest, unless whole episodes are rare.
        drawn = self._try_to_draw(1, torch.Generator(self.device))
        return drawn is not None or len(self._first_of_whole()) > 0

    def _try_to_draw(self, n: int, generator: torch.Generator | None) -> torch.Tensor | None:
        """Draws `n` whole episodes uniformly with replacement, at a cost independent of their number.

        Returns:
            `[n]` int64 slots of their first rows, or None if too few draws were whole episodes.
        """
        oldest, counts = self._numbered()
        # Skip an oldest episode that has lost its first rows.
        lost = (counts > 0) & (self._span(self._lane_ids, oldest)[:, FIRST] < self.tails)
        oldest, counts = oldest + lost, counts - lost.long()
        ends = counts.cumsum(0)
        found = torch.full((n,), -1, device=self.device)
        # Rejection sampling: cut and running episodes are usually few.
        for _ in range(_PATIENCE if int(ends[-1]) else 0):
            draw = random_noise(n, generator=generator, device=self.device) % ends[-1]
            lane = torch.searchsorted(ends, draw, right=True)
            number = oldest[lane] + draw - (ends - counts)[lane]
            first, _, is_finished = self._span(lane, number).unbind(1)
            usable = (is_finished != 0) & (found < 0)
            found = torch.where(usable, self.ring.slots_at(first, lane), found)
            if bool((found >= 0).all()):
                return found
        return None

    def _numbered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `[E]` the number of each lane's oldest live episode, and `[E]` how many are live."""
        begun, most_live, lanes = self.ring.lanes[:, BEGUN], self.steps_per_lane, self._lane_ids
        entry = self.ring.entries(self.ring.slots_at(self.tails, lanes))
        count = 1 + (begun - 1 - entry + lanes * most_live) % most_live
        return begun - count, torch.where(self.fill > 0, count, 0)

    def _span(self, lanes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the entries `[n, 3]` of episodes by lane and number."""
        return self.ring.spans[lanes * self.steps_per_lane + numbers % self.steps_per_lane]

    def _first_of_whole(self) -> torch.Tensor:
        """Returns the slots of the first rows of all whole episodes."""
        episodes = self.episodes()
        found: torch.Tensor = episodes["first"][episodes["finished"] & episodes["whole"]]
        return found

    def episodes(self) -> TensorDict:
        """Lists the live episodes, lane by lane, oldest first.

        Returns:
            TensorDict `[n]` with int64 `first` (slot), `length` (surviving rows), `lane`, and bool
            `finished` and `whole`.
        """
        oldest, counts = self._numbered()
        lane = self._lane_ids.repeat_interleave(counts)
        number = (
            torch.arange(len(lane), device=self.device) + (oldest + counts - counts.cumsum(0))[lane]
        )
        first, last, is_finished = self._span(lane, number).unbind(1)
        begin = torch.maximum(first, self.tails[lane])
        return TensorDict(
            {
                "first": self.ring.slots_at(begin, lane),
                "length": last - begin + 1,
                "lane": lane,
                "finished": is_finished.bool(),
                "whole": first == begin,
            },
            batch_size=lane.shape,
        )


def _slots(name: str, value: Any) -> torch.Tensor:
    return torch.as_tensor(arguments.slots(name, value)).long()
