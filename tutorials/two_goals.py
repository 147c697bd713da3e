"""Offline: a batch with one goal for the value and another for the actor.

    python tutorials/two_goals.py                 # learns to walk to any goal, 20 seconds on one core

The data are random walks on a plane. `HERReplayStorage` samples the goals of the value, `desired_goal`,
as a mixture; a second `HERSampler` samples the goals of the actor, `actor_goal`, from the future of the
episode. The losses are an expectile value and advantage-weighted cloning, as in `offline_goals.py`.
"""

import copy
from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from options import parse
from torch import Tensor, nn
from torchrl.modules import MLP

from trl_storages import GoalRelabel, HERReplayStorage, HERSampler, ReplayStorage
from trl_storages.datasets import from_arrays

NEAR, DISCOUNT = 0.1, 0.95


def is_near(position: Tensor, goal: Tensor, transition: object) -> Tensor:
    """Returns whether goals are reached, `[B, 2]` and `[B, 2]` to `[B]`."""
    return (position - goal).norm(dim=-1) < NEAR


def make_buffer(seed: int) -> ReplayStorage:
    """Returns a replay buffer of 100 random walks of 100 steps from (0, 0)."""
    moves = np.random.default_rng(seed).uniform(-0.1, 0.1, (100, 100, 2)).astype("float32")
    positions = moves.cumsum(1) - moves
    is_last = np.arange(10_000) % 100 == 99
    buffer = from_arrays(
        {
            "observations": positions.reshape(-1, 2),
            "actions": moves.reshape(-1, 2),
            "timeouts": is_last,
        },
        preset=HERReplayStorage,
        num_goals=inf,
        strategy={"future": 0.5, "random": 0.3, "current": 0.2},
        goal_fn=lambda position: position,
        reward_fn=lambda position, goal, transition: (
            is_near(position, goal, transition).float() - 1
        ),
        terminated_fn=is_near,
        seed=seed,
    )
    buffer.set_sampler(HERSampler("future", inf, goal_key="actor_goal", base=buffer.sampler))
    buffer.append_transform(GoalRelabel(None, goal_key="actor_goal"))
    return buffer


def train(num_updates: int, seed: int = 0) -> tuple[float, nn.Module]:
    """Trains for some updates.

    Returns:
        the share of goals that the actor reaches, and the actor.
    """
    torch.manual_seed(seed)
    buffer = make_buffer(seed)
    value, actor = MLP(4, 1, num_cells=[64, 64]), MLP(4, 2, num_cells=[64, 64])
    optimizer = torch.optim.Adam([*value.parameters(), *actor.parameters()], lr=1e-3)
    for update, batch in enumerate(buffer.batches(num_updates)):
        if update % 50 == 0:
            target_value = copy.deepcopy(value)
        obs, next_obs = batch["observation"], batch["next", "observation"]
        with torch.no_grad():
            not_terminated = ~batch["next", "terminated"]
            bootstrap = target_value(next_obs, batch["desired_goal"]) * not_terminated
            advantage = value(next_obs, batch["actor_goal"]) - value(obs, batch["actor_goal"])
        error = batch["next", "reward"] + DISCOUNT * bootstrap - value(obs, batch["desired_goal"])
        action_error = actor(obs, batch["actor_goal"]) - batch["action"]
        expectile = torch.where(error > 0, 0.8, 0.2)
        weight = (10 * advantage).exp().clamp(max=100)
        optimizer.zero_grad()
        (expectile * error**2 + weight * action_error**2).mean().backward()
        optimizer.step()
    return share_reached(actor), actor


@torch.no_grad()
def share_reached(actor: nn.Module, num_goals: int = 200) -> float:
    """Returns the share of goals up to 0.8 away that the actor reaches within 50 steps."""
    generator = torch.Generator().manual_seed(0)
    angle, distance = torch.rand(2, num_goals, 1, generator=generator)
    angle, distance = 2 * torch.pi * angle, 0.2 + 0.6 * distance
    goals = distance * torch.cat([angle.cos(), angle.sin()], -1)
    position, reached = torch.zeros(num_goals, 2), torch.zeros(num_goals, dtype=torch.bool)
    for _ in range(50):
        position = position + actor(position, goals).clamp(-0.1, 0.1)
        reached |= is_near(position, goals, None)
    return float(reached.float().mean())


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, updates=2_000)
    share, _ = train(args.updates, args.seed)
    print(f"{share:.2f} of the goals are reached")
    return share


if __name__ == "__main__":
    main()
