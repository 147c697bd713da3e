"""Readers of a directory that another storage writes."""

import pytest
import torch
from disk.rows import found, is_torn, make, priority_of, write

from trl_storages import (
    ERESampler,
    PERSampler,
    ReplayStorage,
    UniformSampler,
)


def assert_same(first, second):
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        assert torch.equal(first[key], second[key]), key


class TestReaders:
    def test_follow_the_writer(self, tmp_path):
        storage = make(tmp_path, 4)
        write(storage, 1)
        reader = ReplayStorage.open(tmp_path, mode="r", sampler=UniformSampler(), batch_size=64)
        for size in (2, 9, 4, 1):
            write(storage, size)
            batch = reader.sample()
            assert not is_torn(batch).any()
            assert found(reader) == found(storage)
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
                # Every row that was just read, and the spare ones.
                write(storage, 24)
                write(storage, 24)
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
            sizes.append(len(reader.storage))
            write(storage, 1)
        assert sizes == [2, 2, 2, 5, 5, 5]

    def test_take_over_priorities(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 30)
        reader = ReplayStorage.open(tmp_path, mode="r", sampler=PERSampler(24), batch_size=16)
        batch = reader.sample()
        batch["td_error"] = priority_of(batch["serial"], 0)
        storage.update_tensordict_priority(batch)
        expected = storage.sampler.priorities
        reader.sample()
        assert torch.equal(reader.sampler.priorities, expected)
        with pytest.raises(RuntimeError, match="reading"):
            reader.update_tensordict_priority(batch)
        # A row that was overwritten since it was drawn keeps its new priority.
        batch = reader.sample()
        write(storage, 24)
        batch["td_error"] = torch.full((16,), 5000.0)
        storage.update_tensordict_priority(batch)
        priorities = storage.sampler.priorities
        assert (priorities[priorities.isfinite()] < 5000).all()

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
        found(storage)

    def test_bad_arguments(self, tmp_path):
        storage = make(tmp_path)
        write(storage, 9)
        with pytest.raises(ValueError, match="mode"):
            ReplayStorage.open(tmp_path, mode="w")
        with pytest.raises(ValueError, match="fetch_every"):
            ReplayStorage.open(tmp_path, mode="r", fetch_every=0)
