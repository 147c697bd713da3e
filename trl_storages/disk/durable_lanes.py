"""The lanes of a storage on disk, as their writer sees them.

Letters: T steps, E lanes (environments), L lanes written now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_storages.disk.durable import Durable
from trl_storages.disk.journal import Steps
from trl_storages.keys import continued_keys
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout
from trl_storages.rows.packed import PackedStorage
from trl_storages.rows.staging import pairs_of

if TYPE_CHECKING:
    from trl_storages.kernels import NewRows

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
        rows: NewRows,
        num_steps: int,
        lanes: Sequence[int] | None,
        order: torch.Tensor | None,
        cut: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Returns `cut`, with a cut where an episode does not go on after reopening.

        Args:
            rows: that are to be written.
            num_steps: of each lane.
            lanes: the lanes that are written; None is all of them.
            order: `[L, T]`, which of the rows; or None.
            cut: `[L, T]` bool, where rows are cut off from the row before them; or None.
        """
        if not self._unsure.any():
            return cut
        lane = np.arange(len(self._unsure)) if lanes is None else np.array(lanes)
        storage = self._storage
        layout: Layout = storage.layout  # type: ignore[assignment]
        pairs = pairs_of(layout, continued_keys(layout.keys))
        gap = self._episodes.find_gaps(rows, num_steps, pairs, cut, lanes, order, storage.table)
        shape = len(lane), num_steps
        cut = torch.zeros(shape, dtype=torch.bool) if cut is None else cut.clone()
        begins = torch.zeros_like(cut[:, 0]) if gap is None else gap[:, 0]
        # Where nothing tells, an episode does not go on.
        cut[:, 0] |= torch.from_numpy(self._unsure[lane]) & (begins | (not len(pairs)))
        self._unsure[lane] = False
        return cut

    def steps(
        self,
        rows: NewRows,
        num_steps: int,
        lanes: Sequence[int] | None,
        order: torch.Tensor | None,
        cut: torch.Tensor | None,
        last_trajectory: torch.Tensor | None,
    ) -> Steps:
        """Returns what the files are told of the rows to be written.

        Args:
            rows: as in `cut_where_reset`, as all up to `cut`.
            num_steps: likewise.
            lanes: likewise.
            order: likewise.
            cut: likewise.
            last_trajectory: `[L]` int64, or None.
        """
        lane = np.arange(len(self._unsure)) if lanes is None else np.array(lanes)
        done = rows.done.reshape(-1)  # type: ignore[union-attr]
        ends = (done.view(-1, num_steps) if order is None else done[order]).numpy()
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
