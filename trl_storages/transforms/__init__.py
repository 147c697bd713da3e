"""Transforms of sampled batches."""

from trl_storages.transforms.base import (
    ReplayTransform,
    check_transforms,
    parts_of,
    transform_batch,
)
from trl_storages.transforms.env_reward import gym_reward
from trl_storages.transforms.flatten_goal import FlattenGoal
from trl_storages.transforms.n_step import NStep
from trl_storages.transforms.relabel import GoalRelabel, RelabelAudit, own_rewards

__all__ = [
    "FlattenGoal",
    "GoalRelabel",
    "NStep",
    "RelabelAudit",
    "ReplayTransform",
    "check_transforms",
    "gym_reward",
    "own_rewards",
    "parts_of",
    "transform_batch",
]
