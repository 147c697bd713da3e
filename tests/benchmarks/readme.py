"""The pages that show a run."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.results import Report
from tests.benchmarks.tables import format_all, format_gpu, format_missed

__all__ = ["PAGES", "pages_of", "update", "written"]

#: What each page has between two marks, by its path from the root of the checkout.
PAGES: dict[str, Callable[[Report], Iterator[str]]] = {
    "tutorials/results.md": format_all,
    "tests/benchmarks/README.md": format_missed,
}
#: The same of a run on a GPU.
GPU_PAGES = {"tutorials/on_gpu.md": format_gpu}


def pages_of(report: Report) -> dict[str, Callable[[Report], Iterator[str]]]:
    """Returns the pages that show a run."""
    return PAGES if report.machine.get("device", "cpu") == "cpu" else GPU_PAGES


def written(page: str, lines: Iterator[str], name: str = "speed") -> str:
    """Returns a page with these lines between its marks of this name."""
    begin, end = (f"<!-- {name}: {mark} -->\n" for mark in ("begin", "end"))
    before, rest = page.split(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def update(report: Report, root: Path) -> None:
    """Writes the tables of a run into the pages."""
    for name, format_page in pages_of(report).items():
        path = root / name
        path.write_text(written(path.read_text(), format_page(report)))
