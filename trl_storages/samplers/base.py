"""The base class of the samplers of this library.

Letters: B batch, D random numbers per transition.
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

__all__ = ["Drawn", "ReplaySampler", "layers_of"]

#: `[B]` int64 slots, and the sampler's entries of the batch, as arrays `[B, ...]`.
Drawn = tuple[np.ndarray, dict[Any, np.ndarray]]


class ReplaySampler(Strict, Sampler):  # type: ignore[misc]
    """Samples transitions of a `PackedStorage`; the base class of the samplers here.

    A sampler reads the episode index whenever it samples, and has no callbacks for writes. It therefore
    also works in TorchRL's buffers over a `PackedStorage` and an `EpisodeWriter`. Subclasses implement
    `draw`. All random numbers of a batch come from one call of the generator, so that a seed samples the
    same transitions in memory, on disk and on a GPU.
    """

    #: D, the number of random numbers per transition.
    num_draws = 1
    #: Whether the last batch ended an epoch, and therefore an iteration over the buffer.
    ran_out = False

    @property
    def layers(self) -> list[ReplaySampler]:
        """This sampler, followed by the samplers that it wraps, outermost first."""
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
            view: the storage as of one moment.
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
            view: the storage as of one moment, which is not empty.
            noise: `[D, B]` int64 random numbers, uniform from 0 to 2^63 - 1.
            window: number of the newest steps of each lane to draw from; None draws from all steps.

        Returns:
            `[B]` int64 slots, and the sampler's entries of the batch, as arrays `[B, ...]`.
        """
        raise NotImplementedError

    # Called by TorchRL's buffers

    def state(self) -> State:
        """Returns the state on which the next batches depend, except parameters and the generator."""
        return {}

    def prepare_load(self, state: Any) -> Adopt:
        """Checks a state, and returns a function that adopts the state.

        Raises:
            ValueError: `state` does not come from a sampler of this class.
        """
        required_items(type(self).__name__, state, ())
        return all_of()

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts a state that `state_dict` returned, after all checks of `prepare_load`."""
        self.prepare_load(state_dict)()

    def _empty(self) -> None:
        """Does nothing, because the index already contains no transitions."""

    def dumps(self, path: Any) -> None:
        """Does nothing."""

    def loads(self, path: Any) -> None:
        """Does nothing."""


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns a sampler, followed by the samplers that it wraps, outermost first."""
    return sampler.layers if isinstance(sampler, ReplaySampler) else [sampler]
