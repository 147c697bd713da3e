"""Rows on a GPU, or on any device, read and written by tensor operations.

Letters: N rows of a block, L lanes it writes, B batch; F, O, S, W and k as in `kernels.entries`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.entries.blocks import pack, unpack
from trl_storages.entries.fields import Field
from trl_storages.entries.layout import Block, Layout
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import DISCONTINUITY, SEPARATE, SHARED, entries

__all__ = ["DeviceEntries", "sent", "sent_together"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sent(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns values on a device, to which a GPU copies them by itself, from pinned memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def sent_together(
    values: Mapping[NestedKey, torch.Tensor], device: torch.device
) -> dict[NestedKey, torch.Tensor]:
    """Returns values `[B, ...]` on a device, to which one copy brings them, from pinned memory."""
    block, directory = pack(values, pin_memory=device.type == "cuda")
    return unpack(block.to(device, non_blocking=True), directory)


class DeviceEntries:
    """The entries of a storage on a device; the index stays on the host.

    Reading never waits for the device. Blocks are arrays on the host, which are compared there with a
    copy of what the streams end with, or tensors on the device: then their flags, and what the streams
    end with, come to the host in one copy, the only one that waits.

    Args:
        layout: of the rows.
        index: says where they are.
        device: of the entries.
    """

    @torch.inference_mode(False)  # it may be written outside of it later
    def __init__(self, layout: Layout, index: EpisodeIndex, device: torch.device) -> None:
        self._layout, self._index, self.device = layout, index, device
        #: How many steps of a lane may be written at once.
        self.most_steps = index.most_steps
        num_entries = index.num_envs * index.entries_per_lane
        self._entries = torch.zeros(
            num_entries, layout.entry_words, dtype=torch.int64, device=device
        )
        # What each stream ended with at which cursor, `[E, S]`.
        self._ended_at = np.zeros(index.num_envs, np.int64)
        self._ends = np.zeros((index.num_envs, layout.seen_words), np.int64)

    def append(
        self, block: Block, *, cuts_gaps: bool, stops_at_gaps: bool = False
    ) -> tuple[np.ndarray, int]:
        """Writes and publishes a block of at most `most_steps` rows a lane; see `HostEntries.append`."""
        which, offsets, words, *_ = block
        tables, num_rows = self._index.tables, len(words)
        how, done, cut, lasts = self._compared_anywhere(block)
        words = sent(words, self.device)
        at, slots, numbers = np.empty((3, num_rows), np.int64)
        gaps, cuts = 0, not stops_at_gaps
        if cuts_gaps or stops_at_gaps:
            gaps = entries.find_gaps(tables, which, offsets, how, done, cut, cuts)
        if gaps and stops_at_gaps:
            return slots, gaps
        entries.make_room(tables, which, offsets, how, at)
        entries.enter(tables, which, offsets, how, at, done, cut, slots, numbers)
        self._copy_in(words, sent(at, self.device))
        entries.publish(tables, which, offsets)
        self._keep(which[offsets[1:] > offsets[:-1]], lasts)
        return slots, gaps

    def count_gaps(self, block: Block) -> int:
        """Returns how many gaps a block of any length has."""
        how, done, cut, _ = self._compared_anywhere(block)
        flags = done, cut, False
        return int(entries.find_gaps(self._index.tables, *block[:2], how, *flags))

    def _compared_anywhere(self, block: Block) -> tuple[Any, ...]:
        """Compares a block where it is; see `_compared_here`."""
        if not isinstance(block.words, np.ndarray):
            return self._compared_here(block)
        how, lasts = self._compared(block)
        return how, block.done, block.cut, lasts

    def _tips(self, which: np.ndarray) -> np.ndarray:
        """Returns where in `_ends` is what streams end with; -1 where nothing was written."""
        cursors = self._index.cursors[which]
        # Such as after a load, or where an interrupt came between the cursor and what was kept for it.
        if len(lanes := which[(cursors > 0) & (self._ended_at[which] != cursors)]):
            newest = self._index.where[self._index.newest_slots()[lanes]]
            at = sent(newest, self.device)
            self._keep(lanes, self.gather(at, at)[:, self._layout.next_word :].cpu().numpy())
        return np.where(cursors > 0, which, -1)

    def _compared(self, block: Block) -> tuple[np.ndarray, Any]:
        """Compares a block on the host with what its streams end with.

        Returns:
            `[N]` how each row compares, and the last next observation `[S]` of each lane that has rows.
        """
        how, layout = np.empty(len(block.words), np.uint8), self._layout
        S, (_, _, begin, end, _) = layout.seen_words, layout.sizes
        # As if all that is seen lay in one entry.
        sizes, tips = (S, S, begin, end, S), self._tips(block.which)
        entries.compare(self._ends, sizes, 1, tips, block.offsets, block.words, how)
        last = block.offsets[1:][block.offsets[1:] > block.offsets[:-1]] - 1
        return how, block.words[last, layout.next_word :]

    def _compared_here(self, block: Block) -> tuple[np.ndarray, ...]:
        """Compares a block on the device; see `_compared`.

        Returns:
            `[N]` how each row compares, `[N]` done, `[N]` cut and `[L, S]` the last next observations of
            lanes that have rows, all on the host.
        """
        layout, words, size = self._layout, block.words, len(block.words)
        S, has_rows = layout.seen_words, block.offsets[1:] > block.offsets[:-1]
        which, first = block.which[has_rows], block.offsets[:-1][has_rows]
        tips = self._tips(which)
        before = words[:, layout.next_word :].roll(1, 0)
        before[sent(first, self.device)] = sent(self._ends[which], self.device)
        differs = before != words[:, :S]
        begin, end = layout.sizes[2:4]
        goes_on = ~differs[:, begin:end].any(1)
        how = torch.where(differs.any(1), torch.where(goes_on, SEPARATE, DISCONTINUITY), SHARED)
        lasts = words.index_select(0, sent(block.offsets[1:][has_rows] - 1, self.device))
        # Two bits, and one each: so one copy to the host brings all.
        flags = how + 4 * block.done + 8 * block.cut
        both = torch.cat([flags.long(), lasts[:, layout.next_word :].reshape(-1)]).cpu().numpy()
        kinds = both[:size]
        found = (kinds & 3).astype(np.uint8)
        found[first[tips < 0]] = DISCONTINUITY
        done, cut = (kinds & [[4], [8]]).astype(bool)
        return found, done, cut, both[size:].reshape(len(first), S)

    def _keep(self, which: np.ndarray, lasts: np.ndarray) -> None:
        """Keeps what the streams of lanes end with now, `[L, S]`."""
        self._ends[which], self._ended_at[which] = lasts, self._index.cursors[which]

    def _copy_in(self, words: torch.Tensor, at: torch.Tensor) -> None:
        """Copies rows `[N, row_words]` into their entries."""
        layout, skipped = self._layout, self._layout.seen_words - self._layout.observation_words
        if skipped:
            frames = words[:, :skipped].reshape(-1, layout.frame_words)
            self._entries[:, : layout.frame_words].index_copy_(0, self._older(at), frames)
        self._entries.index_copy_(0, at, words[:, skipped : layout.next_word])
        after = self._entries[:, : layout.observation_words]
        after.index_copy_(0, at + 1, words[:, layout.next_word + skipped :])

    def _older(self, at: torch.Tensor) -> torch.Tensor:
        """Returns the k - 1 entries before each of some entries `[B]`, `[B (k - 1)]`."""
        back = torch.arange(1 - self._layout.frames, 0, device=self.device)
        return (at[:, None] + back).view(-1)

    def begin_of(self, entry: int) -> int:
        """Returns the first entry that the step in an entry needs."""
        return entry - (self._index.stack - 1)

    def stored(self, first: int, end: int) -> torch.Tensor:
        """Returns entries `first` to `end` on the host, `[end - first, W]`."""
        return self._entries[first:end].cpu()

    def fill(self, lane: int, parts: Sequence[torch.Tensor]) -> None:
        """Copies the entries of a lane from its beginning on; the index knows its steps already."""
        at, self._ended_at[lane] = lane * self._index.entries_per_lane, 0
        for part in parts:
            self._entries[at : at + len(part)] = part.to(self.device)
            at += len(part)

    def entries_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of the entries that rows are in, `[*B]` int64 on the device."""
        return sent(self._index.where.take(slots.numpy()), self.device)

    def picked(self, entries: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Returns the entry `at` `[B]` of each window, of `[n, B]`."""
        return entries.gather(0, at[None])[0]

    def take(self, key: NestedKey, at: torch.Tensor) -> torch.Tensor:
        """Reads a field of the rows at entries `at` `[*B]`, `[*B, *shape]`."""
        field = self._layout.by_key[key]
        flat = at.reshape(-1)
        if field.is_next:
            flat = flat + 1
        if field.stack is None:
            values = self._column(field).index_select(0, flat).view(field.dtype)
            return values.view(*at.shape, *field.shape)
        k = self._layout.frames
        flat = flat[:, None] + torch.arange(1 - k, 1, device=self.device)
        frames = self._column(field).index_select(0, flat.view(-1)).view(field.dtype)
        frames = frames.view(*at.shape, k, *field.frame_shape)
        return field.stack.stacks(frames, field.shape)

    def _column(self, field: Field) -> torch.Tensor:
        """Returns a field of all entries as integers, which devices copy whatever they stand for."""
        size, start, count = field.words
        return self._entries.view(_INTEGERS[size])[:, start : start + count]

    def gather(self, at: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Reads whole rows at entries `at` `[B]`, with what follows entries `last` as their next.

        Returns:
            `[B, row_words]` int64.
        """
        layout, k = self._layout, self._layout.frames
        W, O, R = layout.entry_words, layout.observation_words, layout.root_words
        if k == 1 and last is at:
            return self._from(0, W + O).index_select(0, at)
        root, rest = (
            self._from(0, R).index_select(0, at),
            self._from(R, W + O).index_select(0, last),
        )
        if k == 1:
            return torch.cat([root, rest], 1)
        frames, size = self._from(0, layout.frame_words), (len(at), (k - 1) * layout.frame_words)
        older, newer = (frames.index_select(0, self._older(it)).view(size) for it in (at, last + 1))
        return torch.cat([older, root, rest[:, : W - R], newer, rest[:, W - R :]], 1)

    def _from(self, begin: int, end: int) -> torch.Tensor:
        """Returns words `begin` to `end` of each entry and of what follows it, a view `[E M - 1, *]`."""
        W = self._layout.entry_words
        return self._entries.as_strided((len(self._entries) - 1, end - begin), (W, 1), begin)

    def paste(self, *_: Any) -> bool:
        """Returns False: fields of other rows go beside gathered rows; see `HostEntries.paste`."""
        return False

    def rewrite(self, key: NestedKey, at: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites a field of the step of the rows at different entries `at` `[B]`."""
        field = self._layout.by_key[key]
        column = self._column(field)
        # Whatever the strides of the values are.
        copied = torch.empty(len(at), field.size, dtype=field.dtype, device=self.device)
        copied.copy_(sent(values, self.device).reshape(copied.shape))
        column.index_copy_(0, at, copied.view(column.dtype))
