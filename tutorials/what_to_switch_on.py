"""Adds n-step returns, PER, ERE and sequences to HER, one by one and all together.

    python tutorials/what_to_switch_on.py                          # makes the runs that are missing
    python tutorials/what_to_switch_on.py --table                  # only prints the tables
    python tutorials/what_to_switch_on.py --seeds 5 6 7            # other seeds

Each run is a run of train_her.py with other options of the replay buffer. A finished run is a line of
what_to_switch_on.jsonl. The runs compare how fast an agent learns: its success rate, averaged over
tests at equal intervals, with a budget after which HER alone reaches most goals.

With sequences a batch has 64 sequences of four transitions in place of 256 single transitions, so both
batches have the same size. Each sequence has one goal. The loss treats every transition separately.

The first table has the mean and the standard deviation over the seeds. The second table has the
difference to HER alone: the mean of the differences, seed by seed, and half of its 95 % interval by
Student's t. Intervals that exclude 0 are bold; of twenty true zeros one is bold by chance.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import train_her
from guide_results import make_missing, of_run
from learning_results import versions
from options import OneLineParser, integer_from

from trl_storages import EpisodeSequence

RESULTS = Path(__file__).with_name("what_to_switch_on.jsonl")
TESTS = 8  # per run
# Student's t for an interval of 95 %, for 2 seeds, 3, ...
T = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262
# Budgets and settings were fixed before the first run. All others are those of train_her.py.
TASKS: dict[str, dict[str, Any]] = {
    "25 bits, DQN": {"env": "BitFlipping-v0", "algo": "dqn", "bits": 25, "steps": 12_000},
    "FetchReach, DDPG": {"env": "FetchReach-v4", "algo": "ddpg", "steps": 1_500},
    "8 bits, DDPG": {"env": "BitFlipping-v0", "algo": "ddpg", "bits": 8, "steps": 4_000},
}
# The default options of the preset of each component.
N_STEP, PRIORITIES, RECENCY = {"n_step": 3}, {"alpha": 0.6}, {"eta": 0.996, "c_min": 1_000}
# Transitions of a sequence, shifted so that they lie in one episode. Four, because trained agents solve
# 8 bits in few more steps. In a shorter episode the last transition is repeated.
SEQUENCES = {"sequence": 4}
PARTS: dict[str, dict[str, Any]] = {
    "hindsight alone": {},
    "with n-step": N_STEP,
    "with PER": PRIORITIES,
    "with ERE": RECENCY,
    "with sequences": SEQUENCES,
    "with all": {**N_STEP, **PRIORITIES, **RECENCY},
    "with all, in sequences": {**N_STEP, **PRIORITIES, **RECENCY, **SEQUENCES},
}


def planned(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns all settings of the runs, seed by seed, so that every cell has a first result early."""
    return [
        {"task": task, "part": part, "seed": seed, "options": {**run, "seed": seed}, "parts": parts}
        for seed in seeds
        for task, run in TASKS.items()
        for part, parts in PARTS.items()
    ]


def make(run: Mapping[str, Any]) -> dict[str, Any]:
    """Trains an agent; returns the record of the run."""
    args = train_her.parse([f"--{name}={value}" for name, value in run["options"].items()])
    args.curve_points = TESTS
    options = {**run["parts"]}
    if length := options.pop("sequence", None):
        options["sample_unit"] = EpisodeSequence(length, boundary="fit")
        args.batch_size //= length
    # CPU time, since it hardly depends on the load of the machine.
    start = time.process_time()
    storage = train_her.make_storage(args, run["part"], args.num_goals, **options)
    curve = train_her.train(args, storage, run["part"])
    return {
        **run,
        "mean": round(sum(curve.success) / len(curve.success), 4),
        "curve": [
            [step, round(rate, 4)] for step, rate in zip(curve.steps, curve.success, strict=True)
        ],
        "seconds": round(time.process_time() - start),
        "versions": versions(),
    }


def table(title: str, parts: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """Returns a Markdown table with the text of `cell` for each task and component."""
    lines = [f"| {title} | {' | '.join(TASKS)} |", "|---" * (len(TASKS) + 1) + "|"]
    lines += [f"| {part} | {' | '.join(cell(task, part) for task in TASKS)} |" for part in parts]
    return "\n".join(lines)


def tables(runs: Sequence[dict[str, Any]], finished: Sequence[dict[str, Any]]) -> str:
    """Returns the success rates of the finished runs and their differences, as Markdown."""
    alone, *others = PARTS

    def rates(task: str, part: str) -> dict[int, float]:
        of_cell = [run for run in runs if (run["task"], run["part"]) == (task, part)]
        records = [of_run(run, finished) for run in of_cell]
        return {record["seed"]: record["mean"] for record in records if record}

    def rate(task: str, part: str) -> str:
        values = [*rates(task, part).values()]
        return shown(values, f"{mean(values):.2f} ± {stdev(values):.2f}" if values[1:] else "")

    def difference(task: str, part: str) -> str:
        base = rates(task, alone)
        gains = [value - base[seed] for seed, value in rates(task, part).items() if seed in base]
        if not 2 <= len(gains) <= len(T) + 1:
            return shown(gains)
        half_width = T[len(gains) - 2] * stdev(gains) / sqrt(len(gains))
        # Never -0.00.
        text = f"{round(mean(gains), 2) + 0.0:+.2f} ± {half_width:.2f}"
        return f"**{text}**" if abs(mean(gains)) > half_width else text

    of_rates = table("success", [*PARTS], rate)
    return f"{of_rates}\n\n{table('difference', others, difference)}"


def shown(values: Sequence[float], several: str = "") -> str:
    """Returns `several`, or the values themselves."""
    return several or ", ".join(f"{value:.2f}" for value in values) or "-"


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the runs that are missing, and prints the tables."""
    parser = OneLineParser(
        prog="what_to_switch_on.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seeds", nargs="+", default=[0, 1, 2, 3, 4], type=integer_from(0), help="(%(default)s)")
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--table", action="store_true", help="only print the tables, of the runs that are finished")
    args = parser.parse_args(argv)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    runs, finished = planned(args.seeds), [json.loads(line) for line in lines]
    for record in make_missing([] if args.table else runs, finished, make, args.results):
        result = f"{record['task']}, {record['part']}: {record['mean']:.2f}"
        print(result, file=sys.stderr, flush=True)
    print(tables(runs, finished))


if __name__ == "__main__":
    main()
