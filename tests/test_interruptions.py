"""A write in memory that is interrupted at any line is there as a whole or not at all."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensordict
import torch
import torchrl
from interrupter import Interrupter
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

import trl_storages
from trl_storages import EpisodeWriter, ERESampler, PackedStorage, PERSampler, ReplayStorage
from trl_storages.gym import GymRecorder
from trl_storages.interrupts import finish
from trl_storages.kernels.device import sharing
from trl_storages.rows import tensors_of
from trl_storages.writing import writer

# Batches are made by hand, without a draw that stamps them.
pytestmark = pytest.mark.filterwarnings("ignore:the batch lacks 'priority_stamp'")

Write = Callable[[], object]
SIZE = 24
# Lines at which each write is interrupted; all of them with HYPOTHESIS_PROFILE=search.
POINTS = 10**6 if os.environ.get("HYPOTHESIS_PROFILE") == "search" else 12
CODE = trl_storages, torchrl, tensordict


def steps(lanes: torch.Tensor, numbers: torch.Tensor, **more: torch.Tensor) -> TensorDict:
    """Transitions of these lanes and step numbers, int64 [...]; an episode ends every few steps."""
    done = ((numbers + lanes) % 5 == 4)[..., None]
    return TensorDict(
        {
            "observation": torch.stack([numbers, lanes], -1).float(),
            "action": numbers * 10 + lanes,
            "next": {
                "observation": torch.stack([numbers + 1, lanes], -1).float(),
                "reward": numbers[..., None].float() + 1,
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
            **more,
        },
        batch_size=numbers.shape,
    )


def block(storage: ReplayStorage, num_steps: int, lanes: list[int] | None = None) -> TensorDict:
    """The next steps of the lanes, `[L, T]`, or `[T]` of a single one."""
    which = torch.arange(storage.episodes.num_envs) if lanes is None else torch.tensor(lanes)
    numbers = storage.episodes.num_steps_written[which, None] + torch.arange(num_steps)
    data = steps(which[:, None].expand_as(numbers), numbers)
    return data[0] if storage.episodes.num_envs == 1 else data


def gym_step(storage: ReplayStorage, convert=lambda value: value) -> tuple:
    """The arguments of `record` for the next step."""
    data = block(storage, 1)
    data = data[:, 0] if data.ndim == 2 else data
    row = {key: value.numpy() for key, value in tensors_of(data).items()}
    flags = [row["next", name][:, 0] for name in ("reward", "terminated", "truncated")]
    flags[0] = convert(flags[0])
    return row["observation"], row["action"], *flags, {}, row["next", "observation"]


def make(num_envs: int = 1, *, rows=PackedStorage, mode: str | None = None) -> ReplayStorage:
    return ReplayStorage(
        storage=rows(SIZE),
        writer=EpisodeWriter(
            num_envs, track_generations=rows is LazyTensorStorage, on_gap="ignore"
        ),
        sampler=ERESampler(base=PERSampler(SIZE, beta=1.0), c_min=6, updates_per_phase=5),
        recorder=GymRecorder(num_envs, autoreset_mode=mode),
        batch_size=8,
    )


def filled(kind: str, **options) -> ReplayStorage:
    """A storage with priorities, of one lane before it is full, or of two over the end of the ring."""
    storage = make(1 if kind == "one lane" else 2, **options)
    for _ in range(17):
        storage.extend(block(storage, 1))
    if kind == "unequal lanes":
        storage.extend(block(storage, 1, [1]), lanes=[1])
    prioritise(storage)()
    return storage


KINDS = "one lane", "two lanes", "unequal lanes"


# Each prepares a write, and returns what does it.


def prioritise(storage: ReplayStorage) -> Write:
    slots = storage.episodes.slots_by_age(torch.arange(len(storage)))
    return partial(storage.update_priority, slots, slots % 7 + 0.5)


def report(storage: ReplayStorage) -> Write:
    slots = storage.episodes.slots_by_age(torch.arange(min(6, len(storage))))
    drawn = {"index": slots, "td_error": slots.float() + 9, "priority_weight": slots}
    batch = TensorDict(drawn, slots.shape)
    return partial(storage.update_tensordict_priority, batch)


def with_priorities(storage: ReplayStorage) -> Write:
    data = block(storage, 3)
    data["td_error"] = data["action"].float() + 20
    # Rows have no such entry.
    storage.writer.keys = [*storage.storage.layout.keys]
    return partial(storage.extend, data)


def record(storage: ReplayStorage) -> Write:
    storage.record(*gym_step(storage))
    return partial(storage.record, *gym_step(storage))


def record_ends(storage: ReplayStorage) -> Write:
    """The last step of an episode, and what may be gymnasium's reset step."""
    storage.record(*gym_step(storage))
    step = [*gym_step(storage)]
    step[3] = np.ones_like(step[3])
    return partial(storage.record, *step)


