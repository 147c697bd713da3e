"""Directories whose bytes were changed from outside: an error at opening, or what was written."""

from __future__ import annotations

import mmap
import random
import shutil
from pathlib import Path

import pytest
from contract.make import library
from contract.steps import ids_of
from contract.writers import Script, assert_kept, found, opened, write_on

pytestmark = [
    pytest.mark.requirement("refused-is-unchanged"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]

STEPS = 12
#: As documented for `open`.
ERRORS = (ValueError, OSError, RuntimeError)


def damage(path: Path, luck: random.Random, page: int | None = None) -> None:
    """Changes a file: cuts off its end, flips a bit, zeroes a part, or begins a page anew."""
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    file = luck.choice(sorted(files))
    if page is not None:
        (file,) = path.glob("rows.*")
    data = bytearray(file.read_bytes())
    place = luck.randrange(len(data))
    way = luck.choice(["shorter", "bit", "bit", "zeros"])
    if page is not None:
        place = page * mmap.PAGESIZE % len(data)
        data[place : place + 64] = 64 * b"\x7f"
    elif way == "shorter":
        del data[place:]
    elif way == "bit":
        data[place] ^= 1 << luck.randrange(8)
    else:
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    file.write_bytes(data)


def assert_refused_or_right(path: Path, written: list, luck: random.Random, mode: str) -> None:
    """Opens a copy of a directory that its writer has not closed; nobody calls `validate`."""
    damage(path, luck)
    try:
        storage = opened(path, STEPS, "uniform", mode=mode)
    except ERRORS:
        return
    if not len(storage):
        return
    # Of some rows nothing may be left.
    lanes = found(storage)
    assert_kept(lanes, [[]] * len(lanes), written, STEPS)
    assert {*ids_of(storage.sample(64)).tolist()} <= {step.id for its in lanes for step in its}
    storage.close()


def damage_copies(path: Path, seed: int, times: int) -> None:
    luck = random.Random(seed)
    storage, written = opened(path, STEPS, "uniform"), [[], []]
    write_on(storage, Script(seed), written, luck.choice([2, 12]))
    storage.flush()
    write_on(storage, Script(seed, 1000), written, 2)
    for number in range(times):
        shutil.copytree(path, copied := path.with_name(f"copy {number}"))
        assert_refused_or_right(copied, written, luck, luck.choice(["r+", "r"]))
        shutil.rmtree(copied)
    assert found(storage) == [steps[-STEPS:] for steps in written]


@pytest.mark.parametrize("seed", range(3))
def test_of_a_writer_that_was_killed(tmp_path, seed):
    damage_copies(tmp_path / "rows", seed, 25)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(3, 30))
def test_of_a_writer_that_was_killed_for_long(tmp_path, seed):
    damage_copies(tmp_path / "rows", seed, 500)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_writer_that_closed_it(tmp_path, seed):
    """Checksums are looked at by `check=True` and `validate()`; before, only errors may come."""
    luck = random.Random(seed)
    storage, written = opened(tmp_path / "rows", STEPS), [[], []]
    write_on(storage, Script(seed), written, 12)
    storage.close()
    for number in range(20):
        shutil.copytree(tmp_path / "rows", copied := tmp_path / f"copy {number}")
        damage(copied, luck, None if seed else number)
        try:
            storage = library.ReplayStorage.open(copied, check=True, batch_size=16)
        except ERRORS:
            pass
        else:
            assert found(storage) == [steps[-STEPS:] for steps in written]
            storage.close()
        try:
            storage = opened(copied, STEPS)
            storage.sample()
            storage.validate()
        except ERRORS:
            continue
        assert found(storage) == [steps[-STEPS:] for steps in written]
        storage.close()
