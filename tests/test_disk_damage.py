"""Directories that are damaged, foreign, hostile, locked or without room: an error, or the rows."""

import contextlib
import errno
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import warnings
import zlib

import pytest
import torch
from damages import FILE_DAMAGES, json_damages
from disk.acts import prioritise, write
from disk.history import History
from disk.moments import parts_of, put_back
from disk.power import check_priorities
from disk.rows import KINDS, abandon, found, make
from gymnasium.spaces import Box, Discrete
from snapshots import files_of

from trl_storages import PackedStorage, PERSampler, ReplayStorage, UniformReplayStorage

pytestmark = pytest.mark.requirement("refused-is-unchanged")

SPACES = Box(-1, 1, (3,)), Discrete(2)
SIZE, PAGE = 48, 512
#: What says clearly that a directory is not as it was written.
CLEAR = (
    ValueError,
    TypeError,
    FileNotFoundError,
    IsADirectoryError,
    MemoryError,
    OSError,
    RuntimeError,
)


@contextlib.contextmanager
def within_seconds(number=20):
    """Ends what hangs. An error should come at once; a busy machine may take its time."""

    def hung(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(number)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def written(path, *, closed=True):
    """A directory that was wrapped around, with priorities, and its history."""
    storage, history = make(path, 2, SIZE), History(2, SIZE)
    for num_steps in (20, 20, 3):
        act = write(history, num_steps)
        act.do(storage)
        history = act.after
        prioritise(history, random.Random(num_steps)).do(storage)
    storage.flush()
    history.flush()
    act = write(history, 2)
    act.do(storage)
    if closed:
        storage.close()
        act.after.flush()
    else:
        abandon(storage)
    return act.after


def flip(data, rng):
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)


def cut(data, rng):
    del data[rng.randrange(len(data)) :]


def grow(data, rng):
    data += bytes(rng.choice([1, 8, 4096]))


def page_at(data, rng):
    return rng.randrange(max(len(data) // PAGE, 1)) * PAGE


def zero_page(data, rng):
    at = page_at(data, rng)
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))


def swap_pages(data, rng):
    first, second = page_at(data, rng), page_at(data, rng)
    if len(data[first : first + PAGE]) == len(data[second : second + PAGE]):
        one, other = data[first : first + PAGE], data[second : second + PAGE]
        data[first : first + PAGE], data[second : second + PAGE] = other, one


def noise(data, rng):
    at = page_at(data, rng)
    data[at : at + PAGE] = rng.randbytes(len(data[at : at + PAGE]))


DAMAGES = (flip, flip, flip, flip, cut, grow, zero_page, swap_pages, noise)


