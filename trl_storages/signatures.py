"""Explicit constructor signatures and checked attributes for subclasses of TorchRL classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Signature, isfunction, signature
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from trl_storages.other_names import METHOD_NAMES, meant

__all__ = [
    "Sealed",
    "SealedStorage",
    "Setting",
    "answers_names",
    "shown",
]

Function = TypeVar("Function", bound=Callable[..., Any])
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


def shown(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Makes a `__repr__` that never raises, even if the object's constructor did.

    Debuggers, and Ray when it reports a failed actor, print objects in any state.
    """

    @wraps(show)
    def show_any(part: Any) -> str:
        try:
            return show(part)
        except Exception as error:
            return f"<{type(part).__name__}, not whole: {error!r}>"

    return show_any


class Sealed:
    """Rejects new attributes after construction, so that misspelt ones raise.

    A subclass sets its own attributes in its constructor. `help()` and `inspect.signature` show the
    constructor's parameters, where TorchRL's classes only show `*args, **kwargs`.
    """

    #: Added to the error if the constructor is called with wrong arguments.
    _made_by: ClassVar[str] = ""
    #: Properties that can't be assigned, and what to do instead.
    _not_assigned: ClassVar[Mapping[str, str]] = {}
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
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            if (instead := self._not_assigned.get(name)) is None:
                raise
            raise AttributeError(
                f"{type(self).__name__}.{name} can't be assigned: {instead}."
            ) from error


def _sealing(make: Callable[..., None]) -> Callable[..., None]:
    """Wraps a constructor to seal the object, and to answer wrong arguments."""
    make = answers_names(make)

    @wraps(make)
    def made(part: Any, *args: Any, **options: Any) -> None:
        make(part, *args, **options)
        # A constructor called by a subclass's leaves that to it.
        part._is_sealed = type(part).__init__ is made

    return made


def answers_names(function: Function) -> Function:
    """Makes a function, method or constructor answer wrong arguments with those that it has."""
    called = f"{function.__qualname__}()"

    @wraps(function)
    def asked(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except TypeError as error:
            # Python's message starts with the name of the function that was called wrongly.
            name, _, wrong = str(error).partition(" ")
            if name != called:
                raise
            public: Any = function
            shown_name = function.__name__
            if function.__qualname__ != shown_name:
                # The class that was used, not the one of its bases that has the method.
                owner = args[0] if isinstance(args[0], type) else type(args[0])
                public, shown_name = owner, owner.__name__
                if function.__name__ != "__init__":
                    public, shown_name = function, f"{shown_name}.{function.__name__}"
            if unknown := wrong.partition("unexpected keyword argument ")[2]:
                known = {*signature(public).parameters} - {"self"}
                wrong += f": {meant(unknown[1:-1], known)}"
            if made_by := getattr(public, "_made_by", ""):
                wrong = f"{wrong.rstrip('.')}. {made_by}"
            raise TypeError(f"{shown_name}() {wrong}") from None

    return asked  # type: ignore[return-value]


class SealedStorage(Sealed):
    """A `Sealed` replay buffer that names the right method for names from other libraries."""

    _not_assigned: ClassVar[Mapping[str, str]] = {
        "batch_size": "pass it to sample(batch_size)",
        "sampler": "call set_sampler(sampler)",
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, member in vars(cls).copy().items():
            if name[0] != "_" and isfunction(member) and not hasattr(member, "says_its_order"):
                setattr(cls, name, answers_names(member))
            elif name[0] != "_" and isinstance(member, classmethod):
                setattr(cls, name, classmethod(answers_names(member.__func__)))

    # Hidden from type checkers, which would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in METHOD_NAMES and not hasattr(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}: it is {METHOD_NAMES[name]} here."
                )
            # An unknown name, or a property that raised AttributeError and does so again.
            return object.__getattribute__(self, name)
