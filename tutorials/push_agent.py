"""DDPG in plain torch, for goals that are rarely reached: the agent of fetch_push.py.

Reference: Plappert et al. 2018, arXiv:1802.09464: bounded targets, small actions, scaled inputs.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from goal_agents import INPUTS
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import MLP

__all__ = ["Agent", "joined"]

DISCOUNT = 0.98
LEARNING_RATE = 1e-3
TARGET_RATE = 0.005


class Normalizer(nn.Module):
    """Shifts and scales inputs `[B, D]` to mean 0 and deviation 1 of all it has seen, within 5."""

    moments: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(2, size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def see(self, inputs: Tensor) -> None:
        """Takes inputs into account."""
        self.moments += torch.stack([inputs, inputs**2]).sum(1, dtype=torch.float64)
        self.count += len(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[B, D]`."""
        mean, square = self.moments / self.count.clamp(min=1)
        deviation = (square - mean**2).clamp(min=1e-4).sqrt()
        return ((inputs - mean.float()) / deviation.float()).clamp(-5, 5)


def joined(observations: Mapping[str, Any] | TensorDictBase) -> Tensor:
    """Returns observations and goals side by side, `[B, D]`."""
    return torch.cat([torch.as_tensor(observations[key]).float() for key in INPUTS], dim=-1)


class Agent(nn.Module):
    """DDPG: the networks, and one update of them."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        layers = partial(MLP, num_cells=[128, 128, 128], activation_class=nn.ReLU)
        self.actor = nn.Sequential(layers(num_inputs, num_actions), nn.Tanh())
        self.critic = layers(num_inputs + num_actions, 1)
        self.trained = nn.ModuleList([self.actor, self.critic])
        self.targets, self.normalizer = copy.deepcopy(self.trained), Normalizer(num_inputs)
        parts = [part.parameters() for part in self.trained]
        self.optimizers = [torch.optim.Adam(part, lr=LEARNING_RATE, fused=True) for part in parts]

    @torch.no_grad()
    def act(self, observations: Mapping[str, Any]) -> Tensor:
        """Returns the best known actions `[E, A]`, in [-1, 1]."""
        return self.actor(self.normalizer(joined(observations)))

    def update(self, batch: TensorDictBase) -> None:
        """Takes one step of each network on a batch."""
        before, after = self.normalizer(joined(batch)), self.normalizer(joined(batch["next"]))
        with torch.no_grad():
            actor, critic = self.targets
            value = critic(torch.cat([after, actor(after)], dim=-1))
            # No return is beyond these: at worst, -1 is the reward of every step to come.
            wanted = batch["next", "reward"] + DISCOUNT * value
            wanted = wanted.clamp(-1 / (1 - DISCOUNT), 0)
        values = self.critic(torch.cat([before, batch["action"]], dim=-1))
        self.step(1, ((values - wanted) ** 2).mean())
        actions = self.actor(before)
        # Without the squares, actions grow until the tanh has no gradient any more.
        self.step(0, (actions**2).mean() - self.critic(torch.cat([before, actions], dim=-1)).mean())
        with torch.no_grad():
            pairs = zip(self.targets.parameters(), self.trained.parameters(), strict=True)
            for target, parameter in pairs:
                target.lerp_(parameter, TARGET_RATE)

    def step(self, number: int, loss: Tensor) -> None:
        """Takes a step of one network."""
        self.optimizers[number].zero_grad()
        loss.backward(inputs=list(self.trained[number].parameters()))
        self.optimizers[number].step()
