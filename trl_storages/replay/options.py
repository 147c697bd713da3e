"""Checks of a storage's options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torchrl.data import Storage, Writer
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages import arguments
from trl_storages.gym import GymRecorder
from trl_storages.other_names import OTHER_NAMES, meant
from trl_storages.replay.parameters import MADE_WITH

__all__ = [
    "ONE_FORM",
    "OPTIONS",
    "Check",
    "check_sample_unit",
    "checked",
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
        return arguments.instance(name, value, kind, what=what if is_needed else f"{what}, or None")

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
            is_of_part = ours in MADE_WITH and ours not in names
            answer = f"make it with {MADE_WITH[ours]}." if is_of_part else meant(name, names)
            raise TypeError(f"{made} has no option {name!r}: {answer}")
    found = {}
    for name, value in options.items():
        check = checks[name]
        found[name] = value if check is None else check(name, value)
    return found
