"""Draws batches ahead, in one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

__all__ = ["Ahead"]


class Ahead:
    """Batches that are drawn before they are asked for, in the order in which they would be drawn.

    Args:
        draw: returns a batch.
        number: how many there are; 0 draws none ahead.
    """

    def __init__(self, draw: Callable[[], Any], number: int) -> None:
        self._draw, self.number = draw, number
        self._drawn: deque[Future[Any]] = deque()
        # More threads would reorder the draws.
        self._thread = ThreadPoolExecutor(max_workers=1)
        # Taken before the locks of the storage.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._drawn)

    def take(self) -> Any:
        """Returns the next batch, and has others drawn."""
        with self._lock:
            batch = self._drawn.popleft().result() if self._drawn else self._draw()
            while len(self._drawn) < self.number:
                self._drawn.append(self._thread.submit(self._draw))
            return batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the batches that are being drawn, and has none drawn before the context ends."""
        with self._lock:
            wait(self._drawn)
            yield

    def drop(self) -> None:
        """Drops all batches; call it while they are paused."""
        self._drawn.clear()

    def close(self) -> None:
        """Drops all batches, and ends the thread."""
        with self.paused():
            self.drop()
            self._thread.shutdown()
