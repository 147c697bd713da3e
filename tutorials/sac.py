"""SAC in a single file: a plain loop over vector environments.

    python tutorials/sac.py                        # Pendulum-v1, a few minutes
    python tutorials/sac.py --env MountainCarContinuous-v0 --steps 50000
    python tutorials/sac.py --seed 1 --results tutorials/agent_curves.jsonl

The replay buffer is created from the spaces of the environments, and `record` writes each step. `sample`
returns a TensorDict. `--results` appends a line of JSON to a file.

Reference: Haarnoja et al. 2018, arXiv:1812.05905.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from agent_curves import Curve, run
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules import MLP

from trl_storages import UniformReplayStorage

NUM_ENVS = 4
BATCH_SIZE = 128
DISCOUNT = 0.99
LEARNING_RATE = 1e-3
TARGET_RATE = 0.005
FIRST_UPDATE = 1_000  # environment steps taken at random before the first update
STEPS_PER_UPDATE = 1
CURVE_POINTS = 10

layers = partial(MLP, num_cells=[128, 128], activation_class=nn.ReLU)


class Actor(nn.Module):
    """Samples actions `[B, A]` within the bounds of the space."""

    scale: torch.Tensor
    center: torch.Tensor

    def __init__(self, observation_size: int, actions: gymnasium.spaces.Box) -> None:
        super().__init__()
        self.layers = layers(observation_size, 2 * actions.shape[0])
        low, high = torch.from_numpy(actions.low), torch.from_numpy(actions.high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("center", (high + low) / 2)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns actions `[B, A]` and the logarithms of their densities, `[B, 1]`."""
        mean, log_std = self.layers(observations).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        squashed = raw.tanh()
        log_density = normal.log_prob(raw) - ((1 - squashed**2) * self.scale + 1e-6).log()
        return squashed * self.scale + self.center, log_density.sum(-1, keepdim=True)


class Critics(nn.Module):
    """Two values of an action, `[2, B, 1]`."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.both = nn.ModuleList([layers(num_inputs, 1), layers(num_inputs, 1)])

    def forward(self, observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Returns both values."""
        inputs = torch.cat([observations, actions], dim=-1)
        return torch.stack([critic(inputs) for critic in self.both])


class Agent:
    """The networks and one update of them."""

    def __init__(self, observation_size: int, actions: gymnasium.spaces.Box) -> None:
        num_inputs = observation_size + actions.shape[0]
        self.actor = Actor(observation_size, actions)
        self.critics, self.target_critics = Critics(num_inputs), Critics(num_inputs)
        self.target_critics.load_state_dict(self.critics.state_dict())
        self.log_alpha, self.target_entropy = nn.Parameter(torch.zeros(())), -actions.shape[0]
        groups = self.actor.parameters(), self.critics.parameters(), [self.log_alpha]
        self.optimizers = [torch.optim.Adam(group, lr=LEARNING_RATE) for group in groups]

    def update(self, batch: TensorDictBase) -> None:
        """Takes one step of each network on a batch."""
        obs, alpha = batch["observation"], self.log_alpha.exp().detach()
        with torch.no_grad():
            next_obs = batch["next", "observation"]
            actions, log_density = self.actor(next_obs)
            value = self.target_critics(next_obs, actions).amin(0) - alpha * log_density
            # Bootstrap at truncated ends, not at terminal ones.
            continues = ~batch["next", "terminated"]
            target = batch["next", "reward"] + DISCOUNT * value * continues
        critic_loss = ((self.critics(obs, batch["action"]) - target) ** 2).mean(1).sum()
        self.step(1, critic_loss)
        actions, log_density = self.actor(obs)
        self.step(0, (alpha * log_density - self.critics(obs, actions).amin(0)).mean())
        self.step(2, -(self.log_alpha * (log_density.detach() + self.target_entropy)).mean())
        with torch.no_grad():
            pairs = zip(self.target_critics.parameters(), self.critics.parameters(), strict=True)
            for target_parameter, parameter in pairs:
                target_parameter.lerp_(parameter, TARGET_RATE)

    def step(self, number: int, loss: torch.Tensor) -> None:
        """Takes a step of one optimizer."""
        self.optimizers[number].zero_grad()
        loss.backward()
        self.optimizers[number].step()


def train(env: str, steps: int, seed: int) -> Curve:
    """Trains an agent; returns pairs of a step count and the mean return of the last 20 episodes."""
    torch.manual_seed(seed)
    mode = AutoresetMode.SAME_STEP
    envs = gymnasium.make_vec(
        env, num_envs=NUM_ENVS, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=20)
    spaces: tuple[Any, Any] = envs.single_observation_space, envs.single_action_space
    envs.action_space.seed(seed)
    agent = Agent(spaces[0].shape[0], spaces[1])
    buffer = UniformReplayStorage.from_env(
        envs,
        storage_size=-(-steps // NUM_ENVS) * NUM_ENVS,
        batch_size=BATCH_SIZE,
        seed=seed,
    )
    curve: Curve = []
    obs, _ = envs.reset(seed=seed)
    for step in range(NUM_ENVS, steps + 1, NUM_ENVS):
        actions = envs.action_space.sample()
        if step > FIRST_UPDATE:
            with torch.no_grad():
                actions = agent.actor(torch.from_numpy(obs))[0].numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        buffer.record(obs, actions, rewards, terminations, truncations, infos, next_obs)
        obs = next_obs
        for _ in range(NUM_ENVS // STEPS_PER_UPDATE if step > FIRST_UPDATE else 0):
            agent.update(buffer.sample())
        if step * CURVE_POINTS >= steps * (len(curve) + 1) and envs.return_queue:
            curve.append((step, round(float(np.mean(envs.return_queue)), 1)))
            print(f"{step:>8,} steps: return {curve[-1][1]:.1f}", flush=True)
    envs.close()
    return curve


def main(argv: Sequence[str] | None = None) -> Curve:
    return run(train, argv, __doc__, agent="SAC", env="Pendulum-v1", steps=8_000)


if __name__ == "__main__":
    main()
