"""The episode index of the lanes of a storage, on the host wherever the rows are.

Letters: E lanes (environments), T steps a lane, M entries a lane, k frames a stack, B any number of
slots, n rows of a window, S rows of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages.index import invariants
from trl_storages.kernels import CONTINUES, CURSOR, DONE, FIRST, LAST, SPLIT, TAIL, draws, entries
from trl_storages.validation import deprecated_method

__all__ = ["Changes", "EmptyError", "EpisodeIndex", "Snapshot"]

_NO_STEPS = np.empty(0)
#: A lane keeps room for this many steps more than it holds, so that a block never takes from live ones.
_LEAST_SLACK = 64


Slots = torch.Tensor | np.ndarray


def _like(slots: Slots, found: np.ndarray) -> Any:
    """Returns what was found as what was asked: an array, or a tensor."""
    return torch.from_numpy(found) if isinstance(slots, torch.Tensor) else found


class EmptyError(RuntimeError):
    """Nothing is stored yet, or any more, that could be drawn."""


class Snapshot(NamedTuple):
    """A snapshot of which steps were live, for `EpisodeIndex.since` to compare with."""

    generation: int
    lanes: np.ndarray
    """`[E, 2]` cursors and tails."""


class Changes(NamedTuple):
    """What has changed since a snapshot, as slots.

    A slot that was taken by another step is in both: go through `gone` before `new`.
    """

    gone: np.ndarray
    new: np.ndarray


class EpisodeIndex:
    """Knows for every slot which step of which episode it holds, and where its entry is.

    The steps of a lane are numbered from 0 as they are written. Step s of lane e is in *slot*
    `e T + s mod T`, which is what samplers draw, and its observation and values are in an *entry*, which
    is what rows are read from. A lane's *cursor* is the number of its next step, its *tail* that of its
    oldest live one: these two words are its whole state. An episode ends where `done` is true, and is cut
    where the next step of its lane does not belong to it. A cut or a running episode is a correct,
    shorter one.

    A write counts once its cursor is stored: every answer is about such steps. Nobody is told of new
    rows; who needs to know asks `since`.

    Args:
        capacity: the number of rows, rounded down to a multiple of `num_envs`.
        num_envs: E.
        stack: k, how many entries an observation is made of.
        depth: how many entries up to its own a step needs, to read its observation; None is k.
        max_entries: room for observations, over all lanes; None is enough for `capacity` rows whatever
            they are, of which memory is taken for those that are there.

    Raises:
        ValueError: a lane has fewer than two steps, or too few entries to write one.

    >>> index = EpisodeIndex(8)
    >>> len(index), index
    (0, EpisodeIndex(capacity=8, num_envs=1, 0 rows))
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int = 1,
        *,
        stack: int = 1,
        depth: int | None = None,
        max_entries: int | None = None,
    ) -> None:
        if num_envs < 1 or capacity < 2 * num_envs:
            raise ValueError(
                f"every environment must have room for two steps, got {capacity} for {num_envs}."
            )
        #: E, T and k.
        self.num_envs, self.steps_per_lane, self.stack = num_envs, capacity // num_envs, stack
        self.depth = depth = stack if depth is None else depth
        slack = max(self.steps_per_lane // 4, _LEAST_SLACK)
        enough = (stack + 1) * (self.steps_per_lane + slack) + depth - stack
        #: M, and whether that is enough for any rows.
        self.entries_per_lane = enough if max_entries is None else max_entries // num_envs
        self.is_roomy = self.entries_per_lane >= enough
        # A block takes at most k entries, and k + 1 more for each step. It lies behind the last step or,
        # where there is no room for it, at the lane's beginning: there it does not touch what that step
        # needs, as long as it takes half of the other entries at most.
        fitting = ((self.entries_per_lane - depth) // 2 - stack) // (stack + 1)
        if fitting < 1:
            raise ValueError(
                f"max_entries must be at least {num_envs * (4 * stack + depth + 2)}, got {max_entries}."
            )
        #: How many steps of a lane may be written at once: few enough that its last step stays, whatever
        #: becomes of the write, and that with enough entries no step is evicted early.
        self.most_steps = min(self.steps_per_lane // 2, slack - 1, fitting)
        shapes = self.table_shapes()
        self.use({name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()})

    def use(self, tables: Mapping[str, np.ndarray]) -> None:
        """Takes other arrays for the tables, of `table_shapes`, with what they say."""
        self._lanes, self._epoch = tables["lanes"], tables["epoch"]
        #: `[1]` which changes whenever who writes sets priorities of rows.
        self.num_updates: np.ndarray = self._epoch[1:]
        #: What `kernels` calls an index.
        self.tables: tuple[Any, ...] = (
            *(tables[name] for name in ("where", "episode", "ends", "spans", "lanes")),
            *(self.steps_per_lane, self.entries_per_lane, self.stack, tables["priorities"]),
            self.depth,
        )
        #: Of each slot its entry, the number of its episode modulo T + 1, and how it ends.
        self.where: np.ndarray = tables["where"]
        self.episode: np.ndarray = tables["episode"]
        self.ends: np.ndarray = tables["ends"]
        #: Their raw priorities; 0, or what can't be one, says that none was set.
        self.priorities: np.ndarray = tables["priorities"]
        #: The first and the last step of each episode, by lane and number.
        self.spans: np.ndarray = tables["spans"]
        #: `[E]` steps ever written, and the oldest live step of each lane.
        self.cursors: np.ndarray = self._lanes[:, CURSOR]
        self.tails: np.ndarray = self._lanes[:, TAIL]

    def table_shapes(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Returns the dtype and the shape of each table by name."""
        E, T = self.num_envs, self.steps_per_lane
        return {
            "where": (np.int64, (E * T,)),
            "episode": (np.int64, (E * T,)),
            "ends": (np.uint8, (E * T,)),
            "spans": (np.int64, (E, T + 1, 2)),
            "lanes": (np.int64, (E, 2)),
            "epoch": (np.int64, (2,)),
            "priorities": (np.float32, (E * T,)),
        }

    # State

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.num_envs * self.steps_per_lane

    @property
    def generation(self) -> int:
        """A number that changes whenever all rows give way at once."""
        return int(self._epoch[0])

    @property
    def fill(self) -> np.ndarray:
        """`[E]` live steps."""
        firsts, ends = self._live()
        return ends - firsts

    def __len__(self) -> int:
        return draws.num_live(self._lanes)

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a row."""
        return len(self) == self.capacity

    @property
    def is_open(self) -> np.ndarray:
        """`[E]` whether the next step of each lane goes on with the episode of its last one."""
        return (self.cursors > 0) & (self.ends[self.newest_slots()] == CONTINUES)

    def newest_slots(self) -> np.ndarray:
        """Returns the slot of the last step of each lane, `[E]`."""
        return self.slots_of(np.arange(self.num_envs), self.cursors - 1)

    def slots_of(self, lanes: Any, steps: np.ndarray) -> np.ndarray:
        """Returns the slots of some steps of lanes, `[*B]`."""
        return lanes * self.steps_per_lane + steps % self.steps_per_lane

    def end_episodes(self, lanes: Sequence[int] | np.ndarray | None = None) -> None:
        """Cuts the running episodes of some lanes, or of all: their next steps begin new ones."""
        is_open = self.is_open
        if lanes is not None:
            chosen = np.zeros(self.num_envs, bool)
            chosen[lanes] = True
            is_open &= chosen
        self.ends[self.newest_slots()[is_open]] = SPLIT

    def evict(self, keep_steps: int = 0) -> None:
        """Evicts all steps but the last `keep_steps` of each lane; those that come have other numbers."""
        if not keep_steps:
            self.end_episodes()
            self._epoch[0] += 1
        self.tails[:] = self.tails_after_evicting(keep_steps)

    def tails_after_evicting(self, keep_steps: int) -> np.ndarray:
        """Returns the oldest live steps `[E]` if all but the last `keep_steps` of each lane were gone."""
        return np.maximum(self.tails, self.cursors - keep_steps)

    def evict_to_first_slots(self) -> None:
        """Evicts all steps; those that come are in the first slots of their lanes, with other numbers."""
        self.evict()
        T, newest = self.steps_per_lane, self.where[self.newest_slots()]
        for lane in np.flatnonzero(self.cursors).tolist():
            # As if all slots up to the end of the lane had been used.
            end = -(-int(self.cursors[lane]) // T) * T
            place, ends = newest[lane, None] - lane * self.entries_per_lane, np.array([SPLIT])
            last, begins = np.array([end - 1]), np.array([True])
            self.set_lane(lane, last, place, begins, ends, first=last[0], tail=end)

    def reset(self) -> None:
        """Begins anew, without steps."""
        self._epoch[0] += 1
        self._lanes[:] = 0

    def set_lane(
        self,
        lane: int,
        steps: np.ndarray,
        places: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        *,
        first: int,
        tail: int,
    ) -> np.ndarray:
        """Makes some steps, which follow one another, the only ones of a lane; returns their slots `[N]`.

        Args:
            lane: its number.
            steps: `[N]` their numbers, N at least 1 and at most T.
            places: `[N]` their entries within the lane.
            begins: `[N]` whether each begins an episode.
            ends: `[N]` as in `kernels`.
            first: the first step of the episode of the oldest, which may be gone.
            tail: the oldest of them that is live.
        """
        slots = self.slots_of(lane, steps)
        is_first = begins.copy()
        is_first[0] = True
        firsts = steps[is_first]
        self.where[slots] = places + lane * self.entries_per_lane
        self.episode[slots], self.ends[slots] = is_first.cumsum() - 1, ends
        spans = self.spans[lane]
        spans[: len(firsts), FIRST] = firsts
        spans[: len(firsts), LAST] = np.append(firsts[1:], steps[-1] + 1) - 1
        spans[0, FIRST] = first
        self._lanes[lane] = steps[-1] + 1, tail
        return slots

    def kept(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns lane, step and slot `[N]` of live steps, and of the newest of a lane without any."""
        return invariants.kept(self.tables)

    def since(self, seen: Snapshot | None) -> tuple[Changes | None, Snapshot]:
        """Returns what has changed since, None if nothing has, and what is seen now."""
        now = Snapshot(int(self._epoch[0]), self._lanes.copy())
        before = seen or Snapshot(now.generation, np.zeros_like(now.lanes))
        began_anew = before.generation != now.generation
        if not began_anew and before.lanes.tobytes() == now.lanes.tobytes():
            return None, now
        return Changes(*draws.changes(self.tables, before.lanes, now.lanes, began_anew)), now

    def _live(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tails and the cursors `[E]` of one moment; another process may be writing."""
        cursors = self.cursors.copy()
        return np.minimum(self.tails, cursors), cursors

    # Answers: all rows as tensors, and of slots that are asked for, on the host, tensors of tensors and
    # arrays of arrays

    def live_slots(self) -> torch.Tensor:
        """Returns the slots of all rows, lane by lane, oldest first, `[len]` int64."""
        return torch.from_numpy(draws.slots_between(self.tables, *self._live()))

    def slots_by_age(self) -> torch.Tensor:
        """Returns the slots of all rows, oldest first: by how many steps of their lane came after."""
        firsts, ends = self._live()
        slots = draws.slots_between(self.tables, firsts, ends)
        age = np.concatenate([np.arange(rows, 0, -1) for rows in ends - firsts])
        return torch.from_numpy(slots[np.argsort(-age, kind="stable")])

    def check_filled(self) -> None:
        """Raises an EmptyError if there are no rows."""
        if not draws.num_live(self._lanes):
            raise EmptyError("the storage is empty: write rows with record() or extend() first.")

    def check_live(self, slots: Slots, tails: np.ndarray | None = None) -> None:
        """Raises an IndexError if a slot holds no row that is live, or was when these were the tails."""
        slots = np.asarray(slots)
        fits = (slots >= 0) & (slots < self.capacity)
        if fits.all():
            steps, oldest = self.steps_of(slots), self.tails if tails is None else tails
            fits = steps >= oldest[slots // self.steps_per_lane]
        if not fits.all():
            at = int(fits.argmin())
            raise IndexError(f"slots must hold live rows, got {int(slots[at])} at place {at}.")

    def bounds(self, slots: Slots) -> Any:
        """Returns how far it is from each row to where its episode and its lane begin and end.

        Returns:
            `[B, 4]` int64 steps, negative ones back: to the first step of its episode, which may be
            evicted, to the last one so far, and to the oldest and the newest live step of its lane.
        """
        return _like(slots, draws.bounds(self.tables, np.asarray(slots)))

    def num_after(self, slots: Slots) -> Any:
        """Returns how many rows of its episode come after each row, `[B]` int64: of the last one 0."""
        return self.bounds(slots)[:, draws.END]

    def num_before(self, slots: Slots) -> Any:
        """Returns how many rows of its episode that are still stored came before each row, `[B]`."""
        found = draws.bounds(self.tables, np.asarray(slots))
        return _like(slots, -np.maximum(found[:, draws.BEGIN], found[:, draws.OLDEST]))

    def is_done(self, slots: Slots) -> Any:
        """Returns whether each row ends its episode, `[B]` bool."""
        return _like(slots, self.ends[np.asarray(slots)] == DONE)

    def lanes_of(self, slots: Slots) -> Any:
        """Returns the lane of each row, `[B]` int64."""
        return slots // self.steps_per_lane

    def steps_of(self, slots: Slots) -> Any:
        """Returns the step of its lane that each row is, `[*B]` int64."""
        given = np.asarray(slots)
        newest = self.cursors[given // self.steps_per_lane] - 1
        return _like(slots, newest - (newest - given) % self.steps_per_lane)

    def overwritten(self, slots: np.ndarray, cursors: np.ndarray) -> np.ndarray:
        """Returns which rows gave way, `[B]` bool, such as while a reader copied them.

        Args:
            slots: `[B]` of the rows.
            cursors: `[E]` those of the moment when they were live.
        """
        stale = np.empty(len(slots), bool)
        entries.find_overwritten(self.tables, slots, cursors, stale)
        return stale

    def shift(self, slots: Slots, steps: Slots) -> Any:
        """Returns the slots `steps` later in their lanes, `[*B]`; the caller stays among live rows."""
        place = slots % self.steps_per_lane
        return slots - place + (place + steps) % self.steps_per_lane

    # Draws, in arrays

    def draw(self, noise: np.ndarray, window: int | None = None) -> np.ndarray:
        """Draws live rows uniformly, with replacement.

        Args:
            noise: `[B]` int64 random numbers of 63 bits.
            window: how many of the newest steps of each lane to draw from; None is all.

        Returns:
            `[B]` int64 slots.
        """
        slots = np.empty(len(noise), np.int64)
        window = self.steps_per_lane if window is None else window
        draws.draw(self.tables, window, noise, slots)
        return slots

    def window_of(self, count: int) -> int:
        """Returns the least w such that the newest w steps of each lane are at least `count`."""
        return draws.window_of(self.tables, count)

    def goals(
        self,
        slots: np.ndarray,
        noise: np.ndarray,
        kinds: np.ndarray,
        steps: np.ndarray | None = None,
    ) -> np.ndarray:
        """Draws the rows whose achieved goals become the new goals; see `kernels.draws.goals`."""
        found, steps = np.empty(len(slots), np.int64), _NO_STEPS if steps is None else steps
        draws.goals(self.tables, slots, noise, kinds, steps, found)
        return found

    def windows(self, slots: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns each row with those that follow it in its episode.

        Returns:
            `[n, B]` int64 slots, the last row of the episode repeated; and `[B]` int64, how many
            different rows there are.
        """
        rows, lengths = np.empty((num_rows, len(slots)), np.int64), np.empty(len(slots), np.int64)
        draws.windows(self.tables, slots, rows, lengths)
        return rows, lengths

    def sequences(
        self, slots: np.ndarray, burn_in: int, num_steps: int, boundary: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the rows around each one, `[B, S]`, which are asked for, and which begin an episode.

        See `kernels.draws.sequences`.
        """
        rows = np.empty((len(slots), num_steps), np.int64)
        valid, begins = np.empty(rows.shape, bool), np.empty(rows.shape, bool)
        how = draws.BOUNDARIES.index(boundary)
        draws.sequences(self.tables, slots, burn_in, how, rows, valid, begins)
        return rows, valid, begins

    # Episodes

    def table(self) -> TensorDict:
        """Lists the episodes, lane by lane, oldest first.

        Returns:
            TensorDict `[n]` with int64 `first` (slot), `length` (surviving rows), `lane`, and bool
            `finished` (by a done step) and `whole` (no row evicted).
        """
        names = ("first", "length", "finished", "whole", "lane")
        columns = dict(zip(names, map(torch.from_numpy, self._look_up()), strict=True))
        return TensorDict(columns, batch_size=[len(columns["lane"])])

    # Removed in 0.6.
    episodes = deprecated_method("episodes", "table")
    ahead = deprecated_method("ahead", "num_after")
    behind = deprecated_method("behind", "num_before")

    @property
    def num_episodes(self) -> int:
        """The number of episodes that have live steps."""
        return int(self._numbers(*self._live())[1].sum())

    def _numbers(self, tails: np.ndarray, cursors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of the oldest episode of each lane `[E]`, and how many there are `[E]`."""
        lanes, T = np.arange(self.num_envs), self.steps_per_lane
        oldest, newest = (self.episode[self.slots_of(lanes, it)] for it in (tails, cursors - 1))
        return oldest, np.where(cursors > tails, (newest - oldest) % (T + 1) + 1, 0)

    def random_episodes(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws `n` whole, finished episodes uniformly, with replacement.

        Returns:
            `[n]` int64 slots of their first rows.

        Raises:
            RuntimeError: there is none.
        """
        noise = np.empty(3 * n + 16, np.int64)
        torch.from_numpy(noise).random_(generator=generator)
        # Few episodes are cut, running or partly evicted: of so many enough are whole, as a rule.
        first, _, finished, whole, _ = self._look_up(noise[n:])
        usable = first[finished & whole]
        if len(usable) < n:
            first, _, finished, whole, _ = self._look_up()
            usable = first[finished & whole]
            if not len(usable):
                raise EmptyError(
                    "no finished episode is stored whole: write until one ends, or make the storage "
                    "larger than an episode."
                )
            usable = usable[noise[:n] % len(usable)]
        return torch.from_numpy(usable[:n])

    def _look_up(self, noise: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Looks up all episodes, lane by lane, oldest first; or those that random numbers `[n]` choose.

        Returns:
            slots of their first rows, numbers of rows, whether they are finished and whole, and lanes.
        """
        T, (tails, cursors) = self.steps_per_lane, self._live()
        begins = np.arange(self.num_envs) * T
        oldest, counts = self._numbers(tails, cursors)
        ends = counts.cumsum()
        total = int(ends[-1])
        rank = np.arange(total) if noise is None or not total else noise % total
        lane = ends.searchsorted(rank, side="right")
        number = rank + (oldest + counts - ends)[lane]
        span = self.spans[lane, number % (T + 1)]
        first = np.maximum(span[:, FIRST], tails[lane])
        last = np.minimum(span[:, LAST], cursors[lane] - 1)
        finished = self.ends[begins[lane] + last % T] == DONE
        return begins[lane] + first % T, last - first + 1, finished, first == span[:, FIRST], lane

    def validate(self) -> None:
        """Checks the tables against one another.

        Raises:
            RuntimeError: a check failed; the message says which.
        """
        invariants.check(self.tables)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.capacity}, num_envs={self.num_envs}, "
            f"{len(self):,} rows)"
        )
