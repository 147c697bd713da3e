"""The episode index: which slot and entry hold which step of which episode."""

from trl_storages.index.episode_index import Changes, EmptyError, EpisodeIndex, Snapshot

__all__ = ["Changes", "EmptyError", "EpisodeIndex", "Snapshot"]
