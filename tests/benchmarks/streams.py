"""Times the loops over streams of observations alone: `python -m tests.benchmarks.streams`.

Beside them stand NumPy's take of whole rows, and what a storage takes with all else it does.

Letters: N rows, E lanes, B batch.
"""

import argparse
import itertools
import statistics
from typing import Any

import numpy as np
import torch

from tests.benchmarks.data import goal_columns, to_tensordict
from tests.benchmarks.measure import Effort, Turn, measure
from trl_storages import HERReplayStorage
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import draws
from trl_storages.kernels import streams as kernels
from trl_storages.streams import Arena, Block, HostRows, Layout, room_for

BATCHES, MOST_STEPS = (256, 4096), 1000


class Streams:
    """An index, and rows in memory that are written over and over."""

    def __init__(self, num_rows: int) -> None:
        columns = goal_columns(MOST_STEPS)
        source = to_tensordict(columns)
        leaves = source.items(include_nested=True, leaves_only=True)
        fields: dict[Any, Any] = {key: (it.dtype, it.shape[1:]) for key, it in leaves}
        self.layout = layout = Layout(fields)
        self.index = EpisodeIndex(num_rows)
        arena = Arena(**room_for(layout, self.index))
        self.index.use(arena.arrays)
        self.entries = arena.arrays["entries"]
        self.rows = HostRows(layout, self.index, arena)
        words = torch.zeros(len(source), layout.row_words, dtype=torch.int64)
        for key in fields:
            layout.fill(key, words, source[key])
        self.words, self.done = words.numpy(), columns["done"]
        blocks = self.blocks(MOST_STEPS)
        while self.index.cursors[0] < 1.3 * num_rows:
            self.rows.append(next(blocks), cuts_gaps=True)

    def blocks(self, steps: int) -> Any:
        """Returns an endless iterator of blocks of some steps."""
        size = min(steps, self.index.most_steps, len(self.words))
        which, offsets, cut = np.zeros(1, np.int64), np.array([0, size]), np.zeros(size, bool)
        return itertools.cycle(
            [
                Block(which, offsets, self.words[at : at + size], self.done[at : at + size], cut)
                for at in range(0, len(self.words) - size + 1, size)
            ]
        )


def printed(title: str, turns: dict[str, Turn], effort: Effort) -> None:
    """Prints the median of each, in microseconds, and beside that of the first."""
    medians = {name: statistics.median(it) for name, it in measure(turns, effort).items()}
    first = next(iter(medians.values()))
    print(title)
    for name, median in medians.items():
        print(f"  {name:42} {median:9.1f} us {median / first:6.2f}", flush=True)


def gathers(made: Streams, size: int) -> dict[str, Turn]:
    """Returns gathers of the same random rows."""
    index, sizes = made.index, made.layout.sizes
    slots = torch.empty(size, dtype=torch.int64)
    at, out = slots.numpy(), np.empty((size, made.layout.row_words), np.int64)
    whole = np.ones((len(index), made.layout.row_words), np.int64)

    def gather() -> None:
        where = index.where[at]
        kernels.gather(made.entries, sizes, 1, where, where, out)

    def called() -> None:
        where = index.entries_of(slots)
        made.rows.gather(where, where)

    calls = {
        "NumPy's take of whole rows": lambda: whole.take(at, 0, out=out, mode="clip"),
        "streams": gather,
        "with its call": called,
    }
    return {
        name: Turn(call=call, before=lambda: slots.random_(len(index)))
        for name, call in calls.items()
    }


def hindsight(made: Streams, size: int) -> dict[str, Turn]:
    """Returns a gather, one of drawn rows of which four in five get goals of later rows, and a batch."""
    index = made.index
    noise = torch.empty(2, size, dtype=torch.int64)
    slots, goals = np.empty(size, np.int64), np.empty(size, np.int64)
    kinds = np.where(np.arange(size) % 5, draws.GOAL_KINDS["future"], 0).astype(np.uint8)
    relabelled, steps, random = kinds > 0, np.empty(0), noise.numpy()
    mask = torch.from_numpy(relabelled)
    achieved, desired = ("next", "achieved_goal"), ("desired_goal", ("next", "desired_goal"))

    def gather() -> torch.Tensor:
        where = torch.from_numpy(index.where[slots])
        return made.rows.gather(where, where)

    def relabel() -> None:
        draws.draw(index.tables, index.steps_per_lane, random[0], slots)
        draws.goals(index.tables, slots, random[1], kinds, steps, goals)
        made.rows.paste(gather(), achieved, torch.from_numpy(index.where[goals]), mask, desired)

    def anchors() -> None:
        noise.random_()
        draws.draw(index.tables, index.steps_per_lane, random[0], slots)

    return {
        "gather": Turn(call=gather, before=anchors),
        "anchors, future goals, gather": Turn(call=relabel, before=noise.random_),
        "a storage's batch": Turn(call=stored(len(index), size).sample),
    }


def stored(num_rows: int, size: int) -> HERReplayStorage:
    """Returns a full storage with hindsight."""
    from tests.benchmarks.peers.ours import ACTION_SPACE, GOAL_SPACE, goal_reward

    storage = HERReplayStorage(
        *(GOAL_SPACE, ACTION_SPACE),
        reward_fn=goal_reward,
        storage_size=num_rows,
        batch_size=size,
    )
    block = to_tensordict(goal_columns(MOST_STEPS))
    for _ in range(-(-num_rows // len(block))):
        storage.extend(block)
    return storage


def writes(made: Streams) -> dict[str, Turn]:
    """Returns writes of one step, and of many."""
    one, many = made.blocks(1), made.blocks(MOST_STEPS)
    return {
        "a step": Turn(call=lambda: made.rows.append(next(one), cuts_gaps=True), repeat=10),
        f"{MOST_STEPS} steps": Turn(call=lambda: made.rows.append(next(many), cuts_gaps=True)),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.streams")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    effort, made = Effort(rounds=arguments.rounds), Streams(arguments.rows)
    for size in BATCHES:
        printed(f"gather of {size}", gathers(made, size), effort)
    printed(f"hindsight of {BATCHES[0]}", hindsight(made, BATCHES[0]), effort)
    printed("writes", writes(made), effort)


if __name__ == "__main__":
    main()
