"""Histories to write, and what must be there then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from contract.model import Model
from contract.steps import Player, rows
from tensordict import TensorDict
from torch import Tensor

__all__ = ["HISTORIES", "History", "Lanes", "ends"]


class Lanes(Model):
    """A model of a storage of this size whose lanes are played."""

    def __init__(self, size: int, lanes: int = 1) -> None:
        super().__init__(lanes, size // lanes)
        self.players = [Player(lane) for lane in range(lanes)]
        self._ends = [cycle(["terminated", "truncated"]) for _ in range(lanes)]

    def steps(
        self, done: Sequence[Sequence[bool]], lanes: Sequence[int] | None = None
    ) -> TensorDict:
        """[L, T]: the next steps of these lanes, `done` [L][T]; every other end is a time limit."""
        blocks = []
        named = range(len(self.lanes)) if lanes is None else lanes
        for lane, flags in zip(named, done, strict=True):
            block = [
                self.players[lane].step(next(self._ends[lane]) if flag else "") for flag in flags
            ]
            for step in block:
                self.add(step)
            blocks.append(rows(block))
        return torch.stack(blocks)

    def write(
        self,
        storage: Any,
        done: Sequence[Sequence[bool]],
        lanes: Sequence[int] | None = None,
        change: Callable[[TensorDict], TensorDict] = lambda data: data,
    ) -> Tensor:
        """Writes the next steps of these lanes; returns the index of each, [L, T]."""
        data = change(self.steps(done, lanes))
        if len(self.lanes) == 1:
            return storage.extend(data[0]).unsqueeze(0)
        return storage.extend(data) if lanes is None else storage.extend(data, lanes=list(lanes))

    def end_episodes(self, storage: Any) -> None:
        """Cuts the running episodes."""
        storage.end_episodes()
        for player in self.players:
            player.reset()


def ends(lengths: Iterable[int], unfinished: int = 0) -> list[bool]:
    """Done flags of episodes of these lengths, and of `unfinished` steps after them."""
    flags = [step == length - 1 for length in lengths for step in range(length)]
    return flags + [False] * unfinished


@dataclass(frozen=True)
class History:
    """Writes, one after another: (flags [L][T], lanes or None for all)."""

    size: int
    lanes: int
    writes: list[tuple[list[list[bool]], list[int] | None]]

    def write(self, storage: Any, **options: Any) -> Lanes:
        """Writes it all; returns what must be there."""
        lanes = Lanes(self.size, self.lanes)
        for done, named in self.writes:
            lanes.write(storage, done, named, **options)
        return lanes


def _one_lane(size: int, *writes: list[bool]) -> History:
    return History(size, 1, [([flags], None) for flags in writes])


HISTORIES = {
    "filling": _one_lane(30, ends([5, 1, 7], 4)),
    "just full": _one_lane(13, ends([5, 1, 7])),
    "wrapped": _one_lane(17, *[ends([4, 6, 3], 2)] * 4),
    "step by step": _one_lane(11, *[[flag] for flag in ends([4, 1, 6, 3, 2], 3)]),
    "longer than the storage": _one_lane(8, ends([3, 30])),
    "unfinished and longer": _one_lane(8, ends([3], 30)),
    "as long as the storage": _one_lane(6, ends([2, 6]), [False] * 2),
    "lanes": History(
        27,
        3,
        [
            ([ends([5], 2), ends([2, 4], 1), ends([1, 6])], None),
            ([ends([3], 2), ends([5]), ends([4, 1])], None),
        ],
    ),
    "unequal fill": History(
        24,
        2,
        [([ends([3], 2), ends([], 5)], None), ([ends([2, 2])], [1]), ([[False], [True]], None)],
    ),
    "one lane wrapped": History(
        24, 3, [([[False]] * 3, None), ([ends([4, 6], 3)], [1]), ([[True]] * 3, None)]
    ),
}
