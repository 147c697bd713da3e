"""Values of an environment loop (arrays, tensors, numbers, lists) as tensors of a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchrl.data.utils import numpy_to_torch_dtype_dict

__all__ = ["NUMPY_TO_TORCH", "TORCH_TO_NUMPY", "as_field", "as_tensor"]

#: TorchRL's table, with the unsigned integers that it lacks.
NUMPY_TO_TORCH: dict[np.dtype, torch.dtype] = {
    **numpy_to_torch_dtype_dict,
    np.dtype(np.uint16): torch.uint16,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.uint64): torch.uint64,
}
TORCH_TO_NUMPY = {theirs: numpys for numpys, theirs in NUMPY_TO_TORCH.items()}


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """Returns `value` as a tensor, sharing its memory if possible.

    Raises:
        TypeError: tensors lack its dtype, such as that of strings and other objects.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    array = np.asarray(value)
    dtype = array.dtype.newbyteorder("=")
    if dtype not in NUMPY_TO_TORCH:
        raise TypeError(f"{name} must be numbers, got the dtype {array.dtype}.")
    # Tensors lack negative strides, foreign byte orders and memory that is only read.
    array = np.require(array, dtype, ["C", "W"])
    return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())


def as_field(
    value: Any, dtype: torch.dtype, shape: Sequence[int], name: str, *, lossy: bool = False
) -> torch.Tensor:
    """Returns `value` as a tensor of this dtype and shape, sharing its memory if possible.

    Arrays and tensors of another dtype are taken if this one holds their values exactly, plain numbers
    and lists if they are of the same kind. Where the last dimension is 1 it may be left out.

    Args:
        value: array, tensor, number or list.
        dtype: of the field.
        shape: that it must have.
        name: for messages.
        lossy: take any real dtype.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or a plain number that the dtype lacks.
    """
    found, is_plain = as_tensor(value, name), not hasattr(value, "dtype")
    if found.dtype is not dtype:
        given, wanted = (TORCH_TO_NUMPY.get(each) for each in (found.dtype, dtype))
        if given is None or wanted is None or lossy:
            is_fine = lossy and given is not None and given.kind != "c"
        else:
            is_fine = np.can_cast(given, wanted, "same_kind" if is_plain else "safe")
        if not is_fine:
            raise TypeError(f"{name} must be {dtype}, got {found.dtype}: convert it.")
        cast = found.to(dtype)
        if (
            is_plain
            and not dtype.is_floating_point
            and not torch.equal(cast.to(found.dtype), found)
        ):
            raise ValueError(f"{name} must be in the range of {dtype}, got {value}.")
        found = cast
    if found.shape != tuple(shape):
        if not (shape and shape[-1] == 1 and found.shape == tuple(shape[:-1])):
            raise ValueError(f"{name} must have the shape {list(shape)}, got {list(found.shape)}.")
        found = found.unsqueeze(-1)
    return found
