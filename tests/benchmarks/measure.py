"""How long a call takes, for several libraries side by side."""

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from tests.benchmarks.data import Columns, take_rows
from tests.benchmarks.peers import Buffer

__all__ = ["Case", "Result", "measure_sampling"]

# Rows that are written between samples, over and over: every library has room for that many more
# than it is filled with, as TorchRL's HER raises once it is full. A multiple of the episodes.
SPARE_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of a table: what is done, on how many rows, for which batches."""

    work: str
    rows: int
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The median time of a call, and the quartiles around it, in microseconds."""

    case: Case
    peer: str
    median: float
    low: float
    high: float


# A library that takes so long for a few samples needs no more of them to have a median.
TURN_SECONDS = 0.2


def time_samples(buffer: Buffer, steps: Iterator, batch_size: int, calls: int) -> list[float]:
    """Times up to `calls` samples, with a write of one step before each that is not timed."""
    times: list[float] = []
    end = time.perf_counter() + TURN_SECONDS
    while len(times) < calls and (len(times) < 2 or time.perf_counter() < end):
        buffer.write(next(steps))
        begin = time.perf_counter()
        buffer.sample(batch_size)
        times.append(1e6 * (time.perf_counter() - begin))
    return times


def measure_sampling(
    work: str,
    columns: Columns,
    batch_sizes: list[int],
    peers: dict[str, ModuleType],
    *,
    rounds: int,
    calls: int,
) -> Iterator[Result]:
    """Samples from each library in turn, one write before each sample.

    The libraries take turns of a few calls each, so that whatever else the machine does meets all
    of them, while the caches stay as warm as they are within a loop of one library.

    Args:
        work: a key of the adapters' `WORKS`; adapters without it are left out.
        columns: the transitions; the last `SPARE_ROWS` of them are those that are written.
        batch_sizes: of the samples.
        peers: the adapters, by name.
        rounds: how many turns each library gets, after one that is thrown away.
        calls: how many samples a turn has, or fewer where they take long.

    Yields:
        a result for each batch size and library.
    """
    rows = len(columns["done"]) - SPARE_ROWS
    fill, new = take_rows(columns, 0, rows), take_rows(columns, rows, rows + SPARE_ROWS)
    buffers, steps = {}, {}
    for name, peer in peers.items():
        if work in peer.WORKS:
            buffers[name] = peer.WORKS[work](fill, rows + SPARE_ROWS)
            prepared = [buffers[name].prepare(take_rows(new, i, i + 1)) for i in range(SPARE_ROWS)]
            steps[name] = itertools.cycle(prepared)
    gc.collect()
    gc.disable()
    try:
        for batch_size in batch_sizes:
            times: dict[str, list[float]] = {name: [] for name in buffers}
            for turn in range(rounds + 1):
                for name, buffer in buffers.items():
                    taken = time_samples(buffer, steps[name], batch_size, calls)
                    times[name] += taken if turn else []
            for name, taken in times.items():
                low, median, high = statistics.quantiles(taken, n=4)
                case = Case(work=work, rows=rows, batch_size=batch_size)
                yield Result(case=case, peer=name, median=median, low=low, high=high)
    finally:
        gc.enable()
