"""Parameters of a storage's parts, read and set on the storage itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar, overload, runtime_checkable

from trl_storages.samplers import layers_of
from trl_storages.transforms import parts_of

__all__ = ["Parameter"]

Value = TypeVar("Value")


@runtime_checkable
class _Adjustable(Protocol):
    """A sampler or transform with parameters that may change between samples."""

    #: Name on the storage -> attribute of the part, which checks what it is set to.
    live_parameters: Mapping[str, str]


class Parameter(Generic[Value]):
    """An attribute of a storage that is one of its sampler's or transform's.

    A new value holds for the next batch that is drawn. It is checked where it lives. What no part has
    can't be read or set.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, storage: None, owner: type) -> Parameter[Value]: ...
    @overload
    def __get__(self, storage: object, owner: type) -> Value: ...
    def __get__(self, storage: Any, owner: type) -> Parameter[Value] | Value:
        if storage is None:
            return self
        found: Parameter[Value] | Value = getattr(*_holder_of(storage, self._name))
        return found

    def __set__(self, storage: Any, value: Value) -> None:
        with storage._replay_lock:
            setattr(*_holder_of(storage, self._name), value)


def _holder_of(storage: Any, name: str) -> tuple[_Adjustable, str]:
    """Returns the part of a storage that has a parameter, and what it calls it.

    Raises:
        AttributeError: no part has it.
    """
    known: set[str] = set()
    for part in (*layers_of(storage._sampler), *parts_of(storage._transform)):
        if isinstance(part, _Adjustable):
            if name in part.live_parameters:
                return part, part.live_parameters[name]
            known.update(part.live_parameters)
    raise AttributeError(
        f"this {type(storage).__name__} has no part with {name}, it has "
        f"{', '.join(sorted(known)) or 'no parameters'}: name {name} where the storage is made, or "
        "give it the sampler or transform."
    )
