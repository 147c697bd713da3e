"""What is measured, a function for each section."""

import atexit
import gc
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks import hindsight_profile, memory
from tests.benchmarks.contest import Contest, Contestant, Plan, installed, who
from tests.benchmarks.data import (
    LANES,
    SEQUENCE_STEPS,
    goal_columns,
    pixel_columns,
    take_rows,
)
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.peers import Buffer, load_peer
from tests.benchmarks.progress import progress
from tests.benchmarks.results import Report, Result

__all__ = ["SECTIONS", "prepare_process", "run_section"]

PIXEL_ROWS = 5000
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


def told(
    section: str, measured: Mapping[Contestant, list[float]], plan: Plan, **case: Any
) -> Iterator[Result]:
    """Names the rounds of each contestant."""
    case = {"threads": plan.threads, "unequal": plan.unequal} | case
    for (peer, work), rounds in measured.items():
        yield Result(section=section, work=work, peer=peer, rounds=rounds, **case)


def drawn(
    section: str,
    contest: Contest,
    batch_sizes: Sequence[int],
    plan: Plan,
    *,
    walk: Callable | None = None,
    effort: Effort | None = None,
    **case: Any,
) -> Iterator[Result]:
    """Measures samples. The rows of the contest are freed when the last result is taken."""
    for batch_size in batch_sizes:
        measured = measure(contest.turns(batch_size, walk), effort or plan.effort)
        yield from told(section, measured, plan, rows=contest.rows, batch_size=batch_size, **case)


def sampling(plan: Plan) -> Iterator[Result]:
    """Draws of batches, one write before each: every work at every size."""
    sizes = plan.sizes
    cases = [(group, rows, plan.unequal) for group in GROUPS for rows in sizes]
    if not plan.unequal and len(sizes) > 1:
        cases.insert(2 * len(sizes), ("her", sizes[len(sizes) // 2], True))
    for group, rows, unequal in progress(cases, "sampling"):
        contestants = who(plan, group, own=GROUPS[group])
        yield from drawn(
            "sampling",
            Contest(contestants, rows, unequal=unequal),
            plan.batch_sizes,
            plan,
            unequal=unequal,
        )


def cold(plan: Plan) -> Iterator[Result]:
    """The same for uniform and hindsight, after a walk through as much memory as the rows take."""
    effort = replace(plan.effort, rounds=max(plan.effort.rounds // 2, 2), calls=5, seconds=1.0)
    other = goal_columns(plan.most_rows)
    # A cache line a row.
    lines = np.ones((sum(column.nbytes for column in other.values()) // 64, 8), np.int64)
    del other
    for work in progress(("uniform", "her"), "cold"):
        contest = Contest(who(plan, work), plan.most_rows, unequal=plan.unequal)
        yield from drawn(
            "cold", contest, plan.batch_sizes, plan, walk=lambda: lines[:, 0].sum(), effort=effort
        )
        del contest


def sequences(plan: Plan) -> Iterator[Result]:
    """32 stretches of 16 steps, one write before each draw."""
    for rows in progress(plan.sizes, "sequences"):
        contest = Contest(who(plan, "sequences"), rows, unequal=plan.unequal)
        yield from drawn("sequences", contest, [32 * SEQUENCE_STEPS], plan)
        del contest


def pixels(plan: Plan) -> Iterator[Result]:
    """Batches of 256 stacked frames, as they are stored and folded over three steps."""
    rows = min(PIXEL_ROWS, plan.most_rows)
    columns = pixel_columns(rows + 100)
    for work in progress(("pixels", "pixels_n_step"), "pixels"):
        contest = Contest(who(plan, work, own=("pixels", work)), rows, columns=columns)
        yield from drawn(work, contest, [256], plan, unequal=False)
        del contest


def writing(plan: Plan) -> Iterator[Result]:
    """Steps of a loop, and writes of several rows at once, over the oldest ones of a full storage."""
    for work in progress(tuple(WRITES), "writing"):
        yield from written(work, plan)


def written(work: str, plan: Plan) -> Iterator[Result]:
    """Measures writes of one kind."""
    rows = plan.most_rows // LANES * LANES
    columns = goal_columns(max(rows, 10_000), unequal=plan.unequal)
    fill = take_rows(columns, 0, rows)
    buffers = {
        contestant: installed(contestant[0]).WORKS[work](fill, rows)
        for contestant in who(plan, work)
    }
    for num_rows in WRITES[work]:
        turns = {}
        for contestant, buffer in buffers.items():
            prepared = [
                buffer.prepare(take_rows(columns, num_rows * block, num_rows * (block + 1)))
                for block in range(min(10_000 // num_rows, 1000))
            ]
            turns[contestant] = write_turn(buffer, itertools.cycle(prepared))
        measured = measure(turns, plan.effort)
        yield from told("writing", measured, plan, rows=rows, batch_size=num_rows)


def write_turn(buffer: Buffer, prepared: Iterator) -> Turn:
    return Turn(call=lambda: buffer.write(next(prepared)), repeat=10)


def growth(plan: Plan) -> Iterator[Result]:
    """Every work of ours at the smallest and the largest size, next to the raw gather at both."""
    for work in progress((*OF_OURS, "sequences"), "growth"):
        yield from grown(work, plan)


def grown(work: str, plan: Plan) -> Iterator[Result]:
    """Measures one work at two sizes."""
    is_sequence = work == "sequences"
    contests = {}
    for rows in (plan.rows[0], plan.rows[-1]):
        contest = Contest([("ours", work)], rows, unequal=plan.unequal)
        raw = installed("raw").WORKS["sequences" if is_sequence else "uniform"]
        contest.add(("raw", work), raw(contest.fill, contest.capacity))
        contests[rows] = contest
    for batch_size in (32 * SEQUENCE_STEPS,) if is_sequence else plan.batch_sizes:
        turns = {
            (rows, contestant): turn
            for rows, contest in contests.items()
            for contestant, turn in contest.turns(batch_size).items()
        }
        for (rows, contestant), rounds in measure(turns, plan.effort).items():
            yield from told("growth", {contestant: rounds}, plan, rows=rows, batch_size=batch_size)


def mapped(plan: Plan) -> Iterator[Result]:
    """Rows in memory-mapped files next to rows in memory, all of their pages touched before."""
    for work in progress(("uniform", "her"), "mapped"):
        with tempfile.TemporaryDirectory() as directory:
            contest = Contest([("ours", work)], plan.most_rows, unequal=plan.unequal)
            on_disk = installed("ours").on_disk(work, Path(directory) / work)
            contest.add(("ours_mapped", work), on_disk(contest.fill, contest.capacity))
            yield from drawn("mapped", contest, plan.batch_sizes, plan)
            del contest


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
    atexit.register(gc.unfreeze)  # They would be reported as leaks.


def run_section(name: str, plan: Plan) -> Report:
    """Runs one section in this process."""
    if name == "memory":
        return Report(memory=memory.measure_memory(plan.most_rows))
    if name == "profile":
        return Report(profile=hindsight_profile.profile(plan.most_rows, plan.threads, plan.effort))
    return Report(results=list(SECTIONS[name](plan)))
