"""A run as lines of text."""

from collections.abc import Iterable, Iterator

from tests.benchmarks.results import Report, Result, pick, ratio
from tests.benchmarks.targets import MODES, WORKS, Measured, outcomes

__all__ = [
    "format_cold_start",
    "format_machine",
    "format_memory",
    "format_modes",
    "format_nbytes",
    "format_plain",
    "format_report",
]

WIDTH = 19
TITLES = {
    "ours": "here",
    "captured": "here, captured",
    "ours_mapped": "memory-mapped",
    "torchrl": "TorchRL",
    "sb3": "SB3",
    "cpprb": "cpprb",
    "tianshou": "tianshou",
    "flashbax": "flashbax",
    "free": "without draws",
    "compiled": "compiled function",
    "columns": "by column",
    "raw": "raw gather",
}
HEADS = {
    "loop": "Samples between two updates of a network: microseconds",
    "alone": "The same without updates",
    "prefetch": "Steps of such a loop, batches drawn ahead (`prefetch=1`), and of one that draws none",
    "sampling": "Samples, one step written before each: microseconds, how many times as long as here; "
    "next to hindsight x more the others do hindsight alone",
    "write_and_draw": "The same, the write timed with the draw, by who draws goals when it writes",
    "writing": "Writes over the oldest rows of a full storage: microseconds a call",
    "sequences": "Stretches of 16 steps, one step written before each",
    "pixels": "Pixels, 84 x 84 x 4 uint8, as they are stored",
    "pixels_n_step": "Pixels, returns of three steps (in brackets, ratio to ours)",
    "flat": "Flat observations of 31 numbers, each stored once as well as a library can",
    "stacks": "Stacks of 4 frames, 84 x 84 uint8, each stored once as well as a library can",
    "growth": "Every work of ours at two sizes, next to the raw gather",
    "mapped": "Rows in memory-mapped files, all pages warm, next to rows in memory",
}
# Who does the work of another name, next to ours.
THEIRS = {"her_n_step": "her", "everything": "her", "pixels_n_step": "pixels_n_step"}


def format_machine(machine: dict[str, str | int]) -> str:
    """Names the machine and the versions in a line."""
    named = ("processor", "cores", "architecture", "system")
    place = f"{machine['processor']}, {machine['cores']} cores, {machine['system']} "
    versions = [f"{name} {version}" for name, version in machine.items() if name not in named]
    return ", ".join([place + str(machine["architecture"]), *versions])


def format_report(report: Report) -> Iterator[str]:
    """Gives all tables, one thread count after another, the targets last."""
    for threads in sorted({result.threads for result in report.results}):
        results = [result for result in report.results if result.threads == threads]
        counted = f"{threads} thread{'s' * (threads > 1)}"
        for section, head in HEADS.items():
            of_section = [result for result in results if result.section == section]
            if of_section:
                yield f"\n{head} ({counted})"
                yield from format_section(of_section)
                yield from format_bytes(of_section)
        yield from format_cold_start(results)
    if report.memory:
        yield "\n" + format_memory(report.memory)
    for threads in sorted({result.threads for result in report.results}):
        yield from format_targets(report, threads)
    if report.left_out:
        yield "\nLeft out"
        yield from report.left_out


def format_section(results: list[Result]) -> Iterator[str]:
    """Gives a line for each of our works, size and batch: our time, theirs and the ratios."""
    peers = [peer for peer in TITLES if any(result.peer == peer for result in results)]
    yield f"{'':<43}{'episodes':>9}{'rows':>10}{'batch':>7}" + "".join(
        f"{TITLES[p]:>{WIDTH}}" for p in peers
    )
    cases = dict.fromkeys(
        (r.work, r.rows, r.batch_size, r.unequal) for r in results if r.peer != "raw"
    )
    works = [work for work in WORKS if any(case[0] == work for case in cases)]
    for work in works:
        for case in (case for case in cases if case[0] == work):
            yield format_line(results, *case, peers=peers)


def format_bytes(results: list[Result]) -> Iterator[str]:
    """Gives a line for each of our works: what a transition takes here, and with the others."""
    peers = [peer for peer in TITLES if any(result.peer == peer for result in results)]
    for work in [work for work in WORKS if any(r.work == work and r.row_nbytes for r in results)]:
        cells = [format_nbytes(results, peer, work) for peer in peers]
        title = f"  bytes a transition, {WORKS[work]}"
        yield f"{title:<69}" + "".join(f"{cell or '-':>{WIDTH}}" for cell in cells)
    if any(result.row_nbytes for result in results):
        yield from format_modes(peers)


