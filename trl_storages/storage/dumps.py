"""What is saved of rows: the live entries of each lane, in the order of its stream.

So packed they fit storages on any device, whatever room there is for entries; if they do not all fit the
oldest rows go. A lane without live steps keeps its newest one, with which its stream ends.

Frames that are stored as what changed stay so: a lane begins with a keyframe, and its state holds the
records of its entries, from a position on.

Letters: E lanes, N steps of a lane, n of its entries, W words an entry, k frames a stack.
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

__all__ = ["PackedLane", "fill", "numbered", "packed", "parsed", "read"]

_ROWS = ("max_size", "num_envs", "layout", "lanes")
_LANE = ("cursor", "tail", "first", "begins", "ends", "places", "priorities", "entries")
_RECORDS = ("position", "records")
# The record of a frame of zeros.
_NO_CHANGES = np.zeros(4, np.uint8)


class PackedLane(NamedTuple):
    """The steps of a lane.

    Args:
        cursor: the number of the step after the last one.
        tail: that of the oldest live one.
        first: the first step of the oldest episode, which may be gone.
        begins: `[N]` bool, whether each step begins an episode.
        ends: `[N]` uint8, as in `kernels`.
        places: `[N]` int64, its entry.
        priorities: `[N]` float32, 0 where none was set.
        entries: `[n, W]` in parts.
        records: of frames that are stored as what changed, the position of the first byte and the bytes.
        backs: `[n]` how many entries back the keyframe of each is; None where frames are as they are.
    """

    cursor: int
    tail: int
    first: int
    begins: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    priorities: np.ndarray
    entries: list[torch.Tensor]
    records: tuple[Any, ...] = ()
    backs: np.ndarray | None = None

    def first_entry(self, i: int, k: int) -> int:
        """Returns the first entry that its i-th step needs."""
        first = int(self.places[i]) - (k - 1)
        return first if self.backs is None else first - int(self.backs[first])


def packed(backend: Any) -> State:
    """Returns the rows of a `Memory` or `Directory` as they are saved.

    They share its memory, unless another process may be writing to it.
    """
    index, layout = backend.index, backend.layout
    state: State = {
        "max_size": index.capacity,
        "num_envs": index.num_envs,
        "layout": None if layout is None else described(layout),
        "lanes": [] if layout is None else _lanes(backend),
    }
    if backend.is_quiescent:
        return state
    state = copy.deepcopy(state)
    # What was written meanwhile took the place of the oldest.
    for lane, tail in zip(state["lanes"], index.tails.tolist(), strict=True):
        lane["tail"] = min(max(lane["tail"], tail), lane["cursor"])
    return state


def read(path: Any) -> tuple[State, State]:
    """Returns the rows of a dump, each of which is checked, and the state of other parts as JSON.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    with closing(Directory.open(path, "r")) as dump:
        dump.validate()
        return packed(dump), dict(dump.state)


def _lanes(backend: Any) -> list[State]:
    index, lanes = backend.index, []
    lane, step, slot = index.kept()
    where, first = index.where[slot], index.spans[lane, index.episode[slot], FIRST]
    columns = step, first, first == step, index.ends[slot], where, index.priorities[slot]
    # What gave way meanwhile to steps of another process is not as it was.
    remains = step >= np.minimum(index.tails, index.cursors - 1)[lane]
    bounds = np.searchsorted(lane[remains], np.arange(1, index.num_envs))
    of_lanes = zip(*(np.split(column[remains], bounds) for column in columns), strict=True)
    for number, (tail, each) in enumerate(zip(index.tails.tolist(), of_lanes, strict=True)):
        steps, firsts, begins, ends, places, priorities = each
        entries: list[torch.Tensor] = []
        # The stream may have come to the end of its lane, and gone on at the beginning.
        for part in np.split(places, np.flatnonzero(np.diff(places) < 0) + 1):
            if len(part):
                begin, end = backend.entries.begin_of(int(part[0])), int(part[-1]) + 2
                part += sum(map(len, entries)) - begin  # of places too
                entries.append(backend.entries.stored(begin, end))
        cursor, first = (int(steps[-1]) + 1, int(firsts[0])) if len(steps) else (0, 0)
        arrays = map(torch.from_numpy, (begins, ends, places, priorities))
        words = cursor, min(tail, cursor), first, *arrays, entries
        lanes.append(dict(zip(_LANE, words, strict=True)))
        if backend.layout.keyframes:
            records = backend.entries.records_of(number, entries) if entries else (0, [])
            lanes[-1] |= dict(zip(_RECORDS, records, strict=True))
    return lanes


def parsed(state: Any, max_size: int, num_envs: int) -> tuple[Layout | None, Sequence[PackedLane]]:
    """Returns the layout and the lanes that were saved, all of which are checked.

    Without a layout there are no rows.

    Raises:
        TypeError, ValueError: the state is damaged, or of a storage of another size.
    """
    *sizes, words, lanes = required_items("rows", state, _ROWS)
    for name, got, own in zip(_ROWS, sizes, (max_size, num_envs), strict=False):
        if validation.integer(name, got) != own:
            raise ValueError(f"rows must be those of {name}={own}, got {got}: nothing changed.")
    if words is None:
        return None, []
    try:
        layout = layout_of(words)
    except UNREADABLE as error:
        raise ValueError(f"rows must have a layout, got none: {error!s:.99}") from None
    if not isinstance(lanes, list) or len(lanes) != num_envs:
        raise ValueError(f"rows must be a list of {num_envs} lanes: nothing changed.")
    index = EpisodeIndex(max_size, num_envs, stack=layout.frames, depth=layout.depth)
    found = [_parse_lane(it, layout, index.steps_per_lane) for it in lanes]
    fill(found, index)
    try:
        index.validate()
    except RuntimeError as error:
        raise ValueError(f"saved rows must be whole: {error}") from None
    return layout, found


