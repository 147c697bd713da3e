"""Draws the medians of a run."""

from pathlib import Path

from tests.benchmarks.results import Report, Result
from tests.benchmarks.tables import TITLES
from tests.benchmarks.targets import WORKS

__all__ = ["draw"]

SHOWN = ("uniform", "her", "n_step", "priorities")


def draw(report: Report, path: Path) -> None:
    """Draws the samples of one thread at the largest size: a panel for each batch size.

    Args:
        report: of a run with the section "sampling".
        path: of the picture; its suffix says which format.

    Raises:
        ValueError: the run has no samples.
    """
    from matplotlib.figure import Figure

    results = [r for r in report.results if r.section == "sampling" and not r.unequal]
    if not results:
        raise ValueError('there is nothing to draw: run the section "sampling".')
    threads = min(result.threads for result in results)
    rows = max(result.rows for result in results)
    results = [r for r in results if (r.threads, r.rows) == (threads, rows) and r.work in SHOWN]
    batch_sizes = sorted({result.batch_size for result in results})
    figure = Figure((2 + 4.5 * len(batch_sizes), 4), layout="constrained")
    for axes, batch_size in zip(
        figure.subplots(1, len(batch_sizes), squeeze=False)[0], batch_sizes, strict=True
    ):
        draw_bars(axes, [r for r in results if r.batch_size == batch_size])
        axes.set_title(f"batches of {batch_size:,} from {rows:,} rows")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)


def draw_bars(axes, results: list[Result]) -> None:
    """Groups the libraries by work, on a logarithmic scale."""
    works = [work for work in SHOWN if any(result.work == work for result in results)]
    peers = [peer for peer in TITLES if any(result.peer == peer for result in results)]
    width = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        of_peer = {result.work: result.median for result in results if result.peer == peer}
        axes.bar(
            [works.index(work) + place * width for work in of_peer],
            list(of_peer.values()),
            width,
            label=TITLES[peer],
            color="black" if peer == "raw" else f"C{place}",
        )
    axes.set_yscale("log")
    axes.set_ylabel("microseconds")
    titles = [WORKS[work].replace("`", "").replace(", ", ",\n") for work in works]
    axes.set_xticks([number + 0.4 - width / 2 for number in range(len(works))], titles)
