"""The tensors of a TensorDict, found in one walk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

__all__ = ["Nested", "nested_sizes", "tensors_of"]

#: What nested TensorDicts have beyond the batch size of the outermost one: `(path, further sizes)`.
Nested = tuple[tuple[tuple[str, ...], torch.Size], ...]


def tensors_of(data: TensorDictBase, *, strict: bool = True) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of `data` by unravelled key.

    Args:
        data: TensorDict, dense or lazily stacked.
        strict: whether anything but tensors is an error; it is left out otherwise.

    Raises:
        TypeError: an entry is no tensor.

    >>> from tensordict import TensorDict
    >>> list(tensors_of(TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2)}}, [2])))
    ['a', ('b', 'c')]
    """
    found: dict[NestedKey, torch.Tensor] = {}
    _walk(data, (), found, strict)
    return found


def nested_sizes(data: TensorDictBase, batch_dims: int) -> Nested:
    """Returns which TensorDicts in `data` have more than `batch_dims` batch dimensions.

    >>> from tensordict import TensorDict
    >>> agents = TensorDict({"observation": torch.ones(2, 3, 4)}, [2, 3])
    >>> nested_sizes(TensorDict({"agents": agents}, [2]), 1)
    ((('agents',), torch.Size([3])),)
    """
    found: list[tuple[tuple[str, ...], torch.Size]] = []

    def walk(nested: TensorDictBase, path: tuple[str, ...]) -> None:
        for name, value in nested.items():
            if isinstance(value, TensorDictBase):
                if value.ndim > batch_dims:
                    found.append(((*path, name), value.batch_size[batch_dims:]))
                walk(value, (*path, name))

    walk(data, ())
    return tuple(found)


def _walk(
    data: Mapping[Any, Any] | TensorDictBase,
    path: tuple[str, ...],
    found: dict[NestedKey, torch.Tensor],
    strict: bool,
) -> None:
    # Of most tensors the class says at once what they are.
    plain = torch.Tensor
    for name, value in data.items():
        if type(value) is plain or isinstance(value, plain):
            found[(*path, name) if path else name] = value
        elif isinstance(value, TensorDictBase):
            _walk(value, (*path, name), found, strict)
        elif strict:
            raise TypeError(
                f"{(*path, name) if path else name!r} must be a tensor, got {type(value).__name__}: "
                "rows hold tensors only."
            )
