"""How what was drawn is seen."""

from trl_storages.transforms.apply import apply_transforms, parts_of, transform_batch
from trl_storages.transforms.base import ReplayTransform
from trl_storages.transforms.flatten_goal import FlattenGoal
from trl_storages.transforms.gym_reward import gym_reward
from trl_storages.transforms.n_step import NStep
from trl_storages.transforms.relabel import GoalRelabel, RelabelAudit

__all__ = [
    "FlattenGoal",
    "GoalRelabel",
    "NStep",
    "RelabelAudit",
    "ReplayTransform",
    "apply_transforms",
    "gym_reward",
    "parts_of",
    "transform_batch",
]
