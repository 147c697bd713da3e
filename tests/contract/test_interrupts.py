"""Interrupts by real signals, after which the loop continues, and workers that are killed."""

import gc
import multiprocessing
import random
import signal
import time

import numpy as np
import pytest
import torch
from contract.make import assemble, library
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals"),
    pytest.mark.filterwarnings("ignore:a transition does not begin"),
]
NUM_SIGNALS = [200, pytest.param(20_000, marks=pytest.mark.search)]


@pytest.fixture(autouse=True)
def _no_finalizers_of_earlier_tests():
    """Collects garbage before a test: Python only reports an interrupt within a finalizer."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Interrupter:
    """Calls a function, interrupted at a random moment."""

    def __init__(self, example):
        self.random, self.count, self._is_armed = random.Random(0), 0, False
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            example()
            times.append(time.perf_counter() - begin)
        self._most = 2.5 * sorted(times)[10]

    def _interrupt(self, *_):
        if self._is_armed:
            raise KeyboardInterrupt

    def __call__(self, function, *arguments):
        """Returns whether the call has returned."""
        previous = signal.signal(signal.SIGALRM, self._interrupt)
        try:
            try:
                self._is_armed = True
                delay = max(self.random.random() * self._most, 1e-6)
                signal.setitimer(signal.ITIMER_REAL, delay)
                function(*arguments)
            finally:
                self._is_armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self._is_armed = False
            self.count += 1
            return False
        finally:
            signal.signal(signal.SIGALRM, previous)
        return True


def transitions(storage):
    """Returns observations and next observations, `[2, N]`, and which rows begin an episode."""
    slots = storage.episodes.live_slots()
    rows = storage[slots]
    seen, after = rows["observation"].flatten(), rows["next", "observation"].flatten()
    return torch.stack([seen, after]), storage.episodes.num_before(slots) == 0, rows


def assert_episodes(storage):
    """Episodes begin where the row before was done, or does not lead to this one, and nowhere else."""
    (seen, after), begins, rows = transitions(storage)
    continues = (seen[1:] == after[:-1]) & ~rows["next", "done"].flatten()[:-1]
    assert torch.equal(begins[1:], ~continues)
    storage.validate()


def steps(first, num_steps=3, trajectory=None):
    observations = torch.arange(num_steps, dtype=torch.float64)[:, None] + first
    no = torch.zeros(num_steps, 1, dtype=torch.bool)
    following = {"observation": observations + 1, "reward": torch.ones(num_steps, 1)}
    rows = {"observation": observations, "next": {**following, "done": no, "terminated": no}}
    if trajectory is not None:
        rows["collector"] = {"traj_ids": torch.full((num_steps,), trajectory)}
    return TensorDict(rows, [num_steps])


@pytest.mark.parametrize("num_signals", NUM_SIGNALS)
@pytest.mark.parametrize("trajectory", [None, 7])
@pytest.mark.parametrize("device", ["cpu", "device"])
def test_interrupted_extend_splits_no_trajectory(num_signals, trajectory, device, monkeypatch):
    if device == "device":
        monkeypatch.setattr("trl_storages.storage.memory.HOSTS", ())
    storage = assemble(100_000, batch_size=4)
    blocks = (steps(3 * number, trajectory=trajectory) for number in range(10**9))
    call = Interrupter(lambda: storage.extend(next(blocks)))
    while call.count < num_signals:
        call(storage.extend, next(blocks))
    assert_episodes(storage)


@pytest.mark.parametrize("num_signals", NUM_SIGNALS)
def test_interrupted_record_with_next_step_resets_stores_real_steps_only(num_signals):
    """A step that was not stored is recorded again, as is a reset."""
    storage = library.UniformReplayStorage(
        Box(-1, 1e9, (1,), np.float64), Discrete(2), storage_size=10**5, autoreset_mode="NextStep"
    )
    call, real, number = Interrupter(lambda: len(storage)), [], 0

    def record(*step):
        storage.record(step[0], 0, 1.0, step[1], False, {}, step[0] + 1)

    call._most = 1e-4
    while call.count < num_signals:
        step = np.array([number], np.float64), number % 4 == 2
        is_reset = number % 4 == 3
        before, number = storage.episodes.cursors[0], number + 1
        while not call(record, *step) and storage.episodes.cursors[0] == before:
            pass
        real += [] if is_reset else [number - 1.0]
    assert transitions(storage)[0][0].tolist() == real


@pytest.mark.parametrize("num_signals", NUM_SIGNALS)
def test_interrupted_samples_with_prefetch_do_not_hang(num_signals):
    storage = assemble(1000, batch_size=32, prefetch=2)
    storage.extend(steps(0, 100))
    call = Interrupter(storage.sample)
    while call.count < num_signals:
        call(call.random.choice([storage.sample] * 9 + [storage.synchronize]))
    assert len(storage.sample()) == 32
    storage.shutdown()


def _record_when_told(storage, pipe):
    while pipe.recv():
        storage.extend(steps(0))
        pipe.send("written")


def _extend_forever(storage, pipe):
    while True:
        storage.extend(steps(0))
        pipe.send("written")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("num_signals", NUM_SIGNALS)
def test_interrupted_calls_of_a_shared_storage_release_its_lock(num_signals):
    storage = assemble(1000, batch_size=32)
    storage.extend(steps(0))
    storage.share().sample()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_record_when_told, args=(storage, theirs), daemon=True)
    worker.start()
    call = Interrupter(storage.sample)
    while call.count < num_signals:
        if not call(*call.random.choice([(storage.sample,), (storage.extend, steps(0))])):
            ours.send(True)
            assert ours.poll(20)
            ours.recv()
    ours.send(False)
    worker.join(20)


@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.search)])
def test_killed_worker_of_a_shared_storage_releases_its_lock(num_kills):
    storage = assemble(1000, batch_size=32)
    storage.extend(steps(0))
    storage.share().sample()
    context = multiprocessing.get_context("fork")
    for kill in range(num_kills):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_extend_forever, args=(storage, theirs), daemon=True)
        worker.start()
        for _ in range(20 + kill):
            assert ours.poll(20)
            ours.recv()
        # It is extending nearly all the time.
        worker.kill()
        worker.join()
        storage.extend(steps(0))
        storage.sample()
        storage.validate()
