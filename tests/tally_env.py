"""An environment whose observations say where they are from, and checks that nothing is mixed."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDictBase
from torchrl.envs import GymWrapper

from trl_storages import HERReplayStorage, ReplayStorage

_numbers = itertools.count()
_where = Box(0, 2**62, (3,), np.int64)

#: Episodes take turns in these lengths.
LENGTHS = (3, 7, 1, 5)


class TallyEnv(gymnasium.Env[Any, Any]):
    """Observes (which environment of all processes, episode, step); ends or is cut short in turns."""

    observation_space = Dict(
        dict.fromkeys(("observation", "achieved_goal", "desired_goal"), _where)
    )
    action_space = Discrete(5)

    def __init__(self) -> None:
        self.number = (os.getpid() << 20) + next(_numbers)
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        ends = self.num_steps == LENGTHS[self.episode % len(LENGTHS)]
        terminated = ends and self.episode % 2 == 0
        return self._observation(), -1.0, terminated, ends and not terminated, {}

    def _observation(self) -> dict[str, Any]:
        where = np.array([self.number, self.episode, self.num_steps])
        wanted = np.zeros(3, np.int64)
        return {"observation": where, "achieved_goal": where.copy(), "desired_goal": wanted}


def tally() -> GymWrapper:
    return GymWrapper(TallyEnv(), categorical_action_encoding=True)


def reward(achieved_goal: torch.Tensor, desired_goal: torch.Tensor, transition: Any) -> Any:
    return (achieved_goal == desired_goal).all(-1).float() - 1


def goal_storage(**options: Any) -> HERReplayStorage:
    env = TallyEnv()
    settings = {"reward_fn": reward, "storage_size": 60, "batch_size": 64, "seed": 0, **options}
    return HERReplayStorage(env.observation_space, env.action_space, **settings)


def check_rows(storage: ReplayStorage) -> None:
    """Every row is followed by the next one of its environment's episode, or by no row at all."""
    storage.validate()
    # Other processes may be writing.
    with storage._replay_lock, storage._write_lock:
        slots = storage.episodes.live_slots()
        where = storage[slots]
        goes_on = storage.episodes.num_after(slots) > 0
        following = storage.episodes.shift(slots[goes_on], torch.ones(int(goes_on.sum())).long())
        continued = storage[following]["observation"]
    before, after = where["observation"], where["next", "observation"]
    one_step = torch.tensor([0, 0, 1])
    assert torch.equal(after, before + one_step)
    assert torch.equal(continued, after[goes_on])


def check_batch(batch: TensorDictBase) -> None:
    """Transitions stay in their episode; goals are from it too, and from then on."""
    here, there = batch["observation"], batch["next", "observation"]
    assert torch.equal(there[:, :2], here[:, :2])
    assert (there[:, 2] > here[:, 2]).all()
    goal = batch["desired_goal"][batch["her_mask"]]
    own = here[batch["her_mask"]]
    assert torch.equal(goal[:, :2], own[:, :2])
    assert (goal[:, 2] > own[:, 2]).all()


def learn(storage: ReplayStorage, wraps: int, seconds: float = 0) -> int:
    """Samples, and reports priorities, while others write.

    Args:
        storage: what they write.
        wraps: how often the ring is written meanwhile, at least.
        seconds: how long it takes, at least.

    Returns:
        how many batches were sampled.
    """
    begin, num_batches = time.monotonic(), 0
    patience = begin + seconds + 120
    while (
        storage.write_count < wraps * storage.episodes.capacity
        or time.monotonic() < begin + seconds
    ):
        assert time.monotonic() < patience, "nobody writes"
        if not len(storage):
            time.sleep(0.01)
            continue
        batch = storage.sample()
        check_batch(batch)
        batch["td_error"] = torch.rand(batch.shape[0])
        storage.update_tensordict_priority(batch)
        storage.validate()
        num_batches += 1
    return num_batches
