"""Stacks of frames, of which a row stores only the newest frame."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, unravel_key

from trl_storages import arguments
from trl_storages.keys import next_key

__all__ = ["FrameStack", "Padding", "stacked_observations", "stacks_of"]

Padding = Literal["same", "constant"]

_MOST_DIMS = 64


@dataclass(frozen=True)
class FrameStack:
    """Declares that an observation is a stack of the newest frames, so that each is stored once.

    It follows dtype and shape in `PackedStorage(fields=...)`, and is a value of the recipes'
    `frame_stack`. It covers the observation and its twin under `next`.

    Args:
        num_frames: k, the number of frames in a stack, the newest last.
        dim: the dimension along which frames are stacked. The first may hold several channels a frame,
            as in TorchRL's `CatFrames` and DrQ-v2; any other must have size k.
        padding: fills in for frames before the episode: "same" repeats its first frame, "constant"
            uses zeros. gymnasium's `FrameStackObservation` calls them "reset" and "zero".

    Raises:
        ValueError: `num_frames` is below 2, or `padding` is unknown.

    >>> FrameStack(4).frame_shape(torch.Size([12, 84, 84]))
    torch.Size([3, 84, 84])
    """

    num_frames: int
    dim: int = 0
    padding: Padding = "same"

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen
        put(self, "num_frames", arguments.integer("num_frames", self.num_frames, at_least=2))
        put(self, "dim", arguments.integer("dim", self.dim, at_least=-_MOST_DIMS))
        put(self, "padding", arguments.choice("padding", self.padding, get_args(Padding)))

    def frame_shape(self, shape: Sequence[int]) -> torch.Size:
        """Returns the shape of a frame, with the frames along the first dimension.

        Args:
            shape: of the stack.

        Raises:
            ValueError: it is not the shape of a stack of `num_frames` frames.
        """
        num_dims, count = len(shape), self.num_frames
        if not -num_dims <= self.dim < num_dims:
            raise ValueError(
                f"dim must be one of the {num_dims} dimensions of a stack, which has the shape "
                f"{list(shape)}; got {self.dim}."
            )
        place = self.dim % num_dims
        size = shape[place]
        if size % count or size == 0 or (place and size != count):
            must = "a multiple of" if place == 0 else "just"
            raise ValueError(
                f"a stack must have {must} num_frames={count} along dim={self.dim}, got the shape "
                f"{list(shape)}; frames of several channels are stacked along the first dimension."
            )
        rest = [*shape[:place], *shape[place + 1 :]]
        return torch.Size([size // count, *rest] if place == 0 and size > count else rest)

    def frames_first(self, stacks: torch.Tensor, batch_dims: int) -> torch.Tensor:
        """Returns a view of stacks with the frame dimension right after those of the batch."""
        num_dims = stacks.ndim - batch_dims
        return stacks.movedim(batch_dims + self.dim % num_dims, batch_dims)

    def as_seen(self, stacks: torch.Tensor, batch_dims: int) -> torch.Tensor:
        """Returns a view that moves the frame dimension back to `dim`: undoes `frames_first`."""
        num_dims = stacks.ndim - batch_dims
        return stacks.movedim(batch_dims, batch_dims + self.dim % num_dims)


def stacks_of(fields: Mapping[NestedKey, tuple[Any, ...]]) -> dict[NestedKey, FrameStack]:
    """Returns the fields that are stacks, including their twins under `next`.

    Args:
        fields: key -> (dtype, shape), or (dtype, shape, FrameStack).

    Raises:
        TypeError: what follows dtype and shape is not a `FrameStack`.
        ValueError: a shape does not fit its stack, or the twin under `next` is another stack.
    """
    named = {unravel_key(key): field for key, field in fields.items()}
    said = {key: field[2] for key, field in named.items() if len(field) > 2}
    for key, stack in said.items():
        if not isinstance(stack, FrameStack) or len(named[key]) > 3:
            raise TypeError(
                f"{key!r} must be (dtype, shape) or (dtype, shape, FrameStack), got {named[key]!r}."
            )
    found: dict[NestedKey, FrameStack] = {}
    for key, stack in said.items():
        twin = next_key(key)
        if key[0] == "next":
            continue
        stack.frame_shape(named[key][1])
        found[key] = stack
        if twin in named:
            kinds = [(field[0], torch.Size(field[1])) for field in (named[key], named[twin])]
            if kinds[0] != kinds[1] or said.get(twin, stack) != stack:
                raise ValueError(
                    f"{twin!r} must be the same stack as {key!r}, {named[key]}; got {named[twin]}."
                )
            found[twin] = stack
    if alone := [key for key in said if key not in found]:
        raise ValueError(
            f"stacks under 'next' are those of the entries at the root, got {alone} alone: give the "
            "FrameStack to these."
        )
    return found


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
        for stack in frame_stack.values():
            arguments.instance("frame_stack", stack, FrameStack)
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
