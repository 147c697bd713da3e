"""Rows in memory or in a file whose frames are stored as what changed; see `kernels.frames`.

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
from trl_storages.kernels import checksums, frames

__all__ = ["FrameEntries", "host_entries"]

# Bytes that are reserved ahead at most; and what one write may need at worst, which is in parts else.
_AHEAD, _MOST = 1 << 20, 1 << 24
# A record takes such a part of its frame, as a rule.
_USUAL = 16


def host_entries(layout: Layout, index: EpisodeIndex, arena: Arena) -> HostEntries:
    """Returns the rows of an arena, as their layout says that they are stored."""
    return (FrameEntries if layout.keyframes else HostEntries)(layout, index, arena)


class FrameEntries(HostEntries):
    """The entries of a storage in memory, with the records of their frames; see `HostEntries`.

    What each stream ends with is kept decoded, as the next frame is compared with it.
    """

    def __init__(self, layout: Layout, index: EpisodeIndex, arena: Arena) -> None:
        super().__init__(layout, index, arena)
        #: `[E, H]` uint8.
        self.records: Any = arena.arrays["records"]
        self._H, k, C = len(self.records[0]), layout.frames, layout.record_words
        tips = np.zeros((index.num_envs, layout.seen_words), np.int64)
        self._known = np.full((index.num_envs, 3), -1, np.int64)
        kinds = layout.sizes, k, C, layout.keyframes, layout.pixel_row
        #: See `kernels.frames`.
        self.store = self.entries, self.records, tips, self._known, *kinds
        self._most = frames.most_bytes(C * WORD)
        usual = (layout.entry_words + C // _USUAL) * WORD
        self._often = max(arena.piece // usual, 1)
        # Up to which position of each lane there is room on the disk.
        self._reserved_to = np.zeros(index.num_envs, np.int64)
        if self.is_in_file:
            is_reserved = arena.is_reserved
            self._often = max(self._often, index.steps_per_lane // 8) if is_reserved else 1 << 62
            self.most_steps = min(self.most_steps, max(_MOST // ((k + 1) * self._most), 1))
        # Words of observations in entries.
        self._stored = layout.observation_words - C + 1, k

    def append(self, block: Block, **flags: bool) -> tuple[np.ndarray, int]:
        """Writes and publishes a block of at most `most_steps` rows a lane; see `HostEntries.append`."""
        self._know_tips(block)
        if self.is_in_file and self._arena.is_reserved:
            self._reserve_records(block)
        return super().append(block, **flags)

    def _know_tips(self, block: Block) -> None:
        frames.know_tips(self._index.tables, self.store, self._index.generation, block.which)

    def _compare(self, block: Block, how: np.ndarray) -> None:
        self._know_tips(block)
        frames.compare_with_tips(self._index.tables, self.store, *block[:3], how)

    def _put(self, block: Block, *flags_and_slots: Any) -> int:
        rows = self._index.tables, self.store, (*block,)
        given: tuple[Any, ...] = *rows, *flags_and_slots, self.marked
        return int(frames.put(*given))

    def _reserve_records(self, block: Block) -> None:
        """Reserves room on the disk for the records of a block at their worst, and for some more."""
        ends, k = self._known[block.which, frames.END], self._index.stack
        # Before the end of the ring a record may be left out.
        needed = ends + (np.diff(block.offsets) * (k + 1) + k + 1) * self._most
        for i in np.flatnonzero(needed > self._reserved_to[block.which]).tolist():
            lane, begin = int(block.which[i]), int(ends[i])
            end = min(int(needed[i]) + min(_AHEAD, self._H // 256), begin + self._H)
            self._reserve_positions(lane, begin, end)
            self._reserved_to[lane] = end

    def _reserve_positions(self, lane: int, begin: int, end: int) -> None:
        """Reserves room on the disk for positions `begin` to `end` of a lane."""
        for start, stop in self._in_ring(begin, end):
            self._arena.reserve("records", lane * self._H + start, lane * self._H + stop)

    def _give_back_positions(self, lane: int, begin: int, end: int) -> None:
        """Gives back the memory of positions `begin` to `end` of a lane."""
        starts, stops = np.array(self._in_ring(begin, end)).T + lane * self._H
        self._arena.give_back("records", starts, stops)

    def _in_ring(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns the bytes of a ring that positions `begin` to `end` are, in one part or two."""
        first, H = begin % self._H, self._H
        stop = first + end - begin
        return [(first, stop)] if stop <= H else [(first, H), (0, stop - H)]

    def _give_back(self) -> np.ndarray:
        index, lanes = self._index, super()._give_back()
        newest = index.cursors[lanes] - 1
        oldest = index.slots_of(lanes, np.minimum(index.tails[lanes], newest))
        firsts, tips = index.where[oldest], index.where[index.slots_of(lanes, newest)] + 1
        for lane, first, tip in zip(lanes.tolist(), firsts.tolist(), tips.tolist(), strict=True):
            begin = int(self.entries[self.begin_of(first), 0]) >> frames.SHIFT
            self._reserved_to[lane] = end = frames.end_of(self.store, tip)
            self._give_back_positions(lane, end, begin + self._H)
        return lanes

    def begin_of(self, entry: int) -> int:
        """Returns the first entry that the step in an entry needs: a keyframe."""
        first, M = super().begin_of(entry), self._index.entries_per_lane
        return max(first - int(self.entries[first, 0] & frames.BACK), entry // M * M)

    def records_of(self, lane: int, parts: Sequence[torch.Tensor]) -> tuple[int, Any]:
        """Returns the records of entries of a lane `[n, W]` in parts, which later writes may change.

        Returns:
            the position of their first byte, and the bytes in parts.
        """
        words, ring = np.concatenate([part[:, 0].numpy() for part in parts]), self.records[lane]
        tip = (parts[-1][-1].data_ptr() - self.entries.ctypes.data) // self.entries.strides[0]
        end = frames.end_of(self.store, tip)
        # Entries that another process has overwritten meanwhile have later positions.
        begin = max(int(words.min()) >> frames.SHIFT, end - self._H)
        return begin, [torch.from_numpy(ring[slice(*it)]) for it in self._in_ring(begin, end)]

    def fill(self, lane: int, parts: Sequence[torch.Tensor], *records: Any) -> None:
        """Copies the entries of a lane, and their records; see `HostEntries.fill`."""
        super().fill(lane, parts)
        position, taken = records
        if self.is_in_file:
            self._reserve_positions(lane, 0, len(taken) + self._most)
        else:
            self._give_back_positions(lane, 0, self._H)
        first = lane * self._index.entries_per_lane
        frames.move_in(self.store, first, sum(map(len, parts)), position, taken)

    def _checked(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the entries `[B, k + 1]` whose observations steps need, and the checksums of these."""
        found = np.empty(len(self.entries), np.int64)
        frames.check_observations(self.store, self.marked[1], at, found)
        needed = at[:, None] + np.arange(1 - self._index.stack, 2)
        return needed, found[needed]

    def write_all_checksums(self) -> None:
        """Marks the entries of all steps, in a file that was filled."""
        _, steps, slots = self._index.retained_steps()
        at, marks = self._index.where[slots], self.marked[0]
        needed, found = self._checked(at)
        marks[needed] = 0
        marks[needed, checksums.OF_OBSERVATION] = found
        numbers = checksums.numbers(self._index.tables, slots, steps)
        checksums.mark_steps(self.entries, *self._stored, self.marked, at, numbers)

    def are_intact(self, at: np.ndarray) -> np.ndarray:
        """Returns whether the steps in entries `[B]` of a file are whole, with what they need."""
        whole = np.empty(len(at), bool)
        checksums.are_marked(self.entries, *self._stored, self.marked, at, whole)
        needed, found = self._checked(at[whole])
        whole[whole] = (found == self.marked[0][needed, checksums.OF_OBSERVATION]).all(1)
        return whole

    def _copy_field(self, field: Field, words: np.ndarray, at: np.ndarray, out: np.ndarray) -> None:
        if field.in_record:
            frames.take(self.store, at, int(field.is_next), field.at, out.view(np.uint8))
        else:
            super()._copy_field(field, words, at, out)

    def _copy_rows(self, at: np.ndarray, last: np.ndarray, out: np.ndarray) -> None:
        frames.gather(self.store, at, last, out)
