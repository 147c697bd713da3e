"""Compiles loops over arrays: on first use, once per installation; and what NumPy lacks in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic, overload

__all__ = ["fence", "inlined", "loop", "prefetch"]

_Loop = TypeVar("_Loop", bound=Callable[..., Any])
# Untyped, as its annotations hide the signature of the decorated function.
_njit: Any = numba.njit


def loop(function: _Loop) -> _Loop:
    """Compiles a loop over arrays on its first call, to run without the GIL.

    The machine code is kept beside the module, or in the user's cache. With `NUMBA_DISABLE_JIT=1` the
    loop runs as Python. In either case integers wrap around.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
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


def prefetch(array: Any, byte: int) -> None:
    """Asks for the cache line that holds byte `byte` of a contiguous array."""


def fence() -> None:
    """Orders all reads and writes before it and after it, also for other processes."""


@intrinsic
def _prefetch(typing_context: Any, array: Any, byte: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.gep(builder.bitcast(view.data, pointer), [args[1]])
        kind = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        # A read, kept in all cache levels, of data.
        builder.call(function, [address, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(array, byte), generate


@intrinsic
def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@overload(prefetch, inline="always", strict=False)
def _compiled_prefetch(array: Any, byte: Any) -> Any:
    return lambda array, byte: _prefetch(array, byte)  # type: ignore[call-arg]


@overload(fence, inline="always", strict=False)
def _compiled_fence() -> Any:
    return lambda: _fence()  # type: ignore[call-arg]
