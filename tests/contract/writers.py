"""Processes that write to a directory without an end, and what they write, known in advance.

Letters: T steps that a lane keeps.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from contract.make import make
from contract.steps import Player, Transition, assert_same, ids_of, rows, write

__all__ = [
    "LANES",
    "Script",
    "Writer",
    "assert_kept",
    "found",
    "opened",
    "prefer_one",
    "write_on",
    "writing",
]

LANES = 2
#: Of what is written: the fixture `layout` sets it.
LAYOUT = "goals"
_PATIENCE = 60  # seconds


def opened(path: Path, num_steps: int, kind: str = "n-step", **options: Any) -> Any:
    """Opens a directory that keeps some steps of each lane."""
    sizes = {"lanes": LANES, "size": LANES * num_steps, "batch_size": 16}
    return make(kind, place="directory", path=path, layout=LAYOUT, **sizes, **options)


class Script:
    """What is written, block by block.

    Args:
        seed: of the lengths of blocks and episodes.
        start: the least id of each lane.
        longest: the most steps of a block.
    """

    def __init__(self, seed: int, start: int = 0, longest: int = 7) -> None:
        self._luck, self._longest = random.Random(seed), longest
        self._players = [Player(lane) for lane in range(LANES)]
        for player in self._players:
            for _ in range(start):
                player.jump()
            player.reset()
        self._blocks: list[list[list[Transition]]] = []

    def block(self, number: int) -> list[list[Transition]]:
        """The steps of each lane."""
        while len(self._blocks) <= number:
            num_steps = self._luck.randint(1, self._longest)
            ends = [self._luck.random() < 0.2 for _ in range(LANES * num_steps)]
            self._blocks.append(
                [
                    [player.step("terminated" if ends.pop() else "") for _ in range(num_steps)]
                    for player in self._players
                ]
            )
        return self._blocks[number]

    def until(self, number: int) -> list[list[Transition]]:
        """The steps of each lane in the blocks before this one."""
        blocks = [self.block(before) for before in range(number)]
        return [[step for block in blocks for step in block[lane]] for lane in range(LANES)]


class Writer:
    """A process that writes."""

    def __init__(self, pid: int, written: mmap.mmap) -> None:
        self.pid, self._written = pid, written

    @property
    def num_written(self) -> int:
        """How many blocks; one more may be there or on its way."""
        return int.from_bytes(self._written[:8], "little")

    def wait_for(self, num_blocks: int) -> None:
        """Waits until so many blocks are written."""
        until = time.monotonic() + _PATIENCE
        while self.num_written < num_blocks:
            assert time.monotonic() < until, "it does not write"
            time.sleep(0.001)

    def wait_until_stopped(self) -> None:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def stop(self) -> None:
        """Stops it at any moment."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def writing(
    path: Path, num_steps: int, script: Script, kind: str = "n-step", flush_at: int = -1
) -> Iterator[Writer]:
    """A process that writes until it is killed.

    Args:
        path: the directory.
        num_steps: as in `opened`.
        script: what it writes.
        kind: of the storage.
        flush_at: the block after which it flushes, once, and stops.
    """
    written = mmap.mmap(-1, 8)
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            storage = opened(path, num_steps, kind)
            storage.end_episodes()
            for start in count(step=20):
                # Made before, as most of the time is to be spent in writes.
                blocks = [
                    torch.stack([rows(steps, LAYOUT) for steps in script.block(start + place)])
                    for place in range(20)
                ]
                for place, block in enumerate(blocks):
                    storage.extend(block)
                    written[:8] = (start + place + 1).to_bytes(8, "little")
                    if start + place == flush_at:
                        storage.flush()
                        os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(1)
    try:
        yield Writer(pid, written)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def found(storage: Any) -> list[list[Transition]]:
    """The transitions of each lane, oldest first; each row is as it was written."""
    if not len(storage):
        return [[] for _ in range(LANES)]
    history = storage[:]
    columns = [history["observation"][:, :2].long(), history["next", "terminated"]]
    steps = [
        Transition(*ids, "terminated" if ends else "")
        for ids, (ends,) in zip(*(column.tolist() for column in columns), strict=True)
    ]
    assert_same(history, rows(steps, LAYOUT))
    return [[step for step in steps if step.lane == lane] for lane in range(LANES)]


def assert_kept(
    lanes: Sequence[Sequence[Transition]],
    sure: Sequence[Sequence[Transition]],
    unsure: Sequence[Sequence[Transition]],
    num_steps: int,
) -> int:
    """Of each lane a stretch without holes is there, with all that is sure and was not evicted.

    Args:
        lanes: what is there.
        sure: what was written.
        unsure: what may have been written after that, up to some step, and have evicted as much.
        num_steps: T.

    Returns:
        how many steps had to be there.
    """
    num_sure = 0
    for its, first, second in zip(lanes, sure, unsure, strict=True):
        everything = [*first, *second]
        start = everything.index(its[0]) if its else 0
        assert len(its) <= num_steps
        assert list(its) == everything[start : start + len(its)]
        wanted = everything[max(len(everything) - num_steps, 0) : len(first)]
        assert {*wanted} <= {*its}
        num_sure += len(wanted)
    return num_sure


def write_on(storage: Any, script: Script, lanes: list[list[Transition]], num_blocks: int) -> None:
    """Writes blocks, as another stream of steps, and adds them to the lists of what was written."""
    storage.end_episodes()
    for number in range(num_blocks):
        write(storage, script.block(number), LAYOUT)
        for lane, steps in zip(lanes, script.block(number), strict=True):
            lane += steps


def prefer_one(storage: Any) -> int:
    """Updates priorities such that only one transition is sampled; returns its id."""
    batch = storage.sample(256)
    ids = ids_of(batch)
    batch["td_error"] = torch.where(ids == ids[0], 1e9, 1e-3)
    storage.update_tensordict_priority(batch)
    return int(ids[0])
