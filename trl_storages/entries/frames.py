"""Rows in memory or in a file with compressed frames; see `kernels.frames`.

Letters as in `kernels.frames`, and N rows of a block, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trl_storages.entries.arena import Arena
from trl_storages.entries.fields import WORD, Field
from trl_storages.entries.host import HostEntries
from trl_storages.entries.layout import Block, Layout
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import frames

__all__ = ["FrameEntries", "host_entries"]

# A write reserves room for at most this many bytes of later writes.
_MOST_RESERVED = 1 << 20
# The largest records of one write take at most this many bytes; a longer write is divided.
_MOST_WRITTEN = 1 << 24
# A frame is usually this many times larger than its record.
_USUAL_RATIO = 16


def host_entries(layout: Layout, index: EpisodeIndex, arena: Arena) -> HostEntries:
    """Returns the entries of an arena, with compressed frames if the layout has keyframes."""
    return (FrameEntries if layout.keyframes else HostEntries)(layout, index, arena)


class FrameEntries(HostEntries):
    """The entries of a buffer with the records of their frames; see `HostEntries`.

    The last observation of each stream is kept decoded, because the next frame is compared with it.
    """

    _loops = frames

    def __init__(self, layout: Layout, index: EpisodeIndex, arena: Arena) -> None:
        super().__init__(layout, index, arena)
        #: `[E, H]` uint8.
        self.records: Any = arena.arrays["records"]
        self._H, k, C = len(self.records[0]), layout.frames, layout.record_words
        tips = np.zeros((index.num_envs, layout.seen_words), np.int64)
        self._tip_states = np.full((index.num_envs, 3), -1, np.int64)
        constants = tuple(layout.sizes), k, C, layout.keyframes, layout.pixel_row
        reset_count = arena.arrays["epoch"][:1]
        tables = self.entries, self.records, tips, self._tip_states, reset_count
        self.store = *tables, *constants
        self._most_bytes = frames.most_bytes(C * WORD)
        usual_bytes = (layout.entry_words + C // _USUAL_RATIO) * WORD
        self._release_interval = max(arena.piece // usual_bytes, 1)
        # The position of each lane up to which room is reserved on the disk.
        self._reserved_to = np.zeros(index.num_envs, np.int64)
        if self.is_in_file:
            self._release_rarely()
            most_steps = _MOST_WRITTEN // ((k + 1) * self._most_bytes)
            self.most_steps = min(self.most_steps, max(most_steps, 1))
        self._step_sizes = layout.observation_words - C + 1, k

    def _reserve(self, block: Block) -> None:
        """Reserves room on the disk, also for the largest records of a block."""
        super()._reserve(block)
        if not self.is_in_file:
            return
        frames.update_tips(self._index.tables, self.store, block.lanes)
        ends, k = self._tip_states[block.lanes, frames.END], self._index.stack
        # One record more, because a record that does not fit before the end of the ring skips the rest.
        needed = ends + (np.diff(block.offsets) * (k + 1) + k + 1) * self._most_bytes
        for i in np.flatnonzero(needed > self._reserved_to[block.lanes]).tolist():
            lane, begin = int(block.lanes[i]), int(ends[i])
            end = min(int(needed[i]) + min(_MOST_RESERVED, self._H // 256), begin + self._H)
            self._reserve_positions(lane, begin, end)
            self._reserved_to[lane] = end

    def _bytes_of(self, lane: int, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns one or two ranges of bytes of the rings for positions `begin` to `end` of a lane."""
        first, base, H = begin % self._H, lane * self._H, self._H
        stop = base + first + end - begin
        if stop <= base + H:
            return [(base + first, stop)]
        return [(base + first, base + H), (base, stop - H)]

    def _reserve_positions(self, lane: int, begin: int, end: int) -> None:
        for start, stop in self._bytes_of(lane, begin, end):
            self._arena.reserve("records", start, stop)

    def _release_lanes(self, first: int, last: int) -> None:
        super()._release_lanes(first, last)
        index = self._index
        for lane in (first + np.flatnonzero(index.cursors[first:last])).tolist():
            newest = int(index.cursors[lane]) - 1
            steps = np.array([min(int(index.tails[lane]), newest), newest])
            oldest, tip = index.where[index.slots_of(lane, steps)].tolist()
            begin = int(self.entries[self.begin_of(oldest), 0]) >> frames.SHIFT
            self._reserved_to[lane] = end = frames.end_of(self.store, tip + 1)
            self._arena.release("records", self._bytes_of(lane, end, begin + self._H))

    def begin_of(self, entry: int) -> int:
        """Returns the first entry that the step in an entry needs, which is a keyframe."""
        first, M = super().begin_of(entry), self._index.entries_per_lane
        return max(first - int(self.entries[first, 0] & frames.BACK), entry // M * M)

    def records_of(self, lane: int, parts: Sequence[torch.Tensor]) -> tuple[int, Any]:
        """Returns the records of entries of a lane, `[n, W]` in parts, which later writes may change.

        Returns:
            the position of the first byte, and the bytes in one or two parts.
        """
        words, records = np.concatenate([it[:, 0].numpy() for it in parts]), self.records.ravel()
        tip = (parts[-1][-1].data_ptr() - self.entries.ctypes.data) // self.entries.strides[0]
        end = frames.end_of(self.store, tip)
        # Entries that another process has overwritten in the meantime have later positions.
        begin = max(int(words.min()) >> frames.SHIFT, end - self._H)
        ranges = self._bytes_of(lane, begin, end)
        return begin, [torch.from_numpy(records[slice(*it)]) for it in ranges]

    def fill(self, lane: int, parts: Sequence[torch.Tensor], *records: Any) -> None:
        """Copies the entries of a lane, and their records; see `HostEntries.fill`."""
        super().fill(lane, parts)
        position, saved = records
        if self.is_in_file:
            self._reserve_positions(lane, 0, len(saved) + self._most_bytes)
        else:
            self._arena.release("records", self._bytes_of(lane, 0, self._H))
        first = lane * self._index.entries_per_lane
        frames.move_in(self.store, first, sum(map(len, parts)), position, saved)

    def _observation_checksums(self, needed: np.ndarray) -> np.ndarray:
        computed = np.empty(len(self.entries), np.int64)
        frames.compute_observation_checksums(self.store, self.checksum_tables[1], needed, computed)
        return computed

    def _copy_field(
        self, field: Field, words: np.ndarray, entry: np.ndarray, out: np.ndarray
    ) -> None:
        if self._layout.is_in_record(field):
            frames.take(self.store, entry, int(field.is_next), field.offset, out.view(np.uint8))
        else:
            super()._copy_field(field, words, entry, out)
