"""ReplayStorage: what the container adds to the parts, against the plain-Python ring."""

import copy
import gc
import math
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from goal_data import HISTORIES, distance_reward, episode_flags, goal_transitions, write
from hypothesis import given
from hypothesis import strategies as st
from oracles import RingOracle
from scipy import stats
from torchrl.data import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    SamplerWithoutReplacement,
    traj,
)
from torchrl.envs.transforms import Compose, DoubleToFloat, Transform

from trl_storages.gym import GymRecorder
from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.transforms import GoalRelabel, NStep, ReplayTransform
from trl_storages.writing import EpisodeWriter

each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
each_storage = pytest.mark.parametrize(
    "storage_type", [PackedStorage, LazyTensorStorage, LazyMemmapStorage]
)


def make_uniform(capacity, num_envs=1, storage_type=PackedStorage, seed=0, on_gap="warn", **kwargs):
    return ReplayStorage(
        storage=storage_type(capacity),
        writer=EpisodeWriter(num_envs, on_gap=on_gap),
        generator=torch.Generator().manual_seed(seed),
        **kwargs,
    )


def make_hindsight(capacity, num_envs=1, storage_type=PackedStorage, **kwargs):
    return make_uniform(
        capacity,
        num_envs,
        storage_type,
        sampler=HERSampler(),
        transform=GoalRelabel(distance_reward),
        **kwargs,
    )


def make_everything(capacity, num_envs=1, storage_type=PackedStorage, **kwargs):
    """Hindsight, n-step returns, priorities and recency at once."""
    return make_uniform(
        capacity,
        num_envs,
        storage_type,
        sampler=HERSampler(base=ERESampler(0.999, 3, base=PERSampler(capacity))),
        transform=Compose(GoalRelabel(distance_reward), NStep(3, 0.5)),
        **kwargs,
    )


def learn(storage, batch_size):
    """Samples a batch and gives its rows priorities."""
    batch = storage.sample(batch_size)
    batch["td_error"] = (batch["index"] % 3 + 1).float()
    storage.update_tensordict_priority(batch)
    return batch.exclude("priority_stamp", "td_error")


def rows_of(model_rows):
    """The transitions [B] that these rows of the model were written with."""
    rows = list(model_rows)
    lanes = torch.tensor([row.lane for row in rows])
    steps = torch.tensor([row.payload for row in rows])
    done = torch.tensor([row.done for row in rows], dtype=torch.bool)
    return goal_transitions(lanes, steps, done)


def by_time(oracle):
    return oracle.by_age()[::-1]


def assert_same(first, second):
    """Equal to the last bit, keys and shapes included."""
    assert first.batch_size == second.batch_size
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key, value in first.items(True, True):
        assert value.dtype == second[key].dtype
        assert torch.equal(value, second[key]), key


# History


