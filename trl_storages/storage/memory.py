"""Transitions in memory, with the methods of a `Directory`; nothing is flushed or closed."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from trl_storages.entries.arena import CAN_RELEASE, Arena
from trl_storages.entries.device import DeviceEntries
from trl_storages.entries.frames import host_entries
from trl_storages.entries.host import HostEntries, arena_sizes
from trl_storages.entries.layout import Layout
from trl_storages.index import EpisodeIndex
from trl_storages.storage import dumps
from trl_storages.validation import warn_caller

__all__ = ["HOSTS", "Memory", "warn_if_too_large"]

#: Types of devices whose memory compiled loops read and write.
HOSTS = ("cpu",)


def warn_if_too_large(num_rows: int, row_bytes: int) -> None:
    """Warns if `num_rows` transitions need more memory than the machine has; not on Windows."""
    if sys.platform == "win32":
        return
    memory, size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), num_rows * row_bytes
    if size > memory:
        warn_caller(
            f"{num_rows:,} transitions of {row_bytes:,} bytes need {size / 1e9:,.1f} GB, but this "
            f"machine has {memory / 1e9:,.1f} GB of memory: pass a smaller storage_size, or path= to "
            "keep them on disk."
        )


class Memory:
    """Transitions in memory of this process, in shared memory or on a device, with their index.

    Args:
        layout: layout of the transitions; None creates only an empty index, which checks the sizes.
        max_size, num_envs, max_entries: see `EpisodeIndex`. If the platform cannot free single pages, the
            default of `max_entries` is enough for episodes of about 8 k steps, k frames a stack.
        device: device of the transitions.
        arena: shared memory that contains transitions; None allocates new memory.

    Attributes:
        index: the episode index of the transitions.
        entries: reads and writes the entries; None without a layout.
    """

    is_writer, has_other_writer = True, False
    state: Mapping[str, Any] = {}

    def __init__(
        self,
        layout: Layout | None,
        max_size: int,
        num_envs: int,
        max_entries: int | None,
        device: torch.device,
        arena: Arena | None = None,
    ) -> None:
        self._arguments = layout, max_size, num_envs, max_entries, device
        self.layout, self._is_shared = layout, arena is not None
        k, depth = (1, 1) if layout is None else (layout.frames, layout.depth)
        is_on_host = device.type in HOSTS
        if max_entries is None and not (is_on_host and CAN_RELEASE):
            # The memory of evicted entries is not freed here. A step takes one entry, and k more if it
            # begins an episode: T / 8 more are enough for episodes of 8 k steps; 24 in a small storage.
            # New steps need room before old ones are evicted, too: for 64 steps of k + 1 entries.
            steps = max_size // max(num_envs, 1)
            begins = max(steps // 8, 24)
            per_lane = steps + begins + (k + 1) * min(begins, 64) + depth - k
            max_entries = num_envs * per_lane
        sizes = max_size, num_envs
        self.index = index = EpisodeIndex(*sizes, stack=k, depth=depth, max_entries=max_entries)
        self.entries: HostEntries | DeviceEntries | None = None
        if layout is not None and is_on_host:
            self._arena = arena = arena or Arena(**arena_sizes(layout, index))
            self.entries = host_entries(layout, index, arena)
        elif layout is not None:
            self.entries = DeviceEntries(layout, index, device)

    def copy_to_shared_memory(self) -> Memory:
        """Copies the transitions to memory that other processes share, and returns it."""
        layout: Any = self.layout
        arena = Arena.shared(**arena_sizes(layout, self.index))
        arena.copy_from(self._arena.arrays)
        return Memory(*self._arguments, arena)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_shared and get_spawning_popen() is not None:
            return Memory, (*self._arguments, self._arena)
        # As bytes: tensors that are sent to a spawned process must outlive this call.
        return _copy, (self._arguments, pickle.dumps(dumps.collect_lanes(self)))

    def replace_rows(self, fill: Callable[..., None], _: Any = None) -> Memory:
        """Replaces the transitions by those that `fill` writes; returns the memory."""
        fill(self.index, self.entries)
        return self

    def evict(self, keep_steps: int) -> None:
        """Evicts all transitions except the last `keep_steps` of each lane."""
        self.index.evict(keep_steps)

    def validate(self) -> None:
        """Raises a RuntimeError if the index contradicts itself."""
        self.index.validate()

    def reopen_if_replaced(self) -> Memory:
        """Returns this memory, because no other process replaces it."""
        return self

    def check_writer(self) -> None:
        """Does nothing, because every process that has the memory may write."""

    def flush(self, state: Any = None) -> None:
        """Does nothing."""

    def close(self, state: Any = None, *, keep: bool = True) -> None:
        """Does nothing."""


def _copy(arguments: tuple[Any, ...], saved: bytes) -> Memory:
    memory = Memory(*arguments)
    index = memory.index
    _, lanes = dumps.parse_lanes(pickle.loads(saved), index.capacity, index.num_envs)
    return memory.replace_rows(partial(dumps.fill_lanes, lanes))
