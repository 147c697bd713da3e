"""A loss of power at any moment leaves all that was flushed and is not evicted, and no wrong row.

The disk is simulated: of everything that was written since a sync, chance decides what is there.
"""

import os
from contextlib import suppress
from unittest import mock

import pytest
from disk.acts import write
from disk.history import History
from disk.moments import files_in, parts_of, put_back
from disk.platter import Platter
from disk.power import cut_at_random, opens_after_cut, syncs_seen
from disk.rows import ALL_KINDS, abandon, found, make, stored_as

from trl_storages.saved import durable


@pytest.mark.requirement("persistence")
@pytest.mark.parametrize("seed", range(12))
def test_power_cut_twice(tmp_path, seed):
    with stored_as([*ALL_KINDS][seed % len(ALL_KINDS)]):
        assert cut_at_random(tmp_path, seed, num_acts=10, cuts=1) == 20


@pytest.mark.search
@pytest.mark.parametrize("stored", ALL_KINDS, indirect=True)
@pytest.mark.parametrize("seed", range(100, 120))
def test_power_cut_again_and_again(tmp_path, stored, seed):
    """Two thousand hybrids of each kind."""
    assert cut_at_random(tmp_path, seed, num_acts=25, cuts=2, depth=4) == 200


def test_what_is_next_of_the_newest_row_that_one_cut_left_outlasts_the_next_cut(tmp_path):
    """Where the first cut took rows that had been flushed once and overwritten since."""
    with stored_as("shared"):
        storage, history = make(tmp_path / "rows", size=5), History(1, 5)
        for _ in range(8):
            history = written(storage, history)
        storage.flush()
        history.flush()
        left = files_in(tmp_path / "rows")
        # The mark of the last row is that of one that was written over it.
        parts = parts_of(tmp_path / "rows")
        data = bytearray(left["storage.1.rows"])
        zero(data, parts["marks"], 7 * 16)
        zero(data, parts["commits"])
        left["storage.1.rows"] = bytes(data)
        abandon(storage)
        put_back(left, tmp_path / "rows")
        with pytest.warns(RuntimeWarning, match="loss of power"):
            storage = make(tmp_path / "rows", size=5)
        history.adopt(found(storage))
        assert history.cursors == [7]
        for _ in range(2):
            history = written(storage, history)
        now = files_in(tmp_path / "rows")
        abandon(storage)
        data = bytearray(now["storage.1.rows"])
        for name in ("rows", "marks", "commits"):
            data[parts[name]] = left["storage.1.rows"][parts[name]]
        now["storage.1.rows"] = bytes(data)
        opens_after_cut(now, tmp_path / "cut", history, 5)


def test_rows_that_one_cut_brought_back_outlast_the_next_cut(tmp_path):
    """Which may leave the table of before, which says that they were evicted."""
    storage, history = make(tmp_path / "rows", size=8), History(1, 8)
    for _ in range(8):
        history = written(storage, history)
    storage.flush()
    history.flush()
    for _ in range(3):
        history = written(storage, history)
    left = files_in(tmp_path / "rows")
    # The marks of the last rows are lost.
    parts, data = parts_of(tmp_path / "rows"), bytearray(left["storage.1.rows"])
    zero(data, parts["marks"], 8 * 16)
    left["storage.1.rows"] = bytes(data)
    abandon(storage)
    put_back(left, tmp_path / "rows")
    platter = Platter(tmp_path / "rows", 4096)
    platter.sync_all()
    with syncs_seen(platter):
        with pytest.warns(RuntimeWarning, match="loss of power"):
            storage = make(tmp_path / "rows", size=8)
        history.adopt(found(storage))
        assert (history.tails, history.cursors) == ([0], [8])
        history = written(storage, history)
    platter.look()
    cut = platter.as_old_as_can_be("storage.1.rows", parts["commits"])
    opens_after_cut(cut, tmp_path / "cut", history, 8)
    platter.close()


def test_what_is_next_of_the_newest_flushed_row_outlasts_an_interrupted_flush(tmp_path):
    with stored_as("shared"):
        storage, history = make(tmp_path / "rows"), History(1, 24)
        for _ in range(3):
            history = written(storage, history)
            storage.flush()
        history = written(storage, history)
        sync = durable.sync_directory

        def interrupted(folder):
            sync(folder)
            raise KeyboardInterrupt

        with (
            mock.patch.object(durable, "sync_directory", interrupted),
            suppress(KeyboardInterrupt),
        ):
            storage.flush()
        history.flush()
        cut = files_in(tmp_path / "rows")
        for _ in range(4):
            history = written(storage, history)
        # Of the rows that were written since, the next observations alone were on disk.
        side, data = parts_of(tmp_path / "rows")["side"], bytearray(cut["storage.1.rows"])
        data[side] = files_in(tmp_path / "rows")["storage.1.rows"][side]
        cut["storage.1.rows"] = bytes(data)
        abandon(storage)
        opens_after_cut(cut, tmp_path / "cut", history, 24)


def test_directories_that_are_made_are_synced(tmp_path):
    synced, sync = set(), os.fsync

    def note(descriptor):
        sync(descriptor)
        status = os.fstat(descriptor)
        synced.add((status.st_dev, status.st_ino))

    with mock.patch.object(os, "fsync", note):
        written(make(tmp_path / "some" / "more" / "rows"), History(1, 24))
    for folder in (tmp_path, tmp_path / "some", tmp_path / "some" / "more"):
        assert (folder.stat().st_dev, folder.stat().st_ino) in synced


def zero(data, part, start=0):
    """Zeroes a part of a file from a byte of it on."""
    start += part.start
    data[start : part.stop] = bytes(part.stop - start)


def written(storage, history):
    act = write(history, 1)
    act.do(storage)
    return act.after
