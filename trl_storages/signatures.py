"""Explicit constructor signatures and checked attributes for subclasses of TorchRL classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from trl_storages.other_names import meant

__all__ = [
    "Sealed",
    "Setting",
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


class Sealed:
    """Rejects new attributes after construction, so that misspelt ones raise.

    A subclass sets its own attributes in its constructor. `help()` and `inspect.signature` show the
    constructor's parameters, where TorchRL's classes only show `*args, **kwargs`.
    """

    _is_sealed = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Without a constructor there is nothing to wait for.
        cls._is_sealed = cls.__init__ is object.__init__
        if not cls._is_sealed:
            cls.__init__ = _sealing(cls.__init__)  # type: ignore[method-assign]
        cls.__signature__ = cls._signature()  # type: ignore[attr-defined]

    @classmethod
    def _signature(cls) -> Signature:
        if cls.__init__ is object.__init__:
            return Signature()
        whole = signature(cls.__init__)
        parameters = [*whole.parameters.values()][1:]
        return whole.replace(parameters=parameters, return_annotation=Signature.empty)

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = name[0] != "_" and name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and self._is_sealed:
            kind = type(self)
            names = [known for known in dir(kind) if not callable(getattr(kind, known))]
            names = [known for known in (*names, *self.__dict__) if known[0] != "_"]
            raise AttributeError(f"{kind.__name__} has no attribute {name!r}; {meant(name, names)}")
        super().__setattr__(name, value)


def _sealing(make: Callable[..., None]) -> Callable[..., None]:
    """Wraps a constructor to seal the object."""

    @wraps(make)
    def made(part: Any, *args: Any, **options: Any) -> None:
        make(part, *args, **options)
        # A constructor called by a subclass's leaves that to it.
        part._is_sealed = type(part).__init__ is made

    return made