@pytest.mark.requirement("slices")
class TestSlices:
    @each_storage
    @each_history
    def test_in_time_order(self, history, storage_type):
        storage = make_hindsight(history.capacity, history.num_envs, storage_type)
        oracle = history.write(storage)
        assert_same(storage[:], rows_of(by_time(oracle)))

    @given(data=st.data())
    def test_any_slice_is_that_of_the_list_of_rows(self, data):
        history = data.draw(st.sampled_from(list(HISTORIES.values())))
        storage = make_uniform(history.capacity, history.num_envs)
        rows = by_time(history.write(storage))
        which = data.draw(st.slices(len(rows) + 3))
        if not rows[which]:
            assert storage[which].batch_size == (0,)
        else:
            assert_same(storage[which], rows_of(rows[which]))

    def test_a_wrapped_ring_by_hand(self):
        storage, oracle = make_uniform(4), RingOracle(4)
        write(storage, oracle, [[False, True, False, False, True, False]])
        assert storage[:]["observation"][:, 0].tolist() == [2, 3, 4, 5]
        assert storage[-1:]["observation"][:, 0].tolist() == [5]
        assert storage[::-2]["observation"][:, 0].tolist() == [5, 3]

    @each_history
    def test_insert_into_another_storage(self, history):
        """Episodes stay in one piece, whatever the ring did to the slots."""
        storage = make_uniform(history.capacity, history.num_envs)
        oracle = history.write(storage)
        for lane in range(history.num_envs):
            rows = oracle.surviving(lane)
            if not rows:
                continue
            other = make_uniform(history.capacity)
            history_rows = storage[:]
            other.extend(history_rows[history_rows["observation"][:, 1] == lane])
            other.validate()
            assert_same(other[:], rows_of(rows))
            slots = torch.arange(len(rows))
            assert other.episodes.ahead(slots).tolist() == [oracle.ahead(row) for row in rows]

    def test_insert_lanes_in_step(self):
        storage, oracle = make_uniform(12, 3), RingOracle(12, 3)
        write(storage, oracle, [episode_flags([4, 2])] * 3)
        other = make_uniform(30, 3)
        other.extend(storage[-6:].reshape(2, 3).transpose(0, 1))
        assert_same(other[:], storage[-6:])

    def test_a_slice_is_a_copy(self):
        storage = make_uniform(4)
        write(storage, RingOracle(4), [[False] * 4])
        before = storage[:]
        for read in (storage[1:3], storage[2], storage[[0, 1]]):
            read.apply_(lambda leaf: leaf.zero_())
        assert_same(storage[:], before)

    @each_storage
    def test_slots(self, storage_type):
        """Ints, lists, masks and tensors name slots, as `index` of a batch does."""
        storage, oracle = make_hindsight(10, 2, storage_type), RingOracle(10, 2)
        write(storage, oracle, [episode_flags([3], 4), episode_flags([5], 2)])
        live = oracle.live()
        for slots in ([7, 0, 7], (torch.tensor([[1, 2], [9, 3]]))):
            flat = torch.as_tensor(slots).flatten().tolist()
            assert_same(storage[slots].reshape(-1), rows_of(live[slot] for slot in flat))
        assert_same(storage[3].unsqueeze(0), rows_of([live[3]]))
        assert_same(storage[torch.arange(10) < 2], rows_of([live[0], live[1]]))
        assert storage[[]].batch_size == (0,)

    def test_keys_read_the_whole_history(self):
        storage, oracle = make_hindsight(8), RingOracle(8)
        write(storage, oracle, [episode_flags([3, 8], 2)])
        expected = rows_of(by_time(oracle))
        assert torch.equal(storage["action"], expected["action"])
        assert torch.equal(storage["next", "reward"], expected["next", "reward"])

    @pytest.mark.parametrize("index", [5, -1, [0, 9], torch.tensor([3])])
    def test_slots_without_a_row(self, index):
        storage = make_uniform(10)
        write(storage, RingOracle(10), [[False] * 3])
        with pytest.raises(IndexError, match="3 rows stored"):
            storage[index]

    @pytest.mark.parametrize("index", [None, ..., (1, 2), [0.5]])
    def test_what_names_no_rows(self, index):
        storage = make_uniform(10)
        write(storage, RingOracle(10), [[False] * 3])
        with pytest.raises(TypeError, match="slots"):
            storage[index]


@each_storage
@pytest.mark.parametrize(
    "change",
    [
        lambda storage, rows: storage.__setitem__(slice(None), rows),
        lambda storage, rows: storage.set_("action", rows["action"]),
        lambda storage, rows: storage.set_at_("action", rows["action"], slice(None)),
        lambda storage, rows: storage.update_(rows),
    ],
)
def test_rows_are_never_changed_in_place(change, storage_type):
    storage, oracle = make_hindsight(10, 2, storage_type=storage_type), RingOracle(10, 2)
    write(storage, oracle, [episode_flags([3, 2], 2), episode_flags([4], 3)])
    before = storage[:]
    with pytest.raises(RuntimeError, match="never changed in place: write others by extend"):
        change(storage, before + 1)
    assert_same(storage[:], before)


def test_validate_finds_rows_that_contradict_their_episodes():
    storage, oracle = make_hindsight(10, 2), RingOracle(10, 2)
    write(storage, oracle, [episode_flags([3, 2], 2), episode_flags([4], 3)])
    storage.storage._storage["next", "done"][6] ^= True
    with pytest.raises(RuntimeError, match=r"\[6\].*done"):
        storage.validate()


