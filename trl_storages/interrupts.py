"""Writes that happen as a whole or not at all, even when they are interrupted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["complete", "finish"]

Result = TypeVar("Result")

# Ctrl-C is often pressed more than once.
_ATTEMPTS = 9


def finish(act: Callable[[], Result], start_over: Callable[[], object] | None = None) -> Result:
    """Does what must not stay half done: an interrupt is raised after all of it is done.

    No undo log is kept. A write works out all it needs before it begins, so running it again from the
    beginning completes it, however far it came.

    Args:
        act: idempotent, also after it was interrupted half way.
        start_over: called before `act` is repeated, to restore the counters that it starts from.

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
    """Does what `finish` does after an error, for a caller that has caught it.

    Args:
        error: what interrupted `act`. An error of `act` itself comes again, and is left to the caller.
        act: as in `finish`.
        start_over: as in `finish`.

    Returns:
        whether `act` ran to its end.
    """
    # Timeouts and signal handlers may raise errors of any kind.
    for _ in range(1 if isinstance(error, Exception) else _ATTEMPTS):
        with suppress(type(error)):
            if start_over is not None:
                start_over()
            act()
            return True
    return False
