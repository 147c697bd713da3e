"""Random crops of images, for agents that learn from pixels.

Letters: B batch, H and W height and width of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey

from trl_storages import keys, validation
from trl_storages.entries.device import sent
from trl_storages.settings import Setting
from trl_storages.storage import BatchRows
from trl_storages.transforms.base import ReplayTransform

__all__ = ["RandomCrop"]


class RandomCrop(ReplayTransform):
    """Shifts images at random: pads them by repeating their edges, and crops them to their size.

    All images of a transition are shifted by the same number of pixels down and right, each uniform over
    -padding..padding, so that the observation, the next observation and the goals still match. The
    transitions of a sequence share the shift. The random numbers come from the generator of the buffer,
    so a seed samples the same crops. The stored images are not changed.

    The transform must come after those that add images to the batch, and after `NStep`.

    Args:
        in_keys: keys of the images, which have the same height and width.
        padding: the largest shift in pixels.
        probability: probability that a batch is cropped; else its images are left as they are.
        channels_last: whether images are `[B, ..., H, W, C]`, as OGBench's, instead of `[B, ..., H, W]`.

    `padding` and `probability` may be changed between samples.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of its range.

    Reference: Kostrikov et al. 2020, Image Augmentation Is All You Need, arXiv:2004.13649.

    >>> RandomCrop(["observation", ("next", "observation")], padding=3, probability=0.5)
    RandomCrop(keys=['observation', ('next', 'observation')])
    """

    padding: Any = Setting(validation.integer)
    probability: Any = Setting(validation.number, at_least=0, at_most=1)

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        padding: int = 4,
        *,
        probability: float = 1.0,
        channels_last: bool = False,
    ) -> None:
        super().__init__(in_keys=validation.keys("in_keys", in_keys))
        self.padding, self.probability = padding, probability
        self._height_dim = -3 if validation.flag("channels_last", channels_last) else -2

    def replay(self, rows: BatchRows) -> None:
        """Crops the images of a batch.

        Raises:
            KeyError: the batch has no such image.
        """
        generator, shape = rows.generator, (2, len(rows.slots), 1)
        if torch.rand((), generator=generator, device="cpu") >= self.probability:
            return
        shifts = torch.randint(2 * self.padding + 1, shape, generator=generator, device="cpu")
        if (sequence := rows.drawn.get(keys.SEQUENCE_ID)) is not None:
            shifts = shifts[:, sequence]
        shifts = sent(shifts - self.padding, rows.device)
        for key in self.in_keys:
            rows[key] = _cropped(rows[key], shifts, self._height_dim)


def _cropped(images: torch.Tensor, shifts: torch.Tensor, height_dim: int) -> torch.Tensor:
    """Returns images `[B, ..., H, W, ...]`, shifted by `[2, B, 1]` pixels along H and W."""
    width_dim = height_dim + 1
    height, width = images.shape[height_dim], images.shape[width_dim]
    # Positions beyond an edge are clamped to the edge: [B, H] and [B, W].
    rows, columns = (
        (torch.arange(size, device=images.device) + shift).clamp(0, size - 1)
        for size, shift in zip((height, width), shifts, strict=True)
    )
    pixels = images.flatten(height_dim, width_dim)  # [B, ..., H * W, ...]
    sources = (rows[:, :, None] * width + columns[:, None]).flatten(1)  # [B, H * W]
    shape = [len(images)] + [1] * (pixels.ndim - 1)
    shape[width_dim] = height * width
    return pixels.gather(width_dim, sources.view(shape).expand_as(pixels)).view(images.shape)
