"""Compiles loops: on first use, once per installation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from trl_storages.callers import warn_caller
from trl_storages.kernels.marks import hardware_orders_stores

__all__ = ["compiled", "fenced", "inlined", "prefetch"]

_Loop = TypeVar("_Loop", bound=Callable[..., Any])
# Untyped, as its annotations hide the signature of the decorated function.
_njit: Any = numba.njit


def compiled(loop: _Loop) -> _Loop:
    """Compiles a loop over arrays on its first call, to run without the GIL.

    The result is cached beside the module or in the user's cache. The cache notices changes in the loop's
    own file only, so loops that call one another share a file. With `NUMBA_DISABLE_JIT=1` the loop runs
    as Python. In either case integers wrap around, and infinities raise no warning.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return np.errstate(over="ignore", invalid="ignore")(loop)
    try:
        return _njit(nogil=True, cache=True)(loop)
    except RuntimeError:
        # No cache directory is writable.
        _warn_of_no_cache()
        return _njit(nogil=True)(loop)


def inlined(function: _Loop) -> _Loop:
    """Inlines a formula into the loops of its file that call it."""
    return _njit(inline="always")(function)


@cache
def _warn_of_no_cache() -> None:
    """Warns once per process."""
    warn_caller(
        "neither the installation nor the user's cache can be written, so that each process compiles for "
        "some seconds; NUMBA_CACHE_DIR names a directory that can.",
        RuntimeWarning,
    )


if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]

    def prefetch(array: Any, byte: int) -> None:
        """Does nothing: interpreted loops are too slow to wait for memory."""

    def fenced() -> bool:
        """Returns whether stores are ordered without a fence; there is none in interpreted code."""
        return hardware_orders_stores()

else:

    @intrinsic
    def prefetch(typing_context: Any, array: Any, byte: Any) -> Any:
        """Prefetches the cache line that holds byte `byte` of a contiguous array."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            view = context.make_array(signature.args[0])(context, builder, args[0])
            pointer = ir.IntType(8).as_pointer()
            address = builder.gep(builder.bitcast(view.data, pointer), [args[1]])
            i32 = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            # A read, kept in all cache levels, of data.
            builder.call(function, [address, i32(0), i32(3), i32(1)])
            return context.get_dummy_value()

        return types.void(array, byte), generate

    @intrinsic
    def fenced(typing_context: Any) -> Any:
        """A full fence: orders all reads and writes before it and after it for other processes."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_constant(types.boolean, True)

        return types.boolean(), generate
