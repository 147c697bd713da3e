"""What a storage must hold, draw and fold, as slow Python over lists of transitions.

Letters: N steps, G goal size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from contract.steps import Transition, assert_same, ids_of, reward_fn, rows
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["Model", "assert_folded", "assert_folds", "folded"]

Steps = list[Transition]


class Model:
    """Lanes that keep their last steps.

    Args:
        lanes: how many there are.
        num_steps: how many steps each keeps.
        on_gap: whether a row that does not continue the row before begins an episode: "cut", "ignore".

    Attributes:
        lanes: all steps that each ever got, also those that gave way.
    """

    def __init__(self, lanes: int, num_steps: int, on_gap: str = "cut") -> None:
        self.num_steps, self.on_gap = num_steps, on_gap
        self.lanes: list[Steps] = [[] for _ in range(lanes)]
        self._steps: dict[int, Transition] = {}
        #: The first step of the episode of each step, by their ids.
        self._first: dict[int, int] = {}
        self._emptied = [0] * lanes
        self._trajectories: list[int | None] = [None] * lanes
        self._cut = [False] * lanes

    # Writing

    def add(self, step: Transition, trajectory: int | None = None) -> None:
        """Adds a step that was written; the oldest one that there is no room for gives way."""
        lane = step.lane
        before = self.lanes[lane][-1] if self.is_open(lane) else None
        goes_on = (
            before is not None
            and (before.id + 1 == step.id or self.on_gap == "ignore")
            and self._trajectories[lane] == trajectory
        )
        self._first[step.id] = self._first[before.id] if before and goes_on else step.id
        self._steps[step.id] = step
        self.lanes[lane].append(step)
        self._cut[lane] = False
        self._trajectories[lane] = trajectory

    def is_open(self, lane: int) -> bool:
        """Whether the episode of the lane may go on."""
        steps = self.lanes[lane]
        return len(steps) > self._emptied[lane] and not steps[-1].end and not self._cut[lane]

    def cut(self, lanes: Sequence[int]) -> None:
        """Lets the next step of each lane begin an episode."""
        for lane in lanes:
            self._cut[lane] = True

    def empty(self, keep_steps: int = 0) -> None:
        """Forgets all but the last steps of each lane."""
        for lane in range(len(self.lanes)):
            self.evict(lane, min(keep_steps, len(self.live_of(lane))))

    def evict(self, lane: int, keep_steps: int) -> None:
        """Forgets all but the last steps of a lane, which holds as many."""
        assert keep_steps <= len(self.live_of(lane))
        self._emptied[lane] = len(self.lanes[lane]) - keep_steps

    # What is there

    def live_of(self, lane: int) -> Steps:
        """The steps of a lane, oldest first."""
        steps = self.lanes[lane]
        return steps[max(len(steps) - self.num_steps, self._emptied[lane]) :]

    def live(self) -> Steps:
        """The steps of all lanes."""
        return [step for lane in range(len(self.lanes)) for step in self.live_of(lane)]

    def newest(self, count: int) -> Steps:
        """The newest w steps of each lane, w the smallest with which they are `count`."""
        lanes = [self.live_of(lane) for lane in range(len(self.lanes))]
        for w in range(self.num_steps + 1):
            steps = [step for lane in lanes for step in lane[max(len(lane) - w, 0) :]]
            if len(steps) >= count:
                break
        return steps

    def named(self, ids: Sequence[int]) -> Steps:
        """The steps with these ids."""
        return [self._steps[number] for number in ids]

    def of(self, batch: TensorDictBase) -> Steps:
        """The steps that a batch holds."""
        return self.named(ids_of(batch).flatten().tolist())

    def reaching(self, goals: Tensor) -> Steps:
        """The steps that led to these achieved goals, [N, 2]."""
        assert (goals[:, 1] == 1).all()
        return self.named([int(number) - 1 for number in goals[:, 0].tolist()])

    def begins(self, step: Transition) -> bool:
        """Whether its episode begins with the step."""
        return self._first[step.id] == step.id

    def episode(self, step: Transition) -> Steps:
        """The live steps of its episode, oldest first."""
        first = self._first[step.id]
        return [other for other in self.live_of(step.lane) if self._first[other.id] == first]

    def onward(self, step: Transition) -> Steps:
        """It and the live steps that follow in its episode."""
        return [other for other in self.episode(step) if other.id >= step.id]

    def whole_episodes(self) -> dict[int, Steps]:
        """The episodes that have ended and lost no step, by the ids of their first ones."""
        found = {step.id: self.episode(step) for step in self.live() if self.begins(step)}
        return {number: steps for number, steps in found.items() if steps[-1].end}

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


def folded(
    windows: Sequence[Steps],
    discount: float,
    goals: Sequence[Tensor | None] | None = None,
    terminated_fn: Callable[..., Tensor] | None = None,
    layout: str = "goals",
) -> tuple[TensorDict, list[int]]:
    """What n-step returns make of steps.

    Args:
        windows: N, each of a step and those that follow it, as many as may be folded.
        discount: of a step.
        goals: [G] for each window, which hindsight asks for; None leaves rewards and flags as they are.
        terminated_fn: says where such a goal is reached, which ends the window.
        layout: of the rows.

    Returns:
        the rows [N], and how many steps each is folded of.
    """
    found, lengths = [], []
    for window, goal in zip(windows, goals or [None] * len(windows), strict=True):
        each = rows(window, layout)
        if goal is not None:
            each["desired_goal"] = each["next", "desired_goal"] = goal.expand(len(window), -1)
            seen = each["next", "achieved_goal"], each["desired_goal"], each["next"]
            each["next", "reward"] = reward_fn(*seen).unsqueeze(1)
            if terminated_fn is not None:
                each["next", "terminated"] = terminated_fn(*seen).unsqueeze(1)
                each["next", "done"] = each["next", "terminated"] | each["next", "truncated"]
        total, m = 0.0, 0
        columns = each["next", "reward"].flatten(), each["next", "terminated"].flatten()
        for reward, is_over in zip(*(column.tolist() for column in columns), strict=True):
            total, m = total + discount**m * reward, m + 1
            if is_over:
                break
        row = each[0].clone()
        row["next"] = each["next"][m - 1].clone()
        row["next", "reward"] = torch.tensor([total])
        found.append(row)
        lengths.append(m)
    return torch.stack(found), lengths


def assert_folds(batch: TensorDictBase, expected: TensorDict, lengths: list[int]) -> None:
    """A batch is what was folded, bit for bit but for rewards."""
    reward = expected["next", "reward"]
    torch.testing.assert_close(batch["next", "reward"], reward, rtol=1e-6, atol=1e-5)
    assert_same(batch, expected.exclude(("next", "reward")))
    if "steps_to_next_obs" in batch:
        assert batch["steps_to_next_obs"].tolist() == [[m] for m in lengths]


def assert_folded(
    batch: TensorDictBase,
    model: Model,
    n_step: int = 1,
    discount: float = 1.0,
    terminated_fn: Callable[..., Tensor] | None = None,
    layout: str = "goals",
) -> None:
    """Each row of a batch is folded of what follows in its episode, with the goal that it was given."""
    windows = [model.onward(step)[:n_step] for step in model.of(batch)]
    goals: list[Tensor | None] = [None] * len(windows)
    if "her_mask" in batch:
        new = batch["her_mask"].tolist()
        goals = [goal if it else None for goal, it in zip(batch["desired_goal"], new, strict=True)]
    assert_folds(batch, *folded(windows, discount, goals, terminated_fn, layout))
