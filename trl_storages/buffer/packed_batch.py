"""Batches on their way to another process: one block of bytes, and a list of what lies where."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from trl_storages.entries.blocks import pack, unpack
from trl_storages.entries.layout import nest

__all__ = ["PackedBatch", "packed"]


class PackedBatch:
    """A TensorDict as one block; where it is unpickled it is a TensorDict again, in its own memory.

    Entries that are no dense tensors, such as text, are pickled as they are.

    Args:
        batch: a TensorDict, whose values are copied.
    """

    def __init__(self, batch: TensorDict) -> None:
        tensors: dict[Any, torch.Tensor] = {}
        nested: list[Any] = []
        self._others: dict[Any, Any] = {}
        held: list[tuple[tuple[str, ...], TensorDict]] = [((), batch)]
        for path, data in held:
            for name, value in data.items():
                key = (*path, name)
                if type(value) is TensorDict and not value.is_empty():
                    held.append((key, value))
                    further = value.batch_size[batch.ndim :]
                    nested += [(key, further)] if further else []
                elif type(value) is torch.Tensor and _is_dense(value, batch.device):
                    tensors[key] = value
                else:
                    self._others[key] = packed(value)
        block, directory = pack(tensors)
        self._block = block.numpy()
        # As bytes: what pickles the batch may do so in Python.
        self._header = pickle.dumps((directory, batch.batch_size, batch.device, tuple(nested)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._block, self._header, self._others)


def packed(value: Any) -> Any:
    """Returns what is sent in the place of a value: each TensorDict in it as one block."""
    if type(value) is TensorDict:
        return PackedBatch(value)
    if isinstance(value, tuple):
        return tuple(map(packed, value))
    # A view would be sent with all that it is a view of.
    return value.clone() if isinstance(value, torch.Tensor | TensorDictBase) else value


def _is_dense(tensor: torch.Tensor, device: torch.device | None) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and tensor.device == (device or torch.device("cpu"))


def _unpacked(block: Any, header: bytes, others: dict[Any, Any]) -> TensorDict:
    directory, size, device, nested = pickle.loads(header)
    # Ray keeps what it has received for others to read, so that it can't be written to.
    words = torch.from_numpy(np.require(block, requirements="W"))
    tensors = unpack(words if device is None else words.to(device), directory)
    batch = nest(tensors, size, device, nested)
    for key, value in others.items():
        batch.set(key, value)
    return batch
