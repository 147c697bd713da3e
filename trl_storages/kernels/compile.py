"""Compiles loops over arrays, on first use and once per installation; and intrinsics for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

__all__ = ["copy_words", "fence", "inlined", "loop", "prefetch"]

_Loop = TypeVar("_Loop", bound=Callable[..., Any])
# Untyped, as its annotations hide the signature of the decorated function.
_njit: Any = numba.njit
_IS_PLAIN = numba.config.DISABLE_JIT  # type: ignore[attr-defined]


def loop(function: _Loop) -> _Loop:
    """Compiles a loop over arrays on its first call, to run without the GIL.

    The machine code is cached next to the module, or in the user's cache directory. With
    `NUMBA_DISABLE_JIT=1` the loop runs as Python. In either case integers wrap around.
    """
    if _IS_PLAIN:
        return np.errstate(over="ignore", invalid="ignore")(function)
    compiled = _njit(nogil=True)(function)
    try:
        compiled._cache = _Cache(function)
    except RuntimeError:  # no cache directory is writable
        _warn_of_no_cache()
    return compiled


def inlined(function: _Loop) -> _Loop:
    """Inlines a formula into the loops that call it."""
    return _njit(inline="always")(function)


class _Cache(FunctionCache):
    """A cache of machine code that is invalid when any file of this folder has changed.

    Numba's cache checks only the file of the loop itself, not the files of the loops that it calls.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file = IndexDataCacheFile(  # type: ignore[no-untyped-call]
            cache_path=self.cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=_sources(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # a damaged pickle raises any exception: compile again
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:
            _warn_of_no_cache()


@cache
def _sources() -> str:
    """Returns a digest of all files of this folder."""
    digest = sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _warn_of_no_cache() -> None:
    """Warns once per process."""
    warnings.warn(
        "compiled loops can't be cached, so each process compiles for some seconds: neither the "
        "installation nor the user's cache can be written, or the disk is full. Set NUMBA_CACHE_DIR to a "
        "directory that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )


_BYTE = ir.IntType(8).as_pointer()


def _address(context: Any, builder: Any, kind: Any, array: Any, byte: Any) -> Any:
    """Returns the address of a byte of an array."""
    view = context.make_array(kind)(context, builder, array)
    return builder.gep(builder.bitcast(view.data, _BYTE), [byte])


def _copy(typing_context: Any, target: Any, to: Any, source: Any, start: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        addresses = [
            _address(context, builder, kinds[0], args[0], args[1]),
            _address(context, builder, kinds[2], args[2], args[3]),
        ]
        names = [_BYTE, _BYTE, ir.IntType(64)]
        function = builder.module.declare_intrinsic("llvm.memcpy", names)
        builder.call(function, [*addresses, args[4], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


def _prefetch(typing_context: Any, array: Any, byte: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, integer = _address(context, builder, signature.args[0], *args), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, integer, integer, integer])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE], kind)
        # The arguments say: a read, of data, into all cache levels.
        builder.call(function, [address, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(array, byte), generate


def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _replaced_by(generate: Any) -> Callable[[Any], Any]:
    """Replaces a function by generated instructions, unless loops run as Python."""
    return lambda plain: plain if _IS_PLAIN else intrinsic(generate)


@_replaced_by(_copy)
def _copy_bytes(target: Any, to: int, source: Any, start: int, size: int) -> None:
    target_bytes, source_bytes = (it.reshape(-1).view(np.uint8) for it in (target, source))
    target_bytes[to : to + size] = source_bytes[start : start + size]


@_replaced_by(_prefetch)
def _prefetch_line(array: Any, byte: int) -> None:
    """Prefetches the cache line of a byte of a contiguous array."""


@_replaced_by(_fence)
def fence() -> None:
    """Orders all reads and writes before the fence before all after it, also for other processes."""


@inlined
def prefetch(array: Any, i: int, first: int = 0, end: int = 8) -> None:
    """Prefetches the cache lines of bytes `first` to `end` of row i of an array."""
    start = i * array.strides[0]
    for byte in range(first, end + 56, 64):
        _prefetch_line(array, start + byte)


@inlined
def copy_words(target: Any, i: int, j: int, source: Any, p: int, q: int, size: int) -> None:
    """Copies `source[p, q : q + size]` to `target[i, j : j + size]`; both hold 8-byte words."""
    to, start = i * target.shape[1] + j, p * source.shape[1] + q
    _copy_bytes(target, to * 8, source, start * 8, size * 8)
