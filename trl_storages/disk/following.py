"""Rows that another process writes, read without being torn.

Letters: T steps a lane, E lanes (environments).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.disk.durable import Track, feed
from trl_storages.disk.header import fence
from trl_storages.disk.journal import Journal
from trl_storages.progress_bar import tracker
from trl_storages.ring import EpisodeIndex
from trl_storages.rows.packed import PackedStorage

__all__ = ["FollowingStorage"]

Batch = TypeVar("Batch")

# A batch that loses a row to the writer so often is too slow for it, and so is one that waits so long.
_ATTEMPTS = 1000
_PATIENCE = 10.0  # seconds


class FollowingStorage(PackedStorage):
    """Reads a directory that another process may be writing to at the same time.

    Its index is fed with what the writer has committed. While a batch is read the writer may overwrite
    some of its rows; it says so before it does, so the reader looks afterwards and reads another batch
    if need be.

    Args:
        directory: of a storage that an `EpisodeWriter` writes.
        fetch_every: batches that are drawn before the writer's new rows are looked at.
        out_device: as in `PackedStorage`.
        progress: as in `PackedStorage`.

    Raises:
        FileNotFoundError, ValueError: the directory holds no storage, or one that is damaged.
        ValueError: `fetch_every` is below 1, or the rows were written without an `EpisodeWriter`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        fetch_every: int = 1,
        out_device: torch.device | str | None = None,
        progress: bool = False,
    ) -> None:
        if fetch_every < 1:
            raise ValueError(f"fetch_every must be at least 1 batch, got {fetch_every}.")
        self.fetch_every = fetch_every
        #: Called after new rows were found, so that samplers hear of them.
        self.on_new_rows: Callable[[], None] | None = None
        journal = Journal.open(Path(directory), writable=False)
        identity = journal.header.identity
        if not identity.has_episodes:
            raise ValueError(
                f"the rows in {directory} must be written by an EpisodeWriter to be followed, and were "
                "not, or are still to come."
            )
        self._seen: list[torch.Tensor] | None = None
        self._batches = 0
        super().__init__(identity.num_rows, out_device=out_device)
        self.scratch_dir = Path(directory)
        self._take_up(journal, tracker("opening rows", progress))

    def _take_up(self, journal: Journal, track: Track) -> None:
        identity = journal.header.identity
        self.journal = journal
        self._rewrites = 0  # as the header counted them at the last look
        self._adopt(journal.layout, journal.tensor())
        self.episodes = EpisodeIndex(identity.num_rows, identity.num_lanes)
        self.refresh(track)

    def refresh(self, track: Track = iter) -> None:
        """Takes in what was committed since the last time.

        Args:
            track: as in `feed`.

        Raises:
            RuntimeError: rows are overwritten faster than they are looked at.
        """
        journal: Journal = self.journal  # type: ignore[assignment]
        index: EpisodeIndex = self.episodes  # type: ignore[assignment]
        header, before = journal.header, journal.state.sequence
        until = time.monotonic() + _PATIENCE
        while True:
            self._rewrites = header.rewrites
            if self._rewrites % 2:
                time.sleep(1e-3)
            else:
                state = header.read()
                if state.epoch != journal.state.epoch:
                    index.clear()
                journal.state = state
                is_fed = feed(index, journal, state, track)
                fence()
                if header.rewrites != self._rewrites:
                    index.clear()  # what was fed may be of two histories
                elif is_fed:
                    break
            if time.monotonic() > until:
                raise RuntimeError(self._too_slow())
        self._len = state.num_rows
        self.refreshes += 1
        if state.sequence != before and self.on_new_rows is not None:
            self.on_new_rows()

    def read_intact(self, read: Callable[[], Batch]) -> Batch:
        """Returns what `read` reads, all of it from rows that were there while it did.

        Args:
            read: reads from this storage; it is called again where rows were overwritten meanwhile.

        Raises:
            RuntimeError: rows are overwritten faster than a batch is read.
            Exception: what `read` raises of rows that were there.
        """
        if self._seen is not None:
            return read()  # within another call, which will look
        if self._batches % self.fetch_every == 0:
            self.refresh()
        self._batches += 1
        for _ in range(_ATTEMPTS):
            self._seen = []
            try:
                batch = read()
                if self._are_there(self._seen):
                    return batch
            except Exception:
                # Of rows half written, a transform may say anything.
                if self._are_there(self._seen):
                    raise
            finally:
                self._seen = None
            self.refresh()
        raise RuntimeError(self._too_slow())

    def _too_slow(self) -> str:
        return (
            f"the rows in {self.scratch_dir} are overwritten faster than a batch is read, or damaged, or "
            "their writer was killed while it changed them: make the storage larger or the batches "
            "smaller, or open it for writing once."
        )

    def _are_there(self, seen: list[torch.Tensor]) -> bool:
        """Returns whether the writer has not begun to change any of the rows that were read."""
        header = self.journal.header  # type: ignore[union-attr]
        fence()
        if header.rewrites != self._rewrites:
            return False
        return all(bool(self.is_there(slots).all()) for slots in seen)

    def is_there(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether the writer has not begun to overwrite each of some rows, bool.

        Args:
            slots: int64 of rows that were there at the last look.
        """
        index: EpisodeIndex = self.episodes  # type: ignore[assignment]
        fence()
        reserved = self.journal.header.reserved  # type: ignore[union-attr]
        oldest = torch.from_numpy(np.asarray(reserved) - index.steps_per_lane)
        return index.steps(slots) >= oldest[slots % index.num_envs]

    def get(self, index: Any) -> Any:
        """Returns the transitions at `index`; see `PackedStorage.get`."""
        self._note(index)
        return super().get(index)

    def gather(self, slots: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        """Copies rows to where batches are wanted; see `PackedStorage.gather`."""
        self._note(slots)
        if following is not None:
            self._note(following)
        return super().gather(slots, following)

    def _field(self, slots: torch.Tensor, key: NestedKey) -> torch.Tensor:
        self._note(slots)
        return super()._field(slots, key)

    def _note(self, index: Any) -> None:
        if self._seen is not None:
            whole = torch.arange(self.max_size) if not isinstance(index, torch.Tensor) else index
            self._seen.append(whole.reshape(-1).long())

    def set(self, *_: Any, **__: Any) -> None:
        """Raises a RuntimeError: these rows are another process's."""
        self.journal.check_writable()  # type: ignore[union-attr]

    write = load_state_dict = take_state = loads = _empty = set

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            f"a reader of {self.scratch_dir} can't be copied or sent: open the directory where it is "
            "needed, with ReplayStorage.open(path, mode='r') or loader()."
        )
