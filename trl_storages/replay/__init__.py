"""The container: what a training loop writes to and samples from."""

from trl_storages.replay.ensemble import ReplayStorageEnsemble
from trl_storages.replay.storage import ReplayStorage

__all__ = ["ReplayStorage", "ReplayStorageEnsemble"]
