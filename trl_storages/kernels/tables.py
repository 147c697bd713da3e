"""The tables that both backends share: those of an episode index, and how a sum tree lies in one.

Letters: T live steps per lane at most, R >= T ring steps per lane, E lanes (environments), M = R * E
slots, B any shape of slots, n rows of a write, L lanes and S steps written now.

Step s of lane l is in slot `(s % R) * E + l`. The live rows of a lane are those from its tail up to its
cursor. Every slot names an entry of the table of episodes, which holds the steps at which the episode
began and ended. Evicting a row changes no entry: results are clamped to the tail instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_storages.kernels.memory import on_device, zeros

__all__ = [
    "ABSENT",
    "BEGUN",
    "BOUNDARIES",
    "CURSOR",
    "FAN_OUT",
    "FINISHED",
    "FIRST",
    "GOAL_KINDS",
    "GOAL_STRATEGIES",
    "LAST",
    "OPEN",
    "TAIL",
    "Block",
    "RingTables",
    "level_starts",
    "steps_between",
    "take",
]

# Columns of the table of episodes, and of the table of lanes.
FIRST, LAST, FINISHED = 0, 1, 2
CURSOR, BEGUN, OPEN, TAIL = 0, 1, 2, 3

#: How a goal row is drawn. `GOAL_KINDS` numbers them; kind 0 keeps the goal of a row.
GOAL_STRATEGIES = ("future", "final", "episode", "random", "geometric", "current")
GOAL_KINDS = {name: number for number, name in enumerate(GOAL_STRATEGIES, 1)}
#: What a sequence does at the ends of its episode; compiled loops take the index.
BOUNDARIES = ("pad", "fit", "cross")

#: The priority of a slot without a row: never drawn, and never the least weight.
ABSENT = float("inf")
#: Children of a node: eight float64 numbers fill a cache line.
FAN_OUT = 8


class Block(NamedTuple):
    """n rows that are the next S steps of L lanes, `[L, S]`."""

    num_steps: int
    """S."""
    lanes: Sequence[int] | None = None
    """The L lanes, distinct; None for all of them."""
    order: torch.Tensor | None = None
    """`[L, S]` int64, the row of each step; None for all n in order, lane by lane."""
    cut: torch.Tensor | None = None
    """`[L, S]` bool, rows that begin an episode whatever came before; None for none."""

    @property
    def which(self) -> Any:
        """The index of the written lanes in a table of all lanes."""
        return slice(None) if self.lanes is None else [*self.lanes]

    def arranged(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the n elements of `flat` in the order of the steps, `[L, S]`."""
        return flat.view(-1, self.num_steps) if self.order is None else flat[self.order]

    def cut_at(self, begins: torch.Tensor) -> Block:
        """Returns the same block, with further rows that begin an episode: `[L, S]` bool."""
        return self._replace(cut=begins if self.cut is None else self.cut | begins)