# Episodes


def whole_episodes(oracle):
    """The finished episodes of which every row survives, by the slot of their first row."""
    found = {}
    for row in oracle.live().values():
        if oracle.is_finished(row) and oracle.is_whole(row):
            episode = oracle.episode(row)
            found[oracle.slot(episode[0])] = episode
    return found


@pytest.mark.requirement("episodes")
class TestEpisodes:
    @each_storage
    @each_history
    def test_whole_finished_ones_uniformly(self, history, storage_type):
        storage = make_uniform(history.capacity, history.num_envs, storage_type)
        expected = whole_episodes(history.write(storage))
        if not expected:
            with pytest.raises(RuntimeError, match="no finished episode"):
                storage.sample_episodes(3)
            return
        batch = storage.sample_episodes(100 * len(expected))
        longest = max(map(len, expected.values()))
        assert batch.shape == (100 * len(expected), longest)
        starts, counts = batch["index"][:, 0].unique(return_counts=True)
        assert {*starts.tolist()} == {*expected}
        for start in starts.tolist():
            drawn, rows = batch[batch["index"][:, 0] == start], expected[start]
            mask = drawn["collector", "mask"]
            assert (mask == (torch.arange(longest) < len(rows))).all()
            wanted = rows_of(rows).expand(len(drawn), len(rows)).reshape(-1)
            assert_same(drawn[mask].exclude("index", ("collector", "mask")), wanted)
            padding = drawn[~mask].exclude("index", ("collector", "mask"))
            assert all(not value.any() for value in padding.values(True, True))
        if len(expected) > 1:
            assert stats.chisquare(counts).pvalue > 1e-4

    def test_padded_to_the_longest_that_was_drawn(self):
        storage, oracle = make_uniform(20), RingOracle(20)
        write(storage, oracle, [episode_flags([3, 3, 3])])
        assert storage.sample_episodes(5).shape == (5, 3)

    @given(data=st.data())
    def test_of_any_history(self, data):
        num_envs = data.draw(st.integers(1, 3))
        capacity = data.draw(st.integers(num_envs, 12))
        storage, oracle = make_uniform(capacity, num_envs), RingOracle(capacity, num_envs)
        flag = st.sampled_from([False, False, True])
        for _ in range(data.draw(st.integers(1, 5))):
            steps = data.draw(st.integers(1, 8))
            row = st.lists(flag, min_size=steps, max_size=steps)
            done = data.draw(st.lists(row, min_size=num_envs, max_size=num_envs))
            # Episodes that are broken off never finish.
            write(storage, oracle, done, anew=data.draw(st.booleans()))
        expected = whole_episodes(oracle)
        if not expected:
            with pytest.raises(RuntimeError, match="no finished episode"):
                storage.sample_episodes(1)
            return
        batch = storage.sample_episodes(30)
        for episode in batch:
            mask = episode["collector", "mask"]
            rows = expected[int(episode["index"][0])]
            assert_same(episode[mask].exclude("index", ("collector", "mask")), rows_of(rows))

    def test_of_the_generator(self):
        first, second = make_uniform(20, seed=1), make_uniform(20, seed=1)
        for storage in (first, second):
            write(storage, RingOracle(20), [episode_flags([3, 5, 2, 4])])
        assert_same(first.sample_episodes(9), second.sample_episodes(9))

    def test_plain_transforms_apply_and_those_that_read_the_storage_do_not(self):
        storage = make_uniform(
            20,
            sampler=HERSampler(),
            transform=Compose(GoalRelabel(distance_reward), DoubleToFloat(in_keys=["effort"])),
        )
        oracle = RingOracle(20)
        write(storage, oracle, [episode_flags([3])])
        episode = storage.sample_episodes(1)[0]
        assert episode["effort"].dtype is torch.float32
        assert torch.equal(episode["desired_goal"], rows_of(oracle.surviving(0))["desired_goal"])

    @pytest.mark.parametrize("n", [0, -2])
    def test_how_many(self, n):
        storage = make_uniform(20)
        write(storage, RingOracle(20), [episode_flags([3])])
        with pytest.raises(ValueError, match=f"{n}"):
            storage.sample_episodes(n)

    @pytest.mark.parametrize("key", ["action", ("next", "done"), ("next", "reward")])
    def test_an_episode_without_one_of_its_entries(self, key):
        storage, oracle = make_uniform(20), RingOracle(20)
        write(storage, oracle, [episode_flags([3])])
        episode = rows_of(oracle.surviving(0))
        before = storage[:]
        with pytest.raises(KeyError, match=key if isinstance(key, str) else key[1]):
            storage.extend(episode.exclude(key))
        assert_same(storage[:], before)
        assert len(storage) == 3

    def test_an_episode_with_an_entry_of_another_shape(self):
        storage, oracle = make_uniform(20), RingOracle(20)
        write(storage, oracle, [episode_flags([3])])
        episode = rows_of(oracle.surviving(0))
        episode["observation"] = torch.zeros(3, 5)
        with pytest.raises(ValueError, match=r"observation.*\[3, 4\].*\[3, 5\]"):
            storage.extend(episode)
        assert len(storage) == 3


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


