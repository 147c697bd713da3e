"""Memory for tables and batches, and copies of them to another device."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

__all__ = ["new_batch", "on_device", "sendable", "zeros"]

_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}
# Smaller tables are not worth a mapping of their own.
_LEAST_SPARSE = 1 << 18  # bytes
# From this size on NumPy asks for huge pages, and the C library may return blocks to the system, which
# has to zero them for the next batch.
_LEAST_KEPT = 1 << 22  # bytes
_LINE = 64  # bytes of a cache line
# Blocks of at least `_LEAST_KEPT` bytes of batches that are gone, by size. A batch has two for stacks
# and next stacks; so many are kept of a size, and so many sizes.
_spare: dict[int, list[np.ndarray]] = {}
_MOST_KEPT = 2
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


def new_batch(
    shape: Sequence[int],
    dtype: torch.dtype = torch.int64,
    device: torch.device | None = None,
    *,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Returns an uninitialised tensor that is about to be filled.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        device: of the tensor; None is the CPU.
        pin_memory: whether it is pinned.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    is_on_cpu = device is None or device.type == "cpu"
    if not is_on_cpu or pin_memory or num_bytes < _LEAST_KEPT:
        # A list is parsed faster than a torch.Size.
        return torch.empty([*shape], dtype=dtype, device=device, pin_memory=pin_memory)
    # Taking small pages from the system can take longer than filling them, and torch asks for no others.
    memory = _lent(num_bytes + _LINE)
    start = -memory.ctypes.data % _LINE
    found = torch.from_numpy(memory)[start : start + num_bytes]
    return found.view(dtype).view(tuple(shape))


def _lent(num_bytes: int) -> np.ndarray:
    """Returns memory for a batch, that of an earlier one if nobody uses it any more."""
    try:
        memory = _spare[num_bytes].pop()
    except (KeyError, IndexError):
        memory = np.empty(num_bytes, np.uint8)
    # The view is freed with the last tensor of the batch.
    lent = memory[:]
    weakref.finalize(lent, _keep, memory).atexit = False
    return lent


def _keep(memory: np.ndarray) -> None:
    """Keeps the memory of a batch that is gone for the next one of its size."""
    if memory.nbytes not in _spare and len(_spare) == _MOST_KEPT:
        # Batches have other sizes now.
        _spare.clear()
    spare = _spare.setdefault(memory.nbytes, [])
    if len(spare) < _MOST_KEPT:
        spare.append(memory)


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


def sendable(device: torch.device) -> bool:
    """Whether memory must be pinned for copies to the device to be asynchronous."""
    return device.type == "cuda" and torch.cuda.is_available()


def on_device(
    values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns a tensor on a device; on the way from the host to a GPU nothing waits for either.

    `Tensor.to` waits until the GPU has done all that is queued, unless the memory is pinned. torch keeps
    pinned memory until the copy is made.

    Args:
        values: the tensor.
        device: the device.
        dtype: of the result; None keeps it.
    """
    if values.device == device and dtype in (None, values.dtype):
        return values  # A call of torch that does nothing takes longer.
    if values.device.type == "cpu" and sendable(device):
        return values.to(dtype).pin_memory().to(device, non_blocking=True)
    return values.to(device, dtype)
