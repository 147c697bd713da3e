"""What runs in Ray actors beside a storage: some write, some sample, and all check what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tally_env import TallyEnv, check_batch, tally
from tensordict import TensorDict
from torchrl.collectors import Collector

from trl_storages import UniformReplayStorage

__all__ = ["Worker", "priority_of"]


class Worker:
    """Writes what an environment does; samples, checks, and gives priorities back."""

    def __init__(self) -> None:
        self.env = TallyEnv()
        self.observation, _ = self.env.reset()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function here."""
        return function(*args)

    def write(self, replay: Any, lane: int, num_batches: int) -> None:
        """Goes on with a gymnasium loop, and writes seven steps at a time to a lane of its own."""
        rows = UniformReplayStorage(
            self.env.observation_space, self.env.action_space, storage_size=7
        )
        for _ in range(num_batches):
            for _ in range(7):
                after, *outcome = self.env.step(0)
                rows.record(self.observation, 0, *outcome, after)
                self.observation = self.env.reset()[0] if outcome[1] or outcome[2] else after
            replay.extend(rows[:], lanes=[lane])

    def collect(self, replay: Any, num_steps: int, trajs_per_batch: int | None) -> None:
        """Lets a collector of TorchRL write."""
        env = tally()
        collector = Collector(
            env,
            env.rand_action,
            frames_per_batch=10,
            total_frames=num_steps,
            replay_buffer=replay,
            trajs_per_batch=trajs_per_batch,
        )
        for _ in collector:
            pass
        collector.shutdown()

    def sample(self, replay: Any, num_batches: int) -> torch.Tensor:
        """Returns the slots of all rows that were given a priority."""
        slots = []
        for _ in range(num_batches):
            batch = replay.sample()
            check_batch(batch)
            batch["td_error"] = priority_of(batch)
            replay.update_tensordict_priority(batch.select("index", "index_generation", "td_error"))
            slots.append(batch["index"])
        return torch.cat(slots).unique()


def priority_of(rows: TensorDict) -> torch.Tensor:
    """Names the row: another priority for each step of each episode."""
    _, episode, step = rows["next", "observation"].unbind(-1)
    return (1 + episode % 8 + step / 16).float()
