"""Every live row is as likely as any other."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torchrl.data import RandomSampler, Storage

from trl_storages import arguments
from trl_storages.episodes import episodes_of
from trl_storages.functional.draws import random_below
from trl_storages.signatures import ShownSignature

__all__ = ["UniformSampler", "check_not_empty"]


class UniformSampler(ShownSignature, RandomSampler):
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
        check_not_empty(storage)
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        episodes = getattr(storage, "episodes", None)
        if episodes is None:
            return super().sample(storage, batch_size)
        return episodes.random_slots(batch_size, self._rng), {}

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
        episodes = episodes_of(storage)
        batch_size = arguments.integer("batch_size", batch_size, at_least=1)
        arguments.tensor("window", window, dtype=torch.int64)
        ages = random_below(window, batch_size, generator=self._rng, device=episodes.device)
        return episodes.slots_by_age(ages), {}


def check_not_empty(storage: Storage) -> None:
    """Raises a RuntimeError that says what to do if there is nothing to draw from."""
    if not len(arguments.instance("storage", storage, Sized, what="a TorchRL storage")):
        raise RuntimeError(
            "the storage is empty: write transitions with record(), add() or extend() before sampling."
        )
