"""Rows as they were stored: read, overwritten, listed by episode; no sampler or transform takes part.

Letters: B any shape of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Trajectory, filter_trajectories

from trl_storages import arguments, keys
from trl_storages.replay.on_disk import intact
from trl_storages.ring import EpisodeIndex, episodes_of
from trl_storages.ring.history import is_key, slots_of

__all__ = ["StoredRows"]


class StoredRows:
    """The part of `ReplayStorage` that shows its rows in time order."""

    # Of TorchRL's ReplayBuffer.
    _storage: Any
    _writer: Any
    _replay_lock: Any
    _write_lock: Any

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index of the storage."""
        return episodes_of(self.storage)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        # A storage of TorchRL's counts the slots up to the last row, also those in between.
        with self._replay_lock:
            return len(self.episodes)

    @intact
    def __getitem__(self, index: Any) -> Any:
        """Reads rows as they were stored, without transforms, into new memory.

        Args:
            index: a slice of the history in time order, the oldest row first (the rows of several
                lanes alternate, as `EpisodeIndex.ages` orders them); or slots, as an int, a list, a
                mask or an integer tensor of any shape B; or the key of an entry of the whole history.

        Returns:
            TensorDict `[B]`, or the entry.

        Raises:
            IndexError: a slot holds no row.
        """
        with self._replay_lock, self._write_lock:
            if is_key(index):
                return self._rows(slots_of(self.episodes, slice(None)))[index]
            return self._rows(slots_of(self.episodes, index))

    def _rows(self, slots: torch.Tensor) -> TensorDictBase:
        # One gather, also for a single slot: its row would be a view of the storage otherwise.
        return self._storage.get(slots.reshape(-1)).reshape(slots.shape)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Overwrites rows in place, which stay as old as they are.

        Args:
            index: as for reading.
            value: TensorDict `[B]` of all entries, or the entry of the whole history.

        Raises:
            IndexError: a slot holds no row. Nothing is written then.
            ValueError: an episode would end elsewhere than it does, or there are more or fewer rows
                than slots. Nothing is written then.
        """
        with self._replay_lock, self._write_lock:
            if is_key(index):
                slots = slots_of(self.episodes, slice(None))
                value = self._rows(slots).set(index, value)
            else:
                slots = slots_of(self.episodes, index)
            self._writer.write_at(slots, value)

    @intact
    def query(
        self,
        predicate: Callable[[Trajectory], bool] | None = None,
        *,
        trajectory_key: NestedKey | None = None,
    ) -> list[Trajectory]:
        """Lists the stored episodes, lane by lane, the oldest first.

        Args:
            predicate: which of them, as built from `torchrl.data.traj`; None lists all.
            trajectory_key: entry that tells episodes apart; None asks the episode index.

        Returns:
            TorchRL's `Trajectory`s of rows as they were stored, running and cut episodes included;
            `("collector", "traj_ids")` of the rows is a number of their episode.
        """
        if predicate is not None:
            arguments.function("predicate", predicate, "of a Trajectory, or None")
        if trajectory_key is not None:
            trajectory_key = arguments.key("trajectory_key", trajectory_key)
        with self._replay_lock, self._write_lock:
            if not len(self.episodes):
                return []
            listed = self.episodes.episodes()
            length = listed["length"]
            number = torch.arange(len(length), device=length.device).repeat_interleave(length)
            step = torch.arange(len(number), device=length.device)
            step -= (length.cumsum(0) - length)[number]
            rows = self._storage.get(self.episodes.shift(listed["first"][number], step))
        if trajectory_key is None:
            trajectory_key = keys.TRAJECTORY_IDS
            rows.set(trajectory_key, number.to(rows.device))
        return filter_trajectories(rows, predicate, trajectory_key=trajectory_key)
