"""What is measured: each section fills the libraries and lets them take turns.

Letters: N stored rows, B batch.
"""

import gc
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from tests.benchmarks import hindsight_profile, memory
from tests.benchmarks.data import (
    LANES,
    SEQUENCE_STEPS,
    Columns,
    flat_columns,
    goal_columns,
    pixel_columns,
    take_rows,
)
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.peers import PEERS, Buffer, load_peer
from tests.benchmarks.progress import progress
from tests.benchmarks.results import Report, Result

__all__ = ["SECTIONS", "Plan", "prepare_process", "run_section"]

# Every library has room for more rows than it is filled with, as TorchRL's HER raises once it is full.
SPARE_ROWS = 2000
# Of them, those that are written between samples, over and over. A multiple of the episodes.
NEW_ROWS = 400
PIXEL_ROWS = 10**4
FLAT = ("n_step", "priorities", "recent", "pixels", "pixels_n_step")
OURS_WITH_GOALS = ("her", "her_n_step", "everything")
# What takes turns: our own works, and what the others do next to them.
GROUPS = {
    "uniform": ("uniform",),
    "her": OURS_WITH_GOALS,
    "n_step": ("n_step",),
    "priorities": ("priorities",),
    "recent": ("recent",),
}
WRITES = {"record": (1,), "record_lanes": (LANES,), "extend": (1, 8, 50, 1000)}
OF_OURS = ("uniform", *OURS_WITH_GOALS, "n_step", "priorities", "recent")

