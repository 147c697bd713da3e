"""A run for a GPU that is lent for minutes: `python -m tests.benchmarks.gpu --json gpu.json`.

It takes at most eight minutes, prints the tables of the page on GPUs and how often each call starts
an operation of the GPU or waits for it, and keeps both. `python -m tests.benchmarks --readme gpu.json`
writes them into the page. `--device cpu` tries it on any machine: the CPU then counts in place of a GPU.
"""

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import data
from tests.benchmarks.contest import FLAT, Plan, adapter
from tests.benchmarks.measure import Effort
from tests.benchmarks.peers import ON_CUDA, load_peer
from tests.benchmarks.results import Report, describe_machine
from tests.benchmarks.sections import SECTIONS, prepare_process
from tests.benchmarks.simulated_gpu import Counted, simulated_gpu
from tests.benchmarks.tables import format_gpu

__all__ = ["main"]

#: Who keeps rows on a GPU.
COUNTED = ("ours", "torchrl", "ring")
#: What is counted: draws, then writes.
DRAWS = ("uniform", "her", "n_step", "priorities", "everything")
WRITES = {"record": 1, "extend": 1000, "lanes": 4096}
#: After so many seconds no further section begins.
SECONDS = 300


def counts(peer: str) -> Iterator[tuple[str, int, int]]:
    """Gives how many operations a call starts on the GPU, and for how many the host waits."""
    works = load_peer(peer).WORKS
    for work in (work for work in (*DRAWS, *WRITES) if work in works):
        with ExitStack() as stack:
            if is_simulated := not torch.cuda.is_available():
                stack.enter_context(simulated_gpu())
            counted = stack.enter_context(Counted())
            call = call_of(peer, work)
            call()
            counted.launches.clear()
            counted.waits.clear()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if not is_simulated:
                    torch.cuda.set_sync_debug_mode("warn")
                call()
                if not is_simulated:
                    torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchronizing" in str(it.message) for it in told)
            yield work, len(counted.launches), len(counted.waits) if is_simulated else waits


def call_of(peer: str, work: str) -> Any:
    """Returns a draw of 256, or a write of steps that are on the GPU where blocks are written."""
    num_rows = WRITES.get(work, 1)
    if work == "lanes":
        first, *pool = data.steps_of_lanes(num_rows, 3)
        attributes = {"device": "cuda:0", "num_lanes": num_rows}
        buffer: Any = adapter(peer, work, **attributes)(first, 8 * num_rows)
        steps = iter([buffer.prepare(it).to("cuda:0") for it in pool])
        return lambda: buffer.write(next(steps))
    columns = data.goal_columns(6000)
    columns = data.flat_columns(columns) if work in FLAT else columns
    buffer = adapter(peer, work, device="cuda:0")(data.take_rows(columns, 0, 3000), 6000)
    if work in DRAWS:
        return lambda: buffer.sample(256)
    new = (data.take_rows(columns, it, it + num_rows) for it in (3000, 3000 + num_rows))
    blocks = [buffer.prepare(it) for it in new]
    steps = iter([it.to("cuda:0") for it in blocks] if work == "extend" else blocks)
    return lambda: buffer.write(next(steps))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to keep the run")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --device cpu tries the run without one")
    begin = time.perf_counter()
    prepare_process(1, ON_CUDA)
    effort = Effort(rounds=chosen.rounds, calls=10, device=chosen.device)
    sizes = {"rows": (chosen.rows,), "batch_sizes": tuple(sorted(chosen.batches))}
    plan = Plan(**sizes, peers=ON_CUDA, effort=effort)
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "simulated GPU"
    report = Report(machine=describe_machine() | {"device": name})
    report.counts = {peer: {work: it for work, *it in counts(peer)} for peer in COUNTED}
    for section in ("sampling", "writing", "lanes"):
        if time.perf_counter() - begin < SECONDS:
            report.results += SECTIONS[section](plan)
        if chosen.json is not None:
            report.save(chosen.json)
    print(*format_gpu(report), sep="\n")


if __name__ == "__main__":
    main()
