"""A writer is killed at any moment: what it wrote is there up to some step of each lane, and right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from contract.make import make
from contract.steps import Player, Transition, assert_same, ids_of, rows, transition_of, write

pytestmark = [
    pytest.mark.requirement("persistence"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]

LANES, STEPS = 2, 12


def opened(path: Path, **options: Any) -> Any:
    sizes = {"lanes": LANES, "size": LANES * STEPS, "batch_size": 16}
    return make("n-step", place="directory", path=path, **sizes, **options)


def right(found: Any) -> list[Transition]:
    """The transitions of rows, each of which is as it was written: no row is torn."""
    steps = [transition_of(row) for row in found]
    assert_same(found, rows(steps))
    return steps


def play(storage: Any, players: list[Player], luck: random.Random) -> None:
    num_steps = luck.randint(1, 7)
    write(
        storage,
        [
            [player.step("terminated" if luck.random() < 0.2 else "") for _ in range(num_steps)]
            for player in players
        ],
    )


@contextmanager
def writing(path: Path, seed: int, start: int) -> Iterator[int]:
    """A process that writes without an end, from the ids of each lane that are not used yet."""
    pid = os.fork()
    if not pid:
        try:
            storage, luck = opened(path), random.Random(seed)
            players = [Player(lane) for lane in range(LANES)]
            for player in players:
                for _ in range(start):
                    player.jump()
                player.reset()
            storage.end_episodes()
            while True:
                play(storage, players, luck)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def kill_and_reopen(path: Path, times: int, seed: int) -> None:
    luck = random.Random(seed)
    start = 0
    opened(path).close()
    for number in range(times):
        with writing(path, number, start):
            time.sleep(luck.uniform(0.01, 0.2))
        storage = opened(path)
        newest = [0]
        steps = right(storage[:]) if len(storage) else []
        newest += [step.id % (1 << 20) for step in steps]
        start = max(newest) + 10
        storage.validate()
        # Other writes follow.
        players = [Player(lane) for lane in range(LANES)]
        for player in players:
            for _ in range(start):
                player.jump()
            player.reset()
        storage.end_episodes()
        for _ in range(3 * number):
            play(storage, players, luck)
        if number:
            check_each_run(storage)
        start += 1000
        storage.close()


def check_each_run(storage: Any) -> None:
    """Every row is right, and in each lane ids rise in the order of time."""
    steps = right(storage[:])
    for lane in range(LANES):
        its = [step.id for step in steps if step.lane == lane]
        assert its == sorted({*its})
        assert len(its) <= STEPS
    assert len({len([step for step in steps if step.lane == lane]) for lane in range(LANES)}) <= 2
    storage.n_step = 1
    assert {*ids_of(storage.sample(64)).tolist()} <= {step.id for step in steps}


def test_a_writer_that_is_killed(tmp_path):
    kill_and_reopen(tmp_path / "rows", 6, 0)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(10))
def test_a_writer_that_is_killed_often(tmp_path, seed):
    kill_and_reopen(tmp_path / "rows", 50, seed)


def read_beside_a_writer(path: Path, seconds: float) -> None:
    opened(path).close()
    with writing(path, 0, 0):
        reader, drawn = opened(path, mode="r"), 0
        until = time.monotonic() + seconds
        while time.monotonic() < until or not drawn:
            if not reader.can_sample():
                continue
            reader.n_step = 1
            drawn += len(right(reader.sample(64)))
            steps = right(reader[:])
            for lane in range(LANES):
                its = [step.id for step in steps if step.lane == lane]
                assert its == sorted({*its})
    assert drawn


@pytest.mark.requirement("disk-workers")
def test_a_reader_beside_a_writer(tmp_path):
    read_beside_a_writer(tmp_path / "rows", 1.5)


@pytest.mark.search
@pytest.mark.requirement("disk-workers")
def test_a_reader_beside_a_writer_for_long(tmp_path):
    read_beside_a_writer(tmp_path / "rows", 60)


@pytest.mark.parametrize("seed", range(50))
def test_a_damaged_directory_is_refused_or_right(tmp_path, seed):
    """Bytes of any file are changed, or its end is cut off."""
    storage, luck = opened(tmp_path / "rows"), random.Random(seed)
    players = [Player(lane) for lane in range(LANES)]
    for _ in range(6):
        play(storage, players, luck)
    storage.close()
    files = [
        path for path in (tmp_path / "rows").rglob("*") if path.is_file() and path.stat().st_size
    ]
    file = luck.choice(sorted(files))
    data = bytearray(file.read_bytes())
    if luck.random() < 0.5:
        del data[luck.randrange(len(data)) :]
    else:
        data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
    file.write_bytes(data)
    try:
        storage = opened(tmp_path / "rows")
        storage.validate()
    except (ValueError, KeyError, TypeError, OSError, RuntimeError):
        return
    right(storage[:]) if len(storage) else None
