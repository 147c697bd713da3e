"""Storages in a directory: taken up again, followed by readers, and refused where they are damaged."""

import contextlib
import errno
import os
import pickle
import resource
import shutil
import time

import numpy as np
import pytest
import torch
from durable.rows import check, is_torn, make, priority_of, transitions, write
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from torchrl.data import RandomSampler, RoundRobinWriter, TensorDictReplayBuffer

from trl_storages import (
    EpisodeWriter,
    ERESampler,
    HERSampler,
    NStepReplayStorage,
    PackedStorage,
    PERSampler,
    PrioritizedReplayStorage,
    ReplayStorage,
    UniformReplayStorage,
    UniformSampler,
)
from trl_storages.storages import Journal


def assert_same(first, second):
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        assert torch.equal(first[key], second[key]), key


@pytest.mark.requirement("persistence")
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("blocks", [[1], [3, 2], [5] * 9, [30]])
class TestReopening:
    def test_episodes_and_counters(self, tmp_path, num_envs, blocks):
        storage = make(tmp_path, num_envs)
        for size in blocks:
            write(storage, size)
        storage.close()
        again = make(tmp_path, num_envs)
        check(again)
        assert len(again) == len(storage)
        assert again.writer._write_count == sum(blocks) * num_envs
        assert torch.equal(again.episodes.cursors, storage.episodes.cursors)
        assert_same(again.episodes.episodes(), storage.episodes.episodes())
        write(again, 4)
        check(again)

    def test_draws_go_on(self, tmp_path, num_envs, blocks):
        def build():
            sampler = HERSampler(base=ERESampler(0.9, 2, base=PERSampler(24)))
            return ReplayStorage(
                storage=PackedStorage(24, scratch_dir=tmp_path),
                writer=EpisodeWriter(num_envs),
                sampler=sampler,
                generator=torch.Generator().manual_seed(3),
                batch_size=7,
            )

        storage = build()
        for size in blocks:
            write(storage, size)
            batch = storage.sample()
            batch["td_error"] = priority_of(batch["index"], storage)
            storage.update_tensordict_priority(batch)
        storage.close()
        again = build()
        for _ in range(100):
            assert_same(
                storage.sample().exclude("priority_stamp"), again.sample().exclude("priority_stamp")
            )
        assert torch.equal(storage.sampler.base.base.priorities, again.sampler.base.base.priorities)


def test_lanes_of_unequal_fill(tmp_path):
    storage = make(tmp_path, 4, 40)
    for step in range(25):
        write(storage, 1 + step % 3, torch.tensor([step % 4, (step + 1 + step % 2) % 4]))
    expected = storage.episodes.episodes()
    storage.close()
    again = make(tmp_path, 4, 40)
    check(again)
    assert_same(again.episodes.episodes(), expected)


def test_a_killed_interpreter_keeps_what_was_not_flushed(tmp_path):
    storage = make(tmp_path)
    write(storage, 9)
    del storage  # without close
    again = make(tmp_path)
    check(again)
    assert len(again) == 9


def test_priorities(tmp_path):
    storage = make(tmp_path)
    write(storage, 30)
    batch = storage.sample()
    batch["td_error"] = priority_of(batch["index"], storage)
    storage.update_tensordict_priority(batch)
    expected = storage.sampler.priorities
    storage.storage.journal.close()
    again = make(tmp_path)
    assert torch.equal(again.sampler.priorities, expected)
    assert again.sampler.default_priority == batch["td_error"].max()
    write(again, 2)
    again.sampler.validate()
    assert (again.sampler.priorities == expected).sum() >= 22
    again.empty()
    write(again, 3)
    assert again.sampler.default_priority == 1
    again.close()
    assert make(tmp_path).sampler.priorities.isfinite().sum() == 3


