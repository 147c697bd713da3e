"""Attributes that are checked whenever they are set."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

__all__ = ["Setting", "Strict", "Unsaved"]


class Setting:
    """An attribute of a part that is checked whenever it is set."""

    def __init__(self, check: Callable[..., Any], *choices: Any, **bounds: Any) -> None:
        self._check = check, choices, bounds

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # The value is in the instance's __dict__ under the same name, so reading it needs no __get__.

    def __set__(self, part: Any, value: Any) -> None:
        check, choices, bounds = self._check
        part.__dict__[self._name] = check(self._name, value, *choices, **bounds)


class Unsaved(Setting):
    """A checked attribute that is no parameter: states leave it out."""


class Strict:
    """Refuses public attributes that the class does not name; those of users' subclasses may be any."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Metaclasses of TorchRL hide it.
        cls.__signature__ = signature(cls.__init__.__get__(cls))  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if isinstance(checked := getattr(kind, name, None), Setting):
            # Torch would register a module elsewhere, where nobody looks.
            checked.__set__(self, value)
            return
        is_new = name[0] != "_" and name not in self.__dict__ and not hasattr(kind, name)
        if is_new and kind.__module__.startswith("trl_storages."):
            raise AttributeError(f"{kind.__name__} has no attribute {name!r} to set.")
        super().__setattr__(name, value)
