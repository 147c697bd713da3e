"""The saved state of stored transitions: the live entries of each lane, in the order of its stream.

Lanes in this form fit storages on any device and with any number of entries. If not all entries fit, the
oldest transitions are evicted. A lane without live steps saves its newest step, because the next step
continues the stream of the newest step.

Compressed frames are saved compressed: the stream of a lane then begins with a keyframe, and the state of
the lane contains the records of its entries, from a byte position on.

Letters: E lanes, N steps of a lane, n entries of a lane, W words of an entry, k frames of a stack.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_storages import validation
from trl_storages.directory import Directory
from trl_storages.directory.description import UNREADABLE, described, layout_of
from trl_storages.entries.layout import Layout
from trl_storages.index import EpisodeIndex
from trl_storages.kernels import CONTINUES, FIRST, frames
from trl_storages.serialization import State, array, required_items

__all__ = ["PackedLane", "collect_lanes", "empty_lanes", "fill_lanes", "parse_lanes", "read"]

# Keys of the saved states.
_ROWS = ("max_size", "num_envs", "layout", "lanes")
_LANE = ("cursor", "tail", "first", "begins", "ends", "places", "priorities", "entries")
_RECORDS = ("position", "records")
# The record of a frame of zeros.
_NO_CHANGES = np.zeros(4, np.uint8)


class PackedLane(NamedTuple):
    """The steps of a lane.

    Args:
        cursor: number of the next step.
        tail: number of the oldest live step.
        first: first step of the oldest episode, which may be evicted.
        begins: `[N]` bool, whether each step begins an episode.
        ends: `[N]` uint8, as in `kernels`.
        positions: `[N]` int64, position of the entry of each step in `entries`.
        priorities: `[N]` float32, 0 if no priority was set.
        entries: `[n, W]`, in chunks.
        records: records of compressed frames: position of the first byte, and the bytes.
        backs: `[n]` distance of each entry from its keyframe; None if frames are not compressed.
    """

    cursor: int
    tail: int
    first: int
    begins: np.ndarray
    ends: np.ndarray
    positions: np.ndarray
    priorities: np.ndarray
    entries: list[torch.Tensor]
    records: tuple[Any, ...] = ()
    backs: np.ndarray | None = None

    def first_entry(self, i: int, k: int) -> int:
        """Returns the position of the first entry from which step i of the lane is read."""
        first = int(self.positions[i]) - (k - 1)
        return first if self.backs is None else first - int(self.backs[first])


def collect_lanes(backend: Any) -> State:
    """Returns the saved state of the transitions of a `Memory` or `Directory`.

    The state shares memory with the backend, unless another process may be writing.
    """
    index, layout = backend.index, backend.layout
    state: State = {
        "max_size": index.capacity,
        "num_envs": index.num_envs,
        "layout": None if layout is None else described(layout),
        "lanes": [] if layout is None else _lane_states(backend),
    }
    if not backend.has_other_writer:
        return state
    state = copy.deepcopy(state)
    # Steps that were written during the copy have overwritten the oldest steps.
    for lane, tail in zip(state["lanes"], index.tails.tolist(), strict=True):
        lane["tail"] = min(max(lane["tail"], tail), lane["cursor"])
    return state


def read(path: Any) -> tuple[State, State]:
    """Returns the transitions of a dump, all of which are checked, and the state of components as JSON.

    Raises:
        FileNotFoundError: the directory contains no dump.
        ValueError: the dump is damaged.
    """
    with closing(Directory.open(path, "r")) as dump:
        dump.validate()
        return collect_lanes(dump), dict(dump.state)


def _lane_states(backend: Any) -> list[State]:
    index, states = backend.index, []
    lane, step, slot = index.retained_steps()
    where, first = index.where[slot], index.spans[lane, index.episode[slot], FIRST]
    columns = step, first, first == step, index.ends[slot], where, index.priorities[slot]
    # Another process may have overwritten steps while the columns were read.
    is_stored = step >= np.minimum(index.tails, index.cursors - 1)[lane]
    bounds = np.searchsorted(lane[is_stored], np.arange(1, index.num_envs))
    columns_by_lane = zip(*(np.split(column[is_stored], bounds) for column in columns), strict=True)
    for number, (tail, values) in enumerate(
        zip(index.tails.tolist(), columns_by_lane, strict=True)
    ):
        steps, firsts, begins, ends, positions, priorities = values
        chunks: list[torch.Tensor] = []
        # A stream that has reached the end of its lane continues at the beginning of the lane.
        for run in np.split(positions, np.flatnonzero(np.diff(positions) < 0) + 1):
            if len(run):
                begin, end = backend.entries.begin_of(int(run[0])), int(run[-1]) + 2
                run += sum(map(len, chunks)) - begin  # changes `positions` too
                chunks.append(backend.entries.stored(begin, end))
        cursor, first = (int(steps[-1]) + 1, int(firsts[0])) if len(steps) else (0, 0)
        arrays = map(torch.from_numpy, (begins, ends, positions, priorities))
        state = cursor, min(tail, cursor), first, *arrays, chunks
        states.append(dict(zip(_LANE, state, strict=True)))
        if backend.layout.keyframes:
            records = backend.entries.records_of(number, chunks) if chunks else (0, [])
            states[-1] |= dict(zip(_RECORDS, records, strict=True))
    return states


def parse_lanes(state: Any, max_size: int, num_envs: int) -> tuple[Layout | None, list[PackedLane]]:
    """Checks a saved state, and returns its layout and its lanes.

    Without a layout there are no lanes.

    Raises:
        TypeError, ValueError: the state is damaged, or belongs to a storage of another size.
    """
    *sizes, words, lanes = required_items("rows", state, _ROWS)
    for name, value, size in zip(_ROWS, sizes, (max_size, num_envs), strict=False):
        if validation.integer(name, value) != size:
            raise ValueError(f"{name} of the state must be {size}, got {value}: nothing changed.")
    if words is None:
        return None, []
    try:
        layout = layout_of(words)
    except UNREADABLE as error:
        raise ValueError(f"the layout of saved transitions is damaged: {error!s:.99}") from None
    if not isinstance(lanes, list) or len(lanes) != num_envs:
        raise ValueError(f"the state must have {num_envs} lanes: nothing changed.")
    index = EpisodeIndex(max_size, num_envs, stack=layout.frames, depth=layout.depth)
    packed_lanes = [_parse_lane(lane, layout, index.steps_per_lane) for lane in lanes]
    fill_lanes(packed_lanes, index)
    try:
        index.validate()
    except RuntimeError as error:
        raise ValueError(f"saved transitions contradict one another: {error}") from error
    return layout, packed_lanes


def _parse_lane(state: Any, layout: Layout, T: int) -> PackedLane:
    """Returns the steps of a lane, from which an index can be filled and then checked."""
    names = (*_LANE, *_RECORDS) if layout.keyframes else _LANE
    *numbers, begins, ends, positions, priorities, chunks = required_items("a lane", state, names)[
        :8
    ]
    cursor, tail, first = (validation.integer("a step", it, at_most=2**48) for it in numbers)
    begins = array("begins", begins, torch.bool, None)
    size, oldest = len(begins), cursor - len(begins)
    ends = array("ends", ends, torch.uint8, size)
    positions = array("places", positions, torch.int64, size)
    priorities = array("priorities", priorities, torch.float32, size)
    entries = [
        torch.from_numpy(array("entries", chunk, torch.int64, None, layout.entry_words))
        for chunk in validation.instance("entries", chunks, list)
    ]
    if not size:
        is_valid = cursor == tail == 0
    else:
        is_valid = 0 <= oldest <= tail <= cursor and size <= T
        is_valid &= bool((np.diff(positions) > 0).all())
        first_position = layout.frames - 1
        is_valid &= first_position <= positions[0] < first_position + max(layout.keyframes, 1)
        is_valid &= positions[-1] + 2 == sum(map(len, entries))
    if not is_valid:
        raise ValueError("the steps of a lane must be consecutive: nothing changed.")
    lane = PackedLane(cursor, tail, first, begins, ends, positions, priorities, entries)
    return _with_records(lane, state, layout) if layout.keyframes else lane


def _with_records(lane: PackedLane, state: Any, layout: Layout) -> PackedLane:
    """Returns a lane with its records, once the records of live steps are checked."""
    position = validation.integer("position", state["position"], at_most=2**55)
    chunks = validation.instance("records", state["records"], list)
    nothing = np.empty(0, np.uint8)
    records = np.concatenate([nothing, *(array("records", it, torch.uint8, None) for it in chunks)])
    words = np.concatenate([np.empty(0, np.int64), *(it[:, 0].numpy() for it in lane.entries)])
    lane = lane._replace(records=(position, records), backs=words & frames.BACK)
    if not lane.cursor:
        return lane
    # Another process may have overwritten records of older steps, or of all steps, during the save.
    size = len(lane.positions)
    first = lane.first_entry(min(lane.tail - (lane.cursor - size), size - 1), layout.frames)
    sizes = layout.keyframes, layout.record_words
    if first >= 0 and frames.are_records(words[first:], position, records, *sizes):
        return lane
    if lane.tail < lane.cursor:
        raise ValueError("saved frames must follow keyframes: nothing changed.")
    zeros = [torch.zeros_like(chunk) for chunk in lane.entries]
    return lane._replace(entries=zeros, records=(0, _NO_CHANGES), backs=0 * words)


def empty_lanes(layout: Layout, steps: np.ndarray, firsts: np.ndarray) -> list[PackedLane]:
    """Returns lanes without live steps.

    Args:
        layout: layout of the transitions.
        steps: `[E]` number of the next step of each lane.
        firsts: `[E]` first step of the episode that the next step may continue.
    """
    size = layout.frames + 1, layout.entry_words
    entries = [torch.zeros(size, dtype=torch.int64, device="cpu")]
    columns = np.array([False]), np.array([CONTINUES]), np.array([layout.frames - 1]), np.zeros(1)
    records = (0, _NO_CHANGES) if layout.keyframes else ()
    return [
        PackedLane(step, step, min(first, step - 1), *columns, entries, records)
        for step, first in zip(steps.tolist(), firsts.tolist(), strict=True)
    ]


def fill_lanes(lanes: Sequence[PackedLane], index: EpisodeIndex, entries: Any = None) -> None:
    """Replaces the steps of an index, and the entries if there are any, by those of packed lanes.

    Raises:
        OSError: the disk is full.
    """
    index.reset()
    try:
        for number, lane in enumerate(lanes):
            if lane.cursor:
                _fill_lane(number, lane, index, entries)
    except BaseException:
        index.reset()  # no transitions rather than some
        raise


def _fill_lane(number: int, lane: PackedLane, index: EpisodeIndex, entries: Any) -> None:
    positions, size = lane.positions, len(lane.positions)
    steps = np.arange(lane.cursor - size, lane.cursor)
    # Steps that were overwritten during the save are left out, and the oldest steps if entries are short.
    first_position = int(positions[-1]) + 2 - index.entries_per_lane + index.depth - 1
    start = max(lane.tail - int(steps[0]), int(np.searchsorted(positions, first_position)))
    start = min(start, size - 1)
    first_entry = lane.first_entry(start, index.stack)
    begun = np.flatnonzero(lane.begins[: start + 1])
    slots = index.restore_lane(
        *(number, steps[start:], positions[start:] - first_entry),
        *(lane.begins[start:], lane.ends[start:]),
        first=int(steps[begun[-1]]) if len(begun) else lane.first,
        tail=max(lane.tail, int(steps[start])),
    )
    index.priorities[slots] = lane.priorities[start:]
    if entries is not None:
        chunks = []
        for chunk in lane.entries:
            chunks.append(chunk[first_entry:])
            first_entry = max(first_entry - len(chunk), 0)
        entries.fill(number, chunks, *lane.records)
