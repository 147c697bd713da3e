"""Where rows are: streams of observations in memory, in a file or on a GPU."""

from trl_storages.streams.arena import Arena
from trl_storages.streams.device_rows import DeviceRows
from trl_storages.streams.fields import FrameStack
from trl_storages.streams.host_rows import HostRows, room_for
from trl_storages.streams.layout import Block, Layout

__all__ = ["Arena", "Block", "DeviceRows", "FrameStack", "HostRows", "Layout", "room_for"]