def overwrite(storage: ReplayStorage) -> Write:
    rows = storage[:]
    rows["action"] = rows["action"] + 1000
    rows["observation"] = rows["observation"] - 1000
    return partial(storage.__setitem__, slice(None), rows)


def overwrite_in_place(storage: ReplayStorage) -> Write:
    slots = storage.episodes.slots_by_age(torch.arange(5))
    rows = storage.storage.get(slots)
    rows["action"] = rows["action"] + 1000
    rows["observation"] = rows["observation"] - 1000
    return partial(storage.storage.set, slots, rows, set_cursor=False)


@cache
def dumped(num_envs: int) -> tuple[dict, Path]:
    """Another storage, as it is saved."""
    storage, path = make(num_envs), Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    for _ in range(5):
        storage.extend(block(storage, 2))
    prioritise(storage)()
    storage.dumps(path)
    return storage.state_dict(), path


def draw(storage: ReplayStorage) -> Write:
    """Arranges the priorities lane by lane, as windows are drawn for the first time."""
    storage.sampler.begin_phase(2)
    return storage.sample


def of_one_step(storage: ReplayStorage) -> TensorDict:
    return block(storage, 1)[..., 0].clone()


WRITES: dict[str, Callable[[ReplayStorage], Write]] = {
    "extend": lambda storage: partial(storage.extend, block(storage, 3)),
    "extend over all": lambda storage: partial(storage.extend, block(storage, SIZE + 5)),
    "extend with priorities": with_priorities,
    "add": lambda storage: partial(storage.add, of_one_step(storage)),
    "record": record,
    "record anything": lambda storage: partial(
        storage.record, *gym_step(storage, torch.from_numpy)
    ),
    "record ends": record_ends,
    "end episodes": lambda storage: storage.end_episodes,
    "empty": lambda storage: storage.empty,
    "empty but some": lambda storage: partial(storage.empty, keep_steps=3),
    "report": report,
    "prioritise": prioritise,
    "rescale": lambda storage: partial(setattr, storage.sampler.base, "alpha", 0.9),
    "overwrite": overwrite,
    "overwrite in place": overwrite_in_place,
    "load_state_dict": lambda storage: partial(
        storage.load_state_dict, dumped(storage.episodes.num_envs)[0]
    ),
    "loads": lambda storage: partial(storage.loads, dumped(storage.episodes.num_envs)[1]),
    "draw": draw,
}


def picture(storage: ReplayStorage) -> dict:
    """All that later writes and draws depend on."""
    episodes, seen = storage.episodes, {}
    live = episodes.slots_by_age(torch.arange(len(episodes)))
    if len(live):
        seen |= {str(key): value for key, value in tensors_of(storage.storage.get(live)).items()}
    behind, ahead = episodes.extent(live)
    sampler, recorder = storage.sampler.base, storage._recorder
    return seen | {
        "behind": behind,
        "ahead": ahead,
        "whole": episodes.is_whole(live),
        "finished": episodes.is_finished(live),
        "open": episodes.is_open.clone(),
        "cursors": episodes.num_steps_written.clone(),
        "trajectories": storage.writer._lanes.trajectory.clone(),
        "size": [len(storage), storage.write_count, storage.writer._cursor],
        "priorities": sampler.priorities,
        "alpha": [sampler.alpha, sampler._table._alpha, sampler.default_priority],
        "ended": recorder.state_dict()["ended"],
        "watched": str(recorder._last),
        # No entry of a next observation is lost, and none is freed twice.
        "apart": getattr(storage.storage, "side_nbytes", 0),
    }


