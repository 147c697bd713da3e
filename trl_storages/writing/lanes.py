"""Which rows go to which lane, and where the episodes of a lane are cut.

Letters: E lanes (environments), L lanes written now, T steps of each, N rows of a flat batch,
U trajectories among them.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from trl_storages.kernels.memory import on_device
from trl_storages.kernels.tables import Block
from trl_storages.ring import EpisodeIndex
from trl_storages.writing.steps import Steps

__all__ = ["LaneNotes", "route"]


class LaneNotes:
    """Tracks which trajectory each lane holds, and when and by which process it was last written.

    Rows that were loaded, unpickled or found in a directory may be followed by those of new environments:
    the first gap of each of their lanes is no surprise.

    Args:
        episodes: the index of the lanes.
    """

    def __init__(self, episodes: EpisodeIndex) -> None:
        #: The index of the lanes.
        self.episodes = episodes
        #: Lanes that were not written since their rows were loaded.
        self.resumed: set[int] = set()
        #: `[E]` int64, the number of the last trajectory of each lane.
        self.trajectory = torch.zeros(episodes.num_envs, dtype=torch.int64, device=episodes.device)
        if self.trajectory.device.type == "cpu":
            #: The same as an array, for the directory.
            self.numbers = self.trajectory.numpy()
        # The write count at each lane's last write.
        self._written_at = np.zeros(episodes.num_envs, np.int64)
        #: `[E]` int64, the process that last wrote to each lane; None with a single process.
        self.process: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.process is not None:
            # Processes that share the lanes know each other's rows.
            return self.__dict__
        return self.__dict__ | {"resumed": {*range(self.episodes.num_envs)}}

    def resume(self) -> None:
        """Expects the next rows of each lane from new environments, or from the same."""
        self.resumed = {*range(self.episodes.num_envs)}

    def share_memory_(self) -> None:
        """Moves the state that other processes need to shared memory."""
        self.trajectory.share_memory_()  # type: ignore[no-untyped-call]
        if self.process is None:
            size = (self.episodes.num_envs,)
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
            is_open=_on_host(self.episodes.is_open),
            last_written=self._written_at,
        )
        device = self.episodes.device
        return [
            Block(rows.shape[1], lanes.tolist(), on_device(torch.from_numpy(rows), device))
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
            block = block.cut_at(self._first(block, self.process[block.which] != os.getpid()))
        return block

    def surprises(self, gap: torch.Tensor, block: Block) -> torch.Tensor:
        """Returns the gaps `[L, T]` bool without those of lanes that are written first since a resume."""
        if not self.resumed:
            return gap
        known = [lane in self.resumed for lane in range(self.episodes.num_envs)]
        return gap & ~self._first(block, torch.tensor(known)[block.which])

    def _first(self, block: Block, which: torch.Tensor) -> torch.Tensor:
        """Returns the first steps of some of the lanes `[L]` bool, as `[L, T]` bool."""
        first = which.unsqueeze(1) & (torch.arange(block.num_steps) == 0)
        return on_device(first, self.episodes.device)

    def note(self, steps: Steps, block: Block, write_count: int) -> None:
        """Records steps that were written, with the write count after them."""
        if len(self._written_at) > 1:
            if write_count < (latest := self._written_at.max()):
                # The count began anew: the lanes keep their order, as written before.
                self._written_at -= latest
            self._written_at[block.which] = write_count
        if steps.trajectory is not None:
            self.trajectory[block.which] = block.arranged(steps.trajectory)[:, -1]
        if self.process is not None:
            self.process[block.which] = os.getpid()
        if self.resumed:
            lanes = range(self.episodes.num_envs) if block.lanes is None else block.lanes
            self.resumed.difference_update(lanes)


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def route(
    trajectories: np.ndarray,
    done: np.ndarray,
    *,
    held: np.ndarray,
    is_open: np.ndarray,
    last_written: np.ndarray,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Assigns each trajectory of a flat batch to one lane.

    A trajectory continues in the lane that holds it. A new one goes to a lane whose episode has ended,
    else to the least recently written lane. Among ended lanes, it goes to that of the preceding
    trajectory in the batch while that lane has at most its share of the rows, else to the one with the
    fewest rows: so a flattened batch `[E, T]` fills the lanes as `[E, T]` does.

    Args:
        trajectories: `[N]` integers, one number a trajectory; the rows of each in time order.
        done: `[N]` bool, the episode ends with this row.
        held: `[E]` the number of the last trajectory of each lane.
        is_open: `[E]` bool, whether its episode is open.
        last_written: `[E]` when each lane was last written, by any clock.

    Returns:
        `[L]` lanes and the `[L, S]` numbers of their rows in time order, for each distinct number of rows
        that lanes get.

    Raises:
        ValueError: more trajectories stay open after the batch than there are lanes.

    >>> from numpy import array
    >>> two = {"held": array([0, 0]), "is_open": array([False, False]), "last_written": array([0, 0])}
    >>> route(array([4, 4, 5, 5]), array([False] * 4), **two)
    [(array([0, 1]), array([[0, 1],
           [2, 3]]))]
    """
    number, first, of_row = np.unique(trajectories, return_index=True, return_inverse=True)
    # Rank trajectories by their first appearance.
    order = first.argsort()
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    unit = rank[of_row.reshape(-1)]
    size = np.bincount(unit)
    goes_on = ~done[unit.argsort(kind="stable")[size.cumsum() - 1]]
    number = number[order]
    if (num_open := int(goes_on.sum())) > len(held):
        raise ValueError(_too_many(num_open, len(held)))
    lane, place = _lanes(number, size, goes_on, held, is_open, last_written)

    # Order the rows of each lane by the place of their trajectory in it, then by time.
    turn = np.empty(len(number), np.int64)
    turn[np.lexsort((np.arange(len(number)), place, lane))] = np.arange(len(number))
    rows = turn[unit].argsort(kind="stable")
    count = np.bincount(lane, size, minlength=len(held)).astype(np.int64)
    start = count.cumsum() - count
    blocks = []
    for num_rows in np.unique(count[count > 0]).tolist():
        lanes = np.flatnonzero(count == num_rows)
        blocks.append((lanes, rows[start[lanes, None] + np.arange(num_rows)]))
    return blocks


