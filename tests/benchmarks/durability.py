"""Times rows on disk beside SQLite and LMDB: `python -m tests.benchmarks.durability --help`.

All take the same transitions, hold them in a ring of so many slots that is full, give such batches back,
and take turns in one run. What each of them syncs is named beside it; none waits for the disk at each
write, except where it says so. Absolute figures move between machines; look at the ratios.

The run that is kept is in the page on directories: `--json tests/benchmarks/durability.json` keeps one,
`--page tests/benchmarks/durability.json` writes it there.
"""

import argparse
import itertools
import json
import sqlite3
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tests.benchmarks.data import ACTION_SPACE, GOAL_SPACE, goal_columns, to_tensordict
from tests.benchmarks.measure import Effort, Turn, measure
from tests.benchmarks.readme import written
from tests.benchmarks.results import describe_machine
from tests.benchmarks.tables import format_machine
from trl_storages import UniformReplayStorage

BATCH = 256
BLOCKS = (1, 50, 1000)  # steps of a write
PAGE = Path(__file__).parents[2] / "tutorials" / "on_disk.md"
KEPT = Path(__file__).parent / "durability.json"
Run = dict[str, Any]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.durability")
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each storage")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    parser.add_argument("--path", type=Path, help="where to; a temporary directory otherwise")
    parser.add_argument("--json", type=Path, help="where to keep the run")
    parser.add_argument("--page", type=Path, help="only write a run that was kept into the page")
    return parser.parse_args(arguments)


def blocks(steps: int) -> Iterator[TensorDict]:
    """Gives blocks of consecutive steps of a goal environment, over and over."""
    rows = to_tensordict(goal_columns(max(1000, steps)))
    return itertools.cycle(rows.split(steps))


class Store:
    """A ring of rows somewhere.

    Args:
        path: of a directory that does not exist; None for memory.
        num_rows: slots of the ring.
    """

    name: str
    #: What it does so that rows reach the disk.
    syncs: str
    #: What `connect` opens, and `close` closes.
    connection: Any
    #: Writes steps; reads a batch; lets written rows reach the disk.
    write: Callable[[TensorDict], None]
    draw: Callable[[], TensorDictBase]
    flush: Callable[[], Any]
    connect: Callable[[], None]

    def __init__(self, path: Path | None, num_rows: int) -> None:
        self.path, self.num_rows = path, num_rows

    def close(self) -> None:
        self.connection.close()

    def reopen(self) -> TensorDictBase:
        self.connect()
        return self.draw()

    def writes(self, num_steps: int) -> Turn:
        """Writes of so many steps, over and over."""
        data = blocks(num_steps)
        return Turn(call=lambda: self.write(next(data)))

    def num_bytes(self) -> int:
        """Bytes on disk."""
        assert self.path is not None
        return sum(file.stat().st_blocks * 512 for file in self.path.iterdir())


class Ours(Store):
    """A `ReplayStorage`, in memory or in a directory."""

    def __init__(self, path: Path | None, num_rows: int) -> None:
        super().__init__(path, num_rows)
        self.name = "trl_storages" if path else "trl_storages in memory"
        self.syncs = "flush()" if path else "-"
        self.connect()

    def connect(self) -> None:
        options = {"storage_size": self.num_rows, "path": self.path, "batch_size": BATCH}
        self.connection = buffer = UniformReplayStorage(GOAL_SPACE, ACTION_SPACE, **options)
        self.write, self.draw, self.flush = buffer.extend, buffer.sample, buffer.flush


class _OfBytes(Store):
    """A ring of rows that are bytes, by their slots."""

    #: Reads the rows of some slots.
    read: Callable[[list[int]], list[bytes]]

    def __init__(self, path: Path | None, num_rows: int) -> None:
        super().__init__(path, num_rows)
        assert path is not None
        path.mkdir()
        one = next(blocks(1))
        self._keys = list(one.keys(True, True))
        columns = [one[key].numpy() for key in self._keys]
        self._row = np.dtype(
            [(str(place), column.dtype, column.shape[1:]) for place, column in enumerate(columns)]
        )
        self._cursor, self._rng = 0, np.random.default_rng(0)
        self.connect()

    def _rows(self, data: TensorDict) -> Iterator[tuple[int, bytes]]:
        """The slot and the bytes of each transition that is written now."""
        rows = np.empty(len(data), self._row)
        for place, key in enumerate(self._keys):
            rows[str(place)] = data[key].numpy()
        for row in rows:
            yield self._cursor % self.num_rows, row.tobytes()
            self._cursor += 1

    def draw(self) -> TensorDictBase:
        slots = self._rng.integers(0, min(self._cursor, self.num_rows), BATCH).tolist()
        table = np.frombuffer(b"".join(self.read(slots)), self._row)
        columns = {
            key: torch.from_numpy(table[str(place)].copy()) for place, key in enumerate(self._keys)
        }
        return TensorDict(columns, [BATCH])


class SQLite(_OfBytes):
    """A table of blobs by slot, one transaction a write."""

    name, syncs = "SQLite", "journal_mode=WAL, synchronous=NORMAL"

    def connect(self) -> None:
        assert self.path is not None
        self.connection = sqlite3.connect(self.path / "rows.sqlite", isolation_level=None)
        for order in (
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=NORMAL",
            "CREATE TABLE IF NOT EXISTS rows (slot INTEGER PRIMARY KEY, data BLOB)",
        ):
            self.connection.execute(order)

    def write(self, data: TensorDict) -> None:
        self.connection.execute("BEGIN")
        insert = "INSERT OR REPLACE INTO rows VALUES (?, ?)"
        self.connection.executemany(insert, self._rows(data))
        self.connection.execute("COMMIT")

    def read(self, slots: list[int]) -> list[bytes]:
        # A row that is drawn twice is found once by IN, so each is asked for by itself.
        ask, select = self.connection.execute, "SELECT data FROM rows WHERE slot = ?"
        return [ask(select, (slot,)).fetchone()[0] for slot in slots]

    def flush(self) -> None:
        self.connection.execute("PRAGMA wal_checkpoint(FULL)")


