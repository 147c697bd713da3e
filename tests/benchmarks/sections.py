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

import torch

from tests.benchmarks import memory
from tests.benchmarks.contest import Contest, Contestant, Plan, adapter, who, write_turn
from tests.benchmarks.data import (
    EPISODE_LENGTH,
    LANES,
    SEQUENCE_STEPS,
    flat_columns,
    goal_columns,
    stacked_columns,
    take_rows,
)
from tests.benchmarks.lanes import growth, lanes
from tests.benchmarks.measure import Turn, measure, nothing
from tests.benchmarks.network import Network
from tests.benchmarks.peers import Buffer, load_peer
from tests.benchmarks.results import Report, Result

__all__ = ["SECTIONS", "prepare_process", "run_section"]

# Rows that are stored once: they fill memory so far that what else a library needs hardly counts.
ONCE_ROWS = {"flat": 200_000, "stacks": 4000}
LOOP_ROWS = 200_000
OURS_WITH_GOALS = ("her", "her_n_step", "everything")
# What takes turns: our own works, and what the others do next to them.
GROUPS = {
    "uniform": ("uniform",),
    "her": OURS_WITH_GOALS,
    "n_step": ("n_step",),
    "priorities": ("priorities",),
    "recent": ("recent",),
}
# What is drawn between the updates of a network.
IN_LOOPS = ("uniform", "her", "n_step", "priorities")
WRITES = {"record": (1,), "record_lanes": (LANES,), "extend": (1, 8, 50, 1000)}


def told(
    section: str, measured: Mapping[Contestant, list[float]], plan: Plan, **case: Any
) -> Iterator[Result]:
    """Names the rounds of each contestant."""
    case = {"threads": plan.threads} | case
    for (peer, work), rounds in measured.items():
        yield Result(section=section, work=work, peer=peer, rounds=rounds, **case)


def drawn(
    section: str, contest: Contest, batch_sizes: Sequence[int], plan: Plan, **case: Any
) -> Iterator[Result]:
    """Measures samples. The rows of the contest are freed when the last result is taken."""
    for batch_size in batch_sizes:
        measured = measure(contest.turns(batch_size), plan.effort)
        yield from told(section, measured, plan, rows=contest.rows, batch_size=batch_size, **case)


def loop(plan: Plan) -> Iterator[Result]:
    """Draws between two updates of a network, the caches as the update leaves them.

    The section "alone" has the same draws without updates, by turns with these.
    """
    rows, batch_size = min(LOOP_ROWS, plan.most_rows), plan.batch_sizes[0]
    case = {"rows": rows, "batch_size": batch_size}
    network = Network.as_slow_as_wanted(batch_size, plan.effort)
    for group in IN_LOOPS:
        contest = Contest(who(plan, group, own=GROUPS[group]), rows, device=plan.device)
        turns = {
            (section, contestant): turn
            for section, between in (("loop", network.update), ("alone", nothing))
            for contestant, turn in contest.turns(batch_size, between).items()
        }
        for (section, contestant), rounds in measure(turns, plan.effort).items():
            yield from told(section, {contestant: rounds}, plan, **case)
        del contest, turns


def sampling(plan: Plan) -> Iterator[Result]:
    """Draws of batches, one write before each: every work at every size."""
    sizes = plan.sizes
    for group, rows in itertools.product(GROUPS, sizes):
        contest = Contest(who(plan, group, own=GROUPS[group]), rows, device=plan.device)
        yield from drawn("sampling", contest, plan.batch_sizes, plan)
        if group == "her" and rows == sizes[-1]:
            yield from written_and_drawn(contest, plan)
        del contest


def written_and_drawn(contest: Contest, plan: Plan) -> Iterator[Result]:
    """Hindsight of those that draw goals when they write, and ours: a write and a draw together.

    All are handed arrays, as gymnasium gives them.
    """
    sides = {("cpprb", "her")} & contest.buffers.keys()
    if ("ours", "her") in contest.buffers:
        contest.add(("ours", "record_her"), device=plan.device)
        sides |= {("ours", "record_her")}
    for batch_size in plan.batch_sizes:
        turns = {
            (peer, "her"): write_and_draw_turn(
                contest.buffers[peer, work], contest.steps[peer, work], batch_size
            )
            for peer, work in sorted(sides)
        }
        measured = measure(turns, plan.effort)
        yield from told("write_and_draw", measured, plan, rows=contest.rows, batch_size=batch_size)


def write_and_draw_turn(buffer: Buffer, steps: Iterator, batch_size: int) -> Turn:
    def call() -> None:
        buffer.write(next(steps))
        buffer.sample(batch_size)

    # Goals that are drawn when an episode is written are all drawn with its last step.
    return Turn(call=call, repeat=EPISODE_LENGTH)


def sequences(plan: Plan) -> Iterator[Result]:
    """32 stretches of 16 steps, one write before each draw."""
    for rows in plan.sizes:
        contest = Contest(who(plan, "sequences"), rows, device=plan.device)
        yield from drawn("sequences", contest, [32 * SEQUENCE_STEPS], plan)
        del contest


def stored_once(plan: Plan) -> Iterator[Result]:
    """Batches of flat observations and of stacked frames, stored once as well as a library can."""
    for work in tuple(ONCE_ROWS):
        rows = min(ONCE_ROWS[work], plan.most_rows) // EPISODE_LENGTH * EPISODE_LENGTH
        # What is written between draws begins an episode, and ends one.
        size = rows + 2 * EPISODE_LENGTH
        columns = flat_columns(goal_columns(size)) if work == "flat" else stacked_columns(size)
        contestants = who(plan, work)
        # What a library loads with its first batch is no memory of its rows.
        few = Contest(contestants, EPISODE_LENGTH, columns=take_rows(columns, 0, 150))
        for turn in few.turns(16).values():
            turn.call()
        contest = Contest(contestants, rows, columns=columns)
        for result in drawn(work, contest, [256], plan):
            yield replace(result, row_nbytes=contest.row_nbytes[result.peer, result.work])
        del contest


def writing(plan: Plan) -> Iterator[Result]:
    """Steps of a loop, and writes of several rows at once, over the oldest ones of a full storage."""
    rows = plan.most_rows // LANES * LANES
    columns = goal_columns(max(rows, 10_000))
    fill = take_rows(columns, 0, rows)
    for work, sizes in WRITES.items():
        contestants = who(plan, work)
        buffers = {it: adapter(*it, device=plan.device)(fill, rows) for it in contestants}
        for num_rows in sizes:
            turns = {it: write_turn(buffer, columns, num_rows) for it, buffer in buffers.items()}
            measured = measure(turns, plan.effort)
            yield from told("writing", measured, plan, rows=rows, batch_size=num_rows)


def mapped(plan: Plan) -> Iterator[Result]:
    """Rows in a directory next to rows in memory."""
    recorded = {"uniform": "record", "her": "record_her"}
    for work in tuple(recorded):
        contest = Contest([], plan.most_rows)
        with tempfile.TemporaryDirectory() as directory:
            contest.add(("ours", recorded[work]), ("ours", work))
            path = Path(directory) / work
            contest.add(("ours", recorded[work]), ("ours_mapped", work), directory=path)
            yield from drawn("mapped", contest, plan.batch_sizes, plan)
            del contest


SECTIONS: dict[str, Callable[[Plan], Iterator[Result]]] = {
    "loop": loop,
    "sampling": sampling,
    "writing": writing,
    "sequences": sequences,
    "stored_once": stored_once,
    "mapped": mapped,
    "lanes": lanes,
    "growth": growth,
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
    return Report(results=list(SECTIONS[name](plan)))