@pytest.mark.requirement("generation")
class TestBatches:
    def make(self, **kwargs):
        storage = make_uniform(20, **kwargs)
        write(storage, RingOracle(20), [episode_flags([3, 8], 4)])
        return storage

    @pytest.mark.parametrize(
        ("num_batches", "epochs"), [(1, 1), (4, 1), (3, 5), (0, 3), (3, 0), (7, 2)]
    )
    def test_that_many_of_that_size(self, num_batches, epochs):
        batches = list(self.make().batches(num_batches, 6, epochs))
        assert [batch.batch_size for batch in batches] == [(6,)] * (num_batches * epochs)

    def test_the_size_of_the_constructor(self):
        sizes = {batch.batch_size for batch in self.make(batch_size=5).batches(3)}
        assert sizes == {(5,)}

    def test_drawn_one_by_one_as_they_are_asked_for(self):
        storage = make_uniform(1)
        oracle, seen = RingOracle(1), []
        batches = storage.batches(3, batch_size=2)  # nothing is stored yet, nor drawn
        for _ in range(3):
            write(storage, oracle, [[False]])
            seen.append(next(batches)["observation"][0, 0].item())
        assert seen == [0, 1, 2]
        assert next(batches, None) is None

    def test_the_draws_of_sample(self):
        first, second = self.make(seed=3), self.make(seed=3)
        for batch in first.batches(2, 4, epochs=2):
            assert_same(batch, second.sample(4))

    @pytest.mark.parametrize(("num_batches", "epochs"), [(-1, 1), (1, -2)])
    def test_negative_numbers(self, num_batches, epochs):
        with pytest.raises(ValueError, match=r"(num_batches|epochs) must be .* got -"):
            self.make().batches(num_batches, 4, epochs)


@pytest.mark.requirement("can-sample")
class TestReadiness:
    def test_before_the_first_write(self):
        storage = make_uniform(8, batch_size=4)
        assert len(storage) == 0
        assert not storage.is_full
        assert not storage.can_sample()
        assert not storage.can_sample(1)
        for sample in (storage.sample, lambda: storage.sample(2), lambda: next(storage.batches(1))):
            with pytest.raises(RuntimeError, match=r"storage is empty: write transitions"):
                sample()
        with pytest.raises(RuntimeError, match="no finished episode"):
            storage.sample_episodes(1)

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_while_it_fills(self, num_envs):
        """Draws are with replacement, so a single row is enough for any batch."""
        storage, oracle = make_uniform(4 * num_envs, num_envs), RingOracle(4 * num_envs, num_envs)
        for step in range(6):
            write(storage, oracle, [[False]] * num_envs)
            assert len(storage) == num_envs * min(step + 1, 4)
            assert storage.is_full == (step >= 3)
            assert storage.can_sample(100)
            assert storage.sample(100).batch_size == (100,)

    def test_full_when_every_lane_is(self):
        storage, oracle = make_uniform(6, 2), RingOracle(6, 2)
        write(storage, oracle, [[False] * 9], lanes=[1])
        assert (len(storage), storage.is_full) == (3, False)
        write(storage, oracle, [[False] * 3], lanes=[0])
        assert (len(storage), storage.is_full) == (6, True)

    def test_full_where_capacity_is_no_multiple_of_the_lanes(self):
        storage, oracle = make_uniform(7, 2), RingOracle(7, 2)
        write(storage, oracle, [[False] * 3] * 2)
        assert (len(storage), storage.is_full) == (6, True)

    def test_after_it_was_emptied(self):
        storage = make_uniform(8, batch_size=4)
        write(storage, RingOracle(8), [[False] * 9])
        storage.empty()
        assert (len(storage), storage.is_full, storage.can_sample()) == (0, False, False)
        with pytest.raises(RuntimeError, match="storage is empty"):
            storage.sample()

    def test_no_batch_size_anywhere(self):
        storage = make_uniform(8)
        write(storage, RingOracle(8), [[False] * 9])
        with pytest.raises(RuntimeError, match="batch_size"):
            storage.sample()
        with pytest.raises(RuntimeError, match="batch_size"):
            storage.can_sample()

    @pytest.mark.parametrize("batch_size", [0, -1])
    def test_a_batch_of_nothing(self, batch_size):
        storage = make_uniform(8)
        write(storage, RingOracle(8), [[False] * 9])
        with pytest.raises(ValueError, match=f"batch_size.*{batch_size}"):
            storage.sample(batch_size)


