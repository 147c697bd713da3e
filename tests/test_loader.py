"""Batches drawn in worker processes, the way of DrQ-v2: one acts, many sample."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tally_env import TallyEnv, check_batch, goal_storage

from trl_storages import EpisodeSequence, NStepReplayStorage, ReplayStorage

# TorchRL sets "spawn", whose workers import everything again.
FORK = {"multiprocessing_context": "fork"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.requirement("disk-workers"),
]


class PixelEnv(gymnasium.Env):
    """Shows its step as the brightness of a picture; an episode has 10 steps."""

    observation_space = Box(0, 255, (3, 12, 12), np.uint8)
    action_space = Discrete(2)

    def _picture(self):
        return np.full((3, 12, 12), self.time, np.uint8)

    def reset(self, **_):
        self.time = 0
        return self._picture(), {}

    def step(self, _action):
        self.time += 1
        return self._picture(), float(self.time), False, self.time == 10, {}


def act(env, storage, num_steps):
    """One acting process: a plain loop that writes."""
    observation, _ = env.reset()
    for _ in range(num_steps):
        action = env.action_space.sample()
        after, reward, terminated, truncated, info = env.step(action)
        storage.record(observation, action, reward, terminated, truncated, info, after)
        observation = env.reset()[0] if terminated or truncated else after


def pixels(kind, path, **options):
    options = {"storage_size": 200, "batch_size": 16, "path": path, **options}
    return kind(PixelEnv.observation_space, PixelEnv.action_space, **options)


@pytest.mark.parametrize(("keep", "compress"), [(True, True), (False, False)])
def test_one_process_acts_and_many_sample_pixels(tmp_path, keep, compress):
    env, path = PixelEnv(), tmp_path / "replay"
    storage = pixels(NStepReplayStorage, path, n_step=3, discount=0.5, compress=compress)
    # Workers that are started before there are rows wait for them.
    batches = iter(storage.loader(2, pin_memory=True, seed=0, **FORK))
    act(env, storage, 40)
    for _ in range(30):
        batch = next(batches)
        assert batch["observation"].dtype is torch.uint8
        now = batch["observation"][:, 0, 0, 0].double()
        # The fold was made in the worker: at most 3 steps on, never into another episode.
        steps = batch["steps_to_next_obs"].reshape(-1).double()
        assert torch.equal(batch["next", "observation"][:, 0, 0, 0].double(), now + steps)
        expected = sum((now + 1 + i) * 0.5**i * (i < steps) for i in range(3))
        assert torch.allclose(batch["next", "reward"].reshape(-1).double(), expected)
        assert batch["observation"].is_pinned() == torch.cuda.is_available()
        act(env, storage, 10)
    assert batch["index"].max() > 40  # rows that were written after the workers began
    del batches
    storage.close(keep=keep)
    assert path.exists() == keep
    if keep:
        again = ReplayStorage.open(path, batch_size=4)
        assert len(again) == 200
        again.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_seeds_of_workers_differ_and_repeat(tmp_path, workers):
    storage = goal_storage(path=tmp_path / "replay", alpha=0.6)
    act(TallyEnv(), storage, 50)

    def draws():
        batches = iter(storage.loader(workers, seed=7, **(FORK if workers else {})))
        return [next(batches)["index"].tolist() for _ in range(6)]

    first = draws()
    assert first == draws()
    assert len({tuple(index) for index in first}) == 6


def test_priorities_reach_the_workers(tmp_path):
    storage = goal_storage(path=tmp_path / "replay", alpha=4.0, batch_size=20)
    act(TallyEnv(), storage, 50)
    every = torch.arange(50)
    storage.update_priority(every, torch.where(every == 42, 100.0, 0.01))
    batch = next(iter(storage.loader(1, **FORK)))
    assert (batch["index"] == 42).all()
    check_batch(batch)


def test_parts_are_those_that_the_loader_was_made_with(tmp_path):
    storage = goal_storage(path=tmp_path / "replay", n_step=2, batch_size=20)
    act(TallyEnv(), storage, 50)
    loader = storage.loader()
    storage.n_step, storage.num_goals = 5, 0
    batch = next(iter(loader))
    assert batch["steps_to_next_obs"].max() == 2
    assert batch["her_mask"].any()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sequences(tmp_path, num_workers):
    options = FORK if num_workers else {}
    storage = goal_storage(path=tmp_path / "one", batch_size=3, sample_unit=EpisodeSequence(4))
    act(TallyEnv(), storage, 50)
    loader = storage.loader(num_workers, **options)
    first, second = iter(loader), iter(loader)
    for batches in (first, second, first):
        assert next(batches)["step_in_sequence"].tolist() == [0, 1, 2, 3] * 3


@pytest.mark.slow
def test_workers_that_are_spawned(tmp_path):
    storage = goal_storage(path=tmp_path / "replay", alpha=0.6, n_step=2, seed=0)
    act(TallyEnv(), storage, 50)
    check_batch(next(iter(storage.loader(1, seed=0, multiprocessing_context="spawn"))))


def test_errors(tmp_path):
    with pytest.raises(RuntimeError, match="path="):
        goal_storage().loader()
    storage = goal_storage(path=tmp_path / "replay")
    for wrong in ({"num_workers": -1}, {"batch_size": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            storage.loader(**wrong)
    with pytest.raises(RuntimeError, match="empty"):
        next(iter(storage.loader()))
