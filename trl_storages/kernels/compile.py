"""Compiles loops over arrays: on first use, once per installation; and what NumPy lacks in them."""

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

    The machine code is kept beside the module, or in the user's cache. With `NUMBA_DISABLE_JIT=1` the
    loop runs as Python. In either case integers wrap around.
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
    """A cache of machine code that all files of this folder make void together.

    Numba's own looks at the file of the loop alone, not at those of the loops and formulas that it calls.
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
        except Exception:  # a damaged pickle raises any: compile again
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
        "neither the installation nor the user's cache can be written, or the disk is full, so that each "
        "process compiles for some seconds; NUMBA_CACHE_DIR names a directory that can.",
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
        # A read, kept in all cache levels, of data.
        builder.call(function, [address, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(array, byte), generate


def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _instead(generate: Any) -> Callable[[Any], Any]:
    """Compiles a function to instructions that are generated; where loops run as Python it stays."""
    return lambda plain: plain if _IS_PLAIN else intrinsic(generate)


@_instead(_copy)
def _copy_bytes(target: Any, to: int, source: Any, start: int, size: int) -> None:
    one, other = (it.reshape(-1).view(np.uint8) for it in (target, source))
    one[to : to + size] = other[start : start + size]


@_instead(_prefetch)
def _prefetch_line(array: Any, byte: int) -> None:
    """Asks for the cache line that holds byte `byte` of a contiguous array."""


@_instead(_fence)
def fence() -> None:
    """Orders all reads and writes before it and after it, also for other processes."""


@inlined
def prefetch(array: Any, i: int, first: int = 0, end: int = 8) -> None:
    """Asks for the cache lines of bytes `first` to `end`, in words of 8, of row i of an array."""
    start = i * array.strides[0]
    for byte in range(first, end + 56, 64):
        _prefetch_line(array, start + byte)


@inlined
def copy_words(target: Any, i: int, j: int, source: Any, p: int, q: int, size: int) -> None:
    """Copies `source[p, q : q + size]` to `target[i, j : j + size]`, of tables of 8-byte words."""
    to, start = i * target.shape[1] + j, p * source.shape[1] + q
    _copy_bytes(target, to * 8, source, start * 8, size * 8)
