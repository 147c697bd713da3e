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
SERVE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


class Side:
    """A process that runs the calls of one checkout."""

    def __init__(self, checkout: Path):
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        program = str(Path(__file__).with_name("compared.py"))
        command = [sys.executable, "-c", SERVE, program, str(checkout)]
        self.process = subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, line: str = "") -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
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
