"""Between a storage and its files: what a write changes in them, and what they say when reopened.

Letters: N rows, E lanes (environments), T steps a lane, L lanes and S steps of a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, unravel_key

from trl_storages.disk.header import State
from trl_storages.disk.journal import Journal, Steps
from trl_storages.disk.marks import begins, dones, pack_marks, steps
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.layout import Layout

__all__ = ["Durable", "Track", "check_same", "feed"]

#: Wraps a loop, to show how far it is.
Track = Callable[[Iterable[Any]], Iterable[Any]]

_STRETCH = 1 << 21  # rows that the index takes in at a time


def check_same(journal: Journal, max_size: int, fields: Mapping[NestedKey, Any]) -> None:
    """Checks that files fit the storage that is to take them up.

    Args:
        journal: the files.
        max_size: N.
        fields: key -> (dtype, shape), or None where any will do; empty if nothing is known.

    Raises:
        ValueError: they do not. The message says in what.
    """
    there, found = len(journal.rows), journal.layout
    if there != max_size:
        raise ValueError(
            f"the storage in {journal.directory} has {there} rows, got {max_size}: pass its size, or "
            "another directory."
        )
    if not fields:
        return
    known = {field.key: (field.dtype, field.shape) for field in found.fields}
    wanted = {unravel_key(key): field or known.get(key) for key, field in fields.items()}
    if None in wanted.values() or Layout(wanted) != found:  # type: ignore[arg-type]
        raise ValueError(
            f"the rows in {journal.directory} are {found}, got fields "
            f"{ {key: field and (field[0], tuple(field[1])) for key, field in wanted.items()} }: "
            "pass the spaces and keys they were made with, or another directory."
        )


class Durable:
    """Carries the writes of a storage into its files.

    Args:
        journal: the files.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def episodes(self, track: Track = iter) -> EpisodeIndex | None:
        """Returns the index of the rows that are there; None if no `EpisodeWriter` wrote them.

        Args:
            track: as in `feed`.

        Raises:
            ValueError: rows are not of the steps that the header names.
        """
        journal = self.journal
        identity = journal.header.identity
        if not identity.has_episodes:
            return None
        index = EpisodeIndex(identity.num_rows, identity.num_lanes)
        self.rebuild(index, track)
        return index

    def rebuild(self, index: EpisodeIndex, track: Track = iter) -> None:
        """Makes an index anew from the rows that are there.

        Raises:
            ValueError: as `episodes`.
        """
        journal = self.journal
        index.clear()
        if not feed(index, journal, journal.state, track):
            raise ValueError(
                f"{journal.directory} is damaged: its marks are not of the steps that its header names, "
                "as after a loss of power without flush(). Bring it back from a copy."
            )
        if (ended := journal.state.open == 0).any():
            index.end_episodes(torch.from_numpy(ended))

    @contextmanager
    def writing(
        self, cursor: Any, new: Steps | None, length: int, *, is_new: bool
    ) -> Iterator[None]:
        """Surrounds the writing of rows, so that all of it counts or nothing.

        Args:
            cursor: the slots, as an int, a slice or a tensor.
            new: the steps that are written; None if the writer knows of no episodes.
            length: number of live rows afterwards, in that case.
            is_new: whether the rows are new, and not changed in place.

        Raises:
            RuntimeError: this process may not write, or an `EpisodeWriter` must.
            OSError: the disk is full. Nothing has changed then.
        """
        journal = self.journal
        slots = _slots(cursor, len(journal.rows))
        with journal.undone_on_error():
            if new is not None:
                marks = journal.begin_steps(slots, new)
            else:
                marks = self._begin_other(slots, length, is_new)
            yield
            journal.commit(slots, marks)

    def _begin_other(self, slots: np.ndarray, length: int, is_new: bool) -> np.ndarray:
        journal = self.journal
        if is_new and journal.header.identity.has_episodes:
            raise RuntimeError(
                f"the rows in {journal.directory} are written by an EpisodeWriter, which keeps their "
                f"episodes: pass writer=EpisodeWriter({journal.header.identity.num_lanes})."
            )
        state = journal.begin_rewrite(slots)
        if not is_new:
            return journal.marks[slots, 0]
        # Without lanes, rows are counted in the order of their writing.
        step = state.write_count + np.arange(len(slots))
        state.write_count += len(slots)
        state.num_rows = length
        nowhere = np.zeros(len(slots), bool)
        return pack_marks(step, nowhere, nowhere)

    def restart(self, index: EpisodeIndex, write_count: int, move: Any = None) -> None:
        """Makes the files say what the index says, which was cleared or loaded.

        Args:
            index: the episodes.
            write_count: rows written, as the writer counts them.
            move: called in between, to move rows to where the index has them.
        """
        try:
            with self.journal.undone_on_error():
                self._restart(index, write_count, move)
        except BaseException:
            self.rebuild(index)
            raise

    def _restart(self, index: EpisodeIndex, write_count: int, move: Any) -> None:
        journal, size = self.journal, len(index)
        slots = index.slots_by_age(torch.arange(size - 1, -1, -1))
        # Nothing is replaced where nothing counts, as while a whole storage is loaded.
        state = journal.begin_rewrite(slots.numpy()[: None if journal.state.num_rows else 0])
        if move is not None:
            move()
        state.cursors[:] = index.num_steps_written
        state.epoch += 1
        state.write_count, state.num_rows = write_count, size
        self.note_open(index, state)
        behind, ahead = index.extent(slots)
        first = (behind == 0) & index.is_whole(slots)
        last = (ahead == 0) & index.is_finished(slots)
        marks = pack_marks(index.steps(slots).numpy(), first.numpy(), last.numpy())
        journal.commit(slots.numpy(), marks)

    def note_open(self, index: EpisodeIndex, state: State) -> None:
        """Notes in a state which lanes' episodes go on."""
        state.open[:] = index.is_open.cpu().numpy()

    def flush(self, index: EpisodeIndex | None) -> None:
        """Waits until everything is on disk, also which episodes were ended without a row."""
        journal = self.journal
        if index is not None and not np.array_equal(journal.state.open, index.is_open.numpy()):
            self._recount(partial(self.note_open, index))
        journal.flush()

    def clear(self) -> None:
        """Forgets all rows."""
        journal = self.journal
        if not journal.state.num_rows and not journal.state.cursors.any():
            return
        self._recount(_forget_rows)

    def _recount(self, change: Callable[[State], None]) -> None:
        """Commits other counters, and no rows."""
        journal, none = self.journal, np.empty(0, np.int64)
        with journal.undone_on_error():
            change(journal.begin_rewrite(none))
            journal.commit(none, none)


