"""Readers beside a process that writes and evicts all the time: every batch is as if it were alone."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from contract import writers
from contract.make import DISCOUNT, library, make
from contract.model import assert_folds, folded
from contract.steps import Transition, ids_of, write
from contract.writers import (
    LANES,
    Script,
    assert_kept,
    found,
    opened,
    prefer_one,
    write_on,
    writing,
)
from torchrl.data import RandomSampler

pytestmark = [
    pytest.mark.requirement("disk-workers"),
    pytest.mark.requirement("persistence"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*was not closed:RuntimeWarning"),
]

STEPS, PATIENCE = 12, 60


class Checker:
    """Checks batches by what the writer writes.

    Args:
        script: what that is.
        n_step: of the batches.
    """

    def __init__(self, script: Script, n_step: int) -> None:
        self._script, self._n_step, self._num_blocks = script, n_step, 0
        self._lanes: list[list[Transition]] = [[] for _ in range(LANES)]
        self._places: dict[int, int] = {}

    def look(self, num_blocks: int) -> None:
        """Learns what is written up to a block."""
        for number in range(self._num_blocks, num_blocks):
            for lane, steps in zip(self._lanes, self._script.block(number), strict=True):
                self._places |= {step.id: len(lane) + place for place, step in enumerate(steps)}
                lane += steps
        self._num_blocks = max(num_blocks, self._num_blocks)

    def stretch(self, first: int, num_steps: int) -> list[Transition]:
        """The step of this id and those after it."""
        place = self._places[first]
        return self._lanes[first // (1 << 20)][place : place + num_steps]

    def check(self, batch: Any, newest: list[int]) -> None:
        """Checks each row, its fold over the steps after it, and its goal.

        Args:
            batch: a batch.
            newest: the newest id of each lane, before it was drawn.
        """
        windows, goals = [], []
        lengths = batch.get("steps_to_next_obs", torch.ones(len(batch))).flatten().int().tolist()
        for row, num_steps in zip(batch, lengths, strict=True):
            number, goal = int(ids_of(row)), row["desired_goal"]
            steps = self.stretch(number, num_steps)
            assert len(steps) == num_steps
            assert len({step.first for step in steps}) == 1
            last = steps[-1]
            # A window is as long as it can be.
            assert num_steps == self._n_step or last.end or last.id >= newest[last.lane]
            if is_relabelled := goal[1] == 1:
                # That of a step which came after it in its episode.
                lender = self.stretch(int(goal[0]) - 1, 1)[0]
                assert lender.first == steps[0].first
                assert lender.id >= number
            windows.append(steps)
            goals.append(goal if is_relabelled else None)
        assert_folds(batch, *folded(windows, DISCOUNT, goals, layout=writers.LAYOUT))


def read_beside_a_writer(path: Any, kind: str, seconds: float) -> None:
    opened(path, STEPS, kind).close()
    script = Script(0)
    checker = Checker(script, 1 if kind == "hindsight" else 3)
    num_relabelled = num_overtaken = 0
    with writing(path, STEPS, script, kind) as writer:
        reader = opened(path, STEPS, kind, mode="r")
        sizes = {"lanes": LANES, "size": LANES * STEPS, "batch_size": 16}
        copy = make(kind, layout=writers.LAYOUT, **sizes)
        writer.wait_for(1)
        begin, first = time.monotonic(), writer.num_written
        # Until rows were evicted while they were drawn.
        while time.monotonic() < begin + seconds or num_overtaken < 10:
            assert time.monotonic() < begin + PATIENCE
            before = writer.num_written
            batch = reader.sample(32)
            between = writer.num_written
            copy.load_state_dict(reader.state_dict())
            saved = found(copy)
            lanes = found(reader)
            after = writer.num_written + 1
            checker.look(after)
            # What was written before is there, but for what was evicted since.
            parts = [
                [[step for block in blocks for step in block[lane]] for lane in range(LANES)]
                for blocks in (
                    [script.block(number) for number in range(max(between - 20, 0), between)],
                    [script.block(number) for number in range(between, after)],
                )
            ]
            for each in (lanes, saved):
                assert_kept(each, *parts, STEPS)
            newest = [steps[-1].id for steps in script.block(before - 1)]
            checker.check(batch, newest)
            num_overtaken += STEPS <= before < between
            num_relabelled += int((batch["desired_goal"][:, 1] == 1).sum())
        # The writer came around many times.
        assert writer.num_written - first > 10 * STEPS
    assert (num_relabelled > 0) == (kind in ("hindsight", "all"))


@pytest.mark.parametrize("kind", ["n-step", "hindsight", "all"])
def test_a_reader_beside_a_writer(tmp_path, kind, layout):
    read_beside_a_writer(tmp_path / "rows", kind, 1)


@pytest.mark.search
@pytest.mark.parametrize("kind", ["n-step", "hindsight", "all"])
def test_a_reader_beside_a_writer_for_long(tmp_path, kind, layout):
    read_beside_a_writer(tmp_path / "rows", kind, 60)


class TestOneAtATime:
    """A reader in the process of the writer."""

    @pytest.mark.parametrize("kind", ["uniform", "prioritized"])
    def test_it_follows(self, tmp_path, kind, monkeypatch):
        if kind == "uniform":  # where the system does not say which boot this is
            make()  # Numba reads files too, as it begins.
            monkeypatch.setattr(Path, "read_text", Mock(side_effect=OSError))
        storage, reader = opened(tmp_path, STEPS, kind), None
        written: list[list[Transition]] = [[] for _ in range(LANES)]
        for number, num_blocks in enumerate((1, 2, 9, 1)):
            write_on(storage, Script(number, 1000 * number), written, num_blocks)
            reader = reader or opened(tmp_path, STEPS, kind, mode="r")
            drawn = ids_of(reader.sample(64)).tolist()
            assert found(reader) == [steps[-STEPS:] for steps in written]
            assert reader[int(reader.episodes.live_slots()[0])].batch_size == ()
            assert {*drawn} <= {step.id for steps in written for step in steps[-STEPS:]}
        storage.empty(keep_steps=3)
        assert found(reader) == [steps[-3:] for steps in written]
        storage.empty()
        assert not reader.can_sample()
        with pytest.raises(RuntimeError, match="empty"):
            reader.sample()
        write_on(storage, Script(0, 9000), written := [[], []], 1)
        # Without a word on priorities, which are not the reader's to report.
        assert {len(reader.sample()) for _ in range(1001)} == {16}
        storage.close()
        assert found(reader) == written

    def test_it_follows_the_writer_of_a_copy_that_it_has_recovered(self, tmp_path):
        storage, written = opened(tmp_path / "rows", STEPS), [[], []]
        write_on(storage, Script(0), written, 9)
        storage.flush()
        shutil.copytree(tmp_path / "rows", tmp_path / "copy")
        reader = opened(tmp_path / "copy", STEPS, mode="r")
        assert found(reader) == [steps[-STEPS:] for steps in written]
        write_on(opened(tmp_path / "copy", STEPS), Script(1, 9000), written, 2)
        assert found(reader) == [steps[-STEPS:] for steps in written]

    def test_reader_that_opens_beside_a_writer_does_not_check_each_row(self, tmp_path):
        storage = opened(tmp_path, STEPS)
        write_on(storage, Script(0), [[], []], 9)
        (file,) = tmp_path.glob("rows.*")
        observation = storage[:]["observation"][5].numpy().tobytes()
        with file.open("r+b") as rows:
            rows.seek(rows.read().index(observation))
            rows.write(bytes(len(observation)))
        reader = opened(tmp_path, STEPS, mode="r")
        assert len(reader.sample(64)) == 64
        with pytest.raises(ValueError, match="damaged"):
            reader.validate()

    @pytest.mark.parametrize("by_epoch", [False, True])
    def test_it_waits_if_the_storage_is_emptied_before_a_draw(self, tmp_path, by_epoch):
        storage, written = opened(tmp_path, STEPS, "uniform"), [[], []]
        write_on(storage, Script(0), [[], []], 9)

        class Emptying(library.UniformSampler):
            def draw(self, *given):
                if not written[0]:
                    storage.empty()
                return super().draw(*given)

        class Refilling(threading.Event):
            def wait(self, timeout=None):
                write_on(storage, Script(1, 9000), written, 2)

        parts = {"sampler": Emptying(by_epoch), "batch_size": 8}
        reader = library.ReplayStorage.open(tmp_path, mode="r", **parts)
        drawn = ids_of(reader.sample(wait=True, cancel_event=Refilling())).tolist()
        assert {*drawn} <= {step.id for steps in written for step in steps}

    def test_custom_sampler_that_draws_an_evicted_slot_raises(self, tmp_path):
        """But not what was gone before."""
        storage, written = opened(tmp_path, STEPS, "uniform"), [[], []]
        write_on(storage, Script(0), written, 9)

        class Oldest(RandomSampler):
            def sample(self, rows, batch_size):
                slots = rows.episodes.slots_by_age()[:batch_size]
                storage.empty(keep_steps=kept)
                return slots, {}

        parts = {"sampler": Oldest(), "batch_size": 4}
        reader, kept = library.ReplayStorage.open(tmp_path, mode="r", **parts), 3
        drawn = ids_of(reader.sample()).tolist()
        assert {*drawn} <= {step.id for steps in written for step in steps[-kept:]}
        slots, kept = storage.episodes.slots_by_age(), 1
        reader.sampler.sample = lambda *_: (slots, {})
        storage.empty(keep_steps=kept)
        with pytest.raises(IndexError, match="valid"):
            reader.sample()

    def test_it_draws_by_the_priorities_of_the_writer(self, tmp_path):
        storage, written = opened(tmp_path, STEPS, "prioritized"), [[], []]
        write_on(storage, Script(0), written, 9)
        reader = opened(tmp_path, STEPS, "prioritized", mode="r")
        for _ in range(3):
            preferred = prefer_one(storage)
            assert {*ids_of(reader.sample(64)).tolist()} == {preferred}
        # New rows have the largest, also before the writer looks at them.
        storage.update_priority(storage.episodes.live_slots(), 2e9)
        write_on(storage, Script(1, 9000), written, 1)
        assert torch.equal(reader.sampler.priorities, storage.sampler.priorities)

    def test_reader_takes_in_priorities_once_in_refresh_ms(self, tmp_path):
        storage, written = opened(tmp_path, STEPS, "prioritized"), [[], []]
        write_on(storage, Script(0), written, 9)
        reader = opened(tmp_path, STEPS, "prioritized", mode="r")
        reader.sampler.refresh_ms = 1e9
        reader.sample()
        preferred = prefer_one(storage)
        assert len({*ids_of(reader.sample(64)).tolist()}) > 1
        reader.sampler.refresh_ms = 0
        assert {*ids_of(reader.sample(64)).tolist()} == {preferred}

    def test_it_writes_nothing(self, tmp_path):
        storage, written = opened(tmp_path, STEPS, "prioritized"), [[], []]
        write_on(storage, Script(0), written, 5)
        state = storage.state_dict()
        files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        reader = opened(tmp_path, STEPS, "prioritized", mode="r")
        batch = reader.sample()
        batch["td_error"] = torch.ones(16)
        for act in (
            lambda: write(reader, Script(1, 1000).block(0)),
            lambda: reader.update_tensordict_priority(batch),
            lambda: reader.load_state_dict(state),
            reader.empty,
            reader.end_episodes,
        ):
            with pytest.raises(RuntimeError, match="reading"):
                act()
        reader.close()
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == files
        assert found(storage) == [steps[-STEPS:] for steps in written]
