"""A run as the tables of the README."""

from collections.abc import Iterator

from tests.benchmarks.results import Report, Result, pick, ratio
from tests.benchmarks.tables import TITLES, format_machine, format_memory, format_ratio
from tests.benchmarks.targets import WORKS, outcomes

__all__ = ["format_readme"]

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

NOTES = """
Microseconds, medians; in brackets how many times as long as here. One step is written before each draw.
cpprb draws goals and folds steps when it writes: it stores each row five times for hindsight, and the
goals stay as they are. flashbax has no hindsight and no n-step returns of its own; the benchmark folds
its sequences.
"""


def format_readme(report: Report) -> Iterator[str]:
    """Gives the machine, a table of samples, one of everything else, and the targets that are missed.

    Args:
        report: of a whole run; what was not measured is left out.
    """
    yield format_machine(report.machine)
    yield ""
    yield from format_samples(report)
    yield NOTES
    yield from format_rest(report)
    yield ""
    yield from format_profile(report)
    if report.memory:
        yield ""
        yield format_memory(report.memory)
    for threads in sorted({result.threads for result in report.results}):
        yield ""
        yield from format_missed(report, threads)


def format_profile(report: Report) -> Iterator[str]:
    """Gives where the time of a hindsight batch goes."""
    lines = [line for line in report.profile if line["threads"] == 1]
    if lines:
        yield "| hindsight, a batch of 256, one thread | microseconds |"
        yield "|---|---|"
        yield from (f"| {line['part']} | {line['microseconds']:,.0f} |" for line in lines)


def format_missed(report: Report, threads: int) -> Iterator[str]:
    """Gives the targets that are missed, by what stands in the way."""
    measured = [o for o in outcomes(report, threads) if o.ratio is not None]
    missed: dict[str, list[str]] = {}
    for o in measured:
        if not o.is_met:
            rows = f" at {o.batch_size:,}" if o.batch_size in (256, 4096) else ""
            wanted = f"at {'most' if o.target.at_most else 'least'} {o.limit:g}"
            line = f"{o.target.work} / {o.target.against}{rows} {o.ratio:.2f} ({wanted})"
            missed.setdefault(o.target.why or "not known", []).append(line)
    number = sum(map(len, missed.values()))
    cores = f"{threads} thread{'s' * (threads > 1)}"
    yield f"With {cores} {len(measured) - number} targets of {len(measured)} are met. Missed:"
    yield ""
    for why, lines in missed.items():
        yield f"- {'; '.join(lines)}: {why}."


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
        title = WORKS[work] + (" (others: hindsight alone)" if theirs != work else "")
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
