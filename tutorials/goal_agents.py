"""Four algorithms for goals, of TorchRL's modules and losses: DQN, DDPG, TD3 and SAC.

Nothing here knows of replay, or of hindsight: a goal is one more input of each network.
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
    """What a training loop needs of an algorithm, whichever it is.

    `policy` acts greedily, `explorer` as it does while it collects, and the entries of `loss` whose
    names begin with "loss" are minimised; the policy's own once in `policy_delay` updates.
    """

    policy: TensorDictModule
    explorer: TensorDictModule
    loss: LossModule
    policy_delay: int = 1


def mlp(num_inputs: int, num_outputs: int) -> MLP:
    # TorchRL's MLP joins the entries that it is given.
    return MLP(num_inputs, num_outputs, num_cells=[256, 256], activation_class=torch.nn.ReLU)


def make_dqn(num_inputs: int, actions: TensorSpec) -> Agent:
    policy = QValueActor(mlp(num_inputs, actions.n), in_keys=INPUTS, spec=actions)
    explorer = TensorDictSequential(policy, EGreedyModule(actions, eps_init=0.1, eps_end=0.1))
    return Agent(policy, explorer, DQNLoss(policy, action_space="categorical", delay_value=True))


def make_critic(num_inputs: int, actions: TensorSpec) -> ValueOperator:
    return ValueOperator(mlp(num_inputs + actions.shape[-1], 1), in_keys=[*INPUTS, "action"])


def make_actor(num_inputs: int, actions: TensorSpec) -> tuple[TensorDictModule, TensorDictModule]:
    policy = TensorDictSequential(
        TensorDictModule(mlp(num_inputs, actions.shape[-1]), in_keys=INPUTS, out_keys=["action"]),
        TanhModule(in_keys=["action"], spec=actions),
    )
    noise = AdditiveGaussianModule(actions, sigma_init=0.2, sigma_end=0.2)
    return policy, TensorDictSequential(policy, noise)


def make_ddpg(num_inputs: int, actions: TensorSpec) -> Agent:
    policy, explorer = make_actor(num_inputs, actions)
    critic = make_critic(num_inputs, actions)
    return Agent(policy, explorer, DDPGLoss(policy, critic, delay_actor=True, delay_value=True))


def make_td3(num_inputs: int, actions: TensorSpec) -> Agent:
    policy, explorer = make_actor(num_inputs, actions)
    loss = TD3Loss(policy, make_critic(num_inputs, actions), action_spec=actions)
    return Agent(policy, explorer, loss, policy_delay=2)


def make_sac(num_inputs: int, actions: TensorSpec) -> Agent:
    network = mlp(num_inputs, 2 * actions.shape[-1])
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
    # With TorchRL's default, an entropy bonus of weight 1, rewards of -1 would hardly count.
    loss = SACLoss(policy, make_critic(num_inputs, actions), action_spec=actions, alpha_init=0.1)
    return Agent(policy, policy, loss)


# Each is made from the size of `INPUTS` together and the spec of one action.
ALGORITHMS: dict[str, Callable[[int, TensorSpec], Agent]] = {
    "dqn": make_dqn,
    "ddpg": make_ddpg,
    "td3": make_td3,
    "sac": make_sac,
}
