"""The fields of a transition, and observations that are stacks of frames.

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
#: The names of the dtypes.
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FrameStack:
    """Declares that an observation is a stack of the newest frames, the newest last.

    Pass it after dtype and shape in `PackedStorage(fields=...)`, or as a value of the presets'
    `frame_stack`. Within an episode the next stack of a transition must be its stack moved by one frame.
    The first stack of an episode may hold any frames, for example repeated ones or zeros.

    Args:
        num_frames: k, the same for all stacks of a buffer.
        dim: the dimension along which frames are stacked. The first dimension may hold several channels
            for each frame, as in TorchRL's `CatFrames` and DrQ-v2; any other dimension must have size k.

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
        """Returns the shape of one frame of stacks of a shape.

        Raises:
            ValueError: the shape is not one of stacks of `num_frames` frames.
        """
        count, num_dims = self.num_frames, len(shape)
        if not -num_dims <= self.dim < num_dims:
            raise ValueError(f"dim must be a dimension of shape {list(shape)}, got {self.dim}.")
        dim = self.dim % num_dims
        size = shape[dim]
        if size == 0 or size % count or (dim and size != count):
            quantity = "exactly" if dim else "a multiple of"
            raise ValueError(
                f"a stack must have {quantity} num_frames={count} along dim={self.dim}, "
                f"got {list(shape)}."
            )
        sizes = [*shape[:dim], *shape[dim + 1 :]]
        return torch.Size([size // count, *sizes] if dim == 0 and size > count else sizes)

    def frames(self, stacks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns stacks `[*B, *shape]` as frames `[*B, k, *frame_shape]`, as a view if possible."""
        batch = stacks.shape[: stacks.ndim - len(shape)]
        moved = stacks.movedim(len(batch) + self.dim % len(shape), len(batch))
        return moved.reshape(*batch, self.num_frames, *self.frame_shape(shape))

    def stacks(self, frames: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns frames `[*B, k, *frame_shape]` as stacks `[*B, *shape]`, as a view if possible."""
        batch = frames.shape[: frames.ndim - len(self.frame_shape(shape)) - 1]
        if (dim := self.dim % len(shape)) == 0:
            return frames.reshape(*batch, *shape)
        return frames.movedim(len(batch), len(batch) + dim)


@dataclass(frozen=True)
class Field:
    """One field of a transition, and its position in an entry.

    Args:
        key: of the field in a TensorDict.
        dtype: of the elements.
        shape: of the value in one transition.
        offset: the first byte of the field in an entry whose frame is decoded; for a stack, the first
            byte of its newest frame.
        stack: how frames are stacked; None if the field is no stack.
        is_next: whether the value is read from the observation in the next entry.
    """

    key: NestedKey
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    stack: FrameStack | None = None
    is_next: bool = False

    @cached_property
    def frame_shape(self) -> torch.Size:
        """The shape of the values in one entry."""
        return self.shape if self.stack is None else self.stack.frame_shape(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of elements in one entry."""
        return self.frame_shape.numel()

    def __str__(self) -> str:
        stacked = "" if self.stack is None else f" as {self.stack}"
        return f"{NAMES[self.dtype]} {list(self.shape)}{stacked}"
