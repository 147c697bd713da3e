"""Libraries that are filled with the same transitions and take turns.

Letters: N stored rows, B batch.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

from tests.benchmarks.data import Columns, flat_columns, goal_columns, take_rows
from tests.benchmarks.measure import Effort, Turn
from tests.benchmarks.peers import PEERS, Buffer, load_peer

__all__ = ["FLAT", "NEW_ROWS", "Contest", "Contestant", "Plan", "installed", "who"]

# Every library has room for more rows than it is filled with, as TorchRL's HER raises once it is full.
SPARE_ROWS = 2000
# Of them, those that are written between samples, over and over. A multiple of the episodes.
NEW_ROWS = 400
# Works on observations that are one array.
FLAT = ("n_step", "priorities", "recent", "pixels", "pixels_n_step")

Contestant = tuple[str, str]  # peer, work


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked for.

    Attributes:
        rows: N, in rising order.
        batch_sizes: B.
        threads: how many the libraries may use.
        peers: the libraries that may take part.
        unequal: whether the episodes of all sections are of 1 to 99 steps instead of 50.
        effort: how much is measured.
    """

    rows: tuple[int, ...] = (10**4, 10**5, 10**6)
    batch_sizes: tuple[int, ...] = (256, 4096)
    threads: int = 1
    peers: tuple[str, ...] = PEERS
    unequal: bool = False
    effort: Effort = field(default_factory=Effort)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All N with one thread, the largest with several."""
        return self.rows if self.threads == 1 else self.rows[-1:]

    @property
    def most_rows(self) -> int:
        """The largest N."""
        return self.rows[-1]


class Contest:
    """Libraries that are filled with the same transitions and take turns at sampling them."""

    def __init__(
        self,
        contestants: list[Contestant],
        rows: int,
        *,
        unequal: bool = False,
        columns: Columns | None = None,
    ):
        if columns is None:
            columns = goal_columns(rows + SPARE_ROWS, unequal=unequal)
            columns = flat_columns(columns) if contestants[0][1] in FLAT else columns
        self.fill, self.new = take_rows(columns, 0, rows), take_rows(columns, rows, None)
        self.rows, self.capacity = rows, len(columns["done"])
        gc.collect()  # The libraries of the contest before this one may still hold their rows.
        self.buffers: dict[Contestant, Buffer] = {}
        self.steps: dict[Contestant, Iterator] = {}
        for peer, work in contestants:
            self.add((peer, work), installed(peer).WORKS[work](self.fill, self.capacity))

    def add(self, contestant: Contestant, buffer: Buffer) -> None:
        """Lets one more take part."""
        new_rows = range(min(NEW_ROWS, self.capacity - self.rows))
        prepared = [buffer.prepare(take_rows(self.new, row, row + 1)) for row in new_rows]
        self.buffers[contestant], self.steps[contestant] = buffer, itertools.cycle(prepared)

    def turns(self, batch_size: int, walk: Callable | None = None) -> dict[Contestant, Turn]:
        """Returns draws of a batch, with a write of one step before each that is not timed.

        Args:
            batch_size: B.
            walk: what else is done before each, such as emptying the caches.
        """
        return {
            contestant: sample_turn(buffer, self.steps[contestant], batch_size, walk)
            for contestant, buffer in self.buffers.items()
        }


def sample_turn(buffer: Buffer, steps: Iterator, batch_size: int, walk: Callable | None) -> Turn:
    def before() -> None:
        buffer.write(next(steps))
        if walk is not None:
            walk()

    return Turn(call=lambda: buffer.sample(batch_size), before=before)


def installed(name: str) -> ModuleType:
    peer = load_peer(name)
    if isinstance(peer, str):
        raise ModuleNotFoundError(peer)
    return peer


def who(plan: Plan, *works: str, own: tuple[str, ...] = ()) -> list[Contestant]:
    """Lists who does a work; of this package, all of `own` as well."""
    found = [("ours", work) for work in own if "ours" in plan.peers]
    for name in plan.peers:
        peer = load_peer(name)
        if not isinstance(peer, str):
            found += [(name, work) for work in works if work in peer.WORKS]
    return list(dict.fromkeys(found))
