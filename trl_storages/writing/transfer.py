"""Transitions of one storage on their way into another one.

Letters: N transitions, U episodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, unravel_key

from trl_storages import keys
from trl_storages.entries.fields import NAMES
from trl_storages.entries.layout import Block, Layout
from trl_storages.kernels import CONTINUES, DONE
from trl_storages.kernels.draws import BEGIN, NEWEST
from trl_storages.storage.packed_storage import PackedStorage
from trl_storages.writing.spaces import OUTCOME_FIELDS
from trl_storages.writing.staging import Staging

__all__ = ["Transfer", "matched"]

# Bytes of transitions that are copied at once.
_CHUNK = 1 << 24


def matched(wanted: Mapping[Any, Any], given: Mapping[Any, Any]) -> dict[NestedKey, NestedKey]:
    """Returns the source of each wanted field: the field of the same name, or an info at the root.

    Args:
        wanted: key -> (dtype, shape, ...), or None if any will do.
        given: key -> (dtype, shape, ...) of the source.

    Raises:
        ValueError: fields are missing or have another dtype or shape; the message names all of them.

    >>> kind = torch.float32, torch.Size([2])
    >>> matched({("next", "force"): kind, "action": None}, {"force": kind, "action": kind})
    {('next', 'force'): 'force', 'action': 'action'}
    """
    sources: dict[NestedKey, NestedKey] = {}
    problems: list[str] = []
    for key, kind in wanted.items():
        path, source = keys.key_path(key), key
        if key not in given and path[0] == "next" and key not in OUTCOME_FIELDS:
            root = unravel_key(path[1:])
            source = key if root in wanted else root
        if (other := given.get(source)) is None:
            problems.append(f"{key!r} is missing")
        elif kind is not None and (must := _named(*kind)) != (got := _named(*other)):
            problems.append(f"{key!r} must be {must}, got {got}")
        sources[key] = source
    if problems:
        raise ValueError(f"the fields do not fit: {'; '.join(problems)}. Nothing was written.")
    return sources


def _named(dtype: torch.dtype, shape: Sequence[int], *_: Any) -> str:
    return f"{NAMES[dtype]} {[*shape]}"


class Transfer:
    """Plans which transitions of a storage go to which lane of another one, and makes blocks of them.

    A transition is known by its rank: by lane, oldest first. Lanes are kept where both storages have as
    many. Elsewhere each episode goes, oldest first, to the lane that holds the fewest transitions.

    Args:
        source: holds the transitions; another process may be writing to it.
        target: gets them.

    Attributes:
        slots: `[N]` of the source, by rank.
        keeps_lanes: whether lanes are kept.
    """

    def __init__(self, source: PackedStorage, target: PackedStorage) -> None:
        self._view, self._target = source.view(), target
        index, own = self._view.episodes, target.episodes
        self.slots = index.live_slots().numpy()
        N, lane, bounds = len(self.slots), index.lanes_of(self.slots), index.bounds(self.slots)
        self._begins, self._ends = bounds[:, BEGIN] == 0, index.ends[self.slots]
        # The oldest transition of each lane that has any; its episode may have begun before.
        self._oldest = np.flatnonzero(np.diff(lane, prepend=-1))
        self._begun = bounds[self._oldest, BEGIN]
        self._begins[self._oldest] = True
        self.keeps_lanes = index.num_envs == own.num_envs
        # The rank that each lane of the target was given last, -2 before it.
        self._last = np.full(own.num_envs, -2)
        if self.keeps_lanes:
            self._ranks, self._lanes = np.arange(N), lane
            return
        first = np.flatnonzero(self._begins)
        oldest_first = np.argsort(-bounds[first, NEWEST], kind="stable")
        to = _shared_out(np.diff(first, append=N)[oldest_first], own.fill)
        turn = oldest_first.argsort()[self._begins.cumsum() - 1]
        self._ranks = np.lexsort((turn, to[turn]))
        self._lanes = to[turn][self._ranks]

    def number_steps(self) -> None:
        """Numbers the steps of empty lanes that are kept as those of the source.

        So they get the same slots, which decide what a seed draws by priority, and an episode whose first
        steps were evicted from the source is not taken for a complete one.
        """
        lanes, oldest = self._lanes[self._oldest], self.slots[self._oldest]
        steps, firsts = np.zeros((2, len(self._last)), np.int64)
        steps[lanes] = self._view.episodes.steps_of(oldest)
        firsts[lanes] = steps[lanes] + self._begun
        self._target.number_steps(steps, firsts)
        self._begins[self._oldest] = self._begun == 0
        self._last[lanes] = self._oldest - 1

    def blocks(
        self, layout: Layout, sources: Mapping[NestedKey, NestedKey]
    ) -> Iterator[tuple[Block, np.ndarray]]:
        """Yields blocks lane by lane, and the ranks `[N]` of their transitions.

        Transitions that another process has evicted meanwhile are left out.
        """
        size = max(_CHUNK // (8 * max(layout.row_words, self._view.layout.row_words)), 1)
        for begin in range(0, len(self.slots), size):
            ranks, lanes = self._ranks[begin : begin + size], self._lanes[begin : begin + size]
            slots = torch.from_numpy(self.slots[ranks])
            batch, gone = self._view.read(slots), self._view.overwritten(slots)
            staging = Staging(layout, batch.batch_size)
            for field in layout.fields:
                values = batch[sources[field.key]]
                frames = field.stack.frames(values, field.shape) if field.stack else values
                staging.views[field.key].copy_(frames)
            words = staging.words
            if gone is not None and gone.any():
                kept = ~gone.numpy()
                ranks, lanes, words = ranks[kept], lanes[kept], words[kept]
            which, first = np.unique(lanes, return_index=True)
            before = np.append(-2, ranks)[:-1]
            before[first] = self._last[which]
            cut = self._begins[ranks] | (ranks != before + 1)
            offsets = np.append(first, len(ranks))
            self._last[which] = ranks[offsets[1:] - 1]
            yield Block(which, offsets, words, self._ends[ranks] == DONE, cut), ranks

    def ended_lanes(self) -> np.ndarray:
        """Returns the lanes that were written whose last episode has to end here."""
        newest = np.append(self._oldest[1:], len(self.slots)) - 1
        is_open = np.zeros(len(self.slots), bool)
        is_open[newest] = self.keeps_lanes & (self._ends[newest] == CONTINUES)
        written = np.unique(self._lanes)
        return written[~is_open[self._last[written]]]


def _shared_out(lengths: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Returns the lane of each episode `[U]`, in turn: the one that holds the fewest transitions."""
    heap = [(count, lane) for lane, count in enumerate(fill.tolist())]
    heapq.heapify(heap)
    lanes = np.empty(len(lengths), np.int64)
    for turn, length in enumerate(lengths.tolist()):
        count, lanes[turn] = heap[0]
        heapq.heapreplace(heap, (count + length, heap[0][1]))
    return lanes
