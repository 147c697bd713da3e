"""How the fields of a transition lie in one row of 64-bit words.

Letters: N rows, W words a row, B any leading shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key

from trl_storages._torchrl import new_tensordict

__all__ = ["Field", "Layout"]

_WORD = 8  # bytes


@dataclass(frozen=True)
class Field:
    """One entry of a transition: its key, dtype, shape and place in the row.

    `start` is counted in elements of `dtype`, as is `size`.
    """

    key: NestedKey
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def __str__(self) -> str:
        return f"{_name(self.dtype)} {list(self.shape)}"


class Layout:
    """Places fields in a row, so that one gather of rows fetches all of them.

    Fields are sorted by the size of their elements, the largest first: each is aligned without gaps,
    and only the end of the row is padded, to whole words.

    Args:
        fields: key -> (dtype, shape) of one transition.

    Raises:
        ValueError: there is no field.

    >>> layout = Layout({"observation": (torch.float32, (3,)), ("next", "done"): (torch.bool, (1,))})
    >>> layout.row_nbytes, layout.padding
    (16, 3)
    """

    def __init__(self, fields: Mapping[NestedKey, tuple[torch.dtype, Iterable[int]]]) -> None:
        if not fields:
            raise ValueError("a layout needs at least one field, got none.")
        described = [
            (unravel_key(key), dtype, torch.Size(shape)) for key, (dtype, shape) in fields.items()
        ]
        described.sort(key=lambda field: -field[1].itemsize)
        placed, offset = [], 0
        for key, dtype, shape in described:
            placed.append(Field(key, dtype, shape, offset // dtype.itemsize))
            offset += shape.numel() * dtype.itemsize
        self.fields = tuple(placed)
        # 16-byte elements (complex128) need rows that are a multiple of their size.
        unit = max(_WORD, described[0][1].itemsize)
        self.row_nbytes = max(unit, -(-offset // unit) * unit)
        self.padding = self.row_nbytes - offset
        self._by_key = {field.key: field for field in self.fields}
        self._by_dtype = self._group()

    @classmethod
    def of(cls, data: TensorDictBase, batch_dims: int) -> Layout:
        """Describes the leaves of `data` past their first `batch_dims` dimensions."""
        return cls(
            {key: (value.dtype, value.shape[batch_dims:]) for key, value in _leaves(data).items()}
        )

    @property
    def num_words(self) -> int:
        """W, the width of a row in 64-bit words."""
        return self.row_nbytes // _WORD

    def _group(self) -> list[tuple[torch.dtype, list[int], list[tuple[int, Field]]]]:
        """Prepares one split per dtype: `(dtype, sizes, [(which part, field)])` of a row seen so."""
        groups = []
        for dtype in dict.fromkeys(field.dtype for field in self.fields):
            sizes, fields, position = [], [], 0
            for field in (field for field in self.fields if field.dtype is dtype):
                # What lies between fields is a part as well, but an empty part costs as much.
                sizes += [field.start - position] if field.start > position else []
                fields.append((len(sizes), field))
                sizes.append(field.size)
                position = field.start + field.size
            end = self.row_nbytes // dtype.itemsize
            sizes += [end - position] if end > position else []
            groups.append((dtype, sizes, fields))
        return groups

    def views(self, rows: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        """Sees each field of `[*B, W]` int64 rows as a tensor `[*B, *shape]` that shares its memory."""
        batch = rows.shape[:-1]
        views = {}
        for dtype, sizes, fields in self._by_dtype:
            parts = rows.view(dtype).split_with_sizes(sizes, -1)
            for place, field in fields:
                part, plain = parts[place], len(field.shape) == 1
                views[field.key] = part if plain else part.view(*batch, *field.shape)
        return views

    def tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Sees `[*B, W]` int64 rows as a TensorDict of batch size B that shares their memory."""
        batch, device = rows.shape[:-1], rows.device
        nested: dict[str, Any] = {}
        for key, view in self.views(rows).items():
            if isinstance(key, str):
                nested[key] = view
                continue
            node = nested
            for part in key[:-1]:
                node = node.setdefault(part, {})
            node[key[-1]] = view
        return _wrap(nested, batch, device)

    def leaves_of(
        self, data: TensorDictBase, batch_size: torch.Size, *, strict: bool = True
    ) -> list[torch.Tensor]:
        """Returns the leaves of `data` in the order of `fields`, if they fit the layout.

        Args:
            data: TensorDict whose leaves have shape `[*batch_size, *field.shape]`.
            batch_size: its leading dimensions.
            strict: whether a leaf that is not in the layout is an error; it is left out otherwise.

        Raises:
            KeyError: a field is missing, or, if `strict`, one is not in the layout.
            TypeError: a dtype differs.
            ValueError: a shape differs.
        """
        if strict:
            leaves = _leaves(data)
            self._check_no_more(leaves)
        else:
            leaves = {field.key: data.get(field.key, None) for field in self.fields}
        for field in self.fields:
            leaf = leaves.get(field.key)
            if leaf is None:
                raise KeyError(
                    f"the data lacks {field.key!r}, which every row holds as {field}; its keys are "
                    f"{sorted(map(str, _leaves(data)))}."
                )
            if leaf.dtype is not field.dtype:
                raise TypeError(
                    f"{field.key!r} must be {_name(field.dtype)} as in the rows already laid out, got "
                    f"{_name(leaf.dtype)}; convert it before it is written."
                )
            if leaf.shape != batch_size + field.shape:
                raise ValueError(
                    f"{field.key!r} must have shape {list(batch_size + field.shape)} (batch "
                    f"{list(batch_size)}, field {list(field.shape)}), got {list(leaf.shape)}."
                )
        return [leaves[field.key] for field in self.fields]

    def _check_no_more(self, leaves: dict[NestedKey, torch.Tensor]) -> None:
        extra = [key for key in leaves if key not in self._by_key]
        if extra:
            raise KeyError(
                f"the data holds {extra}, which the rows have no room for: their fields are "
                f"{[field.key for field in self.fields]}. Leave it out, or pass "
                "EpisodeWriter(keys=...) to store some entries only."
            )

    def to_json(self) -> dict[str, Any]:
        """Describes the layout in plain lists, strings and numbers."""
        return {
            "row_nbytes": self.row_nbytes,
            "fields": [
                {
                    "key": [field.key] if isinstance(field.key, str) else list(field.key),
                    "dtype": _name(field.dtype),
                    "shape": list(field.shape),
                }
                for field in self.fields
            ],
        }

    @classmethod
    def from_json(cls, description: dict[str, Any]) -> Layout:
        """Rebuilds the layout that `to_json` described.

        Raises:
            ValueError: the description is damaged or of another version.
        """
        try:
            layout = cls(
                {
                    tuple(field["key"]): (_DTYPES[field["dtype"]], field["shape"])
                    for field in description["fields"]
                }
            )
            row_nbytes = description["row_nbytes"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the description of the rows is damaged: {error!r}.") from error
        if layout.row_nbytes != row_nbytes:
            raise ValueError(
                f"the description says {row_nbytes} bytes a row, its fields need "
                f"{layout.row_nbytes}."
            )
        return layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{field.key!r}: {field}" for field in self.fields)
        return f"{type(self).__name__}({self.row_nbytes} bytes a row; {fields})"


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaves(data: TensorDictBase, path: tuple[str, ...] = ()) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of `data` by unravelled key; anything but tensors is an error."""
    leaves: dict[NestedKey, torch.Tensor] = {}
    for name, value in data.items():
        key = (*path, name) if path else name
        if isinstance(value, torch.Tensor):
            leaves[key] = value
        elif isinstance(value, TensorDictBase):
            leaves |= _leaves(value, (*path, name))
        else:
            raise TypeError(
                f"{key!r} must be a tensor, got {type(value).__name__}: rows hold tensors only."
            )
    return leaves


def _wrap(nested: dict[str, Any], batch: torch.Size, device: torch.device) -> TensorDict:
    source = {
        name: _wrap(value, batch, device) if isinstance(value, dict) else value
        for name, value in nested.items()
    }
    return new_tensordict(source, batch, device)
