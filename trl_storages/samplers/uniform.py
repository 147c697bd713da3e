"""Every live row is as likely as any other."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import RandomSampler, Storage

from trl_storages import arguments
from trl_storages.ring import episodes_of
from trl_storages.samplers.drawing import DrawingSampler, Noise, check_not_empty
from trl_storages.saved import SavedState

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

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing, as each draw is as likely as any other."""
        return {}

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that a state is that of such a sampler, which has none: it must be empty.

        Raises:
            TypeError, ValueError: it is not.
        """
        SavedState(state_dict, f"the saved {type(self).__name__}", ())

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Takes over a state, of which there is none."""
