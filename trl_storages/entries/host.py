"""Rows in memory or in a file, read and written by compiled loops.

Letters: N rows of a block, B batch; S, W as in `kernels.entries`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.entries.arena import Arena
from trl_storages.entries.fields import Field
from trl_storages.entries.layout import Block, Layout
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import checksums, entries, frames

__all__ = ["HostEntries", "arena_sizes"]

# A write reserves room for at most this many bytes of later writes.
_MOST_RESERVED = 1 << 20
# Unused memory of all lanes is released in at most this many turns, a group of lanes at a time.
_TURNS = 8


def arena_sizes(layout: Layout, index: EpisodeIndex, *, is_in_file: bool = False) -> dict[str, Any]:
    """Returns the arguments of an `Arena` that holds entries and their index."""
    num_entries = index.num_envs * index.entries_per_lane
    shapes = {
        **index.table_shapes(),
        "checksums": (np.int64, (num_entries if is_in_file else 0, checksums.NUM_WORDS)),
        "entries": (np.int64, (num_entries, layout.entry_words)),
    }
    lane_bytes = index.entries_per_lane * layout.entry_words * 8
    if layout.keyframes:
        room = frames.most_bytes(layout.record_words * 8)
        shapes["records"] = (np.uint8, (index.num_envs, (index.entries_per_lane + 1) * room))
        lane_bytes += shapes["records"][1][1]
    return {"shapes": shapes, "lane_bytes": lane_bytes}


class HostEntries:
    """The entries of a buffer in memory or in a file.

    Args:
        layout: of the rows.
        index: which entries hold which steps; it uses the tables of the arena from now on.
        arena: holds the `entries` `[E M, W]`, and in a file their `checksums`, see `kernels.checksums`.
    """

    # The compiled loops that compare, write and read the entries.
    _loops: ModuleType = entries

    def __init__(self, layout: Layout, index: EpisodeIndex, arena: Arena) -> None:
        self._layout, self._index, self._arena = layout, index, arena
        index.use(arena.arrays)
        #: `[E M, W]`.
        self.entries = arena.arrays["entries"]
        #: The store of the loops, see `kernels.entries`.
        self.store: tuple[Any, ...] = self.entries, tuple(layout.sizes), layout.frames
        #: `[E M, 3]`, without entries in memory.
        self.checksums = arena.arrays["checksums"]
        num_words = layout.entry_words + layout.record_words
        #: The checksums and their multipliers.
        self.checksum_tables = self.checksums, checksums.multipliers(num_words, layout.frames)
        self.is_in_file = len(self.checksums) > 0
        # The number of words of an entry that its observation takes, and k.
        self._step_sizes = layout.observation_words, layout.frames
        #: The largest number of steps of a lane that one write may contain.
        self.most_steps = index.most_steps
        # Elements are copied as unsigned integers of their size.
        self._words = {size: self.entries.view(f"u{size}") for size in (1, 2, 4, 8)}
        # Positions of pasted fields in a row.
        self._field_offsets = cache(layout.field_offsets)
        # The arrays with values for each entry, and their number of bytes for an entry.
        self._entry_bytes = {"entries": layout.entry_words * 8}
        # After this many rows a lane may have left a piece of memory, which is then released.
        self._release_interval = max(arena.piece // (layout.entry_words * 8), 1)
        self._num_written, self._next_lane, self._group = 0, 0, -(-index.num_envs // _TURNS)
        if self.is_in_file:
            self._entry_bytes["checksums"] = checksums.NUM_WORDS * 8
            self._release_rarely()
        # The number of further entries, in each lane, for which room is reserved on the disk.
        self._num_reserved = 0

    def _release_rarely(self) -> None:
        """Releases parts of a file seldom, because a release takes milliseconds whatever its size."""
        rare = self._index.steps_per_lane // 8 if self._arena.is_reserved else 1 << 62
        self._release_interval = max(self._release_interval, rare)

    def read_cold(self, is_cold: bool) -> None:
        """Sets whether most entries of a file have to be read from the disk, see `Arena`."""
        self._arena.read_cold(is_cold)

    def append(
        self, block: Block, *, cuts_gaps: bool, most_gaps: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Writes and publishes a block of at most `most_steps` rows a lane.

        Args:
            block: the rows.
            cuts_gaps: whether a row that does not continue the row before begins an episode.
            most_gaps: nothing is written if there are more such rows; -1 only counts them, in a block of
                any length. None does not count them.

        Returns:
            `[N]` int64 slots, and the number of gaps if they are counted.

        Raises:
            OSError: the disk is full. Nothing is written.
        """
        num_rows = len(block.words)
        most_gaps = num_rows if most_gaps is None else most_gaps
        if most_gaps >= 0 and self._arena.is_reserved:
            self._reserve(block)
        slots, flags = np.empty(num_rows, np.int64), (cuts_gaps, most_gaps)
        written, sums = (self._index.tables, self.store, (*block,)), self.checksum_tables
        gaps = self._loops.put(*written, flags, slots, sums)
        if gaps <= most_gaps:
            self._num_written += num_rows
            if self._num_written >= self._release_interval * self._group:
                self._release()
        return slots, gaps

    def _reserve(self, block: Block) -> None:
        """Reserves room on the disk for the entries of a block, and for later writes."""
        index, k = self._index, self._index.stack
        need = int(np.diff(block.offsets).max()) * (k + 1) + k
        self._num_reserved -= need
        if self._num_reserved >= 0:
            return
        M, size = index.entries_per_lane, self._entry_bytes["entries"]
        later = max(min(_MOST_RESERVED, M * size // 16), self._arena.piece) // size
        num_entries = min(need + later, M)
        newest = index.where[index.newest_slots()]
        heads = np.where(index.cursors > 0, newest + 2 - np.arange(index.num_envs) * M, 0)
        for lane, head in enumerate(heads.tolist()):
            # From the last entry of the stream on; a stream continues at the beginning of its lane.
            begin, end, base = max(head - 1, 0), head + num_entries, lane * M
            for first, last in [(begin, end)] if end <= M else [(begin, M), (0, num_entries)]:
                self._reserve_entries(base + first, base + last)
        self._num_reserved = num_entries - need

    def _release(self) -> None:
        """Releases the memory of the next lanes that no valid step and no end of a stream needs."""
        num_lanes, self._num_written = divmod(self._num_written, self._release_interval)
        first, num_envs = self._next_lane, self._index.num_envs
        last = min(first + num_lanes, num_envs)
        # Set before the release, so that no released room counts as reserved after an interrupt.
        self._next_lane, self._num_reserved = last % num_envs, 0
        self._release_lanes(first, last)

    def _release_lanes(self, first: int, last: int) -> None:
        self._release_entries(entries.find_unused(self._index.tables, first, last))

    def _release_entries(self, ranges: np.ndarray) -> None:
        """Releases the memory of `ranges` `[n, 2]` of entries."""
        for name, size in self._entry_bytes.items():
            self._arena.release(name, (ranges * size).tolist())

    def _reserve_entries(self, first: int, end: int) -> None:
        """Reserves room for entries `first` to `end`."""
        for name, size in self._entry_bytes.items():
            self._arena.reserve(name, first * size, end * size)

    def begin_of(self, entry: int) -> int:
        """Returns the first entry that the step in an entry needs."""
        return entry - (self._index.stack - 1)

    def stored(self, first: int, end: int) -> torch.Tensor:
        """Returns entries `first` to `end` `[end - first, W]`, which later writes may change."""
        return torch.from_numpy(self.entries[first:end])

    def fill(self, lane: int, parts: Sequence[torch.Tensor], *records: Any) -> None:
        """Copies the entries of a lane, from its first entry on; the index contains the steps already.

        Args:
            lane: number of the lane.
            parts: the entries `[n, W]`.
            *records: position and bytes of the records, if frames are compressed.

        Raises:
            OSError: the disk is full.
        """
        M = self._index.entries_per_lane
        first = lane * M
        if self.is_in_file:
            self._reserve_entries(first, first + sum(map(len, parts)))
        else:
            self._release_entries(np.array([[first, first + M]]))
        for part in parts:
            self.entries[first : first + len(part)] = part.numpy()
            first += len(part)

    def _needed_by(self, entry: np.ndarray) -> np.ndarray:
        """Returns the entries whose observations the steps in entries `[B]` need, in order."""
        return np.unique(entry[:, None] + np.arange(1 - self._index.stack, 2))

    def _observation_checksums(self, needed: np.ndarray) -> np.ndarray:
        """Returns `[E M]` checksums of observations, which are computed for entries `needed` only."""
        computed = np.empty(len(self.entries), np.int64)
        size, multipliers = self._step_sizes[0], self.checksum_tables[1]
        checksums.compute_observation_checksums(self.entries, size, multipliers, needed, computed)
        return computed

    def write_all_checksums(self) -> None:
        """Writes the checksums of all steps, in a file that was filled."""
        _, steps, slots = self._index.retained_steps()
        entry = self._index.where[slots]
        needed = self._needed_by(entry)
        self.checksums[needed] = 0
        self.checksums[needed, checksums.OBSERVATION] = self._observation_checksums(needed)[needed]
        numbers = checksums.step_numbers(self._index.tables, slots, steps)
        arguments = *self._step_sizes, self.checksum_tables, entry, numbers
        checksums.write_step_checksums(self.entries, *arguments)

    def are_intact(self, entry: np.ndarray) -> np.ndarray:
        """Returns whether the steps in entries `[B]` of a file are intact, with their observations."""
        computed = self._observation_checksums(self._needed_by(entry))
        intact = np.empty(len(entry), bool)
        arguments = *self._step_sizes, self.checksum_tables, entry, computed, intact
        checksums.are_intact(self.entries, *arguments)
        return intact

    def entries_of(self, slots: torch.Tensor) -> np.ndarray:
        """Returns the entry numbers `[*B]` int64 of rows, and prefetches the entries of a cold file."""
        entry = self._index.where.take(slots.numpy())
        if self._arena.is_cold:
            k, size = self._layout.frames, self._entry_bytes["entries"]
            self._arena.will_need("entries", (entry.reshape(-1) - (k - 1)) * size, (k + 1) * size)
        return entry

    def picked(self, windows: np.ndarray, step: torch.Tensor) -> np.ndarray:
        """Returns the entry at `step` `[B]` of each window `[n, B]` of entries."""
        entry: np.ndarray = windows[step.numpy(), np.arange(len(step))]
        return entry

    def take(self, key: NestedKey, entry: np.ndarray) -> torch.Tensor:
        """Reads a field of the rows at entries `[*B]`, `[*B, *shape]`."""
        field = self._layout.by_key[key]
        size, _, count = self._layout.words[field.key]
        words = self._words[size]
        flat = entry.reshape(-1)
        k = self._layout.frames if field.stack else 1
        # torch can't view a tensor of an array that was created with no rows.
        copied = np.empty((len(flat) or 1, k, count), words.dtype)[: len(flat)]
        self._copy_field(field, words, flat, copied)
        values = torch.from_numpy(copied).view(field.dtype)
        if field.stack is None:
            return values.view(*entry.shape, *field.shape)
        return field.stack.stacks(values.view(*entry.shape, k, *field.frame_shape), field.shape)

    def _copy_field(
        self, field: Field, words: np.ndarray, entry: np.ndarray, out: np.ndarray
    ) -> None:
        start = self._layout.words[field.key][1]
        entries.take(words, entry, int(field.is_next), start, out)

    def gather(self, entry: np.ndarray, last: np.ndarray) -> torch.Tensor:
        """Reads rows at entries `[B]`, with the next values of the rows at entries `last` `[B]`.

        Returns:
            `[B, row_words]` int64.
        """
        rows = np.empty((len(entry) or 1, self._layout.row_words), np.int64)[: len(entry)]
        self._loops.gather(self.store, entry, last, rows)
        return torch.from_numpy(rows)

    def paste(
        self,
        rows: torch.Tensor,
        key: NestedKey,
        entry: np.ndarray,
        mask: torch.Tensor,
        targets: tuple[NestedKey, ...],
    ) -> bool:
        """Copies a field of the rows at entries `[B]` into other fields of gathered rows `[B, *]`.

        Args:
            rows: as returned by `gather`.
            key: of the field that is read.
            entry: `[B]`.
            mask: `[B]` bool, which rows are written.
            targets: keys of the fields that are written, of the same dtype and shape.

        Returns:
            whether the field was copied. False if a target is no such field, or the fields are stacks.
        """
        field = self._layout.by_key[key]
        size, start, count = self._layout.words[field.key]
        firsts = self._field_offsets(key, targets)
        if not len(firsts):
            return False
        source = self._words[size], entry, int(field.is_next), start, count
        entries.paste(*source, mask.numpy(), rows.numpy(), firsts)
        return True

    def rewrite(self, key: NestedKey, entry: np.ndarray, values: torch.Tensor) -> None:
        """Overwrites a field of the step of the rows at different entries `[B]`, in memory."""
        field = self._layout.by_key[key]
        size, start, count = self._layout.words[field.key]
        copied = torch.empty(len(entry), field.size, dtype=field.dtype, device="cpu")
        copied.copy_(values.reshape(copied.shape))
        words = self._words[size]
        words[entry, start : start + count] = copied.view(torch.uint8).numpy().view(words.dtype)
