"""How the usual writes change the tables where these lie on the CPU.

Letters: T steps per lane, E lanes (environments), M = T * E slots, S steps written now.

`EpisodeIndex` takes any write on any device with some forty tensor operations. Training is made of two
kinds of writes that need far fewer: a stretch of one lane, which belongs to one episode, and one step
of several lanes, most often of all side by side. All ways lead to the same answers.
"""

from __future__ import annotations

import numpy as np

from trl_storages.episodes.tables import Tables

__all__ = ["HostTables"]


class HostTables:
    """Appends to tables on the CPU.

    Args:
        tables: NumPy views of the tables of an `EpisodeIndex`.
        num_envs: E.
        steps_per_lane: T.
    """

    def __init__(self, tables: Tables, num_envs: int, steps_per_lane: int) -> None:
        self.tables = tables
        self._num_envs = num_envs
        self._steps_per_lane = steps_per_lane
        self._lanes = np.arange(num_envs)

    def append_stretch(
        self, lane: int, num_steps: int = 1, *, done: bool, cut: bool = False
    ) -> int:
        """Takes further steps of one lane, all of one episode.

        Args:
            lane: which.
            num_steps: S, from 1 to T.
            done: whether the episode ends with the last of them.
            cut: whether the first of them does not continue the row before it.

        Returns:
            the slot of the first of them.
        """
        table, room, lanes = self.tables, self._steps_per_lane, self._num_envs
        begins = cut or not table.open.item(lane)
        number, step = table.begun.item(lane), table.cursors.item(lane)
        if begins:
            table.begun[lane] = number + 1
        else:
            number -= 1
        entry = lane * room + number % room
        place = step % room
        first, end = place * lanes + lane, place + num_steps
        if end <= room:
            table.episode[first : end * lanes : lanes] = entry
        else:
            # Around the end of the ring.
            end -= room
            table.episode[first::lanes] = entry
            table.episode[lane : end * lanes : lanes] = entry
        if begins:
            table.first[entry] = first
            table.first_step[entry] = step
        table.last[entry] = (end - 1) * lanes + lane
        table.finished[entry] = done
        table.open[lane] = not done
        step += num_steps
        table.cursors[lane] = step
        if step > room:
            # The oldest surviving episode begins with what survives of it.
            oldest = step % room * lanes + lane
            table.first[table.episode.item(oldest)] = oldest
        if step - num_steps < room:
            table.num_rows[()] += min(num_steps, room - step + num_steps)
        return first

    def append_steps(self, lane: int, done: np.ndarray, cut: np.ndarray | None) -> None:
        """Takes further steps of one lane, stretch by stretch.

        Args:
            lane: which.
            done: `[S]` bool, S from 1 to T: the episode ends with this row.
            cut: `[S]` bool: this row does not continue the row before it; or None.
        """
        ends = []
        if len(done) > 1:
            breaks = done[:-1] if cut is None else done[:-1] | cut[1:]
            ends = (breaks.nonzero()[0] + 1).tolist()
        start = 0
        for end in (*ends, len(done)):
            self.append_stretch(
                lane,
                end - start,
                done=done.item(end - 1),
                cut=cut is not None and cut.item(start),
            )
            start = end

    def go_on(self) -> None:
        """Takes one more step of the only lane, which neither begins an episode nor ends one."""
        table, room = self.tables, self._steps_per_lane
        step = table.cursors.item(0)
        slot = step % room
        entry = table.episode.item(slot - 1)
        table.episode[slot] = entry
        table.last[entry] = slot
        step += 1
        table.cursors[0] = step
        if step > room:
            oldest = step % room
            table.first[table.episode.item(oldest)] = oldest
        else:
            table.num_rows[()] = step

    def append_to_all(self, done: np.ndarray | None = None, cut: np.ndarray | None = None) -> int:
        """Takes one step of all lanes, which must have been written equally often.

        Args:
            done: `[E]` bool: the episode ends with this row; None if none does.
            cut: `[E]` bool: this row does not continue the row before it; or None.

        Returns:
            the slot of the first lane's row; those of the others follow it.
        """
        table, room, lanes = self.tables, self._steps_per_lane, self._num_envs
        step = table.cursors.item(0)
        first, before = step % room * lanes, (step - 1) % room * lanes
        slots = self._lanes + first
        # Episodes that go on keep their entries.
        entry = table.episode[before : before + lanes]
        if cut is not None or np.count_nonzero(table.open) < lanes:
            begins = ~table.open if cut is None else cut | ~table.open
            entry = self._begin(entry.copy(), begins, slots, step)
        table.episode[first : first + lanes] = entry
        table.last[entry] = slots
        if done is not None and np.count_nonzero(done):
            table.finished[entry] = done
            np.logical_not(done, out=table.open)
        table.cursors.fill(step + 1)
        if step < room:
            table.num_rows[()] = (step + 1) * lanes
        else:
            # The oldest surviving episodes begin with what survives of them.
            oldest = (step + 1) % room * lanes
            table.first[table.episode[oldest : oldest + lanes]] = self._lanes + oldest
        return first

    def next_slots(self, lanes: np.ndarray) -> np.ndarray:
        """Returns the slots `[L]` of the next step of some lanes."""
        return self.tables.cursors[lanes] % self._steps_per_lane * self._num_envs + lanes

    def append_to(self, lanes: np.ndarray, done: np.ndarray | None = None) -> None:
        """Takes one step of some lanes, however often each was written.

        Args:
            lanes: `[L]` int64, distinct.
            done: `[L]` bool: the episode ends with this row; None if none does.
        """
        table, room, width = self.tables, self._steps_per_lane, self._num_envs
        step, slots = table.cursors[lanes], self.next_slots(lanes)
        entry = table.episode[(step - 1) % room * width + lanes]
        begins = ~table.open[lanes]
        if begins.any():
            new = lanes[begins]
            opened = new * room + table.begun[new] % room
            entry[begins] = opened
            table.begun[new] += 1
            table.first[opened] = slots[begins]
            table.first_step[opened] = step[begins]
            table.finished[opened] = False
        table.episode[slots] = entry
        table.last[entry] = slots
        table.open[lanes] = True
        if done is not None:
            table.finished[entry] = done
            table.open[lanes] = ~done
        step += 1
        table.cursors[lanes] = step
        is_full = step > room
        if is_full.any():
            # The oldest surviving episodes begin with what survives of them.
            oldest = (step % room * width + lanes)[is_full]
            table.first[table.episode[oldest]] = oldest
        table.num_rows[()] = table.cursors.clip(max=room).sum()

    def _begin(
        self, entry: np.ndarray, begins: np.ndarray, slots: np.ndarray, step: int
    ) -> np.ndarray:
        """Opens entries for the episodes that begin in this step, and returns those of all lanes."""
        table, room = self.tables, self._steps_per_lane
        entry[begins] = (self._lanes * room + table.begun % room)[begins]
        np.add(table.begun, begins, out=table.begun)
        opened = entry[begins]
        table.first[opened] = slots[begins]
        table.first_step[opened] = step
        table.finished[opened] = False
        table.open.fill(True)
        return entry
