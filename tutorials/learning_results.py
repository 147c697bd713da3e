"""Trains every algorithm with HER and without, on three seeds, and prints the results.

    python tutorials/learning_results.py --jobs 2                      # makes the missing runs
    python tutorials/learning_results.py --table                       # only prints the table
    python tutorials/learning_results.py --only '*:sac' --seeds 3 4    # other rows, other seeds

The runs are those of train_her.py; its `TASKS` define the budgets and the required success rates.
A finished run is one line of the results, with all settings that determine it and its bound as it stood
before the run. It is repeated only if one of these has changed since.
"""

import argparse
import fnmatch
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import train_her
from options import OneLineParser, integer_from, need

RESULTS = Path(__file__).with_name("learning_results.jsonl")
MODULES = ("trl_storages", "torchrl", "torch", "gymnasium", "gymnasium_robotics", "mujoco")


@dataclass(frozen=True)
class Run:
    """All settings that determine a run, and the success rate required of it.

    `bound` is a lower bound for an agent with HER, and an upper bound for an agent without.
    """

    env: str
    algo: str
    hindsight: bool
    seed: int
    steps: int
    steps_per_update: int
    discount: float
    bits: int | None
    bound: float | None

    @property
    def name(self) -> str:
        """The name of the agent that the run trains."""
        return train_her.WITH if self.hindsight else train_her.WITHOUT

    def meets(self, success: float) -> bool:
        """Returns whether `success` is within the bound."""
        if self.bound is None:
            return True
        return success >= self.bound if self.hindsight else success <= self.bound


