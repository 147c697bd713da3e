"""DDPG with TorchRL's loss, for goals that are rarely reached: the agent of fetch_push.py.

Reference: Plappert et al. 2018, arXiv:1802.09464: clipped targets, small actions, scaled inputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from goal_agents import INPUTS
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate

__all__ = ["Agent", "joined"]

DISCOUNT = 0.98
LEARNING_RATE = 1e-3
TARGET_RATE = 0.005
LAYERS = partial(MLP, num_cells=[128, 128, 128], activation_class=nn.ReLU)


class Normalizer(nn.Module):
    """Standardises inputs `[B, D]` by the mean and deviation of earlier inputs, clipped to [-5, 5]."""

    moments: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(2, size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def see(self, inputs: Tensor) -> None:
        """Updates mean and deviation with these inputs."""
        self.moments += torch.stack([inputs, inputs**2]).sum(1, dtype=torch.float64)
        self.count += len(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[B, D]`."""
        mean, square = self.moments / self.count.clamp(min=1)
        deviation = (square - mean**2).clamp(min=1e-4).sqrt()
        return ((inputs - mean.float()) / deviation.float()).clamp(-5, 5)


def joined(observations: Mapping[str, Any] | TensorDictBase) -> Tensor:
    """Returns observations and goals concatenated, `[B, D]`."""
    return torch.cat([torch.as_tensor(observations[key]).float() for key in INPUTS], dim=-1)


class Critic(nn.Module):
    """The value of actions `[B, A]` given inputs `[B, D]`."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.layers = LAYERS(num_inputs + num_actions, 1)

    def forward(self, inputs: Tensor, actions: Tensor) -> Tensor:
        """Returns `[B, 1]`, minus the mean squared action while the actor is trained."""
        values = self.layers(torch.cat([inputs, actions], dim=-1))
        if actions.requires_grad:
            # Without the penalty, actions grow until the tanh saturates and has no gradient.
            values = values - (actions**2).mean(dim=-1, keepdim=True)
        return values


def bounded(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Clips targets to the range of possible returns: the worst is a reward of -1 at every step."""
    return lambda *args, **kwargs: estimate(*args, **kwargs).clamp(-1 / (1 - DISCOUNT), 0)


class Agent(nn.Module):
    """DDPG: the networks and their update."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(LAYERS(num_inputs, num_actions), nn.Tanh())
        policy = TensorDictModule(self.actor, in_keys=["inputs"], out_keys=["action"])
        critic = ValueOperator(Critic(num_inputs, num_actions), in_keys=["inputs", "action"])
        # Priorities favour useful episodes on purpose, so importance weights must not undo them.
        self.loss = DDPGLoss(policy, critic, delay_actor=True, use_prioritized_weights=False)
        self.loss.make_value_estimator(gamma=DISCOUNT)
        estimator = self.loss.value_estimator
        estimator.value_estimate = bounded(estimator.value_estimate)
        self.normalizer = Normalizer(num_inputs)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=LEARNING_RATE, fused=True)
        self.target_updater = SoftUpdate(self.loss, tau=TARGET_RATE)

    @torch.no_grad()
    def act(self, observations: Mapping[str, Any]) -> Tensor:
        """Returns the actor's actions `[E, A]`, in [-1, 1]."""
        return self.actor(self.normalizer(joined(observations)))

    def update(self, batch: TensorDictBase) -> None:
        """Takes one gradient step of each network on a batch, the critic first."""
        for transitions in (batch, batch["next"]):
            transitions["inputs"] = self.normalizer(joined(transitions))
        for loss in (self.loss.loss_value, self.loss.loss_actor):
            self.optimizer.zero_grad()
            loss(batch)[0].backward()
            self.optimizer.step()
        self.target_updater.step()
