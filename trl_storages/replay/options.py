"""Checks of what a `ReplayStorage` is made of, before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl.data import Storage, Writer
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from trl_storages import arguments
from trl_storages.gym import GymRecorder
from trl_storages.other_names import meant

__all__ = ["ONE_FORM", "check_options", "check_parts"]

#: Why dumps can't be changed.
ONE_FORM = (
    "dumps() saves all parts in one form; save what state_dict() returns in a form of your own."
)
# Of TorchRL's replay buffers, without the parts.
_NAMES = (
    "batch_size",
    "checkpointer",
    "collate_fn",
    "compilable",
    "consume_after_n_samples",
    "delayed_init",
    "dim_extend",
    "generator",
    "pin_memory",
    "prefetch",
    "priority_key",
    "sample_unit",
    "service_backend",
    "service_backend_options",
    "shared",
    "transform_factory",
    "transport",
    "transport_options",
)


def check_parts(*, storage: Any, sampler: Any, writer: Any, transform: Any, recorder: Any) -> None:
    """Checks that parts are what they are called, or functions that make it.

    Raises:
        TypeError: one is something else.
    """
    for name, value, kind in (
        ("storage", storage, Storage),
        ("sampler", sampler, Sampler),
        ("writer", writer, Writer),
        ("transform", transform, Transform),
    ):
        optional = name != "storage"
        if (optional and value is None) or isinstance(value, kind) or callable(value):
            continue
        what = f"a TorchRL {kind.__name__}, or a function that makes one"
        arguments.instance(name, value, kind, what=f"{what}, or None" if optional else what)
    if recorder is not None:
        arguments.instance("recorder", recorder, GymRecorder, what="a GymRecorder or None")


def check_options(made: str, options: Mapping[str, Any]) -> None:
    """Checks the options that TorchRL's replay buffers have too.

    Args:
        made: what is made, for the message.
        options: as they came.

    Raises:
        TypeError: one is of another kind, or there is none of that name.
        ValueError: one is out of its range.
    """
    for name, value in options.items():
        if name not in _NAMES:
            raise TypeError(f"{made} has no option {name!r}: {meant(name, _NAMES)}")
        if name == "priority_key":
            arguments.key(name, value)
        elif name in ("pin_memory", "shared"):
            arguments.flag(name, value)
        elif value is None:
            continue
        elif name == "checkpointer":
            raise ValueError(f"checkpointer must be None, got {value!r}: {ONE_FORM}")
        elif name == "batch_size":
            arguments.integer(name, value, at_least=1)
        elif name == "prefetch":
            arguments.integer(name, value)
        elif name == "generator":
            arguments.generator(name, value)
        elif name == "collate_fn":
            arguments.function(name, value, "of rows, or None")
        elif name == "sample_unit":
            what = "a unit such as EpisodeSequence, or None"
            arguments.instance(name, value, SampleUnit, what=what)
