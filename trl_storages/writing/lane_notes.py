"""What a writer remembers of each lane, and where that cuts an episode.

Letters: E lanes (environments).
"""

from __future__ import annotations

import os
from collections import deque

import numpy as np
import torch

from trl_storages.ring import EpisodeIndex
from trl_storages.writing.routing import route
from trl_storages.writing.steps import Block, Steps

__all__ = ["LaneNotes"]

_MANY = 256


class LaneNotes:
    """Remembers which trajectory each lane holds, when it was written last, and by which process.

    Args:
        episodes: the index of the lanes.
    """

    def __init__(self, episodes: EpisodeIndex) -> None:
        self._episodes = episodes
        #: `[E]` int64, the number of the last trajectory of each lane.
        self.trajectory = torch.zeros(episodes.num_envs, dtype=torch.int64, device=episodes.device)
        # When each lane was written last, in rows written.
        self._written_at = np.zeros(episodes.num_envs, np.int64)
        # Which process wrote last to each lane, if several do.
        self._process: torch.Tensor | None = None
        # The newest trajectories that were left for others before they ended, with their lanes.
        self._left: deque[tuple[int, int]] = deque(maxlen=_MANY)

    @property
    def are_shared(self) -> bool:
        """Whether several processes write."""
        return self._process is not None

    def share_memory_(self) -> None:
        """Moves to memory that other processes see what they must know."""
        self.trajectory.share_memory_()  # type: ignore[no-untyped-call]
        if self._process is None:
            size = (self._episodes.num_envs,)
            self._process = torch.full(size, os.getpid()).share_memory_()  # type: ignore[no-untyped-call]

    def routes(self, steps: Steps) -> list[Block]:
        """Gives rows of several lanes each to one, by their trajectories.

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

        That is one of another trajectory, or of another process, which has environments of its own.
        """
        if steps.trajectory is not None:
            now = block.arranged(steps.trajectory)
            before = self.trajectory[block.which].unsqueeze(1)
            cut = now != torch.cat([before, now[:, :-1]], 1)
            block = block._replace(cut=cut, last_trajectory=now[:, -1])
        if self._process is not None:
            is_other = self._process[block.which] != os.getpid()
            cut = torch.zeros(len(is_other), block.num_steps, dtype=torch.bool)
            cut[:, 0] = is_other
            cut = cut.to(self._episodes.device)
            block = block._replace(cut=cut if block.cut is None else cut | block.cut)
        return block

    def tears(self, steps: Steps, block: Block) -> bool:
        """Whether a trajectory goes on that was left for another one, which has not ended either.

        Such trajectories run side by side, in a lane too few. Those of a GPU are not waited for.

        Args:
            steps: that are about to be written.
            block: some of them, as `cut` returned it.
        """
        if steps.trajectory is None or block.cut is None or block.cut.device.type != "cpu":
            return False
        lane, step = torch.nonzero(block.cut, as_tuple=True)
        if not len(lane):
            return False
        is_open = self._episodes.is_open[block.which].unsqueeze(1)
        if not is_open.any():
            # Maybe another collector, which numbers its own.
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

    def note(self, block: Block, write_count: int) -> None:
        """Remembers that steps were written, as the last ones of so many rows."""
        if len(self._written_at) > 1:
            self._written_at[block.which] = write_count
        if block.last_trajectory is not None:
            self.trajectory[block.which] = block.last_trajectory
        if self._process is not None:
            self._process[block.which] = os.getpid()
            if block.last_trajectory is not None:
                # Others may write before this process does so again.
                goes_on = self._episodes.is_open[block.which]
                number = torch.arange(len(self.trajectory))[block.which][goes_on]
                left = block.last_trajectory[goes_on]
                self._left.extend(zip(number.tolist(), left.tolist(), strict=True))


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
