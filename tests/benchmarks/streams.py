"""Times rows that are streams of observations beside whole rows: `python -m tests.benchmarks.streams`.

Letters: N rows, E lanes, B batch.
"""

import argparse
import itertools
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from tests.benchmarks.data import goal_columns, stacked_columns, to_tensordict
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.memory import resident_bytes
from tests.benchmarks.peers import load_peer
from trl_storages import PackedStorage, ReplayStorage
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import draws
from trl_storages.kernels import streams as kernels
from trl_storages.streams import Arena, Block, FrameStack, HostRows, Layout

BATCHES, LANES = (256, 4096), (1, 8, 64)
# 2 x 31 float32: both observations and goals, without actions, rewards and flags.
WHOLE_WORDS = 31
# Stacks are so much larger than goals.
FEWER_STACKS = 50
MOST_STEPS = 1000
BOTH_STACKS = 2 * 4 * 84 * 84


class Streams:
    """An index, and rows in memory that are written over and over."""

    def __init__(self, num_rows: int, lanes: int = 1, *, stacks: bool = False) -> None:
        columns = stacked_columns(100) if stacks else goal_columns(MOST_STEPS)
        source = to_tensordict(columns)
        leaves = source.items(include_nested=True, leaves_only=True)
        fields: dict[Any, Any] = {key: (it.dtype, it.shape[1:]) for key, it in leaves}
        if stacks:
            for key in ("observation", ("next", "observation")):
                fields[key] += (FrameStack(4),)
        self.layout = layout = Layout(fields)
        sizes = EpisodeIndex(num_rows, lanes, stack=layout.frames)
        entries = sizes.entries_per_lane, layout.entry_words
        shapes = sizes.table_shapes() | {"entries": (np.int64, (lanes * entries[0], entries[1]))}
        arena = Arena(shapes, lane_bytes=8 * entries[0] * entries[1])
        self.index = EpisodeIndex(num_rows, lanes, stack=layout.frames, tables=arena.arrays)
        self.entries = arena.arrays["entries"]
        self.rows = HostRows(layout, self.index, arena)
        words = torch.zeros(len(source), layout.row_words, dtype=torch.int64)
        for key in fields:
            layout.fill(key, words, source[key])
        self.words, self.done = words.numpy(), columns["done"]

    def blocks(self, steps: int) -> Any:
        """Returns an endless iterator of blocks of some steps of each lane."""
        lanes, size = self.index.num_envs, min(steps, self.index.most_steps, len(self.words))
        which, offsets = np.arange(lanes), np.arange(lanes + 1) * size
        rows = [np.tile(np.arange(at, at + size), lanes) for at in range(0, len(self.words), size)]
        rows = [it for it in rows if it[-1] < len(self.words)]
        cut = np.zeros(lanes * size, bool)
        return itertools.cycle(
            [Block(which, offsets, self.words[it], self.done[it], cut) for it in rows]
        )

    def fill(self) -> "Streams":
        """Writes to all slots, and to some of them twice."""
        blocks = self.blocks(MOST_STEPS)
        while self.index.cursors[0] < 1.3 * self.index.steps_per_lane:
            self.rows.append(next(blocks), cuts_gaps=True)
        return self


