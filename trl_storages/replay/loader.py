"""Batches drawn beside this thread: ahead, by one thread, or by `DataLoader` workers from a directory.

Letters: B batch.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trl_storages import arguments

__all__ = ["Ahead", "ReplayBatches", "make_loader"]


class Ahead(deque[Future[Any]]):
    """Batches that are drawn before they are asked for, in the order in which they would be drawn.

    Args:
        draw: returns a batch.
        number: how many there are; 0 draws none ahead.
    """

    def __init__(self, draw: Callable[[], Any], number: int) -> None:
        super().__init__()
        self._draw, self.number = draw, number
        # More threads would reorder the draws.
        self._thread = ThreadPoolExecutor(max_workers=1)
        # Taken before the locks of the storage.
        self._lock = threading.RLock()

    def take(self) -> Any:
        """Returns the next batch, and has others drawn."""
        with self._lock:
            batch = self.popleft().result() if self else self._draw()
            while len(self) < self.number:
                self.append(self._thread.submit(self._draw))
            return batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the batches that are being drawn, and has none drawn before the context ends."""
        with self._lock:
            wait(self)
            yield

    def close(self) -> None:
        """Drops all batches, and ends the thread."""
        with self.paused():
            self.clear()
            self._thread.shutdown()


# Workers may be started before the first row is written: seconds until they stop.
_PATIENCE = 60.0


class ReplayBatches(IterableDataset[TensorDictBase]):
    """Endless batches of a storage that another process writes.

    Args:
        open_reader: `generator -> ReplayStorage`; opens it for reading in the process that iterates.
    """

    def __init__(self, open_reader: Callable[..., Any]) -> None:
        super().__init__()
        self._open_reader = open_reader

    def __iter__(self) -> Iterator[TensorDictBase]:
        worker = get_worker_info()
        # DataLoader seeds each worker differently.
        seed = int(torch.randint(2**62, ())) if worker is None else worker.seed
        # Iterations beside each other each need a sampler and transforms of their own.
        open_reader = copy.deepcopy(self._open_reader)
        reader = open_reader(generator=torch.Generator().manual_seed(seed))
        while True:
            yield reader.sample(wait=worker is not None, timeout=_PATIENCE)


def make_loader(
    storage: Any, batch_size: int | None, seed: int | None, options: dict[str, Any]
) -> DataLoader[TensorDictBase]:
    """Returns a `DataLoader` of endless batches; see `ReplayStorage.loader`."""
    batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
    rows = storage.storage
    if rows.path is None or not rows.initialized:
        raise RuntimeError(
            "workers read rows from a directory: make the storage with path=, and write a row first "
            "where the fields are not all known."
        )
    if (batch_size := batch_size or storage.batch_size) is None:
        raise ValueError("batch_size must be known: pass it here, or where the storage is made.")
    sampler = copy.deepcopy(storage.sampler)
    sampler._empty()
    open_reader = partial(
        type(storage).open,
        rows.path,
        mode="r",
        sampler=sampler,
        transform=copy.deepcopy(storage.transform) if len(storage.transform) else None,
        sample_unit=storage.sample_unit,
        batch_size=batch_size,
    )
    # Pinning requires CUDA.
    options["pin_memory"] &= torch.cuda.is_available()
    return DataLoader(
        ReplayBatches(open_reader),
        batch_size=None,
        # The default one would rebuild a TensorDict as a dict.
        collate_fn=torch.nn.Identity(),
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        **options,
    )
