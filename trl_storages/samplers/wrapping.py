"""Samplers that change which transitions another sampler, their base, draws.

Letters: B batch.
"""

from __future__ import annotations

from typing import Any

from torchrl.data import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import Sampler

from trl_storages import validation
from trl_storages.samplers.base import ReplaySampler
from trl_storages.samplers.uniform import UniformSampler
from trl_storages.torchrl_compat import reject_torchrl_components
from trl_storages.validation import ComponentSetting

__all__ = ["WrappingSampler", "resolve_sampler"]


def resolve_sampler(sampler: Any) -> Any:
    """Returns the sampler to use in the place of one of TorchRL's; any other as it is.

    Raises:
        TypeError: TorchRL's sampler has no equal here.

    >>> resolve_sampler(RandomSampler())
    UniformSampler()
    """
    if type(sampler) is RandomSampler:
        return UniformSampler()
    if type(sampler) is SamplerWithoutReplacement and sampler.shuffle:
        return UniformSampler(without_replacement=True)
    reject_torchrl_components(sampler)
    return validation.instance("sampler", sampler, Sampler, what="a sampler")


class WrappingSampler(ReplaySampler):
    """A sampler that changes what its `base` draws.

    Args:
        base: draws the rows; None draws uniformly. It may be replaced, from the innermost sampler
            outwards. Its `draw` is asked, not its `sample`.

    Raises:
        TypeError: it is no sampler of this library, and none of TorchRL's with an equal here.
    """

    # How many random numbers it takes for each row beside those of its base.
    _own_draws = 0
    # TorchRL's schedulers set these on the outermost sampler.
    alpha = ComponentSetting("Priority exponent of the base.", "base=PERSampler(...)")
    beta = ComponentSetting(
        "Exponent of the importance weights of the base.", "base=PERSampler(...)"
    )
    eps = ComponentSetting("Constant added to each priority of the base.", "base=PERSampler(...)")
    eta: Any = ComponentSetting("Recency strength of the base.", "base=ERESampler(...)")

    def __init__(self, base: Sampler | None) -> None:
        super().__init__()
        self.base = base

    @property
    def base(self) -> Any:
        """The sampler that draws the rows."""
        return self._base

    @base.setter
    def base(self, base: Any) -> None:
        base = UniformSampler() if base is None else resolve_sampler(base)
        what = "a sampler of this library, such as PERSampler, or None for uniform draws"
        validation.instance("base", base, ReplaySampler, what=what)
        self._check_base(base)
        self._base: ReplaySampler = base
        self.num_draws = base.num_draws + self._own_draws

    def _check_base(self, base: ReplaySampler) -> None:
        """Raises if this sampler can't change what `base` draws."""

    @property
    def layers(self) -> list[ReplaySampler]:
        """The samplers that this one is made of, itself first."""
        return [self, *self._base.layers]

    def components(self) -> list[ReplaySampler]:
        """Returns the samplers that draw for this one, outermost first."""
        return self._base.layers

    @property
    def ran_out(self) -> bool:  # type: ignore[override]
        """Whether the last draw ended an epoch of the base."""
        return self._base.ran_out

    def _empty(self) -> None:
        self._base._empty()
