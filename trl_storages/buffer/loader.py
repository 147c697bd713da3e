"""Batches for other processes: packed into one block, and sampled by the workers of a `DataLoader`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trl_storages import validation
from trl_storages.entries.device import pack, unpack
from trl_storages.entries.layout import nest

if TYPE_CHECKING:
    from trl_storages.buffer.replay_storage import ReplayStorage

__all__ = ["PackedBatch", "ReplayBatches", "make_loader", "pack_tensordicts"]

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
    packed = storage.storage
    if packed.path is None or not packed.initialized:
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
        packed.path,
        mode="r",
        cold=packed.cold,
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


class PackedBatch:
    """A TensorDict as one block. Unpickling returns a TensorDict again, in new memory.

    Entries that are no dense tensors, such as text, are pickled as they are.

    Args:
        batch: a TensorDict, whose values are copied.
    """

    def __init__(self, batch: TensorDict) -> None:
        tensors: dict[Any, torch.Tensor] = {}
        nested: list[Any] = []
        self._unpacked: dict[Any, Any] = {}
        queue: list[tuple[tuple[str, ...], TensorDict]] = [((), batch)]
        for path, data in queue:
            for name, value in data.items():
                key = (*path, name)
                if type(value) is TensorDict and not value.is_empty():
                    queue.append((key, value))
                    extra_sizes = value.batch_size[batch.ndim :]
                    nested += [(key, extra_sizes)] if extra_sizes else []
                elif type(value) is torch.Tensor and _is_dense(value, batch.device):
                    tensors[key] = value
                else:
                    self._unpacked[key] = pack_tensordicts(value)
        block, positions = pack(tensors)
        self._block = block.numpy()
        # As bytes, because a pickler that is written in Python is slow.
        self._header = pickle.dumps((positions, batch.batch_size, batch.device, tuple(nested)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._block, self._header, self._unpacked)


def pack_tensordicts(value: Any) -> Any:
    """Returns a value in which each TensorDict is packed into one block."""
    if type(value) is TensorDict:
        return PackedBatch(value)
    if isinstance(value, tuple):
        return tuple(map(pack_tensordicts, value))
    # Pickling a view would send the whole tensor to which the view belongs.
    return value.clone() if isinstance(value, torch.Tensor | TensorDictBase) else value


def _is_dense(tensor: torch.Tensor, device: torch.device | None) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and tensor.device == (device or torch.device("cpu"))


def _unpack(block: np.ndarray, header: bytes, unpacked: dict[Any, Any]) -> TensorDict:
    positions, size, device, nested = pickle.loads(header)
    # Ray shares received arrays between processes, so they are read-only.
    words = torch.from_numpy(np.require(block, requirements="W"))
    tensors = unpack(words if device is None else words.to(device), positions)
    batch = nest(tensors, size, device, nested)
    for key, value in unpacked.items():
        batch.set(key, value)
    return batch