@pytest.mark.requirement("live-parameters")
class TestLiveParameters:
    """A parameter that is set between two samples holds from the next one on."""

    def make(self):
        storage, oracle = make_hindsight(40, seed=2), RingOracle(40)
        write(storage, oracle, [episode_flags([5, 9, 3, 6], 4)])
        return storage, oracle

    def test_num_goals(self):
        storage, _ = self.make()
        for num_goals in (4, 0, 1, math.inf, 9, 4):
            storage.sampler.num_goals = num_goals
            share = 1 if num_goals == math.inf else num_goals / (num_goals + 1)
            assert storage.sample(100)["her_mask"].sum() == math.floor(100 * share)

    def test_strategy(self):
        storage, oracle = self.make()
        live = oracle.live()
        for strategy in ("final", "future", "random", "episode", "final"):
            storage.sampler.strategy = strategy
            batch = storage.sample(600)
            batch = batch[batch["her_mask"]]
            seen = Counter()
            for anchor, goal in zip(
                batch["index"].tolist(), batch["goal_index"].tolist(), strict=True
            ):
                assert live[goal] in oracle.goals(live[anchor], strategy)
                seen[live[goal].step - live[anchor].step] += 1
            assert (min(seen) < 0) == (strategy in ("random", "episode"))
            assert (max(seen) > 8) == (strategy == "random")

    def test_steps_and_discount(self):
        storage, oracle = make_uniform(40, transform=NStep(3, 0.5)), RingOracle(40)
        write(storage, oracle, [episode_flags([5, 9, 3, 6], 4)])
        live, n_step = oracle.live(), storage.transform[0]
        for n_steps, gamma in ((3, 0.5), (1, 0.5), (7, 0.5), (7, 1.0), (2, 0.25)):
            n_step.n_step, n_step.discount = n_steps, gamma
            for sample in storage.sample(20):
                row = live[int(sample["index"])]
                window = [other for other in oracle.episode(row) if other.step >= row.step][
                    :n_steps
                ]
                assert sample["steps_to_next_obs"] == len(window)
                rewards = rows_of(window)["next", "reward"].flatten().tolist()
                folded = sum(gamma**i * reward for i, reward in enumerate(rewards))
                assert sample["next", "reward"].item() == pytest.approx(folded, rel=1e-6)

    def test_priorities_and_their_correction(self):
        storage = make_uniform(8, sampler=PERSampler(8, alpha=0.5, beta=1.0))
        write(storage, RingOracle(8), [[False] * 8])
        priority = torch.arange(8).float() + 1
        storage.update_priority(torch.arange(8), priority)
        for alpha, beta in ((0.5, 1.0), (1.0, 1.0), (1.0, 0.3), (0.0, 0.3), (0.7, 0.0), (0.7, 0.6)):
            storage.sampler.alpha, storage.sampler.beta = alpha, beta
            batch = storage.sample(2000)
            # The largest probability is that of the largest priority, and has the smallest weight.
            expected = (1 / priority) ** (alpha * beta)
            assert torch.allclose(batch["priority_weight"], expected[batch["index"]], rtol=1e-5)
            counts = torch.bincount(batch["index"], minlength=8)
            share = priority**alpha / (priority**alpha).sum()
            assert (
                stats.chisquare(counts, share.double() / share.double().sum() * 2000).pvalue > 1e-4
            )

    def test_recency(self):
        storage = make_uniform(100, sampler=ERESampler(0.999, c_min=10))
        write(storage, RingOracle(100), [[False] * 130])
        for eta, c_min in ((0.999, 10), (0.99, 10), (0.99, 3), (1.0, 3), (0.9995, 3)):
            storage.sampler.begin_phase(1)
            storage.sampler.eta, storage.sampler.c_min = eta, c_min
            ages = storage.episodes.ages(storage.sample(1000)["index"])
            window = min(math.floor(max(100 * eta**1000, c_min)), 100)
            assert set(ages.tolist()) == set(range(window))

    def test_reward_function(self):
        storage, _ = self.make()
        storage.sampler.num_goals = math.inf
        storage.transform[0].reward_fn = lambda achieved, goal, _: torch.full((len(goal),), 7.0)
        assert (storage.sample(50)["next", "reward"] == 7).all()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_goals", -1),
            ("num_goals", 0.5),
            ("num_goals", math.nan),
            ("strategy", "past"),
            ("alpha", -0.1),
            ("alpha", math.nan),
            ("beta", 1.1),
            ("normalize", "sum"),
            ("eta", 0.0),
            ("eta", math.nan),
            ("c_min", 0),
            ("n_step", 0),
            ("discount", 1.5),
            ("discount", math.nan),
        ],
    )
    def test_nonsense(self, name, value):
        storage = make_everything(40)
        hindsight = storage.sampler
        recency = hindsight.base
        parts = [hindsight, recency, recency.base, storage.transform[1]]
        owner = next(part for part in reversed(parts) if hasattr(part, name))
        before = getattr(owner, name)
        with pytest.raises(ValueError, match=name):
            setattr(owner, name, value)
        assert getattr(owner, name) == before


