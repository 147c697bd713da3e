"""The options of ready-made storages: one line each, with type, default and check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

import torch
from gymnasium.vector import AutoresetMode
from tensordict import NestedKey
from torchrl.data.replay_buffers.sample_units import SampleUnit

from trl_storages import arguments
from trl_storages.gym.fields import Field, InfoKeys
from trl_storages.priorities import Normalization
from trl_storages.replay.options import Check, check_sample_unit, checked
from trl_storages.rows import FrameStack
from trl_storages.samplers import ERESampler, GoalMixture, GoalStrategy, PERSampler
from trl_storages.transforms import NStep
from trl_storages.transforms.relabel import GoalFunction
from trl_storages.writing import OnGap

__all__ = ["OPTIONS", "EnvOptions", "Option", "Options", "RowOptions", "chosen", "with_options"]


def _info_keys(name: str, value: Any) -> InfoKeys:
    return value if isinstance(value, Mapping) else arguments.keys(name, value)


def _extra_fields(name: str, value: Any) -> dict[NestedKey, Field]:
    what = "a mapping from key to (dtype, shape), such as {'state': (torch.float32, [8])}"
    fields: dict[NestedKey, Field] = {}
    for given, field in arguments.mapping(name, value, what).items():
        key = arguments.key(name, given)
        match field:
            case (torch.dtype() as dtype, tuple() | list() as shape) if isinstance(field, tuple):
                sizes = [arguments.integer(f"{name}[{key!r}]", size) for size in shape]
                fields[key] = (dtype, torch.Size(sizes))
            case _:
                raise TypeError(f"{name} must be {what}; got {field!r} for {key!r}.")
    return fields


def _frame_stack(name: str, value: Any) -> int | Mapping[NestedKey, FrameStack]:
    if not isinstance(value, Mapping):
        try:
            return arguments.integer(name, value, at_least=2)
        except TypeError as error:
            raise TypeError(
                f"{name} must be the number of frames of a stack, a mapping from key to FrameStack, or "
                f"None, got {value!r:.80}."
            ) from error
    kind = "a FrameStack"
    return {
        arguments.key(name, key): arguments.instance(
            f"{name}[{key!r}]", stack, FrameStack, what=kind
        )
        for key, stack in value.items()
    }


class Option(NamedTuple):
    """The default of an option and its check; None leaves the check to the part that takes it."""

    default: Any
    check: Check | None = None


_COUNT = partial(arguments.integer, at_least=1)


class RowOptions(TypedDict, total=False):
    """Options of all ready-made storages; `UniformReplayStorage` documents each."""

    storage_size: Annotated[int, Option(1_000_000, arguments.integer)]
    num_envs: Annotated[int, Option(1, _COUNT)]
    batch_size: Annotated[int, Option(256, _COUNT)]
    device: Annotated[torch.device | str, Option("cpu", arguments.device)]
    path: Annotated[
        str | Path | None, Option(None, partial(arguments.optional, arguments.directory))
    ]
    mode: Annotated[Literal["r+", "r"], Option("r+", partial(arguments.choice, names=("r+", "r")))]
    prefetch: Annotated[int, Option(0, arguments.integer)]
    seed: Annotated[int | None, Option(None, partial(arguments.optional, arguments.integer))]
    info_keys: Annotated[InfoKeys, Option((), _info_keys)]
    # Keys are `Any`, as type checkers do not accept a `dict[str, ...]` as `Mapping[NestedKey, ...]`.
    extra_fields: Annotated[
        Mapping[Any, tuple[torch.dtype, Sequence[int]]], Option({}, _extra_fields)
    ]
    frame_stack: Annotated[
        int | Mapping[Any, FrameStack] | None,
        Option(None, partial(arguments.optional, _frame_stack)),
    ]
    share_next: Annotated[bool, Option(False, arguments.flag)]
    autoreset_mode: Annotated[AutoresetMode | str | None, Option(None)]
    on_gap: Annotated[OnGap, Option("cut")]


class Options(RowOptions, total=False):
    """Further options of storages that draw single rows: sampling and transforms."""

    n_step: Annotated[int, Option(1, NStep.n_step.check)]
    discount: Annotated[float, Option(0.99, NStep.discount.check)]
    alpha: Annotated[float, Option(0.0, PERSampler.alpha.check)]
    beta: Annotated[float, Option(0.4, PERSampler.beta.check)]
    normalize: Annotated[Normalization, Option("batch", PERSampler.normalize.check)]
    eps: Annotated[float, Option(1e-6, PERSampler.eps.check)]
    eta: Annotated[float, Option(1.0, ERESampler.eta.check)]
    c_min: Annotated[int, Option(5000, ERESampler.c_min.check)]
    sample_unit: Annotated[SampleUnit | None, Option(None, check_sample_unit)]


class EnvOptions(Options, total=False):
    """Options of `from_env`: also those of `HERReplayStorage`, and of TorchRL's services."""

    reward_fn: GoalFunction
    terminated_fn: GoalFunction | None
    strategy: GoalStrategy | GoalMixture
    num_goals: float
    service_backend: str
    service_backend_options: Mapping[str, Any]