def format_nbytes(results: list[Result], peer: str, work: str) -> str:
    """Gives what a transition takes, and how many times as much as here; nothing if not measured."""
    found = pick(results, peer=peer, work=work)
    if found is None or not found.row_nbytes:
        return ""
    many = f"{found.row_nbytes:,.0f}"
    # Who stores once is compared with what stores once here.
    ours = pick(results, peer="ours", work=work) or pick(
        results, peer="ours", work=work.removesuffix("_flawed")
    )
    if ours is None or peer == "ours":
        return many
    return f"{many} ({format_ratio(found.row_nbytes / ours.row_nbytes)}x)"


def format_modes(peers: Iterable[str]) -> Iterator[str]:
    """Says in which mode each library stores observations, a line each."""
    for peer in peers:
        if peer in MODES:
            mode, flawed = MODES[peer]
            yield f"  {TITLES[peer]}: {mode}" + (f"; wrong at ends: {flawed}" if flawed else "")


def format_line(
    results: list[Result], work: str, rows: int, batch_size: int, unequal: bool, peers: list[str]
) -> str:
    of_case = [
        r for r in results if (r.rows, r.batch_size, r.unequal) == (rows, batch_size, unequal)
    ]
    ours = pick(of_case, peer="ours", work=work)
    cells = []
    for peer in peers:
        found = pick(of_case, peer=peer, work=work)
        if found is None and peer != "ours":
            found = pick(of_case, peer=peer, work=THEIRS.get(work, work))
        cells.append(format_cell(found, ours))
    episodes = "1 to 99" if unequal else "50"
    return f"{WORKS[work]:<43}{episodes:>9}{rows:>10,}{batch_size:>7,}" + "".join(
        f"{c:>{WIDTH}}" for c in cells
    )


def format_cell(found: Result | None, ours: Result | None) -> str:
    if found is None:
        return "-"
    time = f"{found.median:,.1f}" if found.median < 100 else f"{found.median:,.0f}"
    if ours is None or found is ours:
        return time
    return f"{time} ({format_ratio(ratio(found, ours))}x)"


def format_ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"


def format_memory(memory: dict[str, float]) -> str:
    verdict = "within 5 %" if memory["ratio"] <= 1.05 else "NOT within 5 %"
    return (
        f"Memory: {memory['rows']:,.0f} further rows raise the peak of a process by "
        f"{memory['bytes'] / 1e6:,.1f} MB; their fields add up to {memory['fields'] / 1e6:,.1f} MB, "
        f"{memory['ratio']:.3f} times, {verdict}. (Without the {memory['baseline'] / 1e6:,.0f} MB of a "
        "process with all imports and a storage of few rows.)"
    )


def format_cold_start(results: list[Result]) -> Iterator[str]:
    """Gives the seconds of imports and of first batches in a sentence, if they were measured."""
    seconds = {(r.peer, r.work): r.median / 1e6 for r in results if r.section == "cold"}
    if seconds:
        yield ""
        yield (
            f"Cold start: `import trl_storages` takes {seconds['ours', 'import']:.1f} s, TorchRL's own "
            f"{seconds['torchrl', 'import']:.1f} s included; then a hindsight storage, 200 steps and the "
            f"first batch take {seconds['new', 'first_batch']:.1f} s in a new installation and "
            f"{seconds['later', 'first_batch']:.1f} s in a later process."
        )


def format_plain(found: Measured) -> str:
    """Says what a plain compiled function takes for the same answer, where it was measured."""
    if found.ours is None or found.compiled is None:
        return ""
    return f"{found.ours:,.0f} here, a plain compiled function takes {found.compiled:,.0f}"


def format_targets(report: Report, threads: int) -> Iterator[str]:
    """Gives a line for each target: the ratio, what it should be, and whether it is."""
    yield f"\nTARGETS ({threads} thread{'s' * (threads > 1)})"
    yield f"{'work':<68}{'against':<38}{'batch':>7}{'ratio':>8}{'target':>9}"
    met = missed = 0
    for outcome in outcomes(report, threads):
        found = outcome.found
        if found is None:
            continue
        met, missed = met + outcome.is_met, missed + (not outcome.is_met)
        limit = ("<= " if outcome.target.at_most else ">= ") + f"{outcome.limit:g}"
        verdict = "met" if outcome.is_met else "MISSED"
        yield (
            f"{outcome.target.work:<68}{outcome.target.against:<38}{outcome.batch_size:>7,}"
            f"{found.ratio:>8.2f}{limit:>9}  {verdict}  {found.note}"
        ).rstrip()
        if not outcome.is_met and format_plain(found):
            yield f"    {format_plain(found)}"
    yield f"{met} met, {missed} missed"
