"""Keeps the counters that TorchRL reads from a writer, for a storage with an episode index."""

from __future__ import annotations

from multiprocessing import Value
from typing import Any

import torch
from torchrl.data import RoundRobinWriter
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages.ring import EpisodeIndex

__all__ = ["CountingWriter"]


class CountingWriter(RoundRobinWriter):  # type: ignore[misc]
    """Counts rows in 64 bits, as a month of training may overflow 32.

    Args:
        track_generations: as in TorchRL's `RoundRobinWriter`.
    """

    def __init__(self, *, track_generations: bool = False) -> None:
        self._write_count_value = Value("q", 0)
        super().__init__(track_generations=track_generations)

    @property
    def _episodes(self) -> EpisodeIndex:
        found: EpisodeIndex = self._storage.episodes
        return found

    @property
    def _write_count(self) -> int:
        found: int = self._write_count_value.get_obj().value
        return found

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        self._write_count_value.get_obj().value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        count = state.get("write_count__context")
        super().__setstate__(state)
        if count is not None:
            self._write_count_value = Value("q", count)

    @property
    def _cursor(self) -> int:
        """Where the next row of the first lane goes, for TorchRL."""
        storage = self._storage
        if storage is None:
            return 0
        episodes = storage.episodes
        found: int = episodes.ring.slots_at(episodes.host_steps.item(0), 0)
        return found

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        # TorchRL keeps its own number, but the episode index has the true one.
        RoundRobinWriter._cursor.fset(self, value)

    def _mark_update_entities(self, index: torch.Tensor) -> None:
        # As in TorchRL, without its support for compiled writers, and the calls that do nothing.
        for entity in self._storage._attached_entities_list:
            sampler = type(getattr(entity, "_sampler", None))
            if getattr(sampler, "mark_update", None) is not Sampler.mark_update:
                entity.mark_update(index)
