"""What this package sets out to reach, and whether a run did.

A ratio is the other's time through ours, or, where ours is compared with ours, the larger work's
through the smaller one's. Those of the largest number of rows count.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.benchmarks.results import Report, Result, pick, ratio

__all__ = ["MODES", "TARGETS", "WORKS", "Outcome", "Target", "outcomes"]

WORKS = {
    "uniform": "uniform",
    "her": "hindsight, `future`",
    "n_step": "3-step returns",
    "priorities": "priorities, sample + update",
    "her_n_step": "hindsight x 3-step",
    "everything": "hindsight x 3-step x priorities x recency",
    "recent": "recency",
    "sequences": "sequences, 32 of 16 steps",
    "pixels": "pixels",
    "pixels_n_step": "pixels, 3-step returns",
    "flat": "flat observations, stored once",
    "flat_flawed": "flat observations, stored once, wrong at ends",
    "flat_plain": "flat observations, stored twice",
    "stacks": "stacks of 84 x 84, frames stored once",
    "stacks_flawed": "stacks of 84 x 84, frames stored once, wrong at ends",
    "stacks_plain": "stacks of 84 x 84, stored twice",
    "record": "record, one environment",
    "record_lanes": "record, 8 environments",
    "extend": "extend",
}
TITLES = {
    "torchrl": "TorchRL",
    "sb3": "Stable-Baselines3",
    "cpprb": "cpprb",
    "tianshou": "tianshou",
    "flashbax": "flashbax",
}
#: In which mode the others store as little as they can and give each row as it was written; and which
#: of their options stores less, but gives wrong next observations at the ends of episodes.
MODES = {
    "torchrl": ("whole rows, as none of its modes works for rows drawn at random", ""),
    "sb3": (
        "whole rows",
        "optimize_memory_usage, which it refuses for dictionaries, hindsight and time limits",
    ),
    "cpprb": ("next_of; for stacks stack_compress as well", ""),
    "tianshou": ("whole rows", "ignore_obs_next; for stacks save_only_last_obs as well"),
}
# How much longer anything may take with several threads than with one.
MOST_WITH_THREADS = 1.1

Side = tuple[str, str]  # peer, work


@dataclass(frozen=True)
class Measured:
    """A ratio, and what belongs to it.

    Attributes:
        ratio: what is compared with the limit.
        note: which of several works it is of.
        ours: microseconds of our side.
        compiled: microseconds of a plain compiled function for the same answer; None where there is
            none.
    """

    ratio: float
    note: str = ""
    ours: float | None = None
    compiled: float | None = None


Finder = Callable[[list[Result], int, int], Measured | None]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio to reach.

    Attributes:
        work: what is done.
        against: what it is compared with.
        limits: the ratio to reach, for each batch size, or number of rows that are written.
        at_most: whether the ratio must not be larger; otherwise it must not be smaller.
        measured: finds the ratio for a thread count and a batch size among all results; None where
            nobody measured it.
    """

    work: str
    against: str
    limits: dict[int, float]
    at_most: bool = False
    measured: Finder


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a target at one batch size; `found` is None where it was not measured."""

    target: Target
    batch_size: int
    limit: float
    found: Measured | None

    @property
    def is_met(self) -> bool:
        """Whether the ratio was measured and is as it should be."""
        if self.found is None:
            return False
        ratio = self.found.ratio
        return ratio <= self.limit if self.target.at_most else ratio >= self.limit


def compared(section: str, over: Side, under: Side) -> Finder:
    """Divides the times of two sides that took turns, at the largest size."""

    def measured(results: list[Result], threads: int, batch_size: int) -> Measured | None:
        found = [
            r
            for r in results
            if (r.section, r.threads, r.batch_size) == (section, threads, batch_size)
        ]
        if not found:
            return None
        case = {"rows": max(result.rows for result in found), "unequal": found[-1].unequal}
        above = pick(found, peer=over[0], work=over[1], **case)
        below = pick(found, peer=under[0], work=under[1], **case)
        if above is None or below is None:
            return None
        ours = above if over[0].startswith("ours") else below
        plain = pick(found, peer="compiled", work=ours.work, **case)
        return Measured(
            ratio(above, below), ours=ours.median, compiled=None if plain is None else plain.median
        )

    return measured


def smaller(over: Side, under: Side) -> Finder:
    """Divides the memory that a transition takes in two libraries."""

    def measured(results: list[Result], threads: int, batch_size: int) -> Measured | None:
        case = {"section": over[1], "threads": threads, "batch_size": batch_size}
        above = pick(results, peer=over[0], work=over[1], **case)
        below = pick(results, peer=under[0], work=under[1], **case)
        if above is None or below is None or min(above.row_nbytes, below.row_nbytes) <= 0:
            return None
        return Measured(above.row_nbytes / below.row_nbytes)

    return measured


def grown(results: list[Result], threads: int, batch_size: int) -> Measured | None:
    """Says how much more the fastest-growing of our works grew than the raw gather did."""
    found = [r for r in results if (r.section, r.threads) == ("growth", threads)]
    grown: dict[str, float] = {}
    sizes = sorted({r.rows for r in found})
    for work in {r.work for r in found}:
        drawn = 512 if work == "sequences" else batch_size
        sides = [
            pick(found, work=work, batch_size=drawn, peer=peer, rows=rows)
            for peer in ("ours", "raw")
            for rows in (sizes[0], sizes[-1])
        ]
        if None not in sides:
            rounds = zip(*(side.rounds for side in sides if side), strict=True)
            grown[work] = statistics.median(
                (ours_large / ours_small) / (raw_large / raw_small)
                for ours_small, ours_large, raw_small, raw_large in rounds
            )
    return the_most(grown)


def slowed(results: list[Result], threads: int, batch_size: int) -> Measured | None:
    """Says how much longer one of our works takes with several threads, of that which loses most.

    The runs with one and with several threads are of different moments.
    """
    if threads == 1:
        return None
    slowed: dict[str, float] = {}
    for result in results:
        of_ours = result.peer == "ours" and result.section in ("sampling", "writing", "loop")
        if of_ours and (result.threads, result.batch_size) == (threads, batch_size):
            case = {name: getattr(result, name) for name in ("section", "work", "rows", "unequal")}
            alone = pick(results, peer="ours", threads=1, batch_size=batch_size, **case)
            if alone is not None:
                work = result.work
                slowed[work] = max(slowed.get(work, 0), result.median / alone.median)
    return the_most(slowed)


def the_most(ratios: dict[str, float]) -> Measured | None:
    """Returns the largest ratio and says whose it is."""
    if not ratios:
        return None
    most = max(ratios, key=lambda work: ratios[work])
    return Measured(ratios[most], f"the most: {WORKS[most]}")


def faster(
    work: str, peer: str, *limits: float, section: str = "sampling", theirs: str | None = None
) -> Target:
    """Makes a target of so many times as fast as a peer at 256 and 4096."""
    where = {"loop": " between updates", "write_and_draw": ", write + draw"}.get(section, "")
    return Target(
        work=WORKS[work] + where,
        against=TITLES[peer] + (f", {WORKS[theirs]} alone" if theirs else ""),
        limits=dict(zip((256, 4096), limits, strict=False)),
        measured=compared(section, (peer, theirs or work), ("ours", work)),
    )


def writes(work: str, peer: str, num_rows: int, limit: float) -> Target:
    """Makes a target of so many times as fast as a peer in writing."""
    rows = f" of {num_rows:,} row{'s' * (num_rows > 1)}" if work == "extend" else ""
    return Target(
        work=WORKS[work] + rows,
        against=f"{TITLES[peer]} `add`" if peer == "sb3" else TITLES[peer],
        limits={num_rows: limit},
        measured=compared("writing", (peer, work), ("ours", work)),
    )


def own(work: str, against: str, section: str, over: Side, under: Side, *limits: float) -> Target:
    """Makes a target of at most so many times as long as another work of ours, at 256 and 4096."""
    return Target(
        work=work,
        against=against,
        limits=dict(zip((256, 4096), limits, strict=False)),
        at_most=True,
        measured=compared(section, over, under),
    )


TARGETS = [
    faster("her", "sb3", 3.5, section="loop"),
    own(
        f"{WORKS['everything']} between updates",
        "our hindsight there",
        "loop",
        ("ours", "everything"),
        ("ours", "her"),
        1.8,
    ),
    *(
        own(
            f"a loop with `prefetch=1`, {WORKS[work]}",
            "without draws",
            "prefetch",
            ("ours", work),
            ("free", work),
            1.05,
        )
        for work in ("uniform", "her", "n_step", "priorities", "her_n_step", "everything")
    ),
    faster("uniform", "torchrl", 9, 8.5),
    faster("uniform", "flashbax", 2.5, 3.3),
    faster("uniform", "cpprb", 2.5, 2.5),
    faster("her", "torchrl", 25, 13),
    faster("her", "sb3", 15, 8.5),
    faster("her", "cpprb", 0.65, 1.7),
    faster("her", "cpprb", 1, 1, section="write_and_draw"),
    faster("n_step", "torchrl", 5, 5),
    faster("n_step", "flashbax", 1.5, 1.9),
    faster("n_step", "cpprb", 0.8, 1.8),
    faster("priorities", "torchrl", 6, 5),
    faster("priorities", "tianshou", 2, 2.5),
    faster("priorities", "flashbax", 8, 3),
    own(
        WORKS["her_n_step"],
        "our hindsight",
        "sampling",
        ("ours", "her_n_step"),
        ("ours", "her"),
        1.4,
        1.7,
    ),
    faster("everything", "torchrl", 14, 6, theirs="her"),
    faster("everything", "sb3", 8, 3.5, theirs="her"),
    writes("record", "sb3", 1, 1.1),
    writes("record_lanes", "sb3", 8, 1),
    *(writes("extend", "torchrl", num_rows, 8) for num_rows in (1, 8, 50)),
    writes("extend", "torchrl", 1000, 3),
    *(writes("extend", "cpprb", num_rows, 1.5) for num_rows in (1, 8, 50)),
    writes("extend", "cpprb", 1000, 1.2),
    Target(
        work="ours with several threads",
        against="with one",
        limits=dict.fromkeys((256, 4096, 1, 8, 50, 1000), MOST_WITH_THREADS),
        at_most=True,
        measured=slowed,
    ),
    Target(
        work=WORKS["sequences"],
        against="TorchRL",
        limits={512: 20},
        measured=compared("sequences", ("torchrl", "sequences"), ("ours", "sequences")),
    ),
    *(
        faster(work, peer, limit, section=work)
        for work in ("pixels", "pixels_n_step")
        for peer, limit in (("torchrl", 8), ("sb3", 1.3))
    ),
    *(
        Target(
            work=f"bytes: {WORKS[work]}",
            against=WORKS[f"{work}_plain"],
            limits={256: most},
            at_most=True,
            measured=smaller(("ours", work), ("ours", f"{work}_plain")),
        )
        for work, most in (("flat", 0.63), ("stacks", 0.14))
    ),
    *(
        Target(
            work=f"bytes: {WORKS[work]}",
            against=TITLES[peer],
            limits={256: 1.0},
            measured=smaller((peer, work), ("ours", work)),
        )
        for work in ("flat", "stacks")
        for peer in ("torchrl", "sb3", "cpprb", "tianshou")
    ),
    *(
        Target(
            work=f"time: {WORKS[work]}",
            against=WORKS[f"{work}_plain"],
            limits={256: most},
            at_most=True,
            measured=compared(work, ("ours", work), ("ours", f"{work}_plain")),
        )
        for work, most in (("flat", 1.25), ("stacks", 1.0))
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
    for target in TARGETS:
        for batch_size, limit in target.limits.items():
            found = target.measured(report.results, threads, batch_size)
            yield Outcome(target=target, batch_size=batch_size, limit=limit, found=found)
