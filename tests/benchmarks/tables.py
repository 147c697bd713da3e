"""Results as lines of text."""

import platform
from importlib import metadata

from tests.benchmarks.measure import Result

__all__ = ["format_header", "format_line", "format_machine"]

OURS = "ours"
WIDTH = 19
DISTRIBUTIONS = ("torch", "torchrl", "stable_baselines3", "cpprb", "tianshou", "flashbax", "jax")


def format_machine() -> str:
    """Names the interpreter, the processor and the versions of the libraries."""
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in DISTRIBUTIONS if name in installed]
    return ", ".join([f"python {platform.python_version()} on {platform.machine()}", *versions])


def format_header(titles: list[str]) -> str:
    """Heads the columns of `format_line`."""
    return f"{'rows':>9} {'batch':>6}" + "".join(f"{title:>{WIDTH}}" for title in titles)


def format_line(results: list[Result]) -> str:
    """Gives the medians of one case in microseconds, each with its ratio to this package's."""
    case = results[0].case
    ours = next((result.median for result in results if result.peer == OURS), None)
    cells = []
    for result in results:
        ratio = f" ({result.median / ours:.1f}x)" if ours and result.peer != OURS else ""
        cells.append(f"{result.median:,.0f}{ratio}")
    line = f"{case.rows:>9,} {case.batch_size:>6,}"
    return line + "".join(f"{cell:>{WIDTH}}" for cell in cells)