class LMDB(_OfBytes):
    """Values by slot, one transaction a write, synced by `flush` only."""

    name, syncs = "LMDB", "sync=False, writemap=True"
    _options = {"sync": False, "writemap": True}

    def connect(self) -> None:
        import lmdb  # an extra, which reading this module does not need

        size = 4 * self._row.itemsize * self.num_rows + (1 << 26)
        self.connection = lmdb.open(str(self.path), map_size=size, **self._options)

    def write(self, data: TensorDict) -> None:
        with self.connection.begin(write=True) as transaction:
            for slot, row in self._rows(data):
                transaction.put(slot.to_bytes(8, "big"), row)

    def read(self, slots: list[int]) -> list[bytes]:
        with self.connection.begin() as transaction:
            return [transaction.get(slot.to_bytes(8, "big")) for slot in slots]

    def flush(self) -> None:
        self.connection.sync(True)


class SyncedLMDB(LMDB):
    """As LMDB is by default: each write waits for the disk."""

    name, syncs = "LMDB, defaults", "sync=True"
    _options = {"sync": True, "writemap": False}


STORES = (Ours, Ours, SQLite, LMDB, SyncedLMDB)


def timed(turns: Iterable[Turn], effort: Effort) -> list[float]:
    """Returns the median of what each call takes, in microseconds."""
    return [statistics.median(it) for it in measure(dict(enumerate(turns)), effort).values()]


def run_of(arguments: argparse.Namespace, root: Path) -> Run:
    """Lets all stores take turns.

    Returns:
        `rows`, the slots of each ring; the `machine`; what each of the stores `syncs`, by its name; and
        `found`, for each work its unit and what each store took, None where it was not measured.
    """
    paths = [None, *(root / str(number) for number in range(1, len(STORES)))]
    stores: list[Any] = [
        store(path, arguments.rows) for store, path in zip(STORES, paths, strict=True)
    ]
    for store in stores:
        filling = blocks(1000)
        for _ in range(arguments.rows // 1000 + 2):
            store.write(next(filling))
    effort = Effort(rounds=arguments.rounds, calls=10**9, seconds=arguments.seconds)
    found: dict[str, tuple[str, list[float | None]]] = {}
    for num_steps in BLOCKS:
        steps = f"{num_steps:,} step" + "s" * (num_steps > 1)
        found[f"write {steps}"] = "us", timed((it.writes(num_steps) for it in stores), effort)
    found[f"sample {BATCH}"] = "us", timed((Turn(call=it.draw) for it in stores), effort)
    # What was written before, and how much of it the system has synced, is left out by the first turn.
    once, on_disk = replace(effort, calls=1), stores[1:]
    turns = [Turn(call=it.flush, before=it.writes(BLOCKS[-1]).call) for it in on_disk]
    milliseconds = [it / 1000 for it in timed(turns, once)]
    found[f"flush {BLOCKS[-1]:,} steps"] = "ms", [None, *milliseconds]
    for store in stores:
        store.close()
    found["a transition"] = (
        "bytes",
        [None, *(store.num_bytes() / arguments.rows for store in on_disk)],
    )
    turns = [Turn(call=it.reopen, before=it.close) for it in on_disk]
    milliseconds = [it / 1000 for it in timed(turns, replace(once, rounds=1))]
    found["reopen and sample"] = "ms", [None, *milliseconds]
    for store in on_disk:
        store.close()
    syncs = {it.name: it.syncs for it in stores}
    return {"rows": arguments.rows, "machine": _machine(), "syncs": syncs, "found": found}


def table(run: Run) -> Iterator[str]:
    """Gives what the page shows."""
    yield f"{run['rows']:,} transitions. {format_machine(run['machine'])}."
    yield ""
    yield "| | " + " | ".join(run["syncs"]) + " |"
    yield "| --- |" + " ---: |" * len(run["syncs"])
    yield "| synchronisation | " + " | ".join(run["syncs"].values()) + " |"
    for work, (unit, values) in run["found"].items():
        cells = (f"{it:,.{1 if it < 1000 else 0}f}" if it is not None else "" for it in values)
        yield f"| {work}, {unit} | " + " | ".join(cells) + " |"


def shown(page: str, path: Path = KEPT) -> str:
    """Returns the page with a run that was kept between its marks."""
    return written(page, table(json.loads(path.read_text())), "durability")


def _machine() -> dict[str, str | int]:
    """Describes what the run depends on."""
    others = ("stable_baselines3", "cpprb", "tianshou", "flashbax", "jax", "rlox")
    machine = {name: it for name, it in describe_machine().items() if name not in others}
    lmdb = {"lmdb": version("lmdb")} if LMDB in STORES else {}
    return {**machine, "SQLite": sqlite3.sqlite_version, **lmdb}


def main(arguments: list[str] | None = None) -> None:
    asked = parse_arguments(arguments)
    if asked.page is not None:
        PAGE.write_text(shown(PAGE.read_text(), asked.page))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.path) as root:
        run = run_of(asked, Path(root))
    print(*table(run), sep="\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
