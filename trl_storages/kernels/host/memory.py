"""Operations on raw bytes, at addresses that are plain integers."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

__all__ = ["are_same_bytes", "copy_bytes", "is_set"]

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]

    def copy_bytes(target: int, source: int, num_bytes: int) -> None:
        """Copies bytes from one address to another."""
        ctypes.memmove(int(target), int(source), int(num_bytes))

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
