"""Interrupts at a line of the code that runs, wherever it is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any


class Interrupter:
    """Raises an error at the n-th line that runs of some code, once.

    Args:
        left: n.
        *folders: packages, or directories of the code.
        error: what is raised.
        lasts: whether it is raised wherever this line runs again; see `resumed_by`.
    """

    def __init__(
        self,
        left: int,
        *folders: ModuleType | str,
        error: type[BaseException] = KeyboardInterrupt,
        lasts: bool = False,
    ) -> None:
        self.left, self.error, self._lasts = left, error, lasts
        self._raised_at: tuple[str, int] | None = None
        self._folders = tuple(
            folder if isinstance(folder, str) else str(Path(folder.__file__ or "").parent)
            for folder in folders
        )

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Interrupter | None:
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        if event == "line":
            self.left -= 1
            at = frame.f_code.co_filename, frame.f_lineno
            if self.left == 0 or (self._lasts and at == self._raised_at):
                self._raised_at = at
                raise self.error
        return self

    def resumed_by(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a call that is watched again, which Python ends with the first error."""

        def watched(*args: Any, **options: Any) -> Any:
            sys.settrace(self)
            return call(*args, **options)

        return watched

    def __enter__(self) -> Interrupter:
        # What is freed meanwhile must not be interrupted in its `__del__`, where nobody would hear of it.
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)
        gc.enable()
