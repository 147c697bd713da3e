"""Trains with TorchRL's `Trainer`, with HER in its replay hook, and the same in a plain script.

    python tutorials/torchrl_trainer.py                            # with a Trainer: half a minute
    python tutorials/torchrl_trainer.py --agent script             # with a plain loop

A `HERReplayStorage` is a `TensorDictReplayBuffer` and works in its place. Steps of several environments
can be written in two ways, and both keep the episodes apart:

- As the collector delivers them, `[num_envs, T]`. `ReplayBufferTrainer`, the hook of the `Trainer`, does
  this unless `flatten_tensordicts=True`.
- Flat, with `storage.extend(data.reshape(-1))`, as in many scripts. The trajectory ids of the collector
  show which environment a transition is from; pass the number of environments as `num_envs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gymnasium
import torch
from goal_agents import INPUTS, Agent, make_dqn
from gymnasium.vector import AutoresetMode
from options import parse
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ExplorationType, GymWrapper
from torchrl.envs import set_exploration_type as exploration
from torchrl.objectives import SoftUpdate
from torchrl.trainers import ReplayBufferTrainer, Trainer

from trl_storages import HERReplayStorage, gym_reward

NUM_ENVS, STEPS, UPDATES = 8, 64, 16  # steps of all environments and updates, in turn
TESTS = 100
# Success rates required with the full budget; set before the runs.
AT_LEAST = {"trainer": 0.95, "script": 0.95}
AT_MOST: dict[str, float] = {}


@dataclass(frozen=True)
class Budget:
    """The number of bits to flip, and of training steps of all environments."""

    bits: int = 12
    steps: int = 8_000

    @property
    def frames(self) -> int:
        """The steps, in complete batches of the collector."""
        return -(-self.steps // STEPS) * STEPS


def make_env(bits: int, num_envs: int, seed: int) -> EnvBase:
    env = gymnasium.make_vec(
        "BitFlipping-v0",
        num_envs=num_envs,
        vectorization_mode="sync",
        # TorchRL resets the environments, after it has read the last observation of an episode.
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
        n_bits=bits,
    )
    env = GymWrapper(env, categorical_action_encoding=True)
    env.set_seed(seed)
    return env


def make_storage(env: EnvBase, budget: Budget, seed: int) -> HERReplayStorage:
    return HERReplayStorage.from_env(
        env,
        reward_fn=gym_reward(gymnasium.make("BitFlipping-v0", n_bits=budget.bits)),
        # With a goal of HER, an episode ends where that goal was reached.
        terminated_fn=lambda achieved, goal, _: (achieved == goal).all(dim=-1),
        storage_size=budget.frames,
        batch_size=256,
        seed=seed,
    )


def by_trainer(
    collector: Collector, storage: HERReplayStorage, agent: Agent, budget: Budget
) -> None:
    """Trains with a `Trainer` whose hook writes and samples."""
    trainer = Trainer(
        collector=collector,
        total_frames=budget.frames,
        frame_skip=1,
        optim_steps_per_batch=UPDATES,
        loss_module=agent.loss,
        optimizer=torch.optim.Adam(agent.loss.parameters(), lr=1e-3),
        progress_bar=False,
    )
    # Writes collected steps, samples batches, and updates priorities if the buffer has any.
    ReplayBufferTrainer(storage).register(trainer)
    trainer.register_op("post_optim", SoftUpdate(agent.loss, tau=0.05).step)
    trainer.train()


def by_script(
    collector: Collector, storage: HERReplayStorage, agent: Agent, budget: Budget
) -> None:
    """Trains with a plain loop."""
    optimizer = torch.optim.Adam(agent.loss.parameters(), lr=1e-3)
    target_updater = SoftUpdate(agent.loss, tau=0.05)
    for data in collector:
        storage.extend(data.reshape(-1))
        for _ in range(UPDATES):
            agent.loss(storage.sample())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            target_updater.step()
    collector.shutdown()


AGENTS: dict[str, Callable] = {"trainer": by_trainer, "script": by_script}


def success_rate(agent: Agent, bits: int, seed: int) -> float:
    """Returns the share of episodes in which the greedy policy reaches its goal."""
    env = make_env(bits, TESTS, seed)
    with torch.no_grad(), exploration(ExplorationType.DETERMINISTIC):
        played = env.rollout(bits, agent.policy, break_when_any_done=False)
    # The first episode of each environment ends after at most as many steps as there are bits.
    return (played["next", "reward"] == 0).any(dim=1).float().mean().item()


def train(agent: str, seed: int, budget: Budget) -> float:
    """Collects and trains; returns the success rate after training."""
    torch.manual_seed(seed)
    env = make_env(budget.bits, NUM_ENVS, seed)
    examples = torch.randint(2, (1000, budget.bits * len(INPUTS))).float()
    learner = make_dqn(examples, env.action_spec_unbatched)
    learner.loss.make_value_estimator(gamma=0.98)
    storage = make_storage(env, budget, seed)
    collector = Collector(env, learner.explorer, frames_per_batch=STEPS, total_frames=budget.frames)
    AGENTS[agent](collector, storage, learner, budget)
    return success_rate(learner, budget.bits, seed + 10_000)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(__doc__, argv, [*AGENTS], bits=Budget.bits, steps=Budget.steps)
    rate = train(args.agent, args.seed, Budget(args.bits, args.steps))
    print(f"{rate:.2f} of the goals are reached")
    return rate


if __name__ == "__main__":
    main()