def _forget_rows(state: State) -> None:
    state.epoch += 1
    state.num_rows = 0
    state.cursors[:] = state.open[:] = 0


def _slots(cursor: Any, num_rows: int) -> np.ndarray:
    """Returns the slots that a cursor names, int64 `[n]`."""
    if isinstance(cursor, torch.Tensor):
        slots = cursor.reshape(-1).numpy()
        slots = np.flatnonzero(slots) if slots.dtype == bool else slots.astype(np.int64, copy=False)
    elif isinstance(cursor, slice):
        slots = np.arange(*cursor.indices(num_rows))
    else:
        slots = np.asarray(cursor, np.int64).reshape(-1)
    return slots % num_rows if len(slots) and slots.min() < 0 else slots


def feed(
    index: EpisodeIndex,
    journal: Journal,
    state: State,
    track: Track = iter,
) -> bool:
    """Brings an index to what is committed, in one pass over the rows that it does not know.

    Args:
        index: knows the rows up to its cursors.
        journal: the files.
        state: the committed counters.
        track: wraps the loop over stretches of rows, to show how far it is.

    Returns:
        False if rows were overwritten meanwhile; the index is then to be brought further.
    """
    room, lanes = index.steps_per_lane, index.num_envs
    old, new = index.num_steps_written.numpy().copy(), state.cursors
    start = np.maximum(old, new - room)
    if (start == start[0]).all() and (new == new[0]).all():
        groups = [np.arange(lanes)]
    else:
        groups = [np.array([lane]) for lane in np.flatnonzero(new > old)]
    stretches = []
    for group in groups:
        first, last = int(start[group[0]]), int(new[group[0]])
        length = max(_STRETCH // len(group), 1)
        stretches += [(group, at, min(at + length, last)) for at in range(first, last, length)]
    for group, first, last in track(stretches):
        step = np.arange(first, last)
        slots = (step % room)[None, :] * lanes + group[:, None]
        marks = journal.marks[:, 0].take(slots)
        if not (steps(marks) == step).all():
            return False
        done, cut = torch.from_numpy(dones(marks)), torch.from_numpy(begins(marks))
        # A lane that is joined may begin in the middle of an episode.
        if first == start[group[0]] and (not first or (first > old[group]).any()):
            index.rejoin(done, cut, last, torch.from_numpy(group))
        else:
            index.append(done, cut, torch.from_numpy(group))
    return True
