"""Readers beside a writer that is stopped, killed and replaced, empties and loads its directory.

Letters: E lanes.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from disk.history import History
from disk.rows import abandon, count_from, is_torn, make, with_frames
from goal_data import AsDrawn

from trl_storages import HERSampler, ReplayStorage, UniformSampler

__all__ = ["EVENTS", "Seen", "follow"]

SIZE, LANES, BATCH = 2000, 4, 256
PATIENCE = 20.0  # seconds
LONGEST = 1200  # seconds until readers of a busy machine must have seen all
#: What may happen to the writer.
EVENTS = ("stop", "kill", "empty", "keep", "load", "many steps")


@dataclass
class Seen:
    """What one reader saw.

    Attributes:
        rows: how many.
        torn: how many of them were none.
        failed: whether it ended with an error.
        longest: the longest wait for a batch, in milliseconds.
        newest: the largest serial number.
        while_stopped: batches that were drawn while the writer was stopped.
    """

    rows: int
    torn: int
    failed: bool
    longest: int
    newest: int
    while_stopped: int


class Board:
    """Words that all processes see: what the writer shall do, and what each reader saw."""

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, 4096)).cast("q")

    END, STOPPED, ORDER, WRITTEN = range(4)

    def seen(self, reader: int) -> Seen:
        rows, torn, failed, *rest = self.words[16 + 8 * reader : 22 + 8 * reader]
        return Seen(rows, torn, bool(failed), *rest)

    def show(self, reader: int, seen: Seen) -> None:
        values = (seen.rows, seen.torn, seen.failed, seen.longest, seen.newest, seen.while_stopped)
        for place, value in enumerate(values):
            self.words[16 + 8 * reader + place] = int(value)


def _fork(body: Callable[..., Any], *args: Any) -> int:
    pid = os.fork()
    if not pid:
        # Whoever waits for it hears by its end that it hangs.
        signal.alarm(2 * LONGEST)
        status = 1
        try:
            body(*args)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _write(path: Path, number: int, state: Any, board: Board, child: int | None) -> None:
    """Writes the ring anew every second, and does what it is ordered to."""
    torch.manual_seed(number)
    count_from(10**9 * (number + 1))
    storage = make(path, LANES, SIZE, with_priorities=False, batch_size=BATCH)
    if child is not None:
        _fork(_read, storage, child, board)
    history = History(LANES, SIZE)
    every, began, written = list(range(LANES)), time.perf_counter(), 0
    while not board.words[Board.END]:
        order, board.words[Board.ORDER] = board.words[Board.ORDER], 0
        num_steps = 5
        if order:
            event = EVENTS[order - 1]
            if event == "empty":
                storage.empty()
            elif event == "keep":
                storage.empty(keep_steps=20)
            elif event == "load":
                storage.load_state_dict(state)
            elif event == "many steps":
                num_steps = SIZE // LANES // 2
        history.cursors = storage.episodes.num_steps_written.tolist()
        storage.extend(with_frames(history.block(num_steps, every), storage))
        written += num_steps
        board.words[Board.WRITTEN] += num_steps * LANES
        time.sleep(max(began + written * LANES / SIZE - time.perf_counter(), 0))


def _read(storage: ReplayStorage, number: int, board: Board) -> None:
    """Draws batches and looks at each row of them, until the end."""
    seen = Seen(0, 0, False, 0, 0, 0)
    try:
        while not board.words[Board.END]:
            is_stopped, began = board.words[Board.STOPPED], time.monotonic()
            try:
                batch = storage.sample(BATCH)
            except RuntimeError as error:
                if "empty" not in str(error):
                    raise
                time.sleep(1e-3)
                continue
            took = time.monotonic() - began
            torn = int(is_torn(batch).sum())
            seen.rows += BATCH
            seen.torn += torn
            seen.longest = max(seen.longest, int(1000 * took))
            seen.newest = max(seen.newest, int(batch["serial"].max()))
            seen.while_stopped += bool(is_stopped and board.words[Board.STOPPED])
            board.show(number, seen)
    except BaseException:
        seen.failed = True
        board.show(number, seen)
        raise


def _open_and_read(path: Path, number: int, board: Board) -> None:
    with_goals = bool(number % 2)
    reader = ReplayStorage.open(
        path,
        mode="r",
        sampler=HERSampler() if with_goals else UniformSampler(),
        transform=AsDrawn() if with_goals else None,
        batch_size=BATCH,
        generator=torch.Generator().manual_seed(number),
    )
    _read(reader, number, board)


def _while_stopped(board: Board, every: list[int]) -> None:
    """Waits until each reader has drawn a batch from a writer that does nothing."""
    before = [board.seen(reader).while_stopped for reader in every]
    board.words[Board.STOPPED] = 1
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and any(
        board.seen(reader).while_stopped == known and not board.seen(reader).failed
        for reader, known in zip(every, before, strict=True)
    ):
        time.sleep(0.02)
    board.words[Board.STOPPED] = 0


def follow(
    path: Path, *, rows: int, events: tuple[str, ...], num_readers: int = 2, seed: int = 0
) -> tuple[list[Seen], int]:
    """Lets readers, and a child that is forked from the writer, follow a writer to which things happen.

    Args:
        path: of the directory.
        rows: how many each of them must see at least.
        events: what happens, again and again.
        num_readers: that open the directory.
        seed: of when.

    Returns:
        what each saw, the child last, and how many rows were written.
    """
    count_from(1)
    board, rng = Board(), random.Random(seed)
    history, storage = History(LANES, SIZE), make(path, LANES, SIZE, with_priorities=False)
    source = make(None, LANES, SIZE, with_priorities=False)
    block = history.block(SIZE // LANES, list(range(LANES)))
    storage.extend(with_frames(block, storage))
    source.extend(with_frames(block, source))
    state = source.state_dict()
    abandon(storage)
    del storage, source
    writers = 0
    writer = _fork(_write, path, writers, state, board, num_readers)
    readers = [_fork(_open_and_read, path, number, board) for number in range(num_readers)]
    happened, before = 0, 0
    every = [*range(num_readers + 1)]
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        seen = [board.seen(reader) for reader in every]
        if any(one.failed for one in seen):
            break
        if board.words[Board.WRITTEN] == before:
            # Each writer is given the time for its first write, which waits for loops to be compiled.
            time.sleep(0.02)
            continue
        is_written = board.words[Board.WRITTEN] >= SIZE
        if is_written and happened >= 2 * len(events) and min(one.rows for one in seen) >= rows:
            break
        time.sleep(0.1 + 0.2 * rng.random())
        event = events[happened % len(events)] if events else ""
        happened += 1
        if event == "stop":
            os.kill(writer, signal.SIGSTOP)
            _while_stopped(board, every)
            os.kill(writer, signal.SIGCONT)
        elif event == "kill":
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            _while_stopped(board, every)
            before = board.words[Board.WRITTEN]
            writers += 1
            writer = _fork(_write, path, writers, state, board, None)
        elif event:
            board.words[Board.ORDER] = 1 + EVENTS.index(event)
    board.words[Board.END] = 1
    statuses = [os.waitpid(pid, 0)[1] for pid in [*readers, writer]]
    time.sleep(0.05)
    seen = [board.seen(reader) for reader in every]
    for one, status in zip(seen, statuses, strict=False):
        one.failed |= bool(status)
    assert statuses[-1] == 0, "the writer failed"
    return seen, board.words[Board.WRITTEN]
