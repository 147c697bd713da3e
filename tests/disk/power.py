"""Storages that run on a simulated disk whose power is cut.

Letters: E lanes.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from disk.acts import random_act
from disk.history import History
from disk.moments import Files, put_back
from disk.platter import Platter
from disk.rows import abandon, found, make

from trl_storages import PERSampler, ReplayStorage, UniformSampler
from trl_storages.disk.files import MappedWords

__all__ = ["Session", "cut_at_random", "opens_after_cut", "syncs_seen"]


@contextmanager
def syncs_seen(platter: Platter) -> Iterator[None]:
    """Tells a simulated disk of everything that is synced."""
    fsync, flush = os.fsync, MappedWords.flush

    def see_fsync(descriptor: int) -> None:
        fsync(descriptor)
        platter.sync(descriptor)

    def see_flush(words: MappedWords, start: int = 0, end: int | None = None) -> None:
        flush(words, start, end)
        platter.sync(words._path, slice(8 * start, words.array[:end].nbytes))

    with (
        mock.patch.object(os, "fsync", see_fsync),
        mock.patch.object(MappedWords, "flush", see_flush),
    ):
        yield


class Session:
    """A writer on a disk that may lose its power, from an opening of its directory to a cut.

    Args:
        folder: the directory, whose files are all on disk.
        history: what is known of them; of a directory that was cut, before that is opened.
        size: rows.
        page: bytes that the disk writes as a whole.
        was_cut: whether the power was cut before.
    """

    def __init__(
        self, folder: Path, history: History, size: int, page: int, *, was_cut: bool = False
    ) -> None:
        self._platter, self._folder, self._size = Platter(folder, page), folder, size
        self._platter.sync_all()
        self.history = history.copy()
        with syncs_seen(self._platter):
            self._storage = make(folder, history.num_lanes, size, batch_size=4)
        if was_cut:
            got = found(self._storage)
            self.history.check_after_cut(got)
            self.history.adopt(got)
        check_priorities(self._storage)

    def work(self, num_acts: int, rng: random.Random, cuts: int) -> Iterator[Files]:
        """Does so many things, and yields what may be left by so many cuts after or within each."""
        for _ in range(num_acts):
            act = random_act(self.history, rng)
            with syncs_seen(self._platter):
                act.do(self._storage)
            self._platter.look()
            self.history = act.after
            for _ in range(cuts):
                yield self._platter.after_cut(rng)

    def leave(self) -> None:
        abandon(self._storage)
        self._platter.close()


def check_priorities(storage: ReplayStorage) -> None:
    """Asserts that each row has a priority of its own, or one that new rows get."""
    sampler = storage.sampler
    if not isinstance(sampler, PERSampler) or not len(storage):
        return
    sampler.validate()
    slots = storage.episodes.slots_by_age(torch.arange(len(storage)))
    serial = storage.storage.get(slots)["serial"]
    priority = sampler.priorities[slots].double()
    # What was given tells the row and the update; new rows have the largest that was, or 1.
    given = (priority - 2) * 64
    is_own = (given >= serial * 4) & (given < serial * 4 + 4) & (given == given.floor())
    is_of_a_new_row = (priority == 1) | ((given == given.floor()) & (given >= 0))
    assert (is_own | is_of_a_new_row).all(), priority
    assert (priority <= max(sampler.default_priority, 1)).all(), priority


def opens_after_cut(files: Files, folder: Path, history: History, size: int) -> None:
    """Asserts that what a cut left opens, for writing and for reading, with what it must hold."""
    put_back(files, folder)
    if "storage.json" not in files:
        assert not any(history.flushed), "all that was flushed is gone"
        return
    reader_found: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            reader = ReplayStorage.open(folder, mode="r", sampler=UniformSampler(), batch_size=4)
            reader_found = found(reader)
        except ValueError as error:
            # It says that a writer must look at it first.
            if "open it for writing" not in str(error):
                raise
        storage = make(folder, history.num_lanes, size)
    got = found(storage)
    history.check_after_cut(got)
    # Where a writer finds more than was committed, readers may have what was.
    if reader_found is not None:
        history.check_after_cut(reader_found)
    check_priorities(storage)
    if len(storage):
        storage.sample()
    abandon(storage)


def cut_at_random(folder: Path, seed: int, *, num_acts: int, cuts: int, depth: int = 2) -> int:
    """Cuts the power of a writer many times, goes on from one of the cuts, and cuts again.

    Args:
        folder: where to.
        seed: decides about everything.
        num_acts: things that are done by each writer.
        cuts: how many after each thing.
        depth: how many writers follow one another.

    Returns:
        how many cuts there were.
    """
    rng, tried = random.Random(seed), 0
    num_lanes = rng.choice([1, 1, 2, 3])
    size = num_lanes * rng.choice([5, 24, 80])
    history, path = History(num_lanes, size), folder / "rows"
    page = rng.choice([512, 4096])
    for life in range(depth):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            session = Session(path, history, size, page, was_cut=life > 0)
        left: Files = {}
        # One of the cuts of the last few things is gone on from.
        chosen = rng.randrange(max(num_acts - 3, 0) * cuts, num_acts * cuts)
        for place, files in enumerate(session.work(num_acts, rng, cuts)):
            opens_after_cut(files, folder / "cut", session.history, size)
            tried += 1
            if place == chosen:
                left, history = files, session.history.copy()
        session.leave()
        put_back(left, path)
    return tried
