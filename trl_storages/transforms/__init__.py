"""Transforms of sampled batches."""

from trl_storages.transforms.base import (
    ReplayTransform,
    apply_transforms,
    parts_of,
    transform_batch,
)
from trl_storages.transforms.flatten_goal import FlattenGoal
from trl_storages.transforms.n_step import NStep
from trl_storages.transforms.relabel import GoalRelabel, RelabelAudit, gym_reward, own_rewards

__all__ = [
    "FlattenGoal",
    "GoalRelabel",
    "NStep",
    "RelabelAudit",
    "ReplayTransform",
    "apply_transforms",
    "gym_reward",
    "own_rewards",
    "parts_of",
    "transform_batch",
]
