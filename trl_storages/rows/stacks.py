"""Assembles stacks of frames from rows that hold single frames.

Letters: N rows, D steps of the past, E lanes (environments), W words of a row with whole stacks, F words
of the frames of a row, B any shape of slots, L lanes and S steps written now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from trl_storages.kernels import backend
from trl_storages.kernels.memory import new_batch, on_device
from trl_storages.kernels.stack_fields import NEXT, NUM_COLUMNS, SIZE
from trl_storages.kernels.tables import Block
from trl_storages.keys import next_key
from trl_storages.ring import EpisodeIndex
from trl_storages.ring.index import Kept
from trl_storages.rows.layout import Field, Layout

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows, RowTable

__all__ = ["Evicted", "Stacks", "framed_rows"]

_WORD, _LINE = 8, 64  # bytes of a word and of a cache line


class Evicted(NamedTuple):
    """Frames of evicted rows that the remaining rows still need."""

    places: torch.Tensor
    """`[n]` int64, the rows of the past that store them."""
    frames: torch.Tensor
    """`[n, F]` int64, concatenated."""


class Stacks:
    """Assembles stacks from the rows of a lane, and from the frames before its oldest row.

    The past of a lane is the D = k - 1 steps before its oldest live row. It stays in the ring if that
    has spare steps, as in a directory; otherwise it is in a table, step s of lane l in row
    `(s % D) * E + l`.

    Args:
        layout: of rows that have stacks.
        episodes: the index of the rows.
        rows: `[N, *]` int64 as they are stored.
        past: `[D * E, F]` int64, an existing past, for a ring without spare steps; None is empty.
    """

    def __init__(
        self,
        layout: Layout,
        episodes: EpisodeIndex,
        rows: torch.Tensor,
        past: torch.Tensor | None = None,
    ) -> None:
        self._layout, self._episodes, self._rows = layout, episodes, rows
        places = {field.key: place for place, field in enumerate(layout.fields)}
        # Byte offsets of each frame in a framed row, a stored row, a row of the past and in concatenated
        # frames; and its size in bytes.
        self._kept: list[tuple[int, int, int, int, int]] = []
        fields, offset, is_in_ring = [], 0, episodes.spare_steps > 0
        for key, stack in layout.stacks.items():
            if key[0] == "next":
                continue
            frame, stored = layout.framed.field(key), layout.framed.stored_start(key)
            is_constant, gone = stack.padding == "constant", stored if is_in_ring else offset
            pair = [name for name in (key, next_key(key)) if name in layout.stacks]
            after = layout.framed.field(pair[-1]).start_byte
            kept = (frame.num_bytes, stack.num_frames, is_constant, stored, gone, after)
            fields += [(places[name], places[key], *kept) for name in pair]
            self._kept.append((frame.start_byte, stored, gone, offset, frame.num_bytes))
            offset += _in_words(frame) * _WORD
        self._past_shape = self.past_shape(layout, episodes.num_envs)
        if is_in_ring:
            past = rows[: episodes.num_slots]
        elif past is None:
            past = torch.zeros(self._past_shape, dtype=torch.int64, device=rows.device)
        if rows.is_shared():  # type: ignore[no-untyped-call]
            past.share_memory_()  # type: ignore[no-untyped-call]
        self._past, self._is_in_ring = past, is_in_ring
        # Stacks at the root come first.
        self._fields = np.array(sorted(fields, key=_is_next), np.int64).reshape(-1, NUM_COLUMNS)
        self._table = backend(rows.device).FrameTable(rows, past, self._fields)
        # Each stack and its twin under `next`.
        self._pairs = [(key, next_key(key)) for key in layout.stacks if key[0] != "next"]
        # The stacks that were requested last, with the arguments for the table.
        self._wanted: tuple[Any, ...] = ((), None, (), ())

    @staticmethod
    def past_shape(layout: Layout, num_lanes: int) -> tuple[int, int]:
        """Returns the shape `[D * E, F]` of the past, for rows in so many lanes."""
        frames = [layout.framed.field(key) for key in layout.stacks if key[0] != "next"]
        return layout.past_steps * num_lanes, sum(map(_in_words, frames))

    # Reading

    def gather(
        self,
        table: RowTable,
        slots: torch.Tensor,
        following: torch.Tensor | None,
        *,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Copies rows with their stacks.

        Args:
            table: of the rows, with their newest frames.
            slots: `[*B]` int64.
            following: `[*B]` int64, the rows that supply the entries under `next`; None: the rows
                themselves.
            pin_memory: whether the new memory is pinned.

        Returns:
            `[*B, W]` int64 in new memory.
        """
        size = (slots.numel(), self._layout.num_words)
        out = new_batch(size, device=slots.device, pin_memory=pin_memory)
        into, flat = out.view(torch.uint8), slots.reshape(-1)
        rooted, after = self._layout.parts
        table.copy_into(out, flat, rooted)
        table.copy_into(out, flat if following is None else following, after)
        targets = {
            key: into[:, it.start_byte : it.start_byte + it.num_bytes]
            for key in self._layout.stacks
            for it in [self._layout.field(key)]
        }
        self._fill(table, slots, following, targets)
        return out.view(*slots.shape, out.shape[1])

    def read(
        self,
        table: RowTable,
        slots: torch.Tensor,
        keys: Collection[NestedKey],
        following: torch.Tensor | None = None,
    ) -> dict[NestedKey, torch.Tensor]:
        """Gathers some stacks in one call, which is faster than one by one.

        Args:
            table: as in `gather`.
            slots: `[*B]` int64.
            keys: of the stacks.
            following: as in `gather`.

        Returns:
            key -> tensor `[*B, *shape]` in new memory.
        """
        fields, num_slots = [self._layout.field(key) for key in keys], slots.numel()
        # One piece of memory takes less time than several; each stack begins at a cache line.
        lines = [-(-num_slots * field.num_bytes // _LINE) for field in fields]
        block = new_batch((sum(lines), _LINE), torch.uint8, slots.device)
        targets, found = {}, {}
        for field, part in zip(fields, block.split_with_sizes(lines), strict=True):
            shape = (num_slots, field.num_bytes)
            targets[field.key] = out = part.as_strided(shape, (field.num_bytes, 1))
            found[field.key] = field.as_stacks(out.view(field.dtype), slots.shape)
        self._fill(table, slots, following, targets)
        return found

    def _fill(
        self,
        table: RowTable,
        slots: torch.Tensor,
        following: torch.Tensor | None,
        targets: Mapping[NestedKey, torch.Tensor],
    ) -> None:
        """Copies stacks to `targets`, `[n, bytes]` uint8 each."""
        keys = tuple(targets)
        if self._wanted[0] != keys:
            of = [f for f, pair in enumerate(self._pairs) if not targets.keys().isdisjoint(pair)]
            roots, twins = ([self._pairs[f][at] for f in of] for at in range(2))
            self._wanted = keys, self._fields[of], roots, twins
        _, fields, roots, twins = self._wanted
        seen, after = [*map(targets.get, roots)], [*map(targets.get, twins)]
        flat, lent = slots.reshape(-1), None if following is None else following.reshape(-1)
        if self._table.fill(self._episodes.ring, table, fields, flat, lent, seen, after):
            return
        lenders = flat if lent is None else lent
        for stack, later in zip(fields, after, strict=True):
            if later is not None:
                size = stack[SIZE]
                spans = np.array([[stack[NEXT], later.shape[1] - size, size, later.stride(0)]])
                table.copy_into(later, lenders, spans)

    # Writing

    def find_breaks(self, rows: NewRows, block: Block) -> torch.Tensor | None:
        """Finds rows whose stacks can't be assembled from single frames; see `FrameTable`."""
        return self._table.find_breaks(self._episodes.ring, rows, block)

    def evicted(self, rows: NewRows, block: Block) -> Evicted | None:
        """Returns the frames that a write turns into the past; None if there are none to move.

        Args:
            rows: to write, with their newest frames.
            block: maps rows to lanes and steps.
        """
        if self._is_in_ring:
            return None
        episodes, (num_steps, _, order, _) = self._episodes, block
        lane = np.arange(episodes.num_envs)[block.which]
        cursor, tail = episodes.host_steps[lane], episodes.host_tails[lane]
        new_tail = cursor + num_steps - episodes.steps_per_lane
        if (new_tail <= tail).all():
            return None
        step = self._steps_before(new_tail)
        which = (step >= tail[:, None]) & (new_tail > tail)[:, None]
        of_lane = np.broadcast_to(lane[:, None], step.shape)[which]
        ahead, step = (step - cursor[:, None])[which], step[which]
        device = self._past.device
        slots = episodes.ring.slots_at(step, of_lane)
        stored = self._rows.index_select(0, on_device(torch.from_numpy(slots), device))
        frames = self._frames(stored, 1)
        if (is_new := ahead >= 0).any():
            # More is written than fits, so that some of the evicted rows are new ones.
            at = np.broadcast_to(np.arange(len(lane))[:, None], which.shape)[which]
            number = on_device(torch.from_numpy((at * num_steps + ahead)[is_new]), device)
            number = number if order is None else order.reshape(-1)[number]
            new = self._frames(rows.words().index_select(0, number), 0)
            at = torch.from_numpy(np.flatnonzero(is_new))
            frames[on_device(at, device)] = new
        return Evicted(self._places(step, of_lane), frames)

    def _steps_before(self, tails: np.ndarray) -> np.ndarray:
        """Returns `[L, D]`, the D steps before each of the steps `[L]`, the latest first."""
        found: np.ndarray = tails[:, None] - 1 - np.arange(self._layout.past_steps)
        return found

    def _places(self, steps: np.ndarray, lanes: np.ndarray) -> torch.Tensor:
        """Returns the rows of the past that hold steps of lanes, `[n]`."""
        num_lanes = self._episodes.num_envs
        places = steps % (len(self._past) // num_lanes) * num_lanes + lanes
        return on_device(torch.from_numpy(places), self._past.device)

    def _frames(self, rows: torch.Tensor, kind: int) -> torch.Tensor:
        """Returns the frames `[n, F]` of framed rows (kind 0), stored ones (1) or the past's (2)."""
        frames = torch.zeros(len(rows), self._past_shape[1], dtype=torch.int64, device=rows.device)
        into, source = frames.view(torch.uint8), rows.view(torch.uint8)
        for *starts, to, size in self._kept:
            into[:, to : to + size] = source[:, starts[kind] : starts[kind] + size]
        return frames

    def keep(self, evicted: Evicted) -> None:
        """Stores frames in the past."""
        into, source = self._past.view(torch.uint8), evicted.frames.view(torch.uint8)
        for _, _, to, start, size in self._kept:
            into[evicted.places, to : to + size] = source[:, start : start + size]

    # State

    @property
    def past(self) -> torch.Tensor:
        """The past as it is saved, `[D * E, F]` int64: step s of lane l in row `(s % D) * E + l`."""
        if not self._is_in_ring:
            return self._past
        past = torch.zeros(self._past_shape, dtype=torch.int64)
        evicted, rows = self._before(self._episodes)
        past[rows] = self._frames(self._past[evicted], 2)
        return past

    def take_past(self, past: torch.Tensor, saved: EpisodeIndex) -> None:
        """Loads a saved past, that of the rows of another index."""
        places, rows = self._before(saved)
        self.keep(Evicted(places, past[rows]))

    def _before(self, saved: EpisodeIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of the past, and the rows of a saved past that correspond to them."""
        num_lanes = self._episodes.num_envs
        step, old = (self._steps_before(it.host_tails) for it in (self._episodes, saved))
        lanes = np.broadcast_to(np.arange(num_lanes)[:, None], step.shape)
        rows = torch.from_numpy((old % self._layout.past_steps * num_lanes + lanes).reshape(-1))
        return self._places(step.reshape(-1), lanes.reshape(-1)), rows.to(self._past.device)

    def mover(self, kept: Kept) -> Callable[[], None]:
        """Returns a function that updates the past when the kept rows are renumbered from step 0."""
        episodes, num_past = self._episodes, self._layout.past_steps
        bounds = zip(episodes.host_tails.tolist(), episodes.host_steps.tolist(), strict=True)
        frames = torch.zeros_like(self._past)
        for lane, (tail, cursor) in enumerate(bounds):
            first = cursor - len(kept.lanes[lane].slots)
            step = np.arange(first - num_past, first)
            new = torch.from_numpy((step - first) % num_past * episodes.num_envs + lane)
            slots = episodes.ring.slots_at(step, lane)
            gone = torch.from_numpy(step % num_past * episodes.num_envs + lane)
            device = self._past.device
            stored = self._rows.index_select(0, on_device(torch.from_numpy(slots), device))
            is_live = on_device(torch.from_numpy(step >= tail), device).unsqueeze(1)
            past = self._past.index_select(0, on_device(gone, device))
            frames[on_device(new, device)] = torch.where(is_live, self._frames(stored, 1), past)

        def put() -> None:
            self._past.copy_(frames)

        return put


def framed_rows(layout: Layout, rows: NewRows) -> NewRows:
    """Reduces rows to write to single frames, if the layout has stacks.

    Args:
        layout: of the rows with whole stacks.
        rows: with whole stacks; they become `seen` of the result.
    """
    if not layout.stacks:
        return rows
    places, parts = {field.key: place for place, field in enumerate(layout.fields)}, []
    for frame in layout.framed.fields:
        whole = layout.field(frame.key)
        first = whole.num_bytes - frame.num_bytes
        parts.append((places[frame.key], first, frame.start_byte, frame.num_bytes))
    framed = rows.parts(np.array(parts, np.int64), layout.framed.num_words)
    framed.seen = rows
    return framed


def _in_words(frame: Field) -> int:
    return -(-frame.num_bytes // _WORD)


def _is_next(field: tuple[int, ...]) -> bool:
    return field[0] != field[1]
