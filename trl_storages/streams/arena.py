"""The memory of a storage: named arrays in one mapping, of which parts are given back to the system."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Arena"]

#: Whether the system takes back pages of a mapping.
GIVES_BACK = sys.platform == "linux"
_PAGE = mmap.PAGESIZE
_HUGE = 1 << 21
# An array that is given back in pieces has at least so many, so that less than a thirtieth is wasted.
_PIECES = 64
_NO_RESERVE = 0x4000 if GIVES_BACK else 0  # MAP_NORESERVE: room for many entries is never all taken


class Arena:
    """Named arrays, zero at first, each of which begins a page of one mapping.

    Memory is taken where arrays are written to. What `give_back` names is zero again afterwards and takes
    none; it is given back in pieces, which are huge pages where a lane of the array holds enough of them.

    Args:
        shapes: name -> (dtype, shape).
        lane_bytes: how much of the array that is given back is one lane's; 0 if nothing is.
        file: descriptor of a file to map, which has the arena's size, or gets it; None maps memory.
        writable: whether the arrays are written to; else they are of an existing file.

    Attributes:
        arrays: the arrays by name.
        piece: bytes that are given back at once.
        num_bytes: the size of the mapping.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[Any, tuple[int, ...]]],
        *,
        lane_bytes: int = 0,
        file: int | None = None,
        writable: bool = True,
    ) -> None:
        most = max(lane_bytes // _PIECES, _PAGE)
        self.piece = min(1 << (most.bit_length() - 1), _HUGE)
        align = max(self.piece, _PAGE)
        starts, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = end
            end += -(-max(prod(shape) * np.dtype(dtype).itemsize, 1) // align) * align
        self.num_bytes, self._is_file = end, file is not None
        self._map = self._mapped(file, writable)
        # Pieces of private memory are aligned as addresses, those of a file within it.
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._first = 0 if self._is_file else -address % align
        self._starts = {name: start + self._first for name, start in starts.items()}
        self.arrays = {
            name: np.frombuffer(self._map, dtype, prod(shape), self._starts[name]).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }

    def _mapped(self, file: int | None, writable: bool) -> mmap.mmap:
        if file is not None:
            if writable and os.fstat(file).st_size < self.num_bytes:
                os.ftruncate(file, self.num_bytes)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return mmap.mmap(file, self.num_bytes, access=access)
        size = self.num_bytes + max(self.piece, _PAGE)
        if not GIVES_BACK:
            return mmap.mmap(-1, size)
        found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        # Gathers from huge pages are a third faster, but a lane of few of them could give nothing back.
        found.madvise(mmap.MADV_HUGEPAGE if self.piece == _HUGE else mmap.MADV_NOHUGEPAGE)
        return found

    @classmethod
    def shared(
        cls, shapes: Mapping[str, tuple[Any, tuple[int, ...]]], *, lane_bytes: int = 0
    ) -> tuple[Arena, Path]:
        """Returns an arena that other processes open by the name of its file, and that name."""
        where = "/dev/shm" if os.path.isdir("/dev/shm") else None
        file, name = tempfile.mkstemp(prefix="trl_storages-", dir=where)
        try:
            return cls(shapes, lane_bytes=lane_bytes, file=file), Path(name)
        finally:
            os.close(file)

    def give_back(self, name: str, first: int, end: int) -> None:
        """Gives back the memory of bytes `first` to `end` of an array, as far as they fill pieces."""
        if not GIVES_BACK:
            return
        base = self._starts[name]
        start = base + -(-first // self.piece) * self.piece
        size = base + end // self.piece * self.piece - start
        if size > 0:
            # A file system that can't make holes keeps the bytes.
            with suppress(OSError):
                self._map.madvise(
                    mmap.MADV_REMOVE if self._is_file else mmap.MADV_DONTNEED, start, size
                )
