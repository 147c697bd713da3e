"""Batches drawn in worker processes, the way of DrQ-v2: one acts, many sample."""

import gymnasium
import numpy as np
import pytest
import torch
from disk.rows import is_torn, make, priority_of, write
from goal_data import AsDrawn
from gymnasium.spaces import Box, Discrete

from trl_storages import (
    EpisodeSequence,
    HERSampler,
    NStepReplayStorage,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)

# TorchRL sets "spawn", whose workers import everything again.
FORK = {"multiprocessing_context": "fork"}

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class PixelEnv(gymnasium.Env):
    """Shows its step as the brightness of a picture; an episode has 10 steps."""

    observation_space = Box(0, 255, (3, 12, 12), np.uint8)
    action_space = Discrete(2)

    def _picture(self):
        return np.full((3, 12, 12), self.time % 256, np.uint8)

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
        step = env.step(action)
        storage.record(observation, action, *step[1:], step[0])
        observation = env.reset()[0] if step[3] else step[0]


@pytest.mark.requirement("disk-workers")
@pytest.mark.parametrize("keep", [True, False])
def test_one_process_acts_and_many_sample_pixels(tmp_path, keep):
    env, path = PixelEnv(), tmp_path / "replay"
    storage = NStepReplayStorage(
        env.observation_space,
        env.action_space,
        storage_size=200,
        batch_size=16,
        n_step=3,
        discount=0.5,
        path=path,
    )
    act(env, storage, 40)
    loader = storage.loader(2, fetch_every=2, pin_memory=True, seed=0, **FORK)
    batches = iter(loader)
    seen = 0
    for _ in range(30):
        batch = next(batches)
        assert batch["observation"].dtype is torch.uint8
        now = batch["observation"][:, 0, 0, 0].double()
        # The fold was made in the worker: at most 3 steps on, never into another episode.
        steps = batch["steps_to_next_obs"].reshape(-1).double()
        assert torch.equal(batch["next", "observation"][:, 0, 0, 0].double(), now + steps)
        assert ((steps == 3) | (now + steps <= 10)).all()
        expected = sum((now + 1 + i) * 0.5**i * (i < steps) for i in range(3))
        assert torch.allclose(batch["next", "reward"].reshape(-1).double(), expected)
        assert batch["observation"].is_pinned() == torch.cuda.is_available()
        act(env, storage, 10)
        seen = max(seen, int(batch["index"].max()))
    assert seen > 40  # rows that were written after the workers began
    del batches
    storage.close(keep=keep)
    assert path.exists() == keep
    if keep:
        again = ReplayStorage.open(path, batch_size=4)
        assert len(again) == 200
        again.close()


@pytest.mark.requirement("disk-workers")
def test_seeds_of_workers_differ_and_repeat(tmp_path):
    storage = make(tmp_path, size=1000, batch_size=32)
    write(storage, 1000)

    def draws():
        batches = iter(storage.loader(2, seed=7, **FORK))
        return [next(batches)["index"] for _ in range(6)]

    first, second = draws(), draws()
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    assert len({tuple(index.tolist()) for index in first}) == 6


def test_without_workers(tmp_path):
    storage = make(tmp_path, size=100)
    write(storage, 50)
    batches = iter(storage.loader(batch_size=5))
    batch = next(batches)
    assert batch.batch_size == torch.Size([5])
    assert not is_torn(batch).any()
    batch["td_error"] = priority_of(batch["serial"], 0)
    storage.update_tensordict_priority(batch)
    expected = priority_of(batch["serial"], 0)
    assert torch.equal(storage.sampler.priorities[batch["index"]], expected)
    write(storage, 60)
    assert not is_torn(next(batches)).any()


def test_sequences_and_a_collate_function_of_ones_own(tmp_path):
    storage = ReplayStorage(
        storage=PackedStorage(100, scratch_dir=tmp_path),
        sample_unit=EpisodeSequence(4),
        collate_fn=lambda rows: rows.set("marked", rows["serial"] + 1),
        batch_size=3,
    )
    write(storage, 50)
    batch = next(iter(storage.loader(1, **FORK)))
    assert batch.batch_size == (12,)
    assert batch["step_in_sequence"].tolist() == [0, 1, 2, 3] * 3
    assert torch.equal(batch["marked"], batch["serial"] + 1)


@pytest.mark.slow
def test_workers_that_are_spawned(tmp_path, start_processes_by):
    start_processes_by("spawn")
    storage = ReplayStorage(
        storage=PackedStorage(100, scratch_dir=tmp_path),
        sampler=HERSampler(base=PERSampler(100)),
        transform=AsDrawn(),
        batch_size=10,
    )
    write(storage, 50)
    batch = next(iter(storage.loader(1)))
    assert batch["her_mask"].sum() == 8
    assert not is_torn(batch).any()


def test_workers_that_stay(tmp_path):
    """A loader is iterated again, with the same workers and, meanwhile, new rows and priorities."""
    storage = make(tmp_path, size=100, batch_size=20)
    write(storage, 50)
    loader = storage.loader(2, seed=3, persistent_workers=True, prefetch_factor=1, **FORK)
    for _ in range(3):
        batches = iter(loader)
        seen = torch.cat([next(batches)["observation"][:, 0] for _ in range(6)])
        newest = int(storage.episodes.num_steps_written[0])
        assert seen.max() < newest
        assert seen.min() >= max(newest - 100, 0)
        write(storage, 100)
    assert seen.min() >= 150


def test_priorities_reach_the_workers(tmp_path):
    storage = make(tmp_path, size=100, batch_size=20)
    write(storage, 100)
    storage.sampler.alpha = 4.0
    every = torch.arange(100)
    storage.sampler.update_priority(every, torch.where(every == 42, 100.0, 0.01))
    batch = next(iter(storage.loader(1, **FORK)))
    assert (batch["index"] == 42).all()
    reader = ReplayStorage.open(tmp_path, mode="r", sampler=PERSampler(100), batch_size=4)
    with pytest.raises(RuntimeError, match="reading"):
        reader.sampler.update_priority(every, 1.0, storage=reader.storage)


def test_two_iterations_at_once(tmp_path):
    storage = make(tmp_path, size=100, batch_size=20)
    write(storage, 50)
    loader = storage.loader()
    first, second = iter(loader), iter(loader)
    for size in (3, 7, 60):
        for batches in (first, second, first):
            assert not is_torn(next(batches)).any()
        write(storage, size)


def test_errors(tmp_path):
    memory = ReplayStorage(storage=PackedStorage(8), batch_size=4)
    write(memory, 3)
    with pytest.raises(RuntimeError, match="path="):
        memory.loader()
    storage = make(tmp_path, batch_size=None)
    with pytest.raises(RuntimeError, match="none was written"):
        storage.loader()
    write(storage, 3)
    with pytest.raises(ValueError, match="batch_size"):
        storage.loader()
    for wrong in ({"num_workers": -1}, {"fetch_every": 0}, {"batch_size": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            storage.loader(**{"batch_size": 4, **wrong})
