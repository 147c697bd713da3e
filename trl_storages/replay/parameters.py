"""Attributes of a storage that are parameters of its parts."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages.samplers import layers_of
from trl_storages.transforms import parts_of

__all__ = [
    "PARAMETERS",
    "Parameter",
    "parameters_of",
]

Value = TypeVar("Value")

#: The names of all parameters.
PARAMETERS = (
    *("n_step", "discount", "alpha", "beta", "normalize", "eps", "eta", "c_min"),
    *("num_goals", "strategy"),
)


class Parameter(Generic[Value]):
    """A storage attribute that forwards to its sampler or transforms.

    Setting it sets all parts that have the parameter, from the next draw on (batches already prefetched
    keep the old value). Reading or setting raises if no part has it.
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
        return getattr(self._parts(storage)[0], self._name)

    def __set__(self, storage: Any, value: Value) -> None:
        with storage._replay_lock:
            for part in self._parts(storage):
                setattr(part, self._name, value)

    def _parts(self, storage: Any) -> list[Sampler | Transform]:
        known = parameters_of(storage)
        if self._name not in known:
            raise AttributeError(
                f"this {type(storage).__name__} has no part with {self._name}, it has the parameters "
                f"{sorted(known)}."
            )
        return known[self._name]


def parameters_of(storage: Any) -> dict[str, list[Sampler | Transform]]:
    """Returns, for each parameter, the parts that have it, transforms first."""
    found: dict[str, list[Sampler | Transform]] = {}
    for part in (*parts_of(storage._transform), *layers_of(storage._sampler)):
        for name in getattr(part, "live_parameters", ()):
            if name in PARAMETERS:
                found.setdefault(name, []).append(part)
    return found
