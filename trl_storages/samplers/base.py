"""What samplers of this library have in common; uniform draws, and samplers that change what others draw.

Letters: B batch, D random numbers that a row takes, E lanes, N rows of an epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import validation
from trl_storages.serialization import Adopt, State, all_of, required_items
from trl_storages.storage import PackedStorage, StorageView
from trl_storages.validation import Strict

__all__ = [
    "Drawn",
    "ReplaySampler",
    "layers_of",
]

#: `[B]` int64 slots, and the entries of the batch that go with them, as arrays.
Drawn = tuple[np.ndarray, dict[Any, np.ndarray]]


class ReplaySampler(Strict, Sampler):  # type: ignore[misc]
    """Draws rows of a `PackedStorage`; the base class of the samplers here.

    A sampler is never told of writes: it asks the episode index what there is when it draws. So it works
    in TorchRL's buffers too, over a `PackedStorage` that an `EpisodeWriter` writes. Subclasses implement
    `draw`; the random numbers of a batch are drawn at once, so that one seed means the same rows wherever
    they are.
    """

    #: D, how many random numbers it takes for each row.
    num_draws = 1
    #: Whether the last draw ended an epoch, and with it an iteration over the buffer.
    ran_out = False

    @property
    def layers(self) -> list[ReplaySampler]:
        """The samplers that this one is made of, itself first."""
        return [self]

    def sample(
        self, storage: PackedStorage, batch_size: int
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Samples a batch for one of TorchRL's buffers; see `sample_view`.

        Raises:
            RuntimeError: the storage is empty.
            TypeError: the storage is not a `PackedStorage`.
        """
        return self.sample_view(
            validation.instance("storage", storage, PackedStorage).view(), batch_size
        )

    def sample_view(
        self, view: StorageView, batch_size: int
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Samples a batch.

        Args:
            view: the storage as of now.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and the sampler's entries of the batch, on the host.

        Raises:
            RuntimeError: the storage is empty.
        """
        view.episodes.check_filled()
        noise = np.empty((self.num_draws, batch_size), np.int64)
        torch.from_numpy(noise).random_(generator=self._rng)
        slots, info = self.draw(view, noise, None)
        tensors = map(torch.from_numpy, info.values())
        return torch.from_numpy(slots), dict(zip(info, tensors, strict=True))

    def draw(self, view: StorageView, noise: np.ndarray, window: int | None) -> Drawn:
        """Chooses the transitions of a batch by random numbers.

        Args:
            view: the storage as of now, which is not empty.
            noise: `[D, B]` int64 random numbers, uniform from 0 to 2^63 - 1.
            window: how many of the newest steps of each lane to draw from; None is all.

        Returns:
            As `sample_view`, but arrays.
        """
        raise NotImplementedError

    # What TorchRL's buffers call

    def state(self) -> State:
        """Returns what the next draws depend on, but for parameters and the generator."""
        return {}

    def prepare_load(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a sampler.
        """
        required_items(type(self).__name__, state, ())
        return all_of()

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts what `state_dict` returned, once all of it is checked."""
        self.prepare_load(state_dict)()

    def _empty(self) -> None:
        """Does nothing: the index says that there are no rows."""

    def dumps(self, path: Any) -> None:
        """Does nothing."""

    def loads(self, path: Any) -> None:
        """Does nothing."""


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns the samplers that a sampler is made of, itself first."""
    return sampler.layers if isinstance(sampler, ReplaySampler) else [sampler]
