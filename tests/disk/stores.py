"""Subsets of what is stored between two fences: `python -m disk.stores LANES ROUNDS SUBSETS KIND...`.

Compiled loops have no lines to be killed at, and may store in any order what no fence parts. So they run
as Python (`NUMBA_DISABLE_JIT=1`), the files are kept at each fence, and any part of the words that
changed until the next one is taken for what a killed writer left. Prints a line of JSON: how many were
tried of rows of each kind.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from disk.acts import ACTS, Act
from disk.history import History
from disk.kills import opens
from disk.moments import Files, files_in, put_back, subsets
from disk.rows import abandon, found, make, stored_as

from trl_storages import ReplayStorage

SIZE = 6


def between_fences(act: Act, storage: ReplayStorage, folder: Path) -> list[tuple[Files, Files]]:
    """Does it, and returns the files before and after each stretch without a fence."""
    held = [files_in(folder)]
    stretches = []

    def fence() -> None:
        now = files_in(folder)
        if now != held[0]:
            stretches.append((held[0], now))
            held[0] = now

    with watched(fence):
        act.do(storage)
    fence()
    return stretches


@contextmanager
def watched(fence: Callable[[], None]) -> Iterator[None]:
    """Calls `fence` wherever a fence is."""
    with ExitStack() as patches:
        modules = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("trl_storages") and hasattr(module, "fenced")
        ]
        assert modules, "there are no fences"
        for module in modules:
            patches.enter_context(mock.patch.object(module, "fenced", fence))
        # Files get their names, and lose them, in the order in which the code says so.
        for name in ("replace", "unlink"):
            patches.enter_context(mock.patch.object(os, name, parted(getattr(os, name), fence)))
        yield


def parted(call: Callable[..., None], fence: Callable[[], None]) -> Callable[..., None]:
    """A system call with a fence before it and one after it."""

    def act(*args: object, **options: object) -> None:
        fence()
        call(*args, **options)
        fence()

    return act


def try_subsets(num_lanes: int, rounds: int, number: int) -> int:
    """Does everything for some rounds, and returns how many subsets were tried."""
    size, tried = SIZE * num_lanes, 0
    with tempfile.TemporaryDirectory() as folder:
        path, killed = Path(folder) / "rows", Path(folder) / "killed"
        for seed in range(rounds):
            rng = random.Random(seed)
            # Storages draw by torch's own generator here.
            torch.manual_seed(seed)
            history, storage = History(num_lanes, size), make(path, num_lanes, size)
            for name in [*ACTS, *rng.sample(list(ACTS), len(ACTS)), *ACTS]:
                act = ACTS[name][0](history, rng)
                for before, after in between_fences(act, storage, path):
                    for files in subsets(before, after, rng, number):
                        tried += 1
                        opens(files, killed, act, num_lanes, size, goes_on=tried % 4 == 0)
                history = act.after
                assert found(storage) == history.live
            abandon(storage)
            put_back({}, path)
    return tried


def main() -> None:
    torch.set_num_threads(1)
    tried = {}
    for stored in sys.argv[4:]:
        with stored_as(stored):
            tried[stored] = try_subsets(*map(int, sys.argv[1:4]))
    print(json.dumps(tried))


if __name__ == "__main__":
    main()
