"""Keeps the counters that TorchRL reads from a writer, for a storage with an episode index."""

from __future__ import annotations

from multiprocessing import Value
from typing import Any

import torch
from torchrl.data import RoundRobinWriter, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages.ring import EpisodeIndex, Lanes
from trl_storages.rows import PackedStorage
from trl_storages.stock_parts import check_draws

__all__ = ["CountingWriter", "num_slots"]


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

    @property
    def tracks_generations(self) -> bool:
        """Whether the rows that each slot has held are counted.

        TorchRL's buffers read it between the draw and the gather, after their sampler has seen the
        storage. So this is where a sampler that is wrong about the lanes is refused.
        """
        if self._storage is not None:
            check_draws(self._storage, self)
        found: bool = self._track_generations
        return found

    def _mark_update_entities(self, index: torch.Tensor) -> None:
        # As in TorchRL, without its support for compiled writers, and the calls that do nothing.
        for entity in self._storage._attached_entities_list:
            sampler = type(getattr(entity, "_sampler", None))
            if getattr(sampler, "mark_update", None) is not Sampler.mark_update:
                entity.mark_update(index)

    def _count(self, lanes: Lanes = None) -> None:
        """Updates the counters of a storage after rows were written to some lanes."""
        storage, episodes = self._storage, self._storage.episodes
        if isinstance(storage, PackedStorage):
            storage._bump_mutation_revision()
        else:
            # The host knows these, where TorchRL would wait for the device.
            storage._len = num_slots(storage, episodes)
            storage._set_last_cursor(episodes.newest_slot(lanes))


def num_slots(storage: Storage, episodes: EpisodeIndex) -> int:
    """Returns what a storage counts as its length, with the rows of an episode index."""
    if isinstance(storage, PackedStorage):
        return len(episodes)
    # TorchRL's storages read only slots below their length, and lanes of unequal fill reach slots
    # beyond the number of rows.
    return int(episodes.host_fill.max()) * episodes.num_envs
