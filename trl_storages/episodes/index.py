"""Which rows of the ring belong to one episode, kept up to date in O(1) per written step.

Letters: T steps per lane, E lanes (environments), M = T * E slots, B any shape of slots.

Every slot names a row of the episode table, and the table holds the first and the last surviving slot of
each episode. All rows of an episode lie E slots apart on the ring, so distances are differences of slots
modulo M: no step counter is compared, nothing overflows, and overwriting touches one table entry per
lane.
"""

from __future__ import annotations

from functools import cached_property
from multiprocessing.context import get_spawning_popen
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages import arguments
from trl_storages.episodes.host import HostTables
from trl_storages.episodes.invariants import check_invariants
from trl_storages.episodes.ring import Lanes, Ring
from trl_storages.episodes.tables import Array, Tables, module_of, put, take
from trl_storages.episodes.whole import draw_whole_episodes
from trl_storages.functional.draws import random_below

__all__ = ["EpisodeIndex", "episodes_of"]

_LONG_AGO = -(2**62)
# From here on all stretches at once are faster than one after another.
_MANY_STRETCHES = 24
# Attributes that see tables on the CPU where they are, and are made anew where these move.
_VIEWS = ("_arrays", "host_steps", "host")
_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_}


def episodes_of(storage: Any) -> EpisodeIndex:
    """Returns the episode index that an `EpisodeWriter` keeps on `storage`.

    Raises:
        RuntimeError: no `EpisodeWriter` writes to this storage.
    """
    index = getattr(storage, "episodes", None)
    if index is None:
        raise RuntimeError(
            f"{type(storage).__name__} has no episode index: its rows must be written by an "
            "EpisodeWriter; pass writer=EpisodeWriter(num_envs) to the replay buffer."
        )
    return index


