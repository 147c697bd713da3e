"""Which entries are which steps of which episodes."""

from trl_storages.index.episode_index import Changes, EmptyError, EpisodeIndex, Snapshot

__all__ = ["Changes", "EmptyError", "EpisodeIndex", "Snapshot"]
