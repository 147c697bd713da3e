"""Readers of a directory beside its writer, whatever happens to that."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import threading
import time
from unittest import mock

import pytest
import torch
from disk import acts
from disk.following import EVENTS, PATIENCE, follow
from disk.history import History
from disk.moments import parts_of
from disk.rows import KINDS, abandon, found, is_torn, make, with_frames
from tensordict import TensorDict

from trl_storages import (
    EpisodeWriter,
    GoalRelabel,
    PackedStorage,
    PERSampler,
    ReplayStorage,
    UniformSampler,
)
from trl_storages.disk import Directory, Reader
from trl_storages.saved.files import NewState

pytestmark = [
    pytest.mark.requirement("disk-workers"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

FORK = {"multiprocessing_context": "fork"}


def filled(path, num_lanes=1, size=24, num_steps=None, **options):
    """A storage that is full, and its history."""
    storage, history = make(path, num_lanes, size, **options), History(num_lanes, size)
    write(storage, history, size // num_lanes if num_steps is None else num_steps)
    return storage, history


def write(storage, history, num_steps):
    lanes = list(range(history.num_lanes))
    block = with_frames(history.block(num_steps, lanes), storage)
    storage.extend(block if history.num_lanes > 1 else block[0])
    history.write(block, lanes)


def reader_of(path, **options):
    options = {"sampler": UniformSampler(), "batch_size": 32, **options}
    return ReplayStorage.open(path, mode="r", **options)


class InAFork:
    """A process forked from this one, that does something and says what came of it."""

    def __init__(self, body):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            # Whoever waits for it hears by its end that it hangs.
            signal.alarm(120)
            said = "failed"
            try:
                said = str(body())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                with contextlib.suppress(OSError):
                    os.write(writing, said.encode())
                os._exit(0)
        os.close(writing)
        self._pipe = os.fdopen(reading)

    def forget(self):
        self._pipe.close()
        os.waitpid(self.pid, 0)

    def said(self):
        with self._pipe as pipe:
            said = pipe.read()
        os.waitpid(self.pid, 0)
        return said


def check_seen(seen, rows):
    for one in seen:
        assert not one.failed, seen
        assert one.torn == 0, seen
        assert one.rows >= rows, seen
        assert one.longest < 1000 * PATIENCE, seen


@pytest.mark.parametrize("stored", ["shared", "frames"], indirect=True)
def test_beside_a_writer_to_which_everything_happens(tmp_path, stored):
    seen, written = follow(tmp_path / "rows", rows=10_000, events=EVENTS)
    check_seen(seen, 10_000)
    assert all(one.while_stopped for one in seen), seen
    assert written > 1000
    # They followed the last writer.
    assert min(one.newest for one in seen) > 10**9, seen


@pytest.mark.search
@pytest.mark.parametrize("stored", KINDS, indirect=True)
@pytest.mark.parametrize("events", [(), *((event,) for event in EVENTS), EVENTS])
def test_a_million_rows(tmp_path, stored, events):
    seen, _ = follow(tmp_path / "rows", rows=1_000_000, events=events, num_readers=3, seed=1)
    check_seen(seen, 1_000_000)


class TestFollowing:
    def test_counts_of_a_reader_that_has_not_drawn(self, tmp_path):
        storage, history = filled(tmp_path, num_steps=1)
        reader = reader_of(tmp_path)
        for size in (2, 9, 30):
            write(storage, history, size)
            assert reader.can_sample(4)
            counts = (
                [len(it) for it in (reader, storage)],
                [it.write_count for it in (reader, storage)],
            )
            assert [len({*pair}) for pair in counts] == [1, 1], counts
            assert reader.is_full == storage.is_full
        assert reader.is_full

    def test_lanes_of_which_it_knew_more_and_less(self, tmp_path):
        """All lanes are as far now, and the oldest row of one follows the newest that was known."""
        storage, history = filled(tmp_path, 2, num_steps=3)
        lanes = ([0], [1], [0, 1])
        for chosen, num_steps, at in zip(lanes, (2, 2, 12), (0, 1, 2), strict=True):
            if at == 1:
                reader = reader_of(tmp_path)
            block = with_frames(history.block(num_steps, chosen), storage, chosen)
            storage.writer.extend(block, lanes=torch.tensor(chosen))
            history.write(block, chosen)
        assert not is_torn(reader.sample()).any()
        assert found(reader) == history.live

    @pytest.mark.parametrize("stored", KINDS, indirect=True)
    def test_rows_that_are_replaced_while_they_are_read(self, tmp_path, stored):
        storage, history = filled(tmp_path)
        calls = []

        def overtake(batch):
            calls.append(1)
            if len(calls) == 1:
                for _ in range(3):  # more than the spare steps
                    write(storage, history, 20)
            return batch

        reader = reader_of(tmp_path, transform=overtake)
        batch = reader.sample()
        assert len(calls) == 2
        assert (batch["observation"][:, 0] >= 60).all()

    @pytest.mark.parametrize("end", [ReplayStorage.close, abandon])
    @pytest.mark.parametrize("stored", KINDS, indirect=True)
    def test_what_the_next_writer_reuses_of_evicted_rows(self, tmp_path, stored, end):
        """The rows that the reader knows are still in their slots, not all their next values."""
        storage, history = filled(tmp_path)
        reader = reader_of(tmp_path, fetch_every=1000)
        assert not is_torn(reader.sample()).any()
        # As many as are spare at most: no slot of a row that it knows is written again.
        write(storage, history, 16)
        end(storage)
        write(make(tmp_path), history, 8)
        for _ in range(20):
            assert not is_torn(reader.sample()).any()

    def test_the_first_try_may_take_as_long_as_it_does(self, tmp_path, monkeypatch):
        """As where loops are compiled for it: what it loses to the writer is drawn anew."""
        monkeypatch.setattr("trl_storages.disk.reader._PATIENCE", 0.0)
        storage, history = filled(tmp_path)
        calls = []

        def overtake(batch):
            calls.append(1)
            if len(calls) == 1:
                for _ in range(3):
                    write(storage, history, 20)
            return batch

        assert not is_torn(reader_of(tmp_path, transform=overtake).sample()).any()
        assert len(calls) == 2

    @pytest.mark.parametrize("stored", KINDS, indirect=True)
    def test_rows_that_are_replaced_while_they_are_saved(self, tmp_path, stored, monkeypatch):
        storage, history = filled(tmp_path / "rows")
        reader, dump, times = reader_of(tmp_path / "rows"), tmp_path / "dump", [1]

        saves = NewState.write

        def overtaken(*args, **kwargs):
            saves(*args, **kwargs)
            if times[0]:
                times[0] -= 1
                for _ in range(3):  # more than the spare steps
                    write(storage, history, 20)

        monkeypatch.setattr(NewState, "write", overtaken)
        reader.dumps(dump)
        copied = make(None, with_priorities=False)
        copied.loads(dump)
        assert not times[0]
        assert found(copied) == history.live
        monkeypatch.setattr("trl_storages.disk.reader._PATIENCE", 0.0)
        times[0] = 10
        before = {path.name: path.read_bytes() for path in dump.iterdir()}
        with pytest.raises(RuntimeError, match="overwritten faster"):
            reader.dumps(dump)
        assert before == {path.name: path.read_bytes() for path in dump.iterdir()}

    def test_priorities_are_saved_with_the_rows(self, tmp_path):
        storage, history = filled(tmp_path / "rows")
        reader = reader_of(tmp_path / "rows", sampler=PERSampler(24))
        reader.sample()
        write(storage, history, 5)
        newest = storage.episodes.live_slots()[-5:]
        storage.sampler.update_priority(newest, 7.0)
        reader.dumps(tmp_path / "dump")
        copied = make(None)
        copied.loads(tmp_path / "dump")
        assert found(copied) == history.live
        assert sorted(copied.sampler.priorities[copied.episodes.live_slots()])[-5:] == [7.0] * 5

    def test_writes_after_a_load_go_on_with_the_trajectories(self, tmp_path):
        def new(path=None):
            rows = PackedStorage(24, scratch_dir=path)
            return ReplayStorage(storage=rows, writer=EpisodeWriter(1), batch_size=32)

        values, no = torch.arange(5.0).unsqueeze(-1), torch.zeros(4, 1, dtype=torch.bool)
        after = {"observation": values[1:], "done": no, "terminated": no, "truncated": no}
        steps = TensorDict({"observation": values[:4], "next": after}, [4])
        steps["collector"] = TensorDict({"traj_ids": torch.full((4,), 7)}, [4])
        storage, copied = new(tmp_path / "rows"), new()
        storage.extend(steps[:2])
        reader_of(tmp_path / "rows").dumps(tmp_path / "dump")
        copied.loads(tmp_path / "dump")
        assert copied.write_count == 2
        copied.extend(steps[2:])
        assert copied.episodes.episode_id(torch.arange(4)).unique().numel() == 1

    def test_all_rows_are_replaced_before_their_priorities_are_read(self, tmp_path, monkeypatch):
        storage, history = filled(tmp_path)
        reader, times, attach = reader_of(tmp_path, sampler=PERSampler(24)), [1], PERSampler.attach
        reader.sample()

        def overtaken(sampler, rows):
            if sampler is reader.sampler and times[0]:
                times[0] -= 1
                for _ in range(4):
                    write(storage, history, 24)
            return attach(sampler, rows)

        monkeypatch.setattr(PERSampler, "attach", overtaken)
        write(storage, history, 24)
        assert not is_torn(reader.sample()).any()
        assert not times[0]

    def test_rows_that_are_replaced_while_rewards_are_compared(self, tmp_path):
        def steps(first):
            reached = torch.arange(first, first + 20.0).unsqueeze(-1)
            after = {"achieved_goal": reached, "desired_goal": reached, "reward": reached}
            done = torch.zeros(20, 1, dtype=torch.bool)
            return TensorDict({"next": {**after, "done": done}}, [20])

        rows = PackedStorage(24, scratch_dir=tmp_path)
        storage, calls = ReplayStorage(storage=rows, writer=EpisodeWriter()), []
        storage.extend(steps(0))

        def overtake(achieved, desired, transition):
            calls.append(achieved[0].item())
            if len(calls) == 1:
                for first in (20, 40, 60):
                    storage.extend(steps(first))
            return achieved

        audit = GoalRelabel(overtake).audit(ReplayStorage.open(tmp_path, mode="r"), num_rows=5)
        assert audit.passed
        assert calls == [19.0, 79.0]

    @pytest.mark.parametrize("stored", KINDS, indirect=True)
    def test_rows_that_are_replaced_within_the_spare_steps_are_whole(self, tmp_path, stored):
        storage, history = filled(tmp_path)
        calls = []

        def overtake(batch):
            calls.append(1)
            write(storage, history, 3)
            return batch

        batch = reader_of(tmp_path, transform=overtake).sample()
        assert len(calls) == 1
        assert not is_torn(batch).any()

    @pytest.mark.parametrize("stored", KINDS, indirect=True)
    @pytest.mark.parametrize("keep_steps", [None, 0])
    @pytest.mark.parametrize("num_steps", [1, 24, 25, 46, 47])
    def test_rows_that_are_given_up_before_they_are_read(
        self, tmp_path, monkeypatch, stored, keep_steps, num_steps
    ):
        """Between the reader's look at what is there and its first look at a row."""
        storage, history = filled(tmp_path)
        reader = reader_of(tmp_path)
        for _ in range(4):
            calls, gather = [], reader.storage.gather

            def overtaken(*args, calls=calls, gather=gather):
                calls.append(1)
                if len(calls) == 1:
                    if keep_steps is not None:
                        storage.empty(keep_steps=keep_steps)
                        history.keep(keep_steps)
                    write(storage, history, num_steps)
                return gather(*args)

            with monkeypatch.context() as patch:
                patch.setattr(reader.storage, "gather", overtaken)
                batch = reader[-2:]
            assert calls
            assert not is_torn(batch).any()
            assert found(reader) == history.live

    @pytest.mark.parametrize("stored", ["shared"], indirect=True)
    def test_rows_that_count_from_the_moment_when_it_is_looked_at(
        self, tmp_path, monkeypatch, stored
    ):
        storage, history = filled(tmp_path, num_lanes=4, num_steps=5)
        reader = reader_of(tmp_path)
        table, calls = reader.storage.table, []
        kind = type(table)
        # Where compiled loops find the cursors, and tensor operations.
        name = "_tables" if hasattr(kind, "_tables") else "_cursors"
        cursors = getattr(kind, name).fget

        def overtaken(own):
            if own is table and not calls:
                calls.append(1)
                write(storage, history, 1)
            return cursors(own)

        monkeypatch.setattr(kind, name, property(overtaken))
        assert not is_torn(reader[:]).any()
        assert calls

    @pytest.mark.parametrize("stored", ["shared"], indirect=True)
    def test_entries_are_not_lost_by_writers_that_begin_with_nothing(self, tmp_path, stored):
        storage, history = filled(tmp_path)
        for _ in range(6):
            storage.empty()
            history.keep(0)
            abandon(storage)
            storage = make(tmp_path)
            write(storage, history, 1)
            for _ in range(4):
                write(storage, history, 20)
            side = storage.storage._side
            rows = storage.storage
            headers = rows.layout.framed.sharing.headers(rows.rows)
            assert side.num_used - 3 == int((headers >> 3 > 0).sum())

    def test_rows_that_are_emptied_while_they_are_read(self, tmp_path):
        storage, history = filled(tmp_path)
        calls = []

        def overtake(batch):
            calls.append(1)
            if len(calls) == 1:
                storage.empty()
                history.keep(0)
                write(storage, history, 4)
            return batch

        batch = reader_of(tmp_path, transform=overtake).sample()
        assert not is_torn(batch).any()
        assert len(calls) <= 2

    def test_a_load(self, tmp_path):
        storage, _ = filled(tmp_path / "rows")
        source, history = filled(None, num_steps=7)
        reader = reader_of(tmp_path / "rows")
        reader.sample()
        for _ in range(3):
            # Loads that follow one another at once.
            storage.load_state_dict(source.state_dict())
            assert not is_torn(reader.sample()).any()
            assert found(reader) == history.live

    def test_many_loads_and_changes_between_two_looks(self, tmp_path):
        """The kernel gives the numbers of files that are gone to new ones."""
        storage, _ = filled(tmp_path / "rows")
        reader = reader_of(tmp_path / "rows")
        for _ in range(30):
            source, history = filled(None, num_steps=7)
            state = source.state_dict()
            storage.load_state_dict(state)
            storage.load_state_dict(state)
            assert found_after_a_draw(reader) == history.live

    def test_a_writer_that_was_killed_and_replaced(self, tmp_path):
        storage, history = filled(tmp_path)
        reader = reader_of(tmp_path)
        for _ in range(3):
            abandon(storage)
            assert found_after_a_draw(reader) == history.live
            storage = make(tmp_path)
            assert found_after_a_draw(reader) == history.live
            write(storage, history, 5)
            assert found_after_a_draw(reader) == history.live

    @pytest.mark.parametrize(
        "read",
        [
            ReplayStorage.sample,
            len,
            ReplayStorage.can_sample,
            lambda reader: reader.is_full,
            lambda reader: reader.write_count,
            lambda reader: reader[:],
            ReplayStorage.validate,
        ],
    )
    def test_a_directory_that_was_deleted_or_made_anew(self, tmp_path, read):
        path = tmp_path / "rows"
        storage, _ = filled(path)
        reader = reader_of(path)
        read(reader)
        storage.close(keep=False)
        with pytest.raises(RuntimeError, match="deleted"):
            read(reader)
        storage, history = filled(path)
        with pytest.raises(RuntimeError, match="anew"):
            read(reader)
        assert "ReplayStorage" in repr(reader)
        assert found(reader_of(path)) == history.live
        again = reader_of(path)
        abandon(storage)
        make(path, existsok=True)
        filled(path, existsok=True)
        with pytest.raises(RuntimeError, match="anew"):
            read(again)

    def test_files_in_whose_place_a_copy_was_put(self, tmp_path):
        path = tmp_path / "rows"
        storage, history = filled(path, num_steps=5)
        storage.close()
        shutil.copytree(path, tmp_path / "backup")
        reader = reader_of(path)
        reader.sample()
        for file in [*(tmp_path / "backup").iterdir()]:  # as rsync does
            shutil.copy2(file, tmp_path / "new")
            (tmp_path / "new").replace(path / file.name)
        storage = make(path)
        write(storage, history, 3)
        reader.sample()
        assert found(reader) == history.live

    def test_a_load_that_it_did_not_get_to_index(self, tmp_path):
        storage, history = filled(tmp_path / "rows", num_steps=5)
        storage.dumps(tmp_path / "dump")
        kept = history.copy()
        write(storage, history, 5)
        reader = reader_of(tmp_path / "rows")
        storage.loads(tmp_path / "dump")
        write(storage, kept, 7)

        def refresh(self, *_):
            self._look()
            raise RuntimeError("overwritten faster than indexed")

        with (
            mock.patch.object(Reader, "refresh", refresh),
            pytest.raises(RuntimeError, match="faster"),
        ):
            reader.sample()
        assert found(reader) == kept.live

    @pytest.mark.parametrize("way", ["opened", "unpickled"])
    def test_rows_that_a_loss_of_power_tore(self, tmp_path, way):
        """They are verified where no writer has done so yet."""
        storage, _ = filled(tmp_path, num_steps=8)
        pickled = pickle.dumps(reader_of(tmp_path))
        storage.storage.rows[7] = 0
        abandon(storage)
        tries = []

        def track(loop):
            for each in loop:
                tries.append(each)
                open_reader()
                yield each

        def open_reader():
            with pytest.raises(ValueError, match="not closed before the power failed"):
                reader_of(tmp_path) if way == "opened" else pickle.loads(pickled)

        open_reader()
        with pytest.warns(RuntimeWarning, match="loss of power"):
            directory, index = Directory.open(tmp_path, track=track)
        assert tries
        assert len(reader_of(tmp_path)) == 7
        directory.close(index)

    def test_rows_that_the_next_writer_could_not_recover(self, tmp_path):
        """A reader may have indexed them, so it must not go on with the rows in their place."""
        storage, history = filled(tmp_path, num_steps=9)
        abandon(storage)
        file, marks = tmp_path / "storage.1.rows", parts_of(tmp_path)["marks"]
        data = bytearray(file.read_bytes())
        data[marks.start + 8 * 16 : marks.stop] = bytes(marks.stop - marks.start - 8 * 16)
        reader = reader_of(tmp_path)
        file.write_bytes(data)
        with pytest.warns(RuntimeWarning, match="loss of power"):
            storage = make(tmp_path)
        history.cursors = [8]
        write(storage, history, 1)
        with pytest.raises(RuntimeError, match="lost rows with the power: open it again"):
            reader.sample()
        assert found(reader_of(tmp_path)) == found(storage)


