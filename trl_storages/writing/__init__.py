"""What a writer asks before it writes: which lane a row is for, and whether it continues that lane."""

from trl_storages.writing.checks import end_flags, lanes_and_steps, refuse_padding
from trl_storages.writing.gaps import GapWatch, OnGap
from trl_storages.writing.routing import Block, route

__all__ = [
    "Block",
    "GapWatch",
    "OnGap",
    "end_flags",
    "lanes_and_steps",
    "refuse_padding",
    "route",
]