def rows_named(patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the environment and algorithm of each row that matches one of the patterns."""
    return [
        row
        for row in train_her.TASKS
        if any(fnmatch.fnmatchcase(":".join(row), pattern) for pattern in patterns)
    ]


def planned(rows: Iterable[tuple[str, str]], seeds: Sequence[int]) -> list[Run]:
    """Returns the runs of some rows, seed by seed, so that every row has a first result early."""
    tasks = {row: train_her.TASKS[row] for row in rows}
    return [
        Run(
            env=env,
            algo=algo,
            hindsight=hindsight,
            seed=seed,
            steps=task.steps,
            steps_per_update=task.steps_per_update,
            discount=task.discount,
            bits=task.bits if env == "BitFlipping-v0" else None,
            bound=task.at_least if hindsight else task.at_most,
        )
        for seed in seeds
        for (env, algo), task in tasks.items()
        for hindsight in (True, False)
    ]


def make(run: Run, path: Path, further: Sequence[str] = ()) -> dict[str, Any]:
    """Trains an agent, with further options; appends the record of the run as a line and returns it."""
    finished = read(path)
    if run in finished:
        # Another process has finished it since this one started.
        return finished[run]
    torch.set_num_threads(1)
    options = {"env": run.env, "algo": run.algo, "seed": run.seed, "steps": run.steps}
    if run.bits is not None:
        options["bits"] = run.bits
    args = train_her.parse([*(f"--{name}={value}" for name, value in options.items()), *further])
    storage = train_her.make_storage(args, run.name, args.num_goals if run.hindsight else 0)
    # Only the final result counts, and testing a robot takes longer than training it.
    args.curve_points = 2
    # CPU time, since it hardly depends on the load of the machine.
    start = time.process_time()
    curve = train_her.train(args, storage, run.name)
    record = {
        **asdict(run),
        "success": round(curve.success[-1], 4),
        "seconds": round(time.process_time() - start),
        "curve": [
            [step, round(rate, 4)] for step, rate in zip(curve.steps, curve.success, strict=True)
        ],
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        # One write, so that lines of runs that end at the same time do not interleave.
        file.write(json.dumps(record) + "\n")
    return record


def versions() -> dict[str, str]:
    """Returns the library versions that runs in this process use."""
    modules = {name: sys.modules[name].__version__ for name in MODULES if name in sys.modules}
    return {"python": platform.python_version(), **modules}


def read(path: Path) -> dict[Run, dict[str, Any]]:
    """Returns the finished runs; of runs with the same settings, the latest counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(finished_run(path, number, line) for number, line in enumerate(lines, 1))


def finished_run(path: Path, number: int, line: str) -> tuple[Run, dict[str, Any]]:
    try:
        record = json.loads(line)
        return Run(**{field.name: record[field.name] for field in fields(Run)}), record
    except (json.JSONDecodeError, KeyError, TypeError):
        raise SystemExit(
            f"learning_results.py: line {number} of {path} is not a finished run: remove it"
        ) from None


def table(records: Mapping[Run, Mapping[str, Any]], runs: Sequence[Run]) -> str:
    """Returns the results as Markdown; success rates outside their bounds are bold."""
    lines = [
        "| environment | algorithm | steps | with HER | threshold | without HER | threshold |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys((run.env, run.algo) for run in runs):
        of_row = [run for run in runs if (run.env, run.algo) == row]
        first = of_row[0]
        bits = "" if first.bits is None else f", {first.bits} bits"
        cells = [f"{first.env}{bits}", first.algo.upper(), f"{first.steps:,}"]
        for hindsight in (True, False):
            of_cell = [run for run in of_row if run.hindsight == hindsight]
            cells += [", ".join(shown(run, records) for run in of_cell), threshold(of_cell[0])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(run: Run, records: Mapping[Run, Mapping[str, Any]]) -> str:
    if run not in records:
        return "-"
    success = records[run]["success"]
    return f"{success:.2f}" if run.meets(success) else f"**{success:.2f}**"


def threshold(run: Run) -> str:
    return "" if run.bound is None else f"{'≥' if run.hindsight else '≤'} {run.bound:.2f}"


def make_all(
    runs: Sequence[Run], path: Path, jobs: int, further: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Makes some runs, several in parallel; yields the record of each as it ends."""
    if jobs == 1:
        yield from (make(run, path, further) for run in runs)
        return
    # The progress bars of several runs would overwrite each other.
    os.environ["TQDM_DISABLE"] = "1"
    # A fork would copy the state of torch's threads, but not the threads.
    processes = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        futures = [processes.submit(make, run, path, further) for run in runs]
        yield from (future.result() for future in as_completed(futures))
    finally:
        processes.shutdown(cancel_futures=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="learning_results.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names, add = ", ".join(map(":".join, train_her.TASKS)), parser.add_argument
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help=f"rows, of {names}")
    add("--seeds", nargs="+", default=[0, 1, 2], type=integer_from(0), help="(%(default)s)")
    add("--jobs", default=1, type=integer_from(1), help="concurrent runs (%(default)s)")
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--table", action="store_true", help="only print the table, of the runs that are finished")
    args = parser.parse_args(argv)
    for pattern in args.only:
        if not rows_named([pattern]):
            parser.error(f"--only {pattern} matches none of {names}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the missing runs; returns 1 if any result is outside its bound."""
    args = parse(argv)
    runs, finished = planned(rows_named(args.only), args.seeds), read(args.results)
    missing = [] if args.table else [run for run in runs if run not in finished]
    # Reports missing dependencies of an environment now instead of after an hour.
    for env, algo in {(run.env, run.algo): None for run in missing}:
        need("tqdm"), train_her.parse(["--env", env, "--algo", algo])
    for number, record in enumerate(make_all(missing, args.results, args.jobs), 1):
        print(f"{number}/{len(missing)}: {summary(record)}", file=sys.stderr, flush=True)
    finished = read(args.results)
    print(table(finished, runs))
    return int(any(run in finished and not run.meets(finished[run]["success"]) for run in runs))


def summary(record: Mapping[str, Any]) -> str:
    kind = train_her.WITH if record["hindsight"] else train_her.WITHOUT
    return (
        f"{record['env']}, {record['algo']}, {kind}, seed {record['seed']}: "
        f"success {record['success']:.2f} in {record['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
