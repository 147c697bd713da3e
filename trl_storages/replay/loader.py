"""Batches drawn by `DataLoader` workers from a directory that one process writes.

Letters: B batch.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments

__all__ = ["ReplayBatches", "make_loader"]

# Workers may be started before the first row is written: seconds until they stop.
_PATIENCE = 60.0


class ReplayBatches(IterableDataset[TensorDictBase]):
    """Endless batches of a storage that another process writes.

    Args:
        open_reader: `generator -> ReplayStorage`; opens it read-only in the iterating process.
    """

    def __init__(self, open_reader: Callable[..., Any]) -> None:
        super().__init__()
        self._open_reader = open_reader

    def __getstate__(self) -> dict[str, Any]:
        # Tensors sent to a spawned process would be shared; each worker must get a copy.
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
        # DataLoader seeds each worker differently.
        seed = int(torch.randint(2**62, ())) if worker is None else worker.seed
        # Concurrent iterators each need their own sampler and transforms.
        reader = copy.deepcopy(self._open_reader)(generator=torch.Generator().manual_seed(seed))
        # In the writing process waiting would be futile.
        patience = 0 if worker is None else _PATIENCE
        while True:
            yield _draw(reader, patience)


def _draw(reader: Any, patience: float) -> TensorDictBase:
    """Draws a batch; waits up to `patience` seconds until there are rows, or whole episodes, to draw."""
    start, is_ready = time.monotonic(), False
    while True:
        try:
            return reader.sample()
        except RuntimeError:
            # If a batch can be drawn, before the try and after it, there is another error. Before alone:
            # the writer has emptied the storage in between.
            if time.monotonic() - start >= patience or (is_ready and reader.can_sample()):
                raise
        time.sleep(0.01)
        is_ready = reader.can_sample()


def make_loader(
    storage: Any,
    num_workers: int,
    batch_size: int | None,
    fetch_every: int,
    pin_memory: bool,
    seed: int | None,
    options: dict[str, Any],
) -> DataLoader[TensorDictBase]:
    """Returns a `DataLoader` of endless batches; see `ReplayStorage.loader`."""
    num_workers = arguments.integer("num_workers", num_workers)
    fetch_every = arguments.integer("fetch_every", fetch_every, at_least=1)
    batch_size = arguments.optional(arguments.integer, "batch_size", batch_size, at_least=1)
    pin_memory = arguments.flag("pin_memory", pin_memory)
    seed = arguments.optional(arguments.integer, "seed", seed)
    if storage.storage.files is None:
        raise RuntimeError(
            "workers read rows from a directory, and these are in memory (or none was written yet): "
            "make the storage with path=, or scratch_dir= and fields=."
        )
    if (batch_size := batch_size or storage.batch_size) is None:
        raise ValueError("batch_size must be known: pass it here, or where the storage is made.")
    with storage._replay_lock, storage._write_lock:
        sampler = _without_rows(storage.sampler)
    open_reader = partial(
        storage._open_reader,
        storage.storage.scratch_dir,
        sampler=sampler,
        transform=storage.transform if len(storage.transform) else None,
        sample_unit=storage.sample_unit,
        collate_fn=storage._collate_fn if storage._collates else None,
        batch_size=batch_size,
        fetch_every=fetch_every,
    )
    return DataLoader(
        ReplayBatches(open_reader),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        # Pinning requires CUDA.
        pin_memory=pin_memory and torch.cuda.is_available(),
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        **options,
    )


def _without_rows(sampler: Any) -> Sampler:
    """Returns a copy of a sampler without rows and without a generator."""
    generator, sampler._rng = sampler._rng, None
    try:
        copied = copy.deepcopy(sampler)
    finally:
        sampler._rng = generator
    copied._empty()
    return copied


def _as_it_is(batch: TensorDictBase) -> TensorDictBase:
    # The default collate function would treat a TensorDict as a dict and rebuild it.
    return batch
