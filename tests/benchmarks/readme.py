"""A run as the tables of the README."""

from collections.abc import Iterator

from tests.benchmarks.results import Report, Result, pick, ratio
from tests.benchmarks.tables import (
    TITLES,
    format_cold_start,
    format_machine,
    format_memory,
    format_plain,
    format_ratio,
)
from tests.benchmarks.targets import WORKS, outcomes

__all__ = ["format_readme", "format_speed"]

PEERS = ("torchrl", "sb3", "cpprb", "tianshou", "flashbax", "raw")
# Our works, and what the others do next to them.
SAMPLES = {
    "uniform": "uniform",
    "her": "her",
    "n_step": "n_step",
    "priorities": "priorities",
    "her_n_step": "her",
    "everything": "her",
}

# Sections in which a training loop draws, and does not.
IN_LOOPS = {"loop": "between updates", "alone": "alone"}

NOTES = """
Microseconds, medians; in brackets how many times as long as here. One step is written before each draw.
cpprb draws goals and folds steps when it writes: it stores each row five times for hindsight, and the
goals stay as they are. flashbax has no hindsight and no n-step returns of its own; the benchmark folds
its sequences.
"""


def format_readme(report: Report) -> Iterator[str]:
    """Gives what the page of the benchmark says of a run, the tables of the README first.

    Args:
        report: of a whole run; what was not measured is left out.
    """
    yield format_machine(report.machine)
    yield ""
    yield from format_speed(report)
    yield NOTES
    yield from format_rest(report)
    yield from format_cold_start([r for r in report.results if r.threads == 1])
    if report.memory:
        yield ""
        yield format_memory(report.memory)
    for threads in sorted({result.threads for result in report.results}):
        yield ""
        yield from format_missed(report, threads)


def format_speed(report: Report) -> Iterator[str]:
    """Gives what the README shows: draws within a training loop, then draws one after another."""
    in_loops = list(format_loop(report))
    if in_loops:
        yield from in_loops
        yield ""
    yield from format_samples(report)


def format_missed(report: Report, threads: int) -> Iterator[str]:
    """Gives the targets that are missed, and what a plain compiled function takes for the same."""
    measured = [(o, o.found) for o in outcomes(report, threads) if o.found is not None]
    missed = [(o, found) for o, found in measured if not o.is_met]
    cores = f"{threads} thread{'s' * (threads > 1)}"
    yield f"With {cores} {len(measured) - len(missed)} targets of {len(measured)} are met. Missed:"
    yield ""
    for o, found in missed:
        rows = f" at {o.batch_size:,}" if o.batch_size in (256, 4096) else ""
        wanted = f"at {'most' if o.target.at_most else 'least'} {o.limit:g}"
        line = f"- {o.target.work} / {o.target.against}{rows}: {found.ratio:.2f} ({wanted})"
        yield "; ".join(filter(None, (line, found.note, format_plain(found)))) + "."


def format_loop(report: Report) -> Iterator[str]:
    """Gives draws between the updates of a network and alone, and what a loop loses by them."""
    results = [r for r in report.results if r.section in IN_LOOPS and r.threads == 1]
    if not results:
        return
    peers = [peer for peer in PEERS if any(result.peer == peer for result in results)]
    titles = [TITLES[peer] for peer in peers]
    one = results[0]
    yield (
        f"| draw {one.batch_size:,} from {one.rows:,} rows | | "
        + " | ".join(["here", *titles])
        + " |"
    )
    yield "|---" * (len(peers) + 3) + "|"
    for work, theirs in SAMPLES.items():
        title = title_of(work)
        for section, where in IN_LOOPS.items():
            found = [result for result in results if result.section == section]
            ours = pick(found, work=work, peer="ours")
            if ours is not None:
                cells = [markdown_cell(pick(found, work=theirs, peer=p), ours) for p in peers]
                yield f"| {title} | {where} | **{ours.median:,.0f}** | " + " | ".join(cells) + " |"
                title = ""
    yield from format_prefetch(report)


def format_prefetch(report: Report) -> Iterator[str]:
    """Says what is lost where batches are drawn ahead, of a loop that need not draw any."""
    results = [r for r in report.results if r.section == "prefetch" and r.threads == 1]
    lost = []
    for ours in results:
        free = pick(results, work=ours.work, peer="free")
        if ours.peer == "ours" and free is not None:
            lost.append(f"{100 * (ratio(ours, free) - 1):+.0f} % ({WORKS[ours.work]})")
            milliseconds = free.median / 1000
    if lost:
        yield ""
        yield (
            f"With `prefetch=1` a loop of {milliseconds:.1f} ms a step takes longer than one that is "
            f"given its batches by {', '.join(lost)}."
        )


def title_of(work: str) -> str:
    """Names a work, and what the others do beside it."""
    return WORKS[work] + (" (others: hindsight alone)" if SAMPLES[work] != work else "")


def format_samples(report: Report) -> Iterator[str]:
    """Gives our time and theirs, in microseconds, with how many times as long they take."""
    results = [
        r for r in report.results if r.section == "sampling" and r.threads == 1 and not r.unequal
    ]
    if not results:
        return
    rows = max(result.rows for result in results)
    results = [result for result in results if result.rows == rows]
    peers = [peer for peer in PEERS if any(result.peer == peer for result in results)]
    yield (
        f"| draw from {rows:,} rows | batch | "
        + " | ".join(["here", *(TITLES[peer] for peer in peers)])
        + " |"
    )
    yield "|---" * (len(peers) + 3) + "|"
    for work, theirs in SAMPLES.items():
        title = title_of(work)
        for batch_size in sorted({result.batch_size for result in results}):
            of_batch = [result for result in results if result.batch_size == batch_size]
            ours = pick(of_batch, work=work, peer="ours")
            if ours is None:
                continue
            cells = [markdown_cell(pick(of_batch, work=theirs, peer=p), ours) for p in peers]
            yield (
                f"| {title} | {batch_size:,} | **{ours.median:,.0f}** | " + " | ".join(cells) + " |"
            )
            title = ""


def markdown_cell(found: Result | None, ours: Result) -> str:
    if found is None:
        return ""
    if found.peer == "raw":
        return f"{found.median:,.0f}"
    return f"{found.median:,.0f} ({format_ratio(ratio(found, ours))}x)"


def format_rest(report: Report) -> Iterator[str]:
    """Gives what is not a draw of rows: writes, sequences and pixels."""
    titles = {"sequences": "sequences", "pixels": "pixels", "pixels_n_step": "pixels"}
    results = [r for r in report.results if r.section in ("writing", *titles) and r.threads == 1]
    peers = [p for p in PEERS if any(result.peer == p for result in results)]
    if not results:
        return
    yield "| work | rows a call | " + " | ".join(["here", *(TITLES[p] for p in peers)]) + " |"
    yield "|---" * (len(peers) + 3) + "|"
    most = {section: max(r.rows for r in results if r.section == section)
            for section in {r.section for r in results}}  # fmt: skip
    for ours in results:
        if ours.peer != "ours" or ours.rows != most[ours.section]:
            continue
        if ours.section == "pixels_n_step" and ours.work == "pixels":
            continue
        same = [
            r
            for r in results
            if (r.section, r.work, r.rows, r.batch_size)
            == (ours.section, ours.work, ours.rows, ours.batch_size)
        ]
        cells = [markdown_cell(pick(same, peer=peer), ours) for peer in peers]
        yield (
            f"| {WORKS[ours.work]} | {ours.batch_size:,} | **{ours.median:,.0f}** | "
            + " | ".join(cells)
            + " |"
        )
