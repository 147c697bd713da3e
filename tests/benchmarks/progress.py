"""How far a section is, on stderr: a bar on a terminal if tqdm is installed, a line a step otherwise."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

__all__ = ["progress"]

Item = TypeVar("Item", covariant=True)


class SizedIterable(Sized, Iterable[Item], Protocol[Item]):
    """Something whose length is known before it is walked."""


def progress(steps: SizedIterable[Item], title: str) -> Iterator[Item]:
    """Goes through steps and shows how many are done."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return lines(steps, title)
    if not sys.stderr.isatty():
        return lines(steps, title)
    bar: Any = tqdm(steps, desc=f"{title:>12}", file=sys.stderr, leave=False, dynamic_ncols=True)
    return iter(bar)


def lines(steps: SizedIterable[Item], title: str) -> Iterator[Item]:
    """Says which step begins."""
    for number, step in enumerate(steps, start=1):
        print(f"{title:>12}: {number} of {len(steps)}", file=sys.stderr, flush=True)
        yield step
