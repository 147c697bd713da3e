"""Writes that fail or are interrupted halfway while their process lives on, alone and with readers."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from durable.rows import block, check, is_torn, make, priority_of, write
from interrupter import Interrupter

from trl_storages import PERSampler, ReplayStorage, UniformSampler, disk, rows
from trl_storages.disk import following
from trl_storages.rows import Journal


def rewrite(storage):
    slots = storage.episodes.slots_by_age(torch.arange(5))
    storage.storage.set(slots, storage.storage.get(slots), set_cursor=False)


def prioritise(storage):
    batch = storage.sample()
    batch["td_error"] = priority_of(batch["index"], storage)
    storage.update_tensordict_priority(batch)


@pytest.mark.parametrize(
    "act",
    [lambda storage: write(storage, 3), rewrite, prioritise, lambda storage: storage.flush()],
    ids=["write", "rewrite", "prioritise", "flush"],
)
def test_interrupted_at_any_line_and_going_on(tmp_path, act):
    storage = make(tmp_path, 2)
    write(storage, 30)
    line = 0
    while True:
        line += 1
        before = storage.episodes.num_steps_written.clone()
        interrupter = Interrupter(line, disk, rows)
        with suppress(KeyboardInterrupt), interrupter:
            act(storage)
        # Whatever was interrupted, the next write and the next process find all as it should be.
        committed = torch.from_numpy(storage.storage.journal.header.read().cursors.copy())
        storage.extend(block(committed, 1))
        check(storage)
        written = storage.episodes.num_steps_written - before
        assert set(written.tolist()) <= {1, 4}
        journal = storage.storage.journal
        assert journal.header.pending == 0
        assert journal.header.rewrites % 2 == 0
        if line % 10 == 0:
            journal.close()
            storage = make(tmp_path, 2)
            check(storage)
        if interrupter.left > 0:
            break


class TestReaders:
    """What a reader must not take for rows."""

    def test_a_write_that_failed_in_between(self, tmp_path, monkeypatch):
        storage = make(tmp_path, sampler=UniformSampler())
        write(storage, 24)
        table = type(storage.storage.table)
        really, calls = table.put, []

        def fail(*write):
            really(*write)
            calls.append(reader.storage.rows.clone())
            raise OSError("interrupted")

        def overtake(batch):
            if not calls:
                # These are read while the write that will fail is half done.
                with monkeypatch.context() as patch:
                    patch.setattr(table, "put", fail)
                    with pytest.raises(OSError, match="interrupted"):
                        write(storage, 5)
                half_written = reader.storage.layout.tensordict(calls[0])
                return half_written[batch["index"]].set("index", batch["index"])
            return batch

        reader = ReplayStorage.open(
            tmp_path, mode="r", transform=overtake, batch_size=64, sampler=UniformSampler()
        )
        batch = reader.sample()
        assert calls
        assert (batch["observation"][:, 0] < 24).all()

    def test_rows_that_are_forgotten_between_two_looks(self, tmp_path, monkeypatch):
        storage = make(tmp_path, sampler=UniformSampler())
        write(storage, 20)
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=64, sampler=UniformSampler())
        storage.empty()
        reader.storage.refresh()
        write(storage, 20)
        header, calls = reader.storage.journal.header, []
        really = type(header).read

        def overtaken(self):
            state = really(self)
            if self is header and not calls:
                calls.append(1)
                # All but 15 rows go, and those that stay move to the slots from 0.
                storage.empty(keep_steps=15)
            return state

        monkeypatch.setattr(type(header), "read", overtaken)
        reader.sample()
        assert calls
        slots = torch.arange(15)
        assert len(reader) == 15
        for ours, theirs in zip(
            reader.episodes.extent(slots), storage.episodes.extent(slots), strict=True
        ):
            assert torch.equal(ours, theirs)

    def test_an_error_that_comes_of_torn_rows(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 24)
        calls = []

        def fails_at_first(batch):
            calls.append(1)
            if len(calls) == 1:
                write(storage, 24)  # every row that was just read
                raise IndexError("an action that there is not")
            return batch

        reader = ReplayStorage.open(
            tmp_path, mode="r", transform=fails_at_first, batch_size=8, sampler=UniformSampler()
        )
        assert not is_torn(reader.sample()).any()
        assert len(calls) == 2

    def test_rows_that_a_killed_writer_was_changing(self, tmp_path, monkeypatch):
        storage = make(tmp_path)
        write(storage, 24)
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=8, sampler=UniformSampler())
        monkeypatch.setattr(following, "_PATIENCE", 0.05)
        journal = storage.storage.journal
        journal.begin_rewrite(np.arange(24))
        with pytest.raises(RuntimeError, match="killed while it changed them"):
            reader.sample()
        with pytest.raises(RuntimeError, match="killed while it changed them"):
            ReplayStorage.open(tmp_path, mode="r")
        journal.close()
        again = make(tmp_path)  # the next writer puts them back
        check(again)
        assert not is_torn(reader.sample()).any()

    def test_an_error_of_ones_own(self, tmp_path):
        def fails(batch):
            raise IndexError("always")

        storage = make(tmp_path)
        write(storage, 24)
        reader = ReplayStorage.open(
            tmp_path, mode="r", transform=fails, batch_size=8, sampler=UniformSampler()
        )
        with pytest.raises(IndexError, match="always"):
            reader.sample()

    def test_change_nothing_by_any_method(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 30)
        state = storage.state_dict()
        storage.dumps(tmp_path / "dump")
        before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=4, sampler=PERSampler(24))
        rows = reader[:]
        for change in (
            reader.empty,
            lambda: reader.empty(keep_steps=3),
            reader.end_episodes,
            lambda: reader.load_state_dict(state),
            lambda: reader.loads(tmp_path / "dump"),
            lambda: reader.__setitem__(slice(0, 3), rows[:3]),
            lambda: reader.close(keep=False),
        ):
            with pytest.raises(RuntimeError, match="reading"):
                change()
            assert torch.equal(reader[:]["observation"], rows["observation"])
        reader.flush()
        reader.close()
        assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}

    def test_episodes_are_listed_of_rows_that_are_there(self, tmp_path, monkeypatch):
        storage = make(tmp_path)
        write(storage, 24)
        reader = ReplayStorage.open(tmp_path, mode="r", batch_size=4, sampler=UniformSampler())
        really, calls = type(reader.storage).get, []

        def overtaken(self, index):
            rows = really(self, index)
            if self is reader.storage and not calls:
                calls.append(1)
                write(storage, 24)
            return rows

        monkeypatch.setattr(type(reader.storage), "get", overtaken)
        (*_, last) = reader.query()
        assert calls
        assert last.length == storage.query()[-1].length == 4
        reader.validate()


def test_a_closed_storage_stays_as_it_was(tmp_path):
    storage = make(tmp_path)
    write(storage, 30)
    storage.close()
    rows = storage[:]
    for change in (
        storage.empty,
        lambda: storage.empty(keep_steps=3),
        storage.end_episodes,
        lambda: write(storage, 1),
        lambda: storage.load_state_dict(storage.state_dict()),
        lambda: storage.close(keep=False),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            change()
        assert len(storage) == 24
        assert torch.equal(storage[:]["observation"], rows["observation"])
        storage.validate()
    check(make(tmp_path))


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_priorities_that_were_loaded_are_there_after_reopening(tmp_path, way):
    source = make(tmp_path / "source", 2)
    write(source, 30)
    prioritise(source)
    expected = source.sampler.priorities
    target = make(tmp_path / "target", 2)
    write(target, 3)
    if way == "state_dict":
        target.load_state_dict(source.state_dict())
    else:
        source.dumps(tmp_path / "dump")
        target.loads(tmp_path / "dump")
    assert torch.equal(target.sampler.priorities, expected)
    target.storage.journal.close()
    assert torch.equal(make(tmp_path / "target", 2).sampler.priorities, expected)


def test_two_processes_that_make_one_directory(tmp_path, monkeypatch):
    """The second looks into the directory before the first has begun, and gets the lock after it."""
    from trl_storages.disk import directory

    really, first = directory.WriterLock, []

    def late(path):
        if not first:
            first.append(None)
            first[0] = make(tmp_path / "rows", sampler=UniformSampler())
            write(first[0], 9)
            first[0].close()
        return really(path)

    second = make(tmp_path / "rows", sampler=UniformSampler())
    monkeypatch.setattr(directory, "WriterLock", late)
    with pytest.raises(FileExistsError, match="must be empty"):
        write(second, 1)
    again = make(tmp_path / "rows", sampler=UniformSampler())
    assert len(again) == 9
    check(again)


def test_a_lock_that_was_deleted_with_its_directory(tmp_path):
    """Whoever waits at a door that is gone must not think to be alone behind it."""
    storage = make(tmp_path / "rows")
    write(storage, 3)
    old = (tmp_path / "rows" / "lock").open()
    storage.close(keep=False)
    again = make(tmp_path / "rows")
    write(again, 3)
    assert old.read() == ""
    old.close()
    with pytest.raises(RuntimeError, match="writer already"):
        make(tmp_path / "rows")
    assert np.array_equal(again.episodes.num_steps_written, [3])
    assert isinstance(again.storage.journal, Journal)
