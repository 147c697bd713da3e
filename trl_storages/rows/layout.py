"""How the fields of a transition lie in one row of 64-bit words.

Letters: N rows, W words a row, B any leading shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, unravel_key

from trl_storages.kernels.sharing import Sharing
from trl_storages.keys import (
    ACHIEVED_GOAL,
    ACTION,
    DESIRED_GOAL,
    DONE,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    done_beside,
    next_key,
    shared_keys,
)
from trl_storages.rows.entries import Nested
from trl_storages.rows.frames import FrameStack, stacks_of
from trl_storages.rows.views import Views, nest
from trl_storages.saved.files import DTYPES, dtype_name

__all__ = ["Field", "Layout"]

_WORD = 8  # bytes

_SEEN = (OBSERVATION, ACHIEVED_GOAL, DESIRED_GOAL)
# The keys that a loop provides without infos.
_OF_LOOPS = {*_SEEN, *map(next_key, _SEEN), ACTION, REWARD, DONE, TERMINATED, TRUNCATED}

#: The first byte of a field in a row, its dtype and its shape.
Place = tuple[int, torch.dtype, torch.Size]
#: Key, dtype and shape of a field.
_Described = tuple[NestedKey, torch.dtype, torch.Size]


@dataclass(frozen=True)
class Field:
    """One entry of a transition: its key, dtype, shape and place in the row.

    `start` and `size` count elements of `dtype`. The frames of a stack are contiguous.
    """

    key: NestedKey
    dtype: torch.dtype
    shape: torch.Size
    start: int
    stack: FrameStack | None = None

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @cached_property
    def start_byte(self) -> int:
        """Byte offset of the field in the row."""
        return self.start * self.dtype.itemsize

    @cached_property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def seen(self, flat: torch.Tensor, batch: torch.Size) -> torch.Tensor:
        """Returns a view of the elements in rows as values, `[*batch, *shape]`."""
        return flat.view(batch + self.shape) if self.stack is None else self.as_stacks(flat, batch)

    def as_stacks(self, flat: torch.Tensor, batch: torch.Size) -> torch.Tensor:
        """Returns a view of the elements of stacks, `[*batch, *shape]`."""
        stack: FrameStack = self.stack  # type: ignore[assignment]
        if stack.dim % len(self.shape) == 0:
            return flat.view(*batch, *self.shape)  # Several ints are parsed faster than a size.
        frames = (stack.num_frames, *stack.frame_shape(self.shape))
        return stack.as_seen(flat.view(*batch, *frames), len(batch))

    def __str__(self) -> str:
        stacked = "" if self.stack is None else f" as {self.stack}"
        return f"{dtype_name(self.dtype)} {list(self.shape)}{stacked}"


class Layout:
    """Places fields in a row, so that one gather of rows fetches all of them.

    Fields are sorted by element size, largest first: each is aligned without gaps, and only the end of
    the row is padded, to whole words. Among equal sizes those under `next` come last: windows take them
    from other rows, and side by side they span fewer cache lines.

    With a header, a row begins with its next observations, followed by the observations in the same
    order. It is stored without the next observations: the header says whether these are the observations
    of another row or an entry of a side table.

    Only the newest frame of a stack is stored, see `framed`.

    Args:
        fields: key -> (dtype, shape) of one transition, or (dtype, shape, FrameStack).
        nested: batch dimensions that nested TensorDicts have beyond that of the rows, by path.
        header: dtype of the header that replaces the next observations in a stored row; None if the row
            stores them itself.

    Raises:
        ValueError: there is no field, or, with a header, no observation with a next value of the same
            dtype and shape.
        TypeError: rows can't hold a dtype, such as a quantized or sub-byte one.
        ValueError, TypeError: as `stacks_of`.

    >>> layout = Layout({"observation": (torch.float32, (3,)), ("next", "done"): (torch.bool, (1,))})
    >>> layout.row_nbytes, layout.padding
    (16, 3)
    """

    def __init__(
        self,
        fields: Mapping[NestedKey, tuple[Any, ...]],
        nested: Nested = (),
        *,
        header: torch.dtype | None = None,
    ) -> None:
        if not fields:
            raise ValueError("a layout needs at least one field, got none.")
        #: The fields that are stacks of frames.
        self.stacks = stacks_of(fields)
        described: list[_Described] = [
            (unravel_key(key), dtype, torch.Size(shape))
            for key, (dtype, shape, *_) in fields.items()
        ]
        for key, dtype, _ in described:
            if dtype not in _STORABLE:
                raise TypeError(
                    f"{key!r} must have a dtype that rows can hold, one of "
                    f"{sorted(map(dtype_name, _STORABLE))}, got {dtype_name(dtype)}."
                )
        described.sort(key=lambda field: (-field[1].itemsize, field[0][0] == "next"))
        # 16-byte elements (complex128) need rows that are a multiple of their size.
        unit = max(_WORD, described[0][1].itemsize)
        #: How next observations are shared; None if rows store their own.
        self.sharing: Sharing | None = None
        # With stacks, it is the single frames of `framed` that are shared.
        if header is None or self.stacks:
            placed, end = self._placed(described)
        else:
            placed, end = self._shared(described, header, unit)
        self.fields = tuple(placed)
        self.row_nbytes = max(unit, _rounded(end, unit))
        self.padding = self.row_nbytes - sum(field.num_bytes for field in placed)
        #: The keys of the fields.
        self.keys = tuple(field.key for field in self.fields)
        self._by_key = {field.key: field for field in self.fields}
        #: `[n, 2]` int64, byte offset and size in bytes of each field.
        self.places = np.array([(it.start_byte, it.num_bytes) for it in self.fields], np.int64)
        #: As given.
        self.nested = nested
        #: The layout with the newest frame in the place of each stack, as rows are stored.
        self.framed: Layout = self
        if self.stacks:
            frames = {
                it.key: (it.dtype, it.stack.frame_shape(it.shape) if it.stack else it.shape)
                for it in self.fields
            }
            self.framed = Layout(frames, nested, header=header)
        #: Makes views of the fields of rows, `[*B, W]` int64; likewise of stored rows.
        self.views = self._stored_views = Views(self.fields, self.row_nbytes)
        if self.sharing is not None:
            moved = self.stored_nbytes - self.row_nbytes
            stored = [replace(it, start=it.start + moved // it.dtype.itemsize) for it in self._own]
            self._stored_views = Views(stored, self.stored_nbytes)
        #: The places of fields, by their keys.
        self.places_of = _PlacesOf(self)
        #: The spans with which `RowTable.copy_into` copies a field into others, by their keys; None if
        #: they are not fields of one dtype and shape, or are stacks.
        self.spans_to = _SpansTo(self)

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """`[n, 4]` int64 spans of the fields at the root, and of those under `next`; without stacks."""
        fields = self.framed.fields
        rooted = self._spans(it for it in fields if it.key[0] != "next")
        return rooted, self._spans(it for it in fields if it.key[0] == "next")

    def _spans(self, frames: Iterable[Field]) -> np.ndarray:
        """Returns the spans with which `RowTable.copy_into` copies framed rows into whole ones.

        Fields that are adjacent in both are merged into one span; the last one takes the padding along.
        """
        spans: list[list[int]] = []
        for frame in frames:
            field = self.field(frame.key)
            if field.stack:
                continue
            start, to, size = frame.start_byte, field.start_byte, frame.num_bytes
            if field is self.fields[-1]:
                size = min(self.row_nbytes - to, self.framed.row_nbytes - start)
            if spans and (start - spans[-1][0], to - spans[-1][1]) == (spans[-1][2],) * 2:
                spans[-1][2] += size
            else:
                spans.append([start, to, size, self.row_nbytes])
        return np.array(spans, np.int64).reshape(-1, 4)

    @cached_property
    def implied(self) -> np.ndarray:
        """`[p, 2]` int64, the numbers of flags that imply the `done` beside them, and of that `done`."""
        at, described = {key: place for place, key in enumerate(self.keys)}, self.described
        pairs = [
            (at[flag], at[done])
            for flag, done in done_beside(self.keys).items()
            if described[flag] == described[done] and described[flag][0] is torch.bool
        ]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _placed(self, fields: Sequence[_Described], at: int = 0) -> tuple[list[Field], int]:
        """Places fields one after another from byte `at` on; returns them and the end."""
        placed = []
        for key, dtype, shape in fields:
            start = -(-at // dtype.itemsize)
            placed.append(Field(key, dtype, shape, start, self.stacks.get(key)))
            at = placed[-1].start_byte + placed[-1].num_bytes
        return placed, at

    def _shared(
        self, fields: Sequence[_Described], header: torch.dtype, unit: int
    ) -> tuple[list[Field], int]:
        """Places fields, with the next observations that are not stored before all others."""
        twins, shared, rest = _shared_first(fields)
        after, num_bytes = self._placed(twins)
        first = _rounded(num_bytes, unit)
        link: _Described = ((), header, torch.Size([]))
        # Place the header where the row gets shortest: there is often room after the observations.
        stored = [
            self._placed([*shared, *rest[:at], link, *rest[at:]], first)
            for at in range(len(rest) + 1)
        ]
        own, end = min(stored, key=itemgetter(1))
        [start] = [field.start for field in own if field.key == ()]
        words, before = first // _WORD, first // header.itemsize
        self.sharing = Sharing(len(twins), num_bytes, words, header, start - before)
        return [*after, *(field for field in own if field.key != ())], end

    @classmethod
    def of(
        cls, entries: Mapping[NestedKey, torch.Tensor], batch_dims: int, nested: Nested = ()
    ) -> Layout:
        """Returns the layout of tensors past their first `batch_dims` dimensions."""
        fields = {key: (value.dtype, value.shape[batch_dims:]) for key, value in entries.items()}
        return cls(fields, nested)

    @property
    def described(self) -> dict[NestedKey, tuple[torch.dtype, torch.Size]]:
        """Key -> (dtype, shape) of each field, wherever it is placed."""
        return {field.key: (field.dtype, field.shape) for field in self.fields}

    @property
    def declared(self) -> dict[NestedKey, tuple[Any, ...]]:
        """Key -> (dtype, shape) or (dtype, shape, FrameStack) of each field, wherever it is placed."""
        return {
            it.key: (it.dtype, it.shape) if it.stack is None else (it.dtype, it.shape, it.stack)
            for it in self.fields
        }

    def unlike(self, named: Mapping[NestedKey, Any]) -> str:
        """Describes how the fields differ from those wanted, for error messages.

        Args:
            named: key -> (dtype, shape) or (dtype, shape, FrameStack), or None for anything.
        """
        named = {unravel_key(key): field for key, field in named.items()}
        there = {field.key: str(field) for field in self.fields}
        wanted = {key: there.get(key, "one") for key in named}
        if given := {key: field for key, field in named.items() if field is not None}:
            wanted |= {field.key: str(field) for field in Layout(given).fields}
        return "; ".join(
            f"{key!r} is {there.get(key, 'missing')}, got {wanted.get(key, 'none')}"
            for key in {**there, **wanted}
            if there.get(key) != wanted.get(key)
        )

    @property
    def past_steps(self) -> int:
        """The most earlier rows of its episode that a row's stacks need."""
        return max([0, *(stack.num_frames - 1 for stack in self.stacks.values())])

    @property
    def num_words(self) -> int:
        """W, the width of a row in 64-bit words."""
        return self.row_nbytes // _WORD

    @property
    def stored_words(self) -> int:
        """The width of a stored row in 64-bit words."""
        if self.stacks:
            return self.framed.stored_words
        return self.num_words - (0 if self.sharing is None else self.sharing.shared_words)

    @property
    def stored_nbytes(self) -> int:
        """The size of a stored row in bytes."""
        return self.stored_words * _WORD

    def stored_start(self, key: NestedKey) -> int:
        """Returns the byte offset of a field in a stored row, if it is stored there."""
        return self.field(key).start_byte + self.stored_nbytes - self.row_nbytes

    @property
    def shared(self) -> Sequence[Field]:
        """The fields whose next values are not stored in the row."""
        first = 0 if self.sharing is None else self.sharing.num_shared
        return self.fields[first : 2 * first]

    @property
    def _own(self) -> Sequence[Field]:
        """The fields that are stored in the row."""
        return self.fields if self.sharing is None else self.fields[self.sharing.num_shared :]

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def field(self, key: NestedKey) -> Field:
        """Returns the field of a key.

        Raises:
            KeyError: no such field; the message lists the existing ones.
        """
        found = self._by_key.get(key)
        if found is None:
            raise KeyError(
                f"the rows have no field {key!r}; they have {sorted(self.keys, key=str)}."
            )
        return found

    def tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Returns a TensorDict of batch size B that shares the memory of `[*B, W]` int64 rows."""
        return nest(self.views(rows), rows.shape[:-1], rows.device, self.nested)

    def stored_tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Returns the same for stored rows, with the fields that are stored in them."""
        return nest(self._stored_views(rows), rows.shape[:-1], rows.device, self.nested)

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
            strict: raise on an entry that is not in the layout; False drops it.

        Raises:
            KeyError: a field is missing, or, if `strict`, one is not in the layout.
            TypeError: a dtype differs.
            ValueError: a shape differs.
        """
        for field in self.fields:
            self._check(field, entries, batch_size)
        if strict and (extra := [key for key in entries if key not in self]):
            raise KeyError(
                f"the data holds {extra}, which the rows have no room for: their fields are "
                f"{list(self.keys)}. Leave it out, or pass "
                "EpisodeWriter(keys=...) to store some entries only."
            )
        return [entries[key].resolve_conj() for key in self.keys]

    def frames_first(
        self, fields: Sequence[torch.Tensor], batch_dims: int
    ) -> Sequence[torch.Tensor]:
        """Returns views of entries, in the order of `fields`, with the frames of stacks first."""
        if not self.stacks:
            return fields
        return [
            value if it.stack is None else it.stack.frames_first(value, batch_dims)
            for it, value in zip(self.fields, fields, strict=True)
        ]

    def _check(
        self, field: Field, entries: Mapping[NestedKey, torch.Tensor], batch_size: torch.Size
    ) -> None:
        """Raises the error that says why an entry does not fit, if it does not."""
        key, shape, entry = field.key, batch_size + field.shape, entries.get(field.key)
        if entry is None:
            remedy = "Add it to the data."
            if key not in _OF_LOOPS:
                remedy += " record() takes it from the infos, if info_keys or extra_fields name it."
            raise KeyError(
                f"the data lacks {key!r}, which every row holds as {field}; its keys are "
                f"{sorted(entries, key=str)}. {remedy}"
            )
        if entry.dtype is not field.dtype:
            raise TypeError(
                f"{key!r} must be {dtype_name(field.dtype)} as in the rows already laid out, got "
                f"{dtype_name(entry.dtype)}; convert it before it is written, or make the storage of the "
                "specs of the environment that collects (env.observation_spec, env.action_spec)."
            )
        if entry.shape == shape:
            return
        is_code = not field.shape and entry.shape[:-1] == batch_size
        remedy = (
            "; make the storage of env.action_spec if these are one-hot codes" if is_code else ""
        )
        raise ValueError(
            f"{key!r} must have shape {list(shape)} (batch {list(batch_size)}, field "
            f"{list(field.shape)}), got {list(entry.shape)}{remedy}."
        )

    def to_json(self) -> dict[str, Any]:
        """Describes the layout in plain lists, strings and numbers."""
        sharing = self.framed.sharing
        header = {} if sharing is None else {"header": dtype_name(sharing.header_dtype)}
        return header | {
            "row_nbytes": self.row_nbytes,
            "fields": [
                {
                    "key": [field.key] if isinstance(field.key, str) else list(field.key),
                    "dtype": dtype_name(field.dtype),
                    "shape": list(field.shape),
                    **({} if field.stack is None else {"stack": asdict(field.stack)}),
                }
                for field in self.fields
            ],
            "nested": [[list(path), list(size)] for path, size in self.nested],
        }

    @classmethod
    def from_json(cls, description: dict[str, Any]) -> Layout:
        """Rebuilds the layout that `to_json` described.

        Raises:
            ValueError: the description is damaged.
        """
        if not isinstance(description, dict):
            got = f"{description!r:.50}"
            raise ValueError(f"the description of the rows is damaged: it is no object, got {got}.")
        try:
            layout = cls(
                {
                    tuple(field["key"]): (
                        DTYPES[field["dtype"]],
                        _shape(field["shape"]),
                        *([FrameStack(**field["stack"])] if "stack" in field else []),
                    )
                    for field in description["fields"]
                },
                tuple(
                    (tuple(path), torch.Size(size)) for path, size in description.get("nested", ())
                ),
                header=_HEADERS[description.get("header")],
            )
        except (IndexError, KeyError, TypeError, ValueError) as error:
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


class _PlacesOf(dict[tuple[NestedKey, ...], tuple[dict[NestedKey, Place], list[NestedKey]]]):
    """The places of fields in a framed row, and the keys of stacks among them, by all their keys."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __missing__(
        self, keys: tuple[NestedKey, ...]
    ) -> tuple[dict[NestedKey, Place], list[NestedKey]]:
        stacks = [key for key in keys if key in self._layout.stacks]
        fields = [self._layout.framed.field(key) for key in keys if key not in stacks]
        self[keys] = {it.key: (it.start_byte, it.dtype, it.shape) for it in fields}, stacks
        return self[keys]


