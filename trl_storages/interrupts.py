"""What an interrupt can't leave half done: writes, which are completed, and calls that it waits for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

__all__ = ["complete", "finish", "undisturbed"]

Result = TypeVar("Result")

# Ctrl-C is often pressed more than once.
_ATTEMPTS = 9


def finish(act: Callable[[], Result]) -> Result:
    """Runs `act` to completion; an interrupt is re-raised afterwards.

    No undo log is needed: a write prepares all its inputs before it starts, so running it again from
    the start completes it, wherever it was interrupted.

    Args:
        act: must be idempotent, also after an interruption.

    Returns:
        the result of `act`.

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
        complete(error, act)
        raise


def complete(error: BaseException, act: Callable[[], object]) -> bool:
    """Retries `act` as `finish` does, for a caller that has caught the error.

    Args:
        error: what interrupted `act`. If `act` itself raises errors, this returns False.
        act: as in `finish`.

    Returns:
        whether `act` completed.
    """
    # An exception may have come from outside too, of a timeout or a signal handler; a second one has not.
    num_errors = int(isinstance(error, Exception))
    for _ in range(_ATTEMPTS):
        if num_errors > 1:
            break
        try:
            act()
            return True
        except Exception:
            num_errors += 1
        except BaseException:
            pass
    return False


def undisturbed(call: Callable[..., Result]) -> Callable[..., Result]:
    """Makes signals that come during a call wait for its end, where their handlers then raise.

    For calls that do not last, and lose what is raised within them.
    """

    @wraps(call)
    def waited_for(*args: Any, **kwargs: Any) -> Result:
        # Handlers run in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return call(*args, **kwargs)
        came: list[tuple[int, Any]] = []
        with ExitStack() as after:
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)):
                    after.callback(_handle, came, number, handler)
                    signal.signal(number, lambda *which: came.append(which))
            return call(*args, **kwargs)

    return waited_for


def _handle(came: list[tuple[int, Any]], number: int, handler: Callable[[int, Any], Any]) -> None:
    """Gives a signal its handler back, and calls it if the signal came."""
    signal.signal(number, handler)
    for which, frame in came:
        if which == number:
            handler(number, frame)
