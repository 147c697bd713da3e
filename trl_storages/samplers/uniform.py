"""Every live row is as likely as any other."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import RandomSampler, Storage

from trl_storages import arguments
from trl_storages.episodes import episodes_of
from trl_storages.samplers.drawing import DrawingSampler, Noise, check_not_empty

__all__ = ["UniformSampler"]


class UniformSampler(DrawingSampler, RandomSampler):
    """Draws uniformly over the live rows, exactly, whatever the fill of each lane.

    TorchRL's `RandomSampler` draws below the length of the storage, which is wrong while lanes of a
    ring are filled unequally. Over a storage without an episode index the two are the same.
    """

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows with replacement.

        Returns:
            `[B]` int64 slots, and an empty dict.

        Raises:
            RuntimeError: the storage is empty.
        """
        if getattr(storage, "episodes", None) is not None:
            return self._sample(storage, batch_size)
        check_not_empty(storage)
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        return RandomSampler.sample(self, storage, batch_size)

    def sample_window(
        self, storage: Storage, batch_size: int, window: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws among the newest rows, with replacement.

        Args:
            storage: holds the rows and their episode index.
            batch_size: B.
            window: `[]` int64 on the storage's device: how many of the newest rows to draw from, at
                least 1 and at most the rows stored.

        Returns:
            `[B]` int64 slots, and an empty dict.
        """
        arguments.tensor("window", window, dtype=torch.int64)
        return self._sample(storage, batch_size, window)

    def draw(
        self, storage: Storage, batch_size: int, noise: Noise, window: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows with replacement, see `DrawingSampler.draw`."""
        return episodes_of(storage).draw(noise[0], window), {}
