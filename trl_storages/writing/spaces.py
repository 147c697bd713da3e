"""Fields of transitions from gymnasium spaces or TorchRL specs, and conversion of values to fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import NestedKey, unravel_key
from torchrl.data import Categorical, Composite, MultiCategorical, NonTensor, TensorSpec
from torchrl.data.utils import numpy_to_torch_dtype_dict

from trl_storages import keys, validation

__all__ = [
    "NUMPY_TO_TORCH",
    "OUTCOME_FIELDS",
    "TORCH_TO_NUMPY",
    "Choices",
    "InfoKeys",
    "Kind",
    "as_field",
    "as_tensor",
    "choices_of",
    "transition_fields",
]

#: TorchRL's table, and the unsigned integers that TorchRL's table lacks.
NUMPY_TO_TORCH: dict[np.dtype, torch.dtype] = {
    **numpy_to_torch_dtype_dict,
    np.dtype(np.uint16): torch.uint16,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.uint64): torch.uint64,
}
TORCH_TO_NUMPY = {dtype: numpy_dtype for numpy_dtype, dtype in NUMPY_TO_TORCH.items()}

Kind = tuple[torch.dtype, torch.Size]
# Keys are `Any`, because to type checkers a `dict[str, ...]` is no `Mapping[NestedKey, ...]`.
InfoKeys = Sequence[NestedKey] | Mapping[Any, Any]

#: The reward and the flags of every transition.
OUTCOME_FIELDS: dict[NestedKey, Kind] = {
    keys.REWARD: (torch.float32, torch.Size([1])),
    keys.DONE: (torch.bool, torch.Size([1])),
    keys.TERMINATED: (torch.bool, torch.Size([1])),
    keys.TRUNCATED: (torch.bool, torch.Size([1])),
}


def transition_fields(
    observation_space: spaces.Space[Any] | TensorSpec,
    action_space: spaces.Space[Any] | TensorSpec,
    info_keys: InfoKeys = (),
) -> dict[NestedKey, Kind]:
    """Returns the fields of a stored transition.

    Dtypes, shapes and keys are those of TorchRL's `GymEnv(..., categorical_action_encoding=True)`:
    a `Discrete` is an int64 scalar, and a `Box` without dimensions has the shape `[1]`.

    Args:
        observation_space: space of one environment: a gymnasium space, nested `Dict`s included, or
            TorchRL's `env.observation_spec`, whose leading dimensions (for a batch of environments)
            are dropped.
        action_space: space or spec of the actions of one environment; a spec has the same leading
            dimensions as the spec of observations.
        info_keys: keys of infos, which are stored at `keys.info_key`. A mapping from key to space or spec
            determines the fields of the infos. With a sequence of keys the first step determines them, so
            they are not part of the result.

    Returns:
        Mapping from key to the dtype and the shape of a single transition: observations at the
        root and under "next", "action", the infos, and under "next" the reward (float32) and the flags
        `done`, `terminated`, `truncated` (bool), all four with the shape `[1]`.

    Raises:
        TypeError: a space has no tensor of a fixed shape and dtype (`Tuple`, `Text`, `Graph`, ...).
        ValueError: there is no observation, or two fields have the same key.

    >>> from gymnasium.spaces import Box, Discrete
    >>> fields = transition_fields(Box(0, 1, (3,)), Discrete(2))
    >>> fields["action"], fields["next", "reward"]
    ((torch.int64, torch.Size([])), (torch.float32, torch.Size([1])))
    """
    batch_dims = len(observation_space.shape) if isinstance(observation_space, Composite) else 0
    observations = _fields_of(observation_space, keys.OBSERVATION, batch_dims)
    actions = _fields_of(action_space, keys.ACTION, batch_dims)
    for name, space_fields in (("observation_space", observations), ("action_space", actions)):
        if not space_fields:
            raise ValueError(f"{name} must have a field, got none.")
    # The fields of every transition come first, so that no space can replace them.
    fields = dict(OUTCOME_FIELDS)
    next_observations = {keys.next_key(key): field for key, field in observations.items()}
    for key, field in chain(observations.items(), actions.items(), next_observations.items()):
        keys.check_free(key, fields)
        fields[key] = field
    infos = _info_fields(info_keys)
    for key, info in infos.items():
        # TorchRL's info readers make an info part of the observation.
        if key in next_observations and info in (None, next_observations[key]):
            continue
        keys.check_free(key, fields)
        if key[0] == "next":  # an info named as an action would be read as the next action
            keys.check_free(unravel_key(key[1:]), fields)
    return fields | {key: field for key, field in infos.items() if field is not None}


def _info_fields(info_keys: InfoKeys) -> dict[NestedKey, Kind | None]:
    """Returns the fields of the infos by stored key; None without a space."""
    info_spaces = info_keys if isinstance(info_keys, Mapping) else {}
    fields: dict[NestedKey, Kind | None] = {}
    for name, key in zip(info_keys, validation.keys("info_keys", info_keys), strict=True):
        keys.check_free(stored := keys.info_key(key), fields)
        fields[stored] = None
        if name in info_spaces:
            space_fields = _fields_of(space := info_spaces[name], key, 0)
            if [*space_fields] != [key]:
                raise TypeError(f"the info {key!r} must have one space, got {space}: name each.")
            fields[stored] = space_fields[key]
    return fields


def _fields_of(space: Any, key: NestedKey, batch_dims: int) -> dict[NestedKey, Kind]:
    return {
        name: _spec_field(leaf, name, batch_dims)
        if isinstance(leaf, TensorSpec)
        else _space_field(leaf, name)
        for name, leaf in _leaves_of(space, key)
    }


def _leaves_of(space: Any, key: NestedKey) -> Iterator[tuple[NestedKey, Any]]:
    """Yields keys with their spaces or specs; `key` is not used for a composite, which has keys."""
    if isinstance(space, Composite):
        yield from space.items(include_nested=True, leaves_only=True)
    elif isinstance(space, TensorSpec):
        yield key, space
    elif isinstance(space, spaces.Space):
        # The keys of a dictionary of observations are at the root, as in TorchRL.
        is_root = key == keys.OBSERVATION and isinstance(space, spaces.Dict)
        leaves = keys.leaves(space, f"the space of {key!r}", () if is_root else keys.key_path(key))
        yield from ((unravel_key(path), leaf) for path, leaf in leaves)
    else:
        raise TypeError(
            f"the space of {key!r} must be a gymnasium space or a TorchRL spec, got {space!r}."
        )


def _space_field(space: spaces.Space[Any], key: NestedKey) -> Kind:
    supported = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
    if not isinstance(space, supported) or space.dtype not in NUMPY_TO_TORCH:
        raise TypeError(
            f"the space of {key!r} must be a Box, Discrete, MultiBinary, MultiDiscrete, or a Dict of "
            f"them, of a dtype that torch has, got {space}."
        )
    is_scalar_box = isinstance(space, spaces.Box) and not space.shape
    return NUMPY_TO_TORCH[space.dtype], torch.Size([1] if is_scalar_box else space.shape or ())


def _spec_field(spec: TensorSpec, key: NestedKey, batch_dims: int) -> Kind:
    shape = spec.shape[batch_dims:]
    if isinstance(spec, NonTensor) or len(spec.shape) < batch_dims or any(n < 0 for n in shape):
        raise TypeError(f"the spec of {key!r} must be of tensors with one shape, got {spec}.")
    return spec.dtype, torch.Size(shape)


#: The first value of a discrete action, and the last one plus 1; each is a number or `[*shape]`.
Choices = tuple[Any, Any]


def choices_of(action_space: spaces.Space[Any] | TensorSpec) -> dict[NestedKey, Choices]:
    """Returns the choices of the discrete actions of a space or spec, by key.

    >>> choices_of(spaces.Discrete(3, start=1))["action"]
    (1, 4)
    """
    choices: dict[NestedKey, Choices] = {}
    for key, space in _leaves_of(action_space, keys.ACTION):
        match space:
            case spaces.Discrete():
                choices[key] = int(space.start), int(space.start + space.n)
            case spaces.MultiDiscrete():
                choices[key] = space.start, space.start + space.nvec
            # Before Categorical, its base class.
            case MultiCategorical():
                choices[key] = 0, space.nvec.numpy()
            case Categorical():
                choices[key] = 0, space.n
    return choices


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """Returns `value` as a tensor, sharing its memory if possible.

    Raises:
        TypeError: tensors lack the dtype, as for strings and other objects.
        ValueError: the items of a list differ in shape.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
    except ValueError as error:  # items of several shapes
        raise ValueError(f"{name} must have one shape, got {validation.shown(value)}.") from error
    dtype = array.dtype.newbyteorder("=")
    if isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be numbers, got a dictionary with {sorted(map(str, value))}. If these are "
            "agents, pass one reward and one flag for the team, or write TensorDicts with extend()."
        )
    if dtype not in NUMPY_TO_TORCH:
        raise TypeError(
            f"{name} must be numbers, got the dtype {array.dtype}: convert it, as with np.float32(...)."
        )
    # Tensors lack negative strides, foreign byte orders and read-only memory.
    array = np.require(array, dtype, ["C", "W"])
    return torch.from_numpy(array if min(array.strides, default=0) >= 0 else array.copy())


