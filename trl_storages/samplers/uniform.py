"""Uniform sampling, with replacement or in epochs.

Letters: B batch, E lanes, N transitions of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from trl_storages import validation
from trl_storages.index import EpisodeIndex
from trl_storages.samplers.base import Drawn, ReplaySampler
from trl_storages.serialization import Adopt, State, required_items
from trl_storages.storage import StorageView

__all__ = ["UniformSampler"]


@dataclass(frozen=True, eq=False)
class _Epoch:
    """The rows that were live when an epoch began, in an order that follows from its seed.

    Attributes:
        seed: of the order.
        tails: `[E]` the oldest live step of each lane then.
        cursors: `[E]` the first step that was not written yet.
        number: the epoch of the index; None if it was loaded.
    """

    seed: int
    tails: np.ndarray
    cursors: np.ndarray
    number: int | None = None

    def goes_on(self, index: EpisodeIndex) -> bool:
        """Whether its rows may be those of an index."""
        if len(self.tails) != index.num_envs or self.number not in (None, index.generation):
            return False
        fits = self.cursors - self.tails <= index.steps_per_lane
        return bool((fits & (self.cursors <= index.cursors)).all())

    @cached_property
    def order(self) -> np.ndarray:
        """`[N]` ranks of the rows, which are counted lane by lane, oldest first."""
        size, generator = int((self.cursors - self.tails).sum()), torch.Generator()
        generator.manual_seed(self.seed)
        return torch.randperm(size, generator=generator, device="cpu").numpy()

    def live_slots(self, index: EpisodeIndex, begin: int, end: int) -> np.ndarray:
        """Returns the slots of rows `begin` to `end` in order, but of those that were evicted since."""
        ranks, ends = self.order[begin:end], (self.cursors - self.tails).cumsum()
        lanes = ends.searchsorted(ranks, side="right")
        steps = ranks + (self.cursors - ends)[lanes]
        return index.slots_of(lanes, steps)[steps >= index.tails[lanes]]


_MOST = 2**53
_NONE = _Epoch(0, np.empty(0, np.int64), np.empty(0, np.int64))


class UniformSampler(ReplaySampler):
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    Args:
        without_replacement: whether to go through the rows in epochs, in random order: each row that is
            live when an epoch begins is drawn once, unless it is evicted before. The last batch of an
            epoch is completed by rows of the next, and an iteration over the storage (`for batch in
            storage`) ends with it. A reader beside a writer leaves out a few more, where it draws
            again in the place of rows that gave way.

    >>> from trl_storages import PackedStorage, ReplayStorage
    >>> ReplayStorage(storage=PackedStorage(100)).sampler
    UniformSampler()
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._is_by_epoch = validation.flag("without_replacement", without_replacement)
        # The running epoch, and how many of its rows were drawn or are gone.
        self._epoch, self._num_drawn = _NONE, 0

    @property
    def without_replacement(self) -> bool:
        """Whether rows are drawn in epochs."""
        return self._is_by_epoch

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws `[B]` slots, and no entries.

        Raises:
            ValueError: there is a window, and rows are drawn without replacement.
        """
        if not self._is_by_epoch:
            return view.episodes.draw(noise[0], window), {}
        if window is not None:
            raise ValueError("UniformSampler(without_replacement=True) draws from all rows only.")
        return self._go_on(view.episodes, noise[0]), {}

    def _go_on(self, index: EpisodeIndex, noise: np.ndarray) -> np.ndarray:
        """Draws the next rows of the epoch, and of others where they are not enough."""
        found: list[np.ndarray] = []
        num_found, has_run_out, epoch, at = 0, False, self._epoch, self._num_drawn
        if not epoch.goes_on(index):
            epoch, at = _NONE, 0
        while num_found < len(noise):
            if at == len(epoch.order):
                index.check_filled()
                has_run_out |= num_found > 0
                bounds = index.tails.copy(), index.cursors.copy()
                epoch, at = _Epoch(int(noise[num_found]), *bounds, index.generation), 0
            end = min(at + len(noise) - num_found, len(epoch.order))
            found.append(epoch.live_slots(index, at, end))
            num_found, at = num_found + len(found[-1]), end
        self._epoch, self._num_drawn = epoch, at
        self.ran_out = has_run_out or at == len(epoch.order)
        return np.concatenate(found)

    def _empty(self) -> None:
        self._epoch, self._num_drawn = _NONE, 0

    def state(self) -> State:
        """Returns what the order of the running epoch follows from, if any, and how far it has come."""
        epoch = self._epoch
        tails, cursors = epoch.tails.tolist(), epoch.cursors.tolist()
        return {"seed": epoch.seed, "tails": tails, "cursors": cursors, "drawn": self._num_drawn}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state."""
        seed, *bounds, drawn = required_items(
            "UniformSampler", state, ("seed", "tails", "cursors", "drawn")
        )
        if not all(isinstance(steps, list) for steps in bounds):
            raise ValueError("the bounds of an epoch must be lists of steps: nothing changed.")
        tails, cursors = (
            np.array(
                [validation.integer("a step", step, at_most=_MOST) for step in steps], np.int64
            )
            for steps in bounds
        )
        epoch = _Epoch(validation.integer("seed", seed), tails, cursors)
        is_ordered = len(tails) == len(cursors) and (tails <= cursors).all()
        if not is_ordered or validation.integer("drawn", drawn) > (cursors - tails).sum():
            raise ValueError(
                "an epoch must have as many rows as were drawn of it: nothing changed."
            )

        def adopt() -> None:
            self._epoch, self._num_drawn = epoch, drawn

        return adopt

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'without_replacement=True' * self._is_by_epoch})"
