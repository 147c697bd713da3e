"""The episode index: which slot and entry hold which step of which episode.

The index is on the host, also if the transitions are on a GPU.

Letters: E lanes (environments), T steps a lane, M entries a lane, k frames a stack, B any number of
slots, n transitions of an n-step window, S transitions of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from trl_storages.kernels import (
    CONTINUES,
    CURSOR,
    DONE,
    FIRST,
    LAST,
    SPLIT,
    TAIL,
    draws,
    entries,
    invariants,
)
from trl_storages.validation import deprecated_method

__all__ = ["Changes", "EmptyError", "EpisodeIndex", "Snapshot"]

_NO_STEPS = np.empty(0)
#: A lane has entries for at least this many more steps than it holds, so that a batch of steps does not
#: overwrite entries of live steps.
_LEAST_SLACK = 64

#: int64 slots: methods return an array for an array, and a tensor for a tensor.
Slots = TypeVar("Slots", torch.Tensor, np.ndarray)


def _like(slots: Slots, values: np.ndarray) -> Any:
    """Returns values as a tensor if the slots are one, else as they are."""
    return torch.from_numpy(values) if isinstance(slots, torch.Tensor) else values


class EmptyError(RuntimeError):
    """The storage contains no transition, or no episode, that can be sampled."""


class Snapshot(NamedTuple):
    """Which steps were live at one moment; `EpisodeIndex.changes_since` compares it with the present."""

    reset_count: int
    lane_bounds: np.ndarray
    """`[E, 2]` cursors and tails."""


class Changes(NamedTuple):
    """Slots whose steps were evicted, and slots that were written, since a snapshot.

    A slot that was overwritten is in both: process `evicted` before `written`.
    """

    evicted: np.ndarray
    written: np.ndarray


class EpisodeIndex:
    """Maps each slot to its step, its episode and its entry.

    A *lane* is the stream of one environment. Its steps are numbered from 0 in the order of writing.
    Step s of lane e is in *slot* `e T + s mod T`. Samplers draw slots. The observation and the values of
    a step are in an *entry* of the lane's stream.

    A lane's *cursor* is the number of its next step. Its *tail* is the number of its oldest live step.
    These two words are the whole state of a lane. A step counts as written once the cursor is stored
    after it.

    An episode ends where `done` is true. It is split where the next step of its lane does not continue
    it. A split or a running episode is treated as a correct, shorter episode.

    There are no write callbacks: a consumer keeps a `Snapshot`, and calls `changes_since`.

    Args:
        capacity: number of transitions, rounded down to a multiple of `num_envs`.
        num_envs: E.
        stack: k, number of entries of which an observation consists.
        depth: number of entries, up to its own, from which the observation of a step is read; None is k.
        max_entries: number of entries over all lanes; None is enough for any `capacity` transitions.
            Memory is used only for entries that are stored.

    Raises:
        ValueError: a lane has fewer than two steps, or too few entries to write one step.

    >>> index = EpisodeIndex(8)
    >>> len(index), index
    (0, EpisodeIndex(capacity=8, num_envs=1, 0 transitions))
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
        #: M, and whether it is enough for T transitions of any episode lengths.
        self.entries_per_lane = enough if max_entries is None else max_entries // num_envs
        self.is_roomy = self.entries_per_lane >= enough
        # A batch of steps takes at most k entries, and k + 1 more per step. It is written after the last
        # step or, if the lane has no room there, at the beginning of the lane. A batch at the beginning
        # does not overwrite the entries of the last step if it takes at most half of the other entries.
        fitting = ((self.entries_per_lane - depth) // 2 - stack) // (stack + 1)
        if fitting < 1:
            raise ValueError(
                f"max_entries must be at least {num_envs * (4 * stack + depth + 2)}, got {max_entries}."
            )
        #: Largest number of steps of a lane that one write may contain. The last step survives an
        #: interrupted write of this size, and no step is evicted early if `is_roomy`.
        self.most_steps = min(self.steps_per_lane // 2, slack - 1, fitting)
        shapes = self.table_shapes()
        self.use({name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()})

    def use(self, tables: Mapping[str, np.ndarray]) -> None:
        """Replaces the tables by arrays of `table_shapes`, and adopts their contents."""
        self._lane_bounds, self._counters = tables["lanes"], tables["epoch"]
        #: `[1]`, changes whenever the writer sets priorities.
        self.num_updates: np.ndarray = self._counters[1:]
        #: The argument `index` of `kernels`.
        self.tables: tuple[np.ndarray | int, ...] = (
            *(tables[name] for name in ("where", "episode", "ends", "spans", "lanes")),
            *(self.steps_per_lane, self.entries_per_lane, self.stack, tables["priorities"]),
            self.depth,
        )
        #: The entry of each slot, the number of its episode modulo T + 1, and its end: see `kernels`.
        self.where: np.ndarray = tables["where"]
        self.episode: np.ndarray = tables["episode"]
        self.ends: np.ndarray = tables["ends"]
        #: The raw priority of each slot; 0 or an invalid value if no priority was set.
        self.priorities: np.ndarray = tables["priorities"]
        #: `[E, T + 1, 2]` the first and the last step of each episode.
        self.spans: np.ndarray = tables["spans"]
        #: `[E]` the number of the next step, and of the oldest live step.
        self.cursors: np.ndarray = self._lane_bounds[:, CURSOR]
        self.tails: np.ndarray = self._lane_bounds[:, TAIL]

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
    def reset_count(self) -> int:
        """How often all transitions were evicted at once, plus an arbitrary constant."""
        return int(self._counters[0])

    @property
    def fill(self) -> np.ndarray:
        """`[E]` number of live steps."""
        firsts, ends = self._live()
        return ends - firsts

    def __len__(self) -> int:
        return draws.num_live(self._lane_bounds)

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a transition."""
        return len(self) == self.capacity

    @property
    def is_open(self) -> np.ndarray:
        """`[E]` whether the next step of each lane continues the episode of its last step."""
        return (self.cursors > 0) & (self.ends[self.newest_slots()] == CONTINUES)

    def newest_slots(self) -> np.ndarray:
        """Returns the slot of the last step of each lane, `[E]`."""
        return self.slots_of(np.arange(self.num_envs), self.cursors - 1)

    def slots_of(self, lanes: Any, steps: np.ndarray) -> np.ndarray:
        """Returns the slots `[*B]` of steps of lanes."""
        return lanes * self.steps_per_lane + steps % self.steps_per_lane

    def end_episodes(self, lanes: Sequence[int] | np.ndarray | None = None) -> None:
        """Splits the running episodes of some lanes, or of all: their next steps begin new episodes."""
        is_open = self.is_open
        if lanes is not None:
            chosen = np.zeros(self.num_envs, bool)
            chosen[lanes] = True
            is_open &= chosen
        self.ends[self.newest_slots()[is_open]] = SPLIT

    def evict(self, keep_steps: int = 0) -> None:
        """Evicts all steps except the last `keep_steps` of each lane. Step numbers are not reused."""
        if not keep_steps:
            self.end_episodes()
            self._counters[0] += 1
        self.tails[:] = self.tails_after_evicting(keep_steps)

    def tails_after_evicting(self, keep_steps: int) -> np.ndarray:
        """Returns the tails `[E]` that `evict(keep_steps)` would set."""
        return np.maximum(self.tails, self.cursors - keep_steps)

    def reset(self) -> None:
        """Evicts all steps, and numbers steps from 0 again."""
        self._counters[0] += 1
        self._lane_bounds[:] = 0

    def restore_lane(
        self,
        lane: int,
        steps: np.ndarray,
        positions: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        *,
        first: int,
        tail: int,
    ) -> np.ndarray:
        """Replaces the steps of a lane by consecutive steps.

        Args:
            lane: number of the lane.
            steps: `[N]` numbers of the steps, N at least 1 and at most T.
            positions: `[N]` entries of the steps, counted from the beginning of the lane.
            begins: `[N]` whether each step begins an episode.
            ends: `[N]` as in `kernels`.
            first: the first step of the oldest episode, which may be evicted.
            tail: the oldest live step.

        Returns:
            `[N]` slots.
        """
        slots = self.slots_of(lane, steps)
        is_first = begins.copy()
        is_first[0] = True
        firsts = steps[is_first]
        self.where[slots] = positions + lane * self.entries_per_lane
        self.episode[slots], self.ends[slots] = is_first.cumsum() - 1, ends
        spans = self.spans[lane]
        spans[: len(firsts), FIRST] = firsts
        spans[: len(firsts), LAST] = np.append(firsts[1:], steps[-1] + 1) - 1
        spans[0, FIRST] = first
        self._lane_bounds[lane] = steps[-1] + 1, tail
        return slots

    def retained_steps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns lane, step and slot `[N]` of live steps, and of the newest step of empty lanes."""
        return invariants.retained_steps(self.tables)

    def changes_since(self, snapshot: Snapshot | None) -> tuple[Changes | None, Snapshot]:
        """Returns the changes since a snapshot, or None if there are none, and a snapshot of now."""
        now = Snapshot(int(self._counters[0]), self._lane_bounds.copy())
        before = snapshot or Snapshot(now.reset_count, np.zeros_like(now.lane_bounds))
        is_reset = before.reset_count != now.reset_count
        if not is_reset and before.lane_bounds.tobytes() == now.lane_bounds.tobytes():
            return None, now
        bounds = before.lane_bounds, now.lane_bounds
        return Changes(*draws.changes(self.tables, *bounds, is_reset)), now

    def _live(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns tails and cursors `[E]` of one moment, because another process may be writing."""
        cursors = self.cursors.copy()
        return np.minimum(self.tails, cursors), cursors

    # Queries. Slots are on the host: a tensor of slots returns a tensor, an array returns an array.

    def live_slots(self) -> torch.Tensor:
        """Returns the slots of all transitions, lane by lane, oldest first, `[len]` int64."""
        return torch.from_numpy(draws.slots_between(self.tables, *self._live()))

    def slots_by_age(self) -> torch.Tensor:
        """Returns the slots of all transitions, oldest first; age counts later steps of the lane."""
        firsts, ends = self._live()
        slots = draws.slots_between(self.tables, firsts, ends)
        age = np.concatenate([np.arange(num_steps, 0, -1) for num_steps in ends - firsts])
        return torch.from_numpy(slots[np.argsort(-age, kind="stable")])

    def check_filled(self) -> None:
        """Raises an EmptyError if the storage is empty."""
        if not draws.num_live(self._lane_bounds):
            raise EmptyError("the storage is empty: write steps with record() or extend() first.")

    def check_live(self, slots: Slots, tails: np.ndarray | None = None) -> None:
        """Raises an IndexError if a slot holds no live transition; `tails` replaces the current ones."""
        is_live = self.are_live(slots, tails)
        if not is_live.all():
            at = int(is_live.argmin())
            raise IndexError(f"slot {int(slots[at])} at position {at} holds no valid transition.")

    def are_live(self, slots: Slots, tails: np.ndarray | None = None) -> np.ndarray:
        """Returns which slots `[*B]` hold a live transition; `tails` replaces the current ones."""
        array = np.asarray(slots)
        is_slot = (array >= 0) & (array < self.capacity)
        slot = np.where(is_slot, array, 0)
        oldest = (self.tails if tails is None else tails)[slot // self.steps_per_lane]
        return is_slot & (self.steps_of(slot) >= oldest)

    def bounds(self, slots: Slots) -> Slots:
        """Returns the distances from each transition to the bounds of its episode and its lane.

        Returns:
            `[B, 4]` int64 steps, negative to earlier steps: to the first step of the episode, which may
            be evicted, to the last step so far, and to the oldest and the newest live step of the lane.
        """
        return _like(slots, draws.distances_of(self.tables, np.asarray(slots)))

    def num_after(self, slots: Slots) -> Slots:
        """Returns the number of later transitions in the same episode, `[B]` int64."""
        return self.bounds(slots)[:, draws.END]

    def num_before(self, slots: Slots) -> Slots:
        """Returns the number of earlier transitions of the same episode that are stored, `[B]` int64."""
        distances = draws.distances_of(self.tables, np.asarray(slots))
        return _like(slots, -np.maximum(distances[:, draws.BEGIN], distances[:, draws.OLDEST]))

    def is_done(self, slots: Slots) -> Slots:
        """Returns whether each transition ends its episode, `[B]` bool."""
        return _like(slots, self.ends[np.asarray(slots)] == DONE)

    def lanes_of(self, slots: Slots) -> Slots:
        """Returns the lane of each transition, `[B]` int64."""
        return slots // self.steps_per_lane

    def steps_of(self, slots: Slots) -> Slots:
        """Returns the step number of each transition within its lane, `[*B]` int64."""
        array = np.asarray(slots)
        steps = np.empty(array.shape, np.int64)
        draws.steps_of(self._lane_bounds, self.steps_per_lane, array.reshape(-1), steps.reshape(-1))
        return _like(slots, steps)

    def overwritten(self, slots: np.ndarray, cursors: np.ndarray) -> np.ndarray:
        """Returns which transitions were overwritten since, such as while a reader copied them.

        Args:
            slots: `[B]` slots of the transitions.
            cursors: `[E]` cursors of the moment when the transitions were live.

        Returns:
            `[B]` bool.
        """
        return entries.are_overwritten(self.tables, slots, cursors)

    def shift(self, slots: Slots, steps: Slots) -> Slots:
        """Returns the slots `steps` later in their lanes, `[*B]`; the caller keeps to live steps."""
        offset = slots % self.steps_per_lane
        return slots - offset + (offset + steps) % self.steps_per_lane

    # Sampling, in arrays

    def draw(self, noise: np.ndarray, window: int | None = None) -> np.ndarray:
        """Samples live transitions uniformly, with replacement.

        Args:
            noise: `[B]` int64 random numbers of 63 bits.
            window: number of newest steps of each lane to sample from; None samples from all.

        Returns:
            `[B]` int64 slots.
        """
        window = self.steps_per_lane if window is None else window
        return draws.draw(self.tables, window, noise)

    def window_of(self, count: int) -> int:
        """Returns the smallest w for which the newest w steps of all lanes are at least `count`."""
        return draws.window_of(self.tables, count)

    def goals(
        self,
        slots: np.ndarray,
        noise: np.ndarray,
        strategies: np.ndarray,
        steps: np.ndarray | None = None,
    ) -> np.ndarray:
        """Samples the transitions whose achieved goals are the new goals; see `kernels.draws.goals`."""
        steps = _NO_STEPS if steps is None else steps
        return draws.goals(self.tables, slots, noise, strategies, steps)

    def windows(self, slots: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns n-step windows: each transition with those that follow in its episode.

        Returns:
            `[n, B]` int64 slots, in which the last transition of the episode is repeated; and the number
            of different transitions of each window, `[B]` int64.
        """
        return draws.windows(self.tables, slots, num_rows)

    def sequences(
        self, slots: np.ndarray, burn_in: int, num_steps: int, boundary: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns sequences around transitions, in time order; see `kernels.draws.sequences`.

        Returns:
            `[B, S]` int64 slots, whether each is valid, and whether each begins an episode.
        """
        number = draws.BOUNDARIES.index(boundary)
        return draws.sequences(self.tables, slots, burn_in, num_steps, number)

    # Episodes

    def table(self) -> TensorDict:
        """Lists the episodes, lane by lane, oldest first.

        Returns:
            TensorDict `[n]` with int64 `first` (slot), `length` (stored transitions), `lane`, and bool
            `finished` (by a done step) and `whole` (no transition evicted).
        """
        names = ("first", "length", "finished", "whole", "lane")
        columns = dict(zip(names, map(torch.from_numpy, self._episode_columns()), strict=True))
        return TensorDict(columns, batch_size=[len(columns["lane"])])

    # Removed in 0.6.
    episodes = deprecated_method("episodes", "table")
    ahead = deprecated_method("ahead", "num_after")
    behind = deprecated_method("behind", "num_before")

    @property
    def num_episodes(self) -> int:
        """The number of episodes that have live steps."""
        return int(self._numbering(*self._live())[1].sum())

    def _numbering(self, tails: np.ndarray, cursors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of the oldest episode of each lane, and the counts of episodes, `[E]`."""
        lanes, T = np.arange(self.num_envs), self.steps_per_lane
        oldest, newest = (self.episode[self.slots_of(lanes, at)] for at in (tails, cursors - 1))
        return oldest, np.where(cursors > tails, (newest - oldest) % (T + 1) + 1, 0)

    def random_episodes(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Samples `n` complete episodes that have finished uniformly, with replacement.

        Returns:
            `[n]` int64 slots of the first transitions.

        Raises:
            RuntimeError: the storage contains no such episode.
        """
        noise = np.empty(3 * n + 16, np.int64)
        torch.from_numpy(noise).random_(generator=generator)
        # Few episodes are split, running or partly evicted, so usually n of the first sample can be used.
        first, _, finished, whole, _ = self._episode_columns(noise[n:])
        complete = first[finished & whole]
        if len(complete) < n:
            first, _, finished, whole, _ = self._episode_columns()
            complete = first[finished & whole]
            if not len(complete):
                raise EmptyError(
                    "the storage contains no complete episode: write until one ends, or make the storage "
                    "larger than an episode."
                )
            complete = complete[noise[:n] % len(complete)]
        return torch.from_numpy(complete[:n])

    def _episode_columns(self, noise: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Returns the columns of `table`, of all episodes or of those that `noise` `[n]` chooses."""
        T, (tails, cursors) = self.steps_per_lane, self._live()
        begins = np.arange(self.num_envs) * T
        oldest, counts = self._numbering(tails, cursors)
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
        """Checks that the tables agree.

        Raises:
            RuntimeError: a check failed; the message names the check.
        """
        invariants.check(self.tables)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.capacity}, num_envs={self.num_envs}, "
            f"{len(self):,} transitions)"
        )
