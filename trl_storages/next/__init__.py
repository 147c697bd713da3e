"""The public names on streams of observations, until they take the place of the old ones."""

from trl_storages.functional.priorities import sequence_priority
from trl_storages.functional.returns import returns_to_go
from trl_storages.index import EpisodeIndex
from trl_storages.next.recipes import (
    EpisodeReplayStorage,
    EREReplayStorage,
    HERReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    UniformReplayStorage,
)
from trl_storages.next.samplers import (
    ERESampler,
    HERSampler,
    PERSampler,
    ReturnImprovementEta,
    UniformSampler,
)
from trl_storages.next.sequences import EpisodeSequence
from trl_storages.next.storage import ReplayStorage
from trl_storages.next.transforms import GoalRelabel, NStep, ReplayTransform
from trl_storages.next.writing import EpisodeWriter
from trl_storages.streams.frames import FrameStack
from trl_storages.streams.packed import PackedStorage
from trl_storages.transforms import FlattenGoal, gym_reward

__all__ = [
    "EREReplayStorage",
    "ERESampler",
    "EpisodeIndex",
    "EpisodeReplayStorage",
    "EpisodeSequence",
    "EpisodeWriter",
    "FlattenGoal",
    "FrameStack",
    "GoalRelabel",
    "HERReplayStorage",
    "HERSampler",
    "NStep",
    "NStepReplayStorage",
    "PERSampler",
    "PackedStorage",
    "PrioritizedReplayStorage",
    "ReplayStorage",
    "ReplayTransform",
    "ReturnImprovementEta",
    "UniformReplayStorage",
    "UniformSampler",
    "gym_reward",
    "returns_to_go",
    "sequence_priority",
]
