"""Learns from images as DrQ-v2 does: one process acts and trains, others sample its batches from disk.

    python tutorials/pixels_on_disk.py                             # catches a ball, from 8 x 8 pixels
    python tutorials/pixels_on_disk.py --path replay --keep        # and keeps the transitions
    python tutorials/pixels_on_disk.py --path replay --keep        # again: resumes with them

A replay buffer of images outgrows the memory, and gathering batches takes time from the learner. So the
transitions are on disk, in `--path`, and each frame of the stacks is stored once. `buffer.record` writes
steps there. Each worker of `buffer.loader` samples from the directory in its own process; it always sees
complete transitions, and new ones at each batch. If the program is killed, `--path` resumes with the
stored transitions. Without `--keep` the files are deleted at the end.

Reference: Yarats et al. 2022, Mastering Visual Continuous Control: Improved Data-Augmented
Reinforcement Learning, arXiv:2107.09645, here with DQN and the actions left, stay and right.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FrameStackObservation
from options import OneLineParser, integer_from
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Categorical
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from trl_storages import NStepReplayStorage

SIDE, PAD, FRAMES = 8, 1, 4


class Catch(gymnasium.Env):
    """A ball falls from a random column; a bat of three pixels must be below it when it lands."""

    observation_space = Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Drops a new ball."""
        super().reset(seed=seed)
        self._row, self._column = 0, int(self.np_random.integers(SIDE))
        self._bat = int(self.np_random.integers(1, SIDE - 1))
        return self._picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Moves bat and ball."""
        self._bat = min(max(self._bat + int(action) - 1, 1), SIDE - 2)
        self._row += 1
        landed = self._row == SIDE - 1
        caught = landed and abs(self._column - self._bat) <= 1
        return self._picture(), float(caught), landed, False, {"caught": caught}

    def _picture(self) -> np.ndarray:
        picture = np.zeros((SIDE, SIDE), np.uint8)
        picture[self._row, self._column] = 255
        picture[-1, self._bat - 1 : self._bat + 2] = 160
        return picture


def make_network() -> nn.Module:
    """Returns a network that maps stacks of images to action values."""
    return nn.Sequential(
        nn.Conv2d(FRAMES, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(-3),
        nn.Linear(32 * (SIDE // 2) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 3),
    )


def shifted(stacks: Tensor) -> Tensor:
    """Shifts each stack by up to a pixel, the augmentation of DrQ: uint8 in, floats in [0, 1] out."""
    padded = nn.functional.pad(stacks.float() / 255, [PAD] * 4)
    windows = padded.unfold(2, SIDE, 1).unfold(3, SIDE, 1)  # [B, 4, 3, 3, 8, 8], a view
    down, right = torch.randint(2 * PAD + 1, (2, len(stacks)))
    return windows[torch.arange(len(stacks)), :, down, right]


class Learner:
    """DQN on frame stacks."""

    def __init__(self) -> None:
        self.network = make_network()
        actor = QValueActor(self.network, spec=Categorical(3))
        self.loss = DQNLoss(actor, action_space="categorical", delay_value=True)
        self.loss.make_value_estimator(gamma=0.99)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)
        self.target_updater = SoftUpdate(self.loss, tau=0.05)

    def update(self, batch: TensorDictBase) -> None:
        """Takes a gradient step on a batch."""
        for key in ("observation", ("next", "observation")):
            batch[key] = shifted(batch[key])
        self.optimizer.zero_grad()
        self.loss(batch)["loss"].backward()
        self.optimizer.step()
        self.target_updater.step()

    @torch.no_grad()
    def act(self, observation: np.ndarray) -> int:
        """Returns the action with the largest value."""
        stack = torch.from_numpy(observation).float().unsqueeze(0) / 255
        return int(self.network(stack).argmax())


def train(arguments: argparse.Namespace, path: Path) -> float:
    """Acts and trains; returns the share of balls caught after training."""
    torch.manual_seed(arguments.seed)
    env, learner = FrameStackObservation(Catch(), FRAMES), Learner()
    rng = np.random.default_rng(arguments.seed)
    buffer = NStepReplayStorage.from_env(
        env,
        storage_size=arguments.storage_size,
        batch_size=64,
        n_step=3,
        frame_stack=FRAMES,
        path=path,
    )
    print(f"{len(buffer)} steps were stored before")
    batches = iter(
        buffer.loader(
            arguments.workers,
            pin_memory=True,
            seed=arguments.seed,
            multiprocessing_context=arguments.start if arguments.workers else None,
        )
    )
    observation, _ = env.reset(seed=arguments.seed)
    for step in range(arguments.steps):
        explore = rng.random() < max(0.1, 1 - 2 * step / arguments.steps)
        action = int(rng.integers(3)) if explore else learner.act(observation)
        next_observation, reward, terminated, truncated, info = env.step(action)
        buffer.record(observation, action, reward, terminated, truncated, info, next_observation)
        observation = env.reset()[0] if terminated else next_observation
        if len(buffer) >= 500 and step % 2 == 0:
            learner.update(next(batches))
    rate = evaluate(learner, env)
    print(f"{rate:.2f} of the balls are caught, {len(buffer)} steps are stored")
    del batches  # stops the workers
    buffer.close(keep=arguments.keep)
    return rate


def evaluate(learner: Learner, env: gymnasium.Env, episodes: int = 100) -> float:
    caught = 0
    for _ in range(episodes):
        observation, done = env.reset()[0], False
        while not done:
            observation, _, done, _, info = env.step(learner.act(observation))
        caught += info["caught"]
    return caught / episodes


def main(argv: Sequence[str] | None = None) -> float:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--path", type=Path, help="directory of the transitions; a temporary one otherwise"
    )
    parser.add_argument("--keep", action="store_true", help="keep the transitions at the end")
    parser.add_argument("--workers", type=integer_from(0), default=2, help="processes that sample")
    parser.add_argument("--steps", type=integer_from(1), default=6_000)
    parser.add_argument("--storage-size", type=integer_from(1), default=20_000)
    parser.add_argument("--seed", type=integer_from(0), default=0)
    parser.add_argument("--start", choices=["spawn", "fork"], default="spawn", help="of workers")
    arguments = parser.parse_args(argv)
    if arguments.path is not None:
        return train(arguments, arguments.path)
    with tempfile.TemporaryDirectory() as directory:
        return train(arguments, Path(directory) / "replay")


if __name__ == "__main__":
    main()
