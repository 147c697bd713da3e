"""Four goal-conditioned algorithms from TorchRL's modules and losses: DQN, DDPG, TD3 and SAC.

This file does not depend on replay or HER: the goal is one more input of each network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import TensorSpec
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhModule,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import DDPGLoss, DQNLoss, LossModule, SACLoss, TD3Loss

__all__ = ["ALGORITHMS", "INPUTS", "Agent"]

INPUTS = ["observation", "desired_goal"]


@dataclass
class Agent:
    """The modules of an algorithm that a training loop uses.

    `policy` acts greedily and `explorer` collects data. The outputs of `loss` whose names begin with
    "loss" are minimised, the policy's own only once every `policy_delay` updates.
    """

    policy: TensorDictModule
    explorer: TensorDictModule
    loss: LossModule
    policy_delay: int = 1


class Network(torch.nn.Module):
    """Two hidden layers over inputs that are concatenated and standardised.

    A robot's positions vary by centimetres around a metre; a network barely sees such differences until
    they are standardised to mean 0 and standard deviation 1.

    Args:
        examples: `[n, num_inputs]` values of `INPUTS`, concatenated, that give mean and deviation.
        num_outputs: size of the output.
        num_actions: size of an action that is a further input, not scaled.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, examples: torch.Tensor, num_outputs: int, num_actions: int = 0) -> None:
        super().__init__()
        actions = examples.new_zeros(num_actions)
        self.register_buffer("mean", torch.cat([examples.mean(dim=0), actions]))
        # Inputs that barely vary stay small, or their noise would be scaled up to the size of the rest.
        deviation = examples.std(dim=0).clamp(min=0.01)
        self.register_buffer("deviation", torch.cat([deviation, actions + 1]))
        self.mlp = MLP(
            len(self.mean), num_outputs, num_cells=[256, 256], activation_class=torch.nn.ReLU
        )

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns `[..., num_outputs]`."""
        return self.mlp((torch.cat(inputs, dim=-1) - self.mean) / self.deviation)


def make_dqn(examples: torch.Tensor, actions: TensorSpec) -> Agent:
    policy = QValueActor(Network(examples, actions.n), in_keys=INPUTS, spec=actions)
    explorer = TensorDictSequential(policy, EGreedyModule(actions, eps_init=0.1, eps_end=0.1))
    return Agent(policy, explorer, DQNLoss(policy, action_space="categorical", delay_value=True))


def make_critic(examples: torch.Tensor, actions: TensorSpec) -> ValueOperator:
    return ValueOperator(Network(examples, 1, actions.shape[-1]), in_keys=[*INPUTS, "action"])


def make_actor(
    examples: torch.Tensor, actions: TensorSpec
) -> tuple[TensorDictModule, TensorDictModule]:
    policy = TensorDictSequential(
        TensorDictModule(Network(examples, actions.shape[-1]), in_keys=INPUTS, out_keys=["action"]),
        TanhModule(in_keys=["action"], spec=actions),
    )
    noise = AdditiveGaussianModule(actions, sigma_init=0.2, sigma_end=0.2)
    return policy, TensorDictSequential(policy, noise)


def make_ddpg(examples: torch.Tensor, actions: TensorSpec) -> Agent:
    policy, explorer = make_actor(examples, actions)
    critic = make_critic(examples, actions)
    return Agent(policy, explorer, DDPGLoss(policy, critic, delay_actor=True, delay_value=True))


def make_td3(examples: torch.Tensor, actions: TensorSpec) -> Agent:
    policy, explorer = make_actor(examples, actions)
    loss = TD3Loss(policy, make_critic(examples, actions), action_spec=actions)
    return Agent(policy, explorer, loss, policy_delay=2)


def make_sac(examples: torch.Tensor, actions: TensorSpec) -> Agent:
    network = Network(examples, 2 * actions.shape[-1])
    policy = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(network, in_keys=INPUTS, out_keys=["parameters"]),
            TensorDictModule(NormalParamExtractor(), ["parameters"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        spec=actions,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": actions.space.low, "high": actions.space.high},
    )
    # TorchRL's default, an entropy bonus of weight 1, would drown out rewards of -1.
    loss = SACLoss(policy, make_critic(examples, actions), action_spec=actions, alpha_init=0.1)
    return Agent(policy, policy, loss)


# Each accepts examples `[n, num_inputs]` of the concatenated `INPUTS`, and the spec of one action.
ALGORITHMS: dict[str, Callable[[torch.Tensor, TensorSpec], Agent]] = {
    "dqn": make_dqn,
    "ddpg": make_ddpg,
    "td3": make_td3,
    "sac": make_sac,
}
