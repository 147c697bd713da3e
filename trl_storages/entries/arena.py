"""The memory of a buffer: named arrays in one mapping, of which unused parts are released."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

__all__ = ["Arena"]

#: Whether the system can release pages of a mapping, and reserve room for the pages of a file.
CAN_RELEASE = sys.platform == "linux"
_PAGE = mmap.PAGESIZE
_HUGE = 1 << 21
# A lane has at least this many pieces that are released separately, so that few are partly filled.
_PIECES = 32
# Elements that are copied at once.
_CHUNK = 1 << 16
# For lanes of at most this many bytes the room of the whole file is reserved at once.
_SHORT = 1 << 20
_POPULATE = 23  # MADV_POPULATE_WRITE
_COLLAPSE = 25  # MADV_COLLAPSE: turns existing pages into huge pages
_BLOCK = 512  # bytes of a block in `st_blocks`
_NO_RESERVE = 0x4000 if CAN_RELEASE else 0  # MAP_NORESERVE, because most of the room is never used


class Arena:
    """Named arrays in one mapping. Each begins on a page, and all values are zero at first.

    Only pages that were written take memory. Bytes that `release` has released are zero and take none.
    Memory is released in pieces, which are huge pages if a lane holds enough of them.

    Args:
        shapes: name -> (dtype, shape).
        lane_bytes: bytes of one lane in the arrays that are released; 0 if none is.
        file: descriptor of a file to map, empty or of the size of the arena; None maps memory.
        writable: whether writes to the arrays reach the file, or stay in this process.
        lazy: for a file on a disk, names of the arrays for which `reserve` reserves room later, unless
            lanes are short; room for all other arrays is reserved at once. None for a file in memory.

    Raises:
        OSError: the disk is full.
        ValueError: the file has a different size.

    Attributes:
        arrays: the arrays by name.
        piece: bytes that are released at once.
        num_bytes: the size of all arrays.
        is_reserved: whether room must be reserved before writes.
        is_cold: whether the system reads only the pages that `will_need` names or that are used.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[Any, tuple[int, ...]]],
        *,
        lane_bytes: int = 0,
        file: int | None = None,
        writable: bool = True,
        lazy: Sequence[str] | None = None,
    ) -> None:
        sizes = {name: prod(shape) * np.dtype(it).itemsize for name, (it, shape) in shapes.items()}
        piece_bytes = max(lane_bytes // _PIECES, _PAGE)
        self.piece = min(1 << (piece_bytes.bit_length() - 1), _HUGE)
        starts, self.num_bytes = {}, 0
        for name, size in sizes.items():
            starts[name] = self.num_bytes
            self.num_bytes += -(-max(size, 1) // self.piece) * self.piece
        self._opened_by: tuple[Any, int] | None = None
        self._file: Any = None
        # In memory the first array begins at an address that is a multiple of a piece.
        self._is_memory = lazy is None
        total = self.num_bytes + 2 * self.piece * self._is_memory
        if file is not None:
            self._file = os.dup(file)
            weakref.finalize(self, os.close, self._file)
            size = os.fstat(file).st_size
            if size not in (0, total):
                raise ValueError(f"the file must have {total:,} bytes, got {size:,}")
            if not size:
                os.ftruncate(file, total)
        # With short lanes there may be thousands of them, and each would take its own system calls.
        is_lazy = not self._is_memory and lane_bytes > _SHORT
        self.is_reserved = file is not None and (self.piece == _HUGE or is_lazy)
        if writable and lazy is not None and CAN_RELEASE:
            for name in sizes.keys() - (lazy if is_lazy else ()):
                os.posix_fallocate(self._file, starts[name], sizes[name])
        self._map, first = self._mapped(writable)
        self.is_cold = False
        if file is not None and not self._is_memory:
            memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
            self.read_cold(os.fstat(file).st_blocks * _BLOCK > memory)
        self._starts = {name: start + first for name, start in starts.items()}
        self.arrays = {
            name: np.frombuffer(self._map, dtype, prod(shape), self._starts[name]).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }

    def _mapped(self, writable: bool) -> tuple[mmap.mmap, int]:
        """Returns a mapping, and the byte of the mapping at which the first array begins.

        Pieces of memory are aligned as addresses; pieces of a file are aligned within the file, because
        file systems with huge pages align both. Gathers from huge pages are a third faster.
        """
        size = self.num_bytes + self.piece * self._is_memory
        if self._file is None:
            if not CAN_RELEASE:
                return mmap.mmap(-1, size), 0
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            mapping = mmap.mmap(-1, size, flags=flags)
            # A lane of few huge pages could release nothing.
            pages = mmap.MADV_HUGEPAGE if self.piece == _HUGE else mmap.MADV_NOHUGEPAGE
            mapping.madvise(pages)
            return mapping, -_address(mapping) % self.piece
        # Compiled loops accept only writable arrays, so a reader maps private copies of pages.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _NO_RESERVE
        if not self._is_memory:
            return mmap.mmap(self._file, size, flags), 0
        # The system chooses the address of the mapping, and usually the same one the second time.
        offset = _address(mmap.mmap(self._file, size, flags)) % self.piece
        return mmap.mmap(self._file, size, flags, offset=offset), self.piece - offset

    @classmethod
    def shared(cls, shapes: Any, lane_bytes: int = 0, name: str = "") -> Arena:
        """Returns an arena whose memory forked processes share; spawned processes receive it pickled.

        `name` is the path of the memory if another process has created the arena.
        """
        if not CAN_RELEASE:
            return cls(shapes, lane_bytes=lane_bytes)  # mappings are shared there
        file = os.open(name, os.O_RDWR) if name else os.memfd_create("trl_storages")
        try:
            arena = cls(shapes, lane_bytes=lane_bytes, file=file)
        finally:
            os.close(file)
        arena._opened_by = shapes, lane_bytes
        return arena

    def __reduce__(self) -> tuple[Any, ...]:
        if self._opened_by is None:
            raise TypeError("only shared memory on Linux can be pickled: fork the process instead.")
        # The receiver opens the path while this process lives.
        return self.shared, (*self._opened_by, f"/proc/{os.getpid()}/fd/{self._file}")

    def copy_from(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies the values of arrays with the same names; zeros are not written and take no memory."""
        for name, array in arrays.items():
            target, source = self.arrays[name].ravel(), array.ravel()
            for start in range(0, len(source), _CHUNK):
                chunk = source[start : start + _CHUNK]
                if chunk.any():
                    target[start : start + _CHUNK] = chunk
            self._make_huge(self._starts[name], self._starts[name] + array.nbytes)

    def reserve(self, name: str, first: int, end: int) -> None:
        """Reserves room for bytes `first` to `end` of an array in a file.

        Without a reservation, a write to a new page of a file kills the process if the disk is full.

        Raises:
            OSError: the disk is full.
        """
        if not CAN_RELEASE:
            return
        # Whole huge pages, because a part of one would be reserved as small pages.
        unit, base = self.piece if self.piece == _HUGE else 1, self._starts[name]
        start, end = base + first // unit * unit, base + -(-end // unit) * unit
        if self._is_memory:
            self._make_huge(start, end, touch=True)
        else:
            os.posix_fallocate(self._file, start, end - start)
            page = start // _PAGE * _PAGE
            # Page faults one by one would take longer than the writes.
            with suppress(OSError):
                self._map.madvise(_POPULATE, page, end - page)

    def _make_huge(self, start: int, end: int, touch: bool = False) -> None:
        """Turns the pages of shared memory into huge pages; `touch` creates missing pages first."""
        for piece in range(start, end, _HUGE) if self.piece == _HUGE else ():
            with suppress(OSError):  # no page exists there, or the system has no huge pages
                if touch:
                    self._map.madvise(_POPULATE, piece, _PAGE)
                self._map.madvise(_COLLAPSE, piece, _HUGE)

    def read_cold(self, is_cold: bool) -> None:
        """Sets whether most reads come from the disk; by default true for a file larger than memory."""
        if not CAN_RELEASE:
            return
        self.is_cold = is_cold
        pages = mmap.MADV_NOHUGEPAGE if is_cold or self.piece < _HUGE else mmap.MADV_HUGEPAGE
        for advice in (mmap.MADV_RANDOM if is_cold else mmap.MADV_NORMAL, pages):
            with suppress(OSError):
                self._map.madvise(advice)

    def will_need(self, name: str, first: np.ndarray, num_bytes: int) -> None:
        """Prefetches `num_bytes` bytes of an array from each of `first` `[B]`, concurrently."""
        begin, size = (first + self._starts[name]) // _PAGE * _PAGE, num_bytes + _PAGE
        for start in np.unique(begin).tolist():
            with suppress(OSError):  # beyond the end
                self._map.madvise(mmap.MADV_WILLNEED, start, size)

    def flush(self) -> None:
        """Waits until all writes are on the disk."""
        self._map.flush()

    def release(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Releases the whole pieces within `ranges` of bytes of an array."""
        if not CAN_RELEASE:
            return
        piece, start = self.piece, self._starts[name]
        advice = mmap.MADV_DONTNEED if self._file is None else mmap.MADV_REMOVE
        with suppress(OSError):  # a file system without holes keeps the bytes
            for first, end in ranges:
                begin = -(-first // piece) * piece
                size = end // piece * piece - begin
                if size > 0:
                    self._map.madvise(advice, start + begin, size)


def _address(mapping: mmap.mmap) -> int:
    return np.frombuffer(mapping, np.uint8).ctypes.data