class RingTables:
    """Which rows of a ring belong to the same episode.

    Both backends share these tables; they differ in how they write them and draw from them.

    Args:
        capacity: live rows at most; rounded down to a multiple of `num_envs`.
        num_envs: number of lanes E, at least 1 and at most `capacity`.
        device: of the tables.
        spare_steps: R - T; a write of at most that many steps goes to slots that hold no live row.
    """

    def __init__(
        self, capacity: int, num_envs: int, device: torch.device, *, spare_steps: int = 0
    ) -> None:
        self.num_envs = num_envs
        self.steps_per_lane = capacity // num_envs
        self.capacity = self.steps_per_lane * num_envs
        self.ring_steps = self.steps_per_lane + spare_steps
        self.num_slots = self.ring_steps * num_envs
        self.device = device
        # 4 bytes a slot as long as entries fit.
        entries = torch.int32 if self.capacity < 2**31 else torch.int64
        #: `[M]` the entry of each slot's episode.
        self.episode = zeros(self.num_slots, device=device, dtype=entries)
        #: `[T E + 1, 3]` int64, of each episode: its first step, its last step so far, and whether `done`
        #: ended it. A lane has at most T live episodes, with consecutive numbers, so number n of lane l
        #: has entry `l * T + n % T`. Masked-out writes go to the last entry. Sparse, as most episodes are
        #: longer than a step.
        self.spans = zeros(self.capacity + 1, 3, device=device, sparse=True)
        #: `[E, 4]` int64, of each lane: steps written, episodes begun, whether its next row continues
        #: the last one, and the oldest live step.
        self.lanes = zeros(num_envs, 4, device=device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state of the index, by name."""
        return {"episode": self.episode, "spans": self.spans, "lanes": self.lanes}

    def share_memory_(self) -> None:
        """Moves the tables to memory shared with other processes."""
        for tensor in self.tensors.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def cursors(self) -> torch.Tensor:
        """`[E]` int64, steps ever written to each lane."""
        return self.lanes[:, CURSOR]

    @property
    def is_open(self) -> torch.Tensor:
        """`[E]` int64, whether the next row of a lane continues its last episode."""
        return self.lanes[:, OPEN]

    @property
    def tails(self) -> torch.Tensor:
        """`[E]` int64, the oldest live step of each lane; its cursor if there is none."""
        return self.lanes[:, TAIL]

    @property
    def fill(self) -> torch.Tensor:
        """`[E]` int64, the number of live rows of each lane."""
        return self.cursors - self.tails

    def evict(self, tails: torch.Tensor) -> None:
        """Evicts rows before new tails: `[E]` int64, from the old tails to the cursors, on any device."""
        self.tails.copy_(on_device(tails, self.device))
        # The next row of an empty lane begins an episode.
        self.is_open.mul_(self.tails < self.cursors)

    # Slots

    def slots_at(self, steps: Any, lanes: Any) -> Any:
        """Returns the slots of steps of lanes: numbers, tensors or arrays."""
        return steps % self.ring_steps * self.num_envs + lanes

    def heads(self) -> torch.Tensor:
        """Returns the slots `[E]` of the next rows of all lanes."""
        found: torch.Tensor = self.slots_at(
            self.cursors, torch.arange(self.num_envs, device=self.device)
        )
        return found

    def newest_slots(self, lanes: torch.Tensor) -> torch.Tensor:
        """Returns the slots `[L]` of the newest rows of lanes."""
        found: torch.Tensor = self.slots_at(self.cursors[lanes] - 1, lanes)
        return found

    def next_slots(self, lanes: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Returns the slots `[L, S]` of the next S steps of L lanes; -1 for steps evicted at once."""
        lane = lanes.unsqueeze(1)
        step = self.cursors[lane] + torch.arange(num_steps, device=self.device)
        slots: torch.Tensor = self.slots_at(step, lane)
        if num_steps > self.steps_per_lane:
            slots[:, : -self.steps_per_lane] = -1
        return slots

    def shift(self, slots: torch.Tensor, steps: torch.Tensor | int) -> torch.Tensor:
        """Returns the slots `steps` later in the same lane."""
        return (slots + steps * self.num_envs) % self.num_slots

    def steps(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the newest step of each slot in its lane; below the tail if its row is not live."""
        newest = take(self.cursors, slots % self.num_envs) - 1
        return newest - (newest - slots // self.num_envs) % self.ring_steps

    # Episodes

    def entries(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the index of the entry of each slot's episode, int64."""
        return take(self.episode, slots).long()

    def span(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the entry of each slot's episode, `[*B, 3]`."""
        return take(self.spans, take(self.episode, slots))

    def begin(self, slots: torch.Tensor, steps: torch.Tensor | int) -> None:
        """Sets the first steps of the episodes of some slots, which may lie before step 0.

        An episode that has lost its beginning began before the oldest step in the ring.
        """
        self.spans[self.entries(slots), FIRST] = steps

    def extent(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns how many surviving rows of the same episode lie before and after each slot."""
        first, last, _ = self.span(slots).unbind(-1)
        step = self.steps(slots)
        return step - torch.maximum(first, self.oldest(slots)), last - step

    def oldest(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the oldest live step in the lane of each slot."""
        return take(self.tails, slots % self.num_envs)

    # Ages

    def by_fill(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lanes' numbers of live rows, ascending, and the lanes in that order."""
        return torch.sort(self.fill, stable=True)

    def ages(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the rank by age of each slot among all live rows: 0 is the newest."""
        lane = slots % self.num_envs
        age = take(self.cursors, lane) - 1 - self.steps(slots)
        fill, lanes = self.by_fill()
        # Younger rows: all rows of lanes emptied before this age, and `age` of each other lane.
        place = torch.empty_like(lanes)
        place.scatter_(0, lanes, torch.arange(self.num_envs, device=self.device))
        num_emptied = torch.searchsorted(fill, age, right=True)
        shorter = torch.cat([fill.new_zeros(1), fill.cumsum(0)])
        younger = take(shorter, num_emptied) + (self.num_envs - num_emptied) * age
        return younger + self.num_envs - 1 - take(place, lane)


def take(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathers rows of `table` by an index of any shape, without reading it on the host."""
    if index.ndim == 1:
        return table.index_select(0, index)
    return table.index_select(0, index.reshape(-1)).view(index.shape + table.shape[1:])


def steps_between(firsts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps from `firsts` `[E]` up to `ends` `[E]`, lane by lane.

    Returns:
        their lanes `[n]`, and the steps `[n]`.
    """
    counts = np.maximum(ends - firsts, 0)
    lane = np.repeat(np.arange(len(counts)), counts)
    # Restarts at the first step of each lane.
    return lane, np.arange(len(lane)) + (firsts - counts.cumsum() + counts)[lane]


def level_starts(num_leaves: int) -> list[int]:
    """Returns where each level begins in the table of a tree, and finally where the table ends.

    The root is level 0. The children of node i of a level are nodes 8 i to 8 i + 7 of the next one,
    and leaf i is node i of the last. Levels are rounded up to whole nodes, so that a node is one
    cache line; after the last leaf there is at least one spare leaf, whose weight stays 0.

    >>> level_starts(10)
    [0, 8, 16, 32]
    """
    sizes = [_rounded_up(num_leaves + 1)]
    while sizes[0] > FAN_OUT:
        sizes.insert(0, _rounded_up(sizes[0] // FAN_OUT))
    starts = [0, FAN_OUT]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _rounded_up(n: int) -> int:
    return -(-n // FAN_OUT) * FAN_OUT
