"""The memory of a storage: named arrays in one mapping, of which parts are given back to the system."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

__all__ = ["Arena"]

#: Whether the system takes back pages of a mapping, and reserves room for those of a file.
GIVES_BACK = sys.platform == "linux"
_PAGE = mmap.PAGESIZE
_HUGE = 1 << 21
# A lane of the array that is given back has at least so many pieces, so that few are partly filled.
_PIECES = 32
# So many elements are copied at once.
_CHUNK = 1 << 16
# Lanes of so many bytes at most are short: all of their file has room on the disk.
_SHORT = 1 << 20
_POPULATE = 23  # MADV_POPULATE_WRITE
_COLLAPSE = 25  # MADV_COLLAPSE: what is there becomes huge pages
_BLOCK = 512  # bytes of a block of a file, as the system counts them
_NO_RESERVE = 0x4000 if GIVES_BACK else 0  # MAP_NORESERVE: room for many entries is never all taken


class Arena:
    """Named arrays, zero at first, each of which begins a page of one mapping.

    Memory is taken where arrays are written to. What `give_back` names is zero again afterwards and takes
    none; it is given back in pieces, which are huge pages where a lane of the array holds enough of them.

    Args:
        shapes: name -> (dtype, shape).
        lane_bytes: how much of the array that is given back is one lane's; 0 if nothing is.
        file: descriptor of a file to map, which is empty or has the arena's size; None maps memory.
        writable: whether what is written to the arrays reaches the file, or stays with this process.
        lazy: of a file that is written to, names of arrays that have room on the disk as far as it was
            reserved, unless lanes are short; all else has room at once. None is of a file that is memory.

    Raises:
        OSError: the disk is full.
        ValueError: the file has another size.

    Attributes:
        arrays: the arrays by name.
        piece: bytes that are given back at once.
        num_bytes: the size of all arrays.
        is_reserved: whether room is to be reserved ahead of what is written.
        is_cold: whether nothing of the file is read ahead but what `will_need` names.
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
        most = max(lane_bytes // _PIECES, _PAGE)
        self.piece = min(1 << (most.bit_length() - 1), _HUGE)
        starts, self.num_bytes = {}, 0
        for name, size in sizes.items():
            starts[name] = self.num_bytes
            self.num_bytes += -(-max(size, 1) // self.piece) * self.piece
        self._opened_by: tuple[Any, int] | None = None
        self._file: Any = None
        # Memory begins at a piece, wherever it is mapped.
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
        # To reserve for thousands of lanes, and to give back, takes a call of the system for each.
        is_lazy = not self._is_memory and lane_bytes > _SHORT
        self.is_reserved = file is not None and (self.piece == _HUGE or is_lazy)
        if writable and lazy is not None and GIVES_BACK:
            for name in sizes.keys() - (lazy if is_lazy else ()):
                os.posix_fallocate(self._file, starts[name], sizes[name])
        self._map, first = self._mapped(writable)
        self.is_cold = False
        if file is not None and not self._is_memory:
            taken, memory = os.fstat(file).st_blocks * _BLOCK, os.sysconf("SC_PHYS_PAGES") * _PAGE
            self.read_cold(taken > memory)
        self._starts = {name: start + first for name, start in starts.items()}
        self.arrays = {
            name: np.frombuffer(self._map, dtype, prod(shape), self._starts[name]).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }

    def _mapped(self, writable: bool) -> tuple[mmap.mmap, int]:
        """Returns a mapping, and where in it the first array begins.

        Pieces of memory are aligned as addresses, those of a file within it, where file systems that have
        huge pages see to both. Gathers from those are a third faster.
        """
        size = self.num_bytes + self.piece * self._is_memory
        if self._file is None:
            if not GIVES_BACK:
                return mmap.mmap(-1, size), 0
            found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            # A lane of few huge pages could give nothing back.
            pages = mmap.MADV_HUGEPAGE if self.piece == _HUGE else mmap.MADV_NOHUGEPAGE
            found.madvise(pages)
            return found, -_address(found) % self.piece
        # Compiled loops take arrays that can be written. Pages that are not are those of the file.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | _NO_RESERVE
        if not self._is_memory:
            return mmap.mmap(self._file, size, flags), 0
        # The system maps a file of memory anywhere, but as a rule twice to the same place.
        offset = _address(mmap.mmap(self._file, size, flags)) % self.piece
        return mmap.mmap(self._file, size, flags, offset=offset), self.piece - offset

    @classmethod
    def shared(cls, shapes: Any, lane_bytes: int = 0, name: str = "") -> Arena:
        """Returns an arena whose memory forked processes share; it is pickled for spawned ones.

        `name` is that of the memory of an arena of another process.
        """
        if not GIVES_BACK:
            return cls(shapes, lane_bytes=lane_bytes)  # what is mapped there is shared
        file = os.open(name, os.O_RDWR) if name else os.memfd_create("trl_storages")
        try:
            arena = cls(shapes, lane_bytes=lane_bytes, file=file)
        finally:
            os.close(file)
        arena._opened_by = shapes, lane_bytes
        return arena

    def __reduce__(self) -> tuple[Any, ...]:
        if self._opened_by is None:
            raise TypeError("memory can't be pickled unless it is shared, on Linux: fork instead.")
        # Whoever opens it does so while this process lives.
        return self.shared, (*self._opened_by, f"/proc/{os.getpid()}/fd/{self._file}")

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies arrays of the same names, but for what is zero, which takes no memory."""
        for name, array in arrays.items():
            to, source = self.arrays[name].ravel(), array.ravel()
            for start in range(0, len(source), _CHUNK):
                part = source[start : start + _CHUNK]
                if part.any():
                    to[start : start + _CHUNK] = part
            self._make_huge(self._starts[name], self._starts[name] + array.nbytes)

    def reserve(self, name: str, first: int, end: int) -> None:
        """Reserves room for bytes `first` to `end` of an array in a file.

        A write to a page of a file that has none kills the process when the disk is full.

        Raises:
            OSError: the disk is full.
        """
        if not GIVES_BACK:
            return
        # Whole huge pages, else they are made of small ones; at the end of an array to its end.
        unit, base = self.piece if self.piece == _HUGE else 1, self._starts[name]
        start, end = base + first // unit * unit, base + -(-end // unit) * unit
        if self._is_memory:
            self._make_huge(start, end, touch=True)
        else:
            os.posix_fallocate(self._file, start, end - start)
            page = start // _PAGE * _PAGE
            # Faults that come one by one take longer than the writes.
            with suppress(OSError):
                self._map.madvise(_POPULATE, page, end - page)

    def _make_huge(self, start: int, end: int, touch: bool = False) -> None:
        """Makes huge pages of what is there of shared memory; with `touch` also of what is not."""
        for piece in range(start, end, _HUGE) if self.piece == _HUGE else ():
            with suppress(OSError):  # where there is nothing, or the system has none
                if touch:
                    self._map.madvise(_POPULATE, piece, _PAGE)
                self._map.madvise(_COLLAPSE, piece, _HUGE)

    def read_cold(self, is_cold: bool) -> None:
        """Says whether most of the file is read from the disk: by default, if memory is smaller."""
        if not GIVES_BACK:
            return
        self.is_cold = is_cold
        pages = mmap.MADV_NOHUGEPAGE if is_cold or self.piece < _HUGE else mmap.MADV_HUGEPAGE
        for how in (mmap.MADV_RANDOM if is_cold else mmap.MADV_NORMAL, pages):
            with suppress(OSError):
                self._map.madvise(how)

    def will_need(self, name: str, first: np.ndarray, num_bytes: int) -> None:
        """Has the system read so many bytes from each of `first` `[B]` of an array, all at once."""
        begin, size = (first + self._starts[name]) // _PAGE * _PAGE, num_bytes + _PAGE
        for start in np.unique(begin).tolist():
            with suppress(OSError):  # beyond the end
                self._map.madvise(mmap.MADV_WILLNEED, start, size)

    def flush(self) -> None:
        """Waits until what was written is on the disk."""
        self._map.flush()

    def give_back(self, name: str, firsts: np.ndarray, ends: np.ndarray) -> None:
        """Gives back bytes `firsts` to `ends` `[n]` of an array, as far as they fill pieces."""
        if not GIVES_BACK:
            return
        firsts = -(-firsts // self.piece) * self.piece
        sizes = ends // self.piece * self.piece - firsts
        is_some = sizes > 0
        starts = (self._starts[name] + firsts[is_some]).tolist()
        # A file system that can't make holes keeps the bytes.
        how = mmap.MADV_DONTNEED if self._file is None else mmap.MADV_REMOVE
        with suppress(OSError):
            for start, size in zip(starts, sizes[is_some].tolist(), strict=True):
                self._map.madvise(how, start, size)


def _address(mapping: mmap.mmap) -> int:
    return np.frombuffer(mapping, np.uint8).ctypes.data