class TestTheSeam:
    """An episode goes on after reopening if the environment did, and only then."""

    def test_goes_on(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 5)
        storage.close()
        again = make(tmp_path)
        write(again, 3)
        assert again.episodes.episodes()["length"].tolist() == [8]

    def test_after_a_reset(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 5)
        storage.close()
        again = make(tmp_path)
        again.extend(transitions(torch.zeros(3).long(), torch.arange(50, 53)))
        assert again.episodes.episodes()["length"].tolist() == [5, 3]
        again.close()
        assert make(tmp_path).episodes.episodes()["length"].tolist() == [5, 3]

    def test_ended_by_hand(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 5)
        storage.end_episodes()
        storage.close()
        again = make(tmp_path)
        write(again, 3)
        assert again.episodes.episodes()["length"].tolist() == [5, 3]

    def test_trajectories_of_collectors(self, tmp_path):
        storage = make(tmp_path)
        data = transitions(torch.zeros(6).long(), torch.arange(6))
        data["collector", "traj_ids"] = torch.tensor([4, 4, 4, 4, 9, 9])
        storage.extend(data)
        storage.close()
        again = make(tmp_path)
        assert again.writer._last_trajectory.tolist() == [9]
        data = transitions(torch.zeros(2).long(), torch.arange(6, 8))
        again.extend(data.set(("collector", "traj_ids"), torch.tensor([9, 9])))
        assert again.episodes.episodes()["length"].tolist() == [4, 4]


def test_clearing(tmp_path):
    storage = make(tmp_path, 4)
    write(storage, 9)
    storage.empty(keep_steps=2)
    lengths, rows = storage.episodes.episodes(), storage[:]
    storage.close()
    again = make(tmp_path, 4)
    again.validate()
    assert_same(again[:], rows)
    assert_same(again.episodes.episodes(), lengths)
    again.empty()
    again.close()
    once_more = make(tmp_path, 4)
    assert len(once_more) == 0
    write(once_more, 3)
    check(once_more)


def test_rows_changed_in_place(tmp_path):
    storage = make(tmp_path)
    write(storage, 30)
    storage["observation"] = storage["observation"] + 100
    expected = storage[:]
    storage.close()
    again = make(tmp_path)
    again.validate()
    assert_same(again[:], expected)


def test_states_loaded_into_a_directory(tmp_path):
    source = ReplayStorage(
        storage=PackedStorage(24), writer=EpisodeWriter(), sampler=PERSampler(24), batch_size=8
    )
    write(source, 30)
    target = make(tmp_path / "state")
    write(target, 3)
    target.load_state_dict(source.state_dict())
    source.dumps(tmp_path / "dump")
    other = make(tmp_path / "loaded")
    other.loads(tmp_path / "dump")
    for storage, path in ((target, "state"), (other, "loaded")):
        storage.close()
        again = make(tmp_path / path)
        check(again)
        assert_same(again[:], source[:])


def test_a_copy_lives_in_memory(tmp_path):
    storage = make(tmp_path)
    write(storage, 30)
    copy = pickle.loads(pickle.dumps(storage.storage))
    assert copy.journal is None
    assert torch.equal(copy.rows, storage.storage.rows)
    write(storage, 1)
    assert not torch.equal(copy.rows, storage.storage.rows)


def test_stock_buffers_find_their_rows(tmp_path):
    def build():
        return TensorDictReplayBuffer(
            storage=PackedStorage(24, scratch_dir=tmp_path),
            writer=RoundRobinWriter(),
            sampler=RandomSampler(),
            batch_size=4,
        )

    buffer = build()
    buffer.extend(transitions(torch.zeros(10).long(), torch.arange(10)))
    rows = buffer[:].exclude("index")
    buffer.storage.close()
    again = build()
    assert_same(again[:].exclude("index"), rows)
    again.storage.close()
    with pytest.raises(ValueError, match="without episodes"):
        make(tmp_path)


def test_stock_writers_may_not_spoil_episodes(tmp_path):
    storage = make(tmp_path)
    write(storage, 3)
    storage.close()
    rows = PackedStorage(24, scratch_dir=tmp_path)
    buffer = TensorDictReplayBuffer(storage=rows, writer=RoundRobinWriter())
    with pytest.raises(RuntimeError, match="EpisodeWriter"):
        buffer.extend(transitions(torch.zeros(2).long(), torch.arange(2)))
    buffer.storage.close()
    check(make(tmp_path))


SPACES = Box(-1, 1, (3,)), Discrete(2)


