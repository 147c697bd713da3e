"""The episode index: which rows of the ring belong to which episode, and how old they are."""

from trl_storages.kernels.tables import GOAL_KINDS
from trl_storages.ring.index import EpisodeIndex, episodes_of
from trl_storages.ring.naming import Lanes

__all__ = ["GOAL_KINDS", "EpisodeIndex", "Lanes", "episodes_of"]
