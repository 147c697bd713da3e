"""The lanes of a storage on disk, as their writer sees them.

Letters: T steps, E lanes (environments), L lanes written now.
"""

from __future__ import annotations

import numpy as np
import torch

from trl_storages.disk.durable import Durable
from trl_storages.disk.journal import Steps
from trl_storages.keys import continued_keys
from trl_storages.ring import EpisodeIndex, Lanes
from trl_storages.rows.layout import Layout
from trl_storages.rows.packed import PackedStorage
from trl_storages.rows.staging import pairs_of

__all__ = ["DurableLanes"]


class DurableLanes:
    """Says which rows begin an episode, for the files, and where an episode goes on after reopening.

    An episode that was going on when the directory was closed, or its writer killed, goes on if the
    next row of its lane shows what its last row led to. Otherwise the environment was reset in
    between, and the next row begins another episode.

    Args:
        storage: whose rows are on disk, now or from the first write on.
    """

    def __init__(self, storage: PackedStorage) -> None:
        self._storage = storage
        episodes: EpisodeIndex = storage.episodes  # type: ignore[assignment]
        self._episodes = episodes
        # Lanes of which it is not known yet whether their episode goes on.
        self._unsure = np.zeros(episodes.num_envs, bool)
        if storage.journal is not None:
            self._unsure[:] = episodes.is_open.numpy() & (episodes.num_steps_written.numpy() > 0)

    @property
    def trajectories(self) -> np.ndarray:
        """`[E]` int64, the collector's number of each lane's last trajectory."""
        journal = self._storage.journal
        none = np.zeros(self._episodes.num_envs, np.int64)
        return none if journal is None else journal.state.trajectories.copy()

    @property
    def write_count(self) -> int:
        """Rows written, as TorchRL's writers count them."""
        return 0 if self._storage.journal is None else self._storage.journal.state.write_count

    def cut_where_reset(
        self,
        rows: torch.Tensor,
        done: torch.Tensor,
        cut: torch.Tensor | None,
        lanes: Lanes,
    ) -> torch.Tensor | None:
        """Returns `cut`, with a cut where an episode does not go on after reopening.

        Args:
            rows: `[L, T, W]` int64.
            done: `[L, T]` bool.
            cut: `[L, T]` bool, where rows are cut off from the row before them; or None.
            lanes: the lanes, as the writer takes them.
        """
        if not self._unsure.any():
            return cut
        lane = self._episodes.lane_ids(lanes).numpy()
        return self._cut_where_reset(rows, done, cut, lane)

    def steps(
        self,
        done: torch.Tensor,
        cut: torch.Tensor | None,
        lanes: Lanes,
        last_trajectory: torch.Tensor | None,
    ) -> Steps:
        """Returns what the files are told of the rows to be written.

        Args:
            done: `[L, T]` bool.
            cut: `[L, T]` bool, where rows are cut off from the row before them; or None.
            lanes: the lanes, as the writer takes them.
            last_trajectory: `[L]` int64, or None.
        """
        lane = self._episodes.lane_ids(lanes).numpy()
        ends = done.numpy()
        begins = np.empty_like(ends)
        begins[:, 1:] = ends[:, :-1]
        begins[:, 0] = ~self._episodes.is_open.numpy()[lane]
        if cut is not None:
            begins |= cut.numpy()
        trajectories = None if last_trajectory is None else last_trajectory.numpy()
        return Steps(lane, begins, ends, trajectories)

    def catch_up(self) -> torch.Tensor | None:
        """Takes in a write that was committed when an interrupt kept it from the index.

        Returns:
            `[n]` int64 slots of its rows; None if there was no such write.
        """
        journal, written = self._storage.journal, self._episodes.num_steps_written
        if journal is None:
            return None
        journal.abort()
        if np.array_equal(journal.state.cursors, written.numpy()):
            return None
        known = written.clone()
        Durable(journal).rebuild(self._episodes)
        return self._episodes.slots_since(known)

    def _cut_where_reset(
        self,
        rows: torch.Tensor,
        done: torch.Tensor,
        cut: torch.Tensor | None,
        lane: np.ndarray,
    ) -> torch.Tensor:
        cut = torch.zeros_like(done) if cut is None else cut.clone()
        storage = self._storage
        layout: Layout = storage.layout  # type: ignore[assignment]
        pairs = pairs_of(layout, continued_keys(layout.keys))
        slots = self._episodes.newest_slots(torch.from_numpy(lane))
        breaks = storage.table.breaks(slots, rows, pairs)  # type: ignore[union-attr]
        begins = torch.zeros_like(cut[:, 0]) if breaks is None else breaks[:, 0]
        # Where nothing tells, an episode does not go on.
        cut[:, 0] |= torch.from_numpy(self._unsure[lane]) & (begins | (not len(pairs)))
        self._unsure[lane] = False
        return cut