def is_same(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        for name, value in one.items()
    )


def check(storage: ReplayStorage) -> None:
    """Raises if parts of the storage do not fit each other."""
    storage.validate()
    storage.sampler.base.validate()
    live = torch.zeros(SIZE, dtype=torch.bool)
    live[storage.episodes.slots_by_age(torch.arange(len(storage.episodes)))] = True
    assert torch.equal(storage.sampler.base.priorities.isfinite(), live)


def go_on(storage: ReplayStorage) -> None:
    before = storage.episodes.num_steps_written.clone()
    storage.extend(block(storage, 1))
    storage._recorder.reset()
    storage.record(*gym_step(storage))
    storage.sample()
    report(storage)()
    assert torch.equal(storage.episodes.num_steps_written, before + 2)
    check(storage)


def interrupt(
    start: ReplayStorage,
    prepare: Callable[[ReplayStorage], Write],
    error: type[BaseException] = KeyboardInterrupt,
) -> None:
    """Interrupts a write at many of its lines, each time from the same start."""
    done, counter = copy.deepcopy(start), Interrupter(10**9, *CODE)
    write = prepare(done)
    before = picture(done)
    with counter:
        write()
    num_lines, after = 10**9 - counter.left, picture(done)
    points = np.unique(np.linspace(1, num_lines, min(POINTS, num_lines)).astype(int))
    for place, line in enumerate(points.tolist()):
        storage = copy.deepcopy(start)
        write = prepare(storage)
        with suppress(error), Interrupter(line, *CODE, error=error):
            write()
        now = picture(storage)
        assert is_same(now, before) or is_same(now, after), f"line {line} of {num_lines}"
        check(storage)
        if place % 4 == 1:
            go_on(storage)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
def test_writes(name, kind):
    interrupt(filled(kind), WRITES[name])


def flat(storage: ReplayStorage) -> Write:
    """Rows of two environments in any order, of one more than of the other."""
    data = block(storage, 4)
    data["collector", "traj_ids"] = torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2]])
    data["next", "done"] = data["next", "terminated"] = torch.zeros(2, 4, 1, dtype=torch.bool)
    # Rows have no such entry.
    storage.writer.keys = [*storage.storage.layout.keys]
    return partial(storage.extend, data.reshape(-1)[[0, 4, 1, 2, 5, 3]])


def some_that_follow(storage: ReplayStorage) -> Write:
    """Overwrites every other row, which joins some of them with their neighbours, and parts others."""
    slots = storage.episodes.slots_by_age(torch.arange(0, 12, 2))
    rows = storage.storage.get(slots)
    rows["next", "observation"][:3] = rows["observation"][:3] + torch.tensor([1, 0])
    rows["observation"][2:] += torch.tensor([0.25, 0])
    return partial(storage.__setitem__, slots, rows)


STORED_ONCE = {"extend": WRITES["extend"], "flat": flat, "overwrite some": some_that_follow}


def half_apart(lanes: torch.Tensor, numbers: torch.Tensor) -> TensorDict:
    """Steps of which those of the first lane have next observations of their own."""
    data = followed(lanes, numbers)
    data["next", "observation"][..., 0] += (lanes == 0) * 0.5
    return data


followed = steps


@pytest.mark.parametrize("name", STORED_ONCE)
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_next_observations_that_are_stored_once(monkeypatch, backend, name):
    """In tensor operations at every line that links rows."""
    monkeypatch.setenv("TRL_STORAGES_BACKEND", backend)
    monkeypatch.setitem(globals(), "steps", half_apart)
    if backend == "torch":
        monkeypatch.setitem(globals(), "CODE", (str(sharing.__file__),))
        monkeypatch.setitem(globals(), "POINTS", 10**6)
    interrupt(filled("two lanes", rows=partial(PackedStorage, share_next=True)), STORED_ONCE[name])


