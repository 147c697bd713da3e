"""The layout of the fields of a transition in entries and rows, in words of 8 bytes.

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
from trl_storages.kernels import Sizes
from trl_storages.torchrl_compat import new_tensordict

__all__ = ["Block", "Layout", "Nested", "nest", "nested_sizes"]

#: `(path, further sizes)` of nested TensorDicts with more batch dimensions than the outermost one.
Nested = tuple[tuple[tuple[str, ...], torch.Size], ...]


class _Fields(dict[NestedKey, Field]):
    def __missing__(self, key: NestedKey) -> Field:
        raise KeyError(f"the rows have no field {key!r}; they have {sorted(self, key=str)}.")


class Layout:
    """Chooses the positions of the fields of a transition.

    A field with a next value of the same dtype and shape is part of the *observation*, which is stored
    once for both. All other fields are part of the *step*. Rewards, flags and counts of steps are always
    part of the step. A row is `[observation | step | next observation]`, so that one gather reads whole
    rows and a block of rows can be written.

    Args:
        fields: key -> (dtype, shape) of one transition, or (dtype, shape, FrameStack).
        nested: path -> batch dimensions of nested TensorDicts beyond the batch dimension of the rows.
        keyframes: K, the interval of keyframes, to compress stacks and observations that are uint8 with
            two dimensions or more; 0 compresses nothing. See `kernels.frames`.

    Raises:
        ValueError: there is no field, stacks have different numbers of frames, a stack has no next value
            of its shape, or `keyframes` is not 0 but no field can be compressed.
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
        #: key -> (dtype, shape) or (dtype, shape, FrameStack), the fields in the order of the argument.
        self.described = {
            unravel_key(key): (dtype, torch.Size(shape), *stack)
            for key, (dtype, shape, *stack) in fields.items()
        }
        self.nested, self.keyframes = nested, keyframes
        self._check_dtypes()
        #: Whether transitions have next observations.
        self.has_next = keys.have_next(self.described)
        kinds = {key: kind[:2] for key, kind in self.described.items()}
        # Observations, which are stored once for both values.
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
            # The fields that decide whether rows are consecutive must be consecutive words. Therefore
            # the image of a goal is not compressed if there are stacks.
            images = [key for key in images if key in decides]
        groups = {
            "stacks": stacks,
            "images": [key for key in images if key not in decides],
            "deciding images": [key for key in images if key in decides],
            "deciding": [key for key in deciding if key not in images],
            "observation": [key for key in single if key not in decides and key not in images],
            "root": [key for key in steps if key[0] != "next"],
            "next": [key for key in steps if key[0] == "next"],
        }
        placed, group_ends = self._placed(groups)
        #: F, words of a frame of stacks; O, words of an observation; R, words before `next` values.
        self.frame_words = group_ends["stacks"]
        self.observation_words = group_ends["observation"]
        self.root_words = group_ends["root"]
        self._skipped = (self.frames - 1) * self.frame_words
        #: C, words of a compressed frame, which one word replaces in an entry; 0 if none is compressed.
        self.record_words = group_ends["deciding images"] if keyframes else 0
        if keyframes and not self.record_words:
            raise ValueError(
                "compress=True needs stacks of frames, or observations that are uint8 with two "
                f"dimensions or more; the fields are {self.described}."
            )
        self._removed = self.record_words - 1 if keyframes else 0
        #: W, words of an entry.
        self.entry_words = group_ends["next"] - self._removed
        #: The number of entries, its own included, that a step needs; and bytes of a row of pixels.
        self.depth = self.frames + max(keyframes - 1, 0)
        self.pixel_row = self._pixel_row(placed)
        #: Words of an observation with all frames, S; of a row before the next observation; of a row.
        self.seen_words = self.observation_words + self._skipped
        self.next_word = group_ends["next"] + self._skipped
        self.row_words = self.next_word + self.seen_words
        begin = 0 if {*stacks} & {*decides} else group_ends["images"] + self._skipped
        end = group_ends["deciding" if deciding else "stacks"] + self._skipped
        #: The sizes that loops need.
        self.sizes = Sizes(self.frame_words, self.observation_words, begin, end, self.root_words)
        observed = [field for field in placed if field.key in seen]
        after = [replace(it, key=keys.next_key(it.key), is_next=True) for it in observed]
        #: In the order of a row.
        self.fields = (*placed, *after)
        #: Key -> field; the KeyError for an unknown key lists the known ones.
        self.by_key = _Fields({field.key: field for field in self.fields})
        #: Key -> the field in an entry as integers: the size of one, the first one, and their number.
        self.words = {field.key: self._words_of(field) for field in self.fields}
        plain = [field for field in self.fields if not field.stack]
        self._splits = [self._split(dtype) for dtype in dict.fromkeys(it.dtype for it in plain)]
        self._shaped = [(field.key, field.shape) for field in plain if len(field.shape) != 1]
        self._stacks = [(field, field.stack) for field in self.fields if field.stack]

    def _is_image(self, key: NestedKey) -> bool:
        dtype, shape, *_ = self.described[key]
        return dtype is torch.uint8 and len(shape) > 1 and shape.numel() > 0

    def _pixel_row(self, placed: Sequence[Field]) -> int:
        """Returns the number of bytes of a row of pixels of the first image."""
        shape = placed[0].frame_shape
        # A last dimension of up to 4 holds channels.
        count = shape[-2:].numel() if len(shape) > 2 and shape[-1] <= 4 else shape[-1:].numel()
        return max(count * placed[0].dtype.itemsize, 1)

    def _words_of(self, field: Field) -> tuple[int, int, int]:
        size, offset = min(field.dtype.itemsize, WORD), field.offset - self._removed * WORD
        return size, offset // size, field.size * field.dtype.itemsize // size

    def _check_dtypes(self) -> None:
        if not self.described:
            raise ValueError("a layout needs at least one field, got none.")
        for key, (dtype, *_) in self.described.items():
            if dtype not in DTYPES.values():
                raise TypeError(f"{key!r} must have one of the dtypes {[*DTYPES]}, got {dtype}.")

    def _num_frames(self, stacks: Sequence[NestedKey], twins: Mapping[NestedKey, NestedKey]) -> int:
        declared = {key: kind[2] for key, kind in self.described.items() if len(kind) > 2}
        for key, stack in declared.items():
            root = twins.get(key, key)
            if root not in stacks or declared[root] != stack:
                raise ValueError(
                    f"{key!r} is {stack}, so it must have a next value of its dtype and shape."
                )
        numbers = {stack.num_frames for stack in declared.values()}
        if len(numbers) > 1:
            raise ValueError(
                f"all stacks must have the same number of frames, got {sorted(numbers)}."
            )
        return numbers.pop() if numbers else 1

    def _placed(
        self, groups: Mapping[str, Sequence[NestedKey]]
    ) -> tuple[list[Field], dict[str, int]]:
        """Places the groups one after another; within a group, fields with the largest elements first.

        Returns:
            the fields, and the word at which each group ends.
        """
        unit = max(WORD, *(kind[0].itemsize for kind in self.described.values()))
        placed: list[Field] = []
        group_ends, end = {}, 0
        for name, group in groups.items():
            for key in sorted(group, key=lambda key: -self.described[key][0].itemsize):
                dtype, shape, *stack = self.described[key]
                offset = -(-end // dtype.itemsize) * dtype.itemsize
                placed.append(Field(key, dtype, shape, offset, *stack))
                end = offset + placed[-1].size * dtype.itemsize
            end = -(-end // unit) * unit
            group_ends[name] = end // WORD
        return placed, group_ends

    def _split(self, dtype: torch.dtype) -> tuple[torch.dtype, list[int], list[NestedKey | None]]:
        """Returns a split of rows into plain fields: sizes, and keys, None for words between fields."""
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
        return field.offset >= self.observation_words * WORD

    def is_in_record(self, field: Field) -> bool:
        """Whether a field is part of a compressed frame."""
        return field.offset < self.record_words * WORD

    def row_byte(self, field: Field) -> int:
        """Returns the first byte of a field in a row; for a stack, the first byte of its oldest frame."""
        skipped = 0 if field.stack else self._skipped * WORD
        return field.offset + skipped + (self.next_word * WORD if field.is_next else 0)

    def field_offsets(self, key: NestedKey, targets: Sequence[NestedKey]) -> np.ndarray:
        """Returns the offsets of target fields in a row, in integers of the field `key`.

        The array is empty if a target is missing, has another dtype or shape, or is a stack, or if `key`
        is a stack or compressed.
        """
        source = self.by_key[key]
        kind = source.dtype, source.shape, None
        fields = [it for it in map(self.by_key.get, targets) if it]
        can_copy = all((it.dtype, it.shape, it.stack) == kind for it in (source, *fields))
        can_copy &= len(fields) == len(targets) and not self.is_in_record(source)
        offsets = [self.row_byte(it) // self.words[key][0] for it in fields]
        return np.array(offsets if can_copy else [], np.int64)

    def check_stacks(self, rows: Any) -> None:
        """Raises a ValueError unless next stacks in rows `[N, row_words]` are stacks moved by a frame."""
        first, after, size = self.frame_words, self.next_word, self._skipped
        if size and (rows[:, first : first + size] != rows[:, after : after + size]).any():
            raise ValueError(
                "the next stack of a transition must be its stack moved by one frame; declare only such "
                "observations in frame_stack={key: FrameStack(k)}."
            )

    # Views

    def tensordict(self, rows: torch.Tensor) -> TensorDict:
        """Returns rows `[*B, row_words]` as a TensorDict of batch size B that shares their memory."""
        return nest(self.views(rows), rows.shape[:-1], rows.device, self.nested)

    def views(self, rows: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        """Returns each field of rows `[*B, row_words]` int64 as a view `[*B, *shape]`."""
        views: dict[Any, torch.Tensor] = {}
        # One split is faster than a slice for each field. Autograd need not know that the views share
        # memory, because rows have no gradients.
        for dtype, sizes, field_keys in self._splits:
            values = rows.view(dtype).unsafe_split_with_sizes(sizes, -1)
            views.update(zip(field_keys, values, strict=True))
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
        frame_size = self.frame_words * WORD // field.dtype.itemsize
        frames = frames.view(*rows.shape[:-1], self.frames, frame_size)
        start = field.offset // field.dtype.itemsize
        frames = frames[..., start : start + field.size]
        return frames.view(*frames.shape[:-1], *field.frame_shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return False
        values = self.fields, self.nested, self.keyframes
        return values == (other.fields, other.nested, other.keyframes)

    def __repr__(self) -> str:
        fields = ", ".join(f"{field.key!r}: {field}" for field in self.fields)
        frames = ", compressed frames" if self.keyframes else ""
        return f"{type(self).__name__}({self.entry_words * WORD} bytes an entry{frames}; {fields})"


def nest(
    fields: Mapping[NestedKey, torch.Tensor],
    batch: torch.Size,
    device: torch.device,
    nested: Nested = (),
) -> TensorDict:
    """Returns a TensorDict of batch size B from key -> tensor `[*B, ...]`, with further nested sizes."""
    tensors = [*fields.values()]
    tensordicts: list[TensorDict] = []
    for names, positions, children, sizes in _tree_of(tuple(fields), nested):
        source: dict[str, Any] = dict(zip(names, map(tensors.__getitem__, positions), strict=True))
        for name, position in children:
            source[name] = tensordicts[position]
        tensordicts.append(new_tensordict(source, batch + sizes if sizes else batch, device))
    return tensordicts[-1]


@lru_cache(maxsize=1024)
def _tree_of(field_keys: tuple[NestedKey, ...], nested: Nested) -> list[tuple[Any, ...]]:
    """Returns the TensorDicts that hold tensors under some keys, children first.

    Each is a tuple: names of its tensors, their positions in `field_keys`, `(name, position)` of its
    children in the list, and its further sizes.
    """
    tree = keys.nested((keys.key_path(key), position) for position, key in enumerate(field_keys))
    sizes, nodes = dict(nested), []

    def add(entries: dict[str, Any], path: tuple[str, ...]) -> int:
        leaves = {name: it for name, it in entries.items() if isinstance(it, int)}
        children = [
            (name, add(it, (*path, name))) for name, it in entries.items() if isinstance(it, dict)
        ]
        nodes.append(([*leaves], [*leaves.values()], children, sizes.get(path)))
        return len(nodes) - 1

    add(tree, ())
    return nodes


def nested_sizes(data: TensorDictBase, batch_dims: int) -> Nested:
    """Returns the TensorDicts in `data` that have more than `batch_dims` batch dimensions.

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
    """Rows to be written to lanes, lane by lane.

    `words`, `done` and `cut` are arrays on the host, or tensors on the device of the entries.
    """

    lanes: np.ndarray
    """`[L]` int64 different lanes."""
    offsets: np.ndarray
    """`[L + 1]` int64, the first row of each lane, and N."""
    words: Any
    """`[N, row_words]` int64 rows."""
    done: Any
    """`[N]` bool, whether a row ends its episode."""
    cut: Any
    """`[N]` bool, whether a row begins an episode even if it continues the row before."""

    def parts(self, most: int) -> list[Block]:
        """Returns the block in chunks of at most `most` rows a lane."""
        if len(self.words) <= most:
            return [self]
        lanes, begins, counts = self.lanes, self.offsets[:-1], np.diff(self.offsets)
        if counts.max() <= most:
            return [self]
        chunks = []
        while len(lanes):
            sizes = np.minimum(counts, most)
            offsets = np.append(0, sizes.cumsum())
            rows: Any = slice(int(begins[0]), int(begins[0] + sizes[0]))
            if len(lanes) > 1:
                rows = (begins - offsets[:-1]).repeat(sizes) + np.arange(offsets[-1])
                if isinstance(self.words, torch.Tensor):
                    rows = torch.from_numpy(rows).to(self.words.device)
            values = self.words[rows], self.done[rows], self.cut[rows]
            chunks.append(Block(lanes, offsets, *values))
            has_more = counts > most
            lanes, begins, counts = (
                lanes[has_more],
                begins[has_more] + most,
                counts[has_more] - most,
            )
        return chunks
