"""Derives the fields of a transition, and its choices of actions, from gymnasium or TorchRL spaces."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import NestedKey, unravel_key
from torchrl.data import Categorical, Composite, MultiCategorical, NonTensor, TensorSpec

from trl_storages import arguments
from trl_storages.keys import (
    ACTION,
    DONE,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    key_path,
    leaves,
    next_key,
    overlapping,
)
from trl_storages.writing.columns import NUMPY_TO_TORCH

__all__ = [
    "OUTCOME_FIELDS",
    "Choices",
    "Field",
    "InfoKeys",
    "check_free",
    "choices_of",
    "limits_of",
    "strange_action",
    "transition_fields",
]

Field = tuple[torch.dtype, torch.Size]
# Keys are `Any`, as a `dict[str, ...]` is no `Mapping[NestedKey, ...]` to type checkers.
InfoKeys = Sequence[NestedKey] | Mapping[Any, Any]

# The reward and the flags of every transition.
OUTCOME_FIELDS: dict[NestedKey, Field] = {
    REWARD: (torch.float32, torch.Size([1])),
    DONE: (torch.bool, torch.Size([1])),
    TERMINATED: (torch.bool, torch.Size([1])),
    TRUNCATED: (torch.bool, torch.Size([1])),
}


def transition_fields(
    observation_space: spaces.Space[Any] | TensorSpec,
    action_space: spaces.Space[Any] | TensorSpec,
    info_keys: InfoKeys = (),
) -> dict[NestedKey, Field]:
    """Returns the fields of one stored transition.

    Dtypes, shapes and keys are those of TorchRL's `GymEnv(..., categorical_action_encoding=True)`:
    a `Discrete` is an int64 scalar, a `Box` without dimensions has the shape `[1]`, and a `state`
    entry is called `observation` where there is none.

    Args:
        observation_space: of one environment: a gymnasium space, nested `Dict`s included, or
            TorchRL's `env.observation_spec`, whose leading dimensions (for a batch of environments)
            are dropped.
        action_space: likewise; a spec has the same leading dimensions as the observation's.
        info_keys: further entries. A mapping from key to space or spec gives their fields; with a
            plain sequence of keys they are unknown until the first step, so they have none here.

    Returns:
        Mapping from key to the dtype and the shape of a single transition: observations at the
        root and under "next", "action", the info entries, and under "next" the reward (float32)
        and the flags `done`, `terminated`, `truncated` (bool), all four of the shape `[1]`.

    Raises:
        TypeError: a space has no tensor of a fixed shape and dtype (`Tuple`, `Text`, `Graph`, ...).
        ValueError: there is no observation, or two entries have the same key.

    >>> from gymnasium.spaces import Box, Discrete
    >>> fields = transition_fields(Box(0, 1, (3,)), Discrete(2))
    >>> fields["action"], fields["next", "reward"]
    ((torch.int64, torch.Size([])), (torch.float32, torch.Size([1])))
    """
    batch_dims = len(observation_space.shape) if isinstance(observation_space, Composite) else 0
    observations = _group(observation_space, OBSERVATION, batch_dims)
    if isinstance(observation_space, spaces.Dict) and "observation" not in observations:
        observations = {
            OBSERVATION if key == "state" else key: field for key, field in observations.items()
        }
    actions = _group(action_space, ACTION, batch_dims)
    for name, entries in (("observation", observations), ("action", actions)):
        if not entries:
            raise ValueError(f"the {name} space must have an entry, got {name}_space without any.")
    infos: list[tuple[NestedKey, Field]] = []
    names = arguments.keys("info_keys", info_keys)
    if isinstance(info_keys, Mapping):
        for name, space in zip(names, info_keys.values(), strict=True):
            if isinstance(space, (Composite, spaces.Dict)):
                raise TypeError(
                    f"the info {name!r} must be a single tensor, got {space}; name each ({name!r}, ...)"
                )
            infos += _group(space, name, 0).items()
    # The fields of every transition come first, so that no entry can replace them.
    fields: dict[NestedKey, Field] = dict(OUTCOME_FIELDS)
    for key, field in (
        *observations.items(),
        *actions.items(),
        *infos,
        *((next_key(key), field) for key, field in observations.items()),
    ):
        check_free(key, fields)
        fields[key] = field
    return fields


def check_free(key: NestedKey, taken: Mapping[NestedKey, Any]) -> None:
    """Raises a ValueError if a transition with the keys `taken` has no place for `key`."""
    if (other := overlapping(key, taken)) is not None:
        raise ValueError(
            f"the keys of a transition must differ, got {key!r} beside {other!r}; rename one of them"
        )


def _group(space: Any, key: NestedKey, batch_dims: int) -> dict[NestedKey, Field]:
    """Returns the fields of an observation, action or info; a TorchRL composite has its own keys."""
    return {
        name: _spec_field(leaf, name, batch_dims)
        if isinstance(leaf, TensorSpec)
        else _space_field(leaf, name)
        for name, leaf in _leaves_of(space, key)
    }


def _leaves_of(space: Any, key: NestedKey) -> Iterator[tuple[NestedKey, Any]]:
    """Yields the spaces or specs of single entries."""
    if isinstance(space, Composite):
        found = space.items(include_nested=True, leaves_only=True)
    elif isinstance(space, TensorSpec):
        found = [(key, space)]
    elif isinstance(space, spaces.Space):
        # The entries of a dictionary of observations are at the root, as in TorchRL.
        is_root = key == OBSERVATION and isinstance(space, spaces.Dict)
        found = leaves(space, f"the space of {key!r}", () if is_root else key_path(key))
    else:
        raise TypeError(
            f"the space of {key!r} must be a gymnasium space or a TorchRL spec, got {space!r}"
        )
    return ((unravel_key(path), leaf) for path, leaf in found)


def _space_field(space: spaces.Space[Any], key: NestedKey) -> Field:
    fixed = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
    if not isinstance(space, fixed) or space.shape is None:
        raise TypeError(
            f"the space of {key!r} must be a Box, Discrete, MultiBinary, MultiDiscrete or a Dict of "
            f"them, got {space}; convert it, as by gymnasium.wrappers.FlattenObservation"
        )
    dtype = NUMPY_TO_TORCH.get(space.dtype)
    if dtype is None:
        raise TypeError(
            f"the space of {key!r} must have one of the dtypes "
            f"{sorted(map(str, NUMPY_TO_TORCH))}, got {space.dtype}"
        )
    is_scalar_box = isinstance(space, spaces.Box) and not space.shape
    return dtype, torch.Size([1]) if is_scalar_box else torch.Size(space.shape)


def _spec_field(spec: TensorSpec, key: NestedKey, batch_dims: int) -> Field:
    if isinstance(spec, NonTensor) or spec.dtype is None:
        raise TypeError(f"the spec of {key!r} must be of a tensor, got {spec}")
    shape = spec.shape[batch_dims:]
    if len(spec.shape) < batch_dims or any(size < 0 for size in shape):
        raise TypeError(
            f"the spec of {key!r} must have a fixed shape, with the {batch_dims} leading "
            f"dimensions of the observation spec, got {list(spec.shape)}"
        )
    return spec.dtype, torch.Size(shape)


class Choices(NamedTuple):
    """The values of a discrete action: `number` of them from `first` on, each a number or `[*shape]`."""

    first: Any
    number: Any


def choices_of(action_space: spaces.Space[Any] | TensorSpec) -> dict[NestedKey, Choices]:
    """Returns the choices of the discrete actions of a space or spec, by key.

    >>> choices_of(spaces.Discrete(3, start=1))["action"]
    Choices(first=1, number=3)
    """
    choices: dict[NestedKey, Choices] = {}
    for key, space in _leaves_of(action_space, ACTION):
        match space:
            case spaces.Discrete():
                choices[key] = Choices(int(space.start), int(space.n))
            case spaces.MultiDiscrete():
                choices[key] = Choices(space.start, space.nvec)
            # Before Categorical, its base class.
            case MultiCategorical():
                choices[key] = Choices(0, space.nvec.numpy())
            case Categorical():
                choices[key] = Choices(0, space.n)
    return choices


def strange_action(key: NestedKey, choices: Choices, taken: NDArray[Any]) -> tuple[int, str] | None:
    """Returns the first of the actions `[n, *shape]` that is outside its space, and what is wrong.

    >>> strange_action("action", Choices(0, 2), np.array([0, 1, 5]))
    (2, 'actions must be from 0 to 1, got 5')
    """
    first, number = choices
    strange = np.argwhere((taken < first) | (taken >= first + number))
    if not len(strange):
        return None
    row, place = int(strange[0, 0]), tuple(map(int, strange[0, 1:]))
    low, high = limits_of(choices)[np.ravel_multi_index(place, taken.shape[1:])]
    label = "".join(f"[{name!r}]" for name in key_path(key)[1:])
    return row, f"actions{label} must be from {low} to {high}, got {taken[row][place]}"


def limits_of(choices: Choices) -> list[tuple[int, int]]:
    """Returns the first and the last choice for each element of an action."""
    first, number = np.broadcast_arrays(*choices)
    return [*zip(first.ravel().tolist(), (first + number - 1).ravel().tolist(), strict=True)]
