"""ReplayStorage: what the container adds to the parts, against the plain-Python ring."""

import copy
import gc
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from goal_data import HISTORIES, distance_reward, episode_flags, goal_transitions, write
from oracles import RingOracle
from torchrl.data import (
    traj,
)
from torchrl.envs.transforms import Compose, Transform

from trl_storages.gym import GymRecorder
from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.transforms import GoalRelabel, NStep, ReplayTransform
from trl_storages.writing import EpisodeWriter

each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)


def make_uniform(capacity, num_envs=1, seed=0, on_gap="cut", **kwargs):
    return ReplayStorage(
        storage=PackedStorage(capacity),
        writer=EpisodeWriter(num_envs, on_gap=on_gap),
        generator=torch.Generator().manual_seed(seed),
        **kwargs,
    )


def make_hindsight(capacity, num_envs=1, **kwargs):
    return make_uniform(
        capacity,
        num_envs,
        sampler=HERSampler(),
        transform=GoalRelabel(distance_reward),
        **kwargs,
    )


def rows_of(model_rows):
    """The transitions [B] that these rows of the model were written with."""
    rows = list(model_rows)
    lanes = torch.tensor([row.lane for row in rows])
    steps = torch.tensor([row.payload for row in rows])
    done = torch.tensor([row.done for row in rows], dtype=torch.bool)
    return goal_transitions(lanes, steps, done)


def assert_same(first, second):
    """Equal to the last bit, keys and shapes included."""
    assert first.batch_size == second.batch_size
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key, value in first.items(True, True):
        assert value.dtype == second[key].dtype
        assert torch.equal(value, second[key]), key


# History


@pytest.mark.parametrize(
    "change",
    [
        lambda storage, rows: storage.__setitem__(slice(None), rows),
        lambda storage, rows: storage.set_("action", rows["action"]),
        lambda storage, rows: storage.set_at_("action", rows["action"], slice(None)),
        lambda storage, rows: storage.update_(rows),
    ],
)
def test_rows_are_never_changed_in_place(change):
    storage, oracle = make_hindsight(10, 2), RingOracle(10, 2)
    write(storage, oracle, [episode_flags([3, 2], 2), episode_flags([4], 3)])
    before = storage[:]
    with pytest.raises(RuntimeError, match="never changed in place: write others by extend"):
        change(storage, before + 1)
    assert_same(storage[:], before)


# Episodes


class TestQuery:
    @each_history
    def test_lists_the_episodes_lane_by_lane(self, history):
        storage = make_hindsight(history.capacity, history.num_envs)
        oracle = history.write(storage)
        expected = [
            oracle.episode(row)
            for lane in range(history.num_envs)
            for row in oracle.surviving(lane)
            if oracle.behind(row) == 0
        ]
        found = storage.query()
        assert len(found) == len(expected)
        for trajectory, rows in zip(found, expected, strict=True):
            assert_same(trajectory.data.exclude("collector"), rows_of(rows))

    def test_those_that_a_predicate_accepts(self):
        storage, oracle = make_hindsight(20, 2), RingOracle(20, 2)
        write(storage, oracle, [episode_flags([2, 5], 2), episode_flags([4, 2], 3)])
        assert [len(found) for found in storage.query(traj.length >= 3)] == [5, 4, 3]
        assert storage.query(traj.length > 9) == []

    def test_of_an_empty_storage(self):
        assert make_uniform(8).query() == []


# Batches


# Clearing


# Around sampling


class Doubled(Transform):
    """Stores actions doubled, and shows them halved."""

    def __init__(self):
        super().__init__(["action"], ["action"], ["action"], ["action"])

    def _apply_transform(self, action):
        return action // 2

    def _inv_apply_transform(self, action):
        return action * 2


class TestTransforms:
    @pytest.mark.filterwarnings("ignore:a row does not begin with the observation")
    def test_inverses_apply_to_every_kind_of_write(self):
        storage = make_uniform(8, transform=Compose(Doubled()), on_gap="ignore")
        storage.record([0.0], 1, 0.5, False, False, {}, [1.0])
        rows = storage[:]
        rows["action"] = torch.tensor([2])
        storage.extend(rows.clone())
        rows["action"] = torch.tensor([3])
        storage.add(rows[0].clone())
        assert storage["action"].tolist() == [2, 4, 6]  # as they are stored
        assert set(storage.sample(40)["action"].tolist()) == {1, 2, 3}

    def test_one_that_holds_back_a_write(self):
        class Nothing(Transform):
            def _inv_call(self, tensordict):
                return None

        storage = make_uniform(8, transform=Nothing())
        rows = goal_transitions(torch.zeros(3).long(), torch.arange(3), torch.zeros(3).bool())
        assert storage.extend(rows).numel() == 0
        assert storage.record([0.0], 1, 0.5, False, True, {}, [1.0]) is None
        assert len(storage) == 0

    def test_a_collate_function(self):
        storage = make_uniform(8, collate_fn=lambda batch: batch.select("action"))
        write(storage, RingOracle(8), [[False] * 8])
        assert set(storage.sample(4).keys()) == {"action", "index"}