# Clearing


@pytest.mark.requirement("clear")
class TestEmpty:
    flags = st.sampled_from([False, False, True])

    def draw_blocks(self, data, num_envs):
        blocks = []
        for _ in range(data.draw(st.integers(1, 4))):
            steps = data.draw(st.integers(1, 9))
            row = st.lists(self.flags, min_size=steps, max_size=steps)
            lanes = data.draw(
                st.none()
                | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
            )
            size = num_envs if lanes is None else len(lanes)
            blocks.append((data.draw(st.lists(row, min_size=size, max_size=size)), lanes))
        return blocks

    @given(data=st.data(), make=st.sampled_from([make_uniform, make_everything]))
    def test_everything_is_as_in_a_fresh_storage(self, data, make):
        num_envs = data.draw(st.integers(1, 3))
        capacity = data.draw(st.integers(num_envs, 12))
        used, fresh = make(capacity, num_envs), make(capacity, num_envs)
        oracle = RingOracle(capacity, num_envs)
        for done, lanes in self.draw_blocks(data, num_envs):
            write(used, oracle, done, lanes)
            learn(used, 3)
        used.empty()
        assert len(used) == 0
        used.validate()
        used.set_rng(torch.Generator().manual_seed(9))
        fresh.set_rng(torch.Generator().manual_seed(9))
        first, second = RingOracle(capacity, num_envs), RingOracle(capacity, num_envs)
        for done, lanes in self.draw_blocks(data, num_envs):
            write(used, first, done, lanes)
            write(fresh, second, done, lanes)
            assert_same(used[:], fresh[:])
            assert_same(learn(used, 20), learn(fresh, 20))
            assert used.stats() == fresh.stats()
        used.validate()

    @pytest.mark.filterwarnings("ignore:a row does not begin with the observation")
    @given(data=st.data())
    def test_the_last_steps_of_each_lane_stay(self, data):
        num_envs = data.draw(st.integers(1, 3))
        capacity = data.draw(st.integers(num_envs, 12))
        # The model numbers the steps that stay anew, so that the next ones begin elsewhere.
        storage = make_everything(capacity, num_envs, on_gap="ignore")
        oracle = RingOracle(capacity, num_envs)
        for done, lanes in self.draw_blocks(data, num_envs):
            write(storage, oracle, done, lanes)
        for _ in range(2):
            keep_steps = data.draw(st.integers(0, 14))
            storage.empty(keep_steps=keep_steps)
            oracle.clear(keep_steps)
            self.check(storage, oracle)
            for done, lanes in self.draw_blocks(data, num_envs):
                write(storage, oracle, done, lanes)
                self.check(storage, oracle)

    def check(self, storage, oracle):
        storage.validate()
        rows = by_time(oracle)
        assert len(storage) == len(rows)
        if not rows:
            return
        assert_same(storage[:], rows_of(rows))
        episodes = storage.episodes
        slots = episodes.slots_by_age(torch.arange(len(rows)).flip(0))
        assert episodes.behind(slots).tolist() == [oracle.behind(row) for row in rows]
        assert episodes.ahead(slots).tolist() == [oracle.ahead(row) for row in rows]
        assert episodes.is_finished(slots).tolist() == [oracle.is_finished(row) for row in rows]
        assert episodes.is_whole(slots).tolist() == [oracle.is_whole(row) for row in rows]
        batch = learn(storage, 20)
        where = {slot: place for place, slot in enumerate(slots.tolist())}
        drawn = [where[slot] for slot in batch["index"].tolist()]
        assert_same(
            batch.select("observation", "action"),
            rows_of(rows)[drawn].select("observation", "action"),
        )

    @each_storage
    def test_the_overlap_by_hand(self, storage_type):
        storage, oracle = make_uniform(8, 2, storage_type), RingOracle(8, 2)
        write(storage, oracle, [episode_flags([2], 5), episode_flags([6], 1)])
        storage.empty(keep_steps=2)
        steps, lanes, _, _ = storage[:]["observation"].unbind(-1)
        assert steps.tolist() == [5, 5, 6, 6]
        assert lanes.tolist() == [0, 1, 0, 1]
        # The episode of lane 0 goes on, that of lane 1 ended with its first kept row.
        write(storage, oracle, [[True], [True]])
        slots = storage.episodes.slots_by_age(torch.arange(6).flip(0))
        assert storage.episodes.ahead(slots).tolist() == [2, 0, 1, 1, 0, 0]

    def test_counters(self):
        storage = make_uniform(8)
        write(storage, RingOracle(8), [[False] * 11])
        storage.empty(empty_write_count=False)
        assert storage.write_count == 11
        write(storage, RingOracle(8), [[False] * 2])
        storage.empty(empty_write_count=False, keep_steps=1)
        assert (storage.write_count, len(storage)) == (13, 1)
        storage.empty(keep_steps=1)
        assert (storage.write_count, len(storage)) == (0, 1)
        storage.empty()
        assert (storage.write_count, len(storage)) == (0, 0)

    def test_batches_drawn_ahead_are_forgotten(self):
        storage, oracle = make_uniform(8, batch_size=4, prefetch=3), RingOracle(8)
        write(storage, oracle, [[False] * 8])
        storage.sample()
        storage.empty(keep_steps=1)
        assert set(storage.sample()["action"].tolist()) == {70}
        storage.empty()
        with pytest.raises(RuntimeError, match="storage is empty"):
            storage.sample()

    def test_of_nothing(self):
        storage = make_uniform(8)
        storage.empty()
        storage.empty(keep_steps=3)
        assert len(storage) == 0

    def test_a_negative_number(self):
        storage = make_uniform(8)
        write(storage, RingOracle(8), [[False] * 8])
        with pytest.raises(ValueError, match=r"keep_steps.*-1"):
            storage.empty(keep_steps=-1)
        assert len(storage) == 8


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
    @pytest.mark.parametrize("make", [make_uniform, make_hindsight])
    @pytest.mark.parametrize("prefetch", [1, 2, 5])
    def test_the_same_batches_in_the_same_order(self, prefetch, make):
        ahead, plain = make(20, 2, prefetch=prefetch, batch_size=16), make(20, 2, batch_size=16)
        for storage in (ahead, plain):
            write(storage, RingOracle(20, 2), [episode_flags([3, 5], 4)] * 2)
        for _ in range(30):
            assert_same(ahead.sample(), plain.sample())
        ahead.shutdown()

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
        storage = self.written(batch_size=4, sampler=SamplerWithoutReplacement())
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


