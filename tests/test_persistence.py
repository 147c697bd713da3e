"""Saving and loading: what was reloaded goes on exactly like what was saved."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from goal_data import distance_reward, goal_transitions
from gymnasium import spaces
from torchrl.envs.transforms import Compose

from trl_storages import (
    EREReplayStorage,
    HERReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    UniformReplayStorage,
)
from trl_storages.replay import ReplayStorage, saving
from trl_storages.rows import PackedStorage
from trl_storages.samplers import ERESampler, HERSampler, PERSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("persistence")

OBSERVATIONS = spaces.Dict(
    {
        "observation": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "achieved_goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "desired_goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    }
)
SIZE, LANES = 60, 2


def hindsight(**options):
    return HERReplayStorage(
        OBSERVATIONS, spaces.Discrete(999), reward_fn=distance_reward, **options
    )


def plain(kind):
    return lambda **options: kind(OBSERVATIONS, spaces.Discrete(999), **options)


RECIPES = {
    "uniform": plain(UniformReplayStorage),
    "n-step": plain(NStepReplayStorage),
    "prioritized": plain(PrioritizedReplayStorage),
    "recency": plain(EREReplayStorage),
    "hindsight": hindsight,
    "all of them": lambda **options: hindsight(
        n_step=3, alpha=0.6, eta=0.997, c_min=10, strategy="episode", **options
    ),
}


def make(recipe, seed, **options):
    return RECIPES[recipe](storage_size=SIZE, num_envs=LANES, batch_size=16, seed=seed, **options)


def make_over(seed):
    """All of them over one of TorchRL's storages."""
    return ReplayStorage(
        storage=PackedStorage(SIZE),
        writer=EpisodeWriter(LANES),
        sampler=HERSampler(base=ERESampler(0.997, 10, base=PERSampler(SIZE))),
        transform=Compose(GoalRelabel(distance_reward), NStep(3, 0.9)),
        batch_size=16,
        generator=torch.Generator().manual_seed(seed),
    )


class Loop:
    """Writes to storages as a training loop does, in step with its own count of steps."""

    def __init__(self):
        self.step = 0

    def write(self, num_steps, *storages):
        steps = torch.arange(self.step, self.step + num_steps).expand(LANES, -1)
        lanes = torch.arange(LANES).unsqueeze(1).expand_as(steps)
        data = goal_transitions(lanes, steps, (steps + 3 * lanes) % 7 == 6)
        self.step += num_steps
        for storage in storages:
            storage.extend(data.clone())

    def learn(self, *storages):
        """Samples one batch from each, gives its rows priorities, and returns the batches."""
        batches = [storage.sample() for storage in storages]
        for storage, batch in zip(storages, batches, strict=True):
            batch["td_error"] = (batch["index"] % 5 + 0.5).float()
            storage.update_tensordict_priority(batch)
        return batches

    def run(self, num_rounds, *storages):
        for _ in range(num_rounds):
            self.write(1, *storages)
            self.learn(*storages)


def by_state_dict(saved, fresh, _):
    fresh.load_state_dict(saved.state_dict())
    return fresh


def by_dumps(saved, fresh, path):
    saved.dumps(path / "dump")
    fresh.loads(path / "dump")
    return fresh


def assert_same(first, second):
    """Equal to the last bit, but for the clock of a sampler's writes, which starts anew."""
    first, second = (batch.exclude("priority_stamp") for batch in (first, second))
    assert first.batch_size == second.batch_size
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key, value in first.items(True, True):
        assert value.dtype == second[key].dtype
        assert torch.equal(value, second[key]), key


def assert_go_on_alike(saved, reloaded, loop):
    """The next 100 batches, then 20 more with writes in between."""
    assert len(saved) == len(reloaded)
    assert saved.write_count == reloaded.write_count
    assert_same(saved[:], reloaded[:])
    for _ in range(100):
        assert_same(*loop.learn(saved, reloaded))
    for _ in range(20):
        loop.write(1, saved, reloaded)
        assert_same(*loop.learn(saved, reloaded))
    assert_same(saved[:], reloaded[:])
    reloaded.validate()


