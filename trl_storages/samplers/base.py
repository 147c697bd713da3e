"""The base classes of samplers, and of samplers that change what another sampler, the base, draws.

Letters: B batch, D random numbers per transition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import validation
from trl_storages.serialization import Adopt, State, all_of, required_items
from trl_storages.settings import ComponentSetting, Strict
from trl_storages.storage import PackedStorage, StorageView
from trl_storages.torchrl_compat import reject_torchrl_components

__all__ = ["Drawn", "ReplaySampler", "WrappingSampler", "layers_of", "resolve_sampler"]

#: `[B]` int64 slots, and the sampler's fields of the batch, as arrays `[B, ...]`.
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

    def components(self) -> list[ReplaySampler]:
        """Returns this sampler, followed by the samplers that it wraps, outermost first."""
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
            `[B]` int64 slots, and the sampler's fields of the batch, on the host.

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
            `[B]` int64 slots, and the sampler's fields of the batch, as arrays `[B, ...]`.
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
    return sampler.components() if isinstance(sampler, ReplaySampler) else [sampler]


def resolve_sampler(sampler: Any) -> Any:
    """Returns the sampler that replaces None or a sampler of TorchRL's; any other sampler unchanged.

    Raises:
        TypeError: no sampler of this library replaces that of TorchRL.

    >>> resolve_sampler(RandomSampler())
    UniformSampler()
    """
    from trl_storages.samplers.uniform import UniformSampler  # a subclass of `ReplaySampler`

    if sampler is None or type(sampler) is RandomSampler:
        return UniformSampler()
    if type(sampler) is SamplerWithoutReplacement and sampler.shuffle:
        return UniformSampler(without_replacement=True)
    reject_torchrl_components(sampler)
    return validation.instance("sampler", sampler, Sampler, what="a sampler")


class WrappingSampler(ReplaySampler):
    """A sampler that changes what its `base` draws.

    Args:
        base: draws the transitions by its `draw`; None draws uniformly. The attribute may be set; to
            replace several bases, begin with the innermost one.

    Raises:
        TypeError: `base` is neither a sampler of this library nor one that `resolve_sampler` replaces.
    """

    # Number of random numbers per transition in addition to those of the base.
    _extra_draws = 0
    # TorchRL's schedulers set these on the outermost sampler.
    alpha = ComponentSetting("Priority exponent of the base.", "base=PERSampler(...)")
    beta = ComponentSetting("Exponent of importance weights.", "base=PERSampler(...)")
    eps = ComponentSetting("Is added to each priority of the base.", "base=PERSampler(...)")
    eta: Any = ComponentSetting("Recency strength of the base.", "base=ERESampler(...)")

    def __init__(self, base: Sampler | None) -> None:
        super().__init__()
        self.base = base

    @property
    def base(self) -> ReplaySampler:
        """The sampler that draws the transitions."""
        return self._base

    @base.setter
    def base(self, base: Any) -> None:
        base = resolve_sampler(base)
        what = "a sampler of this library, such as PERSampler, or None for uniform draws"
        validation.instance("base", base, ReplaySampler, what=what)
        self._check_base(base)
        self._base: ReplaySampler = base
        self.num_draws = base.num_draws + self._extra_draws

    def _check_base(self, base: ReplaySampler) -> None:
        """Raises if this sampler can't change the draws of `base`."""

    def components(self) -> list[ReplaySampler]:
        """Returns this sampler, followed by the samplers that it wraps, outermost first."""
        return [self, *self._base.components()]

    @property
    def ran_out(self) -> bool:  # type: ignore[override]
        """Whether the last batch ended an epoch of the base."""
        return self._base.ran_out

    def _empty(self) -> None:
        self._base._empty()
