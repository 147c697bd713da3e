"""Attributes of a storage that forward to parameters of its sampler and transforms."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages.samplers import layers_of
from trl_storages.signatures import Setting
from trl_storages.transforms import parts_of

__all__ = ["MADE_WITH", "PARAMETERS", "Parameter", "parameters_of"]

Value = TypeVar("Value")

_FOLDING = "n_step=3 (or any above 1) if it is ready-made, else with transform=NStep(n_steps)"
_WEIGHING = "alpha=0.6 (or any above 0) if it is ready-made, else with sampler=PERSampler(capacity)"
_NARROWING = "eta=0.996 (or any below 1) if it is ready-made, else with sampler=ERESampler(eta)"
_RELABELLING = "hindsight: as HERReplayStorage, or with sampler=HERSampler() and GoalRelabel"

#: Parameter -> how to construct a storage with a part that has it.
MADE_WITH = {
    "n_step": _FOLDING,
    "discount": _FOLDING,
    "alpha": _WEIGHING,
    "beta": _WEIGHING,
    "normalize": _WEIGHING,
    "eps": _WEIGHING,
    "eta": _NARROWING,
    "c_min": _NARROWING,
    "num_goals": _RELABELLING,
    "strategy": _RELABELLING,
}

#: The names of all parameters.
PARAMETERS = [*MADE_WITH]


class Parameter(Generic[Value]):
    """A storage attribute that forwards to its sampler or transforms.

    Setting it sets all parts that have the parameter, checked as they check it, from the next draw on
    (batches already prefetched keep the old value). Reading or setting raises if no part has it, or if
    two parts of one class have different values.
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
        return getattr(*_holders_of(storage, self._name)[0])

    def __set__(self, storage: Any, value: Value) -> None:
        with storage._replay_lock:
            holders = _holders_of(storage, self._name)
            for part, own in holders:
                # Check under the storage's name for the parameter, so that errors use it.
                if isinstance(setting := getattr(type(part), own, None), Setting):
                    value = setting.check(self._name, value)
            for part, own in holders:
                setattr(part, own, value)


def parameters_of(storage: Any) -> dict[str, list[tuple[Sampler | Transform, str]]]:
    """Returns, for each parameter, the parts that have it and their names for it, transforms first."""
    found: dict[str, list[tuple[Sampler | Transform, str]]] = {}
    for part in (*parts_of(storage._transform), *layers_of(storage._sampler)):
        for name, own in getattr(part, "live_parameters", {}).items():
            if name in MADE_WITH:
                found.setdefault(name, []).append((part, own))
    return found


def _holders_of(storage: Any, name: str) -> list[tuple[Sampler | Transform, str]]:
    """Returns the parts that have a parameter and their names for it.

    Raises:
        AttributeError: no part has it, or parts of one class have different values.
    """
    known = parameters_of(storage)
    if (found := known.get(name)) is None:
        raise AttributeError(
            f"this {type(storage).__name__} has no part with {name}, it has "
            f"{', '.join(sorted(known)) or 'no parameters'}: make it with {MADE_WITH[name]}."
        )
    kind = type(found[0][0])
    values = [getattr(part, own) for part, own in found if type(part) is kind]
    if any(value != values[0] for value in values):
        raise AttributeError(
            f"this {type(storage).__name__} has {len(values)} {kind.__name__}s whose {name} differ, "
            f"{values}: read and set it on these, such as storage.sampler and storage.sampler.base."
        )
    return found
