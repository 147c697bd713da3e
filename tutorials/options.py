"""Command-line options of the tutorials, with errors of one line that say what to change."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

__all__ = ["OneLineParser", "device_here", "integer_from", "need"]


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
