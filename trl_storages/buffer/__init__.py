"""The container: what a training loop writes to and samples from."""

from trl_storages.buffer.ensemble import ReplayStorageEnsemble
from trl_storages.buffer.replay_storage import ReplayStorage

__all__ = ["ReplayStorage", "ReplayStorageEnsemble"]
