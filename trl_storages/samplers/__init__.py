"""Samplers choose the transitions of a batch."""

from trl_storages.samplers.base import (
    ReplaySampler,
    UniformSampler,
    layers_of,
    resolve_sampler,
)
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.samplers.prioritized import REDUCTIONS, PERSampler, checked_priorities
from trl_storages.samplers.recency import ERESampler, ReturnImprovementEta
from trl_storages.samplers.sequences import EpisodeSequence

__all__ = [
    "REDUCTIONS",
    "ERESampler",
    "EpisodeSequence",
    "HERSampler",
    "PERSampler",
    "ReplaySampler",
    "ReturnImprovementEta",
    "UniformSampler",
    "checked_priorities",
    "layers_of",
    "resolve_sampler",
]
