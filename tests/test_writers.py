"""EpisodeWriter: a state machine over every shape that collectors send, and what it refuses."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import RingOracle
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import TensorDictReplayBuffer

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.writing import EpisodeWriter

# The rows of this file tell who they are, and do not begin where the row before them ended.
writer_of_any_rows = partial(EpisodeWriter, on_gap="ignore")


def transitions(tags, done, trajectories=None):
    """Transitions whose rows say who they are: tags int64 [..., 3], done bool of shape [...]."""
    data = TensorDict(
        {
            "observation": tags.float(),
            "tag": tags,
            "next": {"observation": tags.float() + 0.5, "done": done.unsqueeze(-1)},
        },
        batch_size=done.shape,
    )
    if trajectories is not None:
        data["collector", "traj_ids"] = trajectories
    return data


def reloaded(made):
    """Returns what pickle makes of it."""
    return pickle.loads(pickle.dumps(made))


class WriterMachine(RuleBasedStateMachine):
    """Writes of every shape into a buffer and into the model; all rows are compared after each.

    Rows carry their lane, the number of their write and their step in it, and in half of the runs
    the ids of trajectories that may change without `done`, as a collector's do.
    """

    keys = ["observation", "tag", ("next", "observation"), ("next", "done")]

    @initialize(
        num_envs=st.integers(1, 4),
        places=st.integers(1, 6),
        spare=st.integers(0, 3),
        with_trajectories=st.booleans(),
        buffer_type=st.sampled_from([ReplayStorage, TensorDictReplayBuffer]),
    )
    def start(self, num_envs, places, spare, with_trajectories, buffer_type):
        self.size = num_envs * places + min(spare, num_envs - 1)
        self.oracle = RingOracle(self.size, num_envs)
        self.buffer_type = buffer_type
        self.written = 0
        self.trajectory = [0] * num_envs if with_trajectories else None
        self.buffer = self.make_buffer()

    def make_buffer(self):
        # Trajectory ids are told to the writer but not stored.
        writer = writer_of_any_rows(self.oracle.num_envs, keys=self.keys)
        return self.buffer_type(storage=PackedStorage(self.size), writer=writer)

    def block(self, data, lanes, steps):
        """Draws flags [L][S] for the lanes and makes the rows, and tells the model of them."""
        row = st.lists(st.sampled_from([False, False, True]), min_size=steps, max_size=steps)
        rows = st.lists(row, min_size=len(lanes), max_size=len(lanes))
        done = data.draw(rows)
        tags = [[[lane, self.written, step] for step in range(steps)] for lane in lanes]
        self.written += 1
        cut = None if self.trajectory is None else data.draw(rows)
        self.oracle.append(done, cut, lanes, payload=tags)
        ids = None if cut is None else self.trajectory_ids(lanes, cut)
        return transitions(torch.tensor(tags), torch.tensor(done), ids)

    def trajectory_ids(self, lanes, cut):
        """Ids [L, S] that change where asked."""
        ids = []
        for lane, row in zip(lanes, cut, strict=True):
            ids.append([])
            for changes in row:
                self.trajectory[lane] += changes
                ids[-1].append(self.trajectory[lane] * 10 + lane)
        return torch.tensor(ids)

    @rule(data=st.data())
    def extend(self, data):
        """[T] of one lane, [E, T] of several; dense or stacked lazily along either dimension."""
        steps = data.draw(st.integers(1, 2 * self.oracle.places + 2))
        lanes = list(range(self.oracle.num_envs))
        rows = self.block(data, lanes, steps)
        form = data.draw(st.sampled_from(["dense", "lanes stacked", "steps stacked"]))
        if form == "lanes stacked":
            rows = LazyStackedTensorDict.lazy_stack(list(rows.unbind(0)), 0)
        elif form == "steps stacked":
            rows = LazyStackedTensorDict.lazy_stack(list(rows.unbind(1)), 1)
        if self.oracle.num_envs == 1 and data.draw(st.booleans()):
            rows = rows[0]
        self.check_slots(self.buffer.extend(rows), lanes, steps)

    @rule(data=st.data())
    def extend_by_one_step(self, data):
        lanes = list(range(self.oracle.num_envs))
        rows = self.block(data, lanes, 1)[:, 0]
        if self.trajectory is None:
            slots = self.buffer.extend(rows)
        else:
            # Flat rows that name their trajectories find their lanes themselves, unless these are told.
            slots = self.buffer.writer.extend(rows, lanes=lanes)
        self.check_slots(slots, lanes, 1)

    @precondition(lambda self: self.oracle.num_envs == 1 or self.trajectory is None)
    @rule(data=st.data())
    def add(self, data):
        """[] of one lane, [E] of several."""
        lanes = list(range(self.oracle.num_envs))
        rows = self.block(data, lanes, 1)[:, 0]
        if self.oracle.num_envs == 1:
            rows = rows[0]
        self.check_slots(self.buffer.add(rows), lanes, 1)

    @rule(data=st.data())
    def extend_some_lanes(self, data):
        num_envs = self.oracle.num_envs
        lane = st.integers(0, num_envs - 1)
        lanes = data.draw(st.lists(lane, min_size=1, max_size=num_envs, unique=True))
        steps = data.draw(st.integers(1, self.oracle.places + 2))
        form = data.draw(st.sampled_from(["list", "tensor", "mask"]))
        given = lanes
        if form == "tensor":
            given = torch.tensor(lanes)
        elif form == "mask":
            lanes.sort()
            given = torch.zeros(num_envs, dtype=torch.bool)
            given[lanes] = True
        rows = self.block(data, lanes, steps)
        if steps == 1 and data.draw(st.booleans()):
            rows = rows[:, 0]
        self.check_slots(self.buffer.writer.extend(rows, lanes=given), lanes, steps)

    @rule(data=st.data())
    def extend_what_was_sampled(self, data):
        """Rows from another buffer carry the `index` that they had there; it is not stored."""
        lanes = list(range(self.oracle.num_envs))
        rows = self.block(data, lanes, 2)
        rows["index"] = torch.arange(rows.numel()).reshape(rows.shape)
        self.check_slots(self.buffer.extend(rows), lanes, 2)

    @rule()
    def empty(self):
        self.buffer.empty()
        self.oracle.clear()

    @precondition(lambda self: self.buffer_type is ReplayStorage)
    @rule(keep=st.integers(1, 7))
    def empty_but_the_last_steps(self, keep):
        self.buffer.empty(keep_steps=keep)
        self.oracle.clear(keep)

    @rule()
    def reload(self):
        other = self.make_buffer()
        if self.buffer.storage.initialized:
            other.load_state_dict(self.buffer.state_dict())
            self.buffer = other

    def check_slots(self, slots, lanes, steps):
        newest = [self.oracle.slot(self.oracle.lanes[lane][-1]) for lane in lanes]
        assert slots.reshape(len(lanes), steps)[:, -1].tolist() == newest

    @invariant()
    def sound(self):
        self.buffer.storage.episodes.validate()

    @invariant()
    def rows_are_those_of_the_model(self):
        live = self.oracle.live()
        episodes, storage = self.buffer.storage.episodes, self.buffer.storage
        assert len(episodes) == len(live)
        if not live:
            assert len(self.buffer) == 0
            return
        slots = torch.tensor(list(live))
        rows = storage.get(slots)
        assert set(rows.keys(True, True)) == set(self.keys)
        tags = torch.tensor([row.payload for row in live.values()])
        done = torch.tensor([row.done for row in live.values()])
        expected = transitions(tags, done)
        assert (rows == expected).all()
        assert episodes.behind(slots).tolist() == [self.oracle.behind(r) for r in live.values()]
        assert episodes.ahead(slots).tolist() == [self.oracle.ahead(r) for r in live.values()]
        finished = [self.oracle.is_finished(r) for r in live.values()]
        assert episodes.is_finished(slots).tolist() == finished


TestPackedStorage = WriterMachine.TestCase
TestPackedStorage.settings = settings(stateful_step_count=12)


def block(*shape, first_lane=0):
    """A block of rows without an end: tags are lane, step, 0."""
    lanes, steps = torch.meshgrid(
        torch.arange(shape[0]) + first_lane, torch.arange(shape[-1]), indexing="ij"
    )
    if len(shape) == 1:
        lanes, steps = torch.zeros(shape).long(), torch.arange(shape[0])
    tags = torch.stack([lanes, steps, torch.zeros_like(steps)], -1)
    return transitions(tags, torch.zeros(tags.shape[:-1], dtype=torch.bool))


class TestTrajectoryIds:
    def test_of_a_collector_that_names_them_otherwise(self):
        writer = writer_of_any_rows(traj_key="run", done_key=("next", "over"))
        buffer = ReplayStorage(storage=PackedStorage(10), writer=writer)
        data = block(4).rename_key_(("next", "done"), ("next", "over"))
        data["next", "over"][1] = True
        data["run"] = torch.tensor([0, 0, 0, 1])
        slots = buffer.extend(data)
        assert buffer.episodes.ahead(slots).tolist() == [1, 0, 0, 0]
        assert buffer.episodes.is_finished(slots).tolist() == [True, True, False, False]


class TestRefused:
    def test_a_first_write_that_is_refused_fixes_nothing(self):
        buffer = ReplayStorage(storage=PackedStorage(12), writer=writer_of_any_rows(2))
        with pytest.raises(ValueError, match="num_envs=3"):
            buffer.extend(block(3, 2))
        with pytest.raises(KeyError, match="done"):
            buffer.extend(block(2, 2).exclude(("next", "done")))
        assert not buffer.storage.initialized
        assert len(buffer) == 0
        buffer.extend(block(2, 2).exclude("tag"))
        assert len(buffer) == 4

    def test_storage_smaller_than_the_number_of_lanes(self):
        with pytest.raises(ValueError, match=r"num_envs.*2.*3"):
            ReplayStorage(storage=PackedStorage(2), writer=writer_of_any_rows(3))

    def test_generations_of_rows_in_a_directory(self, tmp_path):
        with pytest.raises(ValueError, match="track_generations=True needs rows in memory"):
            ReplayStorage(
                storage=PackedStorage(40, scratch_dir=tmp_path),
                writer=EpisodeWriter(track_generations=True),
            )
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("copied", [lambda made: made, copy.deepcopy, reloaded])
def test_more_rows_may_be_written_than_32_bits_count(copied):
    storage = ReplayStorage(storage=PackedStorage(3), writer=writer_of_any_rows())
    storage.writer._write_count = 2**31 - 1
    storage = copied(storage)
    storage.extend(transitions(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2).bool()))
    assert storage.write_count == 2**31 + 1
