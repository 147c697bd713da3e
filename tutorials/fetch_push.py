"""A robot arm learns to push a block, with HER and a buffer on disk; an interrupted run resumes.

    python tutorials/fetch_push.py               # FetchPush-v4, seeds 0 and 1
    python tutorials/fetch_push.py               # again, after an interruption: resumes
    python tutorials/fetch_push.py --seeds 2     # another seed
    python tutorials/fetch_push.py --draw        # only draws the finished runs

Each round plays one episode in every environment, trains with DDPG, and saves the agent. Recorded steps
are on disk, and each round has its own seed, so an interrupted round is repeated identically. A run that
was killed gives the same result as a run that was not. A finished run is a line of fetch_push.jsonl.

Reference: Plappert et al. 2018, arXiv:1802.09464; priorities: Zhao & Tresp 2018, arXiv:1810.01363.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from guide_results import make_missing, of_run, read
from gymnasium.vector import AutoresetMode, VectorEnv
from learning_results import versions
from options import OneLineParser, integer_from, need
from push_agent import Agent, joined
from train_her import Curve, draw

from trl_storages import HERReplayStorage, gym_reward

ENV = "FetchPush-v4"
STEPS = 300_000
AT_LEAST = 0.8  # success rate required in the last tests; set before the runs
NUM_ENVS, EPISODE_STEPS = 8, 50
UPDATES_PER_ROUND, BATCH_SIZE = 100, 256
NOISE, RANDOM_SHARE, HOLD = 0.2, 0.3, 10  # random actions are held for HOLD steps
DISTANCES = 0.01, 0.3  # bounds of the priority: the metres that a block moved in an episode
ROUNDS_PER_TEST, TEST_ROUNDS, LAST_TEST_ROUNDS = 50, 5, 25
RESULTS = Path(__file__).with_suffix(".jsonl")
PICTURE = Path(__file__).parent / "images" / "fetch_push.png"


def episodes(envs: VectorEnv, agent: Agent, seed: int, explore: bool) -> Iterator[tuple[Any, ...]]:
    """Plays one episode in each environment; yields the arguments of `record`, step by step."""
    observations, _ = envs.reset(seed=seed)
    for step in range(EPISODE_STEPS):
        actions = agent.act(observations)
        if explore:
            if step % HOLD == 0:
                is_random = torch.rand(len(actions), 1) < RANDOM_SHARE
                random = 2 * torch.rand_like(actions) - 1
            noisy = (actions + NOISE * torch.randn_like(actions)).clamp(-1, 1)
            actions = torch.where(is_random, random, noisy)
        next_observations, *outcome = envs.step(actions.numpy())
        yield observations, actions, *outcome, next_observations
        observations = next_observations


def success_rate(envs: VectorEnv, agent: Agent, rounds: int) -> float:
    """Returns the share of a fixed set of episodes that end with the block at its goal."""
    seeds = [10**9 + number * NUM_ENVS for number in range(rounds)]
    last = [[*episodes(envs, agent, seed, explore=False)][-1] for seed in seeds]
    return round(float(np.mean([rewards == 0 for _, _, rewards, *_ in last])), 4)


def make_storage(envs: VectorEnv, steps: int, path: Path) -> HERReplayStorage:
    """Opens the replay buffer of a run, or creates it."""
    return HERReplayStorage.from_env(
        envs,
        reward_fn=gym_reward(gymnasium.make(ENV)),
        strategy="future",
        num_goals=4,
        alpha=1.0,
        storage_size=steps,
        batch_size=BATCH_SIZE,
        path=path,
    )


def play(envs: VectorEnv, agent: Agent, storage: HERReplayStorage, first: int, seed: int) -> None:
    """Plays a round, before which `first` transitions are stored."""
    distances = np.zeros(NUM_ENVS)
    for number, step in enumerate(episodes(envs, agent, seed, explore=True)):
        # The first steps of an interrupted round are already stored.
        if len(storage) <= first + number * NUM_ENVS:
            storage.record(*step)
        distances += np.linalg.norm(step[-1]["achieved_goal"] - step[0]["achieved_goal"], axis=-1)
    # At first most blocks are never touched. These episodes teach little.
    priorities = (
        torch.from_numpy(distances).clamp(*DISTANCES).unsqueeze(1).expand(-1, EPISODE_STEPS)
    )
    # Slots are ordered by lane.
    lanes = torch.arange(NUM_ENVS).unsqueeze(1) * (storage.episodes.capacity // NUM_ENVS)
    slots = lanes + first // NUM_ENVS + torch.arange(EPISODE_STEPS)
    storage.update_priority(slots.flatten(), priorities.flatten())


def train(steps: int, seed: int, path: Path) -> dict[str, Any]:
    """Trains an agent, resuming from the state in `path`; returns the record of the whole run."""
    # All in one process: on two cores, one process per environment makes a step slower.
    options = {"autoreset_mode": AutoresetMode.DISABLED}
    envs = gymnasium.make_vec(ENV, NUM_ENVS, "sync", options, max_episode_steps=EPISODE_STEPS)
    storage = make_storage(envs, steps, path / "rows")
    torch.manual_seed(seed)
    agent = Agent(joined(envs.reset()[0]).shape[-1], envs.action_space.sample().shape[-1])
    progress: dict[str, Any] = {"rounds": 0, "result": 0.0, "curve": [], "seconds": 0.0}
    if (path / "agent.pt").exists():
        saved, optimizer, progress = torch.load(path / "agent.pt")
        agent.load_state_dict(saved)
        agent.optimizer.load_state_dict(optimizer)
    rounds = steps // (NUM_ENVS * EPISODE_STEPS)
    start = time.process_time() - progress["seconds"]
    for number in range(progress["rounds"], rounds):
        round_seed = seed * 10**6 + number
        torch.manual_seed(round_seed)
        play(envs, agent, storage, number * NUM_ENVS * EPISODE_STEPS, round_seed * NUM_ENVS)
        agent.normalizer.see(joined(storage.sample()))
        for _ in range(UPDATES_PER_ROUND):
            agent.update(storage.sample())
        is_last = number + 1 == rounds
        if is_last or (number + 1) % ROUNDS_PER_TEST == 0:
            rate = success_rate(envs, agent, LAST_TEST_ROUNDS if is_last else TEST_ROUNDS)
            progress["curve"].append((len(storage), rate))
            print(f"seed {seed}, {len(storage):>9,} steps: success {rate:.2f}", flush=True)
            progress["result"] = rate
        progress.update(rounds=number + 1, seconds=round(time.process_time() - start, 1))
        storage.flush()
        saved = agent.state_dict(), agent.optimizer.state_dict()
        torch.save((*saved, progress), path / "agent.new")
        os.replace(path / "agent.new", path / "agent.pt")
    storage.close()
    return progress


def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", nargs="+", default=[0, 1], type=integer_from(0), help="(%(default)s)")
    add("--steps", default=STEPS, type=integer_from(1), help="of the environments (%(default)s)")
    add(
        "--path",
        default="outputs/fetch_push",
        type=Path,
        help="of buffers and agents (%(default)s)",
    )
    add("--results", default=RESULTS, type=Path, help="file of finished runs (%(default)s)")
    add("--output", default=PICTURE, type=Path, help="picture (%(default)s)")
    add("--draw", action="store_true", help="only draw the runs that are finished")
    args = parser.parse_args(argv)
    gymnasium.register_envs(need("gymnasium_robotics"))
    settings = {"env": ENV, "steps": args.steps, "at_least": AT_LEAST, "at_most": None}
    runs, finished = [{**settings, "seed": seed} for seed in args.seeds], read(args.results)
    missing = [] if args.draw else runs

    def make(run: Mapping[str, Any]) -> dict[str, Any]:
        progress = train(run["steps"], run["seed"], args.path / f"seed_{run['seed']}")
        return {**run, **progress, "versions": versions()}

    for record in make_missing(missing, finished, make, args.results):
        print(f"seed {record['seed']}: {record['result']:.2f} in {record['seconds']} s")
    curves = []
    for run in runs:
        if (record := of_run(run, finished)) is not None:
            steps, rates = zip(*record["curve"], strict=True)
            curves.append(Curve(f"seed {run['seed']}", list(steps), list(rates)))
    if not curves:
        raise SystemExit(f"fetch_push.py: {args.results} holds no runs: leave --draw out")
    draw(curves, ENV, args.output)


if __name__ == "__main__":
    main()
