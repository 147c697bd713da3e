"""The writer's state of each lane, and the cuts of episodes that follow from it.

Letters: E lanes (environments), L lanes written now, T steps of each.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from trl_storages.kernels.block import Block
from trl_storages.ring import EpisodeIndex
from trl_storages.writing.routing import route
from trl_storages.writing.steps import Steps

__all__ = ["LaneNotes"]

_MANY = 256


class LaneNotes:
    """Tracks which trajectory each lane holds, and when and by which process it was last written.

    An episode that was open when a directory was closed, or its writer killed, continues if the next row
    of its lane begins with the next observation of its last row. Otherwise the environment was reset in
    between, and the next row begins a new episode.

    Args:
        episodes: the index of the lanes.
        are_reopened: whether their rows come from a directory that was opened.
    """

    def __init__(self, episodes: EpisodeIndex, *, are_reopened: bool = False) -> None:
        self._episodes = episodes
        #: `[E]` bool, lanes whose open episode may not continue; None if there are none.
        self.unsure: torch.Tensor | None = (
            episodes.is_open if are_reopened and episodes.is_open.any() else None
        )
        #: `[E]` int64, the number of the last trajectory of each lane.
        self.trajectory = torch.zeros(episodes.num_envs, dtype=torch.int64, device=episodes.device)
        if self.trajectory.device.type == "cpu":
            #: The same as an array, for the directory.
            self.numbers = self.trajectory.numpy()
        # The write count at each lane's last write.
        self._written_at = np.zeros(episodes.num_envs, np.int64)
        #: `[E]` int64, the process that last wrote to each lane; None with a single process.
        self.process: torch.Tensor | None = None
        # The latest (lane, trajectory) pairs that were interrupted by another trajectory.
        self._left: deque[tuple[int, int]] = deque(maxlen=_MANY)

    def share_memory_(self) -> None:
        """Moves the state that other processes need to shared memory."""
        self.trajectory.share_memory_()  # type: ignore[no-untyped-call]
        if self.process is None:
            size = (self._episodes.num_envs,)
            self.process = torch.full(size, os.getpid()).share_memory_()  # type: ignore[no-untyped-call]

    def routes(self, steps: Steps) -> list[Block]:
        """Assigns the rows of a flat batch to lanes, by their trajectories.

        Raises:
            ValueError: more trajectories run side by side than there are lanes.
        """
        trajectory, done = steps.trajectory, steps.rows.done
        blocks = route(
            _on_host(trajectory),  # type: ignore[arg-type]
            _on_host(done).reshape(-1),  # type: ignore[arg-type]
            held=_on_host(self.trajectory),
            is_open=_on_host(self._episodes.is_open),
            last_written=self._written_at,
        )
        device = self._episodes.device
        return [
            Block(rows.shape[1], lanes.tolist(), torch.from_numpy(rows).to(device))
            for lanes, rows in blocks
        ]

    def cut(self, steps: Steps, block: Block) -> Block:
        """Cuts where a row can't continue the row before it in its lane.

        That is where the trajectory changes, or the process, as each has environments of its own.
        """
        if steps.trajectory is not None:
            now = block.arranged(steps.trajectory)
            before = self.trajectory[block.which].unsqueeze(1)
            block = block.cut_at(now != torch.cat([before, now[:, :-1]], 1))
        if self.process is not None:
            block = self._cut_first(block, self.process[block.which] != os.getpid())
        return block

    def cut_where_reset(self, block: Block, gap: torch.Tensor | None, *, is_known: bool) -> Block:
        """Cuts where an open episode of a reopened directory does not continue.

        Args:
            block: as `cut` returned it.
            gap: `[L, T]` bool, rows that do not continue the row before them; None for none.
            is_known: whether gaps can be found; otherwise no episode continues.
        """
        unsure = self.unsure[block.which]  # type: ignore[index]
        if is_known:
            unsure = torch.zeros_like(unsure) if gap is None else unsure & gap[:, 0]
        return self._cut_first(block, unsure)

    def may_begin(self, block: Block) -> torch.Tensor:
        """Returns the steps that may begin an episode for that reason, `[L, T]` bool."""
        unsure = self.unsure[block.which].unsqueeze(1)  # type: ignore[index]
        return unsure & (torch.arange(block.num_steps) == 0)

    def settle(self, blocks: Iterable[Block]) -> None:
        """Marks the lanes of committed steps as no longer unsure."""
        for block in blocks:
            self.unsure[block.which] = False  # type: ignore[index]
        if not self.unsure.any():  # type: ignore[union-attr]
            self.unsure = None

    def _cut_first(self, block: Block, begins: torch.Tensor) -> Block:
        """Cuts before the first row of some of the lanes, `[L]` bool."""
        cut = torch.zeros(len(begins), block.num_steps, dtype=torch.bool)
        cut[:, 0] = begins
        return block.cut_at(cut.to(self._episodes.device))

    def tears(self, steps: Steps, block: Block) -> bool:
        """Whether a trajectory resumes that another one had interrupted before its end.

        Such trajectories run side by side, so that there are too few lanes. False on a GPU, where
        looking would synchronize.

        Args:
            steps: about to be written.
            block: some of them, as `cut` returned it.
        """
        if steps.trajectory is None or block.cut is None or block.cut.device.type != "cpu":
            return False
        lane, step = torch.nonzero(block.cut, as_tuple=True)
        if not len(lane):
            return False
        is_open = self._episodes.is_open[block.which].unsqueeze(1)
        if not is_open.any():
            # It may be another collector with a numbering of its own.
            self._left.clear()
        done = block.arranged(steps.rows.done.reshape(-1))  # type: ignore[union-attr]
        goes_on = torch.cat([is_open, ~done[:, :-1]], 1)[lane, step]
        lane, step = lane[goes_on], step[goes_on]
        now = block.arranged(steps.trajectory)
        before = torch.cat([self.trajectory[block.which].unsqueeze(1), now[:, :-1]], 1)
        number = lane if block.lanes is None else torch.as_tensor(block.lanes)[lane]
        for at, old, new in zip(
            number.tolist(), before[lane, step].tolist(), now[lane, step].tolist(), strict=True
        ):
            if (at, new) in self._left:
                return True
            self._left.append((at, old))
        return False

    def note(self, steps: Steps, block: Block, write_count: int) -> None:
        """Records steps that were written, with the write count after them."""
        if len(self._written_at) > 1:
            self._written_at[block.which] = write_count
        if steps.trajectory is not None:
            self.trajectory[block.which] = block.arranged(steps.trajectory)[:, -1]
        if self.process is not None:
            self.process[block.which] = os.getpid()
            if steps.trajectory is not None:
                # Other processes may write to the lane before this one does again.
                goes_on = self._episodes.is_open[block.which]
                number = torch.arange(len(self.trajectory))[block.which][goes_on]
                left = self.trajectory[number]
                self._left.extend(zip(number.tolist(), left.tolist(), strict=True))


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
