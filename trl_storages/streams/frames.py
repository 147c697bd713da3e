"""Observations that are stacks of frames, of which each is stored once.

Letters: B any leading shape, k frames a stack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey

from trl_storages import arguments
from trl_storages.keys import next_key

__all__ = ["FrameStack", "stacked_observations"]


@dataclass(frozen=True)
class FrameStack:
    """Declares that an observation is a stack of the newest frames, the newest last.

    It follows dtype and shape in `PackedStorage(fields=...)`, and is a value of the recipes'
    `frame_stack`. Within an episode the next stack of a row is its stack moved by one frame; whatever a
    stack begins with, such as its first frame repeated or zeros, reads back as it was.

    Args:
        num_frames: k.
        dim: the dimension along which frames are stacked. The first may hold several channels a frame,
            as in TorchRL's `CatFrames` and DrQ-v2; any other must have size k.

    Raises:
        ValueError: `num_frames` is below 2.

    >>> FrameStack(4).frame_shape(torch.Size([12, 84, 84]))
    torch.Size([3, 84, 84])
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


def stacked_observations(
    frame_stack: int | Mapping[NestedKey, FrameStack] | None,
    fields: Mapping[NestedKey, tuple[torch.dtype, Sequence[int]]],
    others: Collection[NestedKey] = (),
) -> dict[NestedKey, FrameStack]:
    """Returns the observations that are stacks of frames.

    Args:
        frame_stack: by key; or k, for all observations whose first or last dimension has size k.
        fields: of a transition.
        others: fields that are not observations.

    Raises:
        KeyError: no such observation; the message lists the existing ones.
        ValueError: no observation has k frames, or one has size k in both its first and last dimension.
    """
    if frame_stack is None:
        return {}
    there = [
        key for key in fields if key[0] != "next" and next_key(key) in fields and key not in others
    ]
    if isinstance(frame_stack, Mapping):
        if missing := [key for key in frame_stack if key not in there]:
            raise KeyError(f"frame_stack must name observations, one of {there}, got {missing}.")
        for key, stack in frame_stack.items():
            arguments.instance("frame_stack", stack, FrameStack).frame_shape(fields[key][1])
        return {**frame_stack}
    frame_stack = arguments.integer("frame_stack", frame_stack, at_least=2)
    found: dict[NestedKey, FrameStack] = {}
    for key in there:
        shape = fields[key][1]
        dims = [dim for dim in (0, -1) if len(shape) > 1 and shape[dim] == frame_stack]
        if len(dims) == 2:
            raise ValueError(
                f"frame_stack={frame_stack} must say along which dimension frames are stacked, as "
                f"{key!r} has the shape {list(shape)}: pass frame_stack={{{key!r}: FrameStack("
                f"{frame_stack}, dim=...)}}."
            )
        if dims:
            found[key] = FrameStack(frame_stack, dims[0])
    if not found:
        shapes = {key: list(fields[key][1]) for key in there}
        raise ValueError(
            f"frame_stack={frame_stack} must be the first or last of the dimensions of an observation, "
            f"got {shapes}: wrap an environment that returns single frames, as in "
            f"gymnasium.wrappers.FrameStackObservation(env, {frame_stack}); for frames of several "
            "channels pass a mapping from key to FrameStack."
        )
    return found