def as_field(
    value: Any, dtype: torch.dtype, shape: Sequence[int], name: str, *, is_rounded: bool = False
) -> torch.Tensor:
    """Returns `value` as a tensor of this dtype and shape, sharing its memory if possible.

    Arrays and tensors of another dtype are accepted if `dtype` holds all values of that dtype exactly.
    Plain numbers and lists are accepted if they are of the same kind. A last dimension of 1 may be
    missing.

    Args:
        value: array, tensor, number or list.
        dtype: dtype of the field.
        shape: expected shape.
        name: for messages.
        is_rounded: whether arrays and tensors are accepted as plain numbers are.

    Raises:
        TypeError: `value` has another dtype.
        ValueError: `value` has another shape, or holds an integer outside of the range of `dtype`.
    """
    values = as_tensor(value, name)
    if values.dtype is not dtype:
        if is_rounded or not hasattr(value, "dtype"):
            can_cast = torch.can_cast(values.dtype, dtype)
        else:
            source, target = TORCH_TO_NUMPY.get(values.dtype), TORCH_TO_NUMPY.get(dtype)
            can_cast = source is not None and target is not None and np.can_cast(source, target)
        if not can_cast:
            raise TypeError(f"{name} must be {dtype}, got {values.dtype}: convert it.")
        cast = values.to(dtype)
        may_round = dtype.is_floating_point or dtype.is_complex
        if not may_round and not torch.equal(cast.to(values.dtype), values):
            raise ValueError(f"{name} must be in the range of {dtype}, got {value}.")
        values = cast
    if values.shape != tuple(shape):
        if not (shape and shape[-1] == 1 and values.shape == tuple(shape[:-1])):
            is_vector = len(shape) > 1 and shape[0] == shape[1] and values.shape == tuple(shape[1:])
            hint = (
                " If the buffer was created with the spaces of a vector environment, pass "
                "env.single_observation_space and env.single_action_space, or use from_env(env)."
            )
            raise ValueError(
                f"{name} must have the shape {list(shape)}, got {list(values.shape)}.{hint * is_vector}"
            )
        values = values.unsqueeze(-1)
    return values
