"""A dump in the place of an earlier one: whatever ends it, one of the two is there."""

import os
import random
from unittest import mock

import pytest
from disk.moments import Moments, files_in, put_back
from disk.platter import Platter
from disk.rows import found, make, write

import trl_storages


class Dumps:
    """A storage that was dumped once and has been written since."""

    def __init__(self, tmp_path):
        self.path, self.elsewhere = tmp_path / "dump", tmp_path / "elsewhere"
        self.storage = make(None, 2, with_priorities=False)
        write(self.storage, 5)
        self.storage.dumps(self.path)
        self.first, self.rows = files_in(self.path), [found(self.storage)]
        write(self.storage, 3)
        self.rows.append(found(self.storage))

    def which(self, files):
        """0 if files hold the first dump, 1 if they hold the second; anything else raises."""
        put_back(files, self.elsewhere)
        other = make(None, 2, with_priorities=False)
        other.loads(self.elsewhere)
        return self.rows.index(found(other))


@pytest.fixture
def dumps(tmp_path):
    return Dumps(tmp_path)


def test_the_earlier_one_is_deleted(dumps):
    dumps.storage.dumps(dumps.path)
    files = files_in(dumps.path)
    assert dumps.which(files) == 1
    assert len(files) == len(dumps.first)
    assert files.keys() & dumps.first.keys() == {"state.json"}


def test_killed_at_any_line(dumps):
    with Moments(dumps.path) as moments:
        dumps.storage.dumps(dumps.path)
    assert {dumps.which(files) for files in moments.all} == {0, 1}


def test_a_power_cut_at_any_time(dumps):
    platter, rng, cuts = Platter(dumps.path, 512), random.Random(0), []
    platter.sync_all()

    def look():
        platter.look()
        cuts.extend(platter.after_cut(rng) for _ in range(8))

    def see_fsync(descriptor, fsync=os.fsync):
        look()
        fsync(descriptor)
        platter.sync(descriptor)
        look()

    with mock.patch.object(os, "fsync", see_fsync):
        dumps.storage.dumps(dumps.path)
    look()
    platter.close()
    assert len(cuts) > 100
    assert {dumps.which(files) for files in cuts} == {0, 1}


def test_after_an_error_nothing_of_it_is_left(dumps):
    with (
        mock.patch.object(trl_storages.saved.files, "write_text", side_effect=OSError("full")),
        pytest.raises(OSError, match="full"),
    ):
        dumps.storage.dumps(dumps.path)
    assert files_in(dumps.path) == dumps.first


def test_what_a_kill_has_left_goes_with_the_next_one(dumps):
    with Moments(dumps.path) as moments:
        dumps.storage.dumps(dumps.path)
    most = max(moments.all, key=len)
    assert len(most) > len(dumps.first)
    put_back(most, dumps.path)
    dumps.storage.dumps(dumps.path)
    assert len(files_in(dumps.path)) == len(dumps.first)
