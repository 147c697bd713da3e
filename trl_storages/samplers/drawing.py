"""What samplers have in common: one call of the generator for all random numbers of a batch.

Letters: B batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.functional.draws import random_noise
from trl_storages.ring import episodes_of
from trl_storages.saved import SavedPart
from trl_storages.signatures import SettledSampler
from trl_storages.stock_parts import draw

__all__ = ["DrawingSampler", "check_not_empty", "draw_from", "noise_of"]

Noise = Sequence[torch.Tensor]


class DrawingSampler(SavedPart, SettledSampler, Sampler):
    """A sampler that is handed its random numbers, so that those of a batch are made at once."""

    #: Which of `sample` and `sample_window` a subclass has overridden without `draw`.
    overridden: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for kind in cls.__mro__:
            if methods := vars(kind).keys() & {"draw", "sample", "sample_window"}:
                cls.overridden = frozenset() if "draw" in methods else frozenset(methods)
                return

    @property
    def noise_per_sample(self) -> int:
        """How many random numbers a sample is drawn with."""
        return 1

    @abstractmethod
    def draw(
        self, storage: Storage, batch_size: int, noise: Noise, window: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws a batch.

        Args:
            storage: holds rows.
            batch_size: B.
            noise: `noise_per_sample` rows `[B]` of `random_noise`.
            window: `[]` int64, how many of the newest rows to draw from; None is all. Only samplers
                that have `sample_window` are handed one.

        Returns:
            `[B]` int64 slots, and the info that goes with them.
        """

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws a batch.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and the info that goes with them.

        Raises:
            RuntimeError: the storage is empty, or has no episode index.
        """
        return self._sample(storage, batch_size)

    def _sample(
        self, storage: Storage, batch_size: int, *window: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        check_not_empty(storage)
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        size, device = (self.noise_per_sample, batch_size), self._noise_device(storage)
        noise: Noise = ()
        if size[0]:
            noise = random_noise(size, generator=self._rng, device=device).unbind()
        return self.draw(storage, batch_size, noise, *window)

    def _noise_device(self, storage: Storage) -> torch.device:
        return episodes_of(storage).device


def noise_of(sampler: Sampler) -> int:
    """Returns how many random numbers a sampler is handed for a sample.

    Those of TorchRL make their own, as do subclasses that override `sample`.
    """
    if isinstance(sampler, DrawingSampler) and not sampler.overridden:
        return sampler.noise_per_sample
    return 0


def draw_from(
    sampler: Any, storage: Storage, batch_size: int, noise: Noise, *window: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Draws a batch from a sampler of any kind; the arguments are those of `DrawingSampler.draw`."""
    if isinstance(sampler, DrawingSampler) and not sampler.overridden:
        return sampler.draw(storage, batch_size, noise, *window)
    if window:
        return sampler.sample_window(storage, batch_size, *window)
    return draw(sampler, storage, batch_size)


def check_not_empty(storage: Storage) -> None:
    """Raises a RuntimeError that says what to do if there is nothing to draw from."""
    # Anything with an episode index and a length will do.
    if getattr(storage, "episodes", None) is None:
        arguments.instance("storage", storage, Storage, what="a TorchRL storage")
    if not len(storage):
        raise RuntimeError(
            "the storage is empty: write transitions with record(), add() or extend() before sampling."
        )
