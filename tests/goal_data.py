"""Goal transitions whose every field tells which row it is from, and histories to write them in.

The root achieved goal, the next one and both desired goals of a row are four different values, so a
test sees at once where a goal came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracles import RingOracle, Row
from tensordict import TensorDict
from torch import Tensor

from trl_storages import ReplayStorage, ReplayTransform
from trl_storages.rows import RowView

__all__ = [
    "GOAL_SIZE",
    "HISTORIES",
    "AsDrawn",
    "History",
    "achieved_goals",
    "distance_reward",
    "episode_flags",
    "goal_transitions",
    "write",
]

GOAL_SIZE = 3
BEFORE, AFTER, WANTED, WANTED_NEXT = 0.0, 1.0, -1.0, -2.0


def goals(lanes: Tensor, steps: Tensor, kind: float) -> Tensor:
    """[..., 3] float32: lane, step and which of the four goals of the row it is."""
    return torch.stack([lanes, steps, torch.full_like(steps, kind)], -1)


def achieved_goals(rows: Iterable[Row]) -> Tensor:
    """[B, 3]: the next achieved goals of the rows, which hindsight may ask for."""
    lanes, steps = torch.tensor([[row.lane, row.step] for row in rows]).float().unbind(-1)
    return goals(lanes, steps, AFTER)


def distance_reward(achieved_goal: Tensor, desired_goal: Tensor, transition: Any) -> Tensor:
    """[...]: a reward that no two pairs of goals share by accident."""
    lane, step, kind = (achieved_goal - 0.5 * desired_goal).unbind(-1)
    return -(lane + 0.125 * step + 100 * kind)


class AsDrawn(ReplayTransform):
    """Leaves a batch as it is stored, with the goal rows that were drawn for it."""

    uses_goals = True

    def replay(self, rows: RowView) -> None:
        pass


def goal_transitions(lanes: Tensor, steps: Tensor, done: Tensor) -> TensorDict:
    """Transitions [...] of these lanes and absolute steps, int64 [...]; done is bool [...]."""
    lanes, steps = lanes.float(), steps.float()
    achieved, wanted = goals(lanes, steps, AFTER), goals(lanes, steps, WANTED)
    # Every other end is a time limit, so that done and terminated differ.
    truncated = done & (steps.long() % 2 == 1)
    return TensorDict(
        {
            "observation": torch.stack([steps, lanes, steps, lanes], -1),
            "achieved_goal": goals(lanes, steps, BEFORE),
            "desired_goal": wanted,
            "action": (steps * 10 + lanes).long(),
            "effort": (steps * 100 + lanes).double().unsqueeze(-1),
            "next": {
                "observation": torch.stack([steps + 1, lanes, steps + 1, lanes], -1),
                "achieved_goal": achieved,
                "desired_goal": goals(lanes, steps, WANTED_NEXT),
                "reward": distance_reward(achieved, wanted, None).unsqueeze(-1),
                "done": done.unsqueeze(-1),
                "terminated": (done & ~truncated).unsqueeze(-1),
                "truncated": truncated.unsqueeze(-1),
            },
        },
        batch_size=steps.shape,
    )


def write(
    buffer: Any,
    oracle: RingOracle,
    done: Sequence[Sequence[bool]],
    lanes: list[int] | None = None,
    *,
    anew: bool = False,
) -> None:
    """Writes the same block of rows, `done` [L][S], into a buffer and into the model.

    `anew` breaks off the running episodes before it.
    """
    chosen = list(range(oracle.num_envs)) if lanes is None else lanes
    flags = torch.tensor(done, dtype=torch.bool)
    first = torch.tensor([len(oracle.lanes[lane]) for lane in chosen])
    steps = first.unsqueeze(1) + torch.arange(flags.shape[1])
    data = goal_transitions(torch.tensor(chosen).unsqueeze(1).expand_as(steps), steps, flags)
    if anew:
        buffer.end_episodes(lanes)
    cut = [[anew and step == 0 for step in range(len(row))] for row in done]
    # Clearing numbers the rows that it keeps anew; what they hold stays.
    oracle.append(done, cut, lanes, payload=steps.tolist())
    if lanes is None:
        buffer.extend(data if oracle.num_envs > 1 else data[0])
    elif isinstance(buffer, ReplayStorage):
        buffer.extend(data, lanes=lanes)
    else:
        buffer.writer.extend(data, lanes=lanes)


def episode_flags(lengths: Sequence[int], unfinished: int = 0) -> list[bool]:
    """Done flags of episodes of these lengths, and of `unfinished` rows after them."""
    flags = [step == length - 1 for length in lengths for step in range(length)]
    return flags + [False] * unfinished


@dataclass(frozen=True)
class History:
    """Blocks of done flags to write one after another: (flags [L][S], lanes or None for all)."""

    capacity: int
    num_envs: int
    blocks: list[tuple[list[list[bool]], list[int] | None]]

    def write(self, buffer: Any) -> RingOracle:
        """Writes it all into the buffer; returns the model of what must be there."""
        oracle = RingOracle(self.capacity, self.num_envs)
        for done, lanes in self.blocks:
            write(buffer, oracle, done, lanes)
        return oracle


def one_lane(capacity: int, *blocks: list[bool]) -> History:
    return History(capacity, 1, [([block], None) for block in blocks])


HISTORIES = {
    "before wrap-around": one_lane(30, episode_flags([5, 1, 7], unfinished=4)),
    "just full": one_lane(13, episode_flags([5, 1, 7])),
    "wrapped": one_lane(17, *[episode_flags([4, 6, 3], unfinished=2)] * 4),
    "wrapped step by step": one_lane(11, *[[flag] for flag in episode_flags([4, 1, 6, 3, 2], 3)]),
    "episode longer than the ring": one_lane(8, episode_flags([3, 30])),
    "unfinished and longer than the ring": one_lane(8, episode_flags([3], unfinished=30)),
    "episode as long as the ring": one_lane(6, episode_flags([2, 6])),
    "episode as long as the ring, then more": one_lane(6, episode_flags([6, 6]), [False] * 2),
    "one place": one_lane(1, episode_flags([2, 1, 3])),
    "lanes": History(
        26,
        3,
        [
            ([episode_flags([5], 2), episode_flags([2, 4], 1), episode_flags([1, 6])], None),
            ([episode_flags([3], 2), episode_flags([5]), episode_flags([4, 1])], None),
        ],
    ),
    "lanes of unequal fill": History(
        24,
        2,
        [
            ([episode_flags([3], 2), episode_flags([], 5)], None),
            ([episode_flags([2, 2])], [1]),
            ([[False], [True]], None),
        ],
    ),
    "a lane wrapped, the others not": History(
        24, 3, [([[False]] * 3, None), ([episode_flags([4, 6], 3)], [1]), ([[True]] * 3, None)]
    ),
}
