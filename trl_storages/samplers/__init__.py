"""Who is drawn."""

from trl_storages.samplers.base import WrappingSampler
from trl_storages.samplers.emphasis import ERESampler, WindowSampler
from trl_storages.samplers.hindsight import GoalStrategy, HERSampler
from trl_storages.samplers.return_improvement import ReturnImprovementEta
from trl_storages.samplers.uniform import UniformSampler

__all__ = [
    "ERESampler",
    "GoalStrategy",
    "HERSampler",
    "ReturnImprovementEta",
    "UniformSampler",
    "WindowSampler",
    "WrappingSampler",
]
