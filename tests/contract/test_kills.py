"""A writer is killed, or the power is cut, at any moment: what it wrote is there up to some step.

A cut of the power is simulated: of each page, or of a smaller part, chance decides which of its contents
since `flush()` is on disk.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import writers
from contract.make import DISCOUNT, make
from contract.model import Model, assert_folded
from contract.steps import Transition, rows
from contract.writers import LANES, Script, assert_kept, found, opened, write_on, writing

import trl_storages

pytestmark = [
    pytest.mark.requirement("persistence"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]

PACKAGE = str(Path(trl_storages.__file__).parent)
STEPS, MANY_STEPS = 12, 200
PAGE = 4096


def check_draws(storage, lanes: list[list[Transition]]) -> None:
    """Folds over three steps are those of the episodes that are there."""
    if not any(lanes):
        assert not storage.can_sample()
        return
    model = Model(LANES, max(len(steps) for steps in lanes))
    for step in [step for steps in lanes for step in steps]:
        model.add(step)
    assert_folded(storage.sample(32), model, 3, DISCOUNT, layout=writers.LAYOUT)


def next_start(lanes: list[list[Transition]]) -> int:
    """An id that was not given yet, whatever was lost."""
    return max([0, *(step.id % (1 << 20) for steps in lanes for step in steps)]) + 1000


def kill_and_reopen(path: Path, times: int, seed: int) -> None:
    luck = random.Random(seed)
    opened(path, STEPS).close()
    lanes: list[list[Transition]] = [[] for _ in range(LANES)]
    for number in range(times):
        script = Script(luck.random(), next_start(lanes), luck.choice([1, 7, STEPS]))
        with writing(path, STEPS, script) as writer:
            writer.wait_for(luck.randint(1, 30))
            time.sleep(luck.uniform(0, 0.002))
        written = writer.num_written
        sure = [old + new for old, new in zip(lanes, script.until(written), strict=True)]
        storage = opened(path, STEPS)
        lanes = found(storage)
        assert_kept(lanes, sure, script.block(written), STEPS)
        storage.validate()
        check_draws(storage, lanes)
        # Other writes follow.
        write_on(storage, Script(number, next_start(lanes)), lanes, luck.randint(0, 6))
        assert found(storage) == [steps[-STEPS:] for steps in lanes]
        check_draws(storage, found(storage))
        storage.close()


def test_a_writer_that_is_killed(tmp_path, layout):
    kill_and_reopen(tmp_path / "rows", 10, 0)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(10))
def test_a_writer_that_is_killed_often(tmp_path, seed, layout):
    kill_and_reopen(tmp_path / "rows", 100, seed)


def killed(path: Path, act: Callable[[Any], Any] | None, at_line: int) -> bool:
    """Whether a process is killed before this line of an operation, or of opening; or is done before."""
    if not (pid := os.fork()):
        torch.set_num_threads(1)
        storage = None if act is None else opened(path, STEPS)
        lines = count(1)

        def trace(frame: Any, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            if event == "line" and next(lines) == at_line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        if act is None:
            opened(path, STEPS)
        else:
            act(storage)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status > 0


OPERATIONS: dict[str, Callable[..., Any] | None] = {
    "open": None,
    "extend": lambda it, data, dump: it.extend(data),
    "flush": lambda it, data, dump: it.flush(),
    "end": lambda it, data, dump: it.end_episodes(),
    "empty": lambda it, data, dump: it.empty(),
    "keep": lambda it, data, dump: it.empty(keep_steps=3),
    "load": lambda it, data, dump: it.loads(dump),
    "close": lambda it, data, dump: it.close(),
}


def kill_at_lines(path: Path, name: str, first: int, step: int) -> int:
    """Kills an operation at every so many lines; returns how many points that were."""
    script, lanes = Script(3), [[], []]
    storage = opened(path / "before", STEPS)
    write_on(storage, script, lanes, 2)
    storage.dumps(path / "dump")
    dumped = [steps[-STEPS:] for steps in lanes]
    write_on(storage, Script(4, next_start(lanes)), lanes, 4)
    storage.close()
    before, block = [steps[-STEPS:] for steps in lanes], Script(5, next_start(lanes)).block(0)
    after = {"empty": [[], []], "keep": [steps[-3:] for steps in before], "load": dumped}
    data = torch.stack([rows(steps, writers.LAYOUT) for steps in block])
    act = partial(OPERATIONS[name], data=data, dump=path / "dump") if OPERATIONS[name] else None
    num_points, copied = 0, path / "copy"
    shutil.copytree(path / "before", copied)
    while killed(copied, act, first + num_points * step):
        num_points += 1
        storage = opened(copied, STEPS)
        lanes = found(storage)
        if name == "extend":
            assert_kept(lanes, before, block, STEPS)
        else:
            assert lanes in (before, after.get(name, before))
        storage.validate()
        check_draws(storage, lanes)
        write_on(storage, Script(num_points, next_start(lanes)), lanes, 2)
        assert found(storage) == [steps[-STEPS:] for steps in lanes]
        storage.close(keep=False)
        shutil.copytree(path / "before", copied)
    return num_points


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_killed_at_some_lines(tmp_path, name, layout):
    assert kill_at_lines(tmp_path, name, 1 + [*OPERATIONS].index(name), 120)


@pytest.mark.search
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_killed_at_every_line(tmp_path, name, layout):
    assert kill_at_lines(tmp_path, name, 1, 1) > 20


def after_cut(moments: list[Path], to: Path, luck: random.Random) -> Path:
    """Makes what a cut of the power may leave, out of copies from the flush until now."""
    shutil.copytree(luck.choice(moments), to)
    size, newest = luck.choice([24, 64, 512, PAGE]), luck.choice([0.0, 0.2, 0.5, 0.9])
    for file in to.glob("rows.*"):
        *older, data = [(moment / file.name).read_bytes() for moment in moments]
        chosen = bytearray(data)
        for start in range(0, len(data), size):
            if luck.random() > newest:
                chosen[start : start + size] = luck.choice([*older, data])[start : start + size]
        file.write_bytes(chosen)
    return to


def cut_the_power(path: Path, seed: int, flush_at: int, num_moments: int) -> None:
    """Opens copies of a directory from right after a flush, and from the middle of later writes."""
    luck, script = random.Random(seed), Script(seed)
    sure, num_checked = script.until(flush_at + 1), 0
    opened(path, MANY_STEPS).close()
    with writing(path, MANY_STEPS, script, flush_at=flush_at) as writer:
        writer.wait_until_stopped()
        moments: list[Path] = []
        for number in range(num_moments):
            moments.append(Path(shutil.copytree(path, path.with_name(f"now {number}"))))
            unsure = [steps[len(sure[0]) :] for steps in script.until(writer.num_written + 1)]
            cut = after_cut(moments, path.with_name(f"cut {number}"), luck)
            before = Path(shutil.copytree(cut, path.with_name(f"before {number}")))
            opened(cut, MANY_STEPS)
            # Again while it recovers.
            again = after_cut([before, cut], path.with_name(f"again {number}"), luck)
            for copied in (before, again):
                storage = opened(copied, MANY_STEPS)
                lanes = found(storage)
                num_checked += assert_kept(lanes, sure, unsure, MANY_STEPS)
                storage.validate()
                check_draws(storage, lanes)
                write_on(storage, Script(number, next_start(lanes)), lanes, 3)
                assert found(storage) == [steps[-MANY_STEPS:] for steps in lanes]
                storage.close()
            writer.go_on()
            time.sleep(luck.uniform(0, 0.003))
            writer.stop()
    assert num_checked


@pytest.mark.parametrize("flush_at", [0, 30, 100])
def test_the_power_is_cut(tmp_path, flush_at, layout):
    cut_the_power(tmp_path / "rows", 0, flush_at, 6)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(30))
def test_the_power_is_cut_often(tmp_path, seed, layout):
    cut_the_power(tmp_path / "rows", seed, [0, 20, 40, 100][seed % 4], 40)


def test_a_dump_that_is_killed_leaves_the_one_before(tmp_path):
    """It is put in the place of an earlier one."""
    luck, lanes = random.Random(0), [[], []]
    storage = opened(tmp_path / "rows", STEPS)
    write_on(storage, Script(0), lanes, 5)
    kept = [[steps[-STEPS:] for steps in lanes]]
    storage.dumps(dump := tmp_path / "dump")
    write_on(storage, Script(1, next_start(lanes)), lanes, 5)
    kept.append([steps[-STEPS:] for steps in lanes])
    left = []
    for _ in range(8):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            torch.set_num_threads(1)
            os.write(writing, b"!")
            storage.dumps(dump)
            os._exit(0)
        os.read(reading, 1)
        time.sleep(luck.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
        again = make("n-step", lanes=LANES, size=LANES * STEPS)
        again.loads(dump)
        left.append(kept.index(found(again)))
    assert left == sorted(left)
    storage.dumps(dump)
    again.loads(dump)
    assert found(again) == kept[1]
