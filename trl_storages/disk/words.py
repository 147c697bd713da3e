"""The file of rows of one generation, as arrays.

Letters: E lanes (environments), R ring steps, M = R E slots, W words a row, D steps before a row whose
frames it is read with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_storages.disk.description import Description
from trl_storages.disk.files import MappedWords, create_file, damaged
from trl_storages.kernels import backend
from trl_storages.kernels.marks import BEGINS, ENDS, STEP_BIT, is_of
from trl_storages.kernels.sharing import (
    CONTINUES,
    ENTRY_BIT,
    FLUSHED,
    NUM_TIPS,
    OWNED,
    TIP_BIT,
    SideTable,
    tips_of,
)
from trl_storages.kernels.tables import ABSENT, steps_between
from trl_storages.ring import EpisodeIndex

__all__ = ["State", "Track", "Words", "places"]

#: Wraps a loop to report progress.
Track = Callable[[Iterable[Any]], Iterable[Any]]

_PIECE = 1 << 24  # bytes of rows that are checked at a time
_PAGE = 512  # words


class State(NamedTuple):
    """The contents of one commit. The part `commits` of the file holds two, each with a checksum.

    Args:
        write_count: rows written, as TorchRL's writers count them.
        cursors: `[E]` steps written to each lane.
        tails: `[E]` the first live step of each lane.
        open: `[E]` 0 or 1, whether the next row of the lane continues its last episode.
        trajectories: `[E]` the collector's number of the last trajectory.
    """

    write_count: int
    cursors: np.ndarray
    tails: np.ndarray
    open: np.ndarray
    trajectories: np.ndarray


class Words:
    """The rows of a directory, their marks and checksums, and the commits.

    Args:
        path: the directory.
        description: of the directory.
        writable: whether writes reach the files; otherwise they stay private.

    Attributes:
        path: as above.
        description: the current one. Whoever holds the words replaces it, within one generation.
        rows: `[M, W]` int64.
        piece: how many rows are checked at a time.
        marks: `[M, 2]` int64, mark and checksum of each row.
        side: next observations that are stored in no row; None unless rows share them.
        marked: operations on the same rows and marks.
        commits: the committed states.
        openings: `[1]` int64, changed by each opening to write; odd while one verifies the rows.
        priorities: of the rows; new until a sampler of the writer keeps them.

    Raises:
        FileNotFoundError: their file is missing.
        ValueError: it is truncated, or not a regular file.
    """

    def __init__(self, path: Path, description: Description, *, writable: bool) -> None:
        self.path, self.description = path, description
        self._places = places(description)
        size = self._places["side"].stop
        self._file = MappedWords(path / description.data_name, size, writable=writable)
        words = torch.from_numpy(self._file.array)
        parts = {name: words[place] for name, place in self._places.items()}
        self.rows = parts["rows"].view(-1, description.layout.stored_words)
        self.piece = max(_PIECE // self.rows[0].nbytes, 1)
        self.marks = parts["marks"].view(-1, 2)
        self.side: SideTable | None = None
        # Headers of the rows, and the words of the side table, if rows share next observations.
        self._headers: torch.Tensor | None = None
        values: torch.Tensor | None = None
        if (sharing := description.layout.framed.sharing) is not None:
            self._headers = sharing.headers(self.rows)
            values = parts["side"].view(-1, sharing.shared_words + 1)
            lanes = len(self.rows), description.num_lanes
            self.side = SideTable(*lanes, values, 0, self._enlarge_side)
        self._past_steps, self._ring_steps = description.layout.past_steps, description.ring_steps
        self.marked = backend("cpu").MarkedRows(
            self.rows, self.marks, values, self._headers, self._past_steps
        )
        commits = parts["commits"]
        self.commits = backend("cpu").Commits(commits[:1], commits[2:].view(2, -1))
        self.openings = commits[1:2].numpy()
        self._priority_words = parts["priorities"]
        self.priorities = backend("cpu").PriorityWords(self._priority_words, self.marks)

    def _enlarge_side(self, num_entries: int) -> torch.Tensor:
        side: SideTable = self.side  # type: ignore[assignment]
        start, size = self._places["side"].start, side.values.shape[1]
        self._file.reserve(start + side.room * size, start + num_entries * size)
        return side.values

    @classmethod
    def create(cls, path: Path, description: Description) -> Words:
        """Creates the file; reserves its disk space, but for the side table.

        Raises:
            OSError: the disk is full or not writable.
        """
        place = places(description)
        ends = place["side"].stop, place["priorities"].stop
        create_file(path / description.data_name, *ends)
        words = cls(path, description, writable=True)
        words.publish(State(0, *np.zeros((4, description.num_lanes), np.int64)))
        return words

    @property
    def is_there(self) -> bool:
        """Whether the file is still in the directory."""
        return self._file.is_there

    def flush(self) -> None:
        """Waits until everything is on disk."""
        self._file.flush()

    # Commits

    def publish(self, state: State) -> None:
        """Commits a state; a single store switches to it."""
        self.commits.publish(torch.from_numpy(np.hstack(state)))

    def committed(self) -> State | None:
        """Returns the last commit, without rows forgotten for good; None if it is damaged."""
        words, known = self.commits.read(), self.description
        if words is None:
            return None
        cursors, tails, is_open, numbers = words[1:].view(4, -1).numpy()
        cursors, tails = (np.maximum(steps, known.tails) for steps in (cursors, tails))
        live = cursors - tails
        if live.min() < 0 or live.max() > known.steps_per_lane:
            return None
        return State(int(words[0]), cursors, tails, is_open, numbers)

    def keep_priorities(self, priorities: torch.Tensor, largest: float) -> None:
        """Stores the priorities of all rows.

        Args:
            priorities: `[M]` float32, inf where there is no row.
            largest: the largest one that was reported, 0 if none was.
        """
        slots = (priorities < ABSENT).nonzero().squeeze(1)
        # First, so that after a kill no row exceeds it.
        self.priorities.put(torch.tensor([len(priorities)]), torch.tensor([largest]))
        self.priorities.put(slots, priorities[slots])

    # Shared next observations

    def take_up_side(self, state: State, flushed: np.ndarray) -> None:
        """Works out which entries of the side table are in use, before the first write.

        Args:
            state: the valid state.
            flushed: `[E]` the cursors of the last flush.

        Raises:
            ValueError: rows name entries that do not exist, or the same one twice.
        """
        if self.side is None:
            return
        # The entry that a lane's oldest row names may have been reused.
        slots = self._at(state.tails + 1, state.cursors)[1]
        entries = self._header(slots) >> ENTRY_BIT
        named = entries[entries != 0]
        tips = NUM_TIPS * self.description.num_lanes
        if len({*named.tolist()}) < len(named) or not bool(
            ((named > tips) & (named < len(self.side.values))).all()
        ):
            raise damaged(self.path, "its rows name next observations that can't be theirs")
        self.side.take_up(named)
        self.side.lanes[:, OWNED] = torch.from_numpy(np.minimum(state.tails + 1, state.cursors))
        self.protect_tips(flushed)

    def protect_tips(self, cursors: np.ndarray) -> None:
        """Protects the tips of the newest flushed rows, `[E]` at the steps before `cursors`."""
        if self.side is not None:
            headers = self._header(self._at(cursors - 1, cursors)[1])
            self.side.lanes[:, FLUSHED] = headers >> TIP_BIT & NUM_TIPS

    def check_next(self, slots: torch.Tensor, *, tips: bool) -> torch.Tensor:
        """Returns whether the next values that rows name are intact, `[n]` bool; see `MarkedRows`."""
        return self.marked.check_next(slots, self.description.num_lanes, tips=tips)

    def _header(self, slots: torch.Tensor | int) -> torch.Tensor:
        """Returns the headers of rows that share next observations, int64."""
        return self._headers[slots].long()  # type: ignore[index]

    def renew_tip(self, slot: int) -> bool:
        """Makes a row the newest of its lane: copies its next values from the row after it to its tip.

        Returns:
            False if it has no tip.
        """
        num_lanes, values = self.description.num_lanes, self.side.values  # type: ignore[union-attr]
        at, after = torch.tensor([slot]), (slot + num_lanes) % len(self.rows)
        tip = tips_of(self._header(at), at % num_lanes, num_lanes)
        header = int(self._header(after))
        known = values[header >> ENTRY_BIT, :-1]
        if header & CONTINUES:
            known = self.rows[after, : len(known)]
        if tip > 0:
            values[tip, :-1] = known
            values[tip, -1] = backend("cpu").checksums(known[None], self.marks[at, 1], at)
        return bool(tip > 0)

    # Slots

    def _at(self, firsts: np.ndarray, ends: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the steps from `firsts` `[E]` up to `ends` `[E]`, lane by lane, and their slots."""
        lane, step = steps_between(firsts, ends)
        slots = step % self._ring_steps * len(firsts) + lane
        return torch.from_numpy(step), torch.from_numpy(slots)

    def seen_from(self, tails: np.ndarray, cursors: np.ndarray) -> np.ndarray:
        """Returns the first step `[E]` whose frame some live row is read with.

        Args:
            tails: `[E]` the oldest live steps.
            cursors: `[E]` the steps after the newest ones.
        """
        if not (most := self._past_steps):
            return tails
        step, slots = (it.view(len(tails), -1) for it in self._at(tails - most, tails + 1))
        marks = self.marks[slots, 0]
        is_first = (is_of(marks, step) & (marks & BEGINS != 0)).flip(1).numpy()
        # Back to the row that begins the episode, or by D steps.
        back = np.where(is_first.any(1), is_first.argmax(1), most)
        return np.where(tails < cursors, np.maximum(tails - back, 0), tails)

    def slots_read(self, tails: np.ndarray, cursors: np.ndarray) -> torch.Tensor:
        """Returns the slots `[n]` of live rows, and of the rows whose frames these are read with."""
        return self._at(self.seen_from(tails, cursors), cursors)[1]

    # Recovery and indexing

    def forget(self, cursors: np.ndarray) -> None:
        """Durably removes what a killed or failed writer left beyond `cursors` `[E]`.

        Rows that are written there later are never mistaken for it.
        """
        every, marks = torch.arange(len(self.marks)), self.marks[:, 0]
        marks[marks >> STEP_BIT >= torch.from_numpy(cursors)[every % len(cursors)]] = 0
        if not self.priorities.is_new:
            self._priority_words[:-1][self.priorities.get(every).isnan()] = 0
        self._file.flush(self._places["marks"].start, self._places["priorities"].stop)

    def intact(self, track: Track = iter) -> torch.Tensor:
        """Checks every slot.

        Args:
            track: reports progress.

        Returns:
            `[M]` int64, the step of the intact row in each slot, -1 where there is none.
        """
        pieces = track(torch.split(torch.arange(len(self.rows)), self.piece))
        is_right = torch.cat([self.marked.check(slots) for slots in pieces])
        return torch.where(is_right, self.marks[:, 0] >> STEP_BIT, -1)

    def damaged(
        self,
        tails: np.ndarray,
        cursors: np.ndarray,
        intact: torch.Tensor,
        *,
        tips: bool = True,
    ) -> torch.Tensor:
        """Returns the slots `[n]` of rows that are not intact, or name next values that are not.

        Args:
            tails: `[E]` the oldest live steps.
            cursors: `[E]` the steps after the newest ones.
            intact: `[M]` from `intact`.
            tips: whether to check the tips of the newest rows as well.
        """
        step, slots = self._at(self.seen_from(tails, cursors), cursors)
        wrong = [slots[intact[slots] != step]]
        if self.side is not None:
            after = self._at(tails + 1, cursors)[1]
            newest = self._at(np.maximum(cursors - 1, tails), cursors)[1][: None if tips else 0]
            named = (after, False), (newest, True)
            wrong += [it[~self.check_next(it, tips=is_tip)] for it, is_tip in named]
        return torch.cat(wrong)

    def feed(self, index: EpisodeIndex, state: State, track: Track = iter) -> bool:
        """Brings an index up to a commit, in one pass over the rows that it does not know.

        The pass includes the rows before the oldest live ones whose frames these are read with.

        Args:
            index: knows the rows up to its cursors, or none.
            state: the commit.
            track: reports progress.

        Returns:
            False, with the index unchanged, if a mark is not that of its step.
        """
        known = index.host_steps.copy()
        first = np.maximum(known, self.seen_from(state.tails, state.cursors))
        sizes = torch.from_numpy(state.cursors - first)
        ends, every = sizes.cumsum(0), range(len(first))
        step, slots = self._at(first, state.cursors)
        marks = self.marks[slots, 0]
        done, begins = marks & ENDS != 0, marks & BEGINS != 0
        if (sizes < 0).any() or not is_of(marks, step).all():
            return False
        is_level = all((it == it[0]).all() for it in (known, first, state.cursors))
        for which in track([[*every]] if is_level else [[lane] for lane in every]):
            lane = which[0]
            rows = slice(ends[lane] - sizes[lane], ends[which[-1]])
            shape = len(which), -1 if sizes[lane] else 0
            flags = done[rows].view(shape), begins[rows].view(shape)
            # After steps that were never indexed, a lane may resume in the middle of an episode.
            if first[lane] > known[lane]:
                index.rejoin(*flags, int(state.cursors[lane]), which)
            elif sizes[lane]:
                index.append(*flags, which)
        index.evict(state.tails)
        ended = np.flatnonzero((state.open == 0) & index.is_open.numpy())
        if len(ended):
            index.end_episodes(ended.tolist())
        return True


def places(description: Description) -> dict[str, slice]:
    """Returns where in the file each of its parts is, in words. Every part begins a page."""
    slots = description.ring_steps * description.num_lanes
    table = 1 + len(State._fields[1:]) * description.num_lanes + 1
    rows, entries = slots * description.layout.stored_words, 0
    if (sharing := description.layout.framed.sharing) is not None:
        entries = (1 + NUM_TIPS * description.num_lanes + slots) * (sharing.shared_words + 1)
    sizes = {"rows": rows, "marks": 2 * slots, "commits": 2 + 2 * table, "priorities": slots + 1}
    found, start = {}, 0
    for name, size in {**sizes, "side": entries}.items():
        found[name] = slice(start, start + size)
        start += -(-size // _PAGE) * _PAGE
    return found