class TestPrefetch:
    def written(self, **options):
        storage = make_uniform(20, 2, prefetch=3, **options)
        write(storage, RingOracle(20, 2), [episode_flags([3, 5], 4)] * 2)
        return storage

    @pytest.mark.parametrize("unit", [None, EpisodeSequence(2)], ids=["rows", "sequences"])
    def test_batches_of_the_size_that_is_asked_for(self, unit):
        storages = [self.written(batch_size=64, sample_unit=unit) for _ in range(2)]
        for size in (7, 64, 7, None, 7, 9, 9, None, None, 7, 7, 7, 7, 64, 64):
            ahead, again = (storage.sample(size) for storage in storages)
            assert len(ahead) == (size or 64) * (2 if unit else 1)
            assert_same(ahead, again)
        for storage in storages:
            storage.shutdown()

    def test_parts_that_storages_share(self, request):
        """A unit, and a transform, may serve storages that draw at the same time in their threads."""
        request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
        sys.setswitchinterval(1e-6)
        unit, transform = EpisodeSequence(2), NStep(2, discount=0.9)
        rows = [self.written(batch_size=size, sample_unit=unit) for size in (1, 5)]
        for storage in rows:
            storage.append_transform(transform)

        def sizes(storage):
            return {
                (len(entry), storage._batch_size)
                for _ in range(200)
                for entry in storage.sample().values()
            }

        with ThreadPoolExecutor(2) as threads:
            assert [*threads.map(sizes, rows)] == [{(2, 1)}, {(10, 5)}]
        for storage in rows:
            storage.shutdown()

    def test_other_sizes_leave_what_was_drawn_ahead(self):
        """So that a sampler without replacement loses no row."""
        storage = self.written(batch_size=4, sampler=UniformSampler(without_replacement=True))
        drawn = [storage.sample(size)["index"] for size in (None, 2, 2, None, None, None)]
        assert torch.cat(drawn).sort().values.tolist() == [*range(20)]
        storage.shutdown()

    def test_while_it_is_written_to(self):
        """Each batch is one state of the rows: goals, rewards and rows fit each other."""
        storage, oracle = make_hindsight(20, prefetch=2, batch_size=64), RingOracle(20)
        for _ in range(40):
            write(storage, oracle, [episode_flags([3, 2], 1)])
            batch = storage.sample()
            expected = distance_reward(
                batch["next", "achieved_goal"], batch["desired_goal"], None
            ).unsqueeze(-1)
            assert torch.equal(batch["next", "reward"], expected)
            mask = batch["her_mask"]
            ahead = batch["desired_goal"][mask][:, 1] - batch["observation"][mask][:, 0]
            assert (ahead >= 0).all()
            assert (ahead < 4).all()
        storage.shutdown()


def test_a_sampler_set_later_follows_the_generator_too():
    batches = []
    for _ in range(2):
        storage = make_uniform(20, seed=5)
        write(storage, RingOracle(20), [episode_flags([3, 8], 4)])
        previous = storage.sampler
        storage.append_transform(GoalRelabel(distance_reward))
        assert storage.set_sampler(HERSampler()) is previous
        batches.append(storage.sample(50))
    assert torch.equal(batches[0]["index"], batches[1]["index"])
    assert torch.equal(batches[0]["goal_index"], batches[1]["goal_index"])


