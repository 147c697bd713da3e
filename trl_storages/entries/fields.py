"""The values that a transition is made of, and observations that are stacks of frames.

Letters: B any leading shape, k frames a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from tensordict import NestedKey

__all__ = ["DTYPES", "NAMES", "WORD", "Field", "FrameStack"]

WORD = 8  # bytes
#: The dtypes that rows can hold, by name.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
#: And their names.
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FrameStack:
    """Declares that an observation is a stack of the newest frames, the newest last.

    It follows dtype and shape in `PackedStorage(fields=...)`, and is a value of the recipes'
    `frame_stack`. Within an episode the next stack of a row is its stack moved by one frame; whatever a
    stack begins with, such as its first frame repeated or zeros, reads back as it was.

    Args:
        num_frames: k, the same for all stacks of a storage.
        dim: the dimension along which frames are stacked. The first may hold several channels a frame,
            as in TorchRL's `CatFrames` and DrQ-v2; any other must have size k.

    Raises:
        ValueError: `num_frames` is below 2.

    >>> FrameStack(4).frame_shape(torch.Size([12, 84, 84]))
    torch.Size([3, 84, 84])
    >>> FrameStack(4).frame_shape(torch.Size([4, 84, 84]))
    torch.Size([84, 84])
    """

    num_frames: int
    dim: int = 0

    def __post_init__(self) -> None:
        if self.num_frames < 2:
            raise ValueError(f"num_frames must be at least 2, got {self.num_frames}.")

    def frame_shape(self, shape: Sequence[int]) -> torch.Size:
        """Returns the shape of a frame of stacks of this shape.

        Raises:
            ValueError: it is not the shape of a stack of `num_frames` frames.
        """
        count, num_dims = self.num_frames, len(shape)
        if not -num_dims <= self.dim < num_dims:
            raise ValueError(f"dim must be one of those of {list(shape)}, got {self.dim}.")
        place = self.dim % num_dims
        size = shape[place]
        if size == 0 or size % count or (place and size != count):
            must = "just" if place else "a multiple of"
            raise ValueError(
                f"a stack must have {must} num_frames={count} along dim={self.dim}, got {list(shape)}."
            )
        rest = [*shape[:place], *shape[place + 1 :]]
        return torch.Size([size // count, *rest] if place == 0 and size > count else rest)

    def frames(self, stacks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns stacks `[*B, *shape]` as frames `[*B, k, *frame_shape]`, if possible as a view."""
        batch = stacks.shape[: stacks.ndim - len(shape)]
        moved = stacks.movedim(len(batch) + self.dim % len(shape), len(batch))
        return moved.reshape(*batch, self.num_frames, *self.frame_shape(shape))

    def stacks(self, frames: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns frames `[*B, k, *frame_shape]` as stacks `[*B, *shape]`, if possible as a view."""
        batch = frames.shape[: frames.ndim - len(self.frame_shape(shape)) - 1]
        if (place := self.dim % len(shape)) == 0:
            return frames.reshape(*batch, *shape)
        return frames.movedim(len(batch), len(batch) + place)


@dataclass(frozen=True)
class Field:
    """One value of a transition, and where it lies in an entry.

    Args:
        key: its key in a TensorDict.
        dtype: of its elements.
        shape: of its value in one transition.
        at: its first byte in an entry, or in the frame of a record; of a stack, that of its newest frame.
        stack: whether, and how, it is a stack of frames.
        is_next: whether it is read from the observation of the entry after that of the step.
        in_record: whether it is part of the frame that is stored as what changed.
    """

    key: NestedKey
    dtype: torch.dtype
    shape: torch.Size
    at: int
    stack: FrameStack | None = None
    is_next: bool = False
    in_record: bool = False

    @cached_property
    def frame_shape(self) -> torch.Size:
        """The shape of what lies in one entry."""
        return self.shape if self.stack is None else self.stack.frame_shape(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of elements in one entry."""
        return self.frame_shape.numel()

    @cached_property
    def words(self) -> tuple[int, int, int]:
        """The size of integers that it is copied as, the first one in an entry, and their number."""
        size = min(self.dtype.itemsize, WORD)
        return size, self.at // size, self.size * self.dtype.itemsize // size

    def __str__(self) -> str:
        stacked = "" if self.stack is None else f" as {self.stack}"
        return f"{NAMES[self.dtype]} {list(self.shape)}{stacked}"
