"""Learns to reach any goal of a maze from a dataset alone, with goals drawn from a mixture.

    python tutorials/offline_goals.py                              # a mixture of goals: about 1 minute
    python tutorials/offline_goals.py --agent future               # the same agent with future goals only

The data show a ball that rolls around at random in PointMaze: short episodes, none of which leads from
one arm of the U-shaped maze to the other. The test requires exactly that. `future` goals of a step come
from its own episode, so an agent that trains on these alone never sees a goal beyond it. `random` goals
come from any episode, so values must be stitched together from episodes that meet, and `current` goals
teach the value of having arrived. The two agents differ only in these shares.

Each batch has two goals, one for the value and one for the actor, drawn by two samplers.

Reference: Park et al. 2025, OGBench, arXiv:2410.20092; the agent is their GCIVL: a value function by
expectile regression (Kostrikov et al. 2021, arXiv:2110.06169), and an advantage-weighted actor.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import torch
from options import need, parse
from torch import Tensor, nn
from torchrl.modules import MLP

from trl_storages import GoalRelabel, HERReplayStorage, HERSampler, ReplayStorage
from trl_storages.datasets import from_arrays

# Strategies of goals: of the value, and of the actor.
AGENTS: dict[str, tuple[Any, Any]] = {
    "mixture": ({"future": 0.5, "random": 0.3, "current": 0.2}, {"future": 0.5, "random": 0.5}),
    "future": ("future", "future"),
}
# Success rates required with the full budget; set before the runs.
AT_LEAST, AT_MOST = {"mixture": 0.80}, {"future": 0.50}
NEAR = 0.45  # PointMaze's distance at which a goal counts as reached
DISCOUNT, EXPECTILE, TEMPERATURE = 0.95, 0.8, 5.0
U_MAZE = [
    [1, 1, 1, 1, 1],
    [1, 0, 0, 0, 1],
    [1, 1, 1, 0, 1],
    [1, 0, 0, 0, 1],
    [1, 1, 1, 1, 1],
]
FREE = [(row, column) for row in range(5) for column in range(5) if not U_MAZE[row][column]]
ENDS = [(1, 1), (3, 1)]  # of the two arms


@dataclass(frozen=True)
class Budget:
    """The numbers of data episodes, updates and tests."""

    episodes: int = 2_000
    updates: int = 10_000
    tests: int = 50


class Slower(gymnasium.Wrapper):
    """Repeats each action for some steps, because the ball barely moves in one step."""

    def __init__(self, env: gymnasium.Env, steps: int = 10) -> None:
        super().__init__(env)
        self.steps = steps

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict]:
        """Takes the steps."""
        for _ in range(self.steps):
            result = self.env.step(action)
        return result


def make_maze() -> gymnasium.Env:
    gymnasium.register_envs(need("gymnasium_robotics"))
    maze = gymnasium.make("PointMaze_UMaze-v3", maze_map=U_MAZE, max_episode_steps=None)
    return Slower(maze.unwrapped)


def roll_around(episodes: int, seed: int, steps: int = 12) -> dict[str, np.ndarray]:
    """Collects data: pushes the ball in a random direction, and soon in another."""
    env, rng = make_maze(), np.random.default_rng(seed)
    observations: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    for episode in range(episodes):
        start = np.array(FREE[rng.integers(len(FREE))])
        obs, _ = env.reset(seed=seed + episode, options={"reset_cell": start})
        for _ in range(steps):
            if not actions or rng.random() < 0.2:
                push = rng.uniform(-1, 1, 2).astype(np.float32)
            observations.append(obs["observation"])
            actions.append(push)
            obs, *_ = env.step(push)
    is_last = np.arange(1, len(actions) + 1) % steps == 0
    return {
        "observations": np.stack(observations),
        "actions": np.stack(actions),
        "timeouts": is_last,
    }


def is_reached(achieved: Tensor, goal: Tensor, _: Mapping[Any, Tensor]) -> Tensor:
    return (achieved - goal).norm(dim=-1) <= NEAR


def make_storage(data: Mapping[str, np.ndarray], agent: str, seed: int) -> ReplayStorage:
    """Creates a buffer whose batches have one goal for the value and one for the actor."""
    value_strategy, actor_strategy = AGENTS[agent]
    storage = from_arrays(
        data,
        preset=HERReplayStorage,
        float_dtype=torch.float32,
        goal_fn=lambda observation: observation[..., :2],
        reward_fn=lambda *args: is_reached(*args).float() - 1,
        terminated_fn=is_reached,
        strategy=value_strategy,
        num_goals=math.inf,
        seed=seed,
    )
    sampler = HERSampler(actor_strategy, math.inf, goal_key="actor_goal", base=storage.sampler)
    storage.set_sampler(sampler)
    storage.append_transform(GoalRelabel(None, goal_key="actor_goal"))
    return storage


class Learner:
    """An actor, and a value function of state and goal."""

    def __init__(self) -> None:
        layers = {"num_cells": [128, 128], "activation_class": nn.ReLU}
        self.value = MLP(6, 1, **layers)
        self.target_value = deepcopy(self.value).requires_grad_(False)
        self.actor = nn.Sequential(MLP(6, 2, **layers), nn.Tanh())
        parameters = [*self.value.parameters(), *self.actor.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def update(self, batch: Mapping[Any, Tensor]) -> None:
        """Takes a gradient step on a batch."""
        loss = self.value_loss(batch) + self.actor_loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target_value.parameters(), self.value.parameters(), strict=True)
            for target_parameter, parameter in pairs:
                target_parameter.lerp_(parameter, 0.02)

    def value_loss(self, batch: Mapping[Any, Tensor]) -> Tensor:
        """Expectile regression: an expectile above 0.5 leans towards the better outcomes."""
        obs, next_obs, goal = (
            batch["observation"],
            batch["next", "observation"],
            batch["desired_goal"],
        )
        with torch.no_grad():
            next_value = self.target_value(torch.cat([next_obs, goal], -1))
            continues = ~batch["next", "terminated"]
            target = batch["next", "reward"] + DISCOUNT * continues * next_value
        error = target - self.value(torch.cat([obs, goal], -1))
        return (torch.where(error > 0, EXPECTILE, 1 - EXPECTILE) * error**2).mean()

    def actor_loss(self, batch: Mapping[Any, Tensor]) -> Tensor:
        """Imitates the actions, weighted by their advantages with respect to the actor's goal."""
        obs, next_obs, goal = (
            batch["observation"],
            batch["next", "observation"],
            batch["actor_goal"],
        )
        inputs = torch.cat([obs, goal], -1)
        with torch.no_grad():
            advantage = self.value(torch.cat([next_obs, goal], -1)) - self.value(inputs)
            weight = (TEMPERATURE * advantage).exp().clamp(max=100)
        difference = self.actor(inputs) - batch["action"]
        return (weight * difference**2).mean()

    @torch.no_grad()
    def act(self, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the actor's action."""
        inputs = np.concatenate([obs["observation"], obs["desired_goal"]])
        return self.actor(torch.from_numpy(inputs).float()).numpy()


def success_rate(learner: Learner, tests: int, seed: int, steps: int = 50) -> float:
    """Returns how often the ball gets from the end of one arm to the end of the other."""
    env, arrivals = make_maze(), 0
    for test in range(tests):
        start, goal = ENDS if test % 2 else ENDS[::-1]
        options = {"reset_cell": np.array(start), "goal_cell": np.array(goal)}
        obs, _ = env.reset(seed=seed + test, options=options)
        for _ in range(steps):
            obs, *_, info = env.step(learner.act(obs))
            if info["success"]:
                arrivals += 1
                break
    return arrivals / tests


def train(agent: str, seed: int, budget: Budget) -> float:
    """Collects data and trains on them; returns the share of tests that succeed."""
    torch.manual_seed(seed)
    storage = make_storage(roll_around(budget.episodes, seed * 1_000_000), agent, seed)
    learner = Learner()
    for _ in range(budget.updates):
        learner.update(storage.sample())
    return success_rate(learner, budget.tests, seed=10**9)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, [*AGENTS], episodes=Budget.episodes, updates=Budget.updates)
    budget = Budget(args.episodes, args.updates)
    rate = train(args.agent, args.seed, budget)
    print(f"{rate:.2f} of the tests succeed")
    return rate


if __name__ == "__main__":
    main()
