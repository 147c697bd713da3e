"""Prefetched batches: a background thread samples them before they are needed."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Prefetcher"]


class Prefetcher(deque[SimpleQueue[Any]]):
    """Batches that a background thread samples, in the order in which `sample` would sample them.

    Each item is a queue that receives one batch. An interrupt may come between any two lines of Python.
    Therefore everything that waits is a queue or a lock written in C, and an interrupt loses at most one
    batch.

    Args:
        sample: returns a batch.
        number: how many batches are prefetched; 0 prefetches none.
    """

    def __init__(self, sample: Callable[[], Any], number: int) -> None:
        super().__init__()
        self._sample, self.number = sample, number
        # Is taken before the locks of the replay buffer.
        self._lock = threading.RLock()
        # The process that the thread belongs to, and the requests that the thread works through. One
        # thread only, as several would change the order of the batches.
        self._process, self._requests = -1, SimpleQueue[Any]()
        self._stop: Callable[[], Any] = self.clear

    def take(self) -> Any:
        """Returns the next batch, and requests further ones.

        Raises:
            Exception: the error that sampling this batch raised.
        """
        with self._lock:
            if self._process != os.getpid():
                self._start()
            # The queue leaves the deque first: no later call waits for a batch that was received here.
            batch, error = self.popleft().get() if self else (self._sample(), None)
            if error is not None:
                raise error
            while len(self) < self.number:
                self.append(self._request(self._sample))
            return batch

    def wait(self) -> None:
        """Waits until all requested batches are sampled."""
        with self._lock:
            if self._process == os.getpid():
                self._request(_do_nothing).get()

    def close(self) -> None:
        """Drops all batches, and ends the thread."""
        with self._lock:
            self.clear()
            self._process = -1
            self._stop()

    def _request(self, function: Callable[[], Any]) -> SimpleQueue[Any]:
        """Has the thread call a function; returns the queue that receives the result."""
        answer = SimpleQueue[Any]()
        self._requests.put((function, answer))
        return answer

    def _start(self) -> None:
        """Starts the thread, also in a forked process, which receives none of the earlier batches."""
        requests = SimpleQueue[Any]()
        thread = threading.Thread(target=_answer, args=(requests,), daemon=True)
        thread.start()
        self.clear()
        self._requests = requests
        # The thread also ends when the buffer is garbage collected, and before the interpreter exits.
        self._stop = weakref.finalize(self, _end, requests, thread, os.getpid())
        self._process = os.getpid()


def _do_nothing() -> None:
    """Is called after all earlier requests."""


def _answer(requests: SimpleQueue[Any]) -> None:
    """Answers each request by (result, None) or (None, error), until a request is None."""
    while (request := requests.get()) is not None:
        function, answer = request
        try:
            answer.put((function(), None))
        except BaseException as error:
            answer.put((None, error))
        # A waiting thread must not keep the buffer alive.
        del function, answer, request


def _end(requests: SimpleQueue[Any], thread: threading.Thread, process: int) -> None:
    """Ends the thread of a process after its pending requests."""
    requests.put(None)
    if thread is not threading.current_thread() and process == os.getpid():
        thread.join()
