"""Replay buffers for TorchRL: HER, n-step returns, PER, ERE and sequences, computed when you sample.

Start with a preset, such as `UniformReplayStorage` or `HERReplayStorage`: create it with `from_env(env)`,
write with `record` (Gymnasium loops) or `extend` (collectors and datasets), and read with `sample`.
`help(UniformReplayStorage)` documents every option. `ReplayStorage` combines components of your own.
`trl_storages.datasets` loads datasets, `trl_storages.plotting` draws buffers and batches.
"""

# Imported to register the test environments.
import trl_storages.envs  # noqa: F401
from trl_storages.buffer import ReplayStorage, ReplayStorageEnsemble
from trl_storages.entries import FrameStack
from trl_storages.functional import returns_to_go, sequence_priority
from trl_storages.index import EpisodeIndex
from trl_storages.presets import (
    EREReplayStorage,
    HERReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    UniformReplayStorage,
)
from trl_storages.samplers import (
    EpisodeSequence,
    ERESampler,
    HERSampler,
    PERSampler,
    ReturnImprovementEta,
    UniformSampler,
)
from trl_storages.storage import PackedStorage
from trl_storages.transforms import (
    FlattenGoal,
    GoalRelabel,
    NStep,
    RandomCrop,
    ReplayTransform,
    gym_reward,
    gym_terminated,
)
from trl_storages.writing import EpisodeWriter

__version__ = "0.4.0"

__all__ = [
    "EREReplayStorage",
    "ERESampler",
    "EpisodeIndex",
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
    "RandomCrop",
    "ReplayStorage",
    "ReplayStorageEnsemble",
    "ReplayTransform",
    "ReturnImprovementEta",
    "UniformReplayStorage",
    "UniformSampler",
    "gym_reward",
    "gym_terminated",
    "returns_to_go",
    "sequence_priority",
]
