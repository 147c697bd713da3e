"""What samplers of this library have in common.

Letters: B batch, D random numbers that a row takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.arguments import Strict
from trl_storages.packed import PackedStorage
from trl_storages.states import Adopt, State, entries_of, joined

__all__ = ["Drawn", "OwnSampler", "layers_of"]

#: `[B]` int64 slots, and the entries of the batch that go with them, as arrays.
Drawn = tuple[np.ndarray, dict[Any, np.ndarray]]


class OwnSampler(Strict, Sampler):  # type: ignore[misc]
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
    def layers(self) -> list[OwnSampler]:
        """The samplers that this one is made of, itself first."""
        return [self]

    def sample(
        self, storage: PackedStorage, batch_size: int
    ) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
        """Draws a batch.

        Args:
            storage: holds the rows.
            batch_size: B.

        Returns:
            `[B]` int64 slots, and the entries of the batch that go with them, on the host.

        Raises:
            RuntimeError: the storage is empty.
            TypeError: it is another storage, which knows no episodes.
        """
        if not isinstance(storage, PackedStorage):
            arguments.instance("storage", storage, PackedStorage)
        storage.episodes.check_filled()
        noise = np.empty((self.num_draws, batch_size), np.int64)
        torch.from_numpy(noise).random_(generator=self._rng)
        slots, info = self.draw(storage, noise, None)
        tensors = map(torch.from_numpy, info.values())
        return torch.from_numpy(slots), dict(zip(info, tensors, strict=True))

    def draw(self, storage: PackedStorage, noise: np.ndarray, window: int | None) -> Drawn:
        """Draws a batch by some random numbers.

        Args:
            storage: holds the rows, at least one.
            noise: `[D, B]` int64 random numbers, uniform from 0 to 2^63 - 1.
            window: how many of the newest steps of each lane to draw from; None is all.

        Returns:
            As `sample`, but arrays.
        """
        raise NotImplementedError

    # What TorchRL's buffers call

    def state(self) -> State:
        """Returns what the next draws depend on, but for parameters and the generator."""
        return {}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a sampler.
        """
        entries_of(type(self).__name__, state, ())
        return joined()

    def state_dict(self) -> State:
        """Returns `state()`."""
        return self.state()

    def load_state_dict(self, state_dict: State) -> None:
        """Adopts what `state_dict` returned, once all of it is checked."""
        self.parsed(state_dict)()

    def _empty(self) -> None:
        """Does nothing: the index says that there are no rows."""

    def dumps(self, path: Any) -> None:
        """Does nothing."""

    def loads(self, path: Any) -> None:
        """Does nothing."""


def layers_of(sampler: Sampler) -> list[Sampler]:
    """Returns the samplers that a sampler is made of, itself first."""
    return sampler.layers if isinstance(sampler, OwnSampler) else [sampler]
