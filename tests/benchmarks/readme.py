"""A run as the tables of the pages on speed."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.results import Report, Result, pick, ratio
from tests.benchmarks.tables import (
    TITLES,
    format_cold_start,
    format_machine,
    format_memory,
    format_modes,
    format_nbytes,
    format_plain,
    format_ratio,
)
from tests.benchmarks.targets import WORKS, outcomes

__all__ = [
    "GPU_PAGES",
    "PAGES",
    "format_all",
    "format_targets",
    "pages_of",
    "update",
    "written",
]

PEERS = ("captured", "torchrl", "sb3", "cpprb", "tianshou", "flashbax", "raw")
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
goals and n stay as they are. flashbax has no hindsight and no n-step returns of its own; the benchmark
folds its sequences. The raw gather is what the machine takes to copy as many bytes.
"""
BEGIN, END = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"


def format_all(report: Report) -> Iterator[str]:
    """Gives what the page on speed shows: every table; what was not measured is left out."""
    yield format_machine(report.machine)
    yield ""
    for line in report.left_out:
        yield line
        yield ""
    in_loops = list(format_loop(report))
    if in_loops:
        yield from in_loops
        yield ""
    yield from format_samples(report)
    yield NOTES
    yield from format_sizes(report)
    yield from format_rest(report)
    yield from format_once(report)
    yield from format_cold_start([r for r in report.results if r.threads == 1])
    if report.memory:
        yield ""
        yield format_memory(report.memory)


def format_targets(report: Report) -> Iterator[str]:
    """Gives what the page for developers shows: the targets that are missed."""
    for number, threads in enumerate(sorted({result.threads for result in report.results})):
        if number:
            yield ""
        yield from format_missed(report, threads)


def format_gpu(report: Report) -> Iterator[str]:
    """Gives what the page on GPUs shows: draws and writes there."""
    yield format_machine(report.machine)
    yield ""
    yield from format_samples(report)
    yield ""
    yield from format_rest(report)


#: What each page has between two marks, by its path from the root of the checkout.
PAGES: dict[str, Callable[[Report], Iterator[str]]] = {
    "tutorials/speed.md": format_all,
    "tests/benchmarks/README.md": format_targets,
}
#: The same of a run on a GPU.
GPU_PAGES = {"tutorials/on_gpu.md": format_gpu}


def pages_of(report: Report) -> dict[str, Callable[[Report], Iterator[str]]]:
    """Returns the pages that show a run."""
    return PAGES if report.machine.get("device", "cpu") == "cpu" else GPU_PAGES


def written(page: str, lines: Iterator[str]) -> str:
    """Returns a page with these lines between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def update(report: Report, root: Path) -> None:
    """Writes the tables of a run into the pages."""
    texts = {
        root / name: written((root / name).read_text(), format_page(report))
        for name, format_page in pages_of(report).items()
    }
    for path, text in texts.items():
        path.write_text(text)


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
    peers = peers_of(results)
    one = results[0]
    yield from head(f"| draw {one.batch_size:,} from {one.rows:,} rows | | ", peers)
    for work in SAMPLES:
        title = title_of(work)
        for section, where in IN_LOOPS.items():
            found = [result for result in results if result.section == section]
            ours = pick(found, work=work, peer="ours")
            if ours is not None:
                yield row_of(f"| {title} | {where} | ", ours, found, peers)
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
    peers = peers_of(results)
    yield from head(f"| draw from {rows:,} rows | batch | ", peers)
    for work in SAMPLES:
        title = title_of(work)
        for batch_size in sorted({result.batch_size for result in results}):
            of_batch = [result for result in results if result.batch_size == batch_size]
            ours = pick(of_batch, work=work, peer="ours")
            if ours is not None:
                yield row_of(f"| {title} | {batch_size:,} | ", ours, of_batch, peers)
                title = ""


def format_sizes(report: Report) -> Iterator[str]:
    """Says what draws of one size take where few rows are stored, and where many are."""
    results = [
        r
        for r in report.results
        if (r.section, r.peer, r.batch_size, r.threads) == ("sampling", "ours", 256, 1)
        and not r.unequal
        and r.work in ("uniform", "her")
    ]
    sizes = sorted({result.rows for result in results})
    if len(sizes) < 2:
        return
    taken = {
        rows: ", ".join(
            f"{result.median:,.0f} ({WORKS[result.work]})"
            for result in results
            if result.rows == rows
        )
        for rows in (sizes[0], sizes[-1])
    }
    yield (
        f"The work does not grow with the storage, memory only gets further away: 256 of "
        f"{sizes[0]:,} rows take {taken[sizes[0]]}; of {sizes[-1]:,} rows {taken[sizes[-1]]}."
    )
    yield ""


def peers_of(results: list[Result]) -> list[str]:
    """Returns whose results there are, in the order of the columns."""
    return [peer for peer in PEERS if any(result.peer == peer for result in results)]


def head(first: str, peers: list[str]) -> Iterator[str]:
    """Gives the two lines that a table begins with; `first` is what stands before our column."""
    yield first + " | ".join(["here", *(TITLES[peer] for peer in peers)]) + " |"
    yield "|---" * (first.count("|") + len(peers)) + "|"


def row_of(first: str, ours: Result, results: list[Result], peers: list[str]) -> str:
    """Returns a line of a table: our time, and among `results` those of the others."""
    theirs = SAMPLES.get(ours.work, ours.work)
    cells = []
    for peer in peers:
        work = ours.work if peer == "captured" else theirs
        cells.append(markdown_cell(pick(results, work=work, peer=peer), ours))
    return f"{first}**{ours.median:,.0f}** | " + " | ".join(cells) + " |"


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
    peers = peers_of(results)
    if not results:
        return
    yield from head("| work | rows a call | ", peers)
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
        yield row_of(f"| {WORKS[ours.work]} | {ours.batch_size:,} | ", ours, same, peers)


def format_once(report: Report) -> Iterator[str]:
    """Gives what rows take that store each observation once, in bytes and in microseconds a batch."""
    results = [r for r in report.results if r.row_nbytes and r.threads == 1]
    peers = peers_of(results)
    if not results:
        return
    yield ""
    yield from head(f"| bytes a transition, and to draw {results[0].batch_size:,} | | ", peers)
    for work in [work for work in WORKS if any(result.work == work for result in results)]:
        columns = ["ours", *peers]
        sizes = [format_nbytes(results, peer, work) for peer in columns]
        found = [pick(results, work=work, peer=peer) for peer in columns]
        times = [f"{it.median:,.0f}" if it else "" for it in found]
        yield f"| {WORKS[work]} | bytes | " + " | ".join(sizes) + " |"
        yield "|  | microseconds | " + " | ".join(times) + " |"
    yield ""
    yield "Each library in the mode that takes the least memory and gives every row as it was written;"
    yield "modes that are wrong at the ends of episodes have lines of their own:"
    yield ""
    yield from (f"- {line.strip()}" for line in format_modes(peers))
    yield ""