@pytest.mark.parametrize("name", ["record", "record anything", "record ends"])
def test_steps_after_an_end(name):
    """What is remembered of the loop goes with the step: lanes that ended are only reset then."""

    def prepare(storage: ReplayStorage) -> Write:
        record_ends(storage)()
        return WRITES[name](storage) if name == "record ends" else later(storage)

    def later(storage: ReplayStorage) -> Write:
        convert = torch.from_numpy if name == "record anything" else (lambda value: value)
        step = [*gym_step(storage, convert)]
        # Of one lane only.
        step[3] = np.array([True, False])
        return partial(storage.record, *step)

    interrupt(filled("two lanes", mode="NextStep"), prepare)


@pytest.mark.parametrize("name", ["extend", "extend over all", "add", "empty", "empty but some"])
def test_rows_in_a_storage_of_torchrl(name):
    interrupt(filled("unequal lanes", rows=LazyTensorStorage), WRITES[name])


@pytest.mark.parametrize("name", ["extend", "record", "overwrite", "empty but some"])
def test_other_errors_that_come_from_outside(name):
    """Such as those of signal handlers and timeouts."""
    interrupt(filled("one lane"), WRITES[name], error=TimeoutError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["extend", "record"])
def test_an_error_that_comes_again(name, kind):
    """As of a process that has no memory left: samplers hear of such rows with the next write.

    Without those that come again within the kernels, halfway through a write of rows.
    """
    parts = [str(path) for path in Path(trl_storages.__file__).parent.iterdir()]
    code = [part for part in parts if not part.endswith("kernels")]
    start = filled(kind)
    counter = Interrupter(10**9, *code)
    write = WRITES[name](copy.deepcopy(start))
    with counter:
        write()
    num_lines = 10**9 - counter.left
    for line in np.unique(np.linspace(1, num_lines, min(2 * POINTS, num_lines)).astype(int)):
        storage = copy.deepcopy(start)
        write = WRITES[name](storage)
        interrupter = Interrupter(line, *code, error=MemoryError, lasts=True)
        with (
            suppress(MemoryError),
            mock.patch.object(writer, "complete", interrupter.resumed_by(writer.complete)),
            interrupter,
        ):
            write()
        go_on(storage)


def test_the_first_write():
    interrupt(make(2), WRITES["extend"])


class Forgetful(PERSampler):
    """Fails to hear of rows: of some calls by errors that are listed."""

    errors = ()

    def mark_update(self, *args, **named):
        if self.errors:
            error, *self.errors = self.errors
            raise error
        super().mark_update(*args, **named)


@pytest.mark.parametrize(
    "errors", [[MemoryError] * 2, [KeyboardInterrupt, MemoryError, MemoryError]]
)
@pytest.mark.parametrize("emptied", [None, 0, 2])
def test_rows_that_samplers_could_not_be_told_of(errors, emptied):
    """They are told of them with the next write, unless the rows are gone by then."""
    sampler = Forgetful(SIZE)
    storage = ReplayStorage(storage=PackedStorage(SIZE), sampler=sampler, batch_size=8)
    storage.extend(block(storage, 4))
    sampler.__dict__["errors"] = [*errors]
    with pytest.raises(errors[0]):
        storage.extend(block(storage, 6))
    assert len(storage) == 10
    if emptied is not None:
        storage.empty(keep_steps=emptied)
    storage.extend(block(storage, 1))
    storage.validate()
    assert len(storage) == 11 if emptied is None else emptied + 1


class TestFinish:
    def test_interrupts_may_come_again(self):
        calls = []

        def act():
            calls.append("act")
            if len(calls) < 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            finish(act)
        assert calls == ["act"] * 6

    def test_what_is_refused_is_raised_once(self):
        def refuse():
            raise ValueError("it must be something else")

        with pytest.raises(ValueError, match="something else") as raised:
            finish(refuse)
        assert raised.value.__context__ is None

    def test_an_error_of_its_own_after_an_interrupt(self):
        errors = [KeyboardInterrupt, OSError, OSError]

        def act():
            raise errors.pop(0)

        with pytest.raises(KeyboardInterrupt):
            finish(act)
        assert not errors

    def test_results_are_returned(self):
        assert finish(lambda: 3) == 3
