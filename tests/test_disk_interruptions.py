"""Writes to a directory that fail or are interrupted halfway while their process lives on."""

import random
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
from disk.acts import Act, keep, load, prioritise, write
from disk.history import History
from disk.moments import Moments, files_in, parts_of, put_back
from disk.platter import Platter
from disk.power import opens_after_cut, syncs_seen
from disk.recorded import Recorded
from disk.rows import KINDS, abandon, found, is_torn, make
from interrupter import Interrupter

import trl_storages
from trl_storages import ReplayStorage, UniformSampler
from trl_storages.disk import Directory
from trl_storages.disk.words import Words
from trl_storages.writing import writer

# Where a `with` block is left, tracing raises an error before its `__exit__`, as no signal does; CPython
# closes the file then.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SIZE = 12
ACTS = {
    "write": lambda history: write(history, 3),
    "write some lanes": lambda history: write(history, 2, [1]),
    "write many": lambda history: write(history, 15),
    "keep": lambda history: keep(history, 4),
    "empty": lambda history: keep(history, 0),
    "load": lambda history: load(history, 4),
    "prioritise": lambda history: prioritise(history, random.Random(0)),
    "flush": lambda history: Act("flush", lambda storage: storage.flush(), history, history),
}


@pytest.mark.parametrize(
    ("error", "stored"),
    [(KeyboardInterrupt, "shared"), (MemoryError, "plain")],
    indirect=["stored"],
)
@pytest.mark.parametrize("name", ACTS)
def test_interrupted_at_any_line_and_going_on(tmp_path, name, error, stored):
    """Some of the lines, which differ from act to act; `test_interrupted_at_every_line` has all."""
    interrupted(
        tmp_path,
        name,
        error,
        stride=503 if name == "load" else 53,
        first=1 + 7 * list(ACTS).index(name),
    )


@pytest.mark.search
@pytest.mark.parametrize("stored", KINDS, indirect=True)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", ACTS)
def test_interrupted_at_every_line(tmp_path, name, error, stored):
    interrupted(tmp_path, name, error, stride=1, first=1)


def interrupted(folder, name, error, stride, first):
    storage, history = make(folder / "rows", 2, SIZE), History(2, SIZE)
    for num_steps in (9, 8):
        act = write(history, num_steps)
        act.do(storage)
        history = act.after
    storage.flush()
    history.flush()
    line = first - stride
    while True:
        line += stride
        act = ACTS[name](history)
        interrupter = Interrupter(line, trl_storages, error=error)
        with suppress(error), interrupter:
            act.do(storage)
        got = found(storage)
        assert got in (act.before.live, act.after.live), (line, got, act.before.live)
        before_it = act.after if got == act.after.live else act.before
        # The next write and the next process find all as it should be.
        act = write(before_it, 1)
        act.do(storage)
        assert found(storage) == act.after.live, line
        history = act.after
        if line // stride % 5 == 0:
            abandon(storage)
            storage = make(folder / "rows", 2, SIZE)
            assert found(storage) == history.live, line
        if interrupter.left > 0:
            break
    assert line > first


@pytest.mark.parametrize("stored", KINDS, indirect=True)
@pytest.mark.parametrize("name", ["write", "write some lanes", "write many"])
def test_an_error_that_comes_again(tmp_path, name, stored):
    """As of a process that has no memory left: some of the lines."""
    failing_again(tmp_path, name, stride=29, first=1 + 7 * list(ACTS).index(name))


@pytest.mark.search
@pytest.mark.parametrize("stored", KINDS, indirect=True)
@pytest.mark.parametrize("name", ["write", "write some lanes", "write many"])
def test_an_error_that_comes_again_at_every_line(tmp_path, name, stored):
    failing_again(tmp_path, name, stride=1, first=1)


@contextmanager
def again_and_again(interrupter):
    """Raises an error also where a write is done once more, and where it is undone."""
    with (
        mock.patch.object(writer, "complete", interrupter.resumed_by(writer.complete)),
        mock.patch.object(Words, "feed", interrupter.resumed_by(Words.feed)),
        interrupter,
    ):
        yield


