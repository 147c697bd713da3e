"""What was saved: looked at as a whole before any of it is taken over."""

from trl_storages.saved.bounded_json import MOST_BYTES, parse_json
from trl_storages.saved.files import copy_in_pieces, read_state, write_state
from trl_storages.saved.parts import SavedPart, StockPart, as_part
from trl_storages.saved.state import SavedState

__all__ = [
    "MOST_BYTES",
    "SavedPart",
    "SavedState",
    "StockPart",
    "as_part",
    "copy_in_pieces",
    "parse_json",
    "read_state",
    "write_state",
]
