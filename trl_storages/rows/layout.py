"""How the fields of a transition lie in one row of 64-bit words.

Letters: N rows, W words a row, B any leading shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import eq
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, unravel_key

from trl_storages._torchrl import new_tensordict
from trl_storages.rows.entries import Nested

__all__ = ["Field", "Layout", "nest"]

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

    @property
    def start_byte(self) -> int:
        """Where the field begins in the row."""
        return self.start * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{_name(self.dtype)} {list(self.shape)}"


class Layout:
    """Places fields in a row, so that one gather of rows fetches all of them.

    Fields are sorted by the size of their elements, the largest first: each is aligned without gaps,
    and only the end of the row is padded, to whole words.

    Args:
        fields: key -> (dtype, shape) of one transition.
        nested: batch dimensions that nested TensorDicts have beyond that of the rows, by path.

    Raises:
        ValueError: there is no field.
        TypeError: rows can't hold a dtype, as that of quantized tensors or of parts of a byte.

    >>> layout = Layout({"observation": (torch.float32, (3,)), ("next", "done"): (torch.bool, (1,))})
    >>> layout.row_nbytes, layout.padding
    (16, 3)
    """

    def __init__(
        self,
        fields: Mapping[NestedKey, tuple[torch.dtype, Iterable[int]]],
        nested: Nested = (),
    ) -> None:
        if not fields:
            raise ValueError("a layout needs at least one field, got none.")
        described = [
            (unravel_key(key), dtype, torch.Size(shape)) for key, (dtype, shape) in fields.items()
        ]
        for key, dtype, _ in described:
            if dtype not in _STORABLE:
                raise TypeError(
                    f"{key!r} must have a dtype that rows can hold, one of "
                    f"{sorted(map(_name, _STORABLE))}, got {_name(dtype)}."
                )
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
        #: The keys of the fields.
        self.keys = tuple(field.key for field in self.fields)
        self._by_key = {field.key: field for field in self.fields}
        #: `[n, 2]` int64, the first byte of each field and how many it takes.
        self.places = np.array([(it.start_byte, it.num_bytes) for it in self.fields], np.int64)
        #: `[m, 2]` int64, the same of what lies under `next`, where neighbours are one.
        self.following = _joined([it for it in self.fields if it.key[0] == "next"])
        #: As given.
        self.nested = nested
        self._tree = _tree_of(self.keys, nested)
        self._splits = [self._split_of(list(run)) for _, run in groupby(self.fields, _dtype_of)]
        # The fields that are no vectors, by their place among all.
        self._shapes = [
            (place, field.shape) for place, field in enumerate(self.fields) if len(field.shape) != 1
        ]
        # The fields of a batch like the last one that was written.
        self._wanted: tuple[torch.Size | None, list[Any]] = (None, [])

    @classmethod
    def of(
        cls, entries: Mapping[NestedKey, torch.Tensor], batch_dims: int, nested: Nested = ()
    ) -> Layout:
        """Describes tensors past their first `batch_dims` dimensions."""
        fields = {key: (value.dtype, value.shape[batch_dims:]) for key, value in entries.items()}
        return cls(fields, nested)

    @property
    def described(self) -> dict[NestedKey, tuple[torch.dtype, torch.Size]]:
        """Key -> (dtype, shape) of each field, wherever it lies."""
        return {field.key: (field.dtype, field.shape) for field in self.fields}

    @property
    def num_words(self) -> int:
        """W, the width of a row in 64-bit words."""
        return self.row_nbytes // _WORD

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def field(self, key: NestedKey) -> Field:
        """Returns where a field lies.

        Raises:
            KeyError: there is no such field; the message lists those that are there.
        """
        found = self._by_key.get(key)
        if found is None:
            raise KeyError(
                f"the rows have no field {key!r}; they have {sorted(map(str, self.keys))}."
            )
        return found

    def _split_of(self, run: Sequence[Field]) -> tuple[torch.dtype, list[int], slice]:
        """Returns how a row of elements of one dtype is split into fields that are neighbours.

        Returns:
            the dtype, the sizes of the parts of a row, and which of them are the fields.
        """
        dtype, start, stop = run[0].dtype, run[0].start, run[-1].start + run[-1].size
        rest = self.row_nbytes // dtype.itemsize - stop
        # What lies around them is a part as well, but an empty part takes as long as a field.
        before, after = [start] if start else [], [rest] if rest else []
        sizes = [*before, *(field.size for field in run), *after]
        return dtype, sizes, slice(len(before), len(before) + len(run))

    def views(self, rows: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        """Sees each field of `[*B, W]` int64 rows as a tensor `[*B, *shape]` that shares its memory."""
        return dict(zip(self.keys, self._views(rows), strict=True))

    def _views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        views: list[torch.Tensor] = []
        for dtype, sizes, fields in self._splits:
            # One split makes nine views in the time of four.
            views += rows.view(dtype).split_with_sizes(sizes, -1)[fields]
        for place, shape in self._shapes:
            views[place] = views[place].view(rows.shape[:-1] + shape)
        return views

    def tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Sees `[*B, W]` int64 rows as a TensorDict of batch size B that shares their memory."""
        return _fill(self._tree, self._views(rows), rows.shape[:-1], rows.device)

    def fit(
        self,
        entries: Mapping[NestedKey, torch.Tensor],
        batch_size: torch.Size,
        *,
        strict: bool = True,
    ) -> list[torch.Tensor]:
        """Returns entries in the order of `fields`, if they fit the layout.

        Args:
            entries: key -> tensor `[*batch_size, *field.shape]`, as `tensors_of` finds them.
            batch_size: the leading dimensions.
            strict: whether an entry that is not in the layout is an error; it is left out otherwise.

        Raises:
            KeyError: a field is missing, or, if `strict`, one is not in the layout.
            TypeError: a dtype differs.
            ValueError: a shape differs.
        """
        if self._wanted[0] != batch_size:
            self._wanted = batch_size, [(it.dtype, batch_size + it.shape) for it in self.fields]
        if len(entries) > len(self.fields) and strict:
            self._check_no_more(entries)
        fitting = [*map(entries.get, self.keys)]
        found = [None if it is None else (it.dtype, it.shape) for it in fitting]
        if found != self._wanted[1]:
            self._explain([*map(eq, found, self._wanted[1])].index(False), batch_size, entries)
        return fitting  # type: ignore[return-value]

    def _explain(
        self, place: int, batch_size: torch.Size, entries: Mapping[NestedKey, torch.Tensor]
    ) -> NoReturn:
        """Raises the error that says why the entry of a field does not fit."""
        field = self.fields[place]
        key, entry = field.key, entries.get(field.key)
        if entry is None:
            raise KeyError(
                f"the data lacks {key!r}, which every row holds as {field}; its keys are "
                f"{sorted(map(str, entries))}."
            )
        if entry.dtype is not field.dtype:
            raise TypeError(
                f"{key!r} must be {_name(field.dtype)} as in the rows already laid out, got "
                f"{_name(entry.dtype)}; convert it before it is written."
            )
        raise ValueError(
            f"{key!r} must have shape {list(batch_size + field.shape)} (batch "
            f"{list(batch_size)}, field {list(field.shape)}), got {list(entry.shape)}."
        )

    def _check_no_more(self, entries: Mapping[NestedKey, torch.Tensor]) -> None:
        extra = [key for key in entries if key not in self.keys]
        if extra:
            raise KeyError(
                f"the data holds {extra}, which the rows have no room for: their fields are "
                f"{list(self.keys)}. Leave it out, or pass "
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
            "nested": [[list(path), list(size)] for path, size in self.nested],
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
                    _key(field["key"]): (_DTYPES[field["dtype"]], _shape(field["shape"]))
                    for field in description["fields"]
                },
                tuple(
                    (tuple(path), torch.Size(size)) for path, size in description.get("nested", ())
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the description of the rows is damaged: {error!r}.") from error
        if layout.to_json() != description:
            raise ValueError(
                f"the description of the rows is damaged: of these fields it would be "
                f"{layout.to_json()}, got {description}."
            )
        return layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{field.key!r}: {field}" for field in self.fields)
        return f"{type(self).__name__}({self.row_nbytes} bytes a row; {fields})"


_STORABLE = frozenset(
    {
        *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    }
)

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def _joined(fields: Sequence[Field]) -> np.ndarray:
    """Returns the first byte and the number of bytes of each run of neighbours."""
    runs: list[list[int]] = []
    for field in fields:
        if runs and sum(runs[-1]) == field.start_byte:
            runs[-1][1] += field.num_bytes
        else:
            runs.append([field.start_byte, field.num_bytes])
    return np.array(runs, np.int64).reshape(-1, 2)


def _dtype_of(field: Field) -> torch.dtype:
    return field.dtype


def _key(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not names or not all(isinstance(it, str) for it in names):
        raise ValueError(f"a key must be a list of names, got {names!r}")
    return tuple(names)


def _shape(sizes: Any) -> list[int]:
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a shape must be a list of sizes, got {sizes!r}")
    return sizes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nest(
    fields: Mapping[NestedKey, torch.Tensor],
    batch: torch.Size,
    device: torch.device,
    nested: Nested = (),
) -> TensorDict:
    """Makes a TensorDict of batch size B from key -> tensor `[*B, ...]`, with further nested sizes."""
    return _fill(_tree_of(tuple(fields), nested), list(fields.values()), batch, device)


class _Tree(NamedTuple):
    """The entries of a TensorDict, by where their tensors stand in a list."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    nested: tuple[tuple[str, _Tree], ...]
    further: torch.Size
    """The batch dimensions which it has beyond those of the outermost."""


@lru_cache(maxsize=1024)
def _tree_of(keys: tuple[NestedKey, ...], nested_sizes: Nested) -> _Tree:
    nested: dict[str, Any] = {}
    for place, key in enumerate(keys):
        node = nested
        path = (key,) if isinstance(key, str) else key
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = place
    return _frozen(nested, dict(nested_sizes), ())


def _frozen(
    entries: dict[str, Any], sizes: Mapping[tuple[str, ...], torch.Size], path: tuple[str, ...]
) -> _Tree:
    leaves = {name: place for name, place in entries.items() if isinstance(place, int)}
    nested = {name: below for name, below in entries.items() if name not in leaves}
    return _Tree(
        tuple(leaves),
        tuple(leaves.values()),
        tuple((name, _frozen(below, sizes, (*path, name))) for name, below in nested.items()),
        sizes.get(path, torch.Size([])),
    )


def _fill(
    tree: _Tree, leaves: Sequence[torch.Tensor], batch: torch.Size, device: torch.device
) -> TensorDict:
    names, places, nested, further = tree
    source: dict[str, Any] = {}
    for name, place in zip(names, places, strict=True):
        source[name] = leaves[place]
    for name, below in nested:
        source[name] = _fill(below, leaves, batch, device)
    return new_tensordict(source, batch + further if further else batch, device)
