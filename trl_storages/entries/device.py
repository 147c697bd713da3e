"""Rows on a GPU, or on any device, read and written by tensor operations; and copies of tensors to it.

Letters: N rows of a block, L lanes of the block, B batch; F, O, S, W and k as in `kernels.entries`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.entries.fields import Field
from trl_storages.entries.layout import Block, Layout
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import DISCONTINUITY, SEPARATE, SHARED, entries
from trl_storages.torchrl_compat import copy_all

__all__ = ["DeviceEntries", "PackedTensor", "pack", "sent", "sent_together", "unpack"]

#: Key, dtype, shape, and offset in the block in bytes.
PackedTensor = tuple[NestedKey, torch.dtype, torch.Size, int]
# Each tensor begins at a multiple of this many bytes, which suits views of any dtype.
_ALIGNMENT = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sent(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns values on a device; a GPU copies them asynchronously from pinned memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def sent_together(
    values: Mapping[NestedKey, torch.Tensor], device: torch.device
) -> dict[NestedKey, torch.Tensor]:
    """Returns values `[B, ...]` on a device, by one asynchronous copy from pinned memory."""
    block, directory = pack(values, pin_memory=device.type == "cuda")
    return unpack(block.to(device, non_blocking=True), directory)


def pack(
    tensors: Mapping[NestedKey, torch.Tensor], *, pin_memory: bool = False
) -> tuple[torch.Tensor, list[PackedTensor]]:
    """Copies dense tensors into one block on the host.

    Returns:
        the block `[bytes]` uint8, and its directory: one record for each tensor, in order.
    """
    directory: list[PackedTensor] = []
    size = 0
    for key, tensor in tensors.items():
        directory.append((key, tensor.dtype, tensor.shape, size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
    if tensors:
        with torch.no_grad():
            copy_all([*unpack(block, directory).values()], [*tensors.values()])
    return block, directory


def unpack(block: torch.Tensor, directory: list[PackedTensor]) -> dict[NestedKey, torch.Tensor]:
    """Returns the tensors of a block as views that share its memory."""
    elements = {dtype: block.view(dtype) for dtype in {dtype for _, dtype, _, _ in directory}}
    tensors = {}
    for key, dtype, shape, offset in directory:
        strides = [*accumulate(shape[:0:-1], mul, initial=1)][::-1] if shape else []
        view = elements[dtype].as_strided(shape, strides, offset // dtype.itemsize)
        # `.data` hides the shared memory from autograd: one may be changed while another is needed.
        tensors[key] = view.data
    return tensors


class DeviceEntries:
    """The entries of a buffer on a device; the index stays on the host.

    Reading never waits for the device. A block of arrays on the host is compared on the host with copies
    of the last observations of the streams. A block of tensors is compared on the device; its flags and
    the last observations of its lanes then come to the host in one copy, the only one that waits.

    Args:
        layout: of the rows.
        index: which entries hold which steps.
        device: of the entries.
    """

    @torch.inference_mode(False)  # because writes may happen outside of inference mode
    def __init__(self, layout: Layout, index: EpisodeIndex, device: torch.device) -> None:
        self._layout, self._index, self.device = layout, index, device
        #: The largest number of steps of a lane that one write may contain.
        self.most_steps = index.most_steps
        num_entries = index.num_envs * index.entries_per_lane
        self._entries = torch.zeros(
            num_entries, layout.entry_words, dtype=torch.int64, device=device
        )
        # Copies of the last observations of the streams, `[E, S]`, and the cursors for which they hold.
        self._tips = np.zeros((index.num_envs, layout.seen_words), np.int64)
        self._tip_cursors = np.zeros(index.num_envs, np.int64)

    def append(
        self, block: Block, *, cuts_gaps: bool, most_gaps: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Writes and publishes a block of at most `most_steps` rows a lane; see `HostEntries.append`."""
        lanes, offsets, words, *_ = block
        tables, num_rows = self._index.tables, len(words)
        continuity, done, cut, last = self._compare(block)
        entry, slots, numbers = np.empty((3, num_rows), np.int64)
        where, flags = (tables, lanes, offsets, continuity), (done, cut)
        gaps = 0 if most_gaps is None else entries.count_gaps(*where, *flags)
        if most_gaps is not None and gaps > most_gaps:
            return slots, gaps
        words = sent(words, self.device)
        entries.make_room(*where, entry)
        entries.enter(*where, entry, *flags, cuts_gaps, slots, numbers)
        self._copy_in(words, sent(entry, self.device))
        entries.publish(tables, lanes, offsets)
        self._set_tips(lanes[offsets[1:] > offsets[:-1]], last)
        return slots, gaps

    def _compare(self, block: Block) -> tuple[np.ndarray, ...]:
        """Compares the rows of a block with the observations before them in their streams.

        Returns:
            `[N]` continuity of the rows, `[N]` done, `[N]` cut, and the last next observations `[L, S]`
            of the lanes that have rows, all on the host.
        """
        self._update_tips(block.lanes)
        if isinstance(block.words, torch.Tensor):
            return self._compare_on_device(block)
        layout, (lanes, offsets, words, done, cut) = self._layout, block
        continuity, tips = np.empty(len(words), np.uint8), (self._tips, tuple(layout.sizes))
        entries.compare_with_tips(self._index.tables, *tips, lanes, offsets, words, continuity)
        last = offsets[1:][offsets[1:] > offsets[:-1]] - 1
        return continuity, done, cut, words[last, layout.next_word :]

    def _update_tips(self, lanes: np.ndarray) -> None:
        """Copies the last observations of streams that a load or an interrupted write has changed."""
        cursors = self._index.cursors[lanes]
        if len(lanes := lanes[(cursors > 0) & (self._tip_cursors[lanes] != cursors)]):
            newest = self._index.where[self._index.newest_slots()[lanes]]
            entry = sent(newest, self.device)
            last = self.gather(entry, entry)[:, self._layout.next_word :]
            self._set_tips(lanes, last.cpu().numpy())

    def _set_tips(self, lanes: np.ndarray, last: np.ndarray) -> None:
        """Keeps copies `[L, S]` of the last observations of streams."""
        self._tips[lanes], self._tip_cursors[lanes] = last, self._index.cursors[lanes]

    def _compare_on_device(self, block: Block) -> tuple[np.ndarray, ...]:
        """Compares a block of tensors; see `_compare`."""
        layout, words, size = self._layout, block.words, len(block.words)
        S, has_rows = layout.seen_words, block.offsets[1:] > block.offsets[:-1]
        lanes, first = block.lanes[has_rows], block.offsets[:-1][has_rows]
        before = words[:, layout.next_word :].roll(1, 0)
        before[sent(first, self.device)] = sent(self._tips[lanes], self.device)
        differs = before != words[:, :S]
        continues = ~differs[:, layout.sizes.first : layout.sizes.end].any(1)
        continuity = torch.where(continues, SEPARATE, DISCONTINUITY)
        continuity = torch.where(differs.any(1), continuity, SHARED)
        last = words.index_select(0, sent(block.offsets[1:][has_rows] - 1, self.device))
        # Two bits for the continuity and one bit for each flag, so that one copy brings all to the host.
        flags = continuity + 4 * block.done + 8 * block.cut
        both = torch.cat([flags.long(), last[:, layout.next_word :].reshape(-1)]).cpu().numpy()
        bits = both[:size]
        host_continuity = (bits & 3).astype(np.uint8)
        host_continuity[first[self._index.cursors[lanes] == 0]] = DISCONTINUITY
        done, cut = (bits & [[4], [8]]).astype(bool)
        return host_continuity, done, cut, both[size:].reshape(len(first), S)

    def _copy_in(self, words: torch.Tensor, entry: torch.Tensor) -> None:
        """Copies rows `[N, row_words]` into their entries."""
        layout, skipped = self._layout, self._layout.seen_words - self._layout.observation_words
        if skipped:
            frames = words[:, :skipped].reshape(-1, layout.frame_words)
            self._entries[:, : layout.frame_words].index_copy_(0, self._before(entry), frames)
        self._entries.index_copy_(0, entry, words[:, skipped : layout.next_word])
        observations = self._entries[:, : layout.observation_words]
        observations.index_copy_(0, entry + 1, words[:, layout.next_word + skipped :])

    def _before(self, entry: torch.Tensor) -> torch.Tensor:
        """Returns the k - 1 entries before each of some entries `[B]`, `[B (k - 1)]`."""
        back = torch.arange(1 - self._layout.frames, 0, device=self.device)
        return (entry[:, None] + back).view(-1)

    def begin_of(self, entry: int) -> int:
        """Returns the first entry that the step in an entry needs."""
        return entry - (self._index.stack - 1)

    def stored(self, first: int, end: int) -> torch.Tensor:
        """Returns entries `first` to `end` on the host, `[end - first, W]`."""
        return self._entries[first:end].cpu()

    def fill(self, lane: int, parts: Sequence[torch.Tensor]) -> None:
        """Copies the entries of a lane, from its first entry on; the index contains the steps already."""
        first, self._tip_cursors[lane] = lane * self._index.entries_per_lane, 0
        for part in parts:
            self._entries[first : first + len(part)] = part.to(self.device)
            first += len(part)

    def entries_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the entry numbers `[*B]` int64 of rows, on the device."""
        return sent(self._index.where.take(slots.numpy()), self.device)

    def picked(self, windows: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Returns the entry at `step` `[B]` of each window `[n, B]` of entries."""
        return windows.gather(0, step[None])[0]

    def take(self, key: NestedKey, entry: torch.Tensor) -> torch.Tensor:
        """Reads a field of the rows at entries `[*B]`, `[*B, *shape]`."""
        field = self._layout.by_key[key]
        flat = entry.reshape(-1)
        if field.is_next:
            flat = flat + 1
        if field.stack is None:
            values = self._column(field).index_select(0, flat).view(field.dtype)
            return values.view(*entry.shape, *field.shape)
        k = self._layout.frames
        flat = flat[:, None] + torch.arange(1 - k, 1, device=self.device)
        frames = self._column(field).index_select(0, flat.view(-1)).view(field.dtype)
        frames = frames.view(*entry.shape, k, *field.frame_shape)
        return field.stack.stacks(frames, field.shape)

    def _column(self, field: Field) -> torch.Tensor:
        """Returns a field of all entries as integers, because some devices can't copy every dtype."""
        size, start, count = self._layout.words[field.key]
        return self._entries.view(_INTEGERS[size])[:, start : start + count]

    def gather(self, entry: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Reads rows at entries `[B]`, with the next values of the rows at entries `last` `[B]`.

        Returns:
            `[B, row_words]` int64.
        """
        layout, k = self._layout, self._layout.frames
        W, O, R = layout.entry_words, layout.observation_words, layout.root_words
        if k == 1 and last is entry:
            return self._from(0, W + O).index_select(0, entry)
        root = self._from(0, R).index_select(0, entry)
        next_words = self._from(R, W + O).index_select(0, last)
        if k == 1:
            return torch.cat([root, next_words], 1)
        frames, num_words = self._from(0, layout.frame_words), (k - 1) * layout.frame_words
        older, next_older = (
            frames.index_select(0, self._before(it)).view(len(entry), num_words)
            for it in (entry, last + 1)
        )
        return torch.cat(
            [older, root, next_words[:, : W - R], next_older, next_words[:, W - R :]], 1
        )

    def _from(self, begin: int, end: int) -> torch.Tensor:
        """Returns words `begin` to `end` of each entry and its next entry, a view `[E M - 1, *]`."""
        W = self._layout.entry_words
        return self._entries.as_strided((len(self._entries) - 1, end - begin), (W, 1), begin)

    def paste(self, *_: Any) -> bool:
        """Returns False, because a device does not paste fields into rows; see `HostEntries.paste`."""
        return False

    def rewrite(self, key: NestedKey, entry: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites a field of the step of the rows at different entries `[B]`."""
        field = self._layout.by_key[key]
        column = self._column(field)
        # A copy, because the values may have any strides.
        copied = torch.empty(len(entry), field.size, dtype=field.dtype, device=self.device)
        copied.copy_(sent(values, self.device).reshape(copied.shape))
        column.index_copy_(0, entry, copied.view(column.dtype))
