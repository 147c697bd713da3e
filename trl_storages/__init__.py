"""Replay storages for TorchRL: hindsight, n-step, priorities and recency at sample time."""

# Imported for what it registers: the test environments.
import trl_storages.envs  # noqa: F401
from trl_storages.episodes import EpisodeIndex
from trl_storages.recipes import HERReplayStorage, UniformReplayStorage
from trl_storages.replay import ReplayStorage
from trl_storages.samplers import HERSampler, UniformSampler
from trl_storages.storages import PackedStorage
from trl_storages.transforms import GoalRelabel, ReplayTransform, gym_reward
from trl_storages.writers import EpisodeWriter

__all__ = [
    "EpisodeIndex",
    "EpisodeWriter",
    "GoalRelabel",
    "HERReplayStorage",
    "HERSampler",
    "PackedStorage",
    "ReplayStorage",
    "ReplayTransform",
    "UniformReplayStorage",
    "UniformSampler",
    "gym_reward",
]
