"""A `DataLoader` whose workers sample from a directory while another process writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trl_storages import validation
from trl_storages.buffer.packed_batch import pack_tensordicts

if TYPE_CHECKING:
    from trl_storages.buffer.replay_storage import ReplayStorage

__all__ = ["ReplayBatches", "make_loader"]

# Seconds that a worker waits for the first transition.
_TIMEOUT = 60.0
# Sharing the memory of a batch takes a millisecond at any size; a pipe copies smaller batches faster.
_MIN_SHARED_BYTES = 1 << 20


class ReplayBatches(IterableDataset[TensorDictBase]):
    """Endless batches of a replay buffer that another process writes.

    Args:
        open_reader: `generator -> ReplayStorage`; opens a reader in the process that iterates.
        generator: seeds the reader if there are no workers; None uses torch's default generator.
    """

    def __init__(self, open_reader: Callable[..., Any], generator: torch.Generator | None) -> None:
        super().__init__()
        self._open_reader, self._generator = open_reader, generator

    def __iter__(self) -> Iterator[TensorDictBase]:
        worker = get_worker_info()
        seed = torch.randint(2**62, (), generator=self._generator, device="cpu")
        # DataLoader seeds each worker differently.
        generator = torch.Generator().manual_seed(int(seed) if worker is None else worker.seed)
        # Concurrent iterators need separate samplers and transforms.
        reader = copy.deepcopy(self._open_reader)(generator=generator)
        while True:
            batch = reader.sample(wait=worker is not None, timeout=_TIMEOUT)
            is_sent_packed = worker is not None and batch.bytes() < _MIN_SHARED_BYTES
            yield pack_tensordicts(batch) if is_sent_packed else batch


def make_loader(
    storage: ReplayStorage, batch_size: int | None, seed: int | None, options: dict[str, Any]
) -> DataLoader[TensorDictBase]:
    """Returns a `DataLoader` of endless batches; see `ReplayStorage.loader`."""
    batch_size = validation.optional(validation.integer, "batch_size", batch_size, at_least=1)
    rows = storage.storage
    if rows.path is None or not rows.initialized:
        raise RuntimeError(
            "loader() needs a directory with known fields: pass path=, and write a step or pass fields= "
            "before the call."
        )
    if (batch_size := batch_size or storage.batch_size) is None:
        raise ValueError("batch_size is missing: pass it to loader() or to the replay buffer.")
    sampler = copy.deepcopy(storage.sampler)
    sampler._empty()
    open_reader = partial(
        type(storage).open,
        rows.path,
        mode="r",
        cold=rows.cold,
        sampler=sampler,
        transform=copy.deepcopy(storage.transform) if len(storage.transform) else None,
        sample_unit=storage.sample_unit,
        batch_size=batch_size,
    )
    # Pinning requires CUDA.
    options["pin_memory"] &= torch.cuda.is_available()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    # DataLoader seeds the workers, and a generator cannot be sent to a worker.
    reader_generator = None if options["num_workers"] else generator
    return DataLoader(
        ReplayBatches(open_reader, reader_generator),
        batch_size=None,
        # The default collate function would rebuild a TensorDict as a dict.
        collate_fn=torch.nn.Identity(),
        generator=generator,
        **options,
    )
