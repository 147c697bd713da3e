"""The files of one generation of a storage, as arrays.

Letters: E lanes (environments), T live steps a lane at most, R ring steps, M = R E slots, W words a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_storages.disk.commits import Commits, State
from trl_storages.disk.description import Description
from trl_storages.disk.files import MappedWords, create_file
from trl_storages.disk.priority_column import has_all
from trl_storages.kernels import backend
from trl_storages.kernels.marks import unpack_marks
from trl_storages.ring import EpisodeIndex

__all__ = ["Track", "Words", "remove"]

#: Wraps a loop, to show how far it is.
Track = Callable[[Iterable[Any]], Iterable[Any]]

_PIECE = 1 << 24  # bytes of rows that are looked at one after another
_KINDS = ("rows", "marks", "commits", "priorities")


class Words:
    """The rows of a directory, what they say of themselves, and which of them count.

    Args:
        directory: where the files are.
        description: says how large they are.
        writable: whether what is written goes to the files; if not it goes nowhere.

    Attributes:
        rows: `[M, W]` int64.
        marks: `[M, 2]` int64, mark and checksum of each row.
        commits: which rows count.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated, or no file.
    """

    def __init__(self, directory: Path, description: Description, *, writable: bool) -> None:
        self._directory, self.description = directory, description
        self._writable = writable
        sizes = _sizes(description)
        self._maps = {
            kind: MappedWords(description.file(directory, kind), size, writable=writable)
            for kind, size in sizes.items()
            if kind != "priorities"
        }
        self.rows = self._maps["rows"].array.reshape(description.num_slots, -1)
        self.marks = self._maps["marks"].array.reshape(-1, 2)
        #: The same rows and marks, for who reads and writes them.
        self.marked = backend("cpu").MarkedRows(self.tensor(), torch.from_numpy(self.marks))
        self.commits = Commits(self._maps["commits"].array)

    @classmethod
    def create(cls, directory: Path, description: Description) -> Words:
        """Makes the files, with all the space that they will need.

        Raises:
            OSError: the disk is full, or may not be written. None of them is left then.
        """
        try:
            for kind, size in _sizes(description).items():
                if kind != "priorities":
                    create_file(description.file(directory, kind), size)
            words = cls(directory, description, writable=True)
            nothing = np.zeros((4, description.num_lanes), np.int64)
            words.commits.publish(State(description.history, 0, nothing))
        except BaseException:
            remove(directory, description)
            raise
        return words

    def tensor(self) -> torch.Tensor:
        """Returns the rows as a tensor that shares their memory."""
        return torch.from_numpy(self.rows)

    def column(self, *, make: bool) -> np.ndarray:
        """Returns `[M + 1]` words of priorities.

        Args:
            make: whether to make the file if it is missing.

        Raises:
            OSError: the disk is full.
            FileNotFoundError: there are none, and none shall be made.
            ValueError: the file is truncated, or no file.
        """
        if "priorities" not in self._maps:
            path = self.description.file(self._directory, "priorities")
            size = _sizes(self.description)["priorities"]
            if not path.exists():
                if not make:
                    raise FileNotFoundError(
                        f"{self._directory} holds no priorities: its writer does not draw by priority. "
                        "Read it with another sampler."
                    )
                new = path.with_name(path.name + ".new")
                create_file(new, size)
                new.replace(path)
            self._maps["priorities"] = MappedWords(path, size, writable=self._writable)
        return self._maps["priorities"].array

    def has_priorities(self, slots: torch.Tensor) -> bool:
        """Returns whether some sampler keeps priorities, and each of some rows has one."""
        return "priorities" in self._maps and has_all(self.column(make=False), self.marks, slots)

    def flush(self) -> None:
        """Waits until everything is on disk, what counts last."""
        for kind in ("rows", "marks", "priorities", "commits"):
            if kind in self._maps:
                self._maps[kind].flush()

    # What is there

    def steps(self, description: Description, *, deeply: bool, track: Track = iter) -> np.ndarray:
        """Looks at every slot.

        Args:
            description: says which history owns which step.
            deeply: whether to look at the checksums of rows too.
            track: shows how far it is.

        Returns:
            `[R, E]` int64, the step of the whole row in each slot, -1 where there is none.
        """
        size, num_lanes = description.num_slots, description.num_lanes
        numbers, firsts = description.owners()
        piece = max(_PIECE // (8 * self.rows.shape[1] if deeply else 64), 1)
        steps = torch.empty(size, dtype=torch.int64)
        for at in track(range(0, size, piece)):
            slots = torch.arange(at, min(at + piece, size))
            history, step, right, _, _ = unpack_marks(torch.from_numpy(self.marks)[slots, 0])
            owner = torch.zeros_like(step)
            for number, first in zip(numbers, firsts, strict=True):
                owner = torch.where(first[slots % num_lanes] <= step, number, owner)
            right &= (history == owner) & (step % description.ring_steps == slots // num_lanes)
            if deeply:
                right &= self.marked.check(slots)
            steps[slots] = torch.where(right, step, -1)
        return steps.numpy().reshape(-1, num_lanes)

    def feed(
        self, index: EpisodeIndex, state: State, description: Description, track: Track = iter
    ) -> bool:
        """Brings an index to what was committed, in one pass over the rows that it does not know.

        Args:
            index: knows the rows up to its cursors, or none.
            state: the commit.
            description: says which history owns which step.
            track: shows how far it is.

        Returns:
            False if a row is not the one that it must be; the index is as it was then.
        """
        known = index.host_steps.copy()
        first = np.maximum(known, state.tails)
        sizes = torch.from_numpy(state.cursors - first)
        ends = sizes.cumsum(0)
        bounds = torch.from_numpy(first), torch.from_numpy(state.cursors)
        done, begins, right = self.marked.flags(*bounds, *description.owners())
        if (sizes < 0).any() or not right.all():
            return False
        if (first == first[0]).all() and (state.cursors == state.cursors[0]).all():
            # All lanes at once.
            lanes = [(slice(0, ends[-1]), [*range(len(first))])]
        else:
            starts = (ends - sizes).tolist()
            lanes = [(slice(starts[at], ends[at]), [at]) for at in range(len(first))]
        for rows, which in track(lanes):
            lane = which[0]
            shape = len(which), -1 if sizes[lane] else 0
            flags = done[rows].view(shape), begins[rows].view(shape)
            # Where rows went unseen, a lane may begin in the middle of an episode.
            if first[lane] > known[lane]:
                index.rejoin(*flags, int(state.cursors[lane]), which)
            elif sizes[lane]:
                index.append(*flags, which)
        index.evict(state.tails)
        ended = np.flatnonzero((state.open == 0) & index.is_open.numpy())
        if len(ended):
            index.end_episodes(ended.tolist())
        return True


def _sizes(description: Description) -> dict[str, int]:
    """Returns how many words each file has."""
    slots = description.num_slots
    sizes = (slots * description.layout.num_words, 2 * slots, 0, slots + 1)
    commits = Commits.num_words(description.num_lanes)
    return {**dict(zip(_KINDS, sizes, strict=True)), "commits": commits}


def remove(directory: Path, description: Description) -> None:
    """Removes the files of a generation."""
    for kind in _KINDS:
        description.file(directory, kind).unlink(missing_ok=True)
