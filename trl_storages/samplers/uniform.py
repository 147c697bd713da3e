"""Uniform draws, with or without replacement.

Letters: B batch, E lanes, N rows of an epoch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trl_storages import arguments
from trl_storages.index import EpisodeIndex
from trl_storages.packed import PackedStorage
from trl_storages.samplers.base import Drawn, OwnSampler
from trl_storages.states import Adopt, State, entries_of

__all__ = ["Epoch", "UniformSampler"]


@dataclass(frozen=True)
class Epoch:
    """The rows that were live when an epoch began, in an order that follows from its seed.

    Attributes:
        seed: of the order.
        tails: `[E]` the oldest live step of each lane then.
        cursors: `[E]` the first step that was not written yet.
    """

    seed: int
    tails: tuple[int, ...]
    cursors: tuple[int, ...]

    @classmethod
    def begun(cls, index: EpisodeIndex, seed: int) -> Epoch:
        """Returns the epoch of all rows that are live now."""
        return cls(seed, (*index.tails.tolist(),), (*index.cursors.tolist(),))

    def goes_on(self, index: EpisodeIndex) -> bool:
        """Whether its rows may be those of an index, which has begun anew if it has fewer steps."""
        tails, cursors = np.array(self.tails), np.array(self.cursors)
        return len(tails) == index.num_envs and bool(
            ((cursors - tails <= index.steps_per_lane) & (cursors <= index.cursors)).all()
        )

    @cached_property
    def order(self) -> np.ndarray:
        """`[N]` ranks of the rows, which are counted lane by lane, oldest first."""
        size = sum(self.cursors) - sum(self.tails)
        order: np.ndarray = torch.randperm(
            size, generator=torch.Generator().manual_seed(self.seed)
        ).numpy()
        return order

    def live_slots(self, index: EpisodeIndex, begin: int, end: int) -> np.ndarray:
        """Returns the slots of rows `begin` to `end` in order, but of those that were evicted since."""
        ranks, tails = self.order[begin:end], np.array(self.tails)
        ends = (np.array(self.cursors) - tails).cumsum()
        lanes = ends.searchsorted(ranks, side="right")
        steps = ranks + (np.array(self.cursors) - ends)[lanes]
        slots = lanes * index.steps_per_lane + steps % index.steps_per_lane
        return slots[steps >= index.tails[lanes]]


_MOST = 2**53
_NONE = Epoch(0, (), ())


class UniformSampler(OwnSampler):
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    Args:
        without_replacement: whether to go through the rows in epochs, in random order: each row that is
            live when an epoch begins is drawn once, unless it is evicted before. The last batch of an
            epoch is completed by rows of the next, and an iteration over the storage (`for batch in
            storage`) ends with it.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._is_by_epoch = arguments.flag("without_replacement", without_replacement)
        # The running epoch, and how many of its rows were drawn or are gone.
        self._epoch, self._num_drawn = _NONE, 0

    @property
    def without_replacement(self) -> bool:
        """Whether rows are drawn in epochs."""
        return self._is_by_epoch

    def draw(self, storage: PackedStorage, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots, and no entries.

        Raises:
            ValueError: there is a window, and rows are drawn without replacement.
        """
        if not self._is_by_epoch:
            return storage.episodes.draw(noise[0], window), {}
        if window is not None:
            raise ValueError("UniformSampler(without_replacement=True) draws from all rows only.")
        return self._go_on(storage.episodes, noise[0]), {}

    def _go_on(self, index: EpisodeIndex, noise: np.ndarray) -> np.ndarray:
        """Draws the next rows of the epoch, and of others where they are not enough."""
        found: list[np.ndarray] = []
        num_found, has_run_out, epoch, at = 0, False, self._epoch, self._num_drawn
        if not epoch.goes_on(index):
            epoch, at = _NONE, 0
        while num_found < len(noise):
            if at == len(epoch.order):
                has_run_out |= num_found > 0
                epoch, at = Epoch.begun(index, int(noise[num_found])), 0
            end = min(at + len(noise) - num_found, len(epoch.order))
            found.append(epoch.live_slots(index, at, end))
            num_found, at = num_found + len(found[-1]), end
        self._epoch, self._num_drawn = epoch, at
        self.ran_out = has_run_out or at == len(epoch.order)
        return np.concatenate(found)

    def _empty(self) -> None:
        self._epoch, self._num_drawn, self.ran_out = _NONE, 0, False

    def state(self) -> State:
        """Returns what the order of the running epoch follows from, and how far it has come."""
        if not self._is_by_epoch:
            return {}
        epoch = self._epoch
        tails, cursors = [*epoch.tails], [*epoch.cursors]
        return {"seed": epoch.seed, "tails": tails, "cursors": cursors, "drawn": self._num_drawn}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        if not self._is_by_epoch:
            return super().parsed(state)
        seed, *bounds, drawn = entries_of(
            "UniformSampler", state, ("seed", "tails", "cursors", "drawn")
        )
        if not all(isinstance(steps, list) for steps in bounds):
            raise ValueError("the bounds of an epoch must be lists of steps: nothing changed.")
        tails, cursors = (
            tuple(arguments.integer("a step", step, at_most=_MOST) for step in steps)
            for steps in bounds
        )
        epoch = Epoch(arguments.integer("seed", seed), tails, cursors)
        size = sum(cursors) - sum(tails)
        is_ordered = len(tails) == len(cursors) and all(map(operator.le, tails, cursors))
        if not is_ordered or arguments.integer("drawn", drawn) > size:
            raise ValueError(
                "an epoch must have as many rows as were drawn of it: nothing changed."
            )

        def adopt() -> None:
            self._epoch, self._num_drawn, self.ran_out = epoch, drawn, False

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'without_replacement=True' * self._is_by_epoch})"
