"""The episode index of a ring, updated in O(1) per written step.

Letters: T live steps per lane at most, R >= T ring steps per lane, E lanes (environments), B any shape of
slots.

A lane is the stream of one environment. The ring is time-major: step s of lane l is in slot
`(s % R) * E + l`. Each lane has its own cursor, so lanes may advance independently. The live rows of a
lane are those from its tail up to its cursor; the tail is at most T steps behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trl_storages import arguments
from trl_storages.kernels import backend
from trl_storages.kernels.memory import on_device
from trl_storages.kernels.tables import Block
from trl_storages.ring.answers import EpisodeAnswers
from trl_storages.ring.invariants import check_invariants
from trl_storages.ring.naming import Lanes, named_lanes
from trl_storages.saved.parts import SavedPart, SavedState

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows, RowTable

__all__ = ["EpisodeIndex", "Kept", "LaneRows", "episodes_of"]

_MOST_STEPS = 2**62
_NO_PLACES = np.zeros((0, 2), np.int64)


def episodes_of(storage: Any) -> EpisodeIndex:
    """Returns the episode index that an `EpisodeWriter` keeps on `storage`.

    Raises:
        RuntimeError: no `EpisodeWriter` writes to this storage.
    """
    index: EpisodeIndex | None = getattr(storage, "episodes", None)
    if index is None:
        raise RuntimeError(
            f"{type(storage).__name__} has no episode index: its rows must be written by an "
            "EpisodeWriter; pass writer=EpisodeWriter(num_envs) to the replay buffer."
        )
    return index


class LaneRows(NamedTuple):
    """The last n rows of a lane and their episode structure."""

    slots: torch.Tensor
    """`[n]` int64 slots."""
    done: torch.Tensor
    """`[n]` bool, whether each row ends its episode."""
    begins: torch.Tensor
    """`[n]` bool, whether each row is the first surviving row of its episode."""
    before: torch.Tensor
    """`[n]` int64, how many rows of its episode were written before each row."""
    is_open: bool
    """Whether the next row of the lane continues the episode of the last one."""


class Kept(NamedTuple):
    """The rows that are kept when all others are removed."""

    old: torch.Tensor
    """`[n]` int64, their current slots."""
    new: torch.Tensor
    """`[n]` int64, the slots they move to."""
    lanes: list[LaneRows]
    """The same, lane by lane."""


class EpisodeIndex(SavedPart, EpisodeAnswers):
    """Knows for every slot of a ring how many rows of its episode come before and after it.

    An episode ends where `done` is true, and is cut where the next row of the lane belongs to another
    trajectory. A cut or unfinished episode is a valid, shorter segment. Queries run on `device` without
    synchronising with the host, at a cost independent of the number of rows.

    Args:
        capacity: maximum number of live rows; rounded down to a multiple of `num_envs`.
        num_envs: number of lanes E.
        device: device of the tables and the results.
        spare_steps: R - T. A write of up to this many steps touches no slot of a live row.

    Raises:
        ValueError: `num_envs` is below 1, `capacity` below `num_envs` or `spare_steps` below 0.

    >>> index = EpisodeIndex(8)
    >>> index.append(torch.tensor([[False, False, True, False]])).tolist()
    [[0, 1, 2, 3]]
    >>> index.ahead(torch.arange(4)).tolist(), index.behind(torch.arange(4)).tolist()
    ([2, 1, 0, 0], [0, 1, 2, 0])
    """

    #: How often the steps of these lanes were replaced by others.
    num_restarts = 0

    # Lanes and slots

    def lane_ids(self, lanes: Lanes = None) -> torch.Tensor:
        """Returns the numbers of lanes as a tensor, checked on the host.

        Args:
            lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all.

        Returns:
            `[L]` int64.

        Raises:
            ValueError: `lanes` is something else, or names an unknown lane or one twice.
        """
        if lanes is None:
            return self._lane_ids
        return on_device(torch.tensor(self.named_lanes(lanes), dtype=torch.int64), self.device)

    def named_lanes(self, lanes: Lanes = None) -> Sequence[int]:
        """Returns the numbers of lanes on the host; see `lane_ids`."""
        return named_lanes(lanes, self.num_envs)

    def next_slots(self, num_steps: int, lanes: Lanes = None) -> torch.Tensor:
        """Returns the slots that the next `num_steps` steps of the lanes will take.

        Args:
            num_steps: S.
            lanes: the L lanes to write; None is all of them.

        Returns:
            `[L, S]` int64 slots. If S > T only the last T steps are kept; the others get slot -1.
        """
        num_steps = arguments.integer("num_steps", num_steps)
        return self.ring.next_slots(self.lane_ids(lanes), num_steps)

    def newest_slot(self, lanes: Lanes = None) -> int:
        """Returns the slot of the newest row of the last of `lanes`, without synchronising."""
        lane = self.num_envs - 1 if lanes is None else self.named_lanes(lanes)[-1]
        found: int = self.ring.slots_at(self.host_steps.item(lane) - 1, lane)
        return found

    def newest_slots(self, lanes: Sequence[int] | None = None) -> torch.Tensor:
        """Returns the slots `[L]` of the newest rows of lanes; None is all."""
        return self.ring.newest_slots(self.lane_ids(lanes))

    def slots_since(self, num_steps: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the surviving rows written after the given steps.

        Args:
            num_steps: `[E]` int64 on the host, an earlier `num_steps_written`.

        Returns:
            int64 slots `[n]`, lane by lane, oldest row first.
        """
        tails, cursors = self.host_tails.tolist(), self.host_steps.tolist()
        steps = [
            torch.arange(max(before, tail), cursor)
            for before, tail, cursor in zip(num_steps.tolist(), tails, cursors, strict=True)
        ]
        slots = [self.ring.slots_at(step, lane) for lane, step in enumerate(steps)]
        return on_device(torch.cat(slots), self.device)

    # Writing

    def append(
        self, done: torch.Tensor, cut: torch.Tensor | None = None, lanes: Lanes = None
    ) -> torch.Tensor:
        """Appends S steps to each of L lanes.

        Args:
            done: `[L, S]` bool, or `[L]` for one step: the episode ends with this row.
            cut: bool of the same shape: this row does not continue the row before it in its lane.
            lanes: the L distinct lanes to write; None is all of them.

        Returns:
            int64 slots of the shape of `done`, as returned by `next_slots` before.

        Raises:
            ValueError: the shape of `done` does not fit the lanes, or a lane is unknown or repeated. The
                index is unchanged then.
        """
        arguments.tensor("done", done, dtype=torch.bool)
        shape, num_lanes = done.shape, len(self.named_lanes(lanes))
        if done.ndim not in (1, 2) or shape[0] != num_lanes:
            raise ValueError(
                f"done must have shape [{num_lanes}] or [{num_lanes}, S], a row of steps for "
                f"each lane that is written; got {list(shape)}."
            )
        if cut is not None and arguments.tensor("cut", cut, dtype=torch.bool).shape != shape:
            raise ValueError(f"cut must have done's shape {list(shape)}, got {list(cut.shape)}.")
        if not done.numel():
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        num_steps = 1 if done.ndim == 1 else shape[1]
        if cut is not None:
            cut = cut.reshape(num_lanes, num_steps)
        return self._advance(done.reshape(num_lanes, num_steps), cut, lanes).view(shape)

    def _advance(
        self, done: torch.Tensor, cut: torch.Tensor | None = None, lanes: Lanes = None
    ) -> torch.Tensor:
        """Implements `append` for flags `[L, S]` that were checked."""
        done = on_device(done, self.device).contiguous()
        rows = backend(self.device).NewRows([], _NO_PLACES, done.numel(), 0, done, self.device)
        if cut is not None:
            cut = on_device(cut, self.device).contiguous()
        named = None if lanes is None else self.named_lanes(lanes)
        slots: torch.Tensor = self.write(rows, Block(done.shape[1], named, cut=cut))  # type: ignore[assignment]
        return slots.view(done.shape)

    def write(
        self,
        rows: NewRows,
        block: Block,
        table: RowTable | None = None,
        pairs: np.ndarray = _NO_PLACES,
    ) -> torch.Tensor | None:
        """Appends steps and copies their rows; see `kernels.host.Ring.append`."""
        slots = self.ring.append(rows, block, table, pairs)
        # Only then, as there may be no memory for it.
        if not self._on_host:
            self.host_steps[block.which] += block.num_steps
            np.maximum(self.host_tails, self.host_steps - self.steps_per_lane, out=self.host_tails)
        return slots

    def rejoin(
        self, done: torch.Tensor, begins: torch.Tensor, cursor: int, lanes: Lanes = None
    ) -> None:
        """Rebuilds lanes from their last rows, after steps that this index did not see.

        Args:
            done: `[L, S]` bool, of the last S steps of the lanes: the episode ends with this row. The
                last T of them survive.
            begins: `[L, S]` bool: an episode begins with this row. If the first surviving row's episode
                began earlier, it counts as having lost rows.
            cursor: steps written to each of the lanes.
            lanes: the L distinct lanes; None is all of them.
        """
        lane = self.lane_ids(lanes)
        tail, which = cursor - done.shape[1], list(self.named_lanes(lanes))
        self.host_steps[which] = self.host_tails[which] = tail
        self.ring.cursors[lane] = self.ring.tails[lane] = tail
        self.ring.is_open[lane] = 0
        if done.shape[1]:
            oldest = max(done.shape[1] - self.steps_per_lane, 0)
            first = self._advance(done, begins, lanes)[:, oldest]
            self.ring.begin(first[~on_device(begins[:, : oldest + 1].any(1), self.device)], -1)

    def evict(self, tails: np.ndarray | torch.Tensor | Sequence[int]) -> None:
        """Evicts the rows before a given step of each lane; step counters are not reset.

        Args:
            tails: `[E]` int64 on the host, the first step of each lane to keep, clamped to between its
                current tail and its cursor. A lane left without rows starts a new episode with its next
                row.
        """
        tails = np.clip(np.asarray(tails, np.int64), self.host_tails, self.host_steps)
        self.ring.evict(torch.from_numpy(tails))
        self.host_tails[:] = tails

    def end_episodes(self, lanes: Lanes = None) -> None:
        """Cuts the running episodes: the next row of each lane starts a new one."""
        self.ring.is_open[self.lane_ids(lanes)] = 0

    def clear(self, keep_steps: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Removes all rows but the last `keep_steps` of each lane, which move to the start of the ring.

        Returns:
            int64 slots `[n]` of the kept rows, and the slots `[n]` to which the caller must move them.
        """
        kept = self.newest(keep_steps)
        self.restart(kept)
        return kept.old, kept.new

    def newest(self, keep_steps: int) -> Kept:
        """Describes the last `keep_steps` rows of each lane, for `restart`."""
        lanes = self._last_rows(arguments.integer("keep_steps", keep_steps))
        new = [
            torch.arange(len(rows.slots), device=self.device) * self.num_envs + lane
            for lane, rows in enumerate(lanes)
        ]
        return Kept(torch.cat([rows.slots for rows in lanes]), torch.cat(new), lanes)

    def _last_rows(self, most: int) -> list[LaneRows]:
        """Describes the last rows of each lane, at most `most`."""
        lanes, is_open = [], self.is_open.tolist()
        bounds = zip(self.host_tails.tolist(), self.host_steps.tolist(), strict=True)
        for lane, (tail, cursor) in enumerate(bounds):
            step = torch.arange(max(cursor - most, tail), cursor, device=self.device)
            slots = self.ring.slots_at(step, lane)
            before, begins = step - self.ring.span(slots)[:, 0], self.behind(slots) == 0
            lanes.append(LaneRows(slots, self.is_end(slots), begins, before, is_open[lane]))
        return lanes

    def _put_rows(self, lane: int, rows: LaneRows, cursor: int) -> None:
        """Rebuilds a lane from its last rows, the newest at step `cursor - 1`."""
        done, begins, before = (on_device(it, self.device) for it in rows[1:4])
        self.rejoin(done.unsqueeze(0), begins.unsqueeze(0), cursor, [lane])
        if num_rows := len(done):
            oldest = cursor - num_rows
            slot = torch.tensor([self.ring.slots_at(oldest, lane)], device=self.device)
            # Keep the true first step of an episode that has lost rows, so that it stays incomplete.
            self.ring.begin(slot, oldest - before[:1])
        if not rows.is_open:
            self.end_episodes([lane])

    def restart(self, kept: Kept) -> None:
        """Removes all rows except those described by `newest`."""
        self.num_restarts += 1
        for tensor in self.ring.tensors.values():
            tensor.zero_()
        for lane, rows in enumerate(kept.lanes):
            self._put_rows(lane, rows, len(rows.slots))

    def moved(self, spare_steps: int) -> EpisodeIndex:
        """Returns a CPU index of the same rows, in a ring with `spare_steps`.

        Returns this index itself if it already fits. With spare steps, a lane whose oldest episode would
        have begun before step 0 is shifted to later steps.
        """
        if spare_steps == self.spare_steps and self._on_host:
            return self
        other = EpisodeIndex(self.capacity, self.num_envs, spare_steps=spare_steps)
        for lane, rows in enumerate(self._last_rows(self.steps_per_lane)):
            cursor, tail = self.host_steps.item(lane), self.host_tails.item(lane)
            # Evicted rows of the oldest episode need steps of at least 0 too.
            if tail < spare_steps and (tail < rows.before[:1]).any():
                cursor += other.ring_steps
            other._put_rows(lane, rows, cursor)
        return other

    # State

    def validate(self) -> None:
        """Checks every invariant, in a pass over all rows.

        Raises:
            RuntimeError: an invariant is broken; the message names the lane and the step.
        """
        check_invariants(self)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies of all tensors of the index."""
        return {name: tensor.clone() for name, tensor in self.ring.tensors.items()}

    def read_state(self, state_dict: Any) -> EpisodeIndex:
        """Builds a CPU index from a saved state, and validates it in a pass over its rows.

        It has as many spare steps as the saved one.

        Raises:
            KeyError, TypeError, ValueError: as `check_state`.
        """
        spare = self.spare_steps
        if isinstance(state_dict, Mapping) and isinstance(
            episode := state_dict.get("episode"), torch.Tensor
        ):
            found = episode.numel() // self.num_envs - self.steps_per_lane
            spare = found if found >= 0 else spare
            self._check_size(state_dict)
        read = EpisodeIndex(self.capacity, self.num_envs, spare_steps=spare)
        tables = read.ring.tensors
        saved = SavedState(state_dict, "the saved episode index", [*tables])
        for name, table in tables.items():
            hint = "make the storage with the storage_size and num_envs of the one that was saved"
            tensor = saved.tensor(name, table.dtype, table.shape, hint)
            least, most = -1, self.capacity - 1 if name == "episode" else _MOST_STEPS
            saved.within(name, -_MOST_STEPS if name == "spans" else least, most, hint)
            table.copy_(tensor)
        try:
            read.validate()
        except RuntimeError as error:
            raise ValueError(
                f"the saved episode index is damaged: {error} Nothing was changed."
            ) from error
        return read

    def _check_size(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError if a saved state is of an index of another size or number of lanes."""
        spans, lanes = state.get("spans"), state.get("lanes")
        if not (isinstance(spans, torch.Tensor) and isinstance(lanes, torch.Tensor)):
            return
        if spans.ndim != 2 or lanes.ndim != 2:
            return
        size, num_envs = len(spans) - 1, len(lanes)
        if (size, num_envs) != (self.capacity, self.num_envs):
            raise ValueError(
                f"the saved storage has {size} slots for num_envs={num_envs}, and this one "
                f"{self.capacity} for num_envs={self.num_envs}: make the storage with the storage_size "
                "and num_envs of the one that was saved. Nothing was changed."
            )

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Loads a state that was checked."""
        read = self.read_state(state).moved(self.spare_steps)
        self.num_restarts += 1
        for name, tensor in self.ring.tensors.items():
            tensor.copy_(read.ring.tensors[name])
        self.host_steps[:] = self.cursors.cpu().numpy()
        self.host_tails[:] = self.tails.cpu().numpy()

    def share_memory_(self) -> EpisodeIndex:
        """Moves the tables to shared memory; processes that this index is sent to share them."""
        self.ring.share_memory_()
        if self._on_host:
            # Cached views of the old memory.
            self.__dict__.pop("host_steps", None)
            self.__dict__.pop("host_tails", None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            self.share_memory_()
        state = self.__dict__.copy()
        if self._on_host:
            # Views would be pickled as copies.
            state.pop("host_steps", None)
            state.pop("host_tails", None)
        return state

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rows={len(self)}/{self.capacity}, num_envs={self.num_envs}, "
            f"device={self.device})"
        )
