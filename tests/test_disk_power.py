"""A loss of power at any moment leaves all that was flushed and is not evicted, and no wrong row.

The disk is simulated: of everything that was written since a sync, chance decides what is there.
"""

import os
import random
from unittest import mock

import pytest
from disk.acts import write
from disk.history import History
from disk.moments import files_in, parts_of, put_back
from disk.platter import Platter
from disk.power import cut_at_random, opens_after_cut, syncs_seen
from disk.rows import ALL_KINDS, KINDS, abandon, found, make, stored_as

SIZE = 12


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


def flushed(path):
    """A directory of five rows that are flushed, and its history."""
    storage, history = make(path, 1, SIZE), History(1, SIZE)
    act = write(history, 5)
    act.do(storage)
    storage.flush()
    act.after.flush()
    return storage, act.after


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


def zero(data, part, start=0):
    """Zeroes a part of a file from a byte of it on."""
    start += part.start
    data[start : part.stop] = bytes(part.stop - start)


def written(storage, history):
    act = write(history, 1)
    act.do(storage)
    return act.after
