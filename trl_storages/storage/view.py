"""The transitions of a storage as of one moment.

Letters: B batch, E lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages.directory import Directory
from trl_storages.entries import DeviceEntries, HostEntries, Layout
from trl_storages.index import EpisodeIndex
from trl_storages.storage.memory import HOSTS, Memory

__all__ = ["StorageView"]


class StorageView:
    """The transitions of a storage as of one moment, which samplers draw from and batches are read from.

    The locks of a replay buffer keep its view valid while a batch is sampled. A reader of a directory
    cannot stop the writer: its view notes which transitions are read, and `torn` reports afterwards which
    of them were overwritten meanwhile.

    Args:
        backend: holds the transitions.
        device: of the transitions; their index is on the host.
        cursors: `[E]` the cursors of this moment, if another process may be writing; else None.

    Attributes:
        episodes: the episode index.
        layout: the fields of a transition.
        entries: reads and writes the entries.
        is_on_host: whether compiled loops read the entries.
        is_exclusive: whether no other process can write: only then may priorities be set.
    """

    def __init__(
        self, backend: Memory | Directory, device: torch.device, cursors: np.ndarray | None = None
    ) -> None:
        self.episodes: EpisodeIndex = backend.index
        self.device: torch.device = device
        self.is_on_host: bool = device.type in HOSTS
        # None until the first write: `check_filled` raises before they are used.
        self.layout: Layout = backend.layout  # type: ignore[assignment]
        self.entries: HostEntries | DeviceEntries = backend.entries  # type: ignore[assignment]
        self.is_exclusive: bool = cursors is None
        #: Returns the numbers of the entries of transitions in slots `[*B]`, which are read next.
        #: An attribute, because a method that tests for another writer would add two calls to a sample.
        self.locate: Callable[[torch.Tensor], np.ndarray | torch.Tensor] = self._note_and_locate
        if cursors is None and self.entries is not None:
            self.locate = self.entries.entries_of
        self._cursors: Any = cursors
        self._slots_read: list[torch.Tensor] = []

    def _note_and_locate(self, slots: torch.Tensor) -> np.ndarray | torch.Tensor:
        self._slots_read.append(slots)
        return self.entries.entries_of(slots)

    def read(self, slots: torch.Tensor, mask: torch.Tensor | None = None) -> TensorDict:
        """Returns the transitions in slots `[*B]` as they are stored, in new memory.

        Args:
            slots: `[*B]`.
            mask: `[*B]` bool, on the device of the transitions; all bits are 0 where it is False.

        Raises:
            EmptyError: the storage has no fields yet.
        """
        if self.layout is None:
            self.episodes.check_filled()
        at: Any = self.entries.entries_of(slots.reshape(-1))
        words = self.entries.gather(at, at).view(*slots.shape, self.layout.row_words)
        if mask is not None:
            words.masked_fill_(~mask.unsqueeze(-1), 0)  # some dtypes have no masked_fill_
        return self.layout.tensordict(words)

    def check_live(self, slots: torch.Tensor) -> None:
        """Raises an IndexError if a slot holds no valid transition.

        Nothing is checked if another process writes, because it may evict transitions at any time.
        """
        if self._cursors is None:
            self.episodes.check_live(slots)

    def overwritten(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Returns which transitions `[*B]` may have been overwritten since this moment.

        Returns:
            `[*B]` bool; None if no other process writes.
        """
        if self._cursors is None:
            return None
        overwritten = self.episodes.overwritten(slots.reshape(-1).numpy(), self._cursors)
        return torch.from_numpy(overwritten).view(slots.shape)

    def torn(self, batch_size: int) -> torch.Tensor | None:
        """Returns which samples of a batch may hold values that were overwritten while they were read.

        Args:
            batch_size: B.

        Returns:
            `[B]` bool; None if no sample is torn.
        """
        is_torn = None
        for slots in self._slots_read:  # empty if no other process writes
            overwritten: Any = self.episodes.overwritten(slots.reshape(-1).numpy(), self._cursors)
            if overwritten.any():
                is_torn = np.zeros(batch_size, bool) if is_torn is None else is_torn
                # Slots of another shape may concern any sample.
                is_per_sample = slots.shape[-1:] == (batch_size,)
                is_torn |= overwritten.reshape(-1, batch_size).any(0) if is_per_sample else True
        return None if is_torn is None else torch.from_numpy(is_torn)
