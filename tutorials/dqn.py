"""DQN with 3-step returns in a single file: a plain loop over vector environments.

    python tutorials/dqn.py                        # CartPole-v1, about a minute
    python tutorials/dqn.py --env Acrobot-v1 --steps 100000
    python tutorials/dqn.py --seed 1 --results tutorials/agent_curves.jsonl

The replay buffer is created from the environments' spaces and filled by `record`; `sample` returns a
TensorDict, here with 3-step returns. `--results` appends a line of JSON to a file.

Reference: Mnih et al. 2015; Watkins 1989 for n-step returns.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from options import OneLineParser, integer_from
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
FIRST_EPSILON, LAST_EPSILON, EXPLORING = 1.0, 0.02, 0.4  # last: share of the steps
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


def td_loss(batch: TensorDictBase, network: QNetwork, target: QNetwork) -> torch.Tensor:
    """Compares values with the rewards of m steps plus the best value m steps later, if there is one."""
    with torch.no_grad():
        best = target(batch["next", "observation"]).amax(dim=-1, keepdim=True)
        # Windows are shorter at episode ends; bootstrap at truncated ends, not at terminal ones.
        discount = DISCOUNT ** batch["steps_to_next_obs"]
        goes_on = ~batch["next", "terminated"]
        wanted = batch["next", "reward"] + discount * best * goes_on
    values = network(batch["observation"]).gather(-1, batch["action"].reshape(-1, 1))
    return nn.functional.smooth_l1_loss(values, wanted)


def train(env: str, steps: int, seed: int) -> list[tuple[int, float]]:
    """Trains an agent; returns pairs of a step count and the mean return of the last 20 episodes."""
    torch.manual_seed(seed)
    explores = np.random.default_rng(seed)
    envs = gymnasium.make_vec(
        env,
        num_envs=NUM_ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=20)
    envs.action_space.seed(seed)
    spaces: tuple[Any, Any] = envs.single_observation_space, envs.single_action_space
    network, target = (QNetwork(spaces[0].shape[0], spaces[1].n) for _ in range(2))
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    storage = NStepReplayStorage.from_env(
        envs,
        storage_size=50_000 // NUM_ENVS * NUM_ENVS,
        n_step=3,
        discount=DISCOUNT,
        batch_size=BATCH_SIZE,
        seed=seed,
    )

    curve: list[tuple[int, float]] = []
    num_updates = 0
    observations, _ = envs.reset(seed=seed)
    for step in range(NUM_ENVS, steps + 1, NUM_ENVS):
        done_exploring = step / (EXPLORING * steps)
        epsilon = max(FIRST_EPSILON + (LAST_EPSILON - FIRST_EPSILON) * done_exploring, LAST_EPSILON)
        actions = envs.action_space.sample()
        if step > FIRST_UPDATE:
            with torch.no_grad():
                greedy = network(torch.from_numpy(observations)).argmax(-1).numpy()
            actions = np.where(explores.random(NUM_ENVS) < epsilon, actions, greedy)
        after, rewards, terminations, truncations, infos = envs.step(actions)
        storage.record(observations, actions, rewards, terminations, truncations, infos, after)
        observations = after
        for _ in range(NUM_ENVS // STEPS_PER_UPDATE if step > FIRST_UPDATE else 0):
            optimizer.zero_grad()
            td_loss(storage.sample(), network, target).backward()
            optimizer.step()
            num_updates += 1
            if num_updates % UPDATES_PER_TARGET == 0:
                target.load_state_dict(network.state_dict())
        if step * CURVE_POINTS >= steps * (len(curve) + 1) and envs.return_queue:
            curve.append((step, round(float(np.mean(envs.return_queue)), 1)))
            print(f"{step:>8,} steps: return {curve[-1][1]:.1f}", flush=True)
    envs.close()
    return curve


def main(argv: Sequence[str] | None = None) -> list[tuple[int, float]]:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1", help="(%(default)s)")
    parser.add_argument(
        "--steps", default=20_000, type=integer_from(NUM_ENVS), help="(%(default)s)"
    )
    parser.add_argument("--seed", default=0, type=integer_from(0), help="(%(default)s)")
    parser.add_argument("--results", type=Path, help="file that gets one more line")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # Networks this small gain nothing from more threads.
    curve = train(args.env, args.steps, args.seed)
    if args.results is not None:
        run = {"agent": "DQN", "env": args.env, "seed": args.seed, "steps": args.steps}
        with args.results.open("a") as file:
            file.write(json.dumps({**run, "curve": curve}) + "\n")
    return curve


if __name__ == "__main__":
    main()
