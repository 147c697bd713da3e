"""Attributes that are checked when they are set."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

__all__ = [
    "Setting",
    "Strict",
]

Value = TypeVar("Value")


class Setting(Generic[Value]):
    """An attribute that is checked whenever it is set.

    Args:
        check: `(name, value) -> normalised value`, or raises.
        doc: the docstring.
        then: called with the object after the value has changed; not for the initial value.
    """

    def __init__(
        self,
        check: Callable[[str, Any], Value],
        doc: str,
        then: Callable[[Any], object] | None = None,
    ) -> None:
        self.__doc__, self.check, self._then = doc, check, then

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # The value is in the instance's __dict__ under the same name, so reading it needs no __get__.
    if TYPE_CHECKING:

        @overload
        def __get__(self, part: None, owner: type) -> Setting[Value]: ...
        @overload
        def __get__(self, part: object, owner: type) -> Value: ...
        def __get__(self, part: Any, owner: type) -> Any: ...

    def __set__(self, part: Any, value: Any) -> None:
        value, own = self.check(self._name, value), vars(part)
        if self._then is None or self._name not in own:
            own[self._name] = value
        elif value != own[self._name]:
            own[self._name] = value
            self._then(part)


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
