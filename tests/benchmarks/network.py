"""A network whose updates lie between the draws of a training loop.

Letters: B batch.
"""

import time

import torch
from torch import nn

from tests.benchmarks.data import FLAT_SIZE
from tests.benchmarks.measure import Effort

__all__ = ["Network"]

# The least that an update takes. Of small agents on a CPU it takes 2 to 3 ms.
UPDATE_SECONDS = 2.5e-3
NARROWEST = 32


class Network:
    """A value network of two hidden layers that learns from the same batch over and over.

    Args:
        width: of its layers.
        batch_size: B.
        device: where it is, as torch names it.
    """

    def __init__(self, width: int, batch_size: int, device: str):
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FLAT_SIZE, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        ).to(device)
        self.optimizer = torch.optim.Adam(self.layers.parameters())
        self.observations = torch.randn(batch_size, FLAT_SIZE, device=device)
        self.returns = torch.randn(batch_size, 1, device=device)

    def update(self) -> None:
        """Takes one step down the gradient, whatever was drawn meanwhile."""
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.layers(self.observations), self.returns).backward()
        self.optimizer.step()

    def seconds(self, effort: Effort) -> float:
        """Returns the least time of an update, which other processes lengthen least."""
        taken = []
        for _ in range(15):
            effort.wait()
            begin = time.perf_counter()
            self.update()
            effort.wait()
            taken.append(time.perf_counter() - begin)
        return min(taken)

    @classmethod
    def as_slow_as_wanted(cls, batch_size: int, effort: Effort) -> "Network":
        """Returns the narrowest network, by steps of a sixth, whose update takes 2.5 ms or more."""
        network, width = cls(NARROWEST, batch_size, effort.device), NARROWEST
        while network.seconds(effort) < UPDATE_SECONDS:
            width += max(width // 6, 1)
            network = cls(width, batch_size, effort.device)
        return network
