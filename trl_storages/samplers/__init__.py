"""Samplers: which rows a batch consists of."""

from trl_storages.samplers.base import OwnSampler, UniformSampler, layers_of, own_sampler
from trl_storages.samplers.emphasis import ERESampler, ReturnImprovementEta
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.samplers.prioritized import REDUCTIONS, PERSampler, checked_priorities
from trl_storages.samplers.sequences import EpisodeSequence

__all__ = [
    "REDUCTIONS",
    "ERESampler",
    "EpisodeSequence",
    "HERSampler",
    "OwnSampler",
    "PERSampler",
    "ReturnImprovementEta",
    "UniformSampler",
    "checked_priorities",
    "layers_of",
    "own_sampler",
]
