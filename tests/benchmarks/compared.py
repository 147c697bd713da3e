"""One side of `compare.py`: fills storages of a checkout, and times their calls.

The package is that of the checkout; the benchmark is this one, which uses public names only.
"""

import json
import os
import sys
from collections.abc import Callable

import torch

from tests.benchmarks.contest import Contest, adapter, write_turn
from tests.benchmarks.data import LANES, goal_columns, take_rows
from tests.benchmarks.measure import Effort, take_turn

__all__ = ["ROWS", "serve"]

BATCH = 256
EFFORT = Effort(calls=10**6, seconds=0.05, processor_time=True)
#: Row -> the work of the adapter; draws, then writes with how many rows a call writes.
DRAWS = {
    "uniform": "uniform",
    "hindsight": "her",
    "3-step": "n_step",
    "hindsight-3-step": "her_n_step",
    "priorities": "priorities",
    "all-four": "everything",
}
WRITES = {
    "record": ("record", 1),
    "record-8": ("record_lanes", LANES),
    "extend-1": ("extend", 1),
    "extend-50": ("extend", 50),
    "extend-1000": ("extend", 1000),
}
#: Bytes come first, before memory that was freed could be taken again.
ROWS = ("bytes", *DRAWS, *WRITES)


def made(row: str, stored: int) -> Callable[[], float]:
    """Fills a storage; returns what measures one turn: microseconds a call, or bytes a row."""
    if row == "bytes":
        Contest([("ours", "uniform")], 1000)  # compiled loops are no rows
        (grown,) = Contest([("ours", "uniform")], stored).row_nbytes.values()
        return lambda: grown
    if row in DRAWS:
        (turn,) = Contest([("ours", DRAWS[row])], stored).turns(BATCH).values()
    else:
        work, num_rows = WRITES[row]
        columns = goal_columns(max(stored, 10_000))
        stored -= stored % LANES
        buffer = adapter("ours", work)(take_rows(columns, 0, stored), stored)
        turn = write_turn(buffer, columns, num_rows)
    take_turn(turn, EFFORT)
    return lambda: take_turn(turn, EFFORT)


def serve() -> None:
    """Answers lines of a name and a number, which make a row, and empty ones, which measure it."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            if row := line.split():
                turn = None  # frees the storage of the row before
                turn = made(row[0], int(row[1]))
            found: object = "made" if row else turn and turn()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps(found), file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries tell of what they leak at the end
