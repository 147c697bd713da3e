"""Saved states: fully checked before any of them is loaded."""

from trl_storages.saved.files import (
    DTYPES,
    copy_in_pieces,
    dtype_name,
    forget_state,
    read_state,
    write_state,
)
from trl_storages.saved.parts import SavedPart, SavedState, StockPart, as_part
from trl_storages.saved.untrusted import MOST_BYTES, parse_json

__all__ = [
    "DTYPES",
    "MOST_BYTES",
    "SavedPart",
    "SavedState",
    "StockPart",
    "as_part",
    "copy_in_pieces",
    "dtype_name",
    "forget_state",
    "parse_json",
    "read_state",
    "write_state",
]
