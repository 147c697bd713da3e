"""Directories that are damaged, foreign, locked or without room: a clear error, and nothing lost."""

import contextlib
import errno
import gc
import os
import pickle
import resource
import shutil

import pytest
import torch
from durable.rows import check, is_torn, make, write
from gymnasium.spaces import Box, Discrete

from trl_storages import (
    PackedStorage,
    PERSampler,
    ReplayStorage,
    UniformReplayStorage,
    UniformSampler,
)
from trl_storages.rows import Journal

SPACES = Box(-1, 1, (3,)), Discrete(2)


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

    @pytest.mark.parametrize("kept", [0, 4, 8, 1000])
    def test_a_truncated_undo_file(self, closed, kept):
        """It is the writer's alone."""
        whole = (closed / "undo.bin").read_bytes()
        (closed / "undo.bin").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"undo\.bin.*truncated"):
            make(closed, 2)
        assert len(ReplayStorage.open(closed, mode="r")) == 24
        (closed / "undo.bin").unlink()
        with pytest.raises(FileNotFoundError, match=r"undo\.bin"):
            make(closed, 2)
        (closed / "undo.bin").write_bytes(whole)
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
    def disk(self, tmp_path):
        """A disk of a megabyte."""
        disk = tmp_path / "disk"
        disk.mkdir()
        if os.geteuid() or os.system(f"mount -t tmpfs -o size=1m none {disk} 2>/dev/null"):
            pytest.skip("needs the right to mount a small disk")
        yield disk
        os.system(f"umount -l {disk}")

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

    def test_on_a_small_disk(self, disk):
        with pytest.raises(OSError, match="bytes on disk"):
            UniformReplayStorage(*SPACES, storage_size=100_000, path=disk / "rows")
        assert shutil.disk_usage(disk).used < 1 << 16
        storage = UniformReplayStorage(*SPACES, storage_size=1000, path=disk / "rows")
        storage.close()

    def test_on_a_disk_that_was_filled_later(self, disk):
        """Every page is there already: a write needs none, and never meets the full disk."""
        storage = make(disk / "rows", 2, size=2000, sampler=UniformSampler())
        write(storage, 1)
        with (disk / "full").open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(1 << 20))
        assert shutil.disk_usage(disk).free == 0
        for _ in range(250):
            write(storage, 5)
        with pytest.raises(OSError, match="No space"):
            storage.close()  # which keeps more than rows
        again = make(disk / "rows", 2, size=2000, sampler=UniformSampler())
        check(again)
        assert again.episodes.num_steps_written.tolist() == [1251] * 2
        (disk / "full").unlink()
        again.close()

    def test_on_a_disk_that_can_only_be_read(self, disk):
        path = disk / "rows"
        storage = make(path, 2)
        write(storage, 30)
        storage.close()
        del storage
        gc.collect()  # its files
        assert os.system(f"mount -o remount,ro {disk}") == 0
        with pytest.raises(OSError, match="writable"):
            make(path, 2)
        with pytest.raises(OSError, match="Read-only"):
            UniformReplayStorage(*SPACES, storage_size=100, path=disk / "others")
        reader = ReplayStorage.open(path, mode="r", batch_size=8)
        assert not is_torn(reader.sample()).any()
        assert os.system(f"mount -o remount,rw {disk}") == 0
        check(make(path, 2))

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
