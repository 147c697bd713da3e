"""Libraries that are filled with the same transitions and take turns.

Letters: N stored rows, B batch.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.data import Columns, flat_columns, goal_columns, take_rows
from tests.benchmarks.measure import Effort, Turn, nothing
from tests.benchmarks.memory import resident_bytes
from tests.benchmarks.peers import ON_CUDA, PEERS, Buffer, load_peer

__all__ = ["FLAT", "NEW_ROWS", "Contest", "Contestant", "Plan", "adapter", "who", "write_turn"]

# Every library has room for more rows than it is filled with, as TorchRL's HER raises once it is full.
SPARE_ROWS = 2000
# Of them, those that are written between samples, over and over. A multiple of the episodes.
NEW_ROWS = 400
# Works on observations that are one array.
FLAT = ("n_step", "priorities", "recent", "flat", "stacks")

Contestant = tuple[str, str]  # peer, work


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked for.

    Attributes:
        rows: N, in rising order.
        batch_sizes: B.
        threads: how many the libraries may use.
        peers: the libraries that may take part.
        effort: how much is measured, and on which device.
    """

    rows: tuple[int, ...] = (10**4, 10**5, 10**6)
    batch_sizes: tuple[int, ...] = (256, 4096)
    threads: int = 1
    peers: tuple[str, ...] = PEERS
    effort: Effort = field(default_factory=Effort)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All N with one thread, the largest with several."""
        return self.rows if self.threads == 1 else self.rows[-1:]

    @property
    def device(self) -> str:
        """Where batches arrive."""
        return self.effort.device

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
        columns: Columns | None = None,
        **attributes: Any,
    ):
        if columns is None:
            columns = goal_columns(rows + SPARE_ROWS)
            is_flat = any(work in FLAT for _, work in contestants)
            columns = flat_columns(columns) if is_flat else columns
        self.fill, self.new = take_rows(columns, 0, rows), take_rows(columns, rows, None)
        self.rows, self.capacity = rows, len(columns["done"])
        gc.collect()  # The libraries of the contest before this one may still hold their rows.
        self.buffers: dict[Contestant, Buffer] = {}
        self.steps: dict[Contestant, Iterator] = {}
        #: What a stored transition takes in memory, as the system says.
        self.row_nbytes: dict[Contestant, float] = {}
        for contestant in contestants:
            self.add(contestant, **attributes)

    def add(
        self, contestant: Contestant, named: Contestant | None = None, **attributes: Any
    ) -> None:
        """Fills one more and lets it take part.

        Args:
            contestant: the peer, and which of its works.
            named: what they are called in the results; None is as they are.
            **attributes: of `Buffer`.
        """
        before = resident_bytes()
        buffer = adapter(*contestant, **attributes)(self.fill, self.capacity)
        taken = resident_bytes() - before
        new_rows = range(min(NEW_ROWS, self.capacity - self.rows))
        prepared = [buffer.prepare(take_rows(self.new, row, row + 1)) for row in new_rows]
        named = contestant if named is None else named
        self.buffers[named], self.steps[named] = buffer, itertools.cycle(prepared)
        self.row_nbytes[named] = taken / self.rows

    def turns(
        self, batch_size: int, between: Callable[[], Any] = nothing
    ) -> dict[Contestant, Turn]:
        """Returns draws of a batch, with a write of one step before each that is not timed.

        Args:
            batch_size: B.
            between: what else comes between a write and a draw, such as the update of a network.
        """

        def turn(buffer: Buffer, steps: Iterator) -> Turn:
            def before() -> None:
                buffer.write(next(steps))
                between()

            return Turn(call=lambda: buffer.sample(batch_size), before=before)

        return {it: turn(buffer, self.steps[it]) for it, buffer in self.buffers.items()}


def write_turn(buffer: Buffer, columns: Columns, num_rows: int) -> Turn:
    """Returns writes of so many rows a call, over and over."""
    prepared = [
        buffer.prepare(take_rows(columns, start, start + num_rows))
        for start in range(0, min(10_000, 1000 * num_rows), num_rows)
    ]
    blocks = itertools.cycle(prepared)
    return Turn(call=lambda: buffer.write(next(blocks)), repeat=10)


def adapter(name: str, work: str, **attributes: Any) -> type[Buffer]:
    """Returns how a peer does a work, with the attributes of `Buffer` that are given."""
    peer = load_peer(name)
    if isinstance(peer, str):
        raise ModuleNotFoundError(peer)
    return peer.WORKS[work].configured(**attributes)


def who(plan: Plan, *works: str, own: tuple[str, ...] = ()) -> list[Contestant]:
    """Lists who does a work; of this package all of `own` as well."""
    found: list[Contestant] = []
    for name in plan.peers:
        peer = load_peer(name)
        is_there = plan.device == "cpu" or name in ON_CUDA
        if isinstance(peer, str) or not is_there:
            continue
        wanted = (*own, *works) if name == "ours" else works
        found += [(name, work) for work in wanted if work in peer.WORKS]
    return list(dict.fromkeys(found))
