"""Compares two checkouts by turns: processor time a call, and bytes a row.

`python -m tests.benchmarks.compare OTHER_CHECKOUT` measures the other one ("old") and this one ("new").
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks.compared import ROWS

__all__ = ["main"]

HERE = Path(__file__).resolve().parents[2]
#: Imports the package of a checkout, and then the benchmark of this one.
SERVE = """
import sys
sys.path[0] = sys.argv[1]
import trl_storages
assert trl_storages.__file__.startswith(sys.argv[1]), trl_storages.__file__
sys.path[0] = sys.argv[2]
from tests.benchmarks.compared import serve
serve()
"""


class Side:
    """A process that runs the calls of one checkout."""

    def __init__(self, checkout: Path):
        command = [sys.executable, "-c", SERVE, str(checkout), str(HERE)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, line: str = "") -> Any:
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a side has ended")
        return json.loads(answer)


def compare(sides: Sequence[Side], row: str, stored: int, rounds: int) -> str:
    """Returns a line of the table: medians of both, and of the ratios within a round."""
    for side in sides:
        if (said := side.ask(f"{row} {stored}")) != "made":
            return f"{row:<17} {said}"
    old, new = zip(*([side.ask() for side in sides] for _ in range(rounds)), strict=True)
    ratios = sorted(b / a for a, b in zip(old, new, strict=True))
    low, high = ratios[rounds // 4], ratios[-1 - rounds // 4]
    medians = f"{statistics.median(old):>9.1f} {statistics.median(new):>9.1f}"
    return f"{row:<17} {medians} {statistics.median(ratios):>6.2f}  {low:.2f} to {high:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="such as one made by `git worktree add`")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}; else all")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--stored", type=int, default=200_000, help="transitions in a storage")
    chosen = parser.parse_intermixed_args(arguments)
    if unknown := set(chosen.rows) - set(ROWS):
        parser.error(f"rows are {', '.join(ROWS)}; got {', '.join(unknown)}")
    with ExitStack() as stack:
        sides = [Side(checkout) for checkout in (chosen.other.resolve(), HERE)]
        for side in sides:
            stack.enter_context(side.process)
        print(f"{'us a call':<17} {'old':>9} {'new':>9} {'ratio':>6}  middle half", flush=True)
        for row in ROWS:
            if row in (chosen.rows or ROWS):
                print(compare(sides, row, chosen.stored, chosen.rounds), flush=True)


if __name__ == "__main__":
    main()