class _SpansTo(dict[tuple[NestedKey, ...], "np.ndarray | None"]):
    """The spans that copy a field of framed rows into fields of whole rows, by all their keys."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __missing__(self, keys: tuple[NestedKey, ...]) -> np.ndarray | None:
        layout, self[keys] = self._layout, None
        if all(key in layout for key in keys) and layout.stacks.keys().isdisjoint(keys):
            first, *rest = map(layout.field, keys)
            if all((it.dtype, it.shape) == (first.dtype, first.shape) for it in rest):
                start, size = layout.framed.field(keys[0]).start_byte, first.num_bytes
                spans = [(start, it.start_byte, size, layout.row_nbytes) for it in rest]
                self[keys] = np.array(spans)
        return self[keys]


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

_HEADERS = {None: None, "int32": torch.int32, "int64": torch.int64}


def _rounded(size: int, unit: int) -> int:
    """Returns a number of bytes rounded up to a multiple of a unit."""
    return -(-size // unit) * unit


def _shared_first(fields: Sequence[_Described]) -> tuple[list[_Described], ...]:
    """Returns the next observations that are not stored, their observations, and all other fields."""
    by_key = {field[0]: field for field in fields}
    kinds = {key: field[1:] for key, field in by_key.items()}
    shared = [key for key in shared_keys(by_key) if kinds[key] == kinds[next_key(key)]]
    if not shared:
        raise ValueError(
            "share_next=True shares observations with their next values, of the same dtype and shape "
            f"under 'next', and there are none: the keys are {sorted(by_key, key=str)}. Leave "
            "share_next out, or store next observations."
        )
    twins = [next_key(key) for key in shared]
    rest = [field for field in fields if field[0] not in {*shared, *twins}]
    return [by_key[key] for key in twins], [by_key[key] for key in shared], rest


def _shape(sizes: Any) -> list[int]:
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a shape must be a list of sizes, got {sizes!r}")
    return sizes
