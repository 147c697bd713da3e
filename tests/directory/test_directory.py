"""Rows in a directory: reopened, killed, without power, damaged, on a full disk, beside readers."""

# Letters as in the package.

import errno
import json
import os
import shutil
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

from tests.directory.history import layout_of, make
from trl_storages.directory import Directory
from trl_storages.kernels import checks, streams
from trl_storages.streams import Block, Layout

PAGE = 4096


def rng_of(seed):
    return np.random.default_rng(seed)


def test_a_directory_is_reopened(tmp_path):
    rng = rng_of(0)
    for seed in range(8):
        path = tmp_path / f"{seed}"
        directory, history = make(path, rng)
        for _ in range(4):
            for _ in range(int(rng.integers(0, 6))):
                history.write(directory)
            history.check(directory)
            directory.flush({"sampler": [1, 2.5, "x"]})
            if rng.random() < 0.5:
                directory.close()
            del directory
            directory = Directory.open(path)
            assert directory.state == {"sampler": [1, 2.5, "x"]}
            history.check(directory)
        directory.close()


def test_layouts_are_read_back(tmp_path):
    fields = {
        ("agents", "view"): (torch.bfloat16, (2, 1)),
        ("next", "agents", "view"): (torch.bfloat16, (2, 1)),
        "phase": (torch.complex128, ()),
        ("next", "done"): (torch.bool, (1,)),
    }
    layouts = Layout(fields, ((("agents",), torch.Size([2])),)), layout_of(1), layout_of(3)
    for number, layout in enumerate(layouts):
        Directory.create(tmp_path / f"{number}", layout, 100).close()
        with Directory.open(tmp_path / f"{number}", "r") as opened:
            assert opened.layout == layout
            assert opened.layout.described == layout.described


def test_there_is_one_writer(tmp_path):
    directory = Directory.create(tmp_path / "x", layout_of(), 100)
    with pytest.raises(RuntimeError, match="has a writer"):
        Directory.open(tmp_path / "x")
    with pytest.raises(FileExistsError, match="must be empty"):
        Directory.create(tmp_path / "x", layout_of(), 100)
    with pytest.raises(RuntimeError, match="has a writer"):
        Directory.create(tmp_path / "x", layout_of(), 100, fresh=True)
    reader = Directory.open(tmp_path / "x", "r")
    with pytest.raises(RuntimeError, match="reading only"):
        reader.flush()
    directory.close()
    Directory.open(tmp_path / "x").close()
    with pytest.raises(FileNotFoundError, match="must hold a storage"):
        Directory.open(tmp_path / "y")


def test_fresh_discards_what_a_directory_holds(tmp_path):
    directory, history = make(tmp_path / "x", rng_of(3))
    history.write(directory)
    reader = Directory.open(tmp_path / "x", "r")
    directory.close()
    assert reader.newest() is reader
    directory, history = make(tmp_path / "x", rng_of(4), fresh=True)
    assert len(directory.index) == 0
    assert reader.newest() is not reader
    assert len([*(tmp_path / "x").glob("rows.*")]) == 1
    history.write(directory)
    history.check(directory)


def test_emptied_rows_never_come_back(tmp_path):
    for seed in range(4):
        rng = rng_of(seed)
        path = tmp_path / f"{seed}"
        directory, history = make(path / "0", rng)
        history.write(directory)
        directory.empty()
        assert len(directory.index) == 0
        if seed % 2:
            history.end_episodes(directory)
            history.write(directory)
        directory._arena.flush()
        shutil.copytree(path / "0", path / "1")
        found = Directory.open(path / "1")
        tails = directory.index.tails
        assert ((found.index.tails >= tails) | (found.index.cursors == 0)).all()


def test_readers_see_what_is_published(tmp_path):
    directory, history = make(tmp_path / "x", rng_of(1))
    reader = Directory.open(tmp_path / "x", "r")
    for _ in range(20):
        history.write(directory)
        history.check(reader)
    slots = directory.index.live_slots()
    steps = directory.index.steps_of(slots)
    assert not reader.index.stale(slots, steps).any()
    while not (reader.index.tails > 0).all():
        history.write(directory)
    gone = steps < torch.from_numpy(directory.index.tails)[directory.index.lanes_of(slots)]
    assert torch.equal(reader.index.stale(slots, steps), gone)


# Kills


