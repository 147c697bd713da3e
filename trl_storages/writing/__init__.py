"""Writes transitions, from plain loops and from TensorDicts."""

from trl_storages.writing.recorder import Recorder
from trl_storages.writing.spaces import choices_of, transition_fields
from trl_storages.writing.writer import EpisodeWriter

__all__ = ["EpisodeWriter", "Recorder", "choices_of", "transition_fields"]
