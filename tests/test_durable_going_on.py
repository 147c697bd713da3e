"""Ready-made storages on disk, against twins that were never closed."""

import json
import os
import shutil
import signal

import pytest
import torch
from disk.recorded import Recorded
from goal_data import goal_transitions
from gymnasium import spaces
from test_persistence import (
    LANES,
    OBSERVATIONS,
    RECIPES,
    SIZE,
    Loop,
    assert_go_on_alike,
    assert_same,
    by_dumps,
    by_state_dict,
    make,
)
from torchrl.data import TensorDictReplayBuffer

from trl_storages import (
    EpisodeReplayStorage,
    EpisodeWriter,
    PackedStorage,
    ReplayStorage,
    UniformReplayStorage,
    UniformSampler,
)
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, WrappingSampler

pytestmark = pytest.mark.requirement("persistence")


def samplers_of(storage):
    sampler = storage.sampler
    while isinstance(sampler, WrappingSampler):
        yield sampler
        sampler = sampler.base
    yield sampler


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_steps", [11, 47])
def test_taken_up_again_in_the_middle_of_episodes(recipe, num_steps, tmp_path):
    twin, storage = (make(recipe, seed=1, path=tmp_path / name) for name in ("twin", "rows"))
    loop = Loop()
    loop.write(4, twin, storage)
    loop.run(num_steps - 4, twin, storage)
    storage.close()
    # It goes on with the generator of the rows.
    again = make(recipe, seed=7, path=tmp_path / "rows")
    assert again.writer._write_count == twin.writer._write_count
    assert torch.equal(again.episodes.cursors, twin.episodes.cursors)
    assert_same(again.episodes.episodes(), twin.episodes.episodes())
    for ours, theirs in zip(samplers_of(again), samplers_of(twin), strict=True):
        if isinstance(ours, ERESampler):
            assert (ours.update, ours.num_updates) == (theirs.update, theirs.num_updates)
        if isinstance(ours, PERSampler):
            assert torch.equal(ours.priorities, theirs.priorities)
            assert ours.default_priority == theirs.default_priority
    assert_go_on_alike(twin, again, loop)


def test_whole_episodes(tmp_path):
    def build(**options):
        return EpisodeReplayStorage(
            OBSERVATIONS, spaces.Discrete(999), storage_size=SIZE, num_envs=LANES, seed=3, **options
        )

    twin, storage = build(path=tmp_path / "twin"), build(path=tmp_path / "rows")
    loop = Loop()
    for _ in range(2):
        loop.write(20, twin, storage)
    storage.sample(), twin.sample()
    storage.close()
    again = build(path=tmp_path / "rows")
    for _ in range(20):
        assert_same(twin.sample(), again.sample())
        loop.write(1, twin, again)


@pytest.mark.parametrize("reload", [by_state_dict, by_dumps])
@pytest.mark.parametrize("num_steps", [11, 47])
def test_saved_from_one_directory_into_another(reload, num_steps, tmp_path):
    twin, saved = (make("all of them", seed=1, path=tmp_path / name) for name in ("twin", "saved"))
    loop = Loop()
    loop.write(4, twin, saved)
    loop.run(num_steps - 4, twin, saved)
    fresh = make("all of them", seed=2, path=tmp_path / "fresh")
    Loop().run(40, fresh)
    reload(saved, fresh, tmp_path)
    fresh.close()
    again = make("all of them", seed=2, path=tmp_path / "fresh")
    assert_go_on_alike(twin, again, loop)
    saved.validate()


