"""Samplers: which rows a batch consists of."""

from trl_storages.samplers.base import (
    UniformSampler,
    WrappingSampler,
    check_live,
    layers_of,
    own_sampler,
    progress_of_draws,
    resume_draws,
)
from trl_storages.samplers.emphasis import ERESampler, WindowSampler
from trl_storages.samplers.hindsight import GoalMixture, GoalStrategy, HERSampler, check_strategy
from trl_storages.samplers.prioritized import REDUCTIONS, PERSampler, prioritized_of
from trl_storages.samplers.return_improvement import ReturnImprovementEta

__all__ = [
    "REDUCTIONS",
    "ERESampler",
    "GoalMixture",
    "GoalStrategy",
    "HERSampler",
    "PERSampler",
    "ReturnImprovementEta",
    "UniformSampler",
    "WindowSampler",
    "WrappingSampler",
    "check_live",
    "check_strategy",
    "layers_of",
    "own_sampler",
    "prioritized_of",
    "progress_of_draws",
    "resume_draws",
]
