"""The options of a storage, and those that stay its attributes: the parameters of its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, overload

from torchrl.data import Storage, Writer
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages import arguments
from trl_storages.gym import GymRecorder
from trl_storages.other_names import OTHER_NAMES, meant
from trl_storages.samplers import layers_of
from trl_storages.signatures import Setting
from trl_storages.transforms import parts_of

__all__ = [
    "ONE_FORM",
    "OPTIONS",
    "PARAMETERS",
    "Check",
    "Parameter",
    "check_sample_unit",
    "checked",
    "parameters_of",
]

#: Why dumps can't be customised.
ONE_FORM = (
    "dumps() saves all parts in one form; save what state_dict() returns in a form of your own."
)

#: `(name, value) -> normalised value`, or raises.
Check = Callable[[str, Any], Any]


def _refused(must: Any, reason: str) -> Check:
    """Returns the check of a TorchRL option that supports a single value here."""

    def check(name: str, value: Any) -> Any:
        if value not in (must, None):
            raise ValueError(f"{name} must be {must}, got {value!r}: {reason}")
        return must

    return check


def check_sample_unit(name: str, value: Any) -> SampleUnit | None:
    """Returns a sample unit, or None."""
    what = "a unit such as EpisodeSequence, or None"
    return arguments.optional(arguments.instance, name, value, SampleUnit, what=what)


def _part(kind: type, *, is_needed: bool = False) -> Check:
    """Returns a check that accepts a part, or a function that makes one."""

    def check(name: str, value: Any) -> Any:
        if callable(value) or (value is None and not is_needed):
            return value
        what = f"a TorchRL {kind.__name__}, or a function that makes one"
        what += "" if is_needed else ", or None"
        if isinstance(value, list | tuple):
            what += " (several transforms are Compose(*transforms))" * (kind is Transform)
        return arguments.instance(name, value, kind, what=what)

    return check


#: The parts of a storage, and the options of TorchRL's replay buffers.
OPTIONS: dict[str, Check | None] = {
    "storage": _part(Storage, is_needed=True),
    "sampler": _part(Sampler),
    "writer": _part(Writer),
    "transform": _part(Transform),
    "recorder": partial(
        arguments.optional, arguments.instance, kind=GymRecorder, what="a GymRecorder or None"
    ),
    # Of TorchRL's replay buffers.
    "batch_size": partial(arguments.optional, arguments.integer, at_least=1),
    "checkpointer": _refused(None, ONE_FORM),
    "collate_fn": partial(arguments.optional, arguments.function, what="of rows, or None"),
    "compilable": None,
    "consume_after_n_samples": _refused(
        None,
        "rows leave in the order in which they came, so that episodes stay in one piece; use TorchRL's "
        "TensorDictReplayBuffer for queues.",
    ),
    "delayed_init": _refused(
        False,
        "hand functools.partial(ReplayStorage, ...) to where the storage is wanted, and call it there.",
    ),
    "dim_extend": _refused(
        0,
        "batches come as [num_envs, T] and the writer interleaves them; pass "
        "writer=EpisodeWriter(num_envs).",
    ),
    "generator": arguments.generator,
    "pin_memory": arguments.flag,
    "prefetch": partial(arguments.optional, arguments.integer),
    "priority_key": arguments.key,
    "sample_unit": check_sample_unit,
    "service_backend": None,
    "service_backend_options": None,
    "shared": arguments.flag,
    "transform_factory": None,
    "transport": None,
    "transport_options": None,
}


def checked(
    made: str,
    options: Mapping[str, Any],
    checks: Mapping[str, Check | None],
    names: Collection[str],
) -> dict[str, Any]:
    """Checks and normalises options.

    Args:
        made: name of the class being constructed, for messages.
        options: the options as given.
        checks: option -> its check; None leaves the check to the receiver of the option.
        names: the valid names, for messages.

    Raises:
        TypeError: an option has the wrong type, or its name is unknown.
        ValueError: an option is out of range.
    """
    for name in options:
        if name not in checks:
            ours = OTHER_NAMES.get(name, name)
            is_of_part = ours in _MADE_WITH and ours not in names
            answer = f"make it with {_MADE_WITH[ours]}." if is_of_part else meant(name, names)
            raise TypeError(f"{made} has no option {name!r}: {answer}")
    found = {}
    for name, value in options.items():
        check = checks[name]
        found[name] = value if check is None else check(name, value)
    return found


# Parameters

Value = TypeVar("Value")

_FOLDING = "n_step=3 (or any above 1) if it is ready-made, else with transform=NStep(n_step)"
_WEIGHING = "alpha=0.6 (or any above 0) if it is ready-made, else with sampler=PERSampler(capacity)"
_NARROWING = "eta=0.996 (or any below 1) if it is ready-made, else with sampler=ERESampler(eta)"
_RELABELLING = "hindsight: as HERReplayStorage, or with sampler=HERSampler() and GoalRelabel"

# Parameter -> how to construct a storage with a part that has it.
_MADE_WITH = {
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
PARAMETERS = [*_MADE_WITH]


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
            if name in _MADE_WITH:
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
            f"{', '.join(sorted(known)) or 'no parameters'}: make it with {_MADE_WITH[name]}."
        )
    kind = type(found[0][0])
    values = [getattr(part, own) for part, own in found if type(part) is kind]
    if any(value != values[0] for value in values):
        raise AttributeError(
            f"this {type(storage).__name__} has {len(values)} {kind.__name__}s whose {name} differ, "
            f"{values}: read and set it on these, such as storage.sampler and storage.sampler.base."
        )
    return found
