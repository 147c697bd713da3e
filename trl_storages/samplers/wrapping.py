"""Samplers that change what another one draws."""

from __future__ import annotations

from typing import Any

from torchrl.data import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import arguments
from trl_storages._torchrl import refuse_stock
from trl_storages.samplers.base import OwnSampler
from trl_storages.samplers.uniform import UniformSampler

__all__ = ["WrappingSampler", "own_sampler"]


def own_sampler(sampler: Any) -> Any:
    """Returns the sampler to use in the place of one of TorchRL's; any other as it is.

    Raises:
        TypeError: TorchRL's sampler has no equal here.

    >>> own_sampler(RandomSampler())
    UniformSampler()
    """
    if type(sampler) is RandomSampler:
        return UniformSampler()
    if type(sampler) is SamplerWithoutReplacement and sampler.shuffle and not sampler.drop_last:
        return UniformSampler(without_replacement=True)
    refuse_stock(sampler)
    return arguments.instance("sampler", sampler, Sampler, what="a sampler")


class WrappingSampler(OwnSampler):
    """A sampler that changes what its `base` draws.

    Args:
        base: draws the rows; None draws uniformly. It may be replaced, from the innermost sampler
            outwards. Its `draw` is asked, not its `sample`.

    Raises:
        TypeError: it is no sampler of this library, and none of TorchRL's with an equal here.
    """

    # How many random numbers it takes for each row beside those of its base.
    _own_draws = 0

    def __init__(self, base: Sampler | None) -> None:
        super().__init__()
        self.base = base

    @property
    def base(self) -> Any:
        """The sampler that draws the rows."""
        return self._base

    @base.setter
    def base(self, base: Any) -> None:
        base = UniformSampler() if base is None else own_sampler(base)
        what = "a sampler of this library, such as PERSampler, or None for uniform draws"
        arguments.instance("base", base, OwnSampler, what=what)
        self._check_base(base)
        self._base: OwnSampler = base
        self.num_draws = base.num_draws + self._own_draws

    def _check_base(self, base: OwnSampler) -> None:
        """Raises if this sampler can't change what `base` draws."""

    @property
    def layers(self) -> list[OwnSampler]:
        """The samplers that this one is made of, itself first."""
        return [self, *self._base.layers]

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch of the base."""
        return self._base.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._base.ran_out = value

    def _empty(self) -> None:
        self._base._empty()
