"""What a storage must hold, draw and fold, as slow Python over lists, and histories to write.

A lane is the list of all steps that it ever got; what is live is its last `size // lanes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from contract.steps import Player, Transition, ids_of, reward_fn, rows
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["HISTORIES", "History", "Lanes", "assert_folded", "ends", "fold"]

Steps = list[Transition]


class Lanes:
    """Writes steps, and keeps count of what must be there."""

    def __init__(self, size: int, lanes: int = 1) -> None:
        self.places = size // lanes
        self.lanes: list[Steps] = [[] for _ in range(lanes)]
        self.players = [Player(lane) for lane in range(lanes)]
        self._ends = [cycle(["terminated", "truncated"]) for _ in range(lanes)]
        self._numbers: dict[int, int] = {}

    def steps(
        self, done: Sequence[Sequence[bool]], lanes: Sequence[int] | None = None
    ) -> TensorDict:
        """[L, T]: the next steps of these lanes, `done` [L][T]; every other end is a time limit."""
        blocks = []
        for lane, flags in zip(self._named(lanes), done, strict=True):
            block = [
                self.players[lane].step(next(self._ends[lane]) if flag else "") for flag in flags
            ]
            self.add(lane, block)
            blocks.append(rows(block))
        return torch.stack(blocks)

    def add(self, lane: int, steps: Steps) -> None:
        """Counts steps that were written in another way."""
        for step in steps:
            self._numbers[step.id] = len(self.lanes[lane])
            self.lanes[lane].append(step)

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

    def _named(self, lanes: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.lanes)) if lanes is None else lanes

    # What is there

    def live_of(self, lane: int) -> Steps:
        return self.lanes[lane][-self.places :]

    def live(self) -> Steps:
        return [step for lane in range(len(self.lanes)) for step in self.live_of(lane)]

    def newest(self, count: int) -> Steps:
        """The newest w steps of each lane, w the smallest with which they are `count`."""
        lanes = [self.live_of(lane) for lane in range(len(self.lanes))]
        w = next(
            w
            for w in range(self.places + 1)
            if sum(len(lane[-w:] if w else []) for lane in lanes) >= count
        )
        return [step for lane in lanes for step in lane[-w:]]

    def of(self, batch: TensorDictBase) -> Steps:
        """The steps that a batch holds."""
        return [self._step(number) for number in ids_of(batch).flatten().tolist()]

    def reaching(self, goals: Tensor) -> Steps:
        """The steps that led to these achieved goals, [N, 2]."""
        assert (goals[:, 1] == 1).all()
        return [self._step(int(number) - 1) for number in goals[:, 0].tolist()]

    def _step(self, number: int) -> Transition:
        return self.lanes[Transition(number, 0).lane][self._numbers[number]]

    def episode(self, step: Transition) -> Steps:
        """The live steps of its episode, oldest first."""
        return [other for other in self.live_of(step.lane) if other.first == step.first]

    def onward(self, step: Transition) -> Steps:
        """It and the live steps that follow in its episode."""
        return [other for other in self.episode(step) if other.id >= step.id]

    def goals(self, step: Transition, strategy: str) -> Steps:
        """The steps whose outcome may be the goal of `step`."""
        match strategy:
            case "random":
                return self.live()
            case "episode":
                return self.episode(step)
            case "final":
                return self.onward(step)[-1:]
            case "current":
                return [step]
        return self.onward(step)

    def window(
        self, step: Transition, burn_in: int, onward: int, boundary: str
    ) -> tuple[Steps, list[bool]]:
        """A sequence: the steps around this one, and which are valid; others are repeated."""
        steps = self.live_of(step.lane) if boundary == "cross" else self.episode(step)
        at, last = steps.index(step), len(steps) - 1
        if boundary == "fit":
            # As much ahead as there can be; then as much behind; then as near as can be.
            at = max(
                (min(last - n + 1, onward), min(n, burn_in), -abs(n - at), n)
                for n in range(last + 1)
            )[-1]
        wanted = range(at - burn_in, at + onward)
        return [steps[min(max(n, 0), last)] for n in wanted], [0 <= n <= last for n in wanted]


def fold(
    steps: Steps,
    n_step: int,
    discount: float,
    goal: Tensor | None = None,
    terminated_fn: Callable[..., Tensor] | None = None,
) -> tuple[TensorDict, int]:
    """What n-step returns make of a step and those that follow it, and m.

    With a `goal` [G] it is the desired goal of all of them, each reward is made anew for it, and
    `terminated_fn` says where it was reached.
    """
    total, window = 0.0, rows(steps[:n_step])
    for m, row in enumerate(window.unbind(0), start=1):
        if goal is not None:
            one = row.unsqueeze(0)
            seen = one["next", "achieved_goal"], goal.unsqueeze(0), one
            row["next", "desired_goal"], row["next", "reward"] = goal, reward_fn(*seen)
            if terminated_fn is not None:
                row["next", "terminated"] = terminated_fn(*seen)
                row["next", "done"] = row["next", "terminated"] | row["next", "truncated"]
        total += discount ** (m - 1) * row["next", "reward"].item()
        if row["next", "terminated"]:
            break
    folded = window[0].clone()
    folded["next"] = row["next"].clone()
    folded["next", "reward"] = torch.tensor([total])
    if goal is not None:
        folded["desired_goal"] = goal
    return folded, m


def assert_folded(
    batch: TensorDictBase,
    lanes: Lanes,
    n_step: int,
    discount: float,
    terminated_fn: Callable[..., Tensor] | None = None,
) -> None:
    """Each row of a batch is what `fold` makes of its episode, with the goal that it was given."""
    relabelled = batch.get("her_mask", torch.zeros(len(batch), dtype=torch.bool))
    folds = [
        fold(
            lanes.onward(step),
            n_step,
            discount,
            batch["desired_goal"][i] if new else None,
            terminated_fn,
        )
        for i, (step, new) in enumerate(zip(lanes.of(batch), relabelled.tolist(), strict=True))
    ]
    assert batch["steps_to_next_obs"].tolist() == [[m] for _, m in folds]
    expected = torch.stack([transition for transition, _ in folds])
    for key, value in expected.items(True, True):
        rtol, atol = (1e-6, 1e-4) if key == ("next", "reward") else (0, 0)
        torch.testing.assert_close(batch[key], value, rtol=rtol, atol=atol, equal_nan=True, msg=key)


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
        [
            ([ends([3], 2), ends([], 5)], None),
            ([ends([2, 2])], [1]),
            ([[False], [True]], None),
        ],
    ),
    "one lane wrapped": History(
        24, 3, [([[False]] * 3, None), ([ends([4, 6], 3)], [1]), ([[True]] * 3, None)]
    ),
}