def pickled(storage):
    return pickle.loads(pickle.dumps(storage))


class TestCopies:
    # TorchRL's LazyMemmapStorage can't be pickled.
    @pytest.mark.parametrize(
        ("storage_type", "copied"),
        [
            (PackedStorage, copy.deepcopy),
            (PackedStorage, pickled),
            (LazyTensorStorage, copy.deepcopy),
            (LazyTensorStorage, pickled),
            (LazyMemmapStorage, copy.deepcopy),
        ],
    )
    @pytest.mark.parametrize("prefetch", [None, 2])
    def test_go_on_alike_and_apart(self, copied, prefetch, storage_type):
        storage = make_hindsight(20, 2, storage_type, prefetch=prefetch, batch_size=8)
        oracle = RingOracle(20, 2)
        write(storage, oracle, [episode_flags([3, 5], 4)] * 2)
        next(iter(storage))
        storage.next()
        other = copied(storage)
        model = copy.deepcopy(oracle)
        for _ in range(3):
            for _ in range(4):
                assert_same(other.sample(), storage.sample())
            if prefetch:
                break  # whether a batch is drawn before or after a write is then left open
            write(storage, oracle, [episode_flags([2], 1)] * 2)
            write(other, model, [episode_flags([2], 1)] * 2)
        write(storage, oracle, [[True]] * 2)
        other.validate()
        storage.validate()
        assert len(other[:]) == 20
        assert not torch.equal(other["action"], storage["action"])

    def test_an_empty_one(self):
        storage = pickled(make_hindsight(20))
        write(storage, RingOracle(20), [[False]])
        assert storage.sample(3)["index"].tolist() == [0] * 3