def test_an_error_that_comes_of_rows_that_are_gone(tmp_path):
    storage, history = make(tmp_path, 1, 12), History(1, 12)
    act = acts.write(history, 12)
    act.do(storage)
    calls = []

    def fails_at_first(batch):
        nonlocal act
        calls.append(1)
        if len(calls) == 1:
            for _ in range(4):
                act = acts.write(act.after, 12)
                act.do(storage)
            raise IndexError("an action that there is not")
        return batch

    reader = ReplayStorage.open(
        tmp_path, mode="r", transform=fails_at_first, batch_size=8, sampler=UniformSampler()
    )
    assert not is_torn(reader.sample()).any()
    assert len(calls) == 2


def test_an_error_of_ones_own(tmp_path):
    def fails(batch):
        raise IndexError("always")

    storage = make(tmp_path, 1, 12)
    acts.write(History(1, 12), 12).do(storage)
    reader = ReplayStorage.open(
        tmp_path, mode="r", transform=fails, batch_size=8, sampler=UniformSampler()
    )
    with pytest.raises(IndexError, match="always"):
        reader.sample()


def found_after_a_draw(reader):
    assert not is_torn(reader.sample()).any()
    return found(reader)


class TestForked:
    """A process that was forked from the writer is a reader."""

    def test_follows_and_may_not_write(self, tmp_path):
        storage, history = filled(tmp_path)
        asked, answer = os.pipe()
        back, done = os.pipe()

        def child():
            assert not is_torn(storage.sample()).any()
            for change in (
                lambda: write(storage, History(1, 24), 1),
                storage.empty,
                storage.end_episodes,
                lambda: storage.close(keep=False),
            ):
                with pytest.raises(RuntimeError, match="fork"):
                    change()
            os.write(done, b"1")
            os.read(asked, 1)
            batch = storage.sample()
            assert not is_torn(batch).any()
            got = found(storage)
            storage.flush()
            storage.close()
            return got

        process = InAFork(child)
        os.read(back, 1)
        for _ in range(9):
            write(storage, history, 7)
        os.write(answer, b"1")
        assert process.said() == str(history.live)
        # The child's close() did not let another writer in.
        assert InAFork(lambda: make(tmp_path)).said().startswith("RuntimeError: ")
        write(storage, history, 2)
        assert found(storage) == history.live

    def test_outlives_a_killed_writer_which_is_replaced(self, tmp_path):
        path = tmp_path / "rows"
        asked, answer = os.pipe()
        reading, writing = os.pipe()
        began, begin = os.pipe()

        def writer():
            storage, _ = filled(path)

            def child():
                os.write(begin, b"1")
                os.read(asked, 1)
                batch = storage.sample()
                os.write(
                    writing,
                    json.dumps([int(batch["observation"][:, 0].max()), found(storage)[1]]).encode(),
                )

            if not os.fork():
                with contextlib.suppress(BaseException):
                    child()
                os._exit(0)
            time.sleep(60)

        first = InAFork(writer)
        os.read(began, 1)
        os.kill(first.pid, signal.SIGKILL)
        first.forget()
        storage, history = make(path), History(1, 24)
        history.cursors = [24]
        for _ in range(6):
            write(storage, history, 10)
        os.write(answer, b"1")
        newest, cursors = json.loads(os.read(reading, 1000))
        assert cursors == [84]
        assert 60 <= newest < 84

    def test_does_not_keep_the_directory_from_the_next_writer(self, tmp_path):
        storage, history = filled(tmp_path)
        asked, answer = os.pipe()
        child = InAFork(lambda: os.read(asked, 1))
        storage.close()
        again = make(tmp_path)
        write(again, history, 1)
        os.write(answer, b"1")
        child.said()
        assert found(again) == history.live

    def test_while_another_thread_writes(self, tmp_path):
        """The child has what is committed, not what was half done when it was born."""
        storage, history = filled(tmp_path, size=200)
        stop = threading.Event()

        def work():
            while not stop.is_set():
                write(storage, history, 3)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(10):

                def child():
                    signal.alarm(120)  # of a busy machine
                    for _ in range(5):
                        assert not is_torn(storage.sample()).any()
                    return "good"

                assert InAFork(child).said() == "good"
        finally:
            stop.set()
            thread.join()
        assert found(storage) == history.live


