"""The tensors of a TensorDict, found in one walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from trl_storages._torchrl import TensorGuards

__all__ = ["Nested", "Structure", "are_plain", "nested_sizes", "plain", "tensors_of"]

_is_cpu, _is_contiguous, _is_neg = (
    attrgetter("is_cpu"),
    torch.Tensor.is_contiguous,
    torch.Tensor.is_neg,
)

#: Batch dimensions of nested TensorDicts beyond those of the outermost one: `(path, extra sizes)`.
Nested = tuple[tuple[tuple[str, ...], torch.Size], ...]


def tensors_of(data: TensorDictBase, *, strict: bool = True) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of `data` by unravelled key.

    Args:
        data: TensorDict, dense or lazily stacked.
        strict: raise on entries that are not tensors; False skips them.

    Raises:
        TypeError: an entry is not a tensor.

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
    # Comparing the exact class is faster than isinstance.
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


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are on the CPU, contiguous and without a pending negation."""
    there = all(map(_is_cpu, tensors)) and all(map(_is_contiguous, tensors))
    return there and not any(map(_is_neg, tensors))


def plain(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the tensors as `are_plain` asks, the same sequence if they are so already."""
    if are_plain(tensors):
        return tensors
    return [tensor.detach().cpu().resolve_neg().contiguous() for tensor in tensors]


class Structure:
    """The structure of a TensorDict: its keys, and dtypes, shapes, strides, devices of some tensors.

    >>> data = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2])
    >>> structure = Structure.of(data, [data["b"], data["a"]])
    >>> structure.tensors(data.clone().zero_()), structure.tensors(data.double())
    ((tensor([0., 0.]), tensor([0., 0.])), None)
    """

    def __init__(
        self,
        keys: _Keys,
        places: Sequence[int],
        twins: Sequence[tuple[int, int]],
        guards: TensorGuards,
        *,
        is_plain: bool,
    ) -> None:
        self._keys, self._twins, self._guards = keys, twins, guards
        self._wanted, self._guarded = itemgetter(*places), itemgetter(*dict.fromkeys(places))
        #: Whether the tensors `are_plain`.
        self.is_plain = is_plain

    @classmethod
    def of(cls, data: TensorDictBase, tensors: Sequence[torch.Tensor]) -> Structure | None:
        """Returns the structure of a TensorDict.

        Args:
            data: the TensorDict.
            tensors: some of its tensors.

        Returns:
            None if `data` is not exactly a `TensorDict` or does not hold these very tensors, or if fewer
            than two distinct tensors are given.
        """
        if type(data) is not TensorDict:
            return None
        keys = _Keys(data)
        values = keys.values(data) or []
        place_of: dict[int, int] = {}
        # A tensor under two keys is known by its first place.
        firsts = [place_of.setdefault(id(value), place) for place, value in enumerate(values)]
        twins = [(first, place) for place, first in enumerate(firsts) if first != place]
        if any(id(tensor) not in place_of for tensor in tensors):
            return None
        places = [place_of[id(tensor)] for tensor in tensors]
        guarded = [values[place] for place in dict.fromkeys(places)]
        if len(guarded) < 2:
            return None
        sizes: Any = [[*tensor.shape] for tensor in guarded]
        strides: Any = [[*tensor.stride()] for tensor in guarded]
        guards = TensorGuards(*guarded, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return cls(keys, places, twins, guards, is_plain=are_plain(guarded))

    def tensors(self, data: TensorDictBase) -> tuple[torch.Tensor, ...] | None:
        """Returns the corresponding tensors of another TensorDict; None if its structure differs."""
        values = self._keys.values(data)
        if values is None or not self._guards.check(*self._guarded(values)):
            return None
        for first, later in self._twins:
            if values[first] is not values[later]:
                return None
        found: tuple[torch.Tensor, ...] = self._wanted(values)
        return found


class _Keys:
    """The keys of a TensorDict in order, nested ones included."""

    def __init__(self, data: TensorDict) -> None:
        self._names = [*data.keys()]
        below = [
            (at, _Keys(value))
            for at, value in enumerate(data.values())
            if type(value) is TensorDict
        ]
        # Last first, so that splicing in nested values does not shift the remaining positions.
        self._below = below[::-1]

    def values(self, data: Any) -> list[Any] | None:
        """Returns the values of a TensorDict with exactly these keys; None for any other."""
        if type(data) is not TensorDict or [*(source := data._tensordict)] != self._names:
            return None
        found = [*source.values()]
        for at, keys in self._below:
            if (values := keys.values(found[at])) is None:
                return None
            found[at : at + 1] = values
        return found
