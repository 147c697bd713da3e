"""How the fields of a transition lie in one row of 64-bit words.

Letters: N rows, W words a row, B any leading shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from tensordict import NestedKey, TensorDict, unravel_key

from trl_storages._torchrl import new_tensordict
from trl_storages.storages.gather import quick_words

__all__ = ["Field", "Layout", "Span", "nest"]

_WORD = 8  # bytes
# Fields with no more between them are fetched together: a gather costs more than these bytes.
_GAP = 128  # bytes


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
    def stop_byte(self) -> int:
        """Where the field ends in the row."""
        return (self.start + self.size) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{_name(self.dtype)} {list(self.shape)}"


class Span:
    """The words of a row that hold some neighbouring fields, to be fetched in one gather.

    Args:
        fields: at least one, in the order of the row.
        num_words: W, the width of the row; None fetches no more than the fields ask for.
    """

    def __init__(self, fields: Sequence[Field], num_words: int | None = None) -> None:
        # Whole elements of the widest type, or the fields could not be seen in what is fetched.
        unit = max(_WORD, *(field.dtype.itemsize for field in fields))
        start = fields[0].start_byte // unit * unit
        stop = -(-max(field.stop_byte for field in fields) // unit) * unit
        #: Which words of a row.
        self.words = range(start // _WORD, stop // _WORD)
        if num_words is not None and unit == _WORD:
            self.words = quick_words(self.words, num_words)
            start, stop = self.words.start * _WORD, self.words.stop * _WORD
        #: The fields, those of one dtype after one another.
        self.fields: list[Field] = []
        # One split per dtype, `(dtype, sizes, which parts are fields)`, of the words seen as that dtype.
        self._splits: list[tuple[torch.dtype, list[int], list[int]]] = []
        # The fields that are no vectors, by their place among all.
        self._shapes: list[tuple[int, torch.Size]] = []
        for dtype in dict.fromkeys(field.dtype for field in fields):
            sizes, placed, position = [], [], start // dtype.itemsize
            for field in (field for field in fields if field.dtype is dtype):
                # What lies between fields is a part as well, but an empty part costs as much.
                sizes += [field.start - position] if field.start > position else []
                placed.append(len(sizes))
                sizes.append(field.size)
                position = field.start + field.size
                if len(field.shape) != 1:
                    self._shapes.append((len(self.fields), field.shape))
                self.fields.append(field)
            end = stop // dtype.itemsize
            sizes += [end - position] if end > position else []
            self._splits.append((dtype, sizes, placed))

    def views(self, words: torch.Tensor) -> list[torch.Tensor]:
        """Sees each of `fields` in `[*B, words]` int64 as a tensor `[*B, *shape]` of the same memory."""
        views: list[torch.Tensor] = []
        for dtype, sizes, placed in self._splits:
            parts = words.view(dtype).split_with_sizes(sizes, -1)
            views += [parts[place] for place in placed]
        for place, shape in self._shapes:
            views[place] = views[place].view(words.shape[:-1] + shape)
        return views


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
        #: The keys of the fields.
        self.keys = tuple(field.key for field in self.fields)
        #: Those of fields that do not lie under `next`.
        self.root_keys = tuple(key for key in self.keys if key[0] != "next")
        self._whole = Span(self.fields)
        self._tree = _tree_of(tuple(field.key for field in self._whole.fields))
        self._dtypes = [field.dtype for field in self.fields]
        # Shapes of a batch like the last one that was written.
        self._wanted: tuple[torch.Size | None, list[torch.Size]] = (None, [])

    @classmethod
    def of(cls, entries: Mapping[NestedKey, torch.Tensor], batch_dims: int) -> Layout:
        """Describes tensors past their first `batch_dims` dimensions."""
        return cls({key: (value.dtype, value.shape[batch_dims:]) for key, value in entries.items()})

    @property
    def described(self) -> dict[NestedKey, tuple[torch.dtype, torch.Size]]:
        """Key -> (dtype, shape) of each field, wherever it lies."""
        return {field.key: (field.dtype, field.shape) for field in self.fields}

    @property
    def num_words(self) -> int:
        """W, the width of a row in 64-bit words."""
        return self.row_nbytes // _WORD

    def views(self, rows: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        """Sees each field of `[*B, W]` int64 rows as a tensor `[*B, *shape]` that shares its memory."""
        views = self._whole.views(rows)
        return {field.key: view for field, view in zip(self._whole.fields, views, strict=True)}

    def spans(self, keys: Collection[NestedKey]) -> list[Span]:
        """Returns which words to gather for some fields, in as few stretches as pay.

        Raises:
            KeyError: there is no such field; the message lists those that are there.
        """
        unknown = set(keys).difference(self.keys)
        if unknown:
            raise KeyError(
                f"the rows have no field {min(unknown, key=str)!r}; they have "
                f"{sorted(map(str, self.keys))}."
            )
        runs: list[list[Field]] = []
        for field in self.fields:
            if field.key not in keys:
                continue
            if runs and field.start_byte - runs[-1][-1].stop_byte <= _GAP:
                runs[-1].append(field)
            else:
                runs.append([field])
        return [Span(run, self.num_words) for run in runs]

    def tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Sees `[*B, W]` int64 rows as a TensorDict of batch size B that shares their memory."""
        return _fill(self._tree, self._whole.views(rows), rows.shape[:-1], rows.device)

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
            self._wanted = batch_size, [batch_size + field.shape for field in self.fields]
        if len(entries) > len(self.fields) and strict:
            self._check_no_more(entries)
        shapes = self._wanted[1]
        fitting = [entries.get(key) for key in self.keys]
        for key, entry, dtype, shape in zip(self.keys, fitting, self._dtypes, shapes, strict=True):
            if entry is None or entry.dtype is not dtype or entry.shape != shape:
                self._explain(key, entry, batch_size, entries)
        return fitting  # type: ignore[return-value]

    def _explain(
        self,
        key: NestedKey,
        entry: torch.Tensor | None,
        batch_size: torch.Size,
        entries: Mapping[NestedKey, torch.Tensor],
    ) -> NoReturn:
        """Raises the error that says why an entry does not fit."""
        field = next(field for field in self.fields if field.key == key)
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


def nest(
    fields: Mapping[NestedKey, torch.Tensor], batch: torch.Size, device: torch.device
) -> TensorDict:
    """Makes a TensorDict of batch size B from key -> tensor `[*B, ...]`."""
    return _fill(_tree_of(tuple(fields)), list(fields.values()), batch, device)


# The entries of a TensorDict: `(name, place of a leaf in a list, or the entries below it)`.
_Tree = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=1024)
def _tree_of(keys: tuple[NestedKey, ...]) -> _Tree:
    nested: dict[str, Any] = {}
    for place, key in enumerate(keys):
        node = nested
        path = (key,) if isinstance(key, str) else key
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = place
    return _frozen(nested)


def _frozen(nested: dict[str, Any]) -> _Tree:
    return tuple(
        (name, _frozen(below) if isinstance(below, dict) else below)
        for name, below in nested.items()
    )


def _fill(
    tree: _Tree, leaves: Sequence[torch.Tensor], batch: torch.Size, device: torch.device
) -> TensorDict:
    source = {
        name: leaves[below] if isinstance(below, int) else _fill(below, leaves, batch, device)
        for name, below in tree
    }
    return new_tensordict(source, batch, device)
