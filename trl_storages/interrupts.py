"""Writes that are there as a whole or not at all, also where an interrupt comes in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["complete", "finish"]

Result = TypeVar("Result")

# Ctrl-C is often pressed more than once.
_ATTEMPTS = 9


def finish(act: Callable[[], Result], start_over: Callable[[], object] | None = None) -> Result:
    """Does what must not stay half done: an interrupt is raised once all of it was done.

    Nothing is kept to undo a write. All that it needs was found out before it began, so that doing it
    once more from the beginning completes it, whatever was done of it.

    Args:
        act: leads to the same when it is called again after any part of it was done.
        start_over: called before that, to put back what `act` counts on from.

    Returns:
        what `act` returns.

    >>> calls = []
    >>> def act():
    ...     calls.append(len(calls))
    ...     if len(calls) == 1:
    ...         raise KeyboardInterrupt
    >>> try:
    ...     finish(act)
    ... except KeyboardInterrupt:
    ...     print(calls)
    [0, 1]
    """
    try:
        return act()
    except BaseException as error:
        complete(error, act, start_over)
        raise


def complete(
    error: BaseException, act: Callable[[], object], start_over: Callable[[], object] | None = None
) -> bool:
    """Does what `finish` does after an error, for whoever has caught it.

    Args:
        error: what came in between. One that `act` itself raises comes again, and is left to the caller.
        act: as in `finish`.
        start_over: as in `finish`.

    Returns:
        whether all of it was done.
    """
    # Timeouts and signals may be errors of any kind.
    for _ in range(1 if isinstance(error, Exception) else _ATTEMPTS):
        with suppress(type(error)):
            if start_over is not None:
                start_over()
            act()
            return True
    return False
