"""Copies transitions of one storage into another one.

Letters: N transitions, U episodes.
"""

from __future__ import annotations

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

__all__ = ["Transfer", "match_fields"]

_CHUNK_BYTES = 1 << 24


def match_fields(
    fields: Mapping[Any, Any], source_fields: Mapping[Any, Any]
) -> dict[NestedKey, NestedKey]:
    """Returns the source of each field: the field of the same name, or an info at the root.

    Args:
        fields: key -> (dtype, shape, ...), or None if any dtype and shape will do.
        source_fields: key -> (dtype, shape, ...) in the source.

    Raises:
        ValueError: fields are missing or have another dtype or shape; the message names all of them.

    >>> kind = torch.float32, torch.Size([2])
    >>> match_fields({("next", "force"): kind, "action": None}, {"force": kind, "action": kind})
    {('next', 'force'): 'force', 'action': 'action'}
    """
    sources: dict[NestedKey, NestedKey] = {}
    problems: list[str] = []
    for key, kind in fields.items():
        path, source = keys.key_path(key), key
        if key not in source_fields and path[0] == "next" and key not in OUTCOME_FIELDS:
            root = unravel_key(path[1:])
            source = key if root in fields else root
        if (source_kind := source_fields.get(source)) is None:
            problems.append(f"{key!r} is missing")
        elif kind is not None and (expected := _shown(*kind)) != (got := _shown(*source_kind)):
            problems.append(f"{key!r} must be {expected}, got {got}")
        sources[key] = source
    if problems:
        raise ValueError(f"the fields do not fit: {'; '.join(problems)}. Nothing was written.")
    return sources


def _shown(dtype: torch.dtype, shape: Sequence[int], *_: Any) -> str:
    return f"{NAMES[dtype]} {[*shape]}"


class Transfer:
    """Assigns the transitions of a storage to the lanes of another one, and copies them to blocks.

    The *rank* of a transition is its position in the source, lane by lane, oldest first. If both storages
    have the same number of lanes, each transition stays in its lane. Otherwise each episode, oldest
    first, goes to the lane that holds the fewest transitions.

    Args:
        source: the storage that is copied; another process may be writing to it.
        target: the storage that is written.

    Attributes:
        slots: `[N]` slots in the source, by rank.
        keeps_lanes: whether each transition stays in its lane.
    """

    def __init__(self, source: PackedStorage, target: PackedStorage) -> None:
        self._view, self._target = source.view(), target
        index, num_target_lanes = self._view.episodes, target.episodes.num_envs
        self.slots = index.live_slots().numpy()
        N, lane, bounds = len(self.slots), index.lanes_of(self.slots), index.bounds(self.slots)
        self._begins, self._ends = bounds[:, BEGIN] == 0, index.ends[self.slots]
        # The rank of the oldest transition of each lane that has any, and the first step of its episode
        # relative to this transition: 0, or negative if steps before it were evicted.
        self._oldest = np.flatnonzero(np.diff(lane, prepend=-1))
        self._oldest_begin = bounds[self._oldest, BEGIN]
        self._begins[self._oldest] = True
        self.keeps_lanes = index.num_envs == num_target_lanes
        # The rank of the last transition in each lane of the target, -2 if there is none.
        self._last_ranks = np.full(num_target_lanes, -2)
        if self.keeps_lanes:
            self._ranks, self._lanes = np.arange(N), lane
            return
        first = np.flatnonzero(self._begins)
        oldest_first = np.argsort(-bounds[first, NEWEST], kind="stable")
        target_lanes = _distribute(np.diff(first, append=N)[oldest_first], target.episodes.fill)
        turn = oldest_first.argsort()[self._begins.cumsum() - 1]
        self._ranks = np.lexsort((turn, target_lanes[turn]))
        self._lanes = target_lanes[turn][self._ranks]

    def number_steps(self) -> None:
        """Numbers the steps of empty lanes as in the source.

        The transitions then get the same slots, so that the same seed samples the same transitions by
        priority. An episode whose first steps were evicted from the source stays incomplete.
        """
        lanes, oldest = self._lanes[self._oldest], self.slots[self._oldest]
        steps, firsts = np.zeros((2, len(self._last_ranks)), np.int64)
        steps[lanes] = self._view.episodes.steps_of(oldest)
        firsts[lanes] = steps[lanes] + self._oldest_begin
        self._target.number_steps(steps, firsts)
        self._begins[self._oldest] = self._oldest_begin == 0
        self._last_ranks[lanes] = self._oldest - 1

    def blocks(
        self, layout: Layout, sources: Mapping[NestedKey, NestedKey]
    ) -> Iterator[tuple[Block, np.ndarray]]:
        """Yields blocks lane by lane, and the ranks `[N]` of their transitions.

        Transitions that another process evicts during the copy are left out.

        Args:
            layout: of the target.
            sources: key of each field -> key in the source.
        """
        size = max(_CHUNK_BYTES // (8 * max(layout.row_words, self._view.layout.row_words)), 1)
        for begin in range(0, len(self.slots), size):
            ranks, lanes = self._ranks[begin : begin + size], self._lanes[begin : begin + size]
            slots = torch.from_numpy(self.slots[ranks])
            batch, is_overwritten = self._view.read(slots), self._view.overwritten(slots)
            staging = Staging(layout, batch.batch_size)
            for field in layout.fields:
                values = batch[sources[field.key]]
                frames = field.stack.frames(values, field.shape) if field.stack else values
                staging.views[field.key].copy_(frames)
            words = staging.words
            if is_overwritten is not None and is_overwritten.any():
                is_live = ~is_overwritten.numpy()
                ranks, lanes, words = ranks[is_live], lanes[is_live], words[is_live]
            written_lanes, first = np.unique(lanes, return_index=True)
            previous_ranks = np.append(-2, ranks)[:-1]
            previous_ranks[first] = self._last_ranks[written_lanes]
            cut = self._begins[ranks] | (ranks != previous_ranks + 1)
            offsets = np.append(first, len(ranks))
            self._last_ranks[written_lanes] = ranks[offsets[1:] - 1]
            yield Block(written_lanes, offsets, words, self._ends[ranks] == DONE, cut), ranks

    def ended_lanes(self) -> np.ndarray:
        """Returns the written lanes whose last episode does not continue."""
        newest = np.append(self._oldest[1:], len(self.slots)) - 1
        is_open = np.zeros(len(self.slots), bool)
        is_open[newest] = self.keeps_lanes & (self._ends[newest] == CONTINUES)
        written_lanes = np.unique(self._lanes)
        return written_lanes[~is_open[self._last_ranks[written_lanes]]]


def _distribute(lengths: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """Returns the lane of each episode `[U]`: the lane with the fewest transitions at its turn.

    Args:
        lengths: `[U]` lengths of the episodes.
        fill: `[E]` number of transitions in each lane before.
    """
    counts, lanes = fill.copy(), np.empty(len(lengths), np.int64)
    for turn, length in enumerate(lengths):
        lanes[turn] = counts.argmin()
        counts[lanes[turn]] += length
    return lanes
