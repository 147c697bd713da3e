"""Where the time of a hindsight batch goes.

The public methods of the parts are wrapped in clocks: what a part takes is what passes within its
call, less what passes within the calls of other parts from there. What is left of `sample` is the
container: locks, merging the sampler's entries, TorchRL's own steps.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.benchmarks.data import HINDSIGHT_GOALS, Columns, goal_columns, take_rows, to_tensordict
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.peers.ours import goal_reward
from tests.benchmarks.peers.raw import Raw
from trl_storages import GoalRelabel, HERSampler, PackedStorage, ReplayStorage

__all__ = ["profile"]

BATCH_SIZE, LARGE_BATCH_SIZE = 256, 4096
PARTS = {
    "sample": "container: locks, merging the sampler's entries, all that is not below",
    "sampler": "sampler: rows and goals are drawn",
    "gather": "gather: rows become a TensorDict",
    "goals": "goals: the drawn achieved goals are read",
    "relabel": "relabel: goals and rewards are written into the batch",
    "reward": "reward function",
}


class PlainHindsight(Raw):
    """The same batch by one function over arrays, without parts, TensorDict, locks or a ring.

    Nobody would train with it: it knows these fields only, and episodes that are complete and never
    overwritten. What a library takes beyond it buys all of that.
    """

    def __init__(self, columns: Columns, capacity: int):
        super().__init__(columns, capacity)
        ends = np.append(columns["done"].nonzero()[0], len(columns["done"]) - 1)
        self.last = ends[ends.searchsorted(np.arange(len(columns["done"])))]

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Returns the fields of a relabelled batch."""
        slots = self.slots(batch_size)
        anchors = slots[: batch_size * HINDSIGHT_GOALS // (HINDSIGHT_GOALS + 1)]
        count, ahead = len(anchors), self.last.take(anchors) - anchors
        chosen = anchors + (self.rng.random(count) * (ahead + 1)).astype(np.int64)
        batch = self.bytes.take(slots, 0).view(self.dtype)[:, 0]
        fields = {name: torch.from_numpy(batch[name]) for name in self.names}
        goal = torch.from_numpy(self.rows["next_achieved_goal"][chosen])
        fields["desired_goal"][:count] = goal
        fields["next_desired_goal"][:count] = goal
        fields["reward"][:count] = goal_reward(fields["next_achieved_goal"][:count], goal, {})
        return fields


class Clocks:
    """Wraps functions so that each counts the time that passes in it and in no other one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.taken: dict[str, float] = defaultdict(float)
        self.running: list[str] = []
        self.since = 0.0

    def wrap(self, part: str, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            now = self.clock()
            if self.running:
                self.taken[self.running[-1]] += now - self.since
            self.running.append(part)
            self.since = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                now = self.clock()
                self.taken[self.running.pop()] += now - self.since
                self.since = self.clock()

        return timed


def make_storage(rows: int, *, clocks: Clocks | None) -> ReplayStorage:
    """Returns an empty hindsight storage, its parts wrapped in clocks if some are given."""

    def wrap(part: str, function: Callable) -> Callable:
        return function if clocks is None else clocks.wrap(part, function)

    packed, sampler = PackedStorage(rows), HERSampler("future", HINDSIGHT_GOALS)
    relabel = GoalRelabel(wrap("reward", goal_reward))
    if clocks is not None:
        sampler.sample = clocks.wrap("sampler", sampler.sample)
        packed.get = clocks.wrap("gather", packed.get)
        packed.read = clocks.wrap("goals", packed.read)
        relabel.replay = clocks.wrap("relabel", relabel.replay)
    return ReplayStorage(storage=packed, sampler=sampler, transform=relabel)


def profile(rows: int, threads: int, effort: Effort) -> list[dict[str, Any]]:
    """Takes a batch of 256 apart, and compares the whole with less than a library.

    Args:
        rows: how many are stored.
        threads: how many torch may use, to be told again in the result.
        effort: rounds of samples; their median is returned.

    Returns:
        a line for each part, with `microseconds`; then for a batch of 256 and one of 4096 the whole
        without any clocks, the same work in one plain function, and a gather of as many bytes.
    """
    columns = goal_columns(rows + BATCH_SIZE)
    clocks = Clocks(time.process_time if effort.processor_time else time.perf_counter)
    whole, timed = make_storage(rows, clocks=None), make_storage(rows, clocks=clocks)
    fill = take_rows(columns, 0, rows)
    for block in to_tensordict(fill).split(10_000):
        whole.extend(block)
        timed.extend(block)
    raw, by_hand = Raw(fill, rows), PlainHindsight(fill, rows)
    sample = clocks.wrap("sample", timed.sample)
    taken: dict[str, list[float]] = defaultdict(list)

    def sample_with_clocks() -> None:
        clocks.taken.clear()
        sample(BATCH_SIZE)
        for part in PARTS:
            taken[part].append(1e6 * clocks.taken[part])

    lines = []
    with torch.no_grad():
        for size in (BATCH_SIZE, LARGE_BATCH_SIZE):
            turns = {
                f"whole, batch of {size:,}": Turn(call=partial(whole.sample, size)),
                f"in one plain function, batch of {size:,}": Turn(
                    call=partial(by_hand.sample, size)
                ),
                f"one gather of as many bytes, batch of {size:,}": Turn(
                    call=partial(raw.sample, size)
                ),
            }
            if size == BATCH_SIZE:
                turns["timed"] = Turn(call=sample_with_clocks)
            measured = measure(turns, effort)
            measured.pop("timed", None)
            lines += [(part, statistics.median(rounds)) for part, rounds in measured.items()]
    lines = [(text, statistics.median(taken[part])) for part, text in PARTS.items()] + lines
    return [
        {"threads": threads, "rows": rows, "part": part, "microseconds": microseconds}
        for part, microseconds in lines
    ]
