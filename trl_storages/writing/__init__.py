"""Writes steps as rows: assigns rows to lanes, and finds where they do not continue them."""

from trl_storages.writing.gaps import OnGap
from trl_storages.writing.writer import EpisodeWriter

__all__ = ["EpisodeWriter", "OnGap"]
