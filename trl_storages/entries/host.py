"""Rows in memory or in a file, read and written by compiled loops.

Letters: N rows of a block, B batch; S, W as in `kernels.entries`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.entries.arena import Arena
from trl_storages.entries.fields import Field
from trl_storages.entries.layout import Block, Layout
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import DISCONTINUITY, SHARED, checksums, entries, frames

__all__ = ["HostEntries", "arena_sizes"]

# Bytes that are reserved ahead at most.
_AHEAD = 1 << 20
# Memory is given back in so many turns at most, each of the next lanes.
_TURNS = 8


def arena_sizes(layout: Layout, index: EpisodeIndex, *, is_in_file: bool = False) -> dict[str, Any]:
    """Returns the arguments of an `Arena` for rows with their index."""
    num_entries = index.num_envs * index.entries_per_lane
    shapes = {
        **index.table_shapes(),
        "marks": (np.int64, (num_entries if is_in_file else 0, checksums.NUM_WORDS)),
        "entries": (np.int64, (num_entries, layout.entry_words)),
    }
    lane_bytes = index.entries_per_lane * layout.entry_words * 8
    if layout.keyframes:
        most = frames.most_bytes(layout.record_words * 8)
        shapes["records"] = (np.uint8, (index.num_envs, (index.entries_per_lane + 1) * most))
        lane_bytes += shapes["records"][1][1]
    return {"shapes": shapes, "lane_bytes": lane_bytes}


class HostEntries:
    """The entries of a storage in memory.

    Args:
        layout: of the rows.
        index: says where they are, by tables of the arena.
        arena: holds the `entries` `[E M, W]`, and in a file their `marks`, see `kernels.checksums`.
    """

    def __init__(self, layout: Layout, index: EpisodeIndex, arena: Arena) -> None:
        self._layout, self._index, self._arena = layout, index, arena
        index.use(arena.arrays)
        #: `[E M, W]`.
        self.entries = arena.arrays["entries"]
        #: The marks, none in memory, and the constants of their checks.
        num_words = layout.entry_words + layout.record_words
        self.marked = arena.arrays["marks"], checksums.multipliers(num_words, layout.frames)
        self.is_in_file = len(self.marked[0]) > 0
        #: How many steps of a lane may be written at once.
        self.most_steps = index.most_steps
        # Elements are copied as unsigned words of their size.
        self._words = {size: self.entries.view(f"u{size}") for size in (1, 2, 4, 8)}
        # Where fields that are pasted begin in a row.
        self._firsts = cache(layout.field_offsets)
        # The arrays that have something for each entry, and how many bytes.
        self._sizes = {"entries": layout.entry_words * 8}
        # After so many rows one more lane may have left a piece of memory, which it then gives back.
        self._often = max(arena.piece // (layout.entry_words * 8), 1)
        self._written, self._next, self._together = 0, 0, -(-index.num_envs // _TURNS)
        if self.is_in_file:
            self._sizes["marks"] = checksums.NUM_WORDS * 8
            # To give back a part of a file takes milliseconds, whatever its size.
            self._often = (
                max(self._often, index.steps_per_lane // 8) if arena.is_reserved else 1 << 62
            )
        # For so many entries more there is room on the disk, in each lane.
        self._reserved = 0

    def read_cold(self, is_cold: bool) -> None:
        """Says whether most entries of a file have to be read from the disk, see `Arena`."""
        self._arena.read_cold(is_cold)

    def append(
        self, block: Block, *, cuts_gaps: bool, stops_at_gaps: bool = False
    ) -> tuple[np.ndarray, int]:
        """Writes and publishes a block of at most `most_steps` rows a lane.

        Args:
            block: the rows.
            cuts_gaps: whether a row that does not continue the one before it begins an episode.
            stops_at_gaps: whether nothing is written where there are such rows.

        Returns:
            `[N]` int64 slots, and how many gaps were cut.

        Raises:
            OSError: the disk is full. Nothing is written then.
        """
        num_rows = len(block.words)
        if self._arena.is_reserved:
            self._reserve(int(np.diff(block.offsets).max()))
        slots = np.empty(num_rows, np.int64)
        gaps = self._put(block, cuts_gaps, stops_at_gaps, slots)
        if gaps and stops_at_gaps:
            return slots, gaps
        self._written += num_rows
        if self._written >= self._often * self._together:
            self._give_back()
        return slots, gaps

    def count_gaps(self, block: Block) -> int:
        """Returns how many gaps a block of any length has."""
        how = np.empty(len(block.words), np.uint8)
        self._compare(block, how)
        flags = block.done, block.cut, False
        return int(entries.find_gaps(self._index.tables, *block[:2], how, *flags))

    def _compare(self, block: Block, how: np.ndarray) -> None:
        index, tips = self._index, np.empty(len(block.which), np.int64)
        kinds = self._layout.sizes, index.stack
        entries.find_tips(index.tables, block.which, tips)
        entries.compare(self.entries, *kinds, tips, block.offsets, block.words, how)

    def _put(self, block: Block, *flags_and_slots: Any) -> int:
        tables = self._index.tables, self.entries, self._layout.sizes
        given: tuple[Any, ...] = *tables, *block, *flags_and_slots, self.marked
        return int(entries.put(*given))

    def _reserve(self, num_rows: int) -> None:
        """Reserves room on the disk for a write of so many rows a lane, and for some more."""
        index, k = self._index, self._index.stack
        need = num_rows * (k + 1) + k
        self._reserved -= need
        if self._reserved >= 0:
            return
        M, size = index.entries_per_lane, self._sizes["entries"]
        some = max(min(_AHEAD, M * size // 16), self._arena.piece) // size
        ahead = min(need + some, M)
        newest = index.where[index.newest_slots()]
        heads = np.where(index.cursors > 0, newest + 2 - np.arange(index.num_envs) * M, 0)
        for lane, head in enumerate(heads.tolist()):
            # With what the stream ends with. At the end of a lane it goes on at the beginning.
            begin, end, base = max(head - 1, 0), head + ahead, lane * M
            for first, last in [(begin, end)] if end <= M else [(begin, M), (0, ahead)]:
                self._for_entries(self._arena.reserve, base + first, base + last)
        self._reserved = ahead - need

    def _give_back(self) -> np.ndarray:
        """Gives back memory that no live step needs and no stream ends with, of the next lanes.

        Returns:
            these lanes, but for those without steps.
        """
        index, M, first = self._index, self._index.entries_per_lane, self._next
        due, self._written = divmod(self._written, self._often)
        last = min(first + due, index.num_envs)
        # Before it is given back, so that an interrupt leaves no reserved room that is not there.
        self._next, self._reserved = last % index.num_envs, 0
        lanes = first + np.flatnonzero(index.cursors[first:last] > 0)
        newest = index.cursors[lanes] - 1
        oldest = np.minimum(index.tails[lanes], newest)
        starts = index.where[index.slots_of(lanes, oldest)] - (index.depth - 1)
        starts = np.maximum(starts, lanes * M)
        heads = index.where[index.slots_of(lanes, newest)] + 2
        # A stream lies between these two, or around the end of its lane.
        is_around, ends = starts >= heads, (lanes + 1) * M
        used = np.stack([starts, heads, ends, ends], 1)
        used[is_around, 0], used[is_around, 2] = ends[is_around] - M, starts[is_around]
        used = used.reshape(-1, 2)
        used = used[used[:, 0] < used[:, 1]]
        # One call gives back what lies between two streams, also of neighbouring lanes.
        unused = np.append(first * M, used[:, 1]), np.append(used[:, 0], last * M)
        self._for_entries(self._arena.give_back, *unused)
        return lanes

    def _for_entries(self, act: Callable[[str, Any, Any], None], first: Any, end: Any) -> None:
        """Reserves, or gives back, what entries `first` to `end` take."""
        for name, size in self._sizes.items():
            act(name, first * size, end * size)

    def begin_of(self, entry: int) -> int:
        """Returns the first entry that the step in an entry needs."""
        return entry - (self._index.stack - 1)

    def stored(self, first: int, end: int) -> torch.Tensor:
        """Returns entries `first` to `end` `[end - first, W]`, which later writes may change."""
        return torch.from_numpy(self.entries[first:end])

    def fill(self, lane: int, parts: Sequence[torch.Tensor], *records: Any) -> None:
        """Copies the entries of a lane from its beginning on; the index knows its steps already.

        Args:
            lane: its number.
            parts: the entries `[n, W]`.
            *records: position and bytes of their records, where frames are stored as what changed.

        Raises:
            OSError: the disk is full.
        """
        M = self._index.entries_per_lane
        at = lane * M
        if self.is_in_file:
            self._for_entries(self._arena.reserve, at, at + sum(map(len, parts)))
        else:
            self._for_entries(self._arena.give_back, np.array([at]), np.array([at + M]))
        for part in parts:
            self.entries[at : at + len(part)] = part.numpy()
            at += len(part)

    def write_all_checksums(self) -> None:
        """Marks the entries of all steps, in a file that was filled."""
        _, steps, slots = self._index.retained_steps()
        at = self._index.where[slots]
        how = np.full(len(at), DISCONTINUITY, np.uint8)
        how[1:][np.diff(at) == 1] = SHARED
        numbers = checksums.numbers(self._index.tables, slots, steps)
        sizes = self._layout.observation_words, self._layout.frames
        checksums.mark(self.entries, *sizes, self.marked, how, at, numbers)

    def are_intact(self, at: np.ndarray) -> np.ndarray:
        """Returns whether the steps in entries `[B]` of a file are whole, with what they need."""
        whole = np.empty(len(at), bool)
        sizes = self._layout.observation_words, self._layout.frames
        checksums.are_intact(self.entries, *sizes, self.marked, at, whole)
        return whole

    def entries_of(self, slots: torch.Tensor) -> np.ndarray:
        """Returns the numbers of the entries that rows are in, `[*B]` int64, which are read next."""
        at = self._index.where.take(slots.numpy())
        if self._arena.is_cold:
            k, size = self._layout.frames, self._sizes["entries"]
            self._arena.will_need("entries", (at.reshape(-1) - (k - 1)) * size, (k + 1) * size)
        return at

    def picked(self, entries: np.ndarray, at: torch.Tensor) -> np.ndarray:
        """Returns the entry `at` `[B]` of each window, of `[n, B]`."""
        found: np.ndarray = entries[at.numpy(), np.arange(len(at))]
        return found

    def take(self, key: NestedKey, at: np.ndarray) -> torch.Tensor:
        """Reads a field of the rows at entries `at` `[*B]`, `[*B, *shape]`."""
        field = self._layout.by_key[key]
        size, _, count = field.words
        words = self._words[size]
        flat = at.reshape(-1)
        k = self._layout.frames if field.stack else 1
        # An array that is made without rows has no strides to be viewed by.
        found = np.empty((len(flat) or 1, k, count), words.dtype)[: len(flat)]
        self._copy_field(field, words, flat, found)
        values = torch.from_numpy(found).view(field.dtype)
        if field.stack is None:
            return values.view(*at.shape, *field.shape)
        return field.stack.stacks(values.view(*at.shape, k, *field.frame_shape), field.shape)

    def _copy_field(self, field: Field, words: np.ndarray, at: np.ndarray, out: np.ndarray) -> None:
        entries.take(words, at, int(field.is_next), field.words[1], out)

    def gather(self, at: np.ndarray, last: np.ndarray) -> torch.Tensor:
        """Reads whole rows at entries `at` `[B]`, with what follows entries `last` as their next.

        Returns:
            `[B, row_words]` int64.
        """
        rows = np.empty((len(at) or 1, self._layout.row_words), np.int64)[: len(at)]
        self._copy_rows(at, last, rows)
        return torch.from_numpy(rows)

    def _copy_rows(self, at: np.ndarray, last: np.ndarray, out: np.ndarray) -> None:
        entries.gather(self.entries, self._layout.sizes, self._layout.frames, at, last, out)

    def paste(
        self,
        rows: torch.Tensor,
        key: NestedKey,
        at: np.ndarray,
        mask: torch.Tensor,
        targets: tuple[NestedKey, ...],
    ) -> bool:
        """Copies a field of the rows at entries `at` `[B]` into others of gathered rows `[B, *]`.

        Args:
            rows: as `gather` returned them.
            key: of the field that is copied.
            at: from where.
            mask: `[B]` bool, to which rows.
            targets: keys of fields of the same dtype and shape.

        Returns:
            False if there are no such fields, or they are stacks: then nothing was done.
        """
        field = self._layout.by_key[key]
        size, start, count = field.words
        firsts = self._firsts(key, targets)
        if not len(firsts):
            return False
        source = self._words[size], at, int(field.is_next), start, count
        entries.paste(*source, mask.numpy(), rows.numpy(), firsts)
        return True

    def rewrite(self, key: NestedKey, at: np.ndarray, values: torch.Tensor) -> None:
        """Overwrites a field of the step of the rows at different entries `at` `[B]`.

        Raises:
            TypeError: the rows are in a file: a power cut could leave a mixture.
        """
        if self.is_in_file:
            raise TypeError("rows in a directory are never overwritten; keep them in memory.")
        field = self._layout.by_key[key]
        size, start, count = field.words
        copied = torch.empty(len(at), field.size, dtype=field.dtype, device="cpu")
        copied.copy_(values.reshape(copied.shape))
        words = self._words[size]
        words[at, start : start + count] = copied.view(torch.uint8).numpy().view(words.dtype)
