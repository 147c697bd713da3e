"""What was saved: looked at as a whole before any of it is taken over."""

from trl_storages.saved.folder import DumpFolder, check_names
from trl_storages.saved.parts import Savable, check_part, read_part
from trl_storages.saved.state import SavedState

__all__ = ["DumpFolder", "Savable", "SavedState", "check_names", "check_part", "read_part"]
