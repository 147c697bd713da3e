"""Who is drawn."""

from trl_storages.samplers.base import WrappingSampler
from trl_storages.samplers.hindsight import GoalStrategy, HERSampler
from trl_storages.samplers.uniform import UniformSampler

__all__ = ["GoalStrategy", "HERSampler", "UniformSampler", "WrappingSampler"]