def cut_off(directory, block, after, rng):
    """Does a write up to some store, and no further."""
    which, offsets, words, done, cut = block
    tables, layout, rows = directory.index.tables, directory.layout, directory.rows
    n = len(words)
    how, tips = np.empty(n, np.uint8), np.empty(len(which), np.int64)
    at, slots = np.empty(n, np.int64), np.empty(n, np.int64)
    streams.find_tips(tables, which, tips)
    sizes, k = layout.sizes, layout.frames
    streams.compare(rows.entries, sizes, k, tips, offsets, words, how)
    streams.cut_gaps(tables, which, offsets, how, done, cut)
    tails = directory.index.tails.copy()
    streams.make_room(tables, which, offsets, how, at)
    if after == 0:
        some = rng.random(len(tails)) < 0.5
        directory.index.tails[some] = tails[some]
        return
    before = [it.copy() for it in tables[:4]]
    streams.enter(tables, which, offsets, at, done, cut, slots)
    if after == 1:
        for table, old in zip(tables[:4], before, strict=True):
            undone = rng.random(len(table)) < 0.3
            table[undone] = old[undone]
        return
    old = rows.entries.copy()
    streams.copy_in(rows.entries, sizes, k, words, how, at)
    if after == 2:
        undone = rng.random(old.shape) < 0.3
        rows.entries[undone] = old[undone]
        return
    marks = rows.marked[0]
    old = marks.copy()
    size = layout.observation_words
    counts = np.diff(offsets)
    steps = np.concatenate(
        [directory.index.cursors[e] + np.arange(n) for e, n in zip(which, counts, strict=True)]
    )
    checks.mark(tables, rows.entries, size, rows.marked, how, at, slots, steps)
    if after == 3:
        undone = rng.random(old.shape) < 0.3
        marks[undone] = old[undone]
        return
    chosen = rng.random(len(which)) < 0.5
    if after == 5:  # some lanes were published
        for m in np.flatnonzero(chosen):
            streams.publish(tables, which[m : m + 1], offsets[m : m + 2])


def cut_writes(path, seed):
    """Writes are cut off, and others come in their place."""
    rng = rng_of(seed)
    directory, history = make(path, rng)
    for _ in range(6):
        for _ in range(int(rng.integers(0, 4))):
            history.write(directory)
        if rng.random() < 0.2:
            history.end_episodes(directory)
        block, _ = history.block(directory.index.most_steps)
        cut_off(directory, block, int(rng.integers(0, 5)), rng)
        del directory
        directory = Directory.open(path)
        history.check(directory)


def test_writes_are_cut_off(tmp_path):
    for seed in range(12):
        cut_writes(tmp_path / f"{seed}", seed)


@pytest.mark.search
def test_many_writes_are_cut_off(tmp_path):
    for seed in range(1000):
        cut_writes(tmp_path / "x", 100 + seed)
        shutil.rmtree(tmp_path / "x")


def numbered(first, count, layout):
    """Rows of which everything tells their step."""
    words = torch.zeros(count, layout.row_words, dtype=torch.int64)
    steps = torch.arange(first, first + count)
    layout.fill("observation", words, steps[:, None].expand(-1, 3).float())
    layout.fill(("next", "observation"), words, (steps + 1)[:, None].expand(-1, 3).float())
    layout.fill("action", words, (steps % 1000)[:, None].expand(-1, 2).short())
    layout.fill(("next", "reward"), words, steps[:, None].double())
    done = (steps % 7 == 6).numpy()
    layout.fill(("next", "done"), words, torch.from_numpy(done)[:, None])
    offsets = np.array([0, count])
    return Block(np.zeros(1, np.int64), offsets, words.numpy(), done, np.zeros(count, bool))


def write_numbered(directory, rng):
    while True:
        first, count = int(directory.index.cursors[0]), int(rng.integers(1, 40))
        directory.rows.append(numbered(first, count, directory.layout), cuts_gaps=True)


def check_numbered(directory):
    slots = directory.index.live_slots()
    places = directory.index.entries_of(slots)
    rows = directory.rows.gather(places, places).numpy()
    tail, cursor = int(directory.index.tails[0]), int(directory.index.cursors[0])
    assert np.array_equal(rows, numbered(tail, cursor - tail, directory.layout).words)
    directory.index.validate()


