"""What is saved of rows: the live entries of each lane, in the order of its stream.

So packed they fit storages on any device, whatever room there is for entries; if they do not all fit the
oldest rows go. A lane without live steps keeps its newest one, with which its stream ends.

Letters: N steps of a lane, n of its entries, W words an entry, k frames a stack, T steps a lane.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_storages import arguments
from trl_storages.directory import Directory
from trl_storages.directory.description import UNREADABLE, described, layout_of
from trl_storages.index import EpisodeIndex
from trl_storages.kernels.words import CUT, FIRST, GOES_ON
from trl_storages.states import State, array, entries_of
from trl_storages.streams.layout import Layout

__all__ = ["Packed", "PackedLane", "check", "fill", "packed", "parsed", "read"]

_ROWS = ("max_size", "num_envs", "layout", "lanes")
_LANE = ("cursor", "tail", "first", "begins", "ends", "places", "priorities", "entries")
_MOST = 2**48


class PackedLane(NamedTuple):
    """The steps of a lane."""

    cursor: int
    """The number of the step after the last one."""
    tail: int
    """That of the oldest live one."""
    first: int
    """The first step of the oldest episode, which may be gone."""
    begins: np.ndarray
    """`[N]` bool, whether each step begins an episode."""
    ends: np.ndarray
    """`[N]` uint8, as in `kernels.streams`."""
    places: np.ndarray
    """`[N]` int64, its entry."""
    priorities: np.ndarray
    """`[N]` float32, 0 where none was set."""
    entries: list[torch.Tensor]
    """`[n, W]` in parts."""

    @property
    def steps(self) -> np.ndarray:
        """`[N]` the number of each step."""
        return np.arange(self.cursor - len(self.places), self.cursor)

    def without(self, count: int, k: int) -> PackedLane:
        """Returns the lane without its oldest steps, as far as it can do without."""
        count = min(count, len(self.places) - 1)
        if count < 1:
            return self
        steps, begins = self.steps, self.begins[: count + 1]
        first = int(steps[: count + 1][begins][-1]) if begins.any() else self.first
        gone, entries = int(self.places[count]) - (k - 1), []
        skipped = gone
        for part in self.entries:
            entries.append(part[skipped:])
            skipped = max(skipped - len(part), 0)
        return PackedLane(
            *(self.cursor, max(self.tail, int(steps[count])), first),
            begins=self.begins[count:],
            ends=self.ends[count:],
            places=self.places[count:] - gone,
            priorities=self.priorities[count:],
            entries=entries,
        )


class Packed(NamedTuple):
    """The rows of a storage; without a layout it has none."""

    layout: Layout | None
    lanes: Sequence[PackedLane]


def packed(place: Any) -> State:
    """Returns the rows of a `Memory` or `Directory` as they are saved.

    They share its memory, unless another process may be writing to it.
    """
    index, layout = place.index, place.layout
    lanes = [] if layout is None else range(index.num_envs)
    state: State = {
        "max_size": index.capacity,
        "num_envs": index.num_envs,
        "layout": None if layout is None else described(layout),
        "lanes": [_lane(index, place.rows, place.priorities, lane) for lane in lanes],
    }
    if place.is_still:
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
    with Directory.open(path, "r") as dump:
        dump.validate()
        return packed(dump), dict(dump.state)


def _lane(index: EpisodeIndex, rows: Any, priorities: np.ndarray | None, lane: int) -> State:
    steps, k = index.steps_in(lane), index.stack
    cursor = int(steps[-1]) + 1 if len(steps) else 0
    slots = lane * index.steps_per_lane + steps % index.steps_per_lane
    where, ends = index.where[slots], index.ends[slots]
    firsts = index.spans[lane, index.episode[slots], FIRST]
    entries, places = [], []
    length = 0
    # The stream may have come to the end of its lane, and gone on at the beginning.
    for part in np.split(where, np.flatnonzero(np.diff(where) < 0) + 1):
        if len(part):
            first, end = int(part[0]) - (k - 1), int(part[-1]) + 2
            entries.append(rows.stored(first, end))
            places.append(part - first + length)
            length += end - first
    raw = np.zeros(len(slots), np.float32) if priorities is None else priorities[slots]
    columns = {
        "begins": firsts == steps,
        "ends": ends,
        "places": np.concatenate(places) if places else where,
        "priorities": np.where((raw > 0) & (raw < np.inf), raw, np.float32(0)),
    }
    return {
        "cursor": cursor,
        "tail": min(int(index.tails[lane]), cursor),
        "first": int(firsts[0]) if len(steps) else 0,
        **{name: torch.from_numpy(column) for name, column in columns.items()},
        "entries": entries,
    }


def parsed(state: Any, max_size: int, num_envs: int) -> Packed:
    """Returns the rows that were saved, checked but for their fit into an index.

    Raises:
        ValueError: the state is damaged, or of a storage of another size.
    """
    got_size, got_envs, words, lanes = entries_of("rows", state, _ROWS)
    is_number = type(got_size) is type(got_envs) is int
    if not is_number or (got_size, got_envs) != (max_size, num_envs):
        got = f"{got_size} in {got_envs}" if is_number else "no numbers"
        raise ValueError(
            f"rows must be those of {max_size} slots in {num_envs} lanes, got {got}: nothing changed."
        )
    if words is None:
        return Packed(None, [])
    try:
        layout = layout_of(arguments.mapping("layout", words, "a description"))
    except UNREADABLE as error:
        got = type(error).__name__
        raise ValueError(
            f"rows must have a layout, got one with a {got}: nothing changed."
        ) from None
    if not isinstance(lanes, list) or len(lanes) != num_envs:
        raise ValueError(f"rows must be a list of {num_envs} lanes: nothing changed.")
    steps = max_size // num_envs
    return Packed(layout, [_parsed_lane(it, layout, steps) for it in lanes])


def _parsed_lane(state: Any, layout: Layout, T: int) -> PackedLane:
    cursor, tail, first, *columns, entries = entries_of("a lane", state, _LANE)
    begins, ends, places, priorities = columns
    begins = array("begins", begins, torch.bool, None)
    ends = array("ends", ends, torch.uint8, len(begins))
    places = array("places", places, torch.int64, len(begins))
    priorities = array("priorities", priorities, torch.float32, len(begins))
    if not isinstance(entries, list):
        raise ValueError("the entries of a lane must be a list of tensors: nothing changed.")
    parts = [
        torch.from_numpy(array("entries", part, torch.int64, None, layout.entry_words))
        for part in entries
    ]
    if not all(type(it) is int and 0 <= it < _MOST for it in (cursor, tail, first)):
        raise ValueError("the numbers of steps must be whole and at least 0: nothing changed.")
    lane = PackedLane(cursor, tail, first, begins, ends, places, priorities, parts)
    # What gave way while it was saved goes, whatever it is.
    lane = lane.without(tail - (cursor - len(begins)), layout.frames)
    if not _holds(lane, T, layout.frames):
        raise ValueError(
            "the steps of a lane must follow one another, got others: nothing changed."
        )
    return lane


def _holds(lane: PackedLane, T: int, k: int) -> bool:
    """Returns whether the steps of a lane may lie as they do."""
    cursor, tail, first, begins, ends, places, priorities, entries = lane
    number, oldest = sum(map(len, entries)), cursor - len(places)
    if not len(places):
        return cursor == tail == number == 0
    return (
        0 <= first <= oldest <= min(tail, cursor - 1)
        and tail <= cursor <= tail + T
        and len(places) <= T
        and bool(begins[0]) == (first == oldest)
        # A step goes on behind the one before, or k entries later if it adds its own observation.
        and places[0] == k - 1
        and places[-1] + 2 == number
        and bool(np.isin(np.diff(places), (1, k + 1)).all())
        and bool((ends <= CUT).all())
        and bool((begins[1:] | (ends[:-1] == GOES_ON)).all())
        and bool(((priorities >= 0) & (priorities < np.inf)).all())
    )


def fill(
    saved: Packed, index: EpisodeIndex, rows: Any = None, priorities: np.ndarray | None = None
) -> None:
    """Makes saved rows the only ones of an index, of rows, and of a column of priorities.

    Raises:
        OSError: the disk is full.
    """
    index.clear()
    try:
        for number, lane in enumerate(saved.lanes):
            if lane.cursor:
                _fill_lane(number, lane, index, rows, priorities)
    except BaseException:
        index.clear()  # rather no rows than some of them
        raise


def _fill_lane(
    number: int, lane: PackedLane, index: EpisodeIndex, rows: Any, priorities: np.ndarray | None
) -> None:
    # The oldest steps go whose entries do not fit.
    least = int(lane.places[-1]) + 2 - index.entries_per_lane + index.stack - 1
    lane = lane.without(int(np.searchsorted(lane.places, least)), index.stack)
    columns = lane.steps, lane.places, lane.begins, lane.ends
    index.set_lane(number, *columns, first=lane.first, tail=lane.tail)
    if priorities is not None:
        slots = number * index.steps_per_lane + lane.steps % index.steps_per_lane
        priorities[slots] = lane.priorities
    if rows is not None:
        rows.fill(number, lane.entries)


def check(saved: Packed, index: EpisodeIndex) -> None:
    """Checks that an empty index can take saved rows.

    Raises:
        ValueError: their episodes contradict one another.
    """
    fill(saved, index)
    try:
        index.validate()
    except RuntimeError as error:
        raise ValueError(f"saved rows must be whole: {error}") from None
