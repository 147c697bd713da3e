"""Learns a task that needs memory, as R2D2 does: a recurrent Q-network on sequences with burn-in.

    python tutorials/recurrent.py                              # with a memory: about 1 minute
    python tutorials/recurrent.py --agent none                 # the same without one

A corridor shows a sign at its entrance, left or right. Some steps later, at a junction, the sign must be
followed; then the next corridor begins. An agent without memory takes the same decision at each junction
and is right at half of them. An agent with memory can be right at all of them.

The replay buffer supports this as follows:

- Each transition stores the state of the network before the step (`extra_fields`).
- A sampled transition is expanded into a sequence (`EpisodeSequence`). The state stored with its first
  transition comes from an older network, so the current one first runs over the burn-in without a loss.
- n-step returns are computed within the sequence. `EpisodeSequence.targets` adds the value after n steps,
  which the network computes on the same sequence.
- Sequences are sampled by their TD errors, with most weight on the largest (`sequence_priority`).

Reference: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement Learning.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from options import parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    ExplorationType,
    GymWrapper,
    InitTracker,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.envs import set_exploration_type as exploration
from torchrl.modules import EGreedyModule, GRUModule, QValueModule, set_recurrent_mode

from trl_storages import EpisodeSequence, PrioritizedReplayStorage, sequence_priority

AGENTS = {"memory": True, "none": False}
# Rounds of an episode, and steps of a round: a sign at the first, a junction at the last.
ROUNDS, STEPS = 4, 6
HIDDEN, NUM_ENVS, BATCH_SIZE = 32, 16, 32
N_STEP, DISCOUNT = 3, 0.97
# Without memory the choice is the same at each junction, right for exactly half of all signs.
AT_LEAST, AT_MOST = {"memory": 0.95}, {"none": 0.50}
# Longer than a round, and shorter than an episode: the stored state remembers the steps before.
UNIT = EpisodeSequence(length=STEPS + 2, burn_in=4, bootstrap=N_STEP)


@dataclass(frozen=True)
class Budget:
    """The numbers of collected batches, and of updates after each."""

    batches: int = 240
    updates: int = 4


class Corridors(gymnasium.Env):
    """Rounds of a sign, a walk and a junction; the reward is 1 for following the sign there."""

    observation_space = Box(0, 1, (3,), np.float32)  # sign says left, sign says right, junction
    action_space = Discrete(2)

    def __init__(self, signs: Sequence[int] | None = None) -> None:
        self._given = signs

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begins the first round."""
        super().reset(seed=seed)
        signs = self._given
        self._signs = self.np_random.integers(2, size=ROUNDS) if signs is None else signs
        self._step = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Walks one step; the action matters only at a junction."""
        number, at = divmod(self._step, STEPS)
        followed = at == STEPS - 1 and action == self._signs[number]
        self._step += 1
        return self._observation(), float(followed), self._step == ROUNDS * STEPS, False, {}

    def _observation(self) -> np.ndarray:
        number, at = divmod(self._step, STEPS)
        observation = np.zeros(3, np.float32)
        if at == 0 and number < ROUNDS:
            observation[self._signs[number]] = 1
        observation[2] = at == STEPS - 1
        return observation


def make_env(makers: Sequence[Any], seed: int = 0) -> EnvBase:
    """Creates environments that step together and keep the state of the network."""
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    state = TensorDictPrimer(state=Unbounded((1, HIDDEN)), expand_specs=True)
    env = GymWrapper(env, categorical_action_encoding=True)
    env = TransformedEnv(env, Compose(InitTracker(), state))
    env.set_seed(seed)
    return env


class NoMemory(nn.Module):
    """Takes the place of the memory, without a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh())

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns features, and a state of zeros."""
        return self.layer(observation), torch.zeros_like(state)


def make_network(has_memory: bool) -> TensorDictSequential:
    """Returns a network that reads `observation` and `state`, and writes values of the actions."""
    keys = {"in_keys": ["observation", "state"], "out_keys": ["features", ("next", "state")]}
    memory = (
        GRUModule(input_size=3, hidden_size=HIDDEN, **keys)
        if has_memory
        else TensorDictModule(NoMemory(), **keys)
    )
    values = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))
    return TensorDictSequential(
        memory,
        TensorDictModule(values, ["features"], ["action_value"]),
        QValueModule("categorical"),
    )


class Learner:
    """Double Q-learning on sequences."""

    def __init__(self, has_memory: bool) -> None:
        self.network = make_network(has_memory)
        self.target_network = deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=2e-3)

    def update(self, batch: TensorDictBase) -> Tensor:
        """Takes a gradient step on a batch `[B * S]`; returns the priorities `[B]` of its sequences."""
        rows = batch.reshape(-1, UNIT.num_steps)
        values = values_of(self.network, rows)
        with torch.no_grad():
            target_values = values_of(self.target_network, rows)
            next_values = target_values.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)
        target, mask = UNIT.targets(batch, next_values, discount=DISCOUNT)
        trained = rows[:, UNIT.burn_in : UNIT.burn_in + UNIT.length]
        chosen = values[:, : UNIT.length].gather(-1, trained["action"].unsqueeze(-1)).squeeze(-1)
        error = target - chosen
        weight = trained["priority_weight"] * mask
        loss = (weight * error**2).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target_network.parameters(), self.network.parameters(), strict=True)
            for target_parameter, parameter in pairs:
                target_parameter.lerp_(parameter, 0.02)
        return sequence_priority(error.detach(), mask=mask)


def values_of(network: TensorDictSequential, rows: TensorDictBase) -> Tensor:
    """Returns the values of the actions after the burn-in, `[B, length + bootstrap, 2]`."""
    with set_recurrent_mode(True):
        inputs = rows.select("observation", "state", "is_init")
        burn_in, inputs = inputs[:, : UNIT.burn_in], inputs[:, UNIT.burn_in :].clone()
        with torch.no_grad():
            state = network(burn_in.clone())["next", "state"][:, -1]
        # An episode that begins right after the burn-in uses its stored state.
        is_first = inputs["is_init"][:, 0].unsqueeze(-1)
        inputs["state"][:, 0] = torch.where(is_first, inputs["state"][:, 0], state)
        return network(inputs)["action_value"]


def success_rate(network: TensorDictSequential) -> float:
    """Returns the share of junctions at which the sign is followed, over all orders of signs."""
    orders = [*product(range(2), repeat=ROUNDS)]
    env = make_env([partial(Corridors, signs) for signs in orders])
    with torch.no_grad(), exploration(ExplorationType.DETERMINISTIC):
        played = env.rollout(ROUNDS * STEPS, network)
    return played["next", "reward"].sum().item() / (len(orders) * ROUNDS)


def train(agent: str, seed: int, budget: Budget) -> float:
    """Acts and trains in turn; returns the share of signs that are followed after training."""
    torch.manual_seed(seed)
    env, learner = make_env([Corridors] * NUM_ENVS, seed), Learner(AGENTS[agent])
    batch_steps = NUM_ENVS * STEPS
    storage = PrioritizedReplayStorage(
        Corridors.observation_space,
        Corridors.action_space,
        storage_size=budget.batches * batch_steps,
        num_envs=NUM_ENVS,
        batch_size=BATCH_SIZE,
        n_step=N_STEP,
        discount=DISCOUNT,
        sample_unit=UNIT,
        extra_fields={"state": (torch.float32, (1, HIDDEN))},
        seed=seed,
    )
    explorer = TensorDictSequential(
        learner.network, EGreedyModule(env.action_spec_unbatched, eps_init=0.2, eps_end=0.2)
    )
    collector = Collector(
        env,
        explorer,
        frames_per_batch=batch_steps,
        total_frames=budget.batches * batch_steps,
    )
    for steps in collector:
        storage.extend(steps)
        for _ in range(budget.updates):
            batch = storage.sample()
            storage.update_tensordict_priority(batch, learner.update(batch))
    collector.shutdown()
    return success_rate(learner.network)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, [*AGENTS], batches=Budget.batches)
    rate = train(args.agent, args.seed, Budget(args.batches))
    print(f"{rate:.2f} of the signs are followed")
    return rate


if __name__ == "__main__":
    main()
