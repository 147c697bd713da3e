"""Batches drawn in worker processes, from a directory that one process writes.

Letters: B batch.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trl_storages import arguments

__all__ = ["ReplayBatches", "batches_of", "make_loader"]

# Workers may be started before the first row is written.
_PATIENCE = 60.0  # seconds


class ReplayBatches(IterableDataset[TensorDictBase]):
    """Endless batches of a storage that another process writes.

    Args:
        open_reader: opens it for reading, in the process that iterates: `generator -> ReplayStorage`.
    """

    def __init__(self, open_reader: Callable[[torch.Generator], Any]) -> None:
        super().__init__()
        self._open_reader = open_reader

    def __getstate__(self) -> dict[str, Any]:
        # Each worker gets a copy, while what is sent to a new process is otherwise shared with it.
        process = get_spawning_popen()
        set_spawning_popen(None)
        try:
            return {"open_reader": pickle.dumps(self._open_reader)}
        finally:
            set_spawning_popen(process)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open_reader = pickle.loads(state["open_reader"])

    def __iter__(self) -> Iterator[TensorDictBase]:
        worker = get_worker_info()
        # DataLoader gives each worker a seed of its own.
        seed = int(torch.randint(2**62, ())) if worker is None else worker.seed
        reader = self._open_reader(torch.Generator().manual_seed(seed))
        # There is nobody to wait for where this is the process that writes.
        patience = 0 if worker is None else _PATIENCE
        while True:
            yield _draw(reader, patience)


def batches_of(
    storage: Any, num_batches: int, batch_size: int | None, epochs: int
) -> Iterator[TensorDictBase]:
    """Returns an iterator over batches of what can `sample`; see `ReplayStorage.batches`."""
    num_batches = arguments.integer("num_batches", num_batches)
    epochs = arguments.integer("epochs", epochs)
    batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
    return (storage.sample(batch_size) for _ in range(num_batches * epochs))


def _draw(reader: Any, patience: float) -> TensorDictBase:
    """Draws a batch; waits for rows, so many seconds, where there are none yet or `empty()` took them."""
    until = time.monotonic() + patience
    while True:
        try:
            return reader.sample()
        except RuntimeError:
            if len(reader) or time.monotonic() >= until:
                raise
        time.sleep(0.01)
        reader.storage.refresh()


def make_loader(
    open_reader: Callable[[torch.Generator], Any],
    *,
    num_workers: int,
    pin_memory: bool,
    seed: int | None,
    **options: Any,
) -> DataLoader[TensorDictBase]:
    """Returns a `DataLoader` of endless batches.

    Args:
        open_reader: as in `ReplayBatches`.
        num_workers: processes that draw; 0 draws in this one.
        pin_memory: whether batches arrive in pinned memory, from which they cross to a GPU by
            themselves; without a GPU it changes nothing.
        seed: of the workers, each of which gets another one; None follows torch's default generator.
        **options: as in `DataLoader`.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        ReplayBatches(open_reader),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory and torch.cuda.is_available(),
        generator=generator,
        **options,
    )


def _as_it_is(batch: TensorDictBase) -> TensorDictBase:
    # The default takes a TensorDict for a dict, and makes it anew.
    return batch
