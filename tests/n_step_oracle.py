"""What a transition looks like when it is folded with the next ones: a slow loop over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from goal_data import goal_transitions
from oracles import Row
from tensordict import TensorDict
from torch import Tensor

__all__ = ["as_written", "assert_folded", "fold"]

Entries = dict[Any, Tensor]
GoalFunction = Callable[[Tensor, Tensor, dict], Tensor]
FLAGS = [("next", "done"), ("next", "terminated"), ("next", "truncated")]


def as_written(row: Row) -> TensorDict:
    """The transition [] of a row: its payload says which, else its step does, as in `write`."""
    return _transition(row.lane, row.step if row.payload is None else row.payload, row.done)


@cache
def _transition(lane: int, step: int, done: bool) -> TensorDict:
    return goal_transitions(torch.tensor(lane), torch.tensor(step), torch.tensor(done))


@cache
def _entries(row: Row) -> Entries:
    return dict(as_written(row).items(True, True))


def fold(
    episode: Sequence[Row],
    n_steps: int,
    gamma: float,
    *,
    goal: Tensor | None = None,
    reward_fn: GoalFunction | None = None,
    terminated_fn: GoalFunction | None = None,
    info_keys: Sequence[Any] = (),
) -> tuple[Entries, int]:
    """Folds the first of some rows with those after it.

    Args:
        episode: a row and all surviving ones that follow it in its episode.
        n_steps: how many to fold at most.
        gamma: discount of a step.
        goal: [G], seen instead of the desired goal in all of them; None leaves them as written.
        reward_fn: rewards for the goal.
        terminated_fn: whether the goal was reached, which ends the window; None keeps the flags.
        info_keys: what both functions read.

    Returns:
        the entries of the transition [] that must be seen, and m.
    """
    reward, rows = 0.0, [_entries(row) for row in episode[:n_steps]]
    for length, row in enumerate(rows, start=1):
        last = dict(row)
        if goal is not None:
            arguments = (
                last["next", "achieved_goal"].unsqueeze(0),
                goal.unsqueeze(0),
                {key: last[key].unsqueeze(0) for key in info_keys},
            )
            last["next", "desired_goal"] = goal
            last["next", "reward"] = reward_fn(*arguments).reshape(1).float()
            if terminated_fn is not None:
                last["next", "terminated"] = terminated_fn(*arguments).reshape(1)
                last["next", "done"] = last["next", "terminated"] | last["next", "truncated"]
        reward += gamma ** (length - 1) * last["next", "reward"].item()
        if last["next", "terminated"]:
            break
    folded = {key: (last if key[0] == "next" else rows[0])[key] for key in last}
    if goal is not None:
        folded["desired_goal"] = goal
    folded["next", "reward"] = torch.tensor([reward])
    return folded, length


def assert_folded(batch: TensorDict, expected: Sequence[tuple[Entries, int]]) -> None:
    """Compares a batch with what `fold` says of each of its rows."""
    length = torch.tensor([[length] for _, length in expected])
    assert batch["steps_to_next_obs"].dtype == torch.int64
    assert torch.equal(batch["steps_to_next_obs"], length)
    for key in expected[0][0]:
        got, wanted = batch[key], torch.stack([folded[key] for folded, _ in expected])
        assert got.dtype == wanted.dtype, key
        if key == ("next", "reward"):
            # The rewards of the test data reach 10^3.
            assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-3), key
        else:
            assert torch.equal(got, wanted), key
