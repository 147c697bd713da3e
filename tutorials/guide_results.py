"""Trains the agents of the guides with their full budgets, on three seeds, and prints the results.

    python tutorials/guide_results.py                              # makes the missing runs
    python tutorials/guide_results.py --table                      # only prints the table
    python tutorials/guide_results.py --only rlpd --seeds 3 4      # one guide only, other seeds

A finished run is one line of guide_results.jsonl, with its budget and with its bound as it stood before
the run. It is repeated only if one of these has changed since.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from learning_results import versions
from options import OneLineParser, integer_from

RESULTS = Path(__file__).with_name("guide_results.jsonl")
# The quantity that each guide measures after training.
GUIDES = {
    "offline_goals": "tests that arrive",
    "recurrent": "signs that are followed",
    "torchrl_trainer": "goals that are reached",
    "rlpd": "flags that are reached",
    "pixels": "balls that are caught",
}


def planned(guides: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns all settings that determine the runs, and their required results."""
    return [
        {
            "guide": name,
            "agent": agent,
            "seed": seed,
            "budget": asdict(guide.Budget()),
            "at_least": guide.AT_LEAST.get(agent),
            "at_most": guide.AT_MOST.get(agent),
        }
        for name in guides
        for guide in [importlib.import_module(name)]
        for seed in seeds
        for agent in guide.AGENTS
    ]


def make(run: Mapping[str, Any]) -> dict[str, Any]:
    """Trains an agent; returns the record of the run."""
    guide = importlib.import_module(run["guide"])
    # CPU time, since it hardly depends on the load of the machine.
    start = time.process_time()
    result = guide.train(run["agent"], run["seed"], guide.Budget())
    seconds = round(time.process_time() - start)
    return {**run, "result": round(result, 4), "seconds": seconds, "versions": versions()}


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the finished runs."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [finished_run(path, number, line) for number, line in enumerate(lines, 1)]


def finished_run(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        meets(record)
    except (json.JSONDecodeError, KeyError, TypeError):
        raise SystemExit(
            f"guide_results.py: line {number} of {path} is not a finished run: remove it"
        ) from None
    return record


def of_run(run: Mapping[str, Any], finished: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the finished run with the same settings, the latest if there are several."""
    same = (record for record in reversed(finished) if run.items() <= record.items())
    return next(same, None)


def make_missing(
    runs: Sequence[dict[str, Any]],
    finished: list[dict[str, Any]],
    make: Callable[[Mapping[str, Any]], dict[str, Any]],
    path: Path,
) -> Iterator[dict[str, Any]]:
    """Makes the runs that are not finished; appends each to the file as a line, and yields it."""
    torch.set_num_threads(1)
    for run in runs:
        if of_run(run, finished) is None:
            finished.append(record := make(run))
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            yield record


def meets(record: Mapping[str, Any]) -> bool:
    """Returns whether a result is within its bounds."""
    low, high = record["at_least"], record["at_most"]
    return (low is None or record["result"] >= low) and (high is None or record["result"] <= high)


def table(runs: Sequence[dict[str, Any]], finished: Sequence[dict[str, Any]]) -> str:
    """Returns the results as Markdown; results outside their bounds are bold."""
    lines = ["| guide | agent | measured | results | threshold |", "|---|---|---|---|---|"]
    for guide, agent in dict.fromkeys((run["guide"], run["agent"]) for run in runs):
        of_row = [run for run in runs if (run["guide"], run["agent"]) == (guide, agent)]
        shown = ", ".join(cell(of_run(run, finished)) for run in of_row)
        lines.append(
            f"| {guide}.py | {agent} | {GUIDES[guide]} | {shown} | {threshold(of_row[0])} |"
        )
    return "\n".join(lines)


def cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    result = f"{record['result']:.2f}"
    return result if meets(record) else f"**{result}**"


def threshold(run: Mapping[str, Any]) -> str:
    bounds = {"≥": run["at_least"], "≤": run["at_most"]}
    return ", ".join(f"{sign} {bound:.2f}" for sign, bound in bounds.items() if bound is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the missing runs; returns 1 if any result is outside its bound."""
    parser = OneLineParser(
        prog="guide_results.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[*GUIDES], choices=GUIDES, help="guides (all)")
    add("--seeds", nargs="+", default=[0, 1, 2], type=integer_from(0), help="(%(default)s)")
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--table", action="store_true", help="only print the table, of the runs that are finished")
    args = parser.parse_args(argv)
    runs, finished = planned(args.only, args.seeds), read(args.results)
    for record in make_missing([] if args.table else runs, finished, make, args.results):
        run = f"{record['guide']}, {record['agent']}, seed {record['seed']}"
        result = f"{record['result']:.2f} in {record['seconds']} s"
        print(f"{run}: {result}", file=sys.stderr, flush=True)
    print(table(runs, finished))
    records = [of_run(run, finished) for run in runs]
    return int(not all(record is None or meets(record) for record in records))


if __name__ == "__main__":
    sys.exit(main())