class TestWorkers:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_live_through_empty(self, tmp_path, num_workers):
        storage, history = filled(tmp_path, size=100)
        options = FORK if num_workers else {}
        batches = iter(storage.loader(num_workers, batch_size=16, seed=0, **options))
        assert not is_torn(next(batches)).any()
        for _ in range(2):
            storage.empty()
            history.keep(0)
            oldest = history.cursors[0]
            time.sleep(0.05)
            write(storage, history, 10)
            for _ in range(3 + 6 * num_workers):
                batch = next(batches)
                assert not is_torn(batch).any()
            assert (batch["observation"][:, 0] >= oldest).all()

    def test_wait_while_there_are_no_rows(self, tmp_path):
        storage, history = filled(tmp_path, size=100)
        batches = iter(storage.loader(2, batch_size=16, seed=0, **FORK))
        next(batches)
        storage.empty()
        history.keep(0)
        oldest = history.cursors[0]
        writer = threading.Timer(0.5, write, (storage, history, 10))
        writer.start()
        # More than were drawn ahead.
        for _ in range(12):
            batch = next(batches)
        writer.join()
        assert (batch["observation"][:, 0] >= oldest).all()

    def test_live_through_a_writer_that_closes_and_another(self, tmp_path):
        storage, history = filled(tmp_path, size=100)
        batches = iter(storage.loader(2, batch_size=16, seed=0, **FORK))
        next(batches)
        storage.close()
        storage = make(tmp_path, size=100)
        for _ in range(4):
            write(storage, history, 80)
        for _ in range(12):
            batch = next(batches)
            assert not is_torn(batch).any()
        assert (batch["observation"][:, 0] >= history.cursors[0] - 100).all()
