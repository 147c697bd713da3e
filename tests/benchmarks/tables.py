"""A run as tables in Markdown: what the command prints, and the pages on speed show."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean, median

from tests.benchmarks.results import Report, Result, pick, ratio

__all__ = [
    "TITLES",
    "WORKS",
    "format_all",
    "format_gpu",
    "format_lanes",
    "format_machine",
    "format_missed",
]

WORKS = {
    "uniform": "uniform",
    "her": "HER, `future`",
    "n_step": "3-step returns",
    "priorities": "priorities, sample + update",
    "her_n_step": "HER x 3-step",
    "everything": "HER x 3-step x priorities x recency",
    "recent": "recency",
    "sequences": "sequences, 32 of 16 steps",
    "flat": "flat observations",
    "stacks": "stacks of 84 x 84",
    "record": "record, one environment",
    "record_lanes": "record, 8 environments",
    "extend": "extend",
}
TITLES = {
    "ours": "trl_storages",
    "torchrl": "TorchRL",
    "sb3": "SB3",
    "cpprb": "cpprb",
    "tianshou": "tianshou",
    "flashbax": "flashbax",
    "rlox": "rlox",
    "ring": "ring of tensors",
    "raw": "raw gather",
}
#: Who counts in comparisons: not ours, and not bare copies of as many bytes.
OTHERS = [it for it in TITLES if it not in ("ours", "ring", "raw")]
GROWING = {"write": "write of [lanes, 1]", "update": "priorities", "route": "new trajectories"}
COUNTED = {"extend": "extend of 1,000, from the GPU", "lanes": "write of [4096, 1], from the GPU"}
#: Who writes steps of lanes; the directory is one of ours.
LANE_PEERS = {
    "ring": "ring of tensors",
    "ours": "trl_storages",
    "ours_mapped": "in a directory",
    "torchrl": "TorchRL",
}
#: What the others do beside works of ours that they don't have.
THEIRS = {"her_n_step": "her", "everything": "her"}
#: What cpprb does when it writes, so that its draws alone are no whole work.
MADE_BY_WRITES = ("her", "n_step", "her_n_step", "everything")
IN_LOOPS = {"loop": "between updates", "alone": "alone"}
PLACES = {"loop": " between updates", "alone": " alone", "write_and_draw": ", write + sample"}
NOTES = """
Microseconds, medians; brackets contain the ratio to trl_storages. One step is written before each sample.
cpprb chooses goals and computes n-step returns when it writes: it stores each transition five times for
HER, and goals and n cannot change later. flashbax has no HER and no n-step returns; the benchmark
computes returns from its sequences. rlox has flat observations, returns arrays and relabels by a distance
alone. The raw gather copies as many bytes and does nothing else.
"""
GROWTH_NOTES = """\
Microseconds, in buffers of two sizes. Priorities: 256 are sampled and updated after a write that is not
timed. New trajectories: a write of one flat transition per lane, with trajectory ids.
"""
ONCE_NOTES = """\
Each library runs in the mode that takes the least memory and returns transitions unchanged:
complete transitions, except cpprb, whose `next_of` and `stack_compress` store less.
"""


def format_all(report: Report) -> Iterator[str]:
    """Gives every table; what was not measured is left out."""
    yield format_machine(report.machine)
    yield ""
    for line in report.left_out:
        yield f"{line}\n"
    yield from format_loop(report)
    yield from format_samples(report)
    yield NOTES
    yield from format_sizes(report)
    yield from format_rest(report)
    yield from format_mapped(report)
    yield from format_once(report)
    yield from format_memory(report)


def format_gpu(report: Report) -> Iterator[str]:
    """Gives what the page on GPUs shows: draws and writes there."""
    yield format_machine(report.machine)
    yield ""
    yield from format_samples(report)
    yield from format_rest(report)
    yield from format_steps_of_lanes(report)
    yield from format_counts(report)


def format_counts(report: Report) -> Iterator[str]:
    """Gives how many operations a call starts on the GPU, and how often the host waits for it."""
    counts = report.counts
    names = ["operations on the GPU per call, waits", *map(TITLES.get, counts)]
    rows = [
        [
            COUNTED.get(work) or WORKS[work],
            *(", ".join(map(str, of.get(work, ()))) for of in counts.values()),
        ]
        for work in counts.get("ours", ())
    ]
    yield from table(names, rows)
    if rows:
        yield f"Counted on: {report.machine['device']}. A simulated GPU is the CPU in its place, which"
        yield "counts copies and kernels alike."


def format_machine(machine: dict[str, str | int]) -> str:
    """Names the machine and the versions in a line."""
    named = ("processor", "cores", "architecture", "system")
    place = f"{machine['processor']}, {machine['cores']} cores, {machine['system']} "
    versions = [f"{name} {version}" for name, version in machine.items() if name not in named]
    return ", ".join([place + str(machine["architecture"]), *versions])


def format_missed(report: Report) -> Iterator[str]:
    """Gives, for each number of threads, where a library is ahead."""
    for number, threads in enumerate(sorted({result.threads for result in report.results})):
        found = list(compared(report.results, threads))
        behind = [(ours, other) for ours, other in found if ratio(ours, other) > 1]
        if number:
            yield ""
        yield (
            f"With {threads} thread{'s' * (threads > 1)}, {len(found) - len(behind)} of {len(found)} "
            "comparisons take at most the time of the library. The rest:"
        )
        yield ""
        for ours, other in behind:
            place = PLACES.get(ours.section, "")
            yield (
                f"- {WORKS[ours.work]}{place}, {ours.batch_size:,}: {format_ratio(ratio(ours, other))} "
                f"of {TITLES[other.peer]} ({ours.median:,.0f} and {other.median:,.0f})."
            )


def compared(results: Sequence[Result], threads: int) -> Iterator[tuple[Result, Result]]:
    """Gives ours beside each of the others that do the same, where most rows are stored."""
    results = [r for r in results if r.threads == threads]
    for ours in results:
        same = [r for r in results if r.section == ours.section]
        is_largest = ours.rows == max(r.rows for r in same)
        if ours.peer != "ours" or not is_largest or ours.work not in WORKS:
            continue
        for peer in OTHERS:
            made = ours.work in MADE_BY_WRITES and ours.section != "write_and_draw"
            if peer == "cpprb" and made:
                continue
            if found := beside(ours, same, peer):
                yield ours, found


def beside(ours: Result, results: Iterable[Result], peer: str) -> Result | None:
    """Returns what a peer took for the same, or for the part of it that it has."""
    work = THEIRS.get(ours.work, ours.work)
    case = {name: getattr(ours, name) for name in ("section", "rows", "batch_size")}
    return pick(results, peer=peer, work=work, **case)


def format_loop(report: Report) -> Iterator[str]:
    """Gives draws between the updates of a network, and alone."""
    results = [r for r in report.results if r.section in IN_LOOPS and r.threads == 1]
    rows = []
    for work, (section, where) in itertools.product(WORKS, IN_LOOPS.items()):
        if ours := pick(results, work=work, peer="ours", section=section):
            rows.append(([title_of(work) if section == "loop" else "", where], ours))
    size = f"{rows[0][1].batch_size:,} of {rows[0][1].rows:,}" if rows else ""
    yield from compared_table([f"sample {size} transitions", ""], rows, results)


def format_samples(report: Report) -> Iterator[str]:
    """Gives our time and theirs at the most rows, in microseconds."""
    results = of_most(report, "sampling")
    rows = []
    for work in WORKS:
        found = sorted((r.batch_size, r) for r in results if (r.work, r.peer) == (work, "ours"))
        for number, (batch_size, ours) in enumerate(found):
            rows.append(([title_of(work) if number == 0 else "", f"{batch_size:,}"], ours))
    size = f"{rows[0][1].rows:,}" if rows else ""
    yield from compared_table([f"sample from {size} transitions", "batch"], rows, results)


def format_sizes(report: Report) -> Iterator[str]:
    """Says what draws of one size take where few rows are stored, and where many are."""
    case = {"section": "sampling", "peer": "ours", "batch_size": 256, "threads": 1}
    sizes = sorted({r.rows for r in report.results if r.section == "sampling"})
    told = []
    for rows in {*sizes[:1], *sizes[-1:]} if len(sizes) > 1 else ():
        found = [pick(report.results, work=work, rows=rows, **case) for work in ("uniform", "her")]
        times = ", ".join(f"{it.median:,.0f} ({WORKS[it.work]})" for it in found if it)
        told.append((rows, f"{rows:,} transitions take {times}"))
    if told:
        yield (
            "The work does not grow with the buffer, but caches hold less of it: 256 of "
            f"{'; of '.join(text for _, text in sorted(told))}."
        )
        yield ""


def format_rest(report: Report) -> Iterator[str]:
    """Gives what is not a draw of rows: writes and sequences."""
    results = [r for it in ("write_and_draw", "writing", "sequences") for r in of_most(report, it)]
    rows = [
        ([WORKS[r.work] + PLACES.get(r.section, ""), f"{r.batch_size:,}"], r)
        for r in results
        if r.peer == "ours"
    ]
    yield from compared_table(["operation", "transitions per call"], rows, results)


def format_mapped(report: Report) -> Iterator[str]:
    """Says how much longer draws from a directory take."""
    results = of_most(report, "mapped")
    told = []
    for mapped in (r for r in results if r.peer == "ours_mapped"):
        if ours := pick(results, work=mapped.work, peer="ours", batch_size=mapped.batch_size):
            name = f"{mapped.batch_size:,} {WORKS[mapped.work]}"
            told.append(f"{format_ratio(ratio(mapped, ours))} ({name})")
    if told:
        yield f"Time to sample from a directory, relative to memory: {', '.join(told)}."
        yield ""


def format_lanes(report: Report) -> Iterator[str]:
    """Gives what the page shows of environments in great numbers."""
    yield format_machine(report.machine)
    yield ""
    yield from format_steps_of_lanes(report)
    yield from format_growth(report)


def format_steps_of_lanes(report: Report) -> Iterator[str]:
    """Gives median, mean and longest call with thousands of environments, in milliseconds."""
    results = [r for r in report.results if r.section == "lanes"]
    rows = []
    for work in dict.fromkeys(r.work for r in results):
        found = {r.peer: [it / 1000 for it in r.rounds] for r in results if r.work == work}
        ring, cells = found.get("ring"), [work]
        for taken in (found.get(peer) for peer in LANE_PEERS):
            told = [
                f"{of(taken):.2f}"
                + (f" ({of(taken) / of(ring):.2f})" if ring and taken is not ring else "")
                for of in (median, mean)
                if taken
            ]
            cells.append(", ".join([*told, f"{max(taken):.1f}"]) if taken else "")
        rows.append(cells)
    names = ["milliseconds: median, mean, longest", *LANE_PEERS.values()]
    yield from table(names, rows)
    if rows:
        yield f"{results[0].rows:,} transitions. Brackets contain the ratio to the ring. A loop is a"
        yield "write and then two draws of 8,192 transitions, as in FastTD3."
        yield ""


def format_growth(report: Report) -> Iterator[str]:
    """Gives what writes, updates and routes take with more and more lanes, in microseconds."""
    results = [r for r in report.results if r.section == "growth"]
    columns = [(work, rows) for work in GROWING for rows in sorted({r.rows for r in results})]
    rows = []
    for lanes in sorted({r.batch_size for r in results}):
        found = [pick(results, work=w, rows=n, batch_size=lanes) for w, n in columns]
        rows.append([f"{lanes:,}", *(f"{it.median:,.0f}" if it else "" for it in found)])
    yield from table(["lanes", *(f"{GROWING[w]}, of {n:,}" for w, n in columns)], rows)
    if rows:
        yield GROWTH_NOTES


def format_once(report: Report) -> Iterator[str]:
    """Gives what rows take, in bytes, and in microseconds a batch."""
    results = [r for r in report.results if r.row_nbytes and r.threads == 1]
    peers = [peer for peer in TITLES if any(result.peer == peer for result in results)]
    rows = []
    for work in [work for work in WORKS if any(result.work == work for result in results)]:
        found = [pick(results, peer=peer, work=work) for peer in peers]
        rows.append([WORKS[work], "bytes", *(nbytes(it, found[0]) for it in found)])
        rows.append(["", "microseconds", *(f"{it.median:,.0f}" if it else "" for it in found)])
    size = results[0].batch_size if results else 0
    names = [f"bytes per transition, and time to sample {size:,}", "", *map(TITLES.get, peers)]
    yield from table(names, rows)
    if rows:
        yield ONCE_NOTES


def nbytes(found: Result | None, ours: Result | None) -> str:
    if found is None or ours is None:
        return ""
    many = f"{found.row_nbytes:,.0f}"
    return many + (
        f" ({format_ratio(found.row_nbytes / ours.row_nbytes)}x)" if found is not ours else ""
    )


def format_memory(report: Report) -> Iterator[str]:
    """Says what rows take of the memory of a process."""
    if memory := report.memory:
        yield (
            f"Memory: {memory['rows']:,.0f} more transitions raise the peak of a process by "
            f"{memory['bytes'] / 1e6:,.1f} MB. Their fields, each observation twice, add up to "
            f"{memory['fields'] / 1e6:,.1f} MB, so the ratio is {memory['ratio']:.2f}."
        )


def of_most(report: Report, section: str) -> list[Result]:
    """Returns the results of a section with one thread, where most rows are stored."""
    found = [r for r in report.results if (r.section, r.threads) == (section, 1)]
    most = max((r.rows for r in found), default=0)
    return [r for r in found if r.rows == most and r.work in WORKS]


def title_of(work: str) -> str:
    """Names a work, and what the others do beside it."""
    return WORKS[work] + (" (others: HER alone)" if work in THEIRS else "")


def table(names: Sequence[str | None], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Gives a table in Markdown and an empty line; nothing without rows."""
    if rows:
        yield "| " + " | ".join(map(str, names)) + " |"
        yield "|---" * len(names) + "|"
        for cells in rows:
            yield "| " + " | ".join(cells) + " |"
        yield ""


def compared_table(
    first: list[str], rows: list[tuple[list[str], Result]], results: Sequence[Result]
) -> Iterator[str]:
    """Gives a table: our time in each row, and those of the others."""
    peers = [it for it in TITLES if it != "ours" and any(r.peer == it for r in results)]
    yield from table(
        [*first, TITLES["ours"], *map(TITLES.get, peers)],
        [
            [
                *titles,
                f"**{ours.median:,.0f}**",
                *(cell(beside(ours, results, peer), ours) for peer in peers),
            ]
            for titles, ours in rows
        ],
    )


def cell(found: Result | None, ours: Result) -> str:
    if found is None:
        return ""
    if found.peer == "raw":
        return f"{found.median:,.0f}"
    return f"{found.median:,.0f} ({format_ratio(ratio(found, ours))}x)"


def format_ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"
