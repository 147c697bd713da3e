"""Zeroed memory for tables that are filled little by little and read at random."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import numpy as np
import torch

__all__ = ["zeros"]

_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}
# Smaller tables are not worth a mapping of their own.
_LEAST_SPARSE = 1 << 18  # bytes
# Windows has none of them.
_ANONYMOUS, _PRIVATE, _SMALL_PAGES = (
    getattr(mmap, name, None) for name in ("MAP_ANONYMOUS", "MAP_PRIVATE", "MADV_NOHUGEPAGE")
)


def zeros(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.int64, sparse: bool = False
) -> torch.Tensor:
    """Returns int32 or int64 zeros of a shape.

    Args:
        *shape: of the table.
        device: where it is.
        dtype: of its elements.
        sparse: whether most of it is never written to, so that it must take no memory on the CPU.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if sparse and num_bytes >= _LEAST_SPARSE and _ANONYMOUS and _PRIVATE:
        return _untouched(num_bytes, _ANONYMOUS | _PRIVATE).view(dtype).view(shape)
    # Unlike torch's, NumPy's zeros take no memory before they are written to, and use huge pages: looking
    # up small pages takes a seventh of a gather's time.
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype]))


def _untouched(num_bytes: int, flags: int) -> torch.Tensor:
    """Returns zeros that take memory page by page, as they are written to, and no huge pages."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there must be {num_bytes:,} bytes of memory, got {error}") from error
    if _SMALL_PAGES is not None:
        # Some kernels have no huge pages.
        with suppress(OSError):
            memory.madvise(_SMALL_PAGES)
    return torch.frombuffer(memory, dtype=torch.uint8)
