"""Flat batches of several environments: the episodes of `[E, T]`, found by their trajectories alone."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tally_env import tally
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage
from torchrl.envs import SerialEnv

from trl_storages import EpisodeWriter, PackedStorage, ReplayStorage

pytestmark = [
    pytest.mark.requirement("flat-batches"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

STORAGES = {
    "packed": lambda size, path: PackedStorage(size),
    "on disk": lambda size, path: PackedStorage(size, scratch_dir=path / "rows"),
    "stock": lambda size, path: LazyTensorStorage(size),
}


class Streams:
    """E environments of a collector: episodes of given lengths, numbered as they begin."""

    def __init__(self, num_envs, lengths):
        self.lengths = lengths
        self.begun = 0
        self.now = [self.begin() for _ in range(num_envs)]

    def begin(self):
        self.begun += 1
        return [self.begun - 1, 0, self.lengths[self.begun % len(self.lengths)]]

    def batch(self, num_steps):
        """[E, T]: rows that say which trajectory and step they are."""
        ids, step, done = (torch.zeros(len(self.now), num_steps).long() for _ in range(3))
        for at in range(num_steps):
            for lane, (number, age, length) in enumerate(self.now):
                ids[lane, at], step[lane, at], done[lane, at] = number, age, age + 1 == length
                self.now[lane] = self.begin() if age + 1 == length else [number, age + 1, length]
        return rows(ids, step, done.bool())


def rows(ids, step, done):
    seen = torch.stack([ids, step], -1)
    return TensorDict(
        {
            "observation": seen,
            "next": {"observation": seen + torch.tensor([0, 1]), "done": done.unsqueeze(-1)},
            "collector": {"traj_ids": ids},
        },
        ids.shape,
    )


def flat(ids, done=()):
    """[N] rows of these trajectories, each beginning at step 0; done at these places."""
    ids = torch.tensor(ids)
    step = torch.stack([(ids[:at] == ids[at]).sum() for at in range(len(ids))])
    is_end = torch.zeros(len(ids), dtype=torch.bool)
    is_end[list(done)] = True
    return rows(ids, step, is_end)


def episodes_of(storage):
    """The observations of each live episode, and whether it is finished."""
    index, found = storage.episodes, []
    for episode in index.episodes():
        slots = index.shift(episode["first"], torch.arange(int(episode["length"])))
        seen = storage.storage.get(slots)["observation"]
        found.append((seen.tolist(), bool(episode["finished"])))
    return sorted(found)


def make(num_envs, size, kind="packed", path=None):
    return ReplayStorage(storage=STORAGES[kind](size, path), writer=EpisodeWriter(num_envs))


@given(
    num_envs=st.integers(2, 4),
    places=st.integers(1, 9),
    batches=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_the_same_episodes_as_with_lanes(num_envs, places, batches, lengths):
    """Also where the ring wraps, and where a batch is larger than the ring."""
    streams = Streams(num_envs, lengths)
    square, joined = make(num_envs, num_envs * places), make(num_envs, num_envs * places)
    for num_steps in batches:
        data = streams.batch(num_steps)
        square.extend(data)
        slots = joined.extend(data.reshape(-1))
        joined.validate()
        assert episodes_of(joined) == episodes_of(square)
        kept = slots >= 0
        assert (joined.storage.get(slots[kept]) == data.reshape(-1)[kept]).all()


@pytest.mark.parametrize("kind", STORAGES)
def test_in_any_order_of_the_rows(kind, tmp_path):
    """Time first, and shuffled trajectories: each keeps the order of its own rows."""
    streams = Streams(3, [4, 2, 5, 3])
    square = make(3, 60, kind, tmp_path / "square")
    time_first = make(3, 60, kind, tmp_path / "joined")
    for _ in range(4):
        data = streams.batch(5)
        square.extend(data)
        time_first.extend(data.transpose(0, 1).reshape(-1))
    time_first.validate()
    assert episodes_of(time_first) == episodes_of(square)


@pytest.mark.parametrize("kind", STORAGES)
def test_a_collector_of_several_environments(kind, tmp_path):
    env = SerialEnv(2, tally)
    collector = Collector(env, env.rand_action, frames_per_batch=30, total_frames=150)
    square, joined = make(2, 100, kind, tmp_path / "a"), make(2, 100, kind, tmp_path / "b")
    for data in collector:
        square.extend(data)
        joined.extend(data.reshape(-1))
    collector.shutdown()
    joined.validate()
    assert episodes_of(joined) == episodes_of(square)


class TestLanes:
    def test_a_trajectory_goes_on_in_its_lane(self):
        storage = make(2, 20)
        storage.extend(flat([7, 7, 8, 8]))
        slots = storage.extend(
            rows(torch.tensor([8, 7]), torch.tensor([2, 2]), torch.zeros(2).bool())
        )
        assert storage.episodes.behind(slots).tolist() == [2, 2]

    def test_a_new_one_goes_where_an_episode_is_over(self):
        storage = make(3, 30)
        first = storage.extend(flat([1, 2, 3], done=[1]))
        slots = storage.extend(flat([5, 5]))
        assert set((slots % 3).tolist()) == {int(first[1] % 3)}
        assert storage.episodes.is_open.all()

    def test_or_else_to_the_lane_that_was_longest_not_written(self):
        storage = make(2, 20)
        first = storage.extend(flat([1, 2]))
        storage.extend(rows(torch.tensor([2]), torch.tensor([1]), torch.tensor([False])))
        slots = storage.extend(flat([3, 3]))
        assert set((slots % 2).tolist()) == {int(first[0] % 2)}
        assert storage.episodes.behind(slots).tolist() == [0, 1]
        assert not storage.episodes.is_finished(first[:1]).any()

    @pytest.mark.parametrize("keep_steps", [0, 1])
    def test_lanes_take_turns_after_the_write_count_began_anew(self, keep_steps):
        storage = make(4, 40)
        for number in range(40):
            storage.extend(flat([number] * 5, done=[4]))
        storage.empty(keep_steps=keep_steps)
        for number in range(40, 48):
            storage.extend(flat([number] * 5, done=[4]))
        assert storage.episodes.fill.tolist() == [10] * 4

    def test_trajectories_that_end_come_before_those_that_go_on(self):
        storage = make(2, 20)
        slots = storage.extend(flat([1, 1, 2, 2, 3, 3], done=[5]))
        assert storage.episodes.behind(slots).tolist() == [0, 1, 0, 1, 0, 1]
        assert storage.episodes.ahead(slots).tolist() == [1, 0, 1, 0, 1, 0]
        slots = storage.extend(
            rows(torch.tensor([1, 2]), torch.tensor([2, 2]), torch.zeros(2).bool())
        )
        assert storage.episodes.behind(slots).tolist() == [2, 2]

    def test_lanes_that_are_named_are_not_looked_for(self):
        storage = make(2, 20)
        slots = storage.extend(flat([5, 6]), lanes=[1, 0])
        assert (slots % 2).tolist() == [1, 0]


class TestRefused:
    def check(self, storage, data, match):
        before = storage.episodes.state_dict(), len(storage)
        with pytest.raises(ValueError, match=match):
            storage.extend(data)
        assert len(storage) == before[1]
        for name, tensor in storage.episodes.state_dict().items():
            assert torch.equal(tensor, before[0][name])

    def test_more_trajectories_than_lanes(self):
        storage = make(2, 20)
        self.check(storage, flat([1, 2, 3]), r"3 trajectories.*num_envs=3")

    def test_no_lane_is_left_beside_those_that_go_on(self):
        storage = make(2, 20)
        storage.extend(flat([1, 2]))
        data = rows(
            torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]).bool()
        )
        self.check(storage, data, r"num_envs=3")

    def test_without_trajectories(self):
        self.check(
            make(2, 20),
            flat([1, 1, 2, 2, 2]).exclude("collector"),
            r"reshape\(-1\)[\s\S]*traj_ids[\s\S]*lanes=",
        )

    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    def test_padded_trajectories(self, num_envs):
        """[B, T] as of `trajs_per_batch`: one error, whatever B is, and its remedy works."""
        data = Streams(2, [9]).batch(4)
        data["collector", "mask"] = torch.tensor([[True] * 4, [True, True, False, False]])
        storage = ReplayStorage(
            storage=PackedStorage(30),
            writer=EpisodeWriter(num_envs, keys=list(data.keys(True, True))[:1]),
        )
        storage.writer.keys = ["observation", ("next", "observation"), ("next", "done")]
        self.check(storage, data, r"padded[\s\S]*traj_format='cat'[\s\S]*data\[data\[")
        slots = storage.extend(data[data["collector", "mask"]])
        assert storage.episodes.behind(slots).tolist() == [0, 1, 2, 3, 0, 1]


class TestAgents:
    """An episode ends for all agents of a lane at once."""

    def check(self, storage, data, match):
        with pytest.raises((KeyError, ValueError), match=match):
            storage.extend(data)
        assert len(storage) == 0

    def test_flags_of_each_agent(self):
        data = Streams(2, [9]).batch(4)
        agents = torch.zeros(2, 4, 3, 1, dtype=torch.bool)
        storage = ReplayStorage(
            storage=PackedStorage(20), writer=EpisodeWriter(2, done_key=("next", "agents", "done"))
        )
        data["next", "agents"] = TensorDict({"done": agents}, [2, 4])
        self.check(storage, data, r"agents.*done_key[\s\S]*any\(-2\)")

    def test_a_root_flag_with_agents(self):
        data = Streams(2, [9]).batch(4)
        data["next", "done"] = torch.zeros(2, 4, 3, 1, dtype=torch.bool)
        self.check(make(2, 20), data, r"all agents[\s\S]*done_key")

    def test_no_shared_flag(self):
        data = Streams(2, [9]).batch(4)
        data["next", "agents"] = TensorDict(
            {"done": torch.zeros(2, 4, 3, 1, dtype=torch.bool)}, [2, 4]
        )
        del data["next", "done"]
        storage = make(2, 20)
        self.check(storage, data, r"each agent[\s\S]*any\(-2\)")
        # What the message says.
        data.set(("next", "done"), data["next", "agents", "done"].any(-2))
        assert storage.extend(data).shape == (2, 4)


@pytest.mark.parametrize("size", STORAGES.values(), ids=[*STORAGES])
def test_too_few_lanes_are_warned_of_once(size, tmp_path):
    """Where nothing else would tell that episodes are stored in pieces."""
    streams, storage = Streams(2, [7, 5]), ReplayStorage(storage=size(200, tmp_path))
    storage.extend(streams.batch(4).reshape(-1))
    with pytest.warns(UserWarning, match=r"side by side are written to one lane.* pass num_envs"):
        storage.extend(streams.batch(4).reshape(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        storage.extend(streams.batch(4).reshape(-1))
    assert len(storage) == 24


@pytest.mark.parametrize("given", ["num_envs", "cut", "ignore", "unfinished", "other streams"])
def test_no_warning_without_need(given):
    two = EpisodeWriter(2 if given == "num_envs" else 1)
    writer = EpisodeWriter(on_gap=given) if given in ("cut", "ignore") else two
    storage = ReplayStorage(storage=PackedStorage(200), writer=writer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if given == "unfinished":
            # Each trajectory as a whole, and none says that it is over.
            for _ in range(3):
                storage.extend(Streams(4, [99]).batch(3).reshape(-1))
                storage.end_episodes()
        elif given == "other streams":
            # A second collector counts from 0 as well.
            for _ in range(2):
                streams = Streams(1, [5])
                for _ in range(4):
                    storage.extend(streams.batch(4).reshape(-1))
        else:
            streams = Streams(2, [7, 5])
            for _ in range(4):
                storage.extend(streams.batch(4).reshape(-1))


def test_batches_of_workers_by_turns():
    """What says how many lanes there must be says how to write to them, too."""
    workers, storage = (
        [Streams(2, [7, 5]), Streams(2, [6, 9])],
        ReplayStorage(storage=PackedStorage(200), writer=EpisodeWriter(4)),
    )
    workers[1].now = [[number + 100, *state] for number, *state in workers[1].now]
    workers[1].begun = 102
    with pytest.raises(ValueError, match=r"pass num_envs=2 .*; or, .*data.reshape\(-1\), whose"):
        storage.extend(Streams(2, [7, 5]).batch(4))
    for _ in range(4):
        for worker in workers:
            storage.extend(worker.batch(4).reshape(-1))
    for trajectory in storage.query():
        rows = trajectory.get("observation")
        assert rows[:, 0].unique().numel() == 1
        assert rows[:, 1].tolist() == [*range(len(rows))]