def test_the_writer_is_killed(tmp_path):
    rng = rng_of(0)
    Directory.create(tmp_path / "x", layout_of(), 500).close()
    with Directory.open(tmp_path / "x") as directory:  # compiles
        directory.rows.append(numbered(0, 5, directory.layout), cuts_gaps=True)
    reader = Directory.open(tmp_path / "x", "r")
    for _ in range(8):
        child = os.fork()
        if child == 0:
            write_numbered(Directory.open(tmp_path / "x"), rng)
        time.sleep(0.02 + 0.1 * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        directory = Directory.open(tmp_path / "x")
        check_numbered(directory)
        check_numbered(reader)
        del directory


# Power cuts


def hybrid(versions, rng):
    """Returns a file of which each page, or each smaller part, is that of some moment."""
    size = int(rng.choice([24, 64, 512, PAGE]))
    newest = rng.choice([0.0, 0.2, 0.5, 0.9])
    whole = len(versions[0])
    versions = [it + bytes(-whole % size) for it in versions]
    pages = [np.frombuffer(it, np.uint8).reshape(-1, size) for it in versions]
    chosen = np.where(
        rng.random(len(pages[0])) < newest,
        len(pages) - 1,
        rng.integers(0, len(pages), len(pages[0])),
    )
    return np.array([pages[which][at] for at, which in enumerate(chosen)]).tobytes()[:whole]


def rows_file(path):
    (found,) = path.glob("rows.*")
    return found


def power_cuts(folder, seed, cuts=3):
    """Again and again the power is cut, and the writer goes on with what is there."""
    rng = rng_of(seed)
    directory, history = make(folder / "0", rng)
    history.flushed(directory.index)
    for number in range(cuts):
        path = directory.path
        described = (path / "storage.json").read_bytes()
        versions = [rows_file(path).read_bytes()]
        for _ in range(int(rng.integers(1, 8))):
            act = rng.random()
            if act < 0.15:
                history.flush(directory)
                described = (path / "storage.json").read_bytes()
                versions = []
            elif act < 0.25:
                history.end_episodes(directory)
            elif act < 0.45:
                block, _ = history.block(directory.index.most_steps)
                cut_off(directory, block, int(rng.integers(0, 5)), rng)
                versions.append(rows_file(path).read_bytes())
                del directory
                directory = Directory.open(path)
                history.flushed(directory.index)
                history.check(directory)
                described = (path / "storage.json").read_bytes()
                versions = []
            else:
                history.write(directory)
            versions.append(rows_file(path).read_bytes())
        if rng.random() < 0.2:  # before the last store: rows are whole, and may come back
            block, added = history.block(directory.index.most_steps)
            cut_off(directory, block, 4, rng)
            history.add(added)
            versions.append(rows_file(path).read_bytes())
        tails = directory.index.tails.copy()
        name = rows_file(path).name
        after = folder / f"{number + 1}"
        content = hybrid(versions, rng)
        for attempt in range(int(rng.integers(1, 3))):  # again while it recovers
            after = folder / f"{number + 1}.{attempt}"
            after.mkdir()
            (after / "storage.json").write_bytes(described)
            (after / name).write_bytes(content)
            directory = Directory.open(after)
            content = hybrid([content, (after / name).read_bytes()], rng)
        history.survives(directory, tails)


def test_the_power_is_cut(tmp_path):
    for seed in range(15):
        power_cuts(tmp_path / f"{seed}", seed)


@pytest.mark.search
def test_the_power_is_cut_often(tmp_path):
    for seed in range(700):
        power_cuts(tmp_path / "x", 1000 + seed)
        shutil.rmtree(tmp_path / "x")


# Damages


def damaged_files(path, seed):
    """A directory with a few changed bytes gives an error when it is opened or checked, or is right."""
    rng = rng_of(seed)
    directory, history = make(path, rng)
    for _ in range(3):
        history.write(directory)
    directory.close()
    victim = path / "storage.json" if rng.random() < 0.3 else rows_file(path)
    content = bytearray(victim.read_bytes())
    how = rng.choice(["flip", "cut", "zero", "add"])
    at = int(rng.integers(len(content)))
    if how == "flip":
        content[at] ^= 1 << int(rng.integers(8))
    elif how == "cut":
        del content[at:]
    elif how == "zero":
        content[at : at + 100] = bytes(len(content[at : at + 100]))
    else:
        content += bytes(PAGE)
    victim.write_bytes(content)
    with suppress(ValueError):
        directory = Directory.open(path, "r" if seed % 2 else "r+")
        directory.validate()
        history.check(directory)


def test_damaged_files_give_an_error_or_what_was_written(tmp_path):
    for seed in range(40):
        damaged_files(tmp_path / f"{seed}", seed)


@pytest.mark.search
def test_many_damaged_files(tmp_path):
    for seed in range(500):
        damaged_files(tmp_path / "x", 100 + seed)
        shutil.rmtree(tmp_path / "x")


def test_links_and_pipes_are_not_followed(tmp_path):
    for name in ("storage.json", "rows.1"):
        for make_it in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "elsewhere")):
            path = tmp_path / "x"
            Directory.create(path, layout_of(), 100).close()
            (path / name).replace(tmp_path / "elsewhere")
            make_it(path / name)
            with pytest.raises(ValueError, match="damaged"):
                Directory.open(path)
            shutil.rmtree(path)


