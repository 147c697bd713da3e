"""Refuses TorchRL's own parts that know no lanes and episodes, and names those to use instead."""

from __future__ import annotations

from typing import Any

from torchrl.data import (
    ConsumingSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    Storage,
    Writer,
)
from torchrl.data.replay_buffers.sample_units import Sequence
from torchrl.envs.transforms import MultiStepTransform

__all__ = ["refuse_stock"]

_INSTEAD: dict[type, str] = {
    ConsumingSampler: "UniformSampler()",
    MultiStepTransform: "n_step=3, or transform=NStep(3)",
    PrioritizedSampler: "PERSampler(capacity)",
    PromptGroupSampler: "UniformSampler()",
    SamplerEnsemble: "ReplayStorageEnsemble(*storages)",
    SamplerWithoutReplacement: "UniformSampler(without_replacement=True)",
    Sequence: "sample_unit=EpisodeSequence(length)",
    SliceSampler: "sample_unit=EpisodeSequence(length), or storage.sample_episodes(n)",
    StalenessAwareSampler: "UniformSampler()",
    Storage: "PackedStorage(size)",
    Writer: "EpisodeWriter(num_envs)",
}


def refuse_stock(part: Any) -> None:
    """Raises a TypeError if a part is one of TorchRL's that would be wrong over lanes of episodes.

    >>> refuse_stock(SliceSampler(slice_len=2))
    Traceback (most recent call last):
    TypeError: SliceSampler knows no lanes and episodes: use sample_unit=EpisodeSequence(length), or ...
    """
    for kind in type(part).__mro__:
        if kind.__module__.startswith("trl_storages."):
            return
        if kind in _INSTEAD:
            raise TypeError(
                f"{type(part).__name__} knows no lanes and episodes: use {_INSTEAD[kind]}."
            )