@pytest.mark.parametrize(
    "kind", [UniformReplayStorage, PrioritizedReplayStorage, NStepReplayStorage]
)
def test_ready_made_storages_go_on(tmp_path, kind):
    def build():
        return kind(*SPACES, storage_size=50, batch_size=8, path=tmp_path / "rows", seed=0)

    storage = build()
    for step in range(70):
        seen = np.full(3, step + 10 * (step // 9), np.float32)
        storage.record(seen, 1, step / 2, step % 9 == 8, False, {}, seen + 1)
    storage.close()
    again = build()
    assert len(again) == 50
    again.validate()
    assert_same(
        storage.sample().exclude("priority_stamp"), again.sample().exclude("priority_stamp")
    )
    again.record(seen + 1, 1, 0.0, True, False, {}, seen + 2)
    assert again[-1:]["observation"][0, 0] == seen[0] + 1
    assert again.episodes.episodes()["length"][-1] == 70 % 9 + 1
    with pytest.raises(TypeError, match="path="):
        kind.open(tmp_path / "rows")


def test_an_index_of_many_rows_is_rebuilt_at_once(tmp_path):
    size = 1_000_000
    storage = ReplayStorage(storage=PackedStorage(size, scratch_dir=tmp_path), batch_size=8)
    steps = torch.arange(size + 5)
    storage.extend(
        TensorDict({"step": steps, "next": {"done": (steps % 50 == 49)[:, None]}}, [size + 5])
    )
    storage.storage.journal.close()
    begin = time.process_time()
    again = PackedStorage(size, scratch_dir=tmp_path)
    # Far below what a loop over rows would take; the benchmark has the figure.
    assert time.process_time() - begin < 5
    assert len(again) == size
    assert torch.equal(again.episodes.cursors, storage.episodes.cursors)
    slots = torch.randint(size, (1000,), generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(
        again.episodes.extent(slots), storage.episodes.extent(slots), strict=True
    ):
        assert torch.equal(ours, theirs)


class TestReaders:
    def test_follow_the_writer(self, tmp_path):
        storage = make(tmp_path, 4)
        write(storage, 1)
        reader = ReplayStorage.open(tmp_path, mode="r", sampler=UniformSampler(), batch_size=64)
        for size in (2, 9, 4, 1):
            write(storage, size)
            batch = reader.sample()
            assert not is_torn(batch).any()
            check(reader)
            assert torch.equal(reader.episodes.cursors, storage.episodes.cursors)
            assert_same(reader.episodes.episodes(), storage.episodes.episodes())
        storage.empty()
        with pytest.raises(RuntimeError, match="empty"):
            reader.sample()
        write(storage, 1)
        assert len(reader.sample()) == 64

    def test_draw_again_what_was_overwritten_meanwhile(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 24)
        calls = []

        def overtake(batch):
            calls.append(1)
            if len(calls) == 1:
                write(storage, 24)  # every row that was just read
            return batch

        reader = ReplayStorage.open(
            tmp_path, mode="r", transform=overtake, batch_size=32, sampler=UniformSampler()
        )
        batch = reader.sample()
        assert len(calls) == 2
        assert (batch["observation"][:, 0] >= 24).all()

    def test_fetch_every(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 2)
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=4, fetch_every=3)
        sizes = []
        for _ in range(6):
            reader.sample()
            sizes.append(len(reader))
            write(storage, 1)
        assert sizes == [2, 2, 2, 5, 5, 5]

    def test_take_over_priorities(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 30)
        reader = ReplayStorage.open(tmp_path, mode="r", sampler=PERSampler(24), batch_size=16)
        batch = reader.sample()
        batch["td_error"] = priority_of(batch["index"], storage)
        storage.update_tensordict_priority(batch)
        expected = storage.sampler.priorities
        reader.sample()
        assert torch.equal(reader.sampler.priorities, expected)
        with pytest.raises(RuntimeError, match="reading"):
            reader.update_tensordict_priority(batch)
        # A row that was overwritten since it was drawn keeps its new priority.
        batch = reader.sample()
        write(storage, 24)
        batch["td_error"] = torch.full((16,), 50.0)
        storage.update_tensordict_priority(batch)
        assert (storage.sampler.priorities < 50).all()

    def test_begin_phases_when_rows_come(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 24)
        sampler = ERESampler(0.9, 2, updates_per_phase=3)
        reader = ReplayStorage.open(tmp_path, mode="r", sampler=sampler, batch_size=4)
        for _ in range(5):
            reader.sample()
        assert sampler.update == 5
        write(storage, 1)
        reader.sample()
        assert sampler.update == 1

    def test_change_nothing(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 9)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=4)
        with pytest.raises(RuntimeError, match="reading"):
            write(reader, 1)
        reader.storage.rows.zero_()  # in its own memory
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        check(storage)

    def test_bad_arguments(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 9)
        with pytest.raises(ValueError, match="mode"):
            ReplayStorage.open(tmp_path, mode="w")
        with pytest.raises(ValueError, match="fetch_every"):
            ReplayStorage.open(tmp_path, mode="r", fetch_every=0)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def closed(tmp_path):
    """A directory that holds a storage which wrapped around, and nobody writes."""
    path = tmp_path / "rows"
    storage = make(path, 2)
    write(storage, 30)
    storage.close()
    return path


def refused(path, error, *words, **options):
    """Checks that opening for writing and for reading both raise, with words in the message."""
    for opened in (
        lambda: ReplayStorage.open(path, **options),
        lambda: ReplayStorage.open(path, mode="r"),
        lambda: make(path, 2),
    ):
        with pytest.raises(error) as caught:
            opened()
        for word in words:
            assert word in str(caught.value), str(caught.value)


class TestDamage:
    def test_a_second_writer(self, tmp_path):
        storage = make(tmp_path, 2)
        write(storage, 30)
        with pytest.raises(RuntimeError, match="writer already"):
            make(tmp_path, 2)
        write(storage, 1)
        check(storage)

    @pytest.mark.parametrize("name", ["rows.bin", "marks.bin", "header.bin", "storage.json"])
    def test_a_truncated_file(self, closed, name):
        whole = (closed / name).read_bytes()
        (closed / name).write_bytes(whole[:-1] if name == "storage.json" else whole[:-8])
        refused(closed, ValueError, "storage.json" if name == "storage.json" else "truncated")
        (closed / name).write_bytes(whole)
        check(make(closed, 2))

    @pytest.mark.parametrize("name", ["rows.bin", "marks.bin", "header.bin"])
    def test_a_missing_file(self, closed, name):
        (closed / name).rename(closed.parent / name)
        refused(closed, FileNotFoundError, name)
        (closed.parent / name).rename(closed / name)
        check(make(closed, 2))

    def test_a_flipped_byte_anywhere_in_the_header(self, closed):
        size, whole = (closed / "header.bin").stat().st_size, (closed / "header.bin").read_bytes()
        found = 0
        for at in range(size):
            flip(closed / "header.bin", at)
            with contextlib.suppress(ValueError):
                Journal.open(closed).close()
                found -= 1
            found += 1
            (closed / "header.bin").write_bytes(whole)
        # All but the counters of the commit before the last, which nobody reads.
        assert found == size - 8 * (5 + 3 * 2)
        check(make(closed, 2))

    def test_a_flipped_byte_in_the_description(self, closed):
        whole = (closed / "storage.json").read_bytes()
        for at in range(0, len(whole), 5):
            flip(closed / "storage.json", at)
            refused(closed, ValueError)
            (closed / "storage.json").write_bytes(whole)
        check(make(closed, 2))

    def test_a_flipped_byte_in_the_rows_is_found_on_checking(self, closed):
        flip(closed / "rows.bin", 1000)
        storage = ReplayStorage.open(closed)
        with pytest.raises(RuntimeError, match="checksum"):
            storage.validate(progress=True)
        storage.close()
        with pytest.raises(RuntimeError, match="checksum"):
            ReplayStorage.open(closed, check=True)

    def test_another_layout(self, closed):
        fields = {"observation": (torch.float32, (3,)), ("next", "done"): (torch.bool, (1,))}
        with pytest.raises(ValueError, match="fields"):
            PackedStorage(24, scratch_dir=closed, fields=fields)
        with pytest.raises(ValueError, match="fields"):
            UniformReplayStorage(*SPACES, storage_size=24, num_envs=2, path=closed)
        check(make(closed, 2))

    def test_another_size(self, closed):
        with pytest.raises(ValueError, match="24 rows, got 30"):
            make(closed, 2, size=30)
        check(make(closed, 2))

    def test_another_number_of_lanes(self, closed):
        with pytest.raises(ValueError, match="2 lanes"):
            make(closed, 3)
        check(make(closed, 2))

    def test_another_version(self, closed):
        whole = (closed / "storage.json").read_text()
        (closed / "storage.json").write_text(whole.replace('"version": 1', '"version": 7'))
        refused(closed, ValueError, "version 1", "version 7")
        (closed / "storage.json").write_text(whole)
        header = (closed / "header.bin").read_bytes()
        (closed / "header.bin").write_bytes(header[:8] + (7).to_bytes(8, "little") + header[16:])
        refused(closed, ValueError, "version 1", "version 7")
        (closed / "header.bin").write_bytes(header)
        check(make(closed, 2))

    def test_a_directory_that_is_no_storage(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere"):
            for mode in ("r", "r+"):
                with pytest.raises(FileNotFoundError, match="storage"):
                    ReplayStorage.open(path, mode=mode)
        (tmp_path / "notes.txt").write_text("mine")
        storage = make(tmp_path)
        with pytest.raises(FileExistsError, match=r"notes\.txt"):
            write(storage, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_what_is_left_of_an_interrupted_making(self, closed):
        (closed / "storage.json").rename(closed / "storage.json.new")
        storage = make(closed, 2)
        assert len(storage) == 0
        write(storage, 3)
        check(storage)

    def test_begun_anew_when_told_to(self, closed):
        storage = make(closed, 2, existsok=True)
        assert len(storage) == 0
        write(storage, 3)
        check(storage)

    def test_a_disk_that_is_read_only(self, closed, monkeypatch):
        really = os.open

        def refuse(path, flags, *mode):
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return really(path, flags, *mode)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            with pytest.raises(OSError, match="writable") as caught:
                make(closed, 2)
            assert caught.value.errno == errno.EROFS
            reader = ReplayStorage.open(closed, mode="r", batch_size=8)
            assert not is_torn(reader.sample()).any()
        check(make(closed, 2))

    def test_a_planted_pickle_never_runs(self, closed):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(closed / "exploded"),)

        bomb = pickle.dumps(Bomb())
        for name in ("state.pkl", "progress.json", "transform.t", "sampler.pt", "priorities.bin"):
            (closed / name).unlink(missing_ok=True)
            (closed / name).write_bytes(bomb)
        with pytest.raises(ValueError, match=r"progress\.json|priorities\.bin"):
            make(closed, 2)
        with pytest.raises(ValueError, match=r"progress\.json|truncated"):
            ReplayStorage.open(closed, sampler=PERSampler(24))
        (closed / "progress.json").unlink()
        (closed / "priorities.bin").unlink()
        check(make(closed, 2))
        assert not (closed / "exploded").exists()


class TestFullDisk:
    @pytest.fixture
    def no_room(self):
        """Files may not grow beyond a megabyte."""
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, old)

    def test_is_an_error_when_the_directory_is_made(self, tmp_path, no_room):
        path = tmp_path / "rows"
        with pytest.raises(OSError, match="bytes on disk") as caught:
            UniformReplayStorage(*SPACES, storage_size=100_000, path=path)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert not path.exists()
        assert len(UniformReplayStorage(*SPACES, storage_size=100, path=path)) == 0

    def test_on_a_small_disk(self, tmp_path):
        disk = tmp_path / "disk"
        disk.mkdir()
        if os.geteuid() or os.system(f"mount -t tmpfs -o size=1m none {disk} 2>/dev/null"):
            pytest.skip("needs the right to mount a small disk")
        try:
            with pytest.raises(OSError, match="bytes on disk"):
                UniformReplayStorage(*SPACES, storage_size=100_000, path=disk / "rows")
            assert shutil.disk_usage(disk).used < 1 << 16
            storage = UniformReplayStorage(*SPACES, storage_size=1000, path=disk / "rows")
            storage.close()
        finally:
            os.system(f"umount -l {disk}")

    def test_a_write_that_finds_no_room_to_be_undone_changes_nothing(self, tmp_path, no_room):
        size, path = 4000, tmp_path / "rows"
        storage = make(path, size=size, sampler=UniformSampler())
        write(storage, size)
        before = storage.storage.rows.clone()
        undo = (path / "undo.bin").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (undo, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="bytes on disk"):
            write(storage, size)
        assert torch.equal(storage.storage.rows, before)
        check(storage)
        write(storage, 1)
        storage.storage.journal.close()
        check(make(path, size=size, sampler=UniformSampler()))


def test_closed_storages_still_show_their_rows(tmp_path):
    storage = make(tmp_path)
    write(storage, 9)
    storage.close()
    storage.close()
    assert not is_torn(storage.sample()).any()
    with pytest.raises(RuntimeError, match="closed"):
        write(storage, 1)
    make(tmp_path).close(keep=False)
    assert not tmp_path.exists()


def test_in_memory_there_is_nothing_to_do():
    storage = ReplayStorage(storage=PackedStorage(8), batch_size=4)
    write(storage, 3)
    storage.flush()
    storage.close()
    write(storage, 3)
    with pytest.raises(RuntimeError, match="path="):
        storage.loader()
