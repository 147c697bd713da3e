"""DQN with 3-step returns in a single file: a plain loop over vector environments.

    python tutorials/dqn.py                        # CartPole-v1, about a minute
    python tutorials/dqn.py --env Acrobot-v1 --steps 100000
    python tutorials/dqn.py --seed 1 --results tutorials/agent_curves.jsonl

The replay buffer is created from the spaces of the environments, and `record` writes each step. `sample`
returns a TensorDict with 3-step returns. `--results` appends a line of JSON to a file.

Reference: Mnih et al. 2015; Watkins 1989 for n-step returns.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from agent_curves import Curve, run
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torch import nn

from trl_storages import NStepReplayStorage

NUM_ENVS = 8
BATCH_SIZE = 128
DISCOUNT = 0.99
LEARNING_RATE = 1e-3
FIRST_UPDATE = 1_000  # environment steps taken at random before the first update
STEPS_PER_UPDATE = 4
UPDATES_PER_TARGET = 100
FIRST_EPSILON, LAST_EPSILON = 1.0, 0.02
EXPLORING = 0.4  # share of the steps in which epsilon decreases
CURVE_POINTS = 10


class QNetwork(nn.Sequential):
    """Returns `[B, A]`, the value of each action."""

    def __init__(self, observation_size: int, num_actions: int) -> None:
        super().__init__(
            nn.Linear(observation_size, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, num_actions),
        )


def td_loss(batch: TensorDictBase, network: QNetwork, target_network: QNetwork) -> torch.Tensor:
    """Compares values with m-step returns that bootstrap from the best value m steps later."""
    with torch.no_grad():
        best = target_network(batch["next", "observation"]).amax(dim=-1, keepdim=True)
        # Windows are shorter at episode ends; bootstrap at truncated ends, not at terminal ones.
        discount = DISCOUNT ** batch["steps_to_next_obs"]
        continues = ~batch["next", "terminated"]
        target_values = batch["next", "reward"] + discount * best * continues
    values = network(batch["observation"]).gather(-1, batch["action"].reshape(-1, 1))
    return nn.functional.smooth_l1_loss(values, target_values)


def train(env: str, steps: int, seed: int) -> Curve:
    """Trains an agent; returns pairs of a step count and the mean return of the last 20 episodes."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = gymnasium.make_vec(
        env,
        num_envs=NUM_ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=20)
    envs.action_space.seed(seed)
    spaces: tuple[Any, Any] = envs.single_observation_space, envs.single_action_space
    network, target_network = (QNetwork(spaces[0].shape[0], spaces[1].n) for _ in range(2))
    target_network.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    buffer = NStepReplayStorage.from_env(
        envs,
        storage_size=50_000 // NUM_ENVS * NUM_ENVS,
        n_step=3,
        discount=DISCOUNT,
        batch_size=BATCH_SIZE,
        seed=seed,
    )

    curve: Curve = []
    num_updates = 0
    obs, _ = envs.reset(seed=seed)
    for step in range(NUM_ENVS, steps + 1, NUM_ENVS):
        done_exploring = step / (EXPLORING * steps)
        epsilon = max(FIRST_EPSILON + (LAST_EPSILON - FIRST_EPSILON) * done_exploring, LAST_EPSILON)
        actions = envs.action_space.sample()
        if step > FIRST_UPDATE:
            with torch.no_grad():
                greedy = network(torch.from_numpy(obs)).argmax(-1).numpy()
            actions = np.where(rng.random(NUM_ENVS) < epsilon, actions, greedy)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        buffer.record(obs, actions, rewards, terminations, truncations, infos, next_obs)
        obs = next_obs
        for _ in range(NUM_ENVS // STEPS_PER_UPDATE if step > FIRST_UPDATE else 0):
            optimizer.zero_grad()
            td_loss(buffer.sample(), network, target_network).backward()
            optimizer.step()
            num_updates += 1
            if num_updates % UPDATES_PER_TARGET == 0:
                target_network.load_state_dict(network.state_dict())
        if step * CURVE_POINTS >= steps * (len(curve) + 1) and envs.return_queue:
            curve.append((step, round(float(np.mean(envs.return_queue)), 1)))
            print(f"{step:>8,} steps: return {curve[-1][1]:.1f}", flush=True)
    envs.close()
    return curve


def main(argv: Sequence[str] | None = None) -> Curve:
    return run(train, argv, __doc__, agent="DQN", env="CartPole-v1", steps=20_000)


if __name__ == "__main__":
    main()
