"""Attributes that are checked when they are set, and classes that accept no others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from typing import Any

__all__ = ["ComponentSetting", "Setting", "Strict"]


class Setting:
    """An attribute of a component, which is checked whenever it is set."""

    def __init__(self, check: Any, *choices: Any, saved: bool = True, **bounds: Any) -> None:
        """Takes `check(name, value, *choices, **bounds)`, and whether states contain the value."""
        self._check, self.is_saved = (check, choices, bounds), saved

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # The value is in the instance's __dict__ under the same name, so reading it needs no __get__.

    def __set__(self, component: Any, value: Any) -> None:
        check, choices, bounds = self._check
        component.__dict__[self._name] = check(self._name, value, *choices, **bounds)


class ComponentSetting:
    """A setting of the components of its owner; it is read from the last one and set on all of them."""

    def __init__(self, doc: str, hint: str, lock_of: Callable[[Any], Any] = nullcontext) -> None:
        """Takes one line of help, and the argument of the owner that adds a component with the setting.

        `lock_of(owner)` is held while the components are set. The owner has `components()`.
        """
        self.__doc__, self._hint, self._lock_of = doc, hint, lock_of

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(self._components_of(owner)[-1], self._name)

    def __set__(self, owner: Any, value: Any) -> None:
        with self._lock_of(owner):
            for component in self._components_of(owner):
                setattr(component, self._name, value)

    def _components_of(self, owner: Any) -> list[Any]:
        """Returns the components that have the setting."""
        settings = [(x, getattr(type(x), self._name, None)) for x in owner.components()]
        if components := [x for x, setting in settings if isinstance(setting, Setting)]:
            return components
        kind = type(owner).__name__
        raise AttributeError(f"no component of this {kind} has {self._name!r}: pass {self._hint}.")


class Strict:
    """Rejects public attributes that a class of this package does not define."""

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
