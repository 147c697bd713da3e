"""A progress bar for long loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["tracker"]

Item = TypeVar("Item")


def tracker(what: str, show: bool) -> Callable[[Iterable[Item]], Iterable[Item]]:
    """Returns a function that wraps an iterable in a progress bar.

    Args:
        what: label of the bar.
        show: whether to show it.

    Raises:
        ImportError: `show` is True, but tqdm is not installed.
    """
    if not show:
        return lambda items: items
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm.") from error
    return lambda items: tqdm(items, desc=what, leave=False)