def _lanes(
    number: np.ndarray,
    size: np.ndarray,
    goes_on: np.ndarray,
    held: np.ndarray,
    is_open: np.ndarray,
    last_written: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lane of each trajectory `[U]`, and its place there `[U]`.

    Args:
        number: `[U]` the numbers of the trajectories.
        size: `[U]` their rows in the batch.
        goes_on: `[U]` bool, whether they are still open after these.
        held: as in `route`.
        is_open: likewise.
        last_written: likewise.
    """
    num_envs, share = len(held), -(-int(size.sum()) // len(held))
    holders = {int(held[lane]): lane for lane in np.flatnonzero(is_open)[::-1].tolist()}
    rows = [0] * num_envs
    # Lanes whose open episode would be cut, and those that already have a last trajectory.
    is_cut, is_taken, is_held = is_open.tolist(), [False] * num_envs, [False] * num_envs
    lanes, places = np.full(len(number), -1), np.ones(len(number), np.int64)
    for at, name in enumerate(number.tolist()):
        lane = holders.get(name)
        if lane is not None:
            # It continues the lane's newest row, so it comes first.
            lanes[at], places[at] = lane, 0
            rows[lane] += int(size[at])
            is_cut[lane] = False
            is_taken[lane] = is_held[lane] = bool(goes_on[at])
    when = last_written.tolist()
    before = -1
    for at, (num_rows, stays_open) in enumerate(zip(size.tolist(), goes_on.tolist(), strict=True)):
        if lanes[at] < 0:
            # An ended trajectory may precede one that stays open, if that one is new too.
            barred = is_taken if stays_open else is_held
            free = [lane for lane in range(num_envs) if not barred[lane]]
            if not free:
                raise ValueError(_too_many(num_envs + 1, num_envs))
            is_next = before in free and not is_cut[before] and rows[before] + num_rows <= share
            if not is_next:
                before = min(
                    free,
                    key=lambda lane: (
                        is_cut[lane],
                        when[lane] if is_cut[lane] else rows[lane],
                        when[lane],
                    ),
                )
            lanes[at], places[at] = before, 2 if stays_open else 1
            rows[before] += num_rows
            is_cut[before] = False
            is_taken[before] |= stays_open
        before = int(lanes[at])
    return lanes, places


def _too_many(num_trajectories: int, num_envs: int) -> str:
    return (
        f"rows of {num_trajectories} trajectories that run side by side need as many lanes, and there "
        f"are {num_envs}: pass num_envs={num_trajectories}, one for each environment, where the storage "
        "or its writer is made; or end those that are over, with a `done`."
    )