@pytest.mark.parametrize("reload", [by_state_dict, by_dumps])
@pytest.mark.parametrize(
    "wrap", [lambda per: per, lambda per: HERSampler(base=ERESampler(base=per))]
)
def test_saved_into_a_directory_that_was_never_written(reload, wrap, tmp_path):
    """Its files are made by the load, after the priorities came."""

    def build(name):
        rows, per = PackedStorage(8, scratch_dir=tmp_path / name), PERSampler(8)
        parts = {"storage": rows, "sampler": wrap(per), "writer": EpisodeWriter()}
        return ReplayStorage(**parts, batch_size=4), per

    def drawn(storage):
        return storage.sampler.sample(storage.storage, 4)[1]["priority_weight"]

    (saved, priorities), (fresh, loaded) = build("saved"), build("fresh")
    saved.extend(goal_transitions(torch.zeros(5).long(), torch.arange(5), torch.zeros(5).bool()))
    rows = torch.arange(3)
    priorities.update_priority(rows, rows + 2.0, storage=saved.storage)
    reload(saved, fresh, tmp_path)
    drawn(fresh)
    assert torch.equal(loaded.priorities, priorities.priorities)
    fresh.storage.close()
    again, reopened = build("fresh")
    drawn(again)
    assert torch.equal(reopened.priorities, priorities.priorities)
    assert reopened.default_priority == 4


def test_rows_are_loaded_together_with_their_episodes(tmp_path):
    """TorchRL's buffers load one part after another, and a directory changes at once."""

    def build(name):
        rows = PackedStorage(8, scratch_dir=tmp_path / name)
        return TensorDictReplayBuffer(storage=rows, writer=EpisodeWriter(), batch_size=4)

    saved, other = build("saved"), build("other")
    for buffer in (saved, other):
        steps = torch.arange(5)
        buffer.extend(goal_transitions(torch.zeros(5).long(), steps, steps < 0))
    state, rows = saved.state_dict(), other.storage.rows.clone()
    for load in (other, other.storage, other.writer):
        part = {other.storage: "_storage", other.writer: "_writer"}.get(load)
        if load is other.writer:
            saved.extend(goal_transitions(torch.zeros(1).long(), torch.arange(5, 6), steps[:1] < 0))
            state = saved.state_dict()
        with pytest.raises(RuntimeError, match="together with"):
            load.load_state_dict(state if part is None else state[part])
    assert torch.equal(other.storage.rows, rows)
    other.storage.episodes.validate()


@pytest.mark.parametrize("way", ["move", "rename", "copy"])
def test_a_directory_that_was_moved_while_it_was_closed(way, tmp_path):
    storage = make("all of them", seed=1, path=tmp_path / "rows")
    twin, loop = make("all of them", seed=1, path=tmp_path / "twin"), Loop()
    loop.write(4, twin, storage)
    loop.run(43, twin, storage)
    storage.close()
    there = tmp_path / "elsewhere" / "rows"
    there.parent.mkdir()
    if way == "copy":
        shutil.copytree(tmp_path / "rows", there)
        first = make("all of them", seed=1, path=tmp_path / "rows")  # beside the copy
    else:
        {"move": shutil.move, "rename": os.rename}[way](tmp_path / "rows", there)
    assert_go_on_alike(twin, make("all of them", seed=1, path=there), loop)
    if way == "copy":
        first.validate()


class TestOtherLanes:
    """The number of environments is part of what was written."""

    def build(self, path, num_envs):
        return UniformReplayStorage(
            OBSERVATIONS, spaces.Discrete(999), storage_size=SIZE, num_envs=num_envs, path=path
        )

    def test_of_a_storage_that_was_written(self, tmp_path):
        storage = self.build(tmp_path, 2)
        Loop().write(3, storage)
        storage.close()
        with pytest.raises(ValueError, match="num_envs=2, got 3: pass"):
            self.build(tmp_path, 3)
        self.build(tmp_path, 2).validate()

    def test_of_one_that_was_only_made(self, tmp_path):
        self.build(tmp_path, 3).close()
        storage = self.build(tmp_path, 2)
        Loop().write(40, storage)
        storage.close()
        again = self.build(tmp_path, 2)
        assert len(again) == SIZE
        again.validate()


