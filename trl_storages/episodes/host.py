"""How the usual writes change the tables where these lie on the CPU.

Letters: T steps per lane, E lanes (environments), M = T * E slots, S steps written now.

`EpisodeIndex` takes any write on any device with some forty tensor operations. Training is made of two
kinds of writes that need far fewer: a stretch of one lane, which belongs to one episode, and one step
of several lanes, most often of all side by side. All ways lead to the same answers.
"""

from __future__ import annotations

from itertools import pairwise

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
        # Single numbers are read and written through these, in a third of NumPy's time.
        views = Tables(*(memoryview(table) for table in tables))
        self._episode, self._first, self._last = views.episode, views.first, views.last
        self._first_step, self._finished = views.first_step, views.finished
        self._begun, self._open, self._cursors = views.begun, views.open, views.cursors
        self._num_rows = views.num_rows

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
        step = self._cursors[lane]
        place = step % room
        first, end = place * lanes + lane, place + num_steps
        entry = self._entry(lane, step, begins=cut or not self._open[lane])
        if num_steps == 1:
            self._episode[first] = entry
        elif end <= room:
            table.episode[first : end * lanes : lanes] = entry
        else:
            # Around the end of the ring.
            end -= room
            table.episode[first::lanes] = entry
            table.episode[lane : end * lanes : lanes] = entry
        self._last[entry] = (end - 1) * lanes + lane
        self._finished[entry] = done
        self._go_to(lane, step, num_steps, is_open=not done)
        return first

    def _go_to(self, lane: int, step: int, num_steps: int, *, is_open: bool) -> None:
        """Counts steps that a lane took from `step` on, and what they left of its oldest episode."""
        room = self._steps_per_lane
        self._open[lane] = is_open
        self._cursors[lane] = end = step + num_steps
        if end > room:
            # The oldest surviving episode begins with what survives of it.
            oldest = end % room * self._num_envs + lane
            self._first[self._episode[oldest]] = oldest
        if step < room:
            self._num_rows[()] += min(num_steps, room - step)

    def append_steps(self, lane: int, done: np.ndarray, cut: np.ndarray | None) -> None:
        """Takes further steps of one lane, stretch by stretch.

        Args:
            lane: which.
            done: `[S]` bool, S from 1 to T: the episode ends with this row.
            cut: `[S]` bool: this row does not continue the row before it; or None.
        """
        num_steps = len(done)
        breaks = done[:-1] if cut is None else done[:-1] | cut[1:]
        starts = (breaks.nonzero()[0] + 1).tolist()
        is_cut = cut is not None and cut.item(0)
        if not starts:
            self.append_stretch(lane, num_steps, done=done.item(-1), cut=is_cut)
            return
        room, lanes, step = self._steps_per_lane, self._num_envs, self._cursors[lane]
        entries, lengths = [], []
        for start, stop in pairwise([0, *starts, num_steps]):
            begins = start > 0 or is_cut or not self._open[lane]
            entry = self._entry(lane, step + start, begins=begins)
            self._last[entry] = (step + stop - 1) % room * lanes + lane
            self._finished[entry] = done.item(stop - 1)
            entries.append(entry)
            lengths.append(stop - start)
        of_steps = np.array(entries).repeat(lengths)
        of_lane, place = self.tables.episode[lane::lanes], step % room
        of_lane[place : place + num_steps] = of_steps[: room - place]
        # Around the end of the ring.
        of_lane[: max(place + num_steps - room, 0)] = of_steps[room - place :]
        self._go_to(lane, step, num_steps, is_open=not done.item(-1))

    def next_slot(self) -> int | None:
        """Returns the first slot of the next step of all lanes; None if they are not in step."""
        room, lanes = self._steps_per_lane, self._num_envs
        if lanes == 1:
            return self._cursors[0] % room
        written = self._cursors.tolist()
        return written[0] % room * lanes if written.count(written[0]) == lanes else None

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return self._num_rows[()]

    def append_step(self, done: np.ndarray | None = None) -> np.ndarray:
        """Takes one step of all lanes, which must be in step.

        Args:
            done: `[E]` bool: the episode ends with this row; None if none does.

        Returns:
            `[E]` int64 slots.
        """
        if self._num_envs > 1:
            return self.append_to_all(done)
        if done is None and self._open[0]:
            return np.array([self._go_on()])
        return np.array([self.append_stretch(0, done=done is not None and done.item(0))])

    def _go_on(self) -> int:
        """Takes one more step of the only lane, which neither begins an episode nor ends one."""
        cursors, episode, room = self._cursors, self._episode, self._steps_per_lane
        step = cursors[0]
        slot = step % room
        entry = episode[slot - 1]
        episode[slot] = entry
        self._last[entry] = slot
        step += 1
        cursors[0] = step
        if step > room:
            # The oldest surviving episode begins with what survives of it.
            oldest = step % room
            self._first[episode[oldest]] = oldest
        else:
            self._num_rows[()] = step
        return slot

    def append_to_all(
        self, done: np.ndarray | None = None, cut: np.ndarray | None = None
    ) -> np.ndarray:
        """Takes one step of all lanes, which must have been written equally often.

        Args:
            done: `[E]` bool: the episode ends with this row; None if none does.
            cut: `[E]` bool: this row does not continue the row before it; or None.

        Returns:
            `[E]` int64 slots.
        """
        table, room, lanes = self.tables, self._steps_per_lane, self._num_envs
        step = self._cursors[0]
        first, before = step % room * lanes, (step - 1) % room * lanes
        slots = np.arange(first, first + lanes)
        # Episodes that go on keep their entries.
        entry = table.episode[before : before + lanes]
        if cut is not None or b"\0" in self._open.tobytes():
            begins = ~table.open if cut is None else cut | ~table.open
            entry = entry.copy()
            for lane in begins.nonzero()[0].tolist():
                entry[lane] = self._entry(lane, step, begins=True)
            table.open.fill(True)
        table.episode[first : first + lanes] = entry
        # The methods of arrays, which index them in half the time.
        table.last.put(entry, slots)
        if done is not None and np.count_nonzero(done):
            table.finished.put(entry, done)
            np.logical_not(done, out=table.open)
        table.cursors.fill(step + 1)
        if step < room:
            self._num_rows[()] = (step + 1) * lanes
        else:
            # The oldest surviving episodes begin with what survives of them.
            oldest = (step + 1) % room * lanes
            slots_then = np.arange(oldest, oldest + lanes)
            table.first.put(table.episode[oldest : oldest + lanes], slots_then)
        return slots

    def next_slots(self, lanes: np.ndarray) -> np.ndarray:
        """Returns the slots `[L]` of the next step of some lanes."""
        return self.tables.cursors[lanes] % self._steps_per_lane * self._num_envs + lanes

    def append_to(self, lanes: np.ndarray, done: np.ndarray | None = None) -> np.ndarray:
        """Takes one step of some lanes, however often each was written.

        Args:
            lanes: `[L]` int64, distinct.
            done: `[L]` bool: the episode ends with this row; None if none does.

        Returns:
            `[L]` int64 slots.
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
        return slots

    def _entry(self, lane: int, step: int, *, begins: bool) -> int:
        """Returns the entry of the episode that a step of a lane belongs to, opened if it begins."""
        number, room = self._begun[lane], self._steps_per_lane
        if not begins:
            return lane * room + (number - 1) % room
        entry = lane * room + number % room
        self._begun[lane] = number + 1
        self._first[entry] = step % room * self._num_envs + lane
        self._first_step[entry] = step
        self._finished[entry] = False
        return entry
