"""Storage of rows: streams of observations in memory, in a file or on a GPU."""

from trl_storages.entries.arena import Arena
from trl_storages.entries.device import DeviceEntries
from trl_storages.entries.fields import FrameStack
from trl_storages.entries.host import HostEntries, arena_sizes
from trl_storages.entries.layout import Block, Layout

__all__ = ["Arena", "Block", "DeviceEntries", "FrameStack", "HostEntries", "Layout", "arena_sizes"]
