"""Goal transitions whose every field tells which row it is from.

The root achieved goal, the next one and both desired goals of a row are four different values, so a
test sees at once where a goal came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from oracles import RingOracle, Row
from tensordict import TensorDict
from torch import Tensor

from trl_storages import ReplayTransform
from trl_storages.packed import RowView

__all__ = [
    "GOAL_SIZE",
    "AsDrawn",
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
) -> None:
    """Writes the same block of rows, `done` [E][S], into a buffer and into the model."""
    flags = torch.tensor(done, dtype=torch.bool)
    first = torch.tensor([len(lane) for lane in oracle.lanes])
    steps = first.unsqueeze(1) + torch.arange(flags.shape[1])
    lanes = torch.arange(oracle.num_envs).unsqueeze(1).expand_as(steps)
    data = goal_transitions(lanes, steps, flags)
    oracle.append(done)
    buffer.extend(data if oracle.num_envs > 1 else data[0])


def episode_flags(lengths: Sequence[int], unfinished: int = 0) -> list[bool]:
    """Done flags of episodes of these lengths, and of `unfinished` rows after them."""
    flags = [step == length - 1 for length in lengths for step in range(length)]
    return flags + [False] * unfinished