@pytest.mark.parametrize("reload", [by_state_dict, by_dumps])
def test_what_was_loaded_is_saved_again(reload, tmp_path):
    loop, saved = Loop(), make_over(seed=1)
    loop.write(20, saved)
    for name in "ab":
        (tmp_path / name).mkdir()
    loaded = reload(saved, make_over(seed=2), tmp_path / "a")
    assert_go_on_alike(saved, by_dumps(loaded, make_over(seed=3), tmp_path / "b"), loop)


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("reload", [by_state_dict, by_dumps])
def test_what_was_never_written_is_loaded_in_place_of_rows(share_next, reload, tmp_path):
    def empty():
        rows = PackedStorage(SIZE, share_next=share_next)
        return ReplayStorage(storage=rows, writer=EpisodeWriter(LANES))

    written, fresh = empty(), empty()
    Loop().write(20, written)
    loaded = reload(empty(), written, tmp_path)
    assert len(loaded) == len(loaded.storage) == 0
    loop = Loop()
    for storage in (loaded, fresh):
        copy.deepcopy(loop).write(5, storage)
    assert_same(loaded[:], fresh[:])
    assert loaded.storage.side_nbytes == fresh.storage.side_nbytes
    loaded.validate()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize(
    ("recipe", "num_steps"),
    [("uniform", 47), ("all of them", 47)],
)
def test_copies(recipe, num_steps, copied):
    loop, saved = Loop(), make(recipe, seed=1)
    loop.write(4, saved)
    loop.run(num_steps - 4, saved)
    copy_of_it = copied(saved)
    assert_go_on_alike(saved, copy_of_it, loop)
    assert isinstance(copy_of_it.storage, PackedStorage)
    assert copy_of_it.storage.scratch_dir is None


@pytest.mark.parametrize("reload", [by_state_dict, by_dumps])
def test_memory_mapped_rows(reload, tmp_path):
    loop, saved = Loop(), make("hindsight", seed=1, path=tmp_path / "saved")
    loop.write(4, saved)
    loop.run(43, saved)
    fresh = make("hindsight", seed=2, path=tmp_path / "fresh")
    assert_go_on_alike(saved, reload(saved, fresh, tmp_path), loop)
    assert fresh.storage.scratch_dir == tmp_path / "fresh"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "reload", [by_state_dict, by_dumps, lambda saved, *_: copy.deepcopy(saved)]
)
def test_on_a_gpu(reload, tmp_path):
    loop = Loop()
    saved, fresh = (make("all of them", seed=seed, device="cuda:0") for seed in (1, 2))
    loop.write(4, saved)
    loop.run(43, saved)
    assert_go_on_alike(saved, reload(saved, fresh, tmp_path), loop)


def test_the_phase_of_recency():
    """A phase that is under way goes on where it was."""
    loop, saved, fresh = Loop(), make("recency", seed=1, c_min=1), make("recency", seed=2, c_min=1)
    loop.write(20, saved)
    saved.sampler.begin_phase(40)
    for _ in range(30):
        loop.learn(saved)
    fresh.load_state_dict(saved.state_dict())
    assert (fresh.sampler.update, fresh.sampler.num_updates) == (30, 40)
    for _ in range(10):
        assert_same(*loop.learn(saved, fresh))


def test_a_storage_that_has_not_recorded_yet(tmp_path):
    saved, fresh = (ReplayStorage(storage=PackedStorage(8)) for _ in range(2))
    saved.record([0.0], 1, 0.5, False, True, {}, [1.0])
    saved.dumps(tmp_path)
    fresh.loads(tmp_path)
    fresh.load_state_dict(saved.state_dict())
    fresh.record([2.0], 1, 0.5, False, True, {}, [3.0])
    assert fresh[:]["observation"].flatten().tolist() == [0, 2]


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make("uniform", seed=1).loads(tmp_path / "nowhere")


def test_what_another_thread_writes_during_a_load_comes_after_it(monkeypatch):
    storage = ReplayStorage(storage=PackedStorage(20), writer=EpisodeWriter(on_gap="ignore"))
    lane, done = torch.zeros(3).long(), torch.zeros(3).bool()
    rows = goal_transitions(lane, torch.arange(3), done)
    storage.extend(rows)
    state, take = copy.deepcopy(storage.state_dict()), saving._take
    writer = threading.Thread(target=storage.extend, args=[rows])

    def overtaken(*args):
        writer.start()
        writer.join(0.2)
        take(*args)

    monkeypatch.setattr(saving, "_take", overtaken)
    storage.load_state_dict(state)
    writer.join()
    assert len(storage) == 6
    storage.validate()
