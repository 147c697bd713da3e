"""What this package sets out to reach, and whether a run did.

A ratio is the other's time through ours, or, where ours is compared with ours, the larger work's
through the smaller one's. Those of the largest number of rows count.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.benchmarks.results import Report, Result, pick, ratio

__all__ = ["TARGETS", "WORKS", "Outcome", "Target", "outcomes"]

WORKS = {
    "uniform": "uniform",
    "her": "hindsight, `future`",
    "her_n_step": "hindsight x 3-step",
    "everything": "hindsight x 3-step x priorities x recency",
    "n_step": "3-step returns",
    "priorities": "priorities, sample + update",
    "recent": "recency",
    "sequences": "sequences, 32 of 16 steps",
    "pixels": "pixels",
    "pixels_n_step": "pixels, 3-step returns",
    "record": "record, one environment",
    "record_lanes": "record, 8 environments",
    "extend": "extend",
}
TITLES = {
    "torchrl": "TorchRL",
    "sb3": "Stable-Baselines3",
    "cpprb": "cpprb",
    "flashbax": "flashbax",
}

Side = tuple[str, str]  # peer, work


@dataclass(frozen=True)
class Measured:
    """A ratio, and what there is to say about it."""

    ratio: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio to reach.

    Attributes:
        work: what is done.
        against: what it is compared with.
        limits: the ratio to reach, for each batch size; 0 stands for work without batches.
        at_most: whether the ratio must not be larger; otherwise it must not be smaller.
        why: what stands in the way where it is missed, as far as is known.
        measured: finds the ratio for a batch size among the results of a thread count; None where
            nobody measured it.
    """

    work: str
    against: str
    limits: dict[int, float]
    at_most: bool = False
    why: str = ""
    measured: Callable[[list[Result], int], Measured | None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a target at one batch size; `ratio` is None where it was not measured."""

    target: Target
    batch_size: int
    limit: float
    ratio: float | None
    note: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the ratio was measured and is as it should be."""
        if self.ratio is None:
            return False
        return self.ratio <= self.limit if self.target.at_most else self.ratio >= self.limit


def compared(
    section: str, over: Side, under: Side
) -> Callable[[list[Result], int], Measured | None]:
    """Divides the times of two sides that took turns, at the largest size."""

    def measured(results: list[Result], batch_size: int) -> Measured | None:
        of_section = [r for r in results if r.section == section and r.batch_size == batch_size]
        if not of_section:
            return None
        rows = max(result.rows for result in of_section)
        sides = [
            pick(of_section, rows=rows, peer=peer, work=work, unequal=of_section[-1].unequal)
            for peer, work in (over, under)
        ]
        if sides[0] is None or sides[1] is None:
            return None
        return Measured(ratio(*sides))

    return measured


def grown(results: list[Result], batch_size: int) -> Measured | None:
    """Says how much more the slowest-growing of our works grew than the raw gather did."""
    grown: dict[str, float] = {}
    sizes = sorted({r.rows for r in results if r.section == "growth"})
    for work in {r.work for r in results if r.section == "growth"}:
        sides = [
            pick(results, section="growth", work=work, batch_size=size, peer=peer, rows=rows)
            for peer in ("ours", "raw")
            for rows in (sizes[0], sizes[-1])
            for size in (512 if work == "sequences" else batch_size,)
        ]
        if None not in sides:
            rounds = zip(*(side.rounds for side in sides if side), strict=True)
            grown[work] = statistics.median(
                (ours_large / ours_small) / (raw_large / raw_small)
                for ours_small, ours_large, raw_small, raw_large in rounds
            )
    if not grown:
        return None
    most = max(grown, key=lambda work: grown[work])
    return Measured(grown[most], f"the most: {WORKS[most]}")


def faster(
    work: str,
    peer: str,
    *limits: float,
    section: str = "sampling",
    theirs: str | None = None,
    why: str = "",
) -> Target:
    """Makes a target of so many times as fast as a peer at 256 and 4096."""
    return Target(
        work=WORKS[work],
        against=TITLES[peer] + (f", {WORKS[theirs]} alone" if theirs else ""),
        limits=dict(zip((256, 4096), limits, strict=False)),
        why=why,
        measured=compared(section, (peer, theirs or work), ("ours", work)),
    )


def writes(work: str, peer: str, num_rows: int, limit: float, why: str) -> Target:
    rows = f" of {num_rows:,} row{'s' * (num_rows > 1)}" if work == "extend" else ""
    return Target(
        work=WORKS[work] + rows,
        against=f"{TITLES[peer]} `add`" if peer == "sb3" else TITLES[peer],
        limits={num_rows: limit},
        why=why,
        measured=compared("writing", (peer, work), ("ours", work)),
    )


def own(
    work: str, against: str, section: str, over: Side, under: Side, *limits: float, why: str = ""
) -> Target:
    """Makes a target of at most so many times as long as another work of ours."""
    return Target(
        work=work,
        against=against,
        limits=dict(zip((256, 4096), limits, strict=True)),
        at_most=True,
        why=why,
        measured=compared(section, over, under),
    )


BY_HAND = (
    "one plain function over arrays, without TensorDict or any part of a library, misses it too: see "
    "the profile"
)
FOLDED_BEFORE = (
    "it folded the steps when it wrote them; here n - 1 further rows are read from all over memory, "
    "so that n and the goal may change"
)
SUM_TREE = (
    "the compiled sum tree, which is TorchRL's own, takes a quarter of the time at 256 and two fifths at "
    "4,096; the rest is the gather and small calls"
)
TENSORDICTS = (
    "every entry of the TensorDict is looked up, checked against the rows and joined before anything is "
    "written, and episodes are kept; of 1,000 rows the copying alone takes more than half"
)
CHECKED = "every value is checked before anything is written, and episodes are kept, all in Python"
COPIED = "the pictures are copied once, as by the raw gather, which takes nearly as long"

TARGETS = [
    faster(
        "uniform",
        "torchrl",
        6,
        12,
        why="of 4,096 rows the gather alone takes two thirds of the time, of 256 the TensorDict does",
    ),
    faster("uniform", "flashbax", 2, 2.5),
    faster("her", "torchrl", 30, 15, why=BY_HAND),
    faster("her", "sb3", 8, 8, why=f"at 4,096 {BY_HAND}; at 256 it is at the edge"),
    faster(
        "her",
        "cpprb",
        1,
        2,
        why="it drew its goals when it wrote, each row five times, and has only to gather them",
    ),
    faster("n_step", "cpprb", 1, 1.3, why=FOLDED_BEFORE),
    faster("n_step", "flashbax", 1, 1.3, why="n - 1 further rows are read from all over memory"),
    own(
        WORKS["her_n_step"],
        "our hindsight",
        "sampling",
        ("ours", "her_n_step"),
        ("ours", "her"),
        1.5,
        1.8,
        why="n rows are read and judged where hindsight alone reads and judges one",
    ),
    faster("priorities", "torchrl", 4, 4, why=SUM_TREE),
    faster("priorities", "flashbax", 1.2, 1.5, why=SUM_TREE),
    faster(
        "everything",
        "torchrl",
        10,
        5,
        theirs="her",
        why="hindsight x n-step alone takes longer than that",
    ),
    writes("record", "sb3", 1, 1, CHECKED),
    writes("record_lanes", "sb3", 8, 1, CHECKED),
    *(writes("extend", "torchrl", num_rows, 4, TENSORDICTS) for num_rows in (1, 8, 50, 1000)),
    *(writes("extend", "cpprb", num_rows, 0.8, TENSORDICTS) for num_rows in (1, 8, 50, 1000)),
    Target(
        work=WORKS["sequences"],
        against="TorchRL",
        limits={512: 20},
        why="it searches all rows for the ends of episodes, a work that its threads share",
        measured=compared("sequences", ("torchrl", "sequences"), ("ours", "sequences")),
    ),
    *(
        faster(
            work,
            peer,
            limit,
            section=work,
            why=COPIED,
        )
        for work in ("pixels", "pixels_n_step")
        for peer, limit in (("torchrl", 8), ("sb3", 1.3))
    ),
    Target(
        work="ours at the most rows / the fewest",
        against="growth of the raw gather",
        limits={256: 1.2, 4096: 1.2},
        at_most=True,
        measured=grown,
    ),
    *(
        own(
            f"{WORKS[work]}, memory-mapped",
            "in memory",
            "mapped",
            ("ours_mapped", work),
            ("ours", work),
            1.2,
            1.2,
        )
        for work in ("uniform", "her")
    ),
]


def outcomes(report: Report, threads: int) -> Iterator[Outcome]:
    """Compares a run with all targets.

    Args:
        report: of the run.
        threads: whose results count.
    """
    results = [result for result in report.results if result.threads == threads]
    for target in TARGETS:
        for batch_size, limit in target.limits.items():
            found = target.measured(results, batch_size)
            yield Outcome(
                target=target,
                batch_size=batch_size,
                limit=limit,
                ratio=None if found is None else found.ratio,
                note="" if found is None else found.note,
            )
