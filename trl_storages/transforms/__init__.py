"""Transforms of sampled batches."""

from trl_storages.transforms.audit import RelabelAudit
from trl_storages.transforms.base import ReplayTransform, transforms_in
from trl_storages.transforms.flatten_goal import FlattenGoal
from trl_storages.transforms.gym import gym_reward, gym_terminated
from trl_storages.transforms.n_step import NStep
from trl_storages.transforms.random_crop import RandomCrop
from trl_storages.transforms.relabel import GoalFunction, GoalRelabel, goal_values

__all__ = [
    "FlattenGoal",
    "GoalFunction",
    "GoalRelabel",
    "NStep",
    "RandomCrop",
    "RelabelAudit",
    "ReplayTransform",
    "goal_values",
    "gym_reward",
    "gym_terminated",
    "transforms_in",
]
