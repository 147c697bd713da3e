"""Zeroed memory for tables that are filled gradually and read at random."""

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
# Missing on Windows.
_ANONYMOUS, _PRIVATE, _SMALL_PAGES = (
    getattr(mmap, name, None) for name in ("MAP_ANONYMOUS", "MAP_PRIVATE", "MADV_NOHUGEPAGE")
)


def zeros(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.int64, sparse: bool = False
) -> torch.Tensor:
    """Returns int32 or int64 zeros.

    Args:
        *shape: of the table.
        device: of the table.
        dtype: of its elements.
        sparse: whether most of it is never written to, and must then take no memory on the CPU.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if sparse and num_bytes >= _LEAST_SPARSE and _ANONYMOUS and _PRIVATE:
        return _untouched(num_bytes, _ANONYMOUS | _PRIVATE).view(dtype).view(shape)
    # Unlike torch's, NumPy's zeros take no memory until they are written to, and use huge pages: lookups
    # of small pages take a seventh of a gather's time.
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype]))


def _untouched(num_bytes: int, flags: int) -> torch.Tensor:
    """Returns zeros in small pages, each of which takes memory when it is first written to."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there must be {num_bytes:,} bytes of memory, got {error}") from error
    if _SMALL_PAGES is not None:
        # Some kernels are built without huge pages.
        with suppress(OSError):
            memory.madvise(_SMALL_PAGES)
    return torch.frombuffer(memory, dtype=torch.uint8)
