"""How the fields of a transition lie in entries and rows, in words of 8 bytes.

Letters: B any leading shape; F, O, S, W and k as in `kernels.entries`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key

from trl_storages import keys
from trl_storages.entries.fields import DTYPES, WORD, Field
from trl_storages.kernels import entries
from trl_storages.torchrl_compat import new_tensordict

__all__ = ["Block", "Layout", "Nested", "nest", "nested_sizes"]

#: Batch dimensions of nested TensorDicts beyond those of the outermost one: `(path, extra sizes)`.
Nested = tuple[tuple[tuple[str, ...], torch.Size], ...]


class _Fields(dict[NestedKey, Field]):
    def __missing__(self, key: NestedKey) -> Field:
        there = sorted(self, key=str)
        raise KeyError(f"the rows have no field {key!r}; they have {there}.")


class Layout:
    """Places the fields of a transition.

    A field that has a twin of the same dtype and shape under `next` is part of the *observation*, and
    stored once for both; every other is part of the *step*, and so are rewards, flags and counts of steps
    wherever they stand. A row as it is seen is `[observation | step | next observation]`: one gather
    fetches whole rows, and one block holds those to be written.

    Args:
        fields: key -> (dtype, shape) of one transition, or (dtype, shape, FrameStack).
        nested: batch dimensions that nested TensorDicts have beyond that of the rows, by path.
        keyframes: K, if stacks, and observations of bytes with two dimensions or more, are stored as what
            changed: every K-th by itself; 0 stores all as they are. See `kernels.frames`.

    Raises:
        ValueError: there is no field, or a stack has another number of frames than the others, or no
            next value of its shape; or nothing is to be stored as what changed.
        TypeError: rows can't hold a dtype.

    >>> fields = {"observation": (torch.float32, (3,)), ("next", "observation"): (torch.float32, (3,))}
    >>> layout = Layout({**fields, ("next", "done"): (torch.bool, (1,))})
    >>> layout.entry_words, layout.row_words
    (3, 5)
    """

    def __init__(
        self,
        fields: Mapping[NestedKey, Sequence[Any]],
        nested: Nested = (),
        keyframes: int = 0,
    ) -> None:
        #: key -> (dtype, shape) or (dtype, shape, FrameStack), as given.
        self.described = {
            unravel_key(key): (dtype, torch.Size(shape), *stack)
            for key, (dtype, shape, *stack) in fields.items()
        }
        #: As given.
        self.nested, self.keyframes = nested, keyframes
        self._check_dtypes()
        #: Whether transitions have next observations.
        self.has_next = keys.have_next(self.described)
        kinds = {key: kind[:2] for key, kind in self.described.items()}
        # What is stored once with its next values.
        seen = [key for key in keys.shared_keys(kinds) if kinds[keys.next_key(key)] == kinds[key]]
        twins = {keys.next_key(key): key for key in seen}
        stacks = [key for key in seen if len(self.described[key]) > 2]
        #: k, the number of frames of a stack: how many entries an observation is made of.
        self.frames = self._num_frames(stacks, twins)
        decides = keys.continued_keys([*self.described])
        steps = [key for key in self.described if key not in seen and key not in twins]
        single = [key for key in seen if key not in stacks]
        images = [key for key in single if keyframes and self._is_image(key)]
        deciding = [key for key in single if key in decides]
        if deciding and {*stacks} & {*decides}:
            # All that decides must lie side by side: an image of a goal beside stacks stays as it is.
            images = [key for key in images if key in decides]
        placed, ends = self._placed(
            stacks,
            [key for key in images if key not in decides],
            [key for key in images if key in decides],
            [key for key in deciding if key not in images],
            [key for key in single if key not in decides and key not in images],
            [key for key in steps if key[0] != "next"],
            [key for key in steps if key[0] == "next"],
        )
        #: F, words of a frame of stacks; O, of an observation; and before what is `next`.
        (
            self.frame_words,
            start,
            images_end,
            middle,
            self.observation_words,
            self.root_words,
            end,
        ) = ends
        self._skipped = (self.frames - 1) * self.frame_words
        #: C, words of an entry that lie in a record; what takes their place is one word.
        self.record_words = images_end if keyframes else 0
        if keyframes and not self.record_words:
            raise ValueError(
                "compress=True is for stacks of frames, and for observations that are uint8 with two "
                f"dimensions or more; the fields are {self.described}."
            )
        self._moved = self.record_words - 1 if keyframes else 0
        #: W, words of an entry.
        self.entry_words = end - self._moved
        #: How many entries up to its own an entry needs, and bytes of a row of pixels.
        self.depth = self.frames + max(keyframes - 1, 0)
        self.pixel_row = self._pixel_row(placed)
        #: S, words of an observation as it is seen; where the next one begins in a row; a row's words.
        self.seen_words = self.observation_words + self._skipped
        self.next_word = end + self._skipped
        self.row_words = self.next_word + self.seen_words
        begin = 0 if set(stacks) & set(decides) else start + self._skipped
        end = (middle if deciding else self.frame_words) + self._skipped
        #: As loops take it, see `kernels.entries`: observations decide whether a row continues another.
        self.sizes = (self.frame_words, self.observation_words, begin, end, self.root_words)
        placed = [self._stored(field) for field in placed]
        observed = [field for field in placed if field.key in seen]
        after = [replace(it, key=keys.next_key(it.key), is_next=True) for it in observed]
        #: In the order of a row.
        self.fields = (*placed, *after)
        #: The same by key; a KeyError lists those that there are.
        self.by_key = _Fields({field.key: field for field in self.fields})
        plain = [field for field in self.fields if not field.stack]
        self._splits = [self._split(dtype) for dtype in dict.fromkeys(it.dtype for it in plain)]
        self._shaped = [(field.key, field.shape) for field in plain if len(field.shape) != 1]
        self._stacks = [(field, field.stack) for field in self.fields if field.stack]

    def _is_image(self, key: NestedKey) -> bool:
        dtype, shape, *_ = self.described[key]
        return dtype is torch.uint8 and len(shape) > 1 and shape.numel() > 0

    def _pixel_row(self, placed: Sequence[Field]) -> int:
        """Returns how many bytes a row of the first image has."""
        shape = placed[0].frame_shape
        # Few values of the last dimension are channels.
        count = shape[-2:].numel() if len(shape) > 2 and shape[-1] <= 4 else shape[-1:].numel()
        return max(count * placed[0].dtype.itemsize, 1)

    def _stored(self, field: Field) -> Field:
        """Returns a field with its place in an entry, or in a record."""
        if field.at < self.record_words * WORD:
            return replace(field, in_record=True)
        return replace(field, at=field.at - self._moved * WORD)

    def _check_dtypes(self) -> None:
        if not self.described:
            raise ValueError("a layout needs at least one field, got none.")
        for key, (dtype, *_) in self.described.items():
            if dtype not in DTYPES.values():
                raise TypeError(f"{key!r} must have one of the dtypes {[*DTYPES]}, got {dtype}.")

    def _num_frames(self, stacks: Sequence[NestedKey], twins: Mapping[NestedKey, NestedKey]) -> int:
        said = {key: kind[2] for key, kind in self.described.items() if len(kind) > 2}
        for key, stack in said.items():
            root = twins.get(key, key)
            if root not in stacks or said[root] != stack:
                raise ValueError(
                    f"{key!r} is {stack}, so it must have a next value of its dtype and shape."
                )
        numbers = {stack.num_frames for stack in said.values()}
        if len(numbers) > 1:
            raise ValueError(f"all stacks must have one number of frames, got {sorted(numbers)}.")
        return numbers.pop() if numbers else 1

    def _placed(self, *groups: Sequence[NestedKey]) -> tuple[list[Field], list[int]]:
        """Places fields one behind another, of each group the largest elements first.

        Returns:
            the fields, and the words at which the groups end.
        """
        unit = max(WORD, *(kind[0].itemsize for kind in self.described.values()))
        placed, ends, end = [], [], 0
        for group in groups:
            for key in sorted(group, key=lambda key: -self.described[key][0].itemsize):
                dtype, shape, *stack = self.described[key]
                at = -(-end // dtype.itemsize) * dtype.itemsize
                placed.append(Field(key, dtype, shape, at, *stack))
                end = at + placed[-1].size * dtype.itemsize
            end = -(-end // unit) * unit
            ends.append(end // WORD)
        return placed, ends

    def _split(self, dtype: torch.dtype) -> tuple[torch.dtype, list[int], list[NestedKey | None]]:
        """Returns the sizes and the keys of the parts of a row; None of what is of no plain field."""
        fields = [it for it in self.fields if it.dtype is dtype and not it.stack]
        parts: list[tuple[NestedKey | None, int]] = []
        end = 0
        for field in fields:
            start = self.row_byte(field) // dtype.itemsize
            parts += [(None, start - end), (field.key, field.size)]
            end = start + field.size
        parts.append((None, self.row_words * WORD // dtype.itemsize - end))
        parts = [(key, size) for key, size in parts if key or size]
        return dtype, [size for _, size in parts], [key for key, _ in parts]

    # Fields

    def __contains__(self, key: object) -> bool:
        return key in self.by_key

    def is_step(self, field: Field) -> bool:
        """Whether a field is part of the step, not of an observation."""
        return self._seen_at(field) >= self.observation_words * WORD

    def _seen_at(self, field: Field) -> int:
        """Returns the first byte of a field in an entry whose frame is decoded."""
        return field.at if field.in_record else field.at + self._moved * WORD

    def row_byte(self, field: Field) -> int:
        """Returns the first byte of a field in a row; of a stack, that of its oldest frame."""
        skipped = 0 if field.stack else self._skipped * WORD
        return self._seen_at(field) + skipped + (self.next_word * WORD if field.is_next else 0)

    def field_offsets(self, key: NestedKey, others: Sequence[NestedKey]) -> np.ndarray:
        """Returns where fields begin in a row, in `words`; none unless all are alike, and no stacks."""
        one = self.by_key[key]
        kind = one.dtype, one.shape, None
        found = [it for it in map(self.by_key.get, others) if it]
        is_alike = all((it.dtype, it.shape, it.stack) == kind for it in (one, *found))
        places = [self.row_byte(it) // one.words[0] for it in found]
        is_alike &= len(found) == len(others) and not one.in_record
        return np.array(places if is_alike else [], np.int64)

    def check_stacks(self, rows: Any) -> None:
        """Raises a ValueError unless each next stack of rows `[N, row_words]` is its stack moved on."""
        first, after, size = self.frame_words, self.next_word, self._skipped
        if size and (rows[:, first : first + size] != rows[:, after : after + size]).any():
            raise ValueError(
                "the next stack of a row must be its stack moved by one frame; store other observations "
                "without a FrameStack: frame_stack={key: FrameStack(k)} names those that are stacks."
            )

    def count_gaps(self, rows: Any, done: Any) -> int:
        """Returns how many rows `[N, row_words]` of one lane do not continue the row before.

        See `kernels.streams.count_gaps`. `done` `[N]` bool says which end their episodes.
        """
        if isinstance(rows, np.ndarray):
            return int(entries.count_gaps(self.sizes, self.next_word, rows, done))
        begin, end = self.sizes[2:4]
        after = rows[:-1, self.next_word + begin : self.next_word + end]
        return int(((rows[1:, begin:end] != after).any(1) & ~done[:-1]).sum())

    # Views

    def tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Returns rows `[*B, row_words]` as a TensorDict of batch size B that shares their memory."""
        return nest(self.views(rows), rows.shape[:-1], rows.device, self.nested)

    def views(self, rows: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        """Returns each field of rows `[*B, row_words]` int64 as a view `[*B, *shape]`."""
        views: dict[Any, torch.Tensor] = {}
        # One split makes nine views in the time of four others, of three if autograd need not know that
        # they share memory: rows have no gradients.
        for dtype, sizes, names in self._splits:
            parts = rows.view(dtype).unsafe_split_with_sizes(sizes, -1)
            views.update(zip(names, parts, strict=True))
        views.pop(None, None)
        for key, shape in self._shaped:
            views[key] = views[key].view((*rows.shape[:-1], *shape))
        for field, stack in self._stacks:
            views[field.key] = stack.stacks(self.frames_of(field, rows), field.shape)
        return views

    def frames_of(self, field: Field, rows: torch.Tensor) -> torch.Tensor:
        """Returns the frames of a stack in rows as a view `[*B, k, *frame_shape]`."""
        first, size = (self.next_word if field.is_next else 0), self.frames * self.frame_words
        frames = rows[..., first : first + size].view(field.dtype)
        each = self.frame_words * WORD // field.dtype.itemsize
        frames = frames.view(*rows.shape[:-1], self.frames, each)
        start = field.at // field.dtype.itemsize
        frames = frames[..., start : start + field.size]
        return frames.view(*frames.shape[:-1], *field.frame_shape)

    def __eq__(self, other: object) -> bool:
        own = self.fields, self.nested, self.keyframes
        return isinstance(other, Layout) and own == (other.fields, other.nested, other.keyframes)

    def __repr__(self) -> str:
        fields = ", ".join(f"{field.key!r}: {field}" for field in self.fields)
        frames = " and frames as what changed" if self.keyframes else ""
        return f"{type(self).__name__}({self.entry_words * WORD} bytes an entry{frames}; {fields})"


def nest(
    fields: Mapping[NestedKey, torch.Tensor],
    batch: torch.Size,
    device: torch.device,
    nested: Nested = (),
) -> TensorDict:
    """Makes a TensorDict of batch size B from key -> tensor `[*B, ...]`, with further nested sizes."""
    tensors = [*fields.values()]
    made: list[TensorDict] = []
    for names, places, below, further in _tree_of(tuple(fields), nested):
        source: dict[str, Any] = dict(zip(names, map(tensors.__getitem__, places), strict=True))
        for name, place in below:
            source[name] = made[place]
        made.append(new_tensordict(source, batch + further if further else batch, device))
    return made[-1]


@lru_cache(maxsize=1024)
def _tree_of(keys_of: tuple[NestedKey, ...], nested: Nested) -> list[tuple[Any, ...]]:
    """Returns the TensorDicts that hold tensors under these keys, nested ones first.

    Of each: names and places of its tensors, names and places of nested ones, and its further sizes.
    """
    tree = keys.nested((keys.key_path(key), place) for place, key in enumerate(keys_of))
    sizes, nodes = dict(nested), []

    def add(entries: dict[str, Any], path: tuple[str, ...]) -> int:
        leaves = {name: it for name, it in entries.items() if isinstance(it, int)}
        below = [
            (name, add(it, (*path, name))) for name, it in entries.items() if isinstance(it, dict)
        ]
        nodes.append(([*leaves], [*leaves.values()], below, sizes.get(path)))
        return len(nodes) - 1

    add(tree, ())
    return nodes


def nested_sizes(data: TensorDictBase, batch_dims: int) -> Nested:
    """Returns which TensorDicts in `data` have more than `batch_dims` batch dimensions.

    >>> from tensordict import TensorDict
    >>> agents = TensorDict({"observation": torch.ones(2, 3, 4)}, [2, 3])
    >>> nested_sizes(TensorDict({"agents": agents}, [2]), 1)
    ((('agents',), torch.Size([3])),)
    """
    return tuple(
        (keys.key_path(key), value.batch_size[batch_dims:])
        for key, value in data.items(include_nested=True)
        if isinstance(value, TensorDictBase) and value.ndim > batch_dims
    )


class Block(NamedTuple):
    """Rows to be written.

    `which` `[L]` int64 are the lanes, each once; `offsets` `[L + 1]` int64 where the rows of each begin;
    `words` `[N, row_words]` int64 the rows; `done` and `cut` `[N]` bool whether a row ends its episode,
    and whether it begins one whatever came before. The last three are arrays on the host, or tensors on
    the device of the rows.
    """

    which: np.ndarray
    offsets: np.ndarray
    words: Any
    done: Any
    cut: Any

    def parts(self, most: int) -> list[Block]:
        """Returns the block in parts of at most `most` rows a lane."""
        if len(self.words) <= most:
            return [self]
        begins, counts, parts = self.offsets[:-1], np.diff(self.offsets), []
        if (longest := int(counts.max())) <= most:
            return [self]
        for done in range(0, longest, most):
            firsts, ends = (begins + np.minimum(counts, it) for it in (done, done + most))
            rows: Any = slice(int(firsts[0]), int(ends[0]))
            if len(firsts) > 1:
                rows = np.concatenate([np.arange(*pair) for pair in zip(firsts, ends, strict=True)])
                if isinstance(self.words, torch.Tensor):
                    rows = torch.from_numpy(rows).to(self.words.device)
            offsets = np.append(0, (ends - firsts).cumsum())
            its = self.words[rows], self.done[rows], self.cut[rows]
            parts.append(Block(self.which, offsets, *its))
        return parts