def damage_at_random(path, history, rng, *, closed, mode):
    """Damages a part of a file, and asserts that it is refused or holds what was written."""
    parts = {"storage.json": slice(None), **parts_of(path)}
    part = rng.choice(sorted(parts))
    file = path / (part if part == "storage.json" else "storage.1.rows")
    data = bytearray(file.read_bytes())
    damaged, how = data[parts[part]], rng.choice(DAMAGES)
    how(damaged, rng)
    data[parts[part]] = damaged
    file.write_bytes(data)
    name, before = f"{how.__name__} {part}", files_of(path)
    with warnings.catch_warnings(record=True) as caught, within_seconds():
        warnings.simplefilter("always")
        try:
            storage = ReplayStorage.open(
                path, mode=mode, check=True, sampler=PERSampler(SIZE), batch_size=4
            )
            got = found(storage)
            check_priorities(storage)
        except CLEAR as error:
            said = str(error)
        else:
            said = None
            abandon(storage) if mode == "r+" else storage.close()
    if said is not None:
        assert len(said) > 20, name
        assert mode == "r+" or files_of(path) == before, name
        return
    if got != history.live:
        assert not closed, name
        assert caught, f"{name}: nobody was told"
        lanes, _ = got
        assert all(
            history.rows[lane][step] == serial
            for lane, rows in enumerate(lanes)
            for step, serial in rows
        ), name


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Directories that were closed and that were left by a killed writer."""
    return made_originals(tmp_path_factory)


def made_originals(tmp_path_factory):
    made = {}
    for closed in (True, False):
        path = tmp_path_factory.mktemp("original") / "rows"
        history = written(path, closed=closed)
        made[closed] = ({file.name: file.read_bytes() for file in path.iterdir()}, history)
    return made


def test_a_reader_keeps_the_largest_priority_of_the_rows_where_it_is_damaged(tmp_path):
    written(tmp_path / "rows")
    # The last word is the largest one.
    path, at = tmp_path / "rows" / "storage.1.rows", parts_of(tmp_path / "rows")["priorities"]
    data = bytearray(path.read_bytes())
    data[at.stop - 3] ^= 1
    path.write_bytes(data)
    sampler = PERSampler(SIZE)
    storage = ReplayStorage.open(tmp_path / "rows", mode="r", sampler=sampler, batch_size=4)
    for _ in range(3):
        storage.sample()
        check_priorities(storage)
        assert sampler.default_priority > 1


@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.search)])
@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_damages_at_random(tmp_path, tmp_path_factory, stored, seed):
    rng, originals = random.Random(seed), made_originals(tmp_path_factory)
    for _ in range(1000 if seed == 2 else 60):
        closed, mode = rng.random() < 0.6, rng.choice(["r", "r+"])
        files, history = originals[closed]
        put_back(files, tmp_path / "rows")
        damage_at_random(tmp_path / "rows", history, rng, closed=closed, mode=mode)


def refused(path, error, *words):
    """Checks that opening raises, with words in the message, and changes nothing."""
    before = files_of(path) if path.is_dir() else None
    for opened in (
        lambda: ReplayStorage.open(path),
        lambda: ReplayStorage.open(path, mode="r"),
        lambda: make(path, 2, SIZE),
    ):
        with pytest.raises(error) as caught, within_seconds():
            opened()
        for word in words:
            assert word in str(caught.value), str(caught.value)
    assert before is None or files_of(path) == before


@pytest.fixture
def closed(tmp_path, originals):
    """A directory that holds a storage which wrapped around, and nobody writes."""
    put_back(originals[True][0], tmp_path / "rows")
    return tmp_path / "rows"


@pytest.fixture
def live(originals):
    return originals[True][1].live


def say(file, words):
    """Makes a directory say this of itself, with the checksum that it must have."""
    words.pop("check", None)
    words["check"] = zlib.crc32(json.dumps(words).encode())
    file.write_text(json.dumps(words))


def opens_with_others(path, live):
    """Whether a directory opens with other rows than these, or an error says nothing of it."""
    wrong = False
    for mode in ("r", "r+"):
        with within_seconds():
            try:
                storage = ReplayStorage.open(path, mode=mode)
            except CLEAR as error:
                wrong |= "storage" not in str(error)
            else:
                wrong |= live is not None and found(storage) != live
                abandon(storage) if mode == "r+" else None
    return wrong


class TestDescription:
    def test_every_entry_that_is_wrong(self, closed, live):
        """Huge, negative, NaN, deep or endless; another type, another word, missing."""
        file = closed / "storage.json"
        whole = file.read_bytes()
        damages = {**FILE_DAMAGES, **json_damages(file)}
        unnoticed = []
        for name, damage in damages.items():
            damage(file)
            unnoticed += [name] * opens_with_others(closed, live)
            # Whoever means harm knows how to say it rightly: that is another storage, or an error.
            with contextlib.suppress(
                OSError, ValueError, AttributeError, TypeError, RecursionError
            ):
                say(file, json.loads(file.read_text()) if file.is_file() else None)
                opens_with_others(closed, None)
            for left in closed.iterdir():
                if left.name in ("elsewhere", "storage.pickle"):
                    left.unlink()
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else None
            file.unlink(missing_ok=True)
            file.write_bytes(whole)
        assert len(damages) > 60
        assert not unnoticed

    def test_every_flipped_byte(self, closed, live):
        whole = (closed / "storage.json").read_bytes()
        for at in range(0, len(whole), 3):
            data = bytearray(whole)
            data[at] ^= 1 << at % 3
            (closed / "storage.json").write_bytes(data)
            try:
                storage = ReplayStorage.open(closed, mode="r")
            except (ValueError, FileNotFoundError) as error:
                right = "storage.json" in str(error) or "rows" in str(error)
            else:
                right = found(storage) == live
            assert right, at

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", '"' + "x" * 10**6, "[" * 10**6, '{"a":' * 10**5, "1e999", "NaN"],
        ids=range(9),
    )
    def test_that_is_none(self, closed, text):
        (closed / "storage.json").write_text(text)
        refused(closed, ValueError, "storage.json")

    def test_that_is_endless(self, closed):
        with (closed / "storage.json").open("wb") as file:
            file.truncate(1 << 40)
        for mode in ("r", "r+"):
            with pytest.raises(ValueError, match=r"storage\.json.* at most"), within_seconds():
                ReplayStorage.open(closed, mode=mode)

    def test_of_format_1(self, closed):
        whole = json.loads((closed / "storage.json").read_text())
        del whole["format"]
        (closed / "storage.json").write_text(json.dumps({**whole, "version": 1}))
        refused(closed, ValueError, "format 1")

    def test_of_a_format_to_come(self, closed):
        whole = json.loads((closed / "storage.json").read_text())
        (closed / "storage.json").write_text(json.dumps({**whole, "format": 3}))
        refused(closed, ValueError, "format")

    @pytest.mark.parametrize("num_rows", [2**62, 2**40, 2**33])
    def test_of_more_rows_than_there_is_memory(self, closed, num_rows):
        """With files that claim to be as large, of which nothing is on disk."""
        whole = json.loads((closed / "storage.json").read_text())
        old = whole["num_rows"]
        say(closed / "storage.json", {**whole, "num_rows": num_rows})
        for file in closed.glob("*.rows"):
            with contextlib.suppress(OSError, OverflowError), file.open("r+b") as opened:
                opened.truncate(file.stat().st_size * (num_rows // old))
        for mode in ("r", "r+"):
            with pytest.raises(CLEAR), within_seconds():
                ReplayStorage.open(closed, mode=mode)


class TestFiles:
    NAMES = ("storage.json", "storage.1", "lock")

    def file(self, closed, name):
        return next(path for path in closed.iterdir() if path.name.startswith(name))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("what", ["link", "pipe", "device", "directory", "link to a device"])
    def test_that_are_none(self, closed, name, what, live):
        outside = closed.parent / "outside"
        file = self.file(closed, name)
        whole = file.read_bytes()
        outside.write_bytes(whole or b"untouched")
        before = outside.read_bytes()
        file.unlink()
        if what == "link":
            file.symlink_to(outside)
        elif what == "pipe":
            os.mkfifo(file)
        elif what == "device":
            try:
                os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))
            except PermissionError:
                pytest.skip("needs the right to make devices")
        elif what == "directory":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero")
        for mode in ("r", "r+"):
            with within_seconds():
                if name == "lock":
                    # Nobody reads it or writes into it.
                    with contextlib.suppress(OSError):
                        storage = ReplayStorage.open(closed, mode=mode, sampler=PERSampler(SIZE))
                        assert found(storage) == live
                        abandon(storage) if mode == "r+" else None
                else:
                    with pytest.raises(CLEAR, match=name):
                        ReplayStorage.open(closed, mode=mode, sampler=PERSampler(SIZE))
        assert outside.read_bytes() == before
        file.rmdir() if what == "directory" else file.unlink()
        file.write_bytes(whole)
        storage = make(closed, 2, SIZE)
        assert found(storage) == live
        abandon(storage)

    @pytest.mark.parametrize("what", ["link", "pipe", "directory"])
    def test_that_lie_in_the_way_of_new_ones(self, closed, what, live, originals):
        """Where a description is written before it gets its name, and where a load writes."""
        outside = closed.parent / "outside"
        outside.write_bytes(b"untouched")
        for name in ("storage.json.new", "storage.2.rows", "storage.3.rows"):
            if (closed / name).exists():
                continue
            if what == "link":
                (closed / name).symlink_to(outside)
            elif what == "pipe":
                os.mkfifo(closed / name)
            else:
                (closed / name).mkdir()
        source, history = make(None, 2, SIZE), History(2, SIZE)
        act = write(history, 3)
        act.do(source)
        with within_seconds(), contextlib.suppress(OSError):
            storage = make(closed, 2, SIZE)
            assert found(storage) == live
            storage.load_state_dict(source.state_dict())
            assert found(storage) == act.after.live
            abandon(storage)
        assert outside.read_bytes() == b"untouched"

    @pytest.mark.parametrize("change", [-8, -1, 1, 8, 4096])
    def test_of_another_size(self, closed, change):
        file = self.file(closed, "storage.1")
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size + change)
        for mode in ("r", "r+"):
            with pytest.raises(ValueError, match=r"storage\.1\.rows"):
                ReplayStorage.open(closed, mode=mode, sampler=PERSampler(SIZE))

    def test_that_are_missing(self, closed):
        self.file(closed, "storage.1").unlink()
        refused(closed, FileNotFoundError, "storage.1.rows")

    def test_rows_are_looked_at_when_asked(self, closed, live):
        flipped = self.file(closed, "storage.1")
        data, rows = bytearray(flipped.read_bytes()), parts_of(closed)["rows"]
        for at in range(rows.start, rows.stop, 8):
            data[at] ^= 1
        flipped.write_bytes(data)
        storage = ReplayStorage.open(closed)
        with pytest.raises(RuntimeError, match="checksum"):
            storage.validate()
        abandon(storage)
        for mode in ("r", "r+"):
            with pytest.raises(ValueError, match="damaged"):
                ReplayStorage.open(closed, mode=mode, check=True)

    @pytest.mark.parametrize("number", [-1, -5, 0, 2**62, -(2**63), 2**63 - 1])
    def test_a_number_of_commits_that_there_never_was(self, tmp_path, originals, number):
        files, history = originals[False]
        put_back(files, tmp_path / "rows")
        file, at = self.file(tmp_path / "rows", "storage.1"), parts_of(tmp_path / "rows")["commits"]
        data = bytearray(file.read_bytes())
        data[at.start : at.start + 8] = number.to_bytes(8, "little", signed=True)
        file.write_bytes(data)
        with pytest.raises(ValueError, match="open it for writing"):
            ReplayStorage.open(tmp_path / "rows", mode="r")
        with pytest.warns(RuntimeWarning, match="was not closed"):
            storage = make(tmp_path / "rows", 2, SIZE)
        assert found(storage) == history.live
        reader = ReplayStorage.open(tmp_path / "rows", mode="r")
        assert found(reader) == history.live
        act = write(history, 2)
        act.do(storage)
        reader.sample(4)
        assert found(reader) == found(storage) == act.after.live
        storage.close()
        assert found(make(tmp_path / "rows", 2, SIZE)) == act.after.live

    def test_a_planted_pickle_never_runs(self, closed, live):
        import pickle

        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(closed / "exploded"),)

        for name in ("state.pkl", "progress.json", "transform.t", "sampler.pt"):
            (closed / name).write_bytes(pickle.dumps(Bomb()))
        assert found(make(closed, 2, SIZE)) == live
        assert not (closed / "exploded").exists()


class TestOthers:
    """What is right, but not for whoever opens it."""

    def test_a_second_writer(self, tmp_path):
        storage, history = make(tmp_path, 2, SIZE), History(2, SIZE)
        act = write(history, 30)
        act.do(storage)
        with pytest.raises(RuntimeError, match="writer already"):
            make(tmp_path, 2, SIZE)
        assert found(storage) == act.after.live

    def test_another_layout(self, closed):
        fields = {"observation": (torch.float32, (3,)), ("next", "done"): (torch.bool, (1,))}
        with pytest.raises(ValueError, match="fields"):
            PackedStorage(SIZE, scratch_dir=closed, fields=fields)
        with pytest.raises(ValueError, match="fields"):
            UniformReplayStorage(*SPACES, storage_size=SIZE, num_envs=2, path=closed)

    def test_another_size(self, closed):
        with pytest.raises(ValueError, match=f"{SIZE} rows, got 30"):
            make(closed, 2, 30)

    def test_another_number_of_lanes(self, closed):
        with pytest.raises(ValueError, match="num_envs=2, got 3"):
            make(closed, 3, SIZE)

    def test_a_directory_that_is_no_storage(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere"):
            for mode in ("r", "r+"):
                with pytest.raises(FileNotFoundError, match="storage"):
                    ReplayStorage.open(path, mode=mode)
        (tmp_path / "notes.txt").write_text("mine")
        for existsok in (False, True):
            storage = make(tmp_path, 2, SIZE, existsok=existsok)
            with pytest.raises(FileExistsError, match=r"notes\.txt"):
                write(History(2, SIZE), 1).do(storage)
        assert [path.name for path in tmp_path.iterdir() if path.name != "lock"] == ["notes.txt"]

    def test_files_of_others_stay_when_it_is_deleted(self, closed):
        (closed / "notes.txt").write_text("mine")
        make(closed, 2, SIZE).close(keep=False)
        assert [path.name for path in closed.iterdir()] == ["notes.txt"]

    def test_a_disk_that_is_read_only(self, closed, live, monkeypatch):
        really = os.open

        def refuse(path, flags, *mode, **options):
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return really(path, flags, *mode, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            with pytest.raises(OSError, match="writable") as caught:
                make(closed, 2, SIZE)
            assert caught.value.errno == errno.EROFS
            assert found(ReplayStorage.open(closed, mode="r")) == live


class TestRoom:
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

    def test_for_a_directory_that_is_made(self, tmp_path, no_room):
        path = tmp_path / "rows"
        with pytest.raises(OSError, match="bytes on disk") as caught:
            UniformReplayStorage(*SPACES, storage_size=100_000, path=path)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert not path.exists() or not any(path.iterdir())
        assert len(UniformReplayStorage(*SPACES, storage_size=100, path=path)) == 0

    def test_on_a_small_disk(self, disk):
        with pytest.raises(OSError, match="bytes on disk"):
            UniformReplayStorage(*SPACES, storage_size=100_000, path=disk / "rows")
        assert shutil.disk_usage(disk).used < 1 << 16
        UniformReplayStorage(*SPACES, storage_size=500, path=disk / "rows").close()

    def test_on_a_disk_that_was_filled_later(self, disk):
        """Every page is there already: a write needs none, and never meets the full disk."""
        storage, history = make(disk / "rows", 2, 1000), History(2, 1000)
        act = write(history, 1)
        act.do(storage)
        with (disk / "full").open("wb") as file, contextlib.suppress(OSError):
            file.write(bytes(1 << 20))
        assert shutil.disk_usage(disk).free == 0
        for _ in range(150):
            act = write(act.after, 5)
            act.do(storage)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                storage.flush()  # which says what was flushed
        assert found(storage) == act.after.live
        abandon(storage)
        (disk / "full").unlink()
        storage = make(disk / "rows", 2, 1000)
        assert found(storage) == act.after.live
        storage.close()

    @pytest.mark.parametrize("limit", [0, 100, 3000, 1 << 15])
    def test_for_what_is_said_of_a_directory(self, tmp_path, limit):
        """Whatever can't be written, the storage goes on with what it was, and so does the next one."""
        source = make(None, 2, SIZE)
        write(History(2, SIZE), 5).do(source)
        state, now = source.state_dict(), written(tmp_path, closed=False)
        storage = make(tmp_path, 2, SIZE)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        for do in (
            lambda storage: storage.load_state_dict(state),
            lambda storage: write(_history_of(storage), 1).do(storage),
            lambda storage: storage.empty(),
            lambda storage: storage.flush(),
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            try:
                do(storage)
            except OSError:
                assert found(storage) == now.live
            else:
                now = _history_of(storage)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)
        abandon(storage)
        storage = make(tmp_path, 2, SIZE)
        assert found(storage) == now.live
        act = write(now, 4)
        act.do(storage)
        assert found(storage) == act.after.live

    def test_on_a_disk_that_can_only_be_read(self, disk):
        path = disk / "rows"
        history = written(path)
        gc.collect()  # its files
        assert os.system(f"mount -o remount,ro {disk}") == 0
        with pytest.raises(OSError, match="writable"):
            make(path, 2, SIZE)
        with pytest.raises(OSError, match="Read-only"):
            UniformReplayStorage(*SPACES, storage_size=100, path=disk / "others")
        assert found(ReplayStorage.open(path, mode="r")) == history.live
        assert os.system(f"mount -o remount,rw {disk}") == 0
        assert found(make(path, 2, SIZE)) == history.live

    @pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory it has")
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_little_memory(self, closed):
        """Where the files can't be mapped, an error says so."""
        pid = os.fork()
        if not pid:
            status = 1
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)  # whatever it waits for
            try:
                with open("/proc/self/statm") as file:
                    used = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + 4096, used + 4096))
                for mode in ("r", "r+"):
                    with contextlib.suppress(MemoryError, OSError, RuntimeError):
                        ReplayStorage.open(closed, mode=mode)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0


def _history_of(storage):
    """The history that a storage has, by what it holds."""
    lanes, cursors = found(storage)
    history = History(len(cursors), SIZE)
    history.cursors, history.rows = list(cursors), [dict(rows) for rows in lanes]
    history.tails = [cursor - len(rows) for cursor, rows in zip(cursors, lanes, strict=True)]
    return history
