"""Attributes that are checked when they are set."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any

from trl_storages import arguments

__all__ = ["Checked", "Strict", "unit_interval"]


class Checked:
    """An attribute of a part that is checked whenever it is set."""

    def __init__(self, check: Callable[..., Any], *choices: Any, **bounds: Any) -> None:
        self._check = check, choices, bounds

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # The value is in the instance's __dict__ under the same name, so reading it needs no __get__.

    def __set__(self, part: Any, value: Any) -> None:
        check, choices, bounds = self._check
        part.__dict__[self._name] = check(self._name, value, *choices, **bounds)


class _ConstructorSignature:
    """The signature of a class, which constructors and metaclasses of TorchRL hide."""

    def __get__(self, part: object, kind: Any) -> Signature:
        if part is not None:
            raise AttributeError("__signature__")
        return signature(kind.__init__.__get__(kind))


class Strict:
    """Refuses public attributes that the class does not name; those of users' subclasses may be any."""

    __signature__ = _ConstructorSignature()

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        is_new = name[0] != "_" and name not in self.__dict__ and not hasattr(kind, name)
        if is_new and kind.__module__.startswith("trl_storages."):
            raise AttributeError(f"{kind.__name__} has no attribute {name!r} to set.")
        super().__setattr__(name, value)


def unit_interval(name: str, value: Any) -> float:
    """Returns a number from 0 to 1."""
    return arguments.number(name, value, at_least=0, at_most=1)