def failing_again(folder, name, stride, first):
    storage, history = make(folder / "rows", 2, SIZE), History(2, SIZE)
    for num_steps in (9, 8):
        act = write(history, num_steps)
        act.do(storage)
        history = act.after
    line, num_undone = first - stride, 0
    while True:
        line += stride
        act = ACTS[name](history)
        interrupter = Interrupter(line, trl_storages, error=MemoryError, lasts=True)
        with suppress(MemoryError), again_and_again(interrupter):
            act.do(storage)
        got = found(storage)
        assert act.may_leave(got), (line, got, act.before.live)
        num_undone += got != act.after.live
        reader = ReplayStorage.open(folder / "rows", mode="r", sampler=UniformSampler())
        assert found(reader) == got, line
        # Without memory to go back it reads on.
        if line // stride % 5 == 0 or not storage.storage.directory.is_writer:
            abandon(storage)
            storage = make(folder / "rows", 2, SIZE)
            assert found(storage) == got, line
        history = act.before.copy()
        history.adopt(got)
        act = write(history, 1)
        act.do(storage)
        assert found(storage) == act.after.live, line
        history = act.after
        if interrupter.left > 0:
            break
    assert num_undone > 0


def flushed(path):
    """A directory of five rows that are flushed, and its history."""
    storage, history = make(path, 1, SIZE), History(1, SIZE)
    act = write(history, 5)
    act.do(storage)
    storage.flush()
    act.after.flush()
    return storage, act.after


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.search)])
@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_a_write_that_was_undone_leaves_no_row_for_the_next_cut(tmp_path, stored, lasts, every):
    """Whatever a failed write has stored is not taken for what was written in its place."""
    path, rng = tmp_path / "rows", random.Random(0)
    storage, history = flushed(path)
    first, stride = (1, 9) if stored == "plain" else (5, 23)
    for line in range(first, 400, stride * every):
        platter, go_back = Platter(path, 512), Directory.go_back
        platter.sync_all()

        def seen(*args, platter=platter, go_back=go_back):
            # Whatever it has stored may be on disk by now.
            platter.sync_all()
            go_back(*args)

        failing = write(history, 4)
        interrupter = Interrupter(line, trl_storages, error=MemoryError, lasts=lasts)
        with syncs_seen(platter), mock.patch.object(Directory, "go_back", seen):
            with suppress(MemoryError), again_and_again(interrupter):
                failing.do(storage)
            if not storage.storage.directory.is_writer:
                platter.sync_all()
                storage = make(path, 1, SIZE)
            if found(storage) == failing.after.live:
                history = failing.after
            else:
                further = write(history, 1)
                further.do(storage)
                history = further.after
                platter.look()
                for cut in (platter.after_cut(rng), *old_parts(platter, path)):
                    opens_after_cut(cut, tmp_path / "cut", history, SIZE)
        platter.close()


def fails_to_commit(directory, index, blocks, *_):
    for block in blocks:
        directory.words.marked.seal(index.ring, block.num_steps, block.lanes)
    raise MemoryError


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_a_write_that_fails_before_it_commits_leaves_no_row_for_the_next_cut(
    tmp_path, stored, num_steps
):
    path, go_back = tmp_path / "rows", Directory.go_back
    storage, history = flushed(path)
    platter = Platter(path, 512)

    def seen(*args):
        platter.sync_all()
        go_back(*args)

    with syncs_seen(platter):
        with (
            mock.patch.object(Directory, "go_back", seen),
            mock.patch.object(Directory, "seal", fails_to_commit),
            pytest.raises(MemoryError),
        ):
            write(history, num_steps).do(storage)
        assert found(storage) == history.live
    goes_on_through_cuts(storage, history, platter, path)


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_a_write_that_was_killed_leaves_no_row_for_the_next_cut(tmp_path, stored, num_steps):
    path = tmp_path / "rows"
    storage, history = flushed(path)
    before = files_in(path)
    write(history, num_steps).do(storage)
    abandon(storage)
    # Its rows and marks are there, but it was killed before it committed them.
    after, commits = files_in(path), parts_of(path)["commits"]
    data = bytearray(after["storage.1.rows"])
    data[commits] = before["storage.1.rows"][commits]
    put_back({**after, "storage.1.rows": bytes(data)}, path)
    platter = Platter(path, 512)
    platter.sync_all()
    with syncs_seen(platter):
        storage = make(path, 1, SIZE)
        assert found(storage) == history.live
    goes_on_through_cuts(storage, history, platter, path)


def goes_on_through_cuts(storage, history, platter, path):
    """Writes one row more, and opens what power cuts leave of the directory."""
    rng, further = random.Random(0), write(history, 1)
    with syncs_seen(platter):
        further.do(storage)
    platter.look()
    for cut in (*old_parts(platter, path), *(platter.after_cut(rng) for _ in range(9))):
        opens_after_cut(cut, path.with_name("cut"), further.after, SIZE)
    platter.close()


