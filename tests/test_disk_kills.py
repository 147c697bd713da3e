"""A writer that is killed at any line leaves what was committed, and nothing else.

`tests/disk/moments.py` looks at the files at each line of the package while something is done, so that
every line is tried in one run. What compiled loops store between two fences is tried in interpreted form,
by `python -m disk.stores` in a process of its own.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from disk.acts import ACTS, Act, write
from disk.history import History
from disk.kills import opens
from disk.moments import Moments, put_back
from disk.recorded import Recorded
from disk.rows import KINDS, abandon, found, make

from trl_storages import PERSampler, ReplayStorage

TESTS = Path(__file__).parent
SIZE = 12
# How rows are stored; lanes; steps that were written before: none, some, or more than there is room for.
FILLS = [
    ("shared", 1, 0),
    ("plain", 2, 5),
    ("plain", 1, 31),
    ("shared", 2, 31),
    ("frames", 2, 31),
]


def prepared(path, num_lanes, fill):
    """A storage with a history of two writers, the second of which is at work."""
    history = History(num_lanes, SIZE)
    for part in (fill // 2, fill - fill // 2):
        storage = make(path, num_lanes, SIZE)
        while part:
            act = write(history, min(part, 7))
            act.do(storage)
            history, part = act.after, part - min(part, 7)
        if storage.storage.initialized:
            storage.close()
    storage = make(path, num_lanes, SIZE)
    if fill:
        act = write(history, 2)
        act.do(storage)
        history = act.after
    return storage, history


def run(module, *args):
    """Runs a script in a process of its own, and returns what it prints."""
    paths = os.environ["PYTHONPATH"], str(TESTS), str(TESTS.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if module == "stores":
        # Only what is compiled has fences; interpreted, each of its stores is seen.
        environment |= {"TRL_STORAGES_BACKEND": "numba", "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"disk.{module}", *map(str, args)],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.requirement("persistence")
@pytest.mark.parametrize(("stored", "num_lanes", "fill"), FILLS, indirect=["stored"])
def test_killed_at_any_line(tmp_path, stored, num_lanes, fill):
    rng = random.Random(10 * fill + num_lanes)
    for place, (name, (make_act, _)) in enumerate(ACTS.items()):
        storage, history = prepared(tmp_path / f"{place}", num_lanes, fill)
        act = make_act(history, rng)
        with Moments(tmp_path / f"{place}") as moments:
            act.do(storage)
        assert found(storage) == act.after.live or not any(act.after.cursors), name
        abandon(storage)
        shutil.rmtree(tmp_path / f"{place}", ignore_errors=True)
        assert moments.lines > 5
        for number, files in enumerate(moments.all):
            if "storage.json" in files:
                more = {"goes_on": (number + place) % 4 == 0}
                opens(files, tmp_path / "killed", act, num_lanes, SIZE, **more)


@pytest.mark.parametrize(
    ("stored", "mend"),
    [("shared", "write"), ("plain", "empty"), ("frames", "write")],
    indirect=["stored"],
)
def test_killed_while_the_next_writer_takes_over(tmp_path, stored, mend):
    """Recovery is tried at each of its lines, too, from each of what a killed writer may leave."""
    rng = random.Random(1)
    storage, history = prepared(tmp_path / "rows", 2, 17)
    act = write(history, 3)
    with Moments(tmp_path / "rows") as first:
        act.do(storage)
    abandon(storage)
    for files in rng.sample(first.all, min(4, len(first.all))):
        put_back(files, tmp_path / "next")
        with Moments(tmp_path / "next") as second:
            storage = make(tmp_path / "next", 2, SIZE)
            if mend == "empty":
                storage.empty(keep_steps=2)
        got = found(storage)
        abandon(storage)
        if mend == "empty":
            assert all(len(rows) == 2 for rows in got[0])
        for left in second.all:
            put_back(left, tmp_path / "again")
            storage = make(tmp_path / "again", 2, SIZE)
            lanes, cursors = found(storage)
            assert cursors == got[1]
            assert all(rows[-2:] == kept[-2:] for rows, kept in zip(lanes, got[0], strict=True))
            abandon(storage)


def test_killed_while_a_directory_is_made(tmp_path):
    storage, history = make(tmp_path / "rows", 2, SIZE), History(2, SIZE)
    act = write(history, 2)
    with Moments(tmp_path / "rows") as moments:
        act.do(storage)
    abandon(storage)
    assert len(moments.all) > 3
    for files in moments.all:
        opens(files, tmp_path / "killed", act, 2, SIZE)


def test_killed_while_a_directory_is_deleted(tmp_path):
    storage, history = prepared(tmp_path / "rows", 2, 17)
    with Moments(tmp_path / "rows") as moments:
        storage.close(keep=False)
    assert not (tmp_path / "rows").exists()
    act = Act("delete", lambda _: None, history, history)
    for files in moments.all:
        act.or_nothing = "storage.json" not in files
        opens(files, tmp_path / "killed", act, 2, SIZE)


def test_killed_while_a_directory_is_made_anew(tmp_path):
    storage, history = prepared(tmp_path / "rows", 2, 17)
    abandon(storage)
    act = write(History(2, SIZE), 2)
    act.before, act.or_nothing = history, True
    with Moments(tmp_path / "rows") as moments:
        storage = make(tmp_path / "rows", 2, SIZE, existsok=True)
        act.do(storage)
    abandon(storage)
    for files in moments.all:
        opens(files, tmp_path / "killed", act, 2, SIZE)


@pytest.mark.parametrize("stored", KINDS, indirect=True)
def test_killed_while_a_dump_is_loaded(tmp_path, stored):
    source, history = make(None, 2, SIZE), History(2, SIZE)
    for num_steps in (3, 5):
        act = write(history, num_steps)
        act.do(source)
        history = act.after
    source.dumps(tmp_path / "dump")
    storage, before = prepared(tmp_path / "rows", 2, 17)
    after = before.copy()
    after.load(history)
    act = Act("loads", lambda storage: storage.loads(tmp_path / "dump"), before, after)
    with Moments(tmp_path / "rows") as moments:
        act.do(storage)
    assert found(storage) == act.after.live
    abandon(storage)
    for files in moments.all:
        opens(files, tmp_path / "killed", act, 2, SIZE)


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


def with_priorities(path, num_steps):
    """A storage of some steps, each row with a priority of its own."""
    storage, act = make(path, 2, SIZE), write(History(2, SIZE), num_steps)
    act.do(storage)
    slots = storage.episodes.live_slots()
    storage.update_priority(slots, 1.0 + torch.arange(len(slots)) / 8)
    return storage


def priorities_of(storage):
    """The priority of each row by its age, and what the next row gets."""
    slots = storage.episodes.slots_by_age(torch.arange(len(storage)))
    return storage.sampler.priorities[slots].tolist(), storage.sampler.default_priority


@pytest.mark.parametrize("stored", ["plain", "shared"], indirect=True)
def test_a_load_that_is_killed_has_the_priorities_of_the_old_rows_or_of_the_new(tmp_path, stored):
    storage, other = with_priorities(tmp_path / "rows", 5), with_priorities(None, 3)
    storage.flush()
    right, left = [priorities_of(it) for it in (storage, other)], set()
    state = other.state_dict()
    with Moments(tmp_path / "rows") as moments:
        storage.load_state_dict(state)
    assert priorities_of(storage) == right[1]
    abandon(storage)
    for files in moments.all:
        put_back(files, tmp_path / "killed")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reader = ReplayStorage.open(tmp_path / "killed", mode="r", sampler=PERSampler(SIZE))
            opened = make(tmp_path / "killed", 2, SIZE)
        assert priorities_of(opened) == priorities_of(reader)
        left.add(right.index(priorities_of(opened)))
        abandon(opened)
    assert left == {0, 1}


@pytest.mark.parametrize(("num_lanes", "least"), [(1, 40), (2, 50)])
def test_any_of_the_stores_between_two_fences(num_lanes, least):
    """Some of the subsets; the search tries several thousand."""
    tried = run("stores", num_lanes, 1, 1, *KINDS)
    assert tried.keys() == KINDS.keys()
    assert min(tried.values()) > least


@pytest.mark.search
@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_thousands_of_subsets_of_the_stores_between_two_fences(stored, num_lanes):
    assert run("stores", num_lanes, 12, 12, stored)[stored] > 3000


@pytest.mark.search
@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("num_lanes", [1, 4])
def test_killed_at_random_moments(tmp_path, stored, num_lanes):
    kills = int(os.environ.get("TRL_STORAGES_KILLS", 50))
    result = run("kills", tmp_path / "rows", num_lanes, kills, stored)
    assert result["kills"] >= kills
    assert result["wraps"] > 2