def whole_storage(num_rows: int) -> ReplayStorage:
    """Returns a full storage of whole rows."""
    block = to_tensordict(goal_columns(MOST_STEPS))
    storage = ReplayStorage(storage=PackedStorage(num_rows), batch_size=1)
    for _ in range(-(-num_rows // len(block))):
        storage.extend(block)
    return storage


def printed(title: str, turns: dict[str, Turn], effort: Effort) -> None:
    """Prints the median of each, in microseconds, and beside that of the first."""
    medians = {name: statistics.median(it) for name, it in measure(turns, effort).items()}
    first = next(iter(medians.values()))
    print(title)
    for name, median in medians.items():
        print(f"  {name:42} {median:9.1f} us {median / first:6.2f}", flush=True)


def gathers(made: Streams, old: ReplayStorage, size: int) -> dict[str, Turn]:
    """Returns gathers of the same random rows."""
    index, sizes, storage = made.index, made.layout.sizes, old.storage
    slots = torch.empty(size, dtype=torch.int64)
    at, out = slots.numpy(), np.empty((size, made.layout.row_words), np.int64)
    whole, whole_out = (
        np.ones((len(index), WHOLE_WORDS), np.int64),
        np.empty((size, WHOLE_WORDS), np.int64),
    )

    def gather() -> None:
        where = index.where[at]
        kernels.gather(made.entries, sizes, 1, where, where, out)

    def called() -> None:
        where = index.places(slots)
        made.rows.gather(where, where)

    calls = {
        "whole rows": lambda: kernels.gather(
            whole, (0, 0, 0, 0, WHOLE_WORDS), 1, at, at, whole_out
        ),
        "streams": gather,
        "NumPy's take": lambda: whole.take(at, 0, out=whole_out, mode="clip"),
        "the old middle's call": lambda: storage.gather(slots),
        "streams' call": called,
    }
    return {
        name: Turn(call=call, before=lambda: slots.random_(len(index)))
        for name, call in calls.items()
    }


def hindsight(made: Streams, size: int) -> dict[str, Turn]:
    """Returns a gather, and one of rows drawn by it, of which four in five get goals of later rows."""
    index, layout = made.index, made.layout
    noise = torch.empty(2, size, dtype=torch.int64)
    slots, goals = np.empty(size, np.int64), np.empty(size, np.int64)
    kinds = np.where(np.arange(size) % 5, draws.GOAL_KINDS["future"], 0).astype(np.uint8)
    relabelled, steps, random = kinds > 0, np.empty(0), noise.numpy()
    out = np.empty((size, layout.row_words), np.int64)
    achieved, *desired = map(
        layout.field, (("next", "achieved_goal"), "desired_goal", ("next", "desired_goal"))
    )
    starts = [layout.row_byte(field) // 4 for field in desired]
    entries = made.entries.view(np.uint32)

    def gather() -> None:
        where = index.where[slots]
        kernels.gather(made.entries, layout.sizes, 1, where, where, out)

    def relabel() -> None:
        draws.draw(index.tables, index.steps_per_lane, random[0], slots)
        draws.goals(index.tables, slots, random[1], kinds, steps, goals)
        gather()
        at = index.where[goals] + 1  # its next achieved goal
        for start in starts:
            kernels.paste(
                entries, at, achieved.start, relabelled, out.view(np.uint32), start, achieved.size
            )

    def anchors() -> None:
        noise.random_()
        draws.draw(index.tables, index.steps_per_lane, random[0], slots)

    return {
        "gather": Turn(call=gather, before=anchors),
        "anchors, future goals, gather": Turn(call=relabel, before=noise.random_),
    }


def writes(made: Streams) -> dict[str, Turn]:
    """Returns writes of one step, and of many."""
    one, many = made.blocks(1), made.blocks(MOST_STEPS)
    turns = {
        "a step": Turn(call=lambda: made.rows.append(next(one), cuts_gaps=True), repeat=10),
        f"{MOST_STEPS} steps": Turn(call=lambda: made.rows.append(next(many), cuts_gaps=True)),
    }
    if not isinstance(sb3 := load_peer("sb3"), str):
        columns = goal_columns(MOST_STEPS)
        buffer, kind = sb3.WORKS["uniform"](columns, len(made.index)), sb3.WORKS["uniform"]
        steps = itertools.cycle([[step] for step in kind.prepare(columns)])
        turns["Stable-Baselines3's add"] = Turn(call=lambda: buffer.write(next(steps)), repeat=10)
    return turns


def taken(num_rows: int, lanes: int, kind: str) -> float:
    """Returns the bytes that a row takes in this process."""

    def fill(num_rows: int) -> Any:
        if kind == "old":
            return whole_storage(num_rows)
        return Streams(num_rows, lanes, stacks=kind == "stacks").fill()

    fill(max(num_rows // 100, 4 * lanes))  # so that compiled code does not count
    before = resident_bytes()
    made = fill(num_rows)
    if kind != "old":
        made.words = made.done = None  # what is written over and over is not stored
    return (resident_bytes() - before) / len(made if kind == "old" else made.index)


def print_memory(num_rows: int) -> None:
    """Prints what rows take, each in a fresh process."""

    def measured(*what: Any) -> float:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(taken, *what).result()

    def tell(name: str, size: float, whole: float) -> None:
        print(f"  {name:42} {size:9.1f} B  {size / whole:6.3f}", flush=True)

    print(f"resident bytes a row, with its index, of {num_rows}")
    tell("the old middle", whole := measured(num_rows, 1, "old"), whole)
    for lanes in LANES:
        tell(f"streams, lanes: {lanes}", measured(num_rows, lanes, "goals"), whole)
    tell("both stacks of 4 frames", BOTH_STACKS, BOTH_STACKS)
    tell("streams", measured(max(num_rows // FEWER_STACKS, 8), 1, "stacks"), BOTH_STACKS)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.streams")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    effort = Effort(rounds=arguments.rounds)
    made, old = Streams(arguments.rows).fill(), whole_storage(arguments.rows)
    for size in BATCHES:
        printed(f"gather of {size}", gathers(made, old, size), effort)
    printed(f"hindsight of {BATCHES[0]}", hindsight(made, BATCHES[0]), effort)
    printed("writes", writes(made), effort)
    del made, old
    print_memory(arguments.rows)


if __name__ == "__main__":
    main()
