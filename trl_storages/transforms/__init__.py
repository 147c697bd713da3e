"""How what was drawn is seen."""

from trl_storages.transforms.base import ReplayTransform
from trl_storages.transforms.gym_reward import gym_reward
from trl_storages.transforms.relabel import GoalRelabel, RelabelAudit

__all__ = ["GoalRelabel", "RelabelAudit", "ReplayTransform", "gym_reward"]