#: Option -> the option it requires, and the value that turns that one off.
_NEEDED = {
    "beta": ("alpha", 0),
    "normalize": ("alpha", 0),
    "eps": ("alpha", 0),
    "c_min": ("eta", 1),
    "discount": ("n_step", 1),
}

#: The parts of a `ReplayStorage`.
_PARTS = ("recorder", "sampler", "storage", "transform", "writer")

#: All options by name.
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Options, include_extras=True).items()
}


def chosen(
    made: type, given: RowOptions, defaults: RowOptions, *, discounts_goals: bool = False
) -> dict[str, Any]:
    """Returns all options, with defaults filled in and checked.

    Args:
        made: the class being constructed.
        given: the options that were passed.
        defaults: the class's own defaults.
        discounts_goals: whether `discount` has an effect without `n_step` too.

    Raises:
        TypeError: an option is unknown (the message says what to write instead) or has the wrong type.
        ValueError: an option is out of range, or has no effect without another one.
    """
    names = [*signature(made).parameters, "service_backend", "service_backend_options"]
    if useless := [name for name in given if name in OPTIONS and name not in names]:
        raise TypeError(
            f"{made.__name__} has no option {useless[0]!r}: it draws whole episodes uniformly. "
            f"UniformReplayStorage({useless[0]}=...) has sample_episodes(n) too."
        )
    if parts := [name for name in given if name in _PARTS]:
        raise TypeError(
            f"{made.__name__} has no option {parts[0]!r}: it makes its parts of options. "
            f"ReplayStorage({parts[0]}=...) is made of parts."
        )
    every = {name: option.default for name, option in OPTIONS.items()} | {**defaults, **given}
    checks = {name: option.check for name, option in OPTIONS.items()}
    every = checked(made.__name__, every, checks, names)
    for name, (switch, off) in _NEEDED.items():
        if name == "discount" and discounts_goals:
            continue
        # No error if the caller explicitly turned the other one off.
        if name in given and switch not in given and every[switch] == off:
            more = "; the loss has a discount of its own" if name == "discount" else ""
            if more and "strategy" in names:
                more += ", and of the goals only 'geometric' ones use this one"
            raise ValueError(
                f"{name} does nothing without {switch}, which is {off} in {made.__name__}: pass "
                f"{switch} as well, or leave {name} out{more}."
            )
    return every


def with_options(shown: Signature, options: type[RowOptions], defaults: RowOptions) -> Signature:
    """Replaces `**options` in a signature by the individual options."""
    own = {
        name: it for name, it in shown.parameters.items() if it.kind is not Parameter.VAR_KEYWORD
    }
    if len(own) == len(shown.parameters):
        return shown
    every: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()} | {
        **defaults
    }
    for name, hint in get_type_hints(options).items():
        by_name = Parameter(name, Parameter.KEYWORD_ONLY, default=every[name], annotation=hint)
        own.setdefault(name, by_name)
    return shown.replace(parameters=[*own.values()])
