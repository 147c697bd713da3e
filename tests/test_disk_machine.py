"""A directory against a plain model, over everything that may be done to it."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from disk.acts import end_episodes, flush, keep, load, prioritise, write
from disk.history import History
from disk.power import check_priorities
from disk.rows import KINDS, abandon, count_from, found, is_torn, kind, make, with_frames
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from trl_storages import ReplayStorage, UniformSampler

pytestmark = pytest.mark.requirement("persistence")


class DirectoryMachine(RuleBasedStateMachine):
    """One writer at a time, and a reader."""

    @initialize(
        stored=st.sampled_from([*KINDS]),
        num_lanes=st.integers(1, 3),
        steps=st.integers(1, 9),
        rest=st.integers(0, 2),
    )
    def make(self, stored, num_lanes, steps, rest):
        kind[0] = stored
        self._folder = tempfile.mkdtemp()
        self._path = Path(self._folder) / "rows"
        self._size, self._reader = num_lanes * steps + min(rest, num_lanes - 1), None
        self._history = History(num_lanes, self._size)
        self._rng = random.Random(0)
        count_from(1)
        torch.manual_seed(0)
        self._open()

    def teardown(self):
        kind[0] = "plain"
        if hasattr(self, "_storage"):
            abandon(self._storage)
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)

    def _open(self):
        self._storage = make(self._path, self._history.num_lanes, self._size, batch_size=5)
        self._look()

    def _do(self, act):
        act.do(self._storage)
        self._history = act.after
        self._look()

    def _look(self):
        if not any(self._history.cursors):
            return
        assert found(self._storage) == self._history.live
        check_priorities(self._storage)
        if len(self._storage):
            assert not is_torn(self._storage.sample()).any()
        if self._reader is not None:
            self._read()

    def _read(self):
        if len(self._storage):
            assert not is_torn(self._reader.sample()).any()
        else:
            with pytest.raises(RuntimeError, match="empty"):
                self._reader.sample()
        assert found(self._reader) == self._history.live

    @rule(num_steps=st.integers(1, 30))
    def write(self, num_steps):
        self._do(write(self._history, num_steps))

    @rule(num_steps=st.integers(1, 4), data=st.data())
    def write_some_lanes(self, num_steps, data):
        lanes = st.lists(st.integers(0, self._history.num_lanes - 1), min_size=1, unique=True)
        self._do(write(self._history, num_steps, sorted(data.draw(lanes))))

    @rule()
    def add_a_step(self):
        lanes = list(range(self._history.num_lanes))
        block = with_frames(self._history.block(1, lanes), self._storage)
        self._storage.add(block[:, 0] if len(lanes) > 1 else block[0, 0])
        self._history.write(block, lanes)
        self._look()

    @rule(num_steps=st.integers(0, 9))
    def empty(self, num_steps):
        self._do(keep(self._history, num_steps))

    @rule()
    def prioritise(self):
        self._do(prioritise(self._history, self._rng))

    @rule()
    def end_episodes(self):
        self._do(end_episodes(self._history))

    @rule()
    def flush(self):
        self._do(flush(self._history))

    @rule(num_steps=st.integers(1, 20))
    @precondition(lambda self: any(self._history.cursors))
    def load(self, num_steps):
        self._do(load(self._history, num_steps, self._size))

    @rule()
    def close(self):
        self._storage.close()
        self._look()
        self._open()

    @rule()
    def kill(self):
        abandon(self._storage)
        if self._reader is not None:
            self._read()
        self._open()

    @rule()
    @precondition(lambda self: any(self._history.cursors))
    def open_a_reader(self):
        self._reader = ReplayStorage.open(
            self._path, mode="r", sampler=UniformSampler(), batch_size=5
        )
        self._look()


def test_priorities_after_a_load_into_an_emptied_directory(tmp_path):
    """Their rows are evicted as those of any other write are."""
    storage, history = make(tmp_path, 2, 12), History(2, 12)
    for make_act in (
        lambda history: write(history, 6),
        lambda history: keep(history, 0),
        lambda history: load(history, 11),
        lambda history: write(history, 1),
    ):
        act = make_act(history)
        act.do(storage)
        history = act.after
        assert found(storage) == history.live


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=30)
TestDirectory.pytestmark = pytestmark
