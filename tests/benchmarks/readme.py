"""The pages that show a run."""

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.results import Report
from tests.benchmarks.tables import format_all, format_gpu, format_lanes, format_missed

__all__ = ["PAGES", "updated", "written"]

#: Name of the marks that a run fills -> path of a page in the checkout -> what it shows between them.
PAGES: dict[str, dict[str, Callable[[Report], Iterator[str]]]] = {
    "speed": {"tutorials/results.md": format_all, "tests/benchmarks/README.md": format_missed},
    "lanes": {"tutorials/results.md": format_lanes},
    "gpu": {"tutorials/on_gpu.md": format_gpu},
}


def written(page: str, lines: Iterator[str], name: str) -> str:
    """Returns a page with these lines between its marks of this name."""
    begin, end = (f"<!-- {name}: {mark} -->\n" for mark in ("begin", "end"))
    before, rest = page.split(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def updated(report: Report, root: Path) -> Iterator[tuple[Path, str]]:
    """Gives the pages that show a run, with its tables."""
    sections = {result.section for result in report.results}
    name = "gpu" if report.counts else "lanes" if sections <= {"lanes", "growth"} else "speed"
    for path, format_page in PAGES[name].items():
        yield root / path, written((root / path).read_text(), format_page(report), name)
