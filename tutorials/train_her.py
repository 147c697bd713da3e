"""Trains one agent with HER and one without, and draws both learning curves.

    python tutorials/train_her.py                                  # flips 15 bits, with DQN
    python tutorials/train_her.py --algo td3 --bits 8              # with continuous actions
    python tutorials/train_her.py --env FetchReach-v4 --algo sac   # a robot arm in MuJoCo

The reward only says whether the goal is reached, and an untrained agent never reaches it. Hindsight
experience replay (HER) relabels the agent's own steps with goals that the agent did reach. The two agents
differ in one argument of their replay buffers, `num_goals`: the number of relabelled transitions for each
transition that keeps its goal.

The networks normalise their inputs by the mean and deviation of random episodes, which are played
beforehand. In FetchReach positions differ by centimetres around values near 1.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import torch
from goal_agents import ALGORITHMS, INPUTS
from options import OneLineParser, device_here, integer_from, need
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import DoubleToFloat, EnvBase, ExplorationType, GymWrapper, TransformedEnv
from torchrl.envs import set_exploration_type as exploration
from torchrl.objectives import SoftUpdate

from trl_storages import HERReplayStorage, gym_reward

WITH, WITHOUT = "with hindsight", "without hindsight"
STRATEGIES = ("future", "final", "episode", "random", "geometric", "current")


@dataclass(frozen=True)
class Task:
    """The budget of an algorithm in an environment, and the required success rates.

    The bounds were set before the reported runs: `at_least` for the agent with HER, `at_most` for the
    agent without. They hold for this number of steps and of bits to flip.
    """

    steps: int = 50_000
    steps_per_update: int = 2
    discount: float = 0.98
    bits: int = 15
    at_least: float | None = None
    at_most: float | None = None

    def bound(self, name: str) -> str:
        """Returns the bound of a run in words."""
        limits = {WITH: ("at least", self.at_least), WITHOUT: ("at most", self.at_most)}
        word, limit = limits[name]
        return "" if limit is None else f" (threshold: {word} {limit:.2f})"


FLIPPING = Task(7_000, steps_per_update=4, bits=8, at_least=0.90, at_most=0.20)
REACHING = Task(3_000, steps_per_update=4, discount=0.95, at_least=0.90, at_most=0.50)
TASKS = {
    ("BitFlipping-v0", "dqn"): Task(10_000, steps_per_update=4, at_least=0.95, at_most=0.10),
    **{("BitFlipping-v0", algo): FLIPPING for algo in ("ddpg", "td3", "sac")},
    **{("FetchReach-v4", algo): REACHING for algo in ("ddpg", "td3", "sac")},
}

BATCH_SIZE = 256
RANDOM_BATCHES = 8
CURVE_POINTS = 20
# Environments of a test, and rounds over them; more rounds at the end.
TEST_ENVS, TEST_ROUNDS, LAST_TEST_ROUNDS = 10, 2, 5
# Rounds of random episodes before training, by which the networks scale their inputs.
EXAMPLE_ROUNDS = 2


@dataclass
class Curve:
    """The success rates of a run after numbers of environment steps; the last one is the result."""

    name: str
    steps: list[int] = field(default_factory=list)
    success: list[float] = field(default_factory=list)
    seconds: float = 0.0


def make_env(args: argparse.Namespace, num_envs: int, seed: int) -> EnvBase:
    """Makes `num_envs` environments that step together, as one environment of TorchRL."""
    env = gymnasium.make_vec(
        args.env,
        num_envs=num_envs,
        vectorization_mode="sync",
        # TorchRL resets the environments, after it has read the last observation of an episode.
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
        **args.env_options,
    )
    env = TransformedEnv(GymWrapper(env, categorical_action_encoding=True), DoubleToFloat())
    env.set_seed(seed)
    return env


def goal_reached(achieved_goal: torch.Tensor, desired_goal: torch.Tensor, _: Any) -> torch.Tensor:
    """Returns which transitions end an episode of flipping bits, for the goals of HER too."""
    return (achieved_goal == desired_goal).all(dim=-1)


def make_storage(
    args: argparse.Namespace, name: str, num_goals: int, n_step: int = 1, **further: Any
) -> HERReplayStorage:
    """Creates a replay buffer, with further options such as `alpha`."""
    env = make_env(args, args.num_envs, args.seed)
    return HERReplayStorage(
        env.observation_spec,
        env.action_spec,
        storage_size=-(-args.steps // args.num_envs) * args.num_envs,
        num_envs=args.num_envs,
        batch_size=args.batch_size,
        device=args.device,
        path=args.path and args.path / name,
        seed=args.seed,
        reward_fn=gym_reward(gymnasium.make(args.env, **args.env_options)),
        # In other environments, reaching the goal does not end an episode.
        terminated_fn=goal_reached if args.env == "BitFlipping-v0" else None,
        strategy=args.strategy,
        num_goals=num_goals,
        n_step=n_step,
        discount=args.task.discount,
        **further,
    )


def train(args: argparse.Namespace, storage: HERReplayStorage, name: str) -> Curve:
    """Alternates between collecting a batch of steps and some updates on sampled batches."""
    torch.manual_seed(args.seed)
    env = make_env(args, args.num_envs, args.seed)
    test_env = make_env(args, TEST_ENVS, args.seed + 10_000)
    examples = random_inputs(test_env, args.max_steps).to(args.device)
    with torch.device(args.device):
        agent = ALGORITHMS[args.algo](examples, env.action_spec_unbatched.to(args.device))
    agent.loss.make_value_estimator(gamma=args.task.discount)
    target_updater = SoftUpdate(agent.loss, tau=0.05)
    optimizer = torch.optim.Adam(agent.loss.parameters(), lr=1e-3)
    collector = Collector(
        env,
        agent.explorer,
        replay_buffer=storage,
        frames_per_batch=args.steps_per_batch,
        total_frames=args.steps,
        init_random_frames=RANDOM_BATCHES * args.steps_per_batch,
        policy_device=args.device,
        storing_device=args.device,
        auto_register_policy_transforms=False,
    )

    curve, num_updates, start = Curve(name), 0, time.perf_counter()
    progress = need("tqdm").tqdm(total=args.steps, desc=f"{name:17}", unit=" steps")
    for turn, _ in enumerate(collector):
        if turn >= RANDOM_BATCHES:
            for _ in range(args.steps_per_batch // args.task.steps_per_update):
                batch = storage.sample()
                losses = agent.loss(batch)
                # Does nothing unless the buffer samples by priority.
                storage.update_tensordict_priority(batch)
                if num_updates % agent.policy_delay:
                    del losses["loss_actor"]
                minimise(losses, optimizer)
                target_updater.step()
                num_updates += 1

        num_steps = (turn + 1) * args.steps_per_batch
        is_last = num_steps >= args.steps
        if is_last or num_steps * args.curve_points > args.steps * len(curve.steps):
            rounds = LAST_TEST_ROUNDS if is_last else TEST_ROUNDS
            curve.success.append(success_rate(test_env, agent.policy, args.max_steps, rounds))
            curve.steps.append(num_steps)
        curve.seconds = time.perf_counter() - start
        samples_per_second = num_updates * args.batch_size / curve.seconds
        progress.set_postfix_str(
            f"success {curve.success[-1]:.2f}, {samples_per_second:,.0f} samples/s", refresh=is_last
        )
        progress.update(args.steps_per_batch)
    progress.close()
    collector.shutdown()
    return curve


def random_inputs(env: EnvBase, max_steps: int) -> torch.Tensor:
    """Returns inputs of the networks `[n, num_inputs]` from random episodes."""
    rollouts = [env.rollout(max_steps, break_when_any_done=False) for _ in range(EXAMPLE_ROUNDS)]
    columns = [torch.cat([rollout[key].flatten(0, -2) for rollout in rollouts]) for key in INPUTS]
    return torch.cat(columns, dim=-1)


def minimise(losses: TensorDictBase, optimizer: torch.optim.Optimizer) -> None:
    """Takes one step on the sum of the losses; the other entries are for logging."""
    sum(loss for name, loss in losses.items() if name.startswith("loss")).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def success_rate(env: EnvBase, policy: TensorDictModule, max_steps: int, rounds: int) -> float:
    """Returns the share of episodes in which the last step of the policy reaches the goal."""
    outcomes = []
    for _ in range(rounds):
        with exploration(ExplorationType.DETERMINISTIC):
            rollout = env.rollout(
                max_steps, policy, break_when_any_done=False, auto_cast_to_device=True
            )
        done = rollout["next", "done"].squeeze(-1)
        # Only the first episode of each environment: short episodes would be counted too often.
        is_first_end = done & (done.cumsum(dim=-1) == 1)
        outcomes.append(rollout["next", "reward"].squeeze(-1)[is_first_end] == 0)
    return torch.cat(outcomes).float().mean().item()


def draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draws success rates over environment steps into a PNG file."""
    pyplot = need("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for curve, style in zip(curves, ("-o", "--s"), strict=False):
        axes.plot(curve.steps, curve.success, style, markersize=4, label=curve.name)
    axes.set(xlabel="environment steps", ylabel="success rate", ylim=(-0.04, 1.04), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="train_her.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, integer_from(1)
    add("--env", default="BitFlipping-v0", help="gymnasium environment with goals (%(default)s)")
    add("--algo", default="dqn", choices=ALGORITHMS, help="algorithm (%(default)s)")
    add("--bits", type=count, help="bits to flip (15; 8 with continuous actions)")
    add("--steps", type=count, help="environment steps of each run (by environment)")
    add("--strategy", default="future", choices=STRATEGIES, help="(%(default)s)")
    add("--num-goals", default=4, type=integer_from(0), help="goals per step (%(default)s)")
    add("--no-her", action="store_true", help="only the run without HER")
    add("--num-envs", default=8, type=count, help="parallel environments (%(default)s)")
    add("--batch-size", default=BATCH_SIZE, type=count, help="of an update (%(default)s)")
    add("--device", default="cpu", type=device_here, help="for networks and batches (%(default)s)")
    add("--seed", default=0, type=integer_from(0), help="(%(default)s)")
    add("--path", type=Path, help="directory of the transitions (memory)")
    add("--output", default="outputs/train_her.png", type=Path, help="picture (%(default)s)")
    return complete(parser.parse_args(argv), parser)


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Derives further settings from the options, and rejects combinations that do not fit."""
    args.task = TASKS.get((args.env, args.algo), Task())
    args.bits = args.bits or args.task.bits
    is_flipping = args.env == "BitFlipping-v0"
    args.env_options = (
        {"n_bits": args.bits, "continuous": args.algo != "dqn"} if is_flipping else {}
    )
    if args.env not in gymnasium.registry:
        gymnasium.register_envs(need("gymnasium_robotics"))
    try:
        env = gymnasium.make(args.env, **args.env_options)
    except gymnasium.error.Error as error:
        parser.error(f"--env {args.env}: {str(error).splitlines()[0]}")
    entries = getattr(env.observation_space, "spaces", {})
    if not {*INPUTS, "achieved_goal"} <= set(entries):
        parser.error(f"--env {args.env} has no goals: its observations are {env.observation_space}")
    if isinstance(env.action_space, gymnasium.spaces.Discrete) != (args.algo == "dqn"):
        choices = "ddpg, td3 or sac" if args.algo == "dqn" else "dqn"
        parser.error(f"--env {args.env} has actions {env.action_space}: use --algo {choices}")
    args.curve_points = CURVE_POINTS
    args.max_steps = gymnasium.spec(args.env).max_episode_steps or args.bits
    if args.bits != args.task.bits or (args.steps or args.task.steps) < args.task.steps:
        args.task = replace(args.task, at_least=None, at_most=None)
    # TorchRL collects complete batches.
    args.steps_per_batch = max(64 // args.num_envs, 1) * args.num_envs
    args.steps = -(-(args.steps or args.task.steps) // args.steps_per_batch) * args.steps_per_batch
    return args


def main(argv: Sequence[str] | None = None) -> list[Curve]:
    args = parse(argv)
    need("tqdm"), need("matplotlib")
    # Networks this small gain nothing from more threads.
    torch.set_num_threads(1)
    num_goals = {WITHOUT: 0} if args.no_her else {WITH: args.num_goals, WITHOUT: 0}
    for name in num_goals if args.path else ():
        # The buffer would continue with these transitions; a comparison must begin without any.
        if (args.path / name).exists():
            raise SystemExit(f"train_her.py: --path: {args.path / name} already holds transitions")
    storages = {name: make_storage(args, name, num) for name, num in num_goals.items()}
    curves = [train(args, storage, name) for name, storage in storages.items()]
    for curve in curves:
        result = f"{curve.name:17} success {curve.success[-1]:.2f} in {curve.seconds:.0f} s"
        print(result + args.task.bound(curve.name))
    bits = f", {args.bits} bits" if "n_bits" in args.env_options else ""
    draw(curves, f"{args.env}{bits}, {args.algo.upper()}", args.output)
    print(f"learning curves: {args.output}")
    return curves


if __name__ == "__main__":
    main()
