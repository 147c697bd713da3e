"""Learns from stacks of 84 x 84 pixel frames, each stored once: double DQN with DrQ's random shifts.

    python tutorials/pixels.py                    # stores each frame once
    python tutorials/pixels.py --agent plain      # stores complete stacks: the same results

A ball falls at an angle and bounces off the walls, and a bat must be below it when it lands. A single
frame does not show the direction of the ball, so the agent sees the newest four, and a transition has
two such stacks: 56 kB. With `frame_stack=` one frame is stored per transition, and batches are bitwise
identical. Each sampled stack is shifted by up to four pixels, all of its frames by the same offset.

Reference: Kostrikov et al. 2020, Image Augmentation Is All You Need, arXiv:2004.13649; Yarats et al.
2021, Mastering Visual Continuous Control, arXiv:2107.09645.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FrameStackObservation
from options import parse
from tensordict import TensorDictBase
from torch import Tensor, nn

from trl_storages import NStepReplayStorage

# Options by which stacks are stored. Results are reported for the first; the second gives the same.
STORED: dict[str, Any] = {"frames": {"frame_stack": 4}, "plain": {}}
AGENTS, AT_LEAST = ("frames",), {"frames": 0.60}  # chance catches 0.3
AT_MOST: dict[str, float] = {}
SIDE, CELLS, SHIFT, N_STEP, DISCOUNT, BATCH_SIZE = 84, 12, 4, 3, 0.95, 32


@dataclass(frozen=True)
class Budget:
    """The numbers of steps: in total, before the first update, and per update."""

    steps: int = 5_000
    before: int = 300
    every: int = 3


class Catch(gymnasium.Env):
    """A ball of one cell falls at an angle; a bat of three must catch it. The reward is 1 for a catch."""

    observation_space, action_space = Box(0, 255, (SIDE, SIDE), np.uint8), Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Drops a new ball."""
        super().reset(seed=seed)
        self._row, self._bat = 0, CELLS // 2
        self._column = int(self.np_random.integers(CELLS))
        self._drift = int(self.np_random.integers(-1, 2))
        return self._picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Moves the bat to the left (0), not (1), or to the right (2), and the ball."""
        self._bat = min(max(self._bat + int(action) - 1, 1), CELLS - 2)
        if not 0 <= self._column + self._drift < CELLS:
            self._drift = -self._drift
        self._row, self._column = self._row + 1, self._column + self._drift
        landed = self._row == CELLS - 1
        caught = landed and abs(self._column - self._bat) <= 1
        return self._picture(), float(caught), landed, False, {}

    def _picture(self) -> np.ndarray:
        cells = np.zeros((CELLS, CELLS), np.uint8)
        cells[-1, self._bat - 1 : self._bat + 2] = 160
        cells[self._row, self._column] = 255
        return cells.repeat(SIDE // CELLS, 0).repeat(SIDE // CELLS, 1)


def make_storage(agent: str, seed: int, size: int) -> NStepReplayStorage:
    """Creates a buffer of stacks, or of single frames from which stacks are rebuilt."""
    env = FrameStackObservation(Catch(), 4)
    options = {"batch_size": BATCH_SIZE, "n_step": N_STEP, "discount": DISCOUNT, **STORED[agent]}
    return NStepReplayStorage.from_env(env, storage_size=size, seed=seed, **options)


def shifted(stacks: Tensor) -> Tensor:
    """Shifts each stack by up to four pixels: `[B, 4, 84, 84]` bytes in, floats in [0, 1] out."""
    padded = nn.functional.pad(stacks.float() / 255, [SHIFT] * 4, mode="replicate")
    windows = padded.unfold(2, SIDE, 1).unfold(3, SIDE, 1)  # [B, 4, 9, 9, 84, 84], a view
    down, right = torch.randint(2 * SHIFT + 1, (2, len(stacks)))
    return windows[torch.arange(len(stacks)), :, down, right]


class Learner:
    """Double Q-learning on frame stacks."""

    def __init__(self) -> None:
        encoder = [nn.Conv2d(4, 16, 7, stride=7), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
        head = [nn.Flatten(), nn.Linear(16 * 10 * 10, 64), nn.ReLU(), nn.Linear(64, 3)]
        self.network = nn.Sequential(*encoder, *head)
        self.target_network = deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)

    def update(self, batch: TensorDictBase) -> None:
        """Takes a gradient step on a batch of n-step transitions."""
        obs, next_obs = shifted(batch["observation"]), shifted(batch["next", "observation"])
        values = self.network(obs).gather(1, batch["action"].view(-1, 1))
        with torch.no_grad():
            best = self.network(next_obs).argmax(1, keepdim=True)
            value = self.target_network(next_obs).gather(1, best) * ~batch["next", "terminated"]
            target = batch["next", "reward"] + DISCOUNT ** batch["steps_to_next_obs"] * value
        self.optimizer.zero_grad()
        nn.functional.smooth_l1_loss(values, target).backward()
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target_network.parameters(), self.network.parameters(), strict=True)
            for target_parameter, parameter in pairs:
                target_parameter.lerp_(parameter, 0.02)

    @torch.no_grad()
    def act(self, stack: np.ndarray) -> int:
        """Returns the action with the largest value."""
        return int(self.network(torch.from_numpy(stack).unsqueeze(0) / 255).argmax())


def train(agent: str, seed: int, budget: Budget, curve: list[float] | None = None) -> float:
    """Returns the share of balls caught after training; appends the share in each tenth to `curve`."""
    torch.manual_seed(seed)
    learner, rng = Learner(), np.random.default_rng(seed)
    env, caught = FrameStackObservation(Catch(), 4), []
    storage = make_storage(agent, seed, budget.steps)
    stack, _ = env.reset(seed=seed)
    for step in range(1, budget.steps + 1):
        explores = rng.random() < max(0.05, 1 - 2 * step / budget.steps)
        action = int(rng.integers(3)) if explores else learner.act(stack)
        next_stack, reward, terminated, truncated, info = env.step(action)
        storage.record(stack, action, reward, terminated, truncated, info, next_stack)
        stack = next_stack
        if terminated:
            caught.append(float(reward))
            stack, _ = env.reset()
        if step > budget.before and step % budget.every == 0:
            learner.update(storage.sample())
        if curve is not None and step % (budget.steps // 10) == 0:
            curve.append(float(np.mean(caught[-50:])))
            print(f"{step:>6} steps: {curve[-1]:.2f} are caught")
    return share_caught(learner, 10_000 * (seed + 1))


def share_caught(learner: Learner, seed: int, episodes: int = 100) -> float:
    """Returns the share of balls that the greedy policy catches."""
    env, caught = FrameStackObservation(Catch(), 4), 0.0
    for episode in range(episodes):
        (stack, _), done = env.reset(seed=seed + episode), False
        while not done:
            stack, reward, done, _, _ = env.step(learner.act(stack))
        caught += float(reward)
    return caught / episodes


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, [*STORED], minimum=10, steps=Budget.steps)
    rate = train(args.agent, args.seed, Budget(args.steps), [])
    print(f"{rate:.2f} of the balls are caught in the end")
    return rate


if __name__ == "__main__":
    main()
