"""What a ready-made storage may be asked for, and what it takes unasked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import torch
from gymnasium.vector import AutoresetMode
from tensordict import NestedKey
from torchrl.data.replay_buffers.sample_units import SampleUnit

from trl_storages.gym.fields import InfoKeys
from trl_storages.other_names import meant
from trl_storages.priorities import Normalization
from trl_storages.writing import OnGap

__all__ = ["DEFAULTS", "Options", "check_names", "with_options"]


class Options(TypedDict, total=False):
    """Keywords of all ready-made storages; `UniformReplayStorage` says what each does."""

    storage_size: int
    num_envs: int
    batch_size: int
    device: torch.device | str
    path: str | Path | None
    n_step: int
    discount: float
    alpha: float
    beta: float
    normalize: Normalization
    eps: float
    eta: float
    c_min: int
    prefetch: int
    seed: int | None
    info_keys: InfoKeys
    extra_fields: Mapping[NestedKey, tuple[torch.dtype, Sequence[int]]]
    sample_unit: SampleUnit | None
    autoreset_mode: AutoresetMode | str | None
    on_gap: OnGap


DEFAULTS: Options = {
    "storage_size": 1_000_000,
    "num_envs": 1,
    "batch_size": 256,
    "device": "cpu",
    "path": None,
    "n_step": 1,
    "discount": 0.99,
    "alpha": 0.0,
    "beta": 0.4,
    "normalize": "batch",
    "eps": 1e-6,
    "eta": 1.0,
    "c_min": 5000,
    "prefetch": 0,
    "seed": None,
    "info_keys": (),
    "extra_fields": {},
    "sample_unit": None,
    "autoreset_mode": None,
    "on_gap": "warn",
}


def check_names(made: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Checks that there is an option for each keyword.

    Args:
        made: what is made, for the message.
        given: the keywords.
        names: those that there are.

    Raises:
        TypeError: there is none for one of them; the message says what to write instead.
    """
    for name in given:
        if name not in names:
            raise TypeError(f"{made} has no option {name!r}: {meant(name, names)}")


def with_options(signature: Signature, defaults: Options) -> Signature:
    """Returns a signature with the options in the place of its `**options`."""
    hints = get_type_hints(Options)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not Parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in {**DEFAULTS, **defaults}.items()
            if name not in signature.parameters
        ]
    return signature.replace(parameters=parameters)
