"""EpisodeWriter: a state machine over every shape that collectors send, and what it refuses."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from oracles import RingOracle
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from trl_storages.replay import ReplayStorage
from trl_storages.storages import PackedStorage
from trl_storages.writers import EpisodeWriter


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


class WriterMachine(RuleBasedStateMachine):
    """Writes of every shape into a buffer and into the model; all rows are compared after each.

    Rows carry their lane, absolute step and a running number, and in half of the runs the ids of
    trajectories that may change without `done`, as a collector's do.
    """

    storage_type = PackedStorage
    keys = ["observation", "tag", ("next", "observation"), ("next", "done")]

    @initialize(
        num_envs=st.integers(1, 4),
        places=st.integers(1, 6),
        spare=st.integers(0, 3),
        with_trajectories=st.booleans(),
    )
    def start(self, num_envs, places, spare, with_trajectories):
        self.size = num_envs * places + min(spare, num_envs - 1)
        self.oracle = RingOracle(self.size, num_envs)
        self.written = 0
        self.trajectory = [0] * num_envs if with_trajectories else None
        self.buffer = self.make_buffer()

    def make_buffer(self):
        # Trajectory ids are told to the writer but not stored.
        writer = EpisodeWriter(self.oracle.num_envs, keys=self.keys)
        return TensorDictReplayBuffer(storage=self.storage_type(self.size), writer=writer)

    def block(self, data, lanes, steps):
        """Draws flags [L][S] for the lanes and makes the rows, and tells the model of them."""
        row = st.lists(st.sampled_from([False, False, True]), min_size=steps, max_size=steps)
        rows = st.lists(row, min_size=len(lanes), max_size=len(lanes))
        done = data.draw(rows)
        tags = []
        for lane in lanes:
            first = len(self.oracle.lanes[lane])
            tags.append([[lane, first + step, self.written + step] for step in range(steps)])
        self.written += steps
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
        self.check_slots(self.buffer.extend(rows), lanes, 1)

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


class StockStorageMachine(WriterMachine):
    storage_type = LazyTensorStorage


TestPackedStorage = WriterMachine.TestCase
TestStockStorage = StockStorageMachine.TestCase
TestStockStorage.settings = settings(max_examples=60)