class EpisodeIndex(Ring):
    """Knows for every slot of a ring how much of its own episode lies before and after it.

    An episode ends where `done` is true and is cut where the next row of the lane belongs to another
    trajectory. A cut or unfinished episode is a correct, shorter stretch. Queries run on `device`
    without synchronising with the host, and cost the same however many rows are stored.

    Args:
        capacity: slots of the ring; rounded down to a multiple of `num_envs`.
        num_envs: number of lanes E.
        device: where the index lives and answers.

    Raises:
        ValueError: `num_envs` is below 1 or `capacity` below `num_envs`.

    >>> index = EpisodeIndex(8)
    >>> index.append(torch.tensor([[False, False, True, False]])).tolist()
    [[0, 1, 2, 3]]
    >>> index.ahead(torch.arange(4)).tolist(), index.behind(torch.arange(4)).tolist()
    ([2, 1, 0, 0], [0, 1, 2, 0])
    """

    def __init__(
        self, capacity: int, num_envs: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(capacity, num_envs, device)
        num_envs = self.num_envs

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            if self.device.type != "cpu":
                return torch.zeros(size, dtype=dtype, device=self.device)
            # Unlike torch's, NumPy's zeros take no memory before they are written to, and there are
            # far fewer episodes than there could be.
            return torch.from_numpy(np.zeros(size, _NUMPY_DTYPES[dtype]))

        # 4 bytes a slot while slot numbers fit.
        slot_dtype = torch.int32 if self.capacity < 2**31 else torch.int64
        # The table of episodes has one entry more than there can be live ones: masked writes that
        # must change nothing go there, which spares a shape that depends on the data.
        self._void = self.capacity
        self._tables = Tables(
            episode=zeros(self.capacity, dtype=slot_dtype),
            first=zeros(self.capacity + 1, dtype=slot_dtype),
            last=zeros(self.capacity + 1, dtype=slot_dtype),
            first_step=zeros(self.capacity + 1),
            finished=zeros(self.capacity + 1, dtype=torch.bool),
            begun=zeros(num_envs),
            open=zeros(num_envs, dtype=torch.bool),
            cursors=self.cursors,
            num_rows=self.num_rows,
        )

    @cached_property
    def _arrays(self) -> Tables:
        """The tables as what they are written with: NumPy's view of them on the CPU."""
        return Tables(*map(self.own, self._tables))

    @cached_property
    def host(self) -> HostTables:
        """The same tables on the CPU, for the writes of every step."""
        return HostTables(self._arrays, self.num_envs, self.steps_per_lane)

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
        slots = self.next_slots(num_steps, lanes)
        cut = None if cut is None else cut.view(num_lanes, num_steps)
        self.advance(done.view(num_lanes, num_steps), cut, lanes)
        return slots.view(shape)

    def advance(
        self, done: torch.Tensor, cut: torch.Tensor | None = None, lanes: Lanes = None
    ) -> None:
        """Does what `append` does with `[L, S]` flags that fit, for whoever knows the slots."""
        ended, parted = self.own(done), None if cut is None else self.own(cut)
        if self._xp is not np or not self._advance_on_host(ended, parted, lanes):
            self._advance(ended, parted, lanes)

    def _advance_on_host(self, done: np.ndarray, cut: np.ndarray | None, lanes: Lanes) -> bool:
        """Takes the steps if they are of the usual kinds, and returns whether they were."""
        num_lanes, num_steps = done.shape
        fits = num_steps <= self.steps_per_lane
        if self.num_envs == 1 and fits and cut is None and not np.count_nonzero(done[:, :-1]):
            self.host.append_stretch(0, num_steps, done=done.item(-1))
            return True
        if num_steps == 1 < num_lanes and lanes is None and self._was_in_step:
            self.host.append_to_all(done[:, 0], None if cut is None else cut[:, 0])
            return True
        if num_steps == 1 < num_lanes and cut is None:
            self.host.append_to(np.asarray(self.named_lanes(lanes)), done[:, 0])
            return True
        most = num_lanes + np.count_nonzero(done)
        most += 0 if cut is None else np.count_nonzero(cut)
        if not fits or most > _MANY_STRETCHES:
            return False
        for at, lane in enumerate(self.named_lanes(lanes)):
            self.host.append_steps(lane, done[at], None if cut is None else cut[at])
        return True

    def _advance(self, done: Array, cut: Array | None, lanes: Lanes) -> None:
        """Takes any steps, with tensor operations only.

        Args:
            done: `[L, S]` bool.
            cut: `[L, S]` bool, or None.
            lanes: the L lanes.
        """
        xp, table = self._xp, self._arrays
        lane, num_steps = self.own(self.lane_ids(lanes))[:, None], done.shape[1]
        kept = min(num_steps, self.steps_per_lane)

        # A row begins an episode if the row before it ended one, or if it is cut off from it.
        begins = xp.concatenate([~table.open[lane], done[:, :-1]], 1)
        if cut is not None:
            begins |= cut
        number = table.begun[lane] + begins.cumsum(1) - 1
        step = table.cursors[lane] + self._range(num_steps, xp)
        first_step = step
        if kept < num_steps:
            # Only the newest T steps find room. The first of them opens its episode's entry even
            # when the episode began earlier: a first step that is gone marks it as not whole.
            first_step = xp.where(begins, step, step - 1)[:, -kept:]
            begins[:, -kept] = True
            begins, done = begins[:, -kept:], done[:, -kept:]
            number, step = number[:, -kept:], step[:, -kept:]
        # Whether a row is the last of its episode among those written now.
        last = xp.ones_like(begins)
        last[:, :-1] = begins[:, 1:]

        slots = step % self.steps_per_lane * self.num_envs + lane
        # Live episodes of a lane bear consecutive numbers and are at most T, so T entries suffice.
        entry = lane * self.steps_per_lane + number % self.steps_per_lane
        opened = xp.where(begins, entry, self._void)
        newest = xp.where(last, entry, self._void)
        put(table.episode, slots, entry)
        put(table.first, opened, slots)
        put(table.first_step, opened, first_step)
        put(table.last, newest, slots)
        put(table.finished, newest, done)
        put(table.begun, lane, number[:, -1:] + 1)
        put(table.open, lane, ~done[:, -1:])
        table.cursors[lane] += num_steps
        if self._xp is not np:
            self.host_steps[self.named_lanes(lanes)] += num_steps
        self._behead(lane)

    def _behead(self, lane: Array) -> None:
        """Moves the first slot of each lane's oldest surviving episode to what survives of it."""
        xp, table = self._xp, self._arrays
        oldest = table.cursors[lane] - self.steps_per_lane
        slots = oldest % self.steps_per_lane * self.num_envs + lane
        # While a lane is not full its oldest row is step 0, and nothing was overwritten.
        put(table.first, xp.where(oldest > 0, table.episode[slots], self._void), slots)
        table.num_rows[...] = table.cursors.clip(max=self.steps_per_lane).sum()

    # Writing happens in NumPy where the tables lie on the CPU; these two and `own` are all that
    # differs.

    @property
    def _xp(self) -> ModuleType:
        return np if self.device.type == "cpu" else torch

    def _range(self, stop: int, xp: ModuleType) -> Array:
        return np.arange(stop) if xp is np else torch.arange(stop, device=self.device)

    def rejoin(
        self, done: torch.Tensor, begins: torch.Tensor, cursor: int, lanes: Lanes = None
    ) -> None:
        """Replaces what is known of lanes by their surviving rows, after steps that went unseen.

        Args:
            done: `[L, S]` bool, of the last S steps of the lanes: the episode ends with this row.
            begins: `[L, S]` bool: it begins with this row. Where that of the first row is not among
                these, the episode has lost rows.
            cursor: steps written to each of the lanes; S of them survive.
            lanes: the L distinct lanes; None is all of them.
        """
        lane, num_steps = self.lane_ids(lanes), done.shape[1]
        self._tables.cursors[lane] = cursor - num_steps
        self.host_steps[lane.cpu().numpy()] = cursor - num_steps
        self._tables.open[lane] = False
        first = self.next_slots(num_steps, lane)[:, 0]
        # At once: what an unseen step left where these rows go must not be taken for an episode.
        self._advance(self.own(done), self.own(begins), lane)
        torn = self._tables.episode[first].long()[~begins[:, 0].to(self.device)]
        self._tables.first_step[torn] = _LONG_AGO

    @property
    def is_open(self) -> torch.Tensor:
        """`[E]` bool, whether the next row of the lane continues its last episode."""
        return self._tables.open

    def end_episodes(self, lanes: Lanes = None) -> None:
        """Cuts the running episode of the lanes: their next row begins another one."""
        self._tables.open[self.lane_ids(lanes)] = False

    def clear(self, keep_steps: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Forgets every row but the last `keep_steps` of each lane, which move to the ring's start.

        Returns:
            int64 slots `[n]` where the kept rows lie, and `[n]` where the caller must move them.
        """
        keep_steps = arguments.integer("keep_steps", keep_steps)
        kept = []
        for lane, cursor in enumerate(self.host_steps.tolist()):
            steps = range(max(cursor - min(keep_steps, self.steps_per_lane), 0), cursor)
            slots = torch.tensor([*steps], dtype=torch.int64, device=self.device)
            slots = slots % self.steps_per_lane * self.num_envs + lane
            behind, ahead = self.extent(slots)
            done = self.is_finished(slots) & (ahead == 0)
            torn = not bool((self.is_whole(slots) & (behind == 0))[:1].all())
            kept.append((slots, done, behind == 0, torn, self._tables.open[lane].clone()))
        for tensor in self._tables:
            tensor.zero_()
        self.host_steps.fill(0)
        for lane, (slots, done, cut, torn, is_open) in enumerate(kept):
            if len(slots):
                self.append(done.unsqueeze(0), cut.unsqueeze(0), [lane])
                self._tables.open[lane] = is_open
                if torn:
                    # The episode of the first kept row lost its beginning, for good.
                    self._tables.first_step[self._tables.episode[lane].long()] = _LONG_AGO
        old = torch.cat([slots for slots, *_ in kept])
        new = [torch.arange(len(slots)) * self.num_envs + at for at, (slots, *_) in enumerate(kept)]
        return old, torch.cat(new).to(self.device)

    # Questions about slots. On the CPU these four take and return NumPy arrays as well, whose small
    # operations cost a third of torch's; see `own`.

    def _tables_for(self, slots: Array) -> Tables:
        arguments.slots("slots", slots)
        return self._arrays if isinstance(slots, np.ndarray) else self._tables

    def extent(self, slots: Array) -> tuple[Array, Array]:
        """Returns how many surviving rows of the same episode lie before and after each slot.

        Args:
            slots: int64 slots of live rows, any shape B.

        Returns:
            two int64 tensors of shape B.
        """
        tables = self._tables_for(slots)
        entry = take(tables.episode, slots)
        behind = self._steps_between(take(tables.first, entry), slots)
        return behind, self._steps_between(slots, take(tables.last, entry))

    def _steps_between(self, start: Array, stop: Array) -> Array:
        """Returns how many steps `stop` comes after `start` in the same lane."""
        # Neighbours of a lane lie E slots apart.
        distance = (stop - start) % self.capacity
        return distance if self.num_envs == 1 else distance // self.num_envs

    def behind(self, slots: Array) -> Array:
        """Returns how many surviving rows of the same episode lie before each slot, int64."""
        tables = self._tables_for(slots)
        return self._steps_between(take(tables.first, take(tables.episode, slots)), slots)

    def ahead(self, slots: Array) -> Array:
        """Returns how many rows of the same episode lie after each slot, int64."""
        tables = self._tables_for(slots)
        return self._steps_between(slots, take(tables.last, take(tables.episode, slots)))

    def windows(self, slots: Array, num_rows: int) -> tuple[Array, Array]:
        """Finds each row and those that follow it in its episode.

        Args:
            slots: int64 slots of live rows, `[B]`.
            num_rows: n, at least 1.

        Returns:
            `[n, B]` int64 slots, the row itself first; where the episode ends before, its last row
            stands for the rest. And `[B]` int64: how many different rows there are, from 1 to n.
        """
        xp, num_rows = module_of(slots), arguments.integer("num_rows", num_rows, at_least=1)
        step = xp.minimum(self.ahead(slots), self._range(num_rows, xp)[:, None])
        return self.shift(slots, step), step[-1] + 1

    def episode_id(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns an int64 number per slot, equal for rows of one live episode and no others."""
        return take(self._tables.episode, arguments.slots("slots", slots)).long()

    def is_end(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether each row ended its episode by `done`, bool."""
        return self.is_finished(slots) & (self.ahead(slots) == 0)

    def is_finished(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether the slot's episode was ended by `done`, bool."""
        arguments.slots("slots", slots)
        return take(self._tables.finished, take(self._tables.episode, slots))

    def is_whole(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns whether no row of the slot's episode has been overwritten, bool."""
        arguments.slots("slots", slots)
        first_step = take(self._tables.first_step, take(self._tables.episode, slots))
        return first_step >= take(self.cursors, slots % self.num_envs) - self.steps_per_lane

    # Age

    def random_episodes(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws `n` episodes uniformly with replacement: finished ones of which no row is lost.

        Returns:
            `[n]` int64 slots of their first rows.

        Raises:
            RuntimeError: there is no such episode.
        """
        n = arguments.integer("n", n)
        arguments.generator("generator", generator)
        drawn = draw_whole_episodes(self, self._tables, n, generator)
        if drawn is not None:
            return drawn
        first = self._first_of_whole_episodes()
        if not len(first):
            raise RuntimeError(
                "no finished episode is stored whole: write until one ends, or make the storage larger "
                "than an episode."
            )
        return first[random_below(len(first), n, generator=generator, device=self.device)]

    def has_whole_episode(self) -> bool:
        """Returns whether there is an episode that `random_episodes` can draw."""
        # Looking for one at random is soonest over, unless there is none or hardly any.
        generator = torch.Generator(self.device)
        if draw_whole_episodes(self, self._tables, 1, generator) is not None:
            return True
        return len(self._first_of_whole_episodes()) > 0

    def _first_of_whole_episodes(self) -> torch.Tensor:
        episodes = self.episodes()
        return episodes["first"][episodes["finished"] & episodes["whole"]]

    # The whole of it

    def episodes(self) -> TensorDict:
        """Lists the live episodes, lane by lane, the oldest first. Costs a pass over the rows.

        Returns:
            TensorDict `[n]` with int64 `first` (slot), `length` (surviving rows), `lane`, and bool
            `finished` and `whole`.
        """
        live = self.slots_by_age(torch.arange(len(self), device=self.device))
        is_first = self.behind(live) == 0
        first = live[is_first]
        lane, step = first % self.num_envs, self.steps(first)
        order = torch.argsort(step, stable=True)
        order = order[torch.argsort(lane[order], stable=True)]
        first = first[order]
        return TensorDict(
            {
                "first": first,
                "length": self.ahead(first) + 1,
                "lane": lane[order],
                "finished": self.is_finished(first),
                "whole": self.is_whole(first),
            },
            batch_size=[first.shape[0]],
        )

    def validate(self) -> None:
        """Checks every invariant, walking all rows.

        Raises:
            RuntimeError: an invariant is broken; the message names the lane and the step.
        """
        check_invariants(self)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies of all tensors of the index."""
        return {name: tensor.clone() for name, tensor in self._tables._asdict().items()}

    def check_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Checks that `load_state_dict` can take a state, without changing anything.

        Raises:
            ValueError: the state is that of an index of another size or number of lanes.
        """
        for name, tensor in self._tables._asdict().items():
            if name not in state_dict or state_dict[name].shape != tensor.shape:
                got = list(state_dict[name].shape) if name in state_dict else "nothing"
                raise ValueError(
                    f"the saved index must have {name} of shape {list(tensor.shape)}, got {got}: "
                    "capacity and num_envs must be those it was saved with."
                )

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: the state is that of an index of another size or number of lanes.
        """
        self.check_state_dict(state_dict)
        for name, tensor in self._tables._asdict().items():
            tensor.copy_(state_dict[name])
        self.host_steps[:] = self.cursors.cpu().numpy()

    def share_memory_(self) -> EpisodeIndex:
        """Moves the tables to memory that other processes see, when they get this index."""
        for table in self._tables:
            table.share_memory_()
        if self._xp is np:
            for name in _VIEWS:
                self.__dict__.pop(name, None)
        return self

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            self.share_memory_()
        # Views are made again, or they would be pickled as copies.
        views = _VIEWS if self._xp is np else ()
        return {key: value for key, value in self.__dict__.items() if key not in views}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rows={len(self)}/{self.capacity}, num_envs={self.num_envs}, "
            f"device={self.device})"
        )
