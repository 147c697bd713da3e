"""What may be found after a kill: `python -m disk.kills DIRECTORY LANES KILLS KIND`.

Run as a script it forks writers that are imported already, kills them at random moments, and opens what
they left. Prints a line of JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from disk.acts import Act, prioritise, write
from disk.history import History
from disk.moments import Files, put_back
from disk.rows import abandon, count_from, found, is_torn, make, stored_as

from trl_storages import ReplayStorage, UniformSampler

__all__ = ["opens"]

SIZE = 24


def opens(
    files: Files, folder: Path, act: Act, num_lanes: int, size: int, *, goes_on: bool = True
) -> None:
    """Asserts that what a kill left opens with what was committed, and that writing goes on.

    Args:
        files: what was left.
        folder: where to try it.
        act: what was being done.
        num_lanes: E.
        size: rows.
        goes_on: whether to try readers and the next writers, too.
    """
    put_back(files, folder)
    if goes_on:
        _read(folder, act)
    storage = make(folder, num_lanes, size)
    got = found(storage)
    assert act.may_leave(got), (act.name, got, act.before.live, act.after.live)
    if not goes_on:
        abandon(storage)
        return
    history = History(num_lanes, size)
    history.cursors = list(got[1]) or [0] * num_lanes
    history.rows = [dict(rows) for rows in got[0]] or [{} for _ in range(num_lanes)]
    history.tails = [
        cursor - len(rows) for cursor, rows in zip(history.cursors, history.rows, strict=True)
    ]
    further = write(history, 2)
    further.do(storage)
    assert found(storage) == further.after.live
    storage.sample()
    abandon(storage)
    storage = make(folder, num_lanes, size)
    assert found(storage) == further.after.live
    abandon(storage)


def _read(folder: Path, act: Act) -> None:
    """Asserts that readers need no writer to find what is committed."""
    if not (folder / "storage.json").exists():
        return
    reader = ReplayStorage.open(folder, mode="r", sampler=UniformSampler(), batch_size=4)
    got = found(reader)
    assert act.may_leave(got), (act.name, got, act.before.live, act.after.live)
    if any(got[0]):
        assert not is_torn(reader.sample()).any()


def _work(storage: ReplayStorage, history: History, rng: random.Random, told: Shared) -> History:
    """Does one thing and says so before and after."""
    if rng.random() < 0.3:
        prioritise(history, rng).do(storage)
    lanes = None
    if history.num_lanes > 1 and rng.random() < 0.3:
        lanes = sorted(rng.sample(range(history.num_lanes), rng.randint(1, history.num_lanes)))
    act = write(history, rng.choice([1, 1, 1, 2, 5]), lanes)
    act.do(storage)
    told.cursors = act.after.cursors
    if rng.random() < 0.1:
        storage.flush()
    return act.after


class Shared:
    """What a writer says to whoever kills it."""

    def __init__(self, num_lanes: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 4096)).cast("q")
        self._num_lanes = num_lanes

    @property
    def cursors(self) -> list[int]:
        return self._words[1 : 1 + self._num_lanes].tolist()

    @cursors.setter
    def cursors(self, cursors: list[int]) -> None:
        for lane, cursor in enumerate(cursors):
            self._words[1 + lane] = cursor

    @property
    def is_ready(self) -> bool:
        return bool(self._words[0])

    @is_ready.setter
    def is_ready(self, is_ready: bool) -> None:
        self._words[0] = is_ready


def _fork_writer(path: Path, told: Shared, num_lanes: int, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        storage, history = make(path, num_lanes, SIZE), History(num_lanes, SIZE)
        history.cursors = told.cursors
        rng = random.Random(seed)
        count_from(10**6 * seed)
        told.is_ready = True
        while True:
            history = _work(storage, history, rng, told)
    finally:
        os._exit(1)


def at_random(path: Path, num_lanes: int, kills: int) -> dict[str, float]:
    """Kills writers after a few milliseconds, each of which goes on where the last was killed."""
    told, rng, kill = Shared(num_lanes), random.Random(num_lanes), 0
    # So that writers have everything loaded and compiled when they are forked.
    first = History(num_lanes, SIZE)
    storage = make(path, num_lanes, SIZE)
    for _ in range(3):
        first = _work(storage, first, random.Random(3), told)
    abandon(storage)
    # On a busy machine a writer may be killed before it has written: then more are.
    while kill < kills or (min(told.cursors) * num_lanes <= 2 * SIZE and kill < 20 * kills):
        kill += 1
        told.is_ready = False
        pid = _fork_writer(path, told, num_lanes, kill)
        end = time.monotonic() + 60
        while not told.is_ready and time.monotonic() < end:
            time.sleep(1e-3)
        time.sleep(rng.random() * 20e-3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not (path / "storage.json").exists():
            continue
        storage = make(path, num_lanes, SIZE)
        _, cursors = found(storage)
        cursors = cursors or [0] * num_lanes
        ahead = [there - known for there, known in zip(cursors, told.cursors, strict=True)]
        # What was acknowledged is there, and at most the one write that was going on.
        assert all(0 <= extra <= 5 for extra in ahead), (cursors, told.cursors)
        assert len({extra for extra in ahead if extra}) <= 1, (cursors, told.cursors)
        assert len(storage) == sum(min(cursor, SIZE // num_lanes) for cursor in cursors)
        abandon(storage)
        told.cursors = cursors
    return {"kills": kill, "wraps": min(told.cursors) * num_lanes / SIZE}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with stored_as(sys.argv[4]):
        print(json.dumps(at_random(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
