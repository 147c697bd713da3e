"""How classes show themselves where their bases in TorchRL hide it: constructors, and attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from trl_storages.interrupts import finish
from trl_storages.other_names import METHOD_NAMES, meant

__all__ = [
    "Sealed",
    "SealedStorage",
    "Setting",
    "shown",
]

Value = TypeVar("Value")


class Setting(Generic[Value]):
    """An attribute that is checked when it is set, and may be set at any time.

    Args:
        check: `(name, value) -> what is meant`, or raises.
        doc: what it is.
        then: called with the object when another value has come in the place of the first one.
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

    # The value lies in the object under its own name, where Python finds it without asking.
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
            finish(partial(self._change, part, value))

    def _change(self, part: Any, value: Value) -> None:
        vars(part)[self._name] = value
        self._then(part)  # type: ignore[misc]


def shown(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Makes a `__repr__` one that never raises, such as that of an object whose constructor raised.

    Debuggers, and Ray where it reports why an actor could not be made, show objects in any state.
    """

    @wraps(show)
    def show_any(part: Any) -> str:
        try:
            return show(part)
        except Exception as error:
            return f"<{type(part).__name__}, not whole: {error!r}>"

    return show_any


class Sealed:
    """Takes no new attributes once it is made, so that none can be misspelt when it is set.

    A subclass names its own in its constructor. The parameters of that are shown by `help()` and
    `inspect.signature`, where TorchRL's classes are made by functions that take `*args, **kwargs`.
    """

    #: Said to whoever gives the constructor arguments too many, or not enough.
    _made_by: ClassVar[str] = ""
    _is_sealed = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Who has no constructor has nothing to name in it.
        cls._is_sealed = cls.__init__ is object.__init__
        if not cls._is_sealed:
            cls.__init__ = _sealing(cls.__init__)  # type: ignore[method-assign]
        cls.__signature__ = cls._signature()  # type: ignore[attr-defined]

    @classmethod
    def _signature(cls) -> inspect.Signature:
        if cls.__init__ is object.__init__:
            return inspect.Signature()
        whole = inspect.signature(cls.__init__)
        parameters = [*whole.parameters.values()][1:]
        return whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty)

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = name[0] != "_" and name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and self._is_sealed:
            kind = type(self)
            names = [known for known in dir(kind) if not callable(getattr(kind, known))]
            names = [known for known in (*names, *self.__dict__) if known[0] != "_"]
            raise AttributeError(f"{kind.__name__} has no attribute {name!r}; {meant(name, names)}")
        super().__setattr__(name, value)


def _sealing(make: Callable[..., None]) -> Callable[..., None]:
    """Makes a constructor one that seals, and that says how it is called where it was called wrong."""

    @wraps(make)
    def made(part: Any, *args: Any, **options: Any) -> None:
        kind = type(part)
        if kind.__init__ is not made:
            make(part, *args, **options)  # the constructor of a subclass goes on
            return
        try:
            make(part, *args, **options)
        except TypeError as error:
            # Python's own names what was called.
            ours = {f"{base.__qualname__}.__init__()" for base in kind.__mro__}
            if not kind._made_by or str(error).split(" ")[0] not in ours:
                raise
            raise TypeError(f"{error}. {kind._made_by}") from None
        part._is_sealed = True

    return made


class SealedStorage(Sealed):
    """A replay buffer that is `Sealed`, and whose methods can't be called as in other libraries."""

    # Type checkers would take any attribute then.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in METHOD_NAMES and not hasattr(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}: it is {METHOD_NAMES[name]} here."
                )
            # A name that nobody knows; or a property raised this, and does so again.
            return object.__getattribute__(self, name)