def _parse_lane(state: Any, layout: Layout, T: int) -> PackedLane:
    """Returns the steps of a lane, of which an index can be made, to be checked."""
    names = (*_LANE, *_RECORDS) if layout.keyframes else _LANE
    *numbers, begins, ends, places, priorities, entries = required_items("a lane", state, names)[:8]
    cursor, tail, first = (validation.integer("a step", it, at_most=2**48) for it in numbers)
    begins = array("begins", begins, torch.bool, None)
    size, oldest = len(begins), cursor - len(begins)
    ends = array("ends", ends, torch.uint8, size)
    places = array("places", places, torch.int64, size)
    priorities = array("priorities", priorities, torch.float32, size)
    parts = [
        torch.from_numpy(array("entries", part, torch.int64, None, layout.entry_words))
        for part in validation.instance("entries", entries, list)
    ]
    if not size:
        fits = cursor == tail == 0
    else:
        fits = 0 <= oldest <= tail <= cursor and size <= T and bool((np.diff(places) > 0).all())
        first_place = layout.frames - 1
        fits &= first_place <= places[0] < first_place + max(layout.keyframes, 1)
        fits &= places[-1] + 2 == sum(map(len, parts))
    if not fits:
        raise ValueError("the steps of a lane must follow one another: nothing changed.")
    lane = PackedLane(cursor, tail, first, begins, ends, places, priorities, parts)
    return _with_records(lane, state, layout) if layout.keyframes else lane


def _with_records(lane: PackedLane, state: Any, layout: Layout) -> PackedLane:
    """Returns a lane with its records, once those that live steps need are checked."""
    position = validation.integer("position", state["position"], at_most=2**55)
    parts = validation.instance("records", state["records"], list)
    nothing = np.empty(0, np.uint8)
    taken = np.concatenate([nothing, *(array("records", it, torch.uint8, None) for it in parts)])
    words = np.concatenate([np.empty(0, np.int64), *(it[:, 0].numpy() for it in lane.entries)])
    lane = lane._replace(records=(position, taken), backs=words & frames.BACK)
    if not lane.cursor:
        return lane
    # Another process may have overwritten what older steps need while they were saved, or all steps.
    size = len(lane.places)
    first = lane.first_entry(min(lane.tail - (lane.cursor - size), size - 1), layout.frames)
    sizes = layout.keyframes, layout.record_words
    if first >= 0 and frames.are_records(words[first:], position, taken, *sizes):
        return lane
    if lane.tail < lane.cursor:
        raise ValueError("saved frames must follow keyframes: nothing changed.")
    empty = [torch.zeros_like(part) for part in lane.entries]
    return lane._replace(entries=empty, records=(0, _NO_CHANGES), backs=0 * words)


def numbered(layout: Layout, steps: np.ndarray, firsts: np.ndarray) -> list[PackedLane]:
    """Returns lanes without live steps.

    Args:
        layout: of the rows.
        steps: `[E]` the numbers of the next step of each lane.
        firsts: `[E]` the first step of the episode that the next step continues, unless it begins one.
    """
    size = layout.frames + 1, layout.entry_words
    entries = [torch.zeros(size, dtype=torch.int64, device="cpu")]
    of_step = np.array([False]), np.array([CONTINUES]), np.array([layout.frames - 1]), np.zeros(1)
    records = (0, _NO_CHANGES) if layout.keyframes else ()
    return [
        PackedLane(step, step, min(first, step - 1), *of_step, entries, records)
        for step, first in zip(steps.tolist(), firsts.tolist(), strict=True)
    ]


def fill(lanes: Sequence[PackedLane], index: EpisodeIndex, rows: Any = None) -> None:
    """Makes saved rows the only ones of an index, and of rows.

    Raises:
        OSError: the disk is full.
    """
    index.reset()
    try:
        for number, lane in enumerate(lanes):
            if lane.cursor:
                _fill_lane(number, lane, index, rows)
    except BaseException:
        index.reset()  # rather no rows than some of them
        raise


def _fill_lane(number: int, lane: PackedLane, index: EpisodeIndex, rows: Any) -> None:
    places, size = lane.places, len(lane.places)
    steps = np.arange(lane.cursor - size, lane.cursor)
    # What gave way while it was saved goes, whatever it is; and the oldest whose entries do not fit.
    least = int(places[-1]) + 2 - index.entries_per_lane + index.depth - 1
    gone = max(lane.tail - int(steps[0]), int(np.searchsorted(places, least)))
    gone = min(gone, size - 1)
    skipped = lane.first_entry(gone, index.stack)
    begun = np.flatnonzero(lane.begins[: gone + 1])
    slots = index.set_lane(
        *(number, steps[gone:], places[gone:] - skipped, lane.begins[gone:], lane.ends[gone:]),
        first=int(steps[begun[-1]]) if len(begun) else lane.first,
        tail=max(lane.tail, int(steps[gone])),
    )
    index.priorities[slots] = lane.priorities[gone:]
    if rows is not None:
        entries = []
        for part in lane.entries:
            entries.append(part[skipped:])
            skipped = max(skipped - len(part), 0)
        rows.fill(number, entries, *lane.records)
