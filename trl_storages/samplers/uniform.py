"""Uniform draws, with or without replacement.

Letters: B batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trl_storages import arguments
from trl_storages.index import EpisodeIndex
from trl_storages.packed import PackedStorage
from trl_storages.samplers.base import Drawn, OwnSampler

__all__ = ["UniformSampler"]


class UniformSampler(OwnSampler):
    """Draws uniformly over the live rows, whatever the fill of each lane.

    Args:
        without_replacement: whether to go through the rows in epochs, in random order: each row that is
            live when an epoch begins is drawn once, unless it is evicted before. The last batch of an
            epoch is completed by rows of the next.
    """

    def __init__(self, without_replacement: bool = False) -> None:
        super().__init__()
        self._is_by_epoch = arguments.flag("without_replacement", without_replacement)
        self._left = _Epoch.of(None, None)
        self._has_run_out = False

    @property
    def without_replacement(self) -> bool:
        """Whether rows are drawn in epochs."""
        return self._is_by_epoch

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return self._has_run_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._has_run_out = value

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws `[B]` slots."""
        if not self._is_by_epoch:
            return storage.episodes.draw(self.noise(batch_size), window), {}
        if window is not None:
            raise ValueError("UniformSampler(without_replacement=True) draws from all rows only.")
        return self._go_on(storage.episodes, batch_size), {}

    def _go_on(self, index: EpisodeIndex, batch_size: int) -> torch.Tensor:
        """Draws the next rows of the epoch, and of another one where they are not enough."""
        found: list[Any] = []
        left, has_run_out = self._left.alive(index), False
        while batch_size:
            if not len(left.slots):
                has_run_out = len(found) > 0
                left = _Epoch.of(index, self.noise(len(index)))
            found.append(left.slots[:batch_size])
            batch_size -= len(found[-1])
            left = left.without(len(found[-1]))
        self._left, self._has_run_out = left, has_run_out or not len(left.slots)
        return torch.cat(found)

    def _empty(self) -> None:
        self._left, self._has_run_out = _Epoch.of(None, None), False


class _Epoch(NamedTuple):
    """Rows that are left of an epoch, in random order: slots, and the steps of their lanes."""

    slots: torch.Tensor
    steps: torch.Tensor
    epoch: int
    """Of the index."""

    @classmethod
    def of(cls, index: EpisodeIndex | None, noise: torch.Tensor | None) -> _Epoch:
        """Returns all live rows, in the order of some noise; none without an index."""
        if index is None or noise is None:
            none = torch.zeros(0, dtype=torch.int64)
            return cls(none, none, -1)
        slots = index.live_slots()[noise.argsort(stable=True)]
        return cls(slots, index.steps_of(slots), index.since(None)[1].epoch)

    def alive(self, index: EpisodeIndex) -> _Epoch:
        """Returns those that were not evicted since."""
        if not len(self.slots) or index.since(None)[1].epoch != self.epoch:
            return self.of(None, None)
        stays = self.steps >= torch.from_numpy(index.tails)[index.lanes_of(self.slots)]
        return _Epoch(self.slots[stays], self.steps[stays], self.epoch)

    def without(self, count: int) -> _Epoch:
        """Returns all but the first ones."""
        return _Epoch(self.slots[count:], self.steps[count:], self.epoch)
