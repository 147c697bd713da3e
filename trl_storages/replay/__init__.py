"""The container: what a training loop writes to and samples from."""

from trl_storages.replay.container import ReplayStorage
from trl_storages.replay.ensemble import ReplayStorageEnsemble
from trl_storages.replay.explain import Explanation

__all__ = ["Explanation", "ReplayStorage", "ReplayStorageEnsemble"]