@pytest.mark.parametrize("number", [1, 2])
def test_older_formats_are_refused(tmp_path, number):
    (tmp_path / "storage.json").write_text(json.dumps({"kind": "trl_storages", "format": number}))
    with pytest.raises(ValueError, match="formats 1 and 2 were never released"):
        Directory.open(tmp_path)


# A full disk


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    layout, reserve = layout_of(), os.posix_fallocate
    directory = Directory.create(tmp_path / "x", layout, 10_000)
    left = [3_000_000]

    def reserve_some(file, start, size):
        left[0] -= size
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_some)

    def write_more():
        first = int(directory.index.cursors[0])
        directory.rows.append(numbered(first, 1000, layout), cuts_gaps=True)

    def write_all():
        while True:
            write_more()

    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            write_all()
        assert len(directory.index) >= 1000
        check_numbered(directory)
    left[0] = 3_000_000
    write_more()
    check_numbered(directory)
    directory.close()
    left[0] = 0
    with pytest.raises(OSError, match="No space left"):
        Directory.create(tmp_path / "y", layout, 10_000)
    assert [*(tmp_path / "y").iterdir()] == [tmp_path / "y" / "lock"]
    Directory.open(tmp_path / "x", "r").close()


def test_a_file_takes_the_room_of_its_rows(tmp_path):
    directory = Directory.create(tmp_path / "x", layout_of(), 20_000)
    for _ in range(200):
        first = int(directory.index.cursors[0])
        directory.rows.append(numbered(first, 1000, directory.layout), cuts_gaps=True)
    check_numbered(directory)
    directory.flush()
    status = os.stat(rows_file(tmp_path / "x"))
    assert status.st_blocks * 512 < 0.75 * status.st_size


# Readers


def test_a_reader_beside_a_writer_sees_no_torn_row(tmp_path):
    """The writer wraps all the time; what it overtook is drawn again, and never whole batches."""
    Directory.create(tmp_path / "x", layout_of(), 3000).close()
    with Directory.open(tmp_path / "x") as directory:
        for first in range(0, 3000, 500):
            directory.rows.append(numbered(first, 500, directory.layout), cuts_gaps=True)
    reader = Directory.open(tmp_path / "x", "r")
    child = os.fork()
    if child == 0:
        write_numbered(Directory.open(tmp_path / "x"), rng_of(0))
    try:
        index, generator = reader.index, torch.Generator().manual_seed(0)
        whole, gone = 0, 0
        for number in range(300):
            noise = torch.empty(64, dtype=torch.int64).random_(generator=generator)
            # Steps are those of before the draw: a row of a newer one counts as stale.
            cursor = int(index.cursors[0])
            slots = index.draw(noise)
            steps = cursor - 1 - (cursor - 1 - slots) % 3000
            places = index.entries_of(slots)
            rows = reader.rows.gather(places, places)
            stale = index.stale(slots, steps)
            right = torch.stack([numbered_row(int(it), reader.layout) for it in steps])
            assert torch.equal(rows[~stale], right[~stale])
            whole, gone = whole + int((~stale).sum()), gone + int(stale.sum())
            if number % 50 == 0:
                Directory.open(tmp_path / "x", "r").close()
        assert whole > gone
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    check_numbered(reader)


def numbered_row(step, layout):
    return torch.from_numpy(numbered(step, 1, layout).words[0])
