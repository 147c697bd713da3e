"""A bar that shows how far a long loop has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["tracker"]

Item = TypeVar("Item")


def tracker(what: str, show: bool) -> Callable[[Iterable[Item]], Iterable[Item]]:
    """Returns a function that wraps an iterable, to show a bar while it is walked.

    Args:
        what: stands before the bar.
        show: whether to show it.

    Raises:
        ImportError: tqdm is not installed, and a bar is wanted.
    """
    if not show:
        return lambda items: items
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm.") from error
    return lambda items: tqdm(items, desc=what, leave=False)
