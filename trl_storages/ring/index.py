"""Which rows of the ring belong to one episode, kept up to date in O(1) per written step.

Letters: T live steps per lane at most, R >= T ring steps per lane, E lanes (environments), B any shape of
slots.

A lane is the stream of one environment. The ring is time-major: step s of lane l lives in slot
`(s % R) * E + l`, and each lane has a cursor of its own, so a lane may skip a step. The live rows of a
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
from trl_storages.kernels.block import Block
from trl_storages.kernels.ring_tables import CURSOR
from trl_storages.ring.answers import EpisodeAnswers
from trl_storages.ring.invariants import check_invariants
from trl_storages.ring.naming import Lanes, named_lanes
from trl_storages.saved import SavedPart, SavedState
from trl_storages.signatures import shown

if TYPE_CHECKING:
    from trl_storages.kernels.device import NewRows, RowTable

__all__ = ["EpisodeIndex", "Kept", "LaneRows", "episodes_of", "known_episodes"]

_MOST_STEPS = 2**62
_NO_PLACES = np.zeros((0, 2), np.int64)


def episodes_of(storage: Any) -> EpisodeIndex:
    """Returns the episode index that an `EpisodeWriter` keeps on `storage`.

    Raises:
        RuntimeError: no `EpisodeWriter` writes to this storage.
    """
    index = known_episodes(storage)
    if index is None:
        raise RuntimeError(
            f"{type(storage).__name__} has no episode index: its rows must be written by an "
            "EpisodeWriter; pass writer=EpisodeWriter(num_envs) to the replay buffer."
        )
    return index


def known_episodes(storage: Any) -> EpisodeIndex | None:
    """Returns the same, None if no `EpisodeWriter` writes to this storage."""
    found: EpisodeIndex | None = getattr(storage, "episodes", None)
    return found


class LaneRows(NamedTuple):
    """The last n rows of a lane, and what is known of them."""

    slots: torch.Tensor
    """`[n]` int64, where they lie."""
    done: torch.Tensor
    """`[n]` bool, which end their episodes."""
    begins: torch.Tensor
    """`[n]` bool, which begin one, or are the first of theirs that survive."""
    before: torch.Tensor
    """`[n]` int64, how many rows of its episode there were before each."""
    is_open: bool
    """Whether the next row of the lane continues the episode of the last one."""


class Kept(NamedTuple):
    """The rows that are kept when all others are forgotten."""

    old: torch.Tensor
    """`[n]` int64 slots where they lie."""
    new: torch.Tensor
    """`[n]` int64 slots where they are to lie."""
    lanes: list[LaneRows]
    """The same, lane by lane."""


class EpisodeIndex(SavedPart, EpisodeAnswers):
    """Knows for every slot of a ring how much of its own episode lies before and after it.

    An episode ends where `done` is true and is cut where the next row of the lane belongs to another
    trajectory. A cut or unfinished episode is a correct, shorter segment. Queries run on `device`
    without synchronising with the host, and cost the same however many rows are stored.

    Args:
        capacity: live rows at most; rounded down to a multiple of `num_envs`.
        num_envs: number of lanes E.
        device: where the index lives and answers.
        spare_steps: R - T. A write of so many steps goes to slots that hold no live row.

    Raises:
        ValueError: `num_envs` is below 1, `capacity` below `num_envs` or `spare_steps` below 0.

    >>> index = EpisodeIndex(8)
    >>> index.append(torch.tensor([[False, False, True, False]])).tolist()
    [[0, 1, 2, 3]]
    >>> index.ahead(torch.arange(4)).tolist(), index.behind(torch.arange(4)).tolist()
    ([2, 1, 0, 0], [0, 1, 2, 0])
    """

    # Lanes and slots

    def lane_ids(self, lanes: Lanes = None) -> torch.Tensor:
        """Returns the lanes that `lanes` names, checked on the host.

        Args:
            lanes: distinct numbers as a sequence or tensor, or a bool mask `[E]`; None is all.

        Returns:
            `[L]` int64.

        Raises:
            ValueError: `lanes` is something else, or names an unknown lane or one twice.
        """
        if lanes is None:
            return self._lane_ids
        return torch.tensor(self.named_lanes(lanes), device=self.device)

    def named_lanes(self, lanes: Lanes = None) -> Sequence[int]:
        """Returns the numbers of the lanes that `lanes` names, as `lane_ids` does."""
        return named_lanes(lanes, self.num_envs)

    def next_slots(self, num_steps: int, lanes: Lanes = None) -> torch.Tensor:
        """Returns the slots that the next `num_steps` steps of the lanes will take.

        Args:
            num_steps: S.
            lanes: the L lanes that are written; None is all of them.

        Returns:
            `[L, S]` int64 slots. Of more than T steps only the last T are kept; the others are given
            slot -1.
        """
        num_steps = arguments.integer("num_steps", num_steps)
        return self.ring.next_slots(self.lane_ids(lanes), num_steps)

    def newest_slot(self, lanes: Lanes = None) -> int:
        """Returns the slot of the newest row of the last one of `lanes`, without asking the device."""
        lane = self.num_envs - 1 if lanes is None else self.named_lanes(lanes)[-1]
        found: int = (self.host_steps.item(lane) - 1) % self.ring_steps * self.num_envs + lane
        return found

    def newest_slots(self, lanes: Sequence[int] | None = None) -> torch.Tensor:
        """Returns the slots `[L]` of the newest rows of lanes that are named; None is all."""
        lane = np.arange(self.num_envs) if lanes is None else np.array(lanes)
        slots = (self.host_steps[lane] - 1) % self.ring_steps * self.num_envs + lane
        return torch.from_numpy(slots).to(self.device)

    def slots_since(self, num_steps: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the surviving rows that were written after so many steps.

        Args:
            num_steps: `[E]` int64 on the host, a former `num_steps_written`.

        Returns:
            int64 slots `[n]`, lane by lane, the oldest row first.
        """
        tails, cursors = self.host_tails.tolist(), self.host_steps.tolist()
        steps = [
            torch.arange(max(before, tail), cursor)
            for before, tail, cursor in zip(num_steps.tolist(), tails, cursors, strict=True)
        ]
        slots = [step % self.ring_steps * self.num_envs + at for at, step in enumerate(steps)]
        return torch.cat(slots).to(self.device)

    # Writing

    def append(
        self, done: torch.Tensor, cut: torch.Tensor | None = None, lanes: Lanes = None
    ) -> torch.Tensor:
        """Takes S further steps of L lanes.

        Args:
            done: `[L, S]` bool, or `[L]` for one step: the episode ends with this row.
            cut: bool of the same shape: this row does not continue the row before it in its lane.
            lanes: the L distinct lanes that are written; None is all of them.

        Returns:
            int64 slots of the shape of `done`, as `next_slots` named them.

        Raises:
            ValueError: `done` has another shape than the lanes ask for, or a lane is unknown or named
                twice. The index is unchanged then.
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
        """Does what `append` does, for flags `[L, S]` that were checked."""
        done = done.to(self.device).contiguous()
        rows = backend(self.device).NewRows([], _NO_PLACES, done.numel(), 0, done, self.device)
        if cut is not None:
            cut = cut.to(self.device).contiguous()
        named = None if lanes is None else self.named_lanes(lanes)
        slots: torch.Tensor = self.write(rows, Block(done.shape[1], named, cut=cut))  # type: ignore[assignment]
        return slots.view(done.shape)

    def write(
        self,
        rows: NewRows,
        block: Block,
        table: RowTable | None = None,
        slots: torch.Tensor | None = None,
        pairs: np.ndarray = _NO_PLACES,
    ) -> torch.Tensor | None:
        """Takes steps of lanes that are named, and copies their rows; see `kernels.host.Ring.append`."""
        if not self._on_host:
            self.host_steps[block.which] += block.num_steps
            np.maximum(self.host_tails, self.host_steps - self.steps_per_lane, out=self.host_tails)
        return self.ring.append(rows, block, table, slots, pairs)

    def rejoin(
        self, done: torch.Tensor, begins: torch.Tensor, cursor: int, lanes: Lanes = None
    ) -> None:
        """Replaces what is known of lanes by their surviving rows, after steps that went unseen.

        Args:
            done: `[L, S]` bool, of the last S steps of the lanes: the episode ends with this row. The
                last T of them survive.
            begins: `[L, S]` bool: it begins with this row. Where that of the first row is not among
                these, the episode has lost rows.
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
            self.ring.begin(first[~begins[:, : oldest + 1].any(1).to(self.device)], -1)

    def evict(self, tails: np.ndarray | torch.Tensor | Sequence[int]) -> None:
        """Evicts the rows before a step of each lane; steps never start again.

        Args:
            tails: `[E]` int64 on the host, the first step of each lane that stays. Before the tail it
                evicts nothing, beyond the cursor all rows there are; a lane without a row begins an
                episode with its next one.
        """
        tails = np.clip(np.asarray(tails, np.int64), self.host_tails, self.host_steps)
        self.ring.evict(torch.from_numpy(tails))
        self.host_tails[:] = tails

    def end_episodes(self, lanes: Lanes = None) -> None:
        """Cuts the running episode of the lanes: their next row begins another one."""
        self.ring.is_open[self.lane_ids(lanes)] = 0

    def counters(self) -> tuple[Any, tuple[np.ndarray, np.ndarray] | None]:
        """Returns copies of all that a write of steps goes on from."""
        on_host = None if self._on_host else (self.host_steps.copy(), self.host_tails.copy())
        return self.ring.counters(), on_host

    def recount(self, counters: tuple[Any, tuple[np.ndarray, np.ndarray] | None]) -> None:
        """Puts `counters` back: the steps that were taken since can be taken once more."""
        lanes, on_host = counters
        self.ring.recount(lanes)
        if on_host is not None:
            self.host_steps[:], self.host_tails[:] = on_host

    def slots_after(
        self, counters: tuple[Any, tuple[np.ndarray, np.ndarray] | None]
    ) -> torch.Tensor:
        """Returns the slots of the surviving rows that were written since; see `slots_since`."""
        lanes, on_host = counters
        return self.slots_since(
            torch.as_tensor(lanes[:, CURSOR] if on_host is None else on_host[0])
        )

    def clear(self, keep_steps: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Forgets every row but the last `keep_steps` of each lane, which move to the ring's start.

        Returns:
            int64 slots `[n]` where the kept rows lie, and `[n]` where the caller must move them.
        """
        kept = self.newest(keep_steps)
        self.restart(kept)
        return kept.old, kept.new

    def newest(self, keep_steps: int) -> Kept:
        """Returns what `restart` must know to keep the last `keep_steps` of each lane."""
        lanes = self._last_rows(arguments.integer("keep_steps", keep_steps))
        new = [
            torch.arange(len(rows.slots), device=self.device) * self.num_envs + lane
            for lane, rows in enumerate(lanes)
        ]
        return Kept(torch.cat([rows.slots for rows in lanes]), torch.cat(new), lanes)

    def _last_rows(self, most: int) -> list[LaneRows]:
        """Returns what is known of the rows of each lane, at most so many."""
        lanes, is_open = [], self.is_open.tolist()
        bounds = zip(self.host_tails.tolist(), self.host_steps.tolist(), strict=True)
        for lane, (tail, cursor) in enumerate(bounds):
            step = torch.arange(max(cursor - most, tail), cursor, device=self.device)
            slots = step % self.ring_steps * self.num_envs + lane
            before, begins = step - self.ring.span(slots)[:, 0], self.behind(slots) == 0
            lanes.append(LaneRows(slots, self.is_end(slots), begins, before, is_open[lane]))
        return lanes

    def _put_rows(self, lane: int, rows: LaneRows, cursor: int) -> None:
        """Replaces what is known of a lane by its last rows, of which the newest is before a cursor."""
        done, begins, before = (it.to(self.device) for it in rows[1:4])
        self.rejoin(done.unsqueeze(0), begins.unsqueeze(0), cursor, [lane])
        if num_rows := len(done):
            oldest = cursor - num_rows
            slot = oldest % self.ring_steps * self.num_envs + lane
            # An episode that lost its beginning has lost it for good.
            self.ring.begin(torch.tensor([slot], device=self.device), oldest - before[:1])
        if not rows.is_open:
            self.end_episodes([lane])

    def restart(self, kept: Kept) -> None:
        """Forgets every row but those that `newest` named."""
        for tensor in self.ring.tensors.values():
            tensor.zero_()
        for lane, rows in enumerate(kept.lanes):
            self._put_rows(lane, rows, len(rows.slots))

    def moved(self, spare_steps: int) -> EpisodeIndex:
        """Returns an index on the CPU of the same rows, in a ring of so many spare steps.

        It is this one where these are as many already. Lanes whose oldest episode began before step 0
        go on at later steps if there are spare ones, which are then those before the oldest row.
        """
        if spare_steps == self.spare_steps and self._on_host:
            return self
        other = EpisodeIndex(self.capacity, self.num_envs, spare_steps=spare_steps)
        for lane, rows in enumerate(self._last_rows(self.steps_per_lane)):
            cursor, tail = self.host_steps.item(lane), self.host_tails.item(lane)
            # What came before the oldest row must have steps as well.
            if tail < spare_steps and (tail < rows.before[:1]).any():
                cursor += other.ring_steps
            other._put_rows(lane, rows, cursor)
        return other

    # The whole of it

    def validate(self) -> None:
        """Checks every invariant, walking all rows.

        Raises:
            RuntimeError: an invariant is broken; the message names the lane and the step.
        """
        check_invariants(self)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies of all tensors of the index."""
        return {name: tensor.clone() for name, tensor in self.ring.tensors.items()}

    def check_state_dict(self, state_dict: Any) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            KeyError, TypeError, ValueError: it is that of an index of another size or number of
                lanes, or damaged.
        """
        self.read_state(state_dict)

    def read_state(self, state_dict: Any) -> EpisodeIndex:
        """Returns an index on the CPU that a saved state describes. Walks all rows of it.

        It has as many spare steps as the one that was saved.

        Raises:
            KeyError, TypeError, ValueError: as `check_state_dict`.
        """
        spare = self.spare_steps
        if isinstance(state_dict, Mapping) and isinstance(
            episode := state_dict.get("episode"), torch.Tensor
        ):
            found = episode.numel() // self.num_envs - self.steps_per_lane
            spare = found if found >= 0 else spare
        read = EpisodeIndex(self.capacity, self.num_envs, spare_steps=spare)
        tables = read.ring.tensors
        saved = SavedState(state_dict, "the saved episode index", [*tables])
        for name, table in tables.items():
            hint = "make the storage with the storage_size and num_envs of the one that was saved"
            tensor = saved.tensor(name, table.dtype, table.shape, hint)
            least, most = -1, self.capacity - 1 if name == "episode" else _MOST_STEPS
            saved.within(name, -_MOST_STEPS if name == "spans" else least, most)
            table.copy_(tensor)
        try:
            read.validate()
        except RuntimeError as error:
            raise ValueError(
                f"the saved episode index is damaged: {error} Nothing was changed."
            ) from error
        return read

    def take_state(self, state: dict[str, Any], *, progress: bool = False) -> None:
        """Takes over a state that was checked."""
        read = self.read_state(state).moved(self.spare_steps)
        for name, tensor in self.ring.tensors.items():
            tensor.copy_(read.ring.tensors[name])
        self.host_steps[:] = self.cursors.cpu().numpy()
        self.host_tails[:] = self.tails.cpu().numpy()

    def share_memory_(self) -> EpisodeIndex:
        """Moves the tables to memory that other processes see, when they get this index."""
        self.ring.share_memory_()
        if self._on_host:
            # Views of where they were.
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

    @shown
    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rows={len(self)}/{self.capacity}, num_envs={self.num_envs}, "
            f"device={self.device})"
        )
