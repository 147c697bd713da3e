"""Copies of bytes whatever they mean, at addresses that are plain integers."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["copy_bytes"]

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]

    def copy_bytes(target: int, source: int, num_bytes: int) -> None:
        """Copies bytes from one address to another."""
        ctypes.memmove(int(target), int(source), int(num_bytes))

else:
    _POINTER, _LONG = ir.IntType(8).as_pointer(), ir.IntType(64)

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
