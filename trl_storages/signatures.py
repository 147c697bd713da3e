"""Constructors as they are, for classes whose bases in TorchRL hide them."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["ShownSignature"]


class ShownSignature:
    """Shows a class by the parameters of its `__init__`, in `help()` and to `inspect.signature`.

    TorchRL's replay buffers and samplers are made by functions that take `*args, **kwargs`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = cls._signature()  # type: ignore[attr-defined]

    @classmethod
    def _signature(cls) -> inspect.Signature:
        if cls.__init__ is object.__init__:
            return inspect.Signature()
        whole = inspect.signature(cls.__init__)
        parameters = [*whole.parameters.values()][1:]
        return whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
