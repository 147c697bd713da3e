"""Command-line options of the tutorials, with errors of one line that say what to change."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

__all__ = ["OneLineParser", "device_here", "integer_from", "need", "parse"]


class OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Exits the program."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def integer_from(minimum: int) -> Callable[[str], int]:
    """Returns the type of an integer option that is at least `minimum`."""

    def integer(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be an integer >= {minimum}, got {text!r}")
        return int(text)

    return integer


def parse(
    description: str | None,
    argv: Sequence[str] | None,
    agents: Sequence[str] = (),
    minimum: int = 1,
    **counts: int,
) -> argparse.Namespace:
    """Returns the options of an agent that trains on one thread: `--seed`, and counts such as `--steps`.

    Args:
        description: the docstring of the program.
        argv: command line; None reads that of the process.
        agents: choices of `--agent`, the default first.
        minimum: smallest value of a count.
        counts: names and defaults of the counts.
    """
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if agents:
        parser.add_argument("--agent", default=agents[0], choices=agents, help="(%(default)s)")
    for name, default in {**counts, "seed": 0}.items():
        least = 0 if name == "seed" else minimum
        parser.add_argument(
            f"--{name}", default=default, type=integer_from(least), help="(%(default)s)"
        )
    torch.set_num_threads(1)  # Networks this small gain nothing from more threads.
    return parser.parse_args(argv)


def device_here(text: str) -> torch.device:
    """Returns the device of that name, if tensors can be created on it."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None


def need(module: str) -> Any:
    """Imports a module of the `tutorials` extra, or exits with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"this tutorial needs {error.name}, which is not installed: "
            "run pip install -e '.[tutorials]'"
        ) from None
