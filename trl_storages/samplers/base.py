"""What samplers of this library have in common."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages.attributes import Strict
from trl_storages.packed import PackedStorage
from trl_storages.states import Adopt, State, entries_of, nothing

__all__ = ["Drawn", "OwnSampler", "WrappingSampler", "layers_of"]

Drawn = tuple[torch.Tensor, dict[Any, torch.Tensor]]


class OwnSampler(Strict, Sampler):  # type: ignore[misc]
    """What all samplers here have in common: they draw from the newest `window` steps of each lane."""

    @property
    def layers(self) -> list[OwnSampler]:
        """The samplers that this one is made of, itself first."""
        return [self]

    def sample(self, storage: PackedStorage, batch_size: int) -> Drawn:
        """Draws `[B]` slots, and the entries that go with them."""
        if not len(storage.episodes):
            raise RuntimeError("the storage is empty: write transitions before sampling.")
        return self.draw(storage, batch_size, None)

    def draw(self, storage: PackedStorage, batch_size: int, window: int | None) -> Drawn:
        """Draws from the newest `window` steps of each lane; None is all."""
        raise NotImplementedError

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return False

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        pass

    def noise(self, size: int) -> torch.Tensor:
        """Returns `[size]` random numbers of 63 bits."""
        return torch.empty(size, dtype=torch.int64).random_(generator=self._rng)

    def state(self) -> State:
        """Returns what the next draws depend on, but for parameters and the generator."""
        return {}

    def parsed(self, state: Any) -> Adopt:
        """Returns a function that adopts a state.

        Raises:
            ValueError: the state is not that of such a sampler.
        """
        entries_of(type(self).__name__, state, ())
        return nothing

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


class WrappingSampler(OwnSampler):
    """A sampler that changes what its `base` draws."""

    base: Any = None

    def __init__(self, base: OwnSampler) -> None:
        self.base = base
        arguments.instance("base", base, OwnSampler, what="a sampler of this library")
        super().__init__()

    @property
    def layers(self) -> list[OwnSampler]:
        """The samplers that this one is made of, itself first."""
        return [self, *self.base.layers]

    @property
    def _rng(self) -> torch.Generator | None:
        return self.base._rng

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        self.base._rng = generator
