"""Directories whose bytes were changed from outside: an error at opening, or what was written."""

from __future__ import annotations

import random
import shutil
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from contract.make import library
from contract.steps import assert_same, ids_of
from contract.writers import Script, assert_kept, found, opened, write_on

pytestmark = [
    pytest.mark.requirement("refused-is-unchanged"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]

STEPS = 12
#: As documented for `open`.
ERRORS = (ValueError, OSError, RuntimeError)


def damage(path: Path, luck: random.Random) -> None:
    """Changes a file: cuts off its end, flips a bit, or zeroes a part."""
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    file = luck.choice(sorted(files))
    data = bytearray(file.read_bytes())
    place = luck.randrange(len(data))
    way = luck.choice(["shorter", "bit", "bit", "zeros"])
    if way == "shorter":
        del data[place:]
    elif way == "bit":
        data[place] ^= 1 << luck.randrange(8)
    else:
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    file.write_bytes(data)


def assert_refused_or_right(
    path: Path, written: list, luck: random.Random, mode: str, is_closed: bool
) -> None:
    """Opens a damaged copy; only of a directory that was closed must one call `validate`."""
    damage(path, luck)
    try:
        storage = opened(path, STEPS, "uniform", mode=mode)
        if is_closed:
            storage.sample()
            storage.validate()
    except ERRORS:
        return
    if not len(storage):
        return
    # Of some rows nothing may be left, unless it was closed.
    lanes, none = found(storage), [[]] * len(written)
    assert_kept(lanes, *((written, none) if is_closed else (none, written)), STEPS)
    assert {*ids_of(storage.sample(64)).tolist()} <= {step.id for its in lanes for step in its}
    storage.close()


def damage_copies(path: Path, seed: int, times: int, is_closed: bool = False) -> None:
    luck = random.Random(seed)
    storage, written = opened(path, STEPS, "uniform"), [[], []]
    write_on(storage, Script(seed), written, luck.choice([2, 12]))
    storage.flush()
    write_on(storage, Script(seed, 1000), written, 2)
    storage.close() if is_closed else None
    for number in range(times):
        shutil.copytree(path, copied := path.with_name(f"copy {number}"))
        assert_refused_or_right(copied, written, luck, luck.choice(["r+", "r"]), is_closed)
        shutil.rmtree(copied)
    assert found(storage) == [steps[-STEPS:] for steps in written]


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_of_a_writer_that_was_killed_or_closed_it(tmp_path, seed, is_closed, layout):
    damage_copies(tmp_path / "rows", seed, 25, is_closed)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(3, 30))
def test_of_a_writer_that_was_killed_for_long(tmp_path, seed, layout):
    damage_copies(tmp_path / "rows", seed, 500)


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize(("num_blocks", "longest"), [(1, 1), (60, 4)])
def test_each_word_is_refused_or_right(tmp_path, num_blocks, longest, is_closed, layout):
    """Those before the rows are other numbers in turn, also while a writer has it open."""

    def seen(**options):
        with closing(library.ReplayStorage.open(tmp_path, mode="r", **options)) as reader:
            reader.sample(8)
            episodes, slots = reader.episodes, reader.episodes.live_slots()
            found = (
                episodes.num_after(slots),
                episodes.num_before(slots),
                *episodes.table().values(),
            )
            return reader[:], [it.tolist() for it in found]

    storage = opened(tmp_path, STEPS)
    write_on(storage, Script(0, longest=longest), [[], []], num_blocks)
    storage.close() if is_closed else None
    words, (rows, right) = np.memmap(*tmp_path.glob("rows.*"), np.int64, "r+"), seen()
    for at in np.flatnonzero(words)[:130]:
        own = int(words[at])
        for other in (own - 1, own + 1, own - 2**40, 0):
            words[at] = (other + 2**63) % 2**64 - 2**63
            with suppress(*ERRORS):
                seen()
            with suppress(*ERRORS):
                found, of_episodes = seen(check=True)
                if is_closed or len(found) == len(rows):  # else as if it had been killed before
                    assert_same(found, rows)
                    assert of_episodes == right
        words[at] = own
