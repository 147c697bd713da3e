"""Trains agents of Stable-Baselines3 with its own replay buffer and with that of trl_storages, by turns.

    python -m tests.benchmarks.sb3_swap

Each run has a process of its own, with one thread. Seconds are processor time.
"""

import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from stable_baselines3 import DQN, SAC, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer

from trl_storages import sb3

# Settings of RL Baselines3 Zoo, without VecNormalize.
CART_POLE = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
FETCH_REACH = {"learning_rate": 1e-3, "gamma": 0.95, "policy_kwargs": {"net_arch": [64, 64]}}
TASKS = {
    "CartPole-v1": (DQN, 30_000, CART_POLE, [ReplayBuffer, sb3.ReplayBuffer]),
    "FetchReach-v4": (SAC, 10_000, FETCH_REACH, [HerReplayBuffer, sb3.HerReplayBuffer]),
}


def run(task: str, number: int, seed: int) -> dict:
    """Trains one agent; returns the mean return or success of its last 20 episodes, and costs."""
    import gymnasium_robotics  # noqa: F401  (registers FetchReach)

    torch.set_num_threads(1)
    algorithm, num_steps, options, kinds = TASKS[task]
    seconds = {"sample": 0.0, "add": 0.0}

    def timed(method: str):
        def call(self, *arguments, **options):
            start = time.process_time()
            result = getattr(kinds[number], method)(self, *arguments, **options)
            seconds[method] += time.process_time() - start
            return result

        return call

    kind = type("Timed", (kinds[number],), {method: timed(method) for method in seconds})
    policy = "MlpPolicy" if algorithm is DQN else "MultiInputPolicy"
    options = {**options, "seed": seed, "device": "cpu", "stats_window_size": 20}
    model = algorithm(policy, task, replay_buffer_class=kind, **options)
    start = time.process_time()
    model.learn(num_steps)
    seconds["all"] = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    scores = [*model.ep_success_buffer] or [episode["r"] for episode in model.ep_info_buffer]
    return {"score": float(np.mean(scores)), "peak MB": peak, **seconds}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1], *map(int, sys.argv[2:]))))
        sys.exit()
    for task in TASKS:
        for seed in range(2):
            for number, library in enumerate(("Stable-Baselines3", "trl_storages")):
                command = [sys.executable, "-m", "tests.benchmarks.sb3_swap", task]
                output = subprocess.check_output([*command, str(number), str(seed)], text=True)
                print(task, f"seed {seed}", library, output.splitlines()[-1], flush=True)
