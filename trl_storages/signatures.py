"""How classes show themselves where their bases in TorchRL hide it: constructors, and attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from torchrl.data import ReplayBuffer, Writer
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages.interrupts import finish
from trl_storages.other_names import METHOD_NAMES, meant

__all__ = [
    "Setting",
    "SettledEnsemble",
    "SettledSampler",
    "SettledStorage",
    "SettledWriter",
    "ShownSignature",
    "shown",
]

Made = TypeVar("Made")
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


class _Settling(type):
    """Notes of what it makes that it is made."""

    # Type checkers then ask the constructor.
    def __call__(cls: type[Made], *args: Any, **options: Any) -> Made:
        made: Made = super().__call__(*args, **options)  # type: ignore[misc]
        # Where a storage is made in another process, this is not one.
        if issubclass(type(made), cls):
            made._is_settled = True  # type: ignore[attr-defined]
        return made


class _Settled(ShownSignature):
    """Takes no new attributes once it is made: a subclass names its own in its constructor."""

    _is_settled = False

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = name[0] != "_" and name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and self._is_settled:
            kind = type(self)
            names = [known for known in dir(kind) if not callable(getattr(kind, known))]
            names = [known for known in (*names, *self.__dict__) if known[0] != "_"]
            raise AttributeError(f"{kind.__name__} has no attribute {name!r}; {meant(name, names)}")
        super().__setattr__(name, value)


class _Telling(_Settling):
    """And says how it is called where a constructor is given arguments too many, or not enough."""

    def __call__(cls: type[Made], *args: Any, **options: Any) -> Made:
        try:
            return super().__call__(*args, **options)  # type: ignore[misc]
        except TypeError as error:
            # Python's own, of arguments that are too many or missing.
            ours = {f"{kind.__qualname__}.__init__()" for kind in cls.__mro__}
            if str(error).split(" ")[0] not in ours:
                raise
            raise TypeError(f"{error}. {cls._made_by}") from None  # type: ignore[attr-defined]


class _SettlingSampler(_Settling, type(Sampler)):  # type: ignore[misc]
    pass


class _SettlingWriter(_Settling, type(Writer)):  # type: ignore[misc]
    pass


class _SettlingStorage(_Telling, type(ReplayBuffer)):  # type: ignore[misc]
    pass


class SettledEnsemble(_Settled, metaclass=_Telling):
    """Several storages as one, whose attributes can't be misspelt when they are set."""

    _made_by: ClassVar[str]


class SettledSampler(_Settled, metaclass=_SettlingSampler):
    """A sampler whose attributes can't be misspelt when they are set."""


class SettledWriter(_Settled, metaclass=_SettlingWriter):
    """A writer whose attributes can't be misspelt when they are set."""


class SettledStorage(_Settled, metaclass=_SettlingStorage):
    """A replay buffer whose attributes can't be misspelt, nor its methods be called as elsewhere."""

    #: Said to whoever gives the constructor arguments too many, or not enough.
    _made_by: ClassVar[str]

    # Type checkers would take any attribute then.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in METHOD_NAMES and not hasattr(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}: it is {METHOD_NAMES[name]} here."
                )
            # A name that nobody knows; or a property raised this, and does so again.
            return object.__getattribute__(self, name)
