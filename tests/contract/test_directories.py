"""Who may write a directory, when, and where it may lie."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract.make import library, make
from contract.steps import Player, assert_same, ids_of, record, without_slots, write
from contract.writers import LANES, Script, found, opened, prefer_one, write_on
from gymnasium.vector import AutoresetMode

pytestmark = [
    pytest.mark.requirement("persistence"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]

STEPS = 12


def filled(path: Any, kind: str = "uniform", num_blocks: int = 9) -> tuple[Any, list[Any]]:
    storage, written = opened(path, STEPS, kind), [[], []]
    write_on(storage, Script(0), written, num_blocks)
    return storage, [steps[-STEPS:] for steps in written]


def ends_in_a_fork(body: Callable[[], Any]) -> int:
    """How a forked process ends: 0, 1 by a RuntimeError, or 2 by another one."""
    if not (pid := os.fork()):
        try:
            torch.set_num_threads(1)
            body()
            os._exit(0)
        except RuntimeError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_one_process_writes(tmp_path):
    storage, written = filled(tmp_path)
    block = Script(1, 1000).block(0)
    for act in (lambda: write(storage, block), storage.empty, lambda: opened(tmp_path, STEPS)):
        assert ends_in_a_fork(act) == 1
    with pytest.raises(RuntimeError, match="writer"):
        opened(tmp_path, STEPS)
    # A fork that ends does not take the right to write with it.
    write_on(storage, Script(1, 1000), written, 1)
    storage.close()
    assert ends_in_a_fork(lambda: opened(tmp_path, STEPS, "uniform").close()) == 0
    assert found(opened(tmp_path, STEPS, "uniform")) == [steps[-STEPS:] for steps in written]


def test_a_closed_storage_stays_as_it_was(tmp_path):
    storage, written = filled(tmp_path)
    state = storage.state_dict()
    storage.close()
    storage.close()
    for act in (
        storage.empty,
        lambda: storage.empty(keep_steps=3),
        storage.end_episodes,
        lambda: write(storage, Script(1, 1000).block(0)),
        lambda: storage.load_state_dict(state),
        lambda: storage.close(keep=False),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            act()
        assert found(storage) == written
        assert len(storage.sample()) == 16
    for sampler in (library.UniformSampler(without_replacement=True), None):
        again = library.ReplayStorage.open(tmp_path, sampler=sampler)
        assert found(again) == written
        again.close(keep=sampler is not None)
    assert not tmp_path.exists()


def test_in_memory_there_is_nothing_to_flush_or_close():
    storage, player = make(), Player()
    for _ in range(3):
        write(storage, [player.play([], 2)])
        storage.flush()
        storage.close()
    assert len(storage) == 6


@pytest.mark.parametrize("seed", [None, 9])
def test_a_reopened_directory_draws_on_by_its_generator(seed, tmp_path):
    storage = make(size=24, path=tmp_path / "rows", place="directory", seed=3)
    write(storage, [Player().play([6, 6])])
    storage.sample(4)
    storage.close()
    again = make(size=24, path=tmp_path / "rows", place="directory", seed=seed)
    assert_same(again.sample(32), storage.sample(32))


def test_fields_are_named_in_any_order(tmp_path):
    fields = {"x": (torch.float32, (2,)), "y": (torch.float32, (3,))}
    for named in (fields, dict(reversed(fields.items()))):
        rows = library.PackedStorage(8, path=tmp_path, fields=named)
        library.ReplayStorage(storage=rows).close()


@pytest.mark.parametrize("way", ["move", "copy"])
def test_a_closed_directory_may_be_moved_and_copied(way, tmp_path):
    storage, written = filled(tmp_path / "rows", "prioritized")
    storage.close()
    there = tmp_path / "else" / "where"
    there.parent.mkdir()
    {"move": shutil.move, "copy": shutil.copytree}[way](tmp_path / "rows", there)
    again = opened(there, STEPS, "prioritized")
    if way == "copy":
        beside = opened(tmp_path / "rows", STEPS, "prioritized")
        assert_same(without_slots(beside.sample()), without_slots(again.sample()))
        write_on(beside, Script(1, 1000), [[], []], 9)
    assert found(again) == written
    write_on(again, Script(2, 2000), written, 2)
    assert found(again) == [steps[-STEPS:] for steps in written]


def test_the_process_may_go_to_another_directory(tmp_path, monkeypatch):
    (other := tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    storage, _ = filled("rows", num_blocks=0)
    monkeypatch.chdir(other)
    write_on(storage, Script(0), written := [[], []], 3)
    storage.close()
    assert not [*other.iterdir()]
    assert found(opened(tmp_path / "rows", STEPS, "uniform")) == [it[-STEPS:] for it in written]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_readers(tmp_path, copied):
    storage, written = filled(tmp_path, "all")
    other = copied(storage)
    assert found(other) == written
    write_on(storage, Script(1, 1000), written, 2)
    assert len(other.sample()) == 16
    assert found(other) == [steps[-STEPS:] for steps in written]
    for act in (lambda: write(other, Script(2, 2000).block(0)), other.empty, other.end_episodes):
        with pytest.raises(RuntimeError, match="reading"):
            act()


def test_pickled_writer_writes_once_the_lock_is_free(tmp_path):
    storage, written = filled(tmp_path, "all")
    saved = pickle.dumps(storage)
    write_on(storage, Script(1, 1000), written, 2)
    write_count, n_step = storage.write_count, storage.n_step
    storage.close()
    again = pickle.loads(saved)
    assert (again.write_count, again.n_step) == (write_count, n_step)
    write_on(again, Script(2, 2000), written, 2)
    assert found(again) == [steps[-STEPS:] for steps in written]
    assert len(again.sample()) == 16
    with pytest.raises(RuntimeError, match="writer"):
        opened(tmp_path, STEPS, "all")


def test_cold_directory_samples_the_same_batches(tmp_path):
    storage, written = filled(tmp_path, "all")
    options = {"mode": "r", "batch_size": 64}

    def batches(**cold):
        generator = torch.Generator().manual_seed(0)
        reader = library.ReplayStorage.open(tmp_path, generator=generator, **options, **cold)
        return torch.stack([reader.sample() for _ in range(3)])

    assert_same(batches(cold=True), batches())
    storage.close()
    again = opened(tmp_path, STEPS, "all", cold=True)
    write_on(again, Script(1, 1000), written, 30)  # around the entries of each lane
    assert found(again) == [steps[-STEPS:] for steps in written]
    assert {*ids_of(again.sample(64)).tolist()} <= {it.id for steps in found(again) for it in steps}


def test_readers_come_before_the_first_write(tmp_path):
    storage = opened(tmp_path, STEPS, "uniform")
    reader = library.ReplayStorage.open(tmp_path, mode="r", batch_size=8)
    with pytest.raises(RuntimeError, match="empty"):
        reader.sample()
    write_on(storage, Script(0), written := [[], []], 1)
    assert len(reader.sample()) == 8
    assert found(reader) == written


def test_a_directory_may_be_made_anew(tmp_path):
    storage, _ = filled(tmp_path)
    with pytest.raises(RuntimeError, match="writer"):
        opened(tmp_path, STEPS, "uniform", fresh=True)
    reader = opened(tmp_path, STEPS, "uniform", mode="r")
    storage.close()
    storage = opened(tmp_path, STEPS, "uniform", fresh=True)
    assert not len(storage)
    write_on(storage, Script(1, 1000), written := [[], []], 9)
    firsts = reader.sample_episodes(16)[:, 0]
    assert ids_of(firsts).tolist() == firsts["observation"][:, 1].tolist()
    assert found(reader) == [steps[-STEPS:] for steps in written]


@pytest.mark.parametrize("name", ["storage.json", "rows.1"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_links_and_pipes_are_not_followed(tmp_path, name, kind):
    filled(tmp_path / "rows")[0].close()
    path = (tmp_path / "rows" / name).rename(tmp_path / "elsewhere").parent / "rows" / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="damaged"):
        library.ReplayStorage.open(tmp_path / "rows")


@pytest.mark.parametrize("number", [1, 2])
def test_directory_of_an_older_format_raises(tmp_path, number):
    (tmp_path / "storage.json").write_text(json.dumps({"kind": "trl_storages", "format": number}))
    with pytest.raises(ValueError, match="wrote formats 1 and 2"):
        library.ReplayStorage.open(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """Room for rows is reserved before they are written."""
    reserve, left, size = os.posix_fallocate, 1 << 40, 20_000

    def reserve_some(file: int, start: int, size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_some)
    storage, script = opened(tmp_path / "x", size, "uniform"), Script(0, longest=2000)
    written: list[list[Any]] = [[], []]
    left = 5_000_000
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            write_on(storage, script, written, 1000)
        assert len(storage) >= 1000
        assert found(storage) == written
        script = Script(0, len(written[0]) + 5000, longest=2000)
    left = 5_000_000
    write_on(storage, script, written, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: reserve_some(file, 0, 1 << 40))
        with pytest.raises(OSError, match="No space left"):
            storage.empty()
    assert found(storage) == written
    storage.close()
    left = 0
    with pytest.raises(OSError, match="No space left"):
        opened(tmp_path / "y", size)
    assert [*(tmp_path / "y").iterdir()] == [tmp_path / "y" / "lock"]
    assert found(opened(tmp_path / "x", size, "uniform", mode="r")) == written


class TestAfterAKill:
    """A copy of the files is what a killed process would have left."""

    @pytest.mark.parametrize("is_flushed", [False, True])
    def test_priorities_are_kept(self, tmp_path, is_flushed):
        storage, written = filled(tmp_path / "rows", "prioritized")
        preferred = [prefer_one(storage) for _ in range(2)]
        if is_flushed:
            storage.flush()
        shutil.copytree(tmp_path / "rows", tmp_path / "copy")
        again = opened(tmp_path / "copy", STEPS, "prioritized")
        assert found(again) == written
        assert {*ids_of(again.sample(64)).tolist()} == {*preferred}

    @pytest.mark.parametrize("keep_steps", [0, 3])
    @pytest.mark.parametrize("num_blocks", [0, 2])
    def test_what_was_emptied_never_comes_back(self, tmp_path, keep_steps, num_blocks):
        storage, written = filled(tmp_path / "rows")
        storage.empty(keep_steps=keep_steps)
        kept = [steps[len(steps) - keep_steps :] for steps in written]
        write_on(storage, Script(1, 1000), kept, num_blocks)
        shutil.copytree(tmp_path / "rows", tmp_path / "copy")
        assert found(opened(tmp_path / "copy", STEPS, "uniform")) == [it[-STEPS:] for it in kept]

    def test_environments_are_fresh(self, tmp_path):
        """Those that were to be reset in the next step are gone with the process."""
        options = {"lanes": LANES, "size": 24, "autoreset_mode": AutoresetMode.NEXT_STEP}
        players = [Player(lane) for lane in range(LANES)]
        storage = make(place="directory", path=tmp_path / "rows", **options)
        ended = players[1].step("terminated")
        record(storage, [players[0].step(), ended])
        storage.flush()
        # A reset begins with the last observation.
        record(storage, [copy.deepcopy(players[0]).step(), ended._replace(id=ended.id + 1, end="")])
        assert len(storage) == 3  # the other one was reset
        shutil.copytree(tmp_path / "rows", tmp_path / "later")
        again = make(place="directory", path=tmp_path / "later", **options)
        assert again.write_count == len(again) == 3
        again.end_episodes()
        for player in players:
            player.reset()
        steps = [player.step() for player in players]
        record(again, steps)
        assert len(again) == 5
        assert {*ids_of(again[-2:]).tolist()} == {step.id for step in steps}