def old_parts(platter, path):
    """Cuts that leave what was written last, but of a part of the file what was synced last."""
    parts = parts_of(path)
    parts["rows and marks"] = slice(parts["rows"].start, parts["marks"].stop)
    return [platter.as_old_as_can_be("storage.1.rows", part) for part in parts.values()]


def test_killed_while_a_step_is_recorded(tmp_path):
    loop = Recorded(tmp_path / "rows")
    for step in range(13):
        loop.record(step, [step % 4 == 3, False])
        before = loop.rows()
    with Moments(tmp_path / "rows") as moments:
        loop.record(13, [False, True])
    after = loop.rows()
    assert before != after
    abandon(loop.storage)
    seen = []
    for files in moments.all:
        put_back(files, tmp_path / "killed")
        again = Recorded(tmp_path / "killed")
        seen.append(again.rows())
        assert seen[-1] in (before, after)
        again.record(14, [False, False])
        abandon(again.storage)
    assert before in seen
    assert after in seen


class TestReaders:
    """What a reader must not take for rows."""

    def test_a_write_that_failed_in_between(self, tmp_path):
        storage, history = make(tmp_path, 1, SIZE), History(1, SIZE)
        act = write(history, SIZE)
        act.do(storage)
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=16, sampler=UniformSampler())
        line = 1
        while True:
            line += 17
            interrupter = Interrupter(line, trl_storages, error=MemoryError)
            failing = write(act.after, 3)
            with suppress(MemoryError), interrupter:
                failing.do(storage)
            if found(storage) == failing.after.live:
                act = failing
            assert not is_torn(reader.sample()).any()
            assert found(reader) == act.after.live
            if interrupter.left > 0:
                break

    def test_an_error_that_comes_of_rows_that_are_gone(self, tmp_path):
        storage, history = make(tmp_path, 1, SIZE), History(1, SIZE)
        act = write(history, SIZE)
        act.do(storage)
        calls = []

        def fails_at_first(batch):
            nonlocal act
            calls.append(1)
            if len(calls) == 1:
                for _ in range(4):
                    act = write(act.after, SIZE)
                    act.do(storage)
                raise IndexError("an action that there is not")
            return batch

        reader = ReplayStorage.open(
            tmp_path, mode="r", transform=fails_at_first, batch_size=8, sampler=UniformSampler()
        )
        assert not is_torn(reader.sample()).any()
        assert len(calls) == 2

    def test_an_error_of_ones_own(self, tmp_path):
        def fails(batch):
            raise IndexError("always")

        storage = make(tmp_path, 1, SIZE)
        write(History(1, SIZE), SIZE).do(storage)
        reader = ReplayStorage.open(
            tmp_path, mode="r", transform=fails, batch_size=8, sampler=UniformSampler()
        )
        with pytest.raises(IndexError, match="always"):
            reader.sample()


@pytest.mark.parametrize("stored", KINDS, indirect=True)
@pytest.mark.parametrize("exits", [True, False])
def test_a_signal_handler_that_closes_in_the_middle_of_a_write(tmp_path, stored, exits):
    """Such as one of SIGTERM. Some of the steps begin or end episodes."""
    storage, act = make(tmp_path, 2, SIZE), write(History(2, SIZE), 1)
    act.do(storage)
    storage.sample()
    history, seal = act.after, Directory.seal

    def handled(self, *args):
        storage.close()
        if exits:
            raise SystemExit
        seal(self, *args)

    for _ in range(20):
        act = write(history, 1)
        with (
            mock.patch.object(Directory, "seal", handled),
            pytest.raises(SystemExit if exits else RuntimeError),
        ):
            act.do(storage)
        assert found(storage) == history.live
        storage = make(tmp_path, 2, SIZE)
        assert found(storage) == history.live
        act.do(storage)
        history = act.after
    storage.close()


def test_a_closed_storage_stays_as_it_was(tmp_path):
    storage, history = make(tmp_path, 1, SIZE), History(1, SIZE)
    act = write(history, 30)
    act.do(storage)
    state = storage.state_dict()
    storage.close()
    storage.close()
    for change in (
        storage.empty,
        lambda: storage.empty(keep_steps=3),
        storage.end_episodes,
        lambda: write(act.after, 1).do(storage),
        lambda: storage.load_state_dict(state),
        lambda: storage.close(keep=False),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            change()
        assert found(storage) == act.after.live
        assert not is_torn(storage.sample()).any()
    storage = make(tmp_path, 1, SIZE)
    assert found(storage) == act.after.live
