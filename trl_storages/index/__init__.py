"""Which entries are which steps of which episodes."""

from trl_storages.index.episode_index import Changes, EmptyError, EpisodeIndex, Seen

__all__ = ["Changes", "EmptyError", "EpisodeIndex", "Seen"]