class TestRefusals:
    def test_consuming_rows(self):
        with pytest.raises(ValueError, match="consume"):
            make_uniform(8, consume_after_n_samples=2)
        with pytest.raises(ValueError, match="consume"):
            make_uniform(8, sampler=ConsumingSampler(2))

    @pytest.mark.parametrize("lanes", [[2], [-1], [0, 0], torch.tensor([True])])
    def test_ending_episodes_of_unknown_lanes(self, lanes):
        storage = make_uniform(8, 2)
        with pytest.raises(ValueError, match="lanes"):
            storage.end_episodes(lanes)


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


@pytest.mark.parametrize("lanes", [[1], torch.tensor([1]), torch.tensor([False, True])])
def test_ending_the_episodes_of_some_lanes(lanes):
    storage, oracle = make_uniform(8, 2), RingOracle(8, 2)
    write(storage, oracle, [[False], [False]])
    storage.end_episodes(lanes)
    write(storage, oracle, [[False], [False]])
    assert storage.episodes.behind(torch.tensor([2, 3])).tolist() == [1, 0]


@pytest.mark.parametrize("update_priority", [None, False])
def test_lanes_are_written_one_at_a_time_with_priorities_of_their_own(update_priority):
    per = PERSampler(8)
    storage = make_uniform(8, 2, sampler=per, transform=Compose(DoubleToFloat()))
    for lane, priority in enumerate((2.0, 5.0)):
        step = torch.arange(3)
        data = goal_transitions(torch.full((3,), lane), step, torch.zeros(3, dtype=torch.bool))
        data["td_error"] = torch.full((3,), priority, dtype=torch.float64)
        index = storage.extend(data, lanes=[lane], update_priority=update_priority)
        assert index.tolist() == [lane, lane + 2, lane + 4]

    assert storage.episodes.episodes()["length"].tolist() == [3, 3]
    expected = [1.0] * 6 if update_priority is False else [2.0, 5.0] * 3
    assert per.priorities[:6].tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="lanes"):
        storage.extend(data, lanes=[2])
    assert len(storage) == 6


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
