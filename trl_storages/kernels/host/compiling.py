"""Compiles loops: on first use, once per installation; and what NumPy lacks in them.

Addresses are plain integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.caching import FunctionCache
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from trl_storages.callers import warn_caller

__all__ = [
    "LINE",
    "address",
    "are_same_bytes",
    "array_at",
    "compiled",
    "contiguous",
    "copy_bytes",
    "fenced",
    "inlined",
    "is_set",
    "prefetch",
    "stream_line",
]

#: Bytes of a cache line.
LINE = 64

_Loop = TypeVar("_Loop", bound=Callable[..., Any])
# Untyped, as its annotations hide the signature of the decorated function.
_njit: Any = numba.njit


def compiled(loop: _Loop) -> _Loop:
    """Compiles a loop over arrays on its first call, to run without the GIL.

    The result is cached beside the module or in the user's cache. The cache notices changes in the loop's
    own file only, so loops that call one another share a file; whoever changes a formula that another
    file inlines must touch that file. With `NUMBA_DISABLE_JIT=1` the loop runs as Python. In either case
    integers wrap around, and infinities raise no warning.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return np.errstate(over="ignore", invalid="ignore")(loop)
    dispatcher = _njit(nogil=True)(loop)
    try:
        dispatcher._cache = _Cache(loop)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # No cache directory is writable.
        _warn_of_no_cache()
    return dispatcher


class _Cache(FunctionCache):
    """A cache that loops can do without: where it fails they are compiled, and at most not kept."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # A damaged pickle raises any.
            self._start_over()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:
            self._start_over()
            _warn_of_no_cache()

    def _start_over(self) -> None:
        """Empties the index, which may name files of other sources, or none."""
        with suppress(OSError):
            self.flush()  # type: ignore[no-untyped-call]


def inlined(function: _Loop) -> _Loop:
    """Inlines a formula into the loops that call it; caches of other files do not notice its changes."""
    return _njit(inline="always")(function)


#: Returns the address of a tensor. Loops take the tensors of a call by their addresses and read them by
#: `array_at`: contiguous ones, of the dtype that the loop names. Making an array of a tensor takes longer
#: than many a loop over it. Tables outlive a call, and are taken as arrays that were made once.
address = torch.Tensor.data_ptr


def contiguous(values: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns a caller's values as loops read them: contiguous, of a dtype; copied if they are not."""
    is_plain = values.dtype is dtype and values.is_contiguous()
    return values if is_plain else values.to(dtype).contiguous()


@cache
def _warn_of_no_cache() -> None:
    """Warns once per process."""
    warn_caller(
        "neither the installation nor the user's cache can be written, or the disk is full, so that "
        "each process compiles for some seconds; NUMBA_CACHE_DIR names a directory that can.",
        RuntimeWarning,
    )


if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]

    def array_at(address: int, size: int, dtype: Any) -> Any:
        """Returns the elements of a dtype that begin at an address."""
        num_bytes = int(size) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_char * num_bytes).from_address(int(address)), dtype, size)

    def prefetch(array: Any, byte: int) -> None:
        """Does nothing: interpreted loops are too slow to wait for memory."""

    def fenced() -> bool:
        """Returns True; there is no fence in interpreted code, which is for tests."""
        return True

    def copy_bytes(target: int, source: int, num_bytes: int) -> None:
        """Copies bytes from one address to another."""
        ctypes.memmove(int(target), int(source), int(num_bytes))

    def stream_line(target: int, source: int, ahead: int) -> None:
        """Copies a cache line to an aligned address, past the caches, and prefetches another one."""
        copy_bytes(target, source, LINE)

    def are_same_bytes(one: int, other: int, num_bytes: int) -> bool:
        """Returns whether the bytes at two addresses are the same."""
        size = int(num_bytes)
        return ctypes.string_at(int(one), size) == ctypes.string_at(int(other), size)

    def is_set(address: int) -> bool:
        """Returns whether the byte at an address is not zero."""
        return ctypes.string_at(int(address), 1) != b"\0"

else:
    _BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
    _POINTER = _BYTE.as_pointer()

    def _ask_for(builder: Any, address: Any) -> None:
        """Prefetches the cache line at a pointer."""
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _INT, _INT, _INT])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind)
        # A read, kept in all cache levels, of data.
        builder.call(function, [address, _INT(0), _INT(3), _INT(1)])

    @intrinsic
    def _pointer(typing_context: Any, address: Any) -> Any:
        """An address as a pointer."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], _POINTER)

        return types.voidptr(types.int64), generate

    @_njit(inline="always")  # type: ignore[untyped-decorator]
    def array_at(address: int, size: int, dtype: Any) -> Any:
        """Returns the elements of a dtype that begin at an address."""
        return numba.carray(_pointer(address), size, dtype)  # type: ignore[attr-defined, call-arg]

    @intrinsic
    def prefetch(typing_context: Any, array: Any, byte: Any) -> Any:
        """Prefetches the cache line that holds byte `byte` of a contiguous array."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            view = context.make_array(signature.args[0])(context, builder, args[0])
            address = builder.gep(builder.bitcast(view.data, _POINTER), [args[1]])
            _ask_for(builder, address)
            return context.get_dummy_value()

        return types.void(array, byte), generate

    @intrinsic
    def fenced(typing_context: Any) -> Any:
        """A full fence: orders all reads and writes before it and after it for other processes."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_constant(types.boolean, True)

        return types.boolean(), generate

    @intrinsic
    def copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
        """Copies bytes from one address to another."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to, start = (builder.inttoptr(address, _POINTER) for address in args[:2])
            copy = builder.module.declare_intrinsic("llvm.memcpy", [_POINTER, _POINTER, _LONG])
            is_volatile = ir.IntType(1)(0)
            builder.call(copy, [to, start, args[2], is_volatile])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    @intrinsic
    def stream_line(typing_context: Any, target: Any, source: Any, ahead: Any) -> Any:
        """Copies a cache line to an aligned address, past the caches, and prefetches another one.

        A `fenced` must follow before another thread reads the copies.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _ask_for(builder, builder.inttoptr(args[2], _POINTER))
            line = ir.VectorType(_LONG, LINE // 8).as_pointer()
            to, start = (builder.inttoptr(address, line) for address in args[:2])
            stored = builder.store(builder.load(start, align=1), to, align=LINE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    @intrinsic
    def are_same_bytes(typing_context: Any, one: Any, other: Any, num_bytes: Any) -> Any:
        """Returns whether the bytes at two addresses are the same."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(_INT, [_POINTER, _POINTER, _LONG])
            compare = get_or_insert_function(builder.module, kind, "memcmp")  # type: ignore[no-untyped-call]
            sides = (builder.inttoptr(address, _POINTER) for address in args[:2])
            return builder.icmp_signed("==", builder.call(compare, [*sides, args[2]]), _INT(0))

        return types.boolean(types.int64, types.int64, types.int64), generate

    @intrinsic
    def is_set(typing_context: Any, address: Any) -> Any:
        """Returns whether the byte at an address is not zero."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = builder.load(builder.inttoptr(args[0], _POINTER))
            return builder.icmp_unsigned("!=", byte, _BYTE(0))

        return types.boolean(types.int64), generate
