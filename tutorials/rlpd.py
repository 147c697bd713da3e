"""Learns online with half of each batch from earlier data, as RLPD does.

    python tutorials/rlpd.py                                       # half offline, half online: 1 minute
    python tutorials/rlpd.py --agent online                        # online only

A car in a valley must swing itself up to a flag, the only source of reward. A random policy hardly ever
gets there, and without a reward an agent learns nothing. The data are 100 episodes of a driver that
sometimes pushes in the direction of motion and otherwise at random. Most of them reach the flag, but the
driver has twice as much time per episode as the agent.

The offline data are in one replay buffer and the steps of the agent in another. An ensemble samples each
batch from both, in exact shares. The two agents differ only in these shares. Layer norms in the critics
keep training on both stable.

Reference: Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data (RLPD),
arXiv:2302.02948.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from options import parse
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.envs import ExplorationType
from torchrl.envs import set_exploration_type as exploration
from torchrl.modules import (
    MLP,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import SACLoss, SoftUpdate

from trl_storages import NStepReplayStorage, ReplayStorage, ReplayStorageEnsemble
from trl_storages.datasets import from_arrays

# Shares of a batch: offline data, online data.
AGENTS = {"rlpd": (0.5, 0.5), "online": (0.0, 1.0)}
# Success rates required with the full budget; set before the runs.
AT_LEAST, AT_MOST = {"rlpd": 0.90}, {"online": 0.10}
REPEAT, TIME = 4, 50  # steps per action, and actions per episode
BATCH_SIZE, RANDOM_STEPS = 128, 500
N_STEP, DISCOUNT = 3, 0.98


@dataclass(frozen=True)
class Budget:
    """The numbers of data episodes, online steps and tests."""

    episodes: int = 100
    steps: int = 2_000
    tests: int = 50


class Valley(gymnasium.Wrapper):
    """MountainCarContinuous with a reward of 1 at the flag, and none elsewhere."""

    def __init__(self, time: int = TIME) -> None:
        super().__init__(gymnasium.make("MountainCarContinuous-v0").unwrapped)
        self.observation_space = Box(-2, 2, (2,), np.float32)
        self.time = time

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:
        """Puts the car near the bottom."""
        self.left = self.time
        observation, info = self.env.reset(**options)
        return self._scaled(observation), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Holds the action for some steps."""
        self.left -= 1
        for _ in range(REPEAT):
            observation, _, arrived, _, info = self.env.step(action)
            if arrived:
                break
        return self._scaled(observation), float(arrived), arrived, not self.left, info

    @staticmethod
    def _scaled(observation: np.ndarray) -> np.ndarray:
        # Velocities are only a few hundredths.
        return observation * np.array([1, 20], np.float32)


def demonstrate(episodes: int, seed: int) -> list[dict[str, Any]]:
    """Drives better than chance, but not by much; returns the arrays of each episode."""
    env, rng, paths = Valley(2 * TIME), np.random.default_rng(seed), []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        observations, actions, is_over = [observation], [], False
        while not is_over:
            swing = np.sign(observation[1:])
            push = swing if rng.random() < 0.2 else rng.uniform(-1, 1, 1)
            actions.append(push.astype(np.float32))
            observation, _, arrived, truncated, _ = env.step(actions[-1])
            observations.append(observation)
            is_over = arrived or truncated
        ends = np.arange(1, len(actions) + 1) == len(actions)
        paths.append(
            {
                "observations": np.stack(observations),
                "actions": np.stack(actions),
                "rewards": (ends & arrived).astype(np.float32),
                "terminals": ends & arrived,
                "timeouts": ends & ~np.array(arrived),
            }
        )
    return paths


class Learner:
    """Soft actor-critic, with layer norms in its critics."""

    def __init__(self) -> None:
        layers = {"num_cells": [64, 64], "activation_class": nn.ReLU}
        norms = {"norm_class": nn.LayerNorm, "norm_kwargs": {"normalized_shape": 64}}
        spec = Bounded(-1, 1, (1,))
        parameters = nn.Sequential(MLP(2, 2, **layers), NormalParamExtractor())
        self.actor = ProbabilisticActor(
            TensorDictModule(parameters, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=spec,
            distribution_class=TanhNormal,
        )
        critic = ValueOperator(MLP(3, 1, **layers, **norms), in_keys=["observation", "action"])
        self.loss = SACLoss(self.actor, critic, action_spec=spec, alpha_init=0.01)
        self.loss.make_value_estimator(gamma=DISCOUNT)
        self.target_updater = SoftUpdate(self.loss, tau=0.01)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)

    def update(self, batch: TensorDictBase) -> None:
        """Takes a gradient step on a batch."""
        losses = self.loss(batch)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.target_updater.step()

    @torch.no_grad()
    def act(self, observation: np.ndarray, *, explore: bool) -> np.ndarray:
        """Returns an action: a sampled one, or the most likely one."""
        kind = ExplorationType.RANDOM if explore else ExplorationType.DETERMINISTIC
        with exploration(kind):
            acted = self.actor(TensorDict(observation=torch.from_numpy(observation)))
        return acted["action"].numpy()


def make_storages(
    paths: list[dict[str, Any]], budget: Budget, seed: int
) -> tuple[ReplayStorage, ReplayStorage]:
    """Creates a buffer of the data, and an empty one for the online steps."""
    env = Valley()
    options: dict[str, Any] = {"n_step": N_STEP, "discount": DISCOUNT, "seed": seed}
    offline = from_arrays(paths, preset=NStepReplayStorage, **options)
    spaces = env.observation_space, env.action_space
    return offline, NStepReplayStorage(*spaces, storage_size=budget.steps, **options)


def ensemble(storages: tuple[ReplayStorage, ReplayStorage], agent: str) -> ReplayStorageEnsemble:
    """Returns an ensemble that samples batches from both."""
    return ReplayStorageEnsemble(*storages, shares=AGENTS[agent], batch_size=BATCH_SIZE)


def train(agent: str, seed: int, budget: Budget) -> float:
    """Trains online; returns the share of tests that reach the flag after training."""
    torch.manual_seed(seed)
    env, learner = Valley(), Learner()
    storages = make_storages(demonstrate(budget.episodes, seed * 1_000_000), budget, seed)
    online, batches = storages[1], ensemble(storages, agent)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    for step in range(budget.steps):
        is_random = step < RANDOM_STEPS
        action = env.action_space.sample() if is_random else learner.act(observation, explore=True)
        next_observation, reward, terminated, truncated, info = env.step(action)
        online.record(observation, action, reward, terminated, truncated, info, next_observation)
        observation = env.reset()[0] if terminated or truncated else next_observation
        if not is_random:
            learner.update(batches.sample())
    return success_rate(learner, budget.tests)


def success_rate(learner: Learner, tests: int) -> float:
    """Returns the share of tests that reach the flag in time."""
    env, arrivals = Valley(), 0
    for test in range(tests):
        observation, _ = env.reset(seed=10**9 + test)
        is_over = False
        while not is_over:
            action = learner.act(observation, explore=False)
            observation, _, arrived, truncated, _ = env.step(action)
            is_over = arrived or truncated
        arrivals += arrived
    return arrivals / tests


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, [*AGENTS], steps=Budget.steps)
    rate = train(args.agent, args.seed, Budget(steps=args.steps))
    print(f"{rate:.2f} of the tests reach the flag")
    return rate


if __name__ == "__main__":
    main()
