"""The base class of samplers that change what another sampler, the base, draws."""

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
    """Returns the sampler that replaces a sampler of TorchRL's; any other sampler unchanged.

    Raises:
        TypeError: no sampler of this library replaces that of TorchRL.

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
        base: draws the transitions by its `draw`; None draws uniformly. The attribute may be set; to
            replace several bases, begin with the innermost one.

    Raises:
        TypeError: `base` is neither a sampler of this library nor one that `resolve_sampler` replaces.
    """

    # Number of random numbers per transition in addition to those of the base.
    _extra_draws = 0
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
    def base(self) -> ReplaySampler:
        """The sampler that draws the transitions."""
        return self._base

    @base.setter
    def base(self, base: Any) -> None:
        base = UniformSampler() if base is None else resolve_sampler(base)
        what = "a sampler of this library, such as PERSampler, or None for uniform draws"
        validation.instance("base", base, ReplaySampler, what=what)
        self._check_base(base)
        self._base: ReplaySampler = base
        self.num_draws = base.num_draws + self._extra_draws

    def _check_base(self, base: ReplaySampler) -> None:
        """Raises if this sampler can't change the draws of `base`."""

    @property
    def layers(self) -> list[ReplaySampler]:
        """This sampler, followed by the samplers that it wraps, outermost first."""
        return [self, *self._base.layers]

    def components(self) -> list[ReplaySampler]:
        """Returns the samplers that this one wraps, outermost first."""
        return self._base.layers

    @property
    def ran_out(self) -> bool:  # type: ignore[override]
        """Whether the last batch ended an epoch of the base."""
        return self._base.ran_out

    def _empty(self) -> None:
        self._base._empty()
