"""Which entries are which steps of which episodes."""

from trl_storages.index.episode_index import Changes, EpisodeIndex, Seen

__all__ = ["Changes", "EpisodeIndex", "Seen"]