Contestant = tuple[str, str]  # peer, work


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked for.

    Attributes:
        rows: N, in rising order.
        batch_sizes: B.
        threads: how many the libraries may use.
        peers: the libraries that may take part.
        unequal: whether the episodes of all sections are of 1 to 99 steps instead of 50.
        effort: how much is measured.
    """

    rows: tuple[int, ...] = (10**4, 10**5, 10**6)
    batch_sizes: tuple[int, ...] = (256, 4096)
    threads: int = 1
    peers: tuple[str, ...] = PEERS
    unequal: bool = False
    effort: Effort = field(default_factory=Effort)

    @property
    def most_rows(self) -> int:
        """The largest N."""
        return self.rows[-1]


class Contest:
    """Libraries that are filled with the same transitions and take turns at sampling them."""

    def __init__(
        self,
        contestants: list[Contestant],
        rows: int,
        *,
        unequal: bool = False,
        columns: Columns | None = None,
    ):
        if columns is None:
            columns = goal_columns(rows + SPARE_ROWS, unequal=unequal)
            columns = flat_columns(columns) if contestants[0][1] in FLAT else columns
        self.fill, self.new = take_rows(columns, 0, rows), take_rows(columns, rows, None)
        self.rows, self.capacity = rows, len(columns["done"])
        gc.collect()  # The libraries of the contest before this one may still hold their rows.
        self.buffers: dict[Contestant, Buffer] = {}
        self.steps: dict[Contestant, Iterator] = {}
        for peer, work in contestants:
            self.add((peer, work), installed(peer).WORKS[work](self.fill, self.capacity))

    def add(self, contestant: Contestant, buffer: Buffer) -> None:
        """Lets one more take part."""
        new_rows = range(min(NEW_ROWS, self.capacity - self.rows))
        prepared = [buffer.prepare(take_rows(self.new, row, row + 1)) for row in new_rows]
        self.buffers[contestant], self.steps[contestant] = buffer, itertools.cycle(prepared)

    def turns(self, batch_size: int, walk: Callable | None = None) -> dict[Contestant, Turn]:
        """Returns draws of a batch, with a write of one step before each that is not timed.

        Args:
            batch_size: B.
            walk: what else is done before each, such as emptying the caches.
        """
        return {
            contestant: sample_turn(buffer, self.steps[contestant], batch_size, walk)
            for contestant, buffer in self.buffers.items()
        }


def sample_turn(buffer: Buffer, steps: Iterator, batch_size: int, walk: Callable | None) -> Turn:
    def before() -> None:
        buffer.write(next(steps))
        if walk is not None:
            walk()

    return Turn(call=lambda: buffer.sample(batch_size), before=before)


def installed(name: str) -> ModuleType:
    peer = load_peer(name)
    if isinstance(peer, str):
        raise ModuleNotFoundError(peer)
    return peer


def who(plan: Plan, *works: str, own: tuple[str, ...] = ()) -> list[Contestant]:
    """Lists who does a work; of this package, all of `own` as well."""
    found = [("ours", work) for work in own if "ours" in plan.peers]
    for name in plan.peers:
        peer = load_peer(name)
        if not isinstance(peer, str):
            found += [(name, work) for work in works if work in peer.WORKS]
    return list(dict.fromkeys(found))


def sampling(plan: Plan) -> Iterator[Result]:
    """Draws of batches, one write before each: every work at every size."""
    sizes = plan.rows if plan.threads == 1 else plan.rows[-1:]
    cases = [(group, rows, plan.unequal) for group in GROUPS for rows in sizes]
    if not plan.unequal and plan.threads == 1:
        cases.insert(2 * len(sizes), ("her", sizes[len(sizes) // 2], True))
    for group, rows, unequal in progress(cases, "sampling"):
        contest = Contest(who(plan, group, own=GROUPS[group]), rows, unequal=unequal)
        for batch_size in plan.batch_sizes:
            for (peer, work), rounds in measure(contest.turns(batch_size), plan.effort).items():
                yield Result(
                    section="sampling",
                    work=work,
                    peer=peer,
                    rows=rows,
                    batch_size=batch_size,
                    threads=plan.threads,
                    unequal=unequal,
                    rounds=rounds,
                )


def cold(plan: Plan) -> Iterator[Result]:
    """The same for uniform and hindsight, after a walk through as much memory as the rows take."""
    rows = plan.most_rows
    for work in progress(("uniform", "her"), "cold"):
        contest = Contest(who(plan, work), rows, unequal=plan.unequal)
        num_bytes = sum(column.nbytes for column in contest.fill.values())
        other = np.ones((num_bytes // 64, 8), np.int64)  # a cache line a row

        def walk(other: np.ndarray = other) -> None:
            other[:, 0].sum()

        effort = Effort(rounds=max(plan.effort.rounds // 2, 2), calls=5, seconds=1.0)
        for batch_size in plan.batch_sizes:
            turns = contest.turns(batch_size, walk)
            for (peer, _), rounds in measure(turns, effort).items():
                yield Result(
                    section="cold",
                    work=work,
                    peer=peer,
                    rows=rows,
                    batch_size=batch_size,
                    threads=plan.threads,
                    unequal=plan.unequal,
                    rounds=rounds,
                )


def sequences(plan: Plan) -> Iterator[Result]:
    """32 stretches of 16 steps, one write before each draw."""
    batch_size = 32 * SEQUENCE_STEPS
    for rows in progress(plan.rows if plan.threads == 1 else plan.rows[-1:], "sequences"):
        contest = Contest(who(plan, "sequences"), rows, unequal=plan.unequal)
        for (peer, work), rounds in measure(contest.turns(batch_size), plan.effort).items():
            yield Result(
                section="sequences",
                work=work,
                peer=peer,
                rows=rows,
                batch_size=batch_size,
                threads=plan.threads,
                unequal=plan.unequal,
                rounds=rounds,
            )


def pixels(plan: Plan) -> Iterator[Result]:
    """Batches of 256 stacked frames, as they are stored and folded over three steps."""
    rows, spare = min(PIXEL_ROWS, plan.most_rows), 100
    columns = pixel_columns(rows + spare)
    for work in progress(("pixels", "pixels_n_step"), "pixels"):
        own = ("pixels", work)
        contest = Contest(who(plan, work, own=own), rows, columns=columns)
        for (peer, done), rounds in measure(contest.turns(256), plan.effort).items():
            yield Result(
                section=work,
                work=done,
                peer=peer,
                rows=rows,
                batch_size=256,
                threads=plan.threads,
                rounds=rounds,
            )


def writing(plan: Plan) -> Iterator[Result]:
    """Steps of a loop, and writes of several rows at once, over the oldest ones of a full storage."""
    rows = plan.most_rows // LANES * LANES
    columns = goal_columns(max(rows, 10_000), unequal=plan.unequal)
    fill = take_rows(columns, 0, rows)
    for work in progress(tuple(WRITES), "writing"):
        buffers = {
            contestant: installed(contestant[0]).WORKS[work](fill, rows)
            for contestant in who(plan, work)
        }
        for num_rows in WRITES[work]:
            turns = {}
            for contestant, buffer in buffers.items():
                blocks = min(10_000 // num_rows, 1000)
                prepared = [
                    buffer.prepare(take_rows(columns, num_rows * block, num_rows * (block + 1)))
                    for block in range(blocks)
                ]
                turns[contestant] = write_turn(buffer, itertools.cycle(prepared))
            for (peer, _), rounds in measure(turns, plan.effort).items():
                yield Result(
                    section="writing",
                    work=work,
                    peer=peer,
                    rows=rows,
                    batch_size=num_rows,
                    threads=plan.threads,
                    unequal=plan.unequal,
                    rounds=rounds,
                )


def write_turn(buffer: Buffer, prepared: Iterator) -> Turn:
    return Turn(call=lambda: buffer.write(next(prepared)), repeat=10)


def growth(plan: Plan) -> Iterator[Result]:
    """Every work of ours at the smallest and the largest size, next to the raw gather at both."""
    sizes = (plan.rows[0], plan.rows[-1])
    for work in progress((*OF_OURS, "sequences"), "growth"):
        batch_sizes = (32 * SEQUENCE_STEPS,) if work == "sequences" else plan.batch_sizes
        raw = "sequences" if work == "sequences" else "uniform"
        contests = {}
        for rows in sizes:
            contests[rows] = Contest([("ours", work)], rows, unequal=plan.unequal)
            contest = contests[rows]
            contest.add(("raw", work), installed("raw").WORKS[raw](contest.fill, contest.capacity))
        for batch_size in batch_sizes:
            turns = {
                (rows, *contestant): turn
                for rows, contest in contests.items()
                for contestant, turn in contest.turns(batch_size).items()
            }
            for (rows, peer, _), rounds in measure(turns, plan.effort).items():
                yield Result(
                    section="growth",
                    work=work,
                    peer=peer,
                    rows=rows,
                    batch_size=batch_size,
                    threads=plan.threads,
                    unequal=plan.unequal,
                    rounds=rounds,
                )


def mapped(plan: Plan) -> Iterator[Result]:
    """Rows in memory-mapped files next to rows in memory, all of their pages touched before."""
    rows = plan.most_rows
    for work in progress(("uniform", "her"), "mapped"):
        with tempfile.TemporaryDirectory() as directory:
            contest = Contest([("ours", work)], rows, unequal=plan.unequal)
            kind = installed("ours").on_disk(work, Path(directory) / work)
            contest.add(("ours_mapped", work), kind(contest.fill, contest.capacity))
            for batch_size in plan.batch_sizes:
                for (peer, _), rounds in measure(contest.turns(batch_size), plan.effort).items():
                    yield Result(
                        section="mapped",
                        work=work,
                        peer=peer,
                        rows=rows,
                        batch_size=batch_size,
                        threads=plan.threads,
                        unequal=plan.unequal,
                        rounds=rounds,
                    )


SECTIONS: dict[str, Callable[[Plan], Iterator[Result]]] = {
    "sampling": sampling,
    "writing": writing,
    "sequences": sequences,
    "pixels": pixels,
    "growth": growth,
    "mapped": mapped,
    "cold": cold,
}


def prepare_process(threads: int, peers: Iterable[str]) -> None:
    """Imports the libraries and gives them their threads, before anything is measured."""
    warnings.simplefilter("ignore")  # the other libraries' own
    torch.set_num_threads(threads)
    for name in peers:
        load_peer(name)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()  # Half a million objects need not be walked again between measurements.


def run_section(name: str, plan: Plan) -> Report:
    """Runs one section in this process."""
    if name == "memory":
        return Report(memory=memory.measure_memory(plan.most_rows))
    if name == "profile":
        return Report(profile=hindsight_profile.profile(plan.most_rows, plan.threads, plan.effort))
    return Report(results=list(SECTIONS[name](plan)))