def test_environments_that_are_being_reset_are_known_after_closing(tmp_path):
    loop = Recorded(tmp_path)
    loop.record(0, [False, True])
    loop.storage.close()
    assert len(Recorded(tmp_path).record(1, [False, False])) == 1


def test_environments_of_a_killed_writer_are_gone(tmp_path):
    """Those of the process that takes the rows up are freshly reset, whatever was flushed before."""
    pid = os.fork()
    if not pid:
        try:
            loop = Recorded(tmp_path)
            loop.record(0, [False, True])
            loop.storage.flush()
            loop.record(1, [False, False])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    loop = Recorded(tmp_path)
    assert len(loop.storage) == 3
    assert len(loop.record(0, [False, False])) == 2


def test_environments_from_before_a_load_are_gone(tmp_path):
    loop = Recorded(tmp_path / "rows")
    loop.record(0, [False, False])
    loop.storage.dumps(tmp_path / "dump")
    loop.storage.loads(tmp_path / "dump")
    loop.record(1, [False, True])
    loop.storage.flush()
    loop.storage.loads(tmp_path / "dump")
    loop.record(1, [False, False])
    loop.storage.storage.directory.abandon()
    assert len(Recorded(tmp_path / "rows").record(2, [False, False])) == 2


@pytest.mark.parametrize("bad", [[], {"generator": "AAAA"}, {"generator": 3}, {"sampler": 3}])
def test_damaged_progress(bad, tmp_path):
    storage = make("recency", seed=1, path=tmp_path)
    Loop().write(9, storage)
    storage.close()
    whole = (tmp_path / "storage.json").read_text()
    (tmp_path / "storage.json").write_text(json.dumps({**json.loads(whole), "progress": bad}))
    with pytest.raises(ValueError, match="damaged"):
        make("recency", seed=1, path=tmp_path)
    (tmp_path / "storage.json").write_text(whole)
    again = make("recency", seed=1, path=tmp_path)
    again.validate()
    assert len(again) == 18


def test_a_process_that_goes_to_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = make("uniform", seed=0, path="rows")
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    loop = Loop()
    loop.write(4, storage)
    storage.flush()
    assert len(ReplayStorage.open(tmp_path / "rows", mode="r")) == 8
    storage.close()
    assert not [*other.iterdir()]


def test_readers_that_are_opened_before_the_first_write(tmp_path):
    storage = make("all of them", seed=1, path=tmp_path / "rows")
    reader = ReplayStorage.open(tmp_path / "rows", mode="r", batch_size=8, sampler=UniformSampler())
    with pytest.raises(RuntimeError, match="empty"):
        reader.sample()
    batches = iter(storage.loader(batch_size=8))
    with pytest.raises(RuntimeError, match="empty"):
        next(batches)
    Loop().write(5, storage)
    assert len(reader.sample()) == len(next(iter(storage.loader(batch_size=8)))) == 8
    # Without spaces there is nothing to read before the layout is known.
    later = ReplayStorage(storage=PackedStorage(8, scratch_dir=tmp_path / "later"))
    with pytest.raises(FileNotFoundError, match="storage"):
        ReplayStorage.open(tmp_path / "later", mode="r")
    with pytest.raises(RuntimeError, match="none was written yet"):
        later.loader(batch_size=4)


def in_a_fork(body):
    """Returns what `body` raises in a forked process, as text; empty if nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            body()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_other_processes_may_not_write(tmp_path):
    storage = make("uniform", seed=1, path=tmp_path)
    loop = Loop()
    loop.write(4, storage)
    assert "forked from" in in_a_fork(lambda: loop.write(1, storage))
    assert "forked from" in in_a_fork(storage.empty)
    assert "writer already" in in_a_fork(lambda: make("uniform", seed=1, path=tmp_path))
    # A fork that ends does not take the right to write with it.
    loop.write(1, storage)
    storage.close()
    assert in_a_fork(lambda: make("uniform", seed=1, path=tmp_path).close()) == ""
    assert len(make("uniform", seed=1, path=tmp_path)) == 10
