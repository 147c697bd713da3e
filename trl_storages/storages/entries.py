"""The tensors of a TensorDict, found in one walk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import NestedKey, TensorDictBase

__all__ = ["tensors_of"]


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


def _walk(
    data: Mapping | TensorDictBase,
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