@pytest.mark.parametrize(
    "change",
    [
        lambda storage: storage.append_transform(NStep(2)),
        lambda storage: storage.insert_transform(0, NStep(2)),
    ],
)
def test_transforms_are_changed_between_two_batches(change):
    class Slow(ReplayTransform):
        def replay(self, rows):
            changing.start()
            changing.join(0.1)
            was_waiting.append(changing.is_alive())

    storage, was_waiting = make_uniform(8, transform=Compose(Slow())), []
    storage.extend(goal_transitions(torch.zeros(3).long(), torch.arange(3), torch.zeros(3).bool()))
    changing = threading.Thread(target=change, args=[storage])
    assert "steps_to_next_obs" not in storage.sample(2).keys()  # noqa: SIM118
    changing.join()
    assert was_waiting == [True]
    assert len(storage.transform) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda storage, rows: storage.extend(rows),
        lambda storage, rows: storage.can_sample(2),
        lambda storage, rows: storage.empty(keep_steps=1),
    ],
)
def test_no_method_of_a_shared_storage_waits_for_itself(call):
    writer = EpisodeWriter(keys=["action", ("next", "done"), ("next", "reward")])
    storage = ReplayStorage(storage=PackedStorage(8), writer=writer, sampler=PERSampler(8))
    rows = goal_transitions(torch.zeros(3).long(), torch.arange(3), torch.zeros(3).bool())
    rows["td_error"] = torch.tensor([3.0, 1.0, 2.0])
    storage.extend(rows)
    thread = threading.Thread(target=call, args=[storage.share(), rows], daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


class TestPartsOfAnotherStorage:
    def test_parts_that_keep_the_state_of_rows(self):
        """Of those that keep none one does for all storages."""
        sampler, writer, recorder = PERSampler(8), EpisodeWriter(), GymRecorder(1)
        uniform, transform = UniformSampler(), NStep(2)
        storage = make_uniform(8, sampler=HERSampler(base=sampler), transform=transform)
        ReplayStorage(storage=PackedStorage(8), sampler=uniform, writer=writer, recorder=recorder)
        recent = ERESampler()
        ours = make_uniform(8, sampler=recent)
        assert ours.sampler is recent
        for name, part in (
            ("sampler", sampler),
            ("sampler", ERESampler(base=sampler)),
            ("sampler", HERSampler(base=recent)),
            ("writer", writer),
            ("recorder", recorder),
        ):
            with pytest.raises(ValueError, match=f"{name} must be this storage's own"):
                ReplayStorage(storage=PackedStorage(8), **{name: part})
        other = make_uniform(8, sampler=HERSampler(base=uniform), transform=transform)
        with pytest.raises(ValueError, match="sampler must be this storage's own"):
            other.set_sampler(sampler)
        # Over the same rows it is the same state.
        ReplayStorage(storage=storage.storage, writer=storage.writer, sampler=sampler)
        storage.set_sampler(sampler)

    def test_another_buffer_of_the_same_rows_leaves_the_episodes_that_run(self):
        storage = make_uniform(20)
        lane, ends = torch.zeros(4).long(), torch.zeros(4).bool()
        data = [goal_transitions(lane, torch.arange(4) + first, ends) for first in (0, 4)]
        for steps in data:
            steps["collector", "traj_ids"] = torch.full((4,), 7)
        storage.extend(data[0])
        ReplayStorage(storage=storage.storage, writer=storage.writer, sampler=UniformSampler())
        storage.extend(data[1])
        assert storage.episodes.episodes()["length"].tolist() == [8]

    def test_a_sampler_without_state_draws_by_the_generator_of_each_storage(self):
        seen = []
        for others in (0, 2):
            sampler = HERSampler(num_goals=0)
            storages = [make_uniform(20, seed=seed, sampler=sampler) for seed in range(1 + others)]
            for storage in storages:
                write(storage, RingOracle(20), [episode_flags([3, 8], 4)])
            batches = [[storage.sample(50)["index"] for storage in storages] for _ in range(3)]
            seen.append(torch.stack([batch[0] for batch in batches]))
        assert torch.equal(*seen)

    def test_a_sampler_whose_storage_is_gone(self):
        sampler = PERSampler(8)
        storage = make_uniform(8, sampler=sampler)
        copied = copy.deepcopy(storage)
        del storage
        gc.collect()
        make_uniform(8, sampler=sampler).set_sampler(PERSampler(8))
        with pytest.raises(ValueError, match="own"):
            make_uniform(8, sampler=copied.sampler)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_draws_ahead_in_a_thread_of_its_own():
    storage = make_uniform(8, prefetch=2, batch_size=4)
    flags = torch.tensor(episode_flags([3, 2]))
    storage.extend(goal_transitions(torch.zeros(5).long(), torch.arange(5), flags))
    storage.sample()
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        os._exit(0 if len(storage.sample()) == 4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
