"""How steps become rows: which lane a row is for, whether it continues that lane, and the writer."""

from trl_storages.writing.counting import num_slots
from trl_storages.writing.gaps import OnGap
from trl_storages.writing.writer import EpisodeWriter

__all__ = ["EpisodeWriter", "OnGap", "num_slots"]
