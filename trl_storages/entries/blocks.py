"""Packs tensors into one block of bytes, for a copy to a device or to another process."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

import torch
from tensordict import NestedKey

from trl_storages.torchrl_compat import copy_all

__all__ = ["PackedTensor", "pack", "unpack"]

#: Key, dtype, shape, and offset in the block in bytes.
PackedTensor = tuple[NestedKey, torch.dtype, torch.Size, int]
# Each tensor begins at a multiple of this many bytes, which suits views of any dtype.
_ALIGNMENT = 16


def pack(
    tensors: Mapping[NestedKey, torch.Tensor], *, pin_memory: bool = False
) -> tuple[torch.Tensor, list[PackedTensor]]:
    """Copies dense tensors into one block on the host.

    Returns:
        the block `[bytes]` uint8, and its directory: one record for each tensor, in order.
    """
    directory: list[PackedTensor] = []
    size = 0
    for key, tensor in tensors.items():
        directory.append((key, tensor.dtype, tensor.shape, size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
    if tensors:
        with torch.no_grad():
            copy_all([*unpack(block, directory).values()], [*tensors.values()])
    return block, directory


def unpack(block: torch.Tensor, directory: list[PackedTensor]) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of a block as views that share its memory."""
    elements = {dtype: block.view(dtype) for dtype in {dtype for _, dtype, _, _ in directory}}
    tensors = {}
    for key, dtype, shape, offset in directory:
        strides = [*accumulate(shape[:0:-1], mul, initial=1)][::-1] if shape else []
        view = elements[dtype].as_strided(shape, strides, offset // dtype.itemsize)
        # `.data` hides the shared memory from autograd: one may be changed while another is needed.
        tensors[key] = view.data
    return tensors
