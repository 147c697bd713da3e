"""Batches for another process: one block of bytes, and the position of each tensor in it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from trl_storages.entries.device import pack, unpack
from trl_storages.entries.layout import nest

__all__ = ["PackedBatch", "pack_tensordicts"]


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
