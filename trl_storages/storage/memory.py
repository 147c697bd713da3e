"""Rows in memory: what a `Directory` is for those in files, with nothing to flush or to close."""

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
from trl_storages.entries.host import arena_sizes
from trl_storages.entries.layout import Layout
from trl_storages.index import EpisodeIndex
from trl_storages.storage import dumps
from trl_storages.validation import warn_caller

__all__ = ["HOSTS", "Memory", "warn_if_too_large"]

#: Devices whose memory compiled loops read and write.
HOSTS = ("cpu",)


def warn_if_too_large(num_rows: int, row_bytes: int) -> None:
    """Warns if so many rows need more memory than the machine has, where the system says."""
    if sys.platform == "win32":
        return
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_rows * row_bytes > room:
        warn_caller(
            f"{num_rows:,} transitions of {row_bytes:,} bytes need {num_rows * row_bytes / 1e9:,.1f} GB, "
            f"but this machine has {room / 1e9:,.1f} GB of memory: pass a smaller storage_size, or keep "
            "them on disk with path=."
        )


class Memory:
    """Rows in memory of this process, in memory that others share, or on a device, with their index.

    Args:
        layout: of the rows; without one there is an empty index alone, by which sizes are checked.
        max_size, num_envs, max_entries: see `EpisodeIndex`; where memory is not given back there is room
            for episodes of about eight steps by default.
        device: of the rows.
        arena: shared memory with rows; None makes memory without.

    Attributes:
        index: which rows there are.
        rows: the rows; None without a layout.
    """

    is_writer = is_quiescent = True
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
        self._made_of = layout, max_size, num_envs, max_entries, device
        self.layout, self._is_shared = layout, arena is not None
        k, depth = (1, 1) if layout is None else (layout.frames, layout.depth)
        is_here = device.type in HOSTS
        if max_entries is None and not (is_here and CAN_RELEASE):
            # Entries that no row needs are not released here.
            steps = max_size // max(num_envs, 1)
            most = max(steps // 8, 24)
            max_entries = num_envs * (steps + most + (k + 1) * min(most, 64) + depth - k)
        sizes = max_size, num_envs
        self.index = index = EpisodeIndex(*sizes, stack=k, depth=depth, max_entries=max_entries)
        self.entries: Any = None
        if layout is not None and is_here:
            self._arena = arena = arena or Arena(**arena_sizes(layout, index))
            self.entries = host_entries(layout, index, arena)
        elif layout is not None:
            self.entries = DeviceEntries(layout, index, device)

    def shared(self) -> Memory:
        """Returns the rows in memory that other processes share."""
        layout: Any = self.layout
        arena = Arena.shared(**arena_sizes(layout, self.index))
        arena.copy_from(self._arena.arrays)
        return Memory(*self._made_of, arena)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_shared and get_spawning_popen() is not None:
            return Memory, (*self._made_of, self._arena)
        # As bytes: tensors that are sent to a spawned process must outlive this call.
        return _copied, (self._made_of, pickle.dumps(dumps.packed(self)))

    def replaced(self, fill: Callable[..., None], _: Any = None) -> Memory:
        """Returns the memory with other rows."""
        fill(self.index, self.entries)
        return self

    def empty(self, keep_steps: int) -> None:
        """Discards all rows but the last `keep_steps` of each lane; with 0 slots begin anew."""
        if keep_steps:
            self.index.evict(keep_steps)
        else:
            self.index.evict_to_first_slots()

    def validate(self) -> None:
        """Raises a RuntimeError if the index contradicts itself."""
        self.index.validate()

    def newest(self) -> Memory:
        """Returns the rows that count now: these."""
        return self

    def check_writer(self) -> None:
        """Nothing: whoever has memory may write."""

    def flush(self, state: Any = None) -> None:
        """Nothing."""

    def close(self, state: Any = None, *, keep: bool = True) -> None:
        """Nothing."""


def _copied(made_of: tuple[Any, ...], saved: bytes) -> Memory:
    made = Memory(*made_of)
    _, lanes = dumps.parsed(pickle.loads(saved), made.index.capacity, made.index.num_envs)
    return made.replaced(partial(dumps.fill, lanes))
