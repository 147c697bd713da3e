"""EpisodeIndex: golden values, and a state machine against the plain-Python ring."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import RingOracle

from trl_storages.ring import EpisodeIndex, episodes_of


def flags(rows):
    return torch.tensor(rows, dtype=torch.bool)


class TestOneLane:
    """Six places: an episode of three, one of four that wraps, and the start of a third."""

    @pytest.fixture
    def index(self):
        index = EpisodeIndex(6)
        index.append(flags([[0, 0, 1, 0, 0]]))
        return index

    def test_before_wrap_around(self, index):
        slots = torch.arange(5)
        assert len(index) == 5
        assert not index.is_full
        assert index.behind(slots).tolist() == [0, 1, 2, 0, 1]
        assert index.ahead(slots).tolist() == [2, 1, 0, 1, 0]
        assert index.ages(slots).tolist() == [4, 3, 2, 1, 0]
        assert index.is_finished(slots).tolist() == [True, True, True, False, False]
        assert index.is_whole(slots).tolist() == [True] * 5
        assert len(set(index.episode_id(slots).tolist())) == 2

    def test_after_wrap_around(self, index):
        written = index.append(flags([[0, 1, 0]]))
        assert written.tolist() == [[5, 0, 1]]
        slots = torch.tensor([2, 3, 4, 5, 0, 1])  # in time order
        assert len(index) == 6
        assert index.is_full
        assert index.behind(slots).tolist() == [0, 0, 1, 2, 3, 0]
        assert index.ahead(slots).tolist() == [0, 3, 2, 1, 0, 0]
        assert index.ages(slots).tolist() == [5, 4, 3, 2, 1, 0]
        assert index.is_finished(slots).tolist() == [True] * 5 + [False]
        assert index.is_whole(slots).tolist() == [False] + [True] * 5
        assert index.shift(torch.tensor([4, 0]), torch.tensor([2, -1])).tolist() == [0, 5]

    def test_a_cut_ends_an_episode_without_finishing_it(self, index):
        index.append(flags([[0]]), cut=flags([[1]]))
        slots = torch.arange(6)
        assert index.behind(slots).tolist() == [0, 1, 2, 0, 1, 0]
        assert index.ahead(slots).tolist() == [2, 1, 0, 1, 0, 0]
        assert index.is_finished(slots).tolist() == [True] * 3 + [False] * 3

    def test_an_episode_longer_than_the_ring_keeps_its_last_rows(self, index):
        index.append(flags([[0] * 20]))
        newest = index.slots_by_age(torch.zeros(1, dtype=torch.int64))
        assert index.behind(newest).tolist() == [5]
        assert not index.is_whole(newest).item()
        assert index.num_rows.item() == 6

    def test_an_episode_as_long_as_the_ring_is_whole(self):
        index = EpisodeIndex(4)
        index.append(flags([[1, 0, 0, 0, 1]]))
        slots = torch.tensor([1, 2, 3, 0])
        assert index.behind(slots).tolist() == [0, 1, 2, 3]
        assert index.is_whole(slots).all()
        index.append(flags([[1]]))
        assert not index.is_whole(torch.tensor([2])).item()


class TestLanes:
    def test_slots_are_time_major(self):
        index = EpisodeIndex(7, num_envs=2)  # the seventh place fits in no lane
        assert index.capacity == 6
        assert index.steps_per_lane == 3
        assert index.append(flags([[0, 1], [0, 0]])).tolist() == [[0, 2], [1, 3]]
        assert index.append(flags([0, 0])).tolist() == [4, 5]
        assert index.append(flags([0, 0])).tolist() == [0, 1]

    def test_a_lane_may_skip_steps(self):
        index = EpisodeIndex(8, num_envs=2)
        index.append(flags([0, 0]))
        assert index.append(flags([0]), lanes=[1]).tolist() == [3]
        assert index.append(flags([0, 0])).tolist() == [2, 5]
        assert index.cursors.tolist() == [2, 3]
        # Lane 0 holds slots 0, 2 and lane 1 holds 1, 3, 5; of equal steps the higher lane is newer.
        assert index.ages(torch.tensor([5, 2, 3, 0, 1])).tolist() == [0, 1, 2, 3, 4]
        assert index.slots_by_age(torch.arange(5)).tolist() == [5, 2, 3, 0, 1]
        assert index.ahead(torch.tensor([0, 1])).tolist() == [1, 2]

    def test_shapes_are_kept(self):
        index = EpisodeIndex(8, num_envs=2)
        index.append(flags([[0, 1, 0], [0, 0, 0]]))
        index.append(flags([0]), lanes=[0])  # lanes of unequal fill take another path
        numbers = (index.behind, index.ahead, index.ages, index.slots_by_age, index.episode_id)
        for slots in (torch.tensor(5), torch.arange(6).reshape(3, 2), torch.zeros(0).long()):
            for answer in numbers:
                assert answer(slots).shape == slots.shape
                assert answer(slots).dtype == torch.int64
            for answer in (index.is_finished, index.is_whole):
                assert answer(slots).shape == slots.shape
                assert answer(slots).dtype == torch.bool


class TestErrors:
    def test_no_room_for_a_lane(self):
        with pytest.raises(ValueError, match=r"2.*3|3.*2"):
            EpisodeIndex(2, num_envs=3)

    def test_wrong_number_of_lanes_writes_nothing(self):
        index = EpisodeIndex(8, num_envs=2)
        index.append(flags([[0, 0], [0, 0]]))
        for done, lanes in (
            (flags([[0], [0], [0]]), None),
            (flags([0]), None),
            (flags([0]), [0, 1]),
        ):
            with pytest.raises(ValueError, match="lane"):
                index.append(done, lanes=lanes)
        for lanes in ([0, 0], [0, 2], [-1, 0]):
            with pytest.raises((ValueError, IndexError), match="lane"):
                index.append(flags([0, 0]), lanes=lanes)
        assert len(index) == 4
        assert index.cursors.tolist() == [2, 2]
        index.validate()

    def test_a_storage_without_episodes_names_the_writer(self):
        class Bare:
            pass

        with pytest.raises(RuntimeError, match="EpisodeWriter"):
            episodes_of(Bare())


class EpisodeMachine(RuleBasedStateMachine):
    """Writes of every shape, evictions, clears and reloads; every answer is compared after each."""

    @initialize(
        num_envs=st.integers(1, 4),
        places=st.integers(1, 7),
        over=st.integers(0, 3),
        spare_steps=st.sampled_from([0, 1, 3, None]),
    )
    def start(self, num_envs, places, over, spare_steps):
        self.size = num_envs * places + min(over, num_envs - 1)
        self.spare_steps = places if spare_steps is None else spare_steps
        self.index = self.empty_index(num_envs)
        self.oracle = RingOracle(self.size, num_envs, self.spare_steps)

    def empty_index(self, num_envs):
        return EpisodeIndex(self.size, num_envs, spare_steps=self.spare_steps)

    @rule(data=st.data())
    def append(self, data):
        num_envs, places = self.oracle.num_envs, self.oracle.places
        lanes = data.draw(
            st.none()
            | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
        )
        num_lanes = num_envs if lanes is None else len(lanes)
        steps = data.draw(st.integers(1, 2 * places + 3) | st.just(1))
        row = st.lists(st.sampled_from([False, False, False, True]), min_size=steps, max_size=steps)
        block = st.lists(row, min_size=num_lanes, max_size=num_lanes)
        done = data.draw(block)
        cut = data.draw(st.none() | block)
        as_given, lanes = self.lanes_argument(data, lanes)
        done_tensor, cut_tensor = flags(done), None if cut is None else flags(cut)
        single = steps == 1 and data.draw(st.booleans())
        if single:
            done_tensor = done_tensor[:, 0]
            cut_tensor = None if cut is None else cut_tensor[:, 0]
        slots = self.index.append(done_tensor, cut_tensor, as_given)
        expected = self.oracle.append(done, cut, lanes)
        # Of more steps than a lane has places only the last ones find a slot.
        lost = max(steps - places, 0)
        expected = [[-1] * lost + lane[lost:] for lane in expected]
        assert slots.dtype == torch.int64
        assert slots.tolist() == ([lane[0] for lane in expected] if single else expected)

    def lanes_argument(self, data, lanes):
        """The lanes as a list, a tuple, an int tensor or a mask; a mask has an order of its own."""
        if lanes is None:
            return None, None
        form = data.draw(st.sampled_from(["list", "tuple", "tensor", "mask"]))
        if form == "tensor":
            return torch.tensor(lanes), lanes
        if form == "mask":
            mask = torch.zeros(self.oracle.num_envs, dtype=torch.bool)
            mask[lanes] = True
            return mask, sorted(lanes)
        return (tuple(lanes) if form == "tuple" else lanes), lanes

    @rule()
    def clear(self):
        self.index.clear()
        self.oracle.clear()

    @rule(keep=st.integers(1, 9))
    def clear_but_the_last_steps(self, keep):
        """The kept rows move to the start of the ring, in the order that `clear` returns."""
        before = self.oracle.live()
        old, new = self.index.clear(keep_steps=keep)
        self.oracle.clear(keep)
        after = self.oracle.live()
        assert sorted(new.tolist()) == sorted(after)
        for source, target in zip(old.tolist(), new.tolist(), strict=True):
            assert before[source].episode == after[target].episode
            age = len(self.oracle.lanes[after[target].lane]) - after[target].step
            newest = max(row.step for row in before.values() if row.lane == before[source].lane)
            assert age == newest + 1 - before[source].step

    @rule()
    def reload(self):
        other = self.empty_index(self.oracle.num_envs)
        other.load_state_dict(self.index.state_dict())
        self.index = other

    @rule(data=st.data())
    def evict(self, data):
        tails = [data.draw(st.integers(0, len(lane) + 1)) for lane in self.oracle.lanes]
        self.index.evict(tails)
        self.oracle.evict(tails)

    @rule()
    def go_on_from_the_rows(self):
        """As a directory does that is opened: lane by lane, at steps other than 0."""
        self.index = self.empty_index(self.oracle.num_envs)
        for lane, history in enumerate(self.oracle.lanes):
            rows = self.oracle.surviving(lane)
            is_first = [
                all(row.episode != old.episode for old in history[: row.step]) for row in rows
            ]
            begins = [
                [is_first[i] and row.episode not in self.oracle.torn for i, row in enumerate(rows)]
            ]
            done = flags([[row.done for row in rows]])
            self.index.rejoin(done, flags(begins), len(history), [lane])

    @precondition(lambda self: len(self.index))
    @rule(data=st.data())
    def shift(self, data):
        row = data.draw(st.sampled_from(self.oracle.by_age()))
        for other in self.oracle.episode(row):
            slot = torch.tensor([self.oracle.slot(row)])
            assert self.index.shift(slot, other.step - row.step).item() == self.oracle.slot(other)

    @precondition(lambda self: len(self.index))
    @rule(num_rows=st.integers(1, 6))
    def windows(self, num_rows):
        rows = self.oracle.by_age()
        slots = torch.tensor([self.oracle.slot(row) for row in rows])
        window, length = self.index.windows(slots, num_rows)
        assert window.shape == (num_rows, len(rows))
        for column, row, size in zip(window.T.tolist(), rows, length.tolist(), strict=True):
            onward = [other for other in self.oracle.episode(row) if other.step >= row.step]
            expected = [self.oracle.slot(other) for other in onward[:num_rows]]
            assert size == len(expected)
            assert column == expected + expected[-1:] * (num_rows - size)

    @invariant()
    def sound(self):
        self.index.validate()

    @invariant()
    def counts(self):
        live = self.oracle.live()
        assert len(self.index) == len(live)
        assert self.index.num_rows.item() == len(live)
        assert self.index.is_full == (len(live) == self.index.capacity)
        assert self.index.fill.tolist() == self.index.host_fill.tolist()
        ring = torch.arange(-1, self.index.num_slots + 1)
        assert ring[self.index.is_live(ring)].tolist() == sorted(live)
        assert self.index.num_slots_reached == max(live, default=-1) + 1

    @invariant()
    def answers(self):
        rows = self.oracle.by_age()
        slots = torch.tensor([self.oracle.slot(row) for row in rows], dtype=torch.int64)
        ranks = torch.arange(len(rows))
        assert self.index.behind(slots).tolist() == [self.oracle.behind(row) for row in rows]
        assert self.index.ahead(slots).tolist() == [self.oracle.ahead(row) for row in rows]
        assert self.index.ages(slots).tolist() == ranks.tolist()
        assert self.index.slots_by_age(ranks).tolist() == slots.tolist()
        finished = [self.oracle.is_finished(row) for row in rows]
        assert self.index.is_finished(slots).tolist() == finished
        whole = [self.oracle.is_whole(row) for row in rows]
        assert self.index.is_whole(slots).tolist() == whole

    @invariant()
    def episodes_are_told_apart(self):
        rows = self.oracle.by_age()
        slots = torch.tensor([self.oracle.slot(row) for row in rows], dtype=torch.int64)
        ids = self.index.episode_id(slots).tolist()
        pairs = {(row.episode, name) for row, name in zip(rows, ids, strict=True)}
        assert len(pairs) == len({row.episode for row in rows}) == len(set(ids))

    @invariant()
    def episodes_are_listed(self):
        listed, expected = self.index.episodes(), []
        for lane in range(self.oracle.num_envs):
            for row in self.oracle.surviving(lane):
                if self.oracle.behind(row) == 0:
                    about = self.oracle.slot(row), self.oracle.ahead(row) + 1
                    expected.append(
                        (*about, self.oracle.is_finished(row), self.oracle.is_whole(row))
                    )
        names = ("first", "length", "finished", "whole")
        assert [*zip(*(listed[name].tolist() for name in names), strict=True)] == expected
        drawable = {first for first, _, finished, whole in expected if finished and whole}
        assert self.index.has_whole_episode() == bool(drawable)
        if drawable:
            assert set(self.index.random_episodes(8).tolist()) <= drawable

    @invariant()
    def newest_slots(self):
        since = [max(len(lane) - 3, 0) for lane in self.oracle.lanes]
        rows = [row for lane in range(len(since)) for row in self.oracle.surviving(lane)]
        new = [self.oracle.slot(row) for row in rows if row.step >= since[row.lane]]
        assert self.index.slots_since(torch.tensor(since)).tolist() == new
        for lane in range(len(since)):
            if self.oracle.surviving(lane):
                newest = self.oracle.slot(self.oracle.lanes[lane][-1])
                assert self.index.newest_slot([lane]) == newest

    @invariant()
    def draws_are_live(self):
        live = self.oracle.live()
        if live:
            assert set(self.index.random_slots(16).tolist()) <= set(live)


TestEpisodeMachine = EpisodeMachine.TestCase


def test_the_host_knows_the_fill_of_a_gpu(gpu):
    """It counts along, as nothing can be read back."""
    index = EpisodeIndex(12, 2, gpu, spare_steps=2)
    done = torch.zeros(2, 5, dtype=torch.bool, device=gpu)
    index.append(done)
    index.append(done[:1, :4], lanes=[1])
    assert (index.host_steps.tolist(), index.host_tails.tolist()) == ([5, 9], [0, 3])
    index.evict([7, 2])
    assert (index.host_steps.tolist(), index.host_tails.tolist()) == ([5, 9], [5, 3])
    assert (len(index), index.is_full) == (6, False)


@pytest.mark.parametrize("tail", [-1, 0, 8, 2**61])
def test_a_saved_tail_that_cannot_be(tail):
    """Seven steps of a lane of five: the oldest one that is live is from step 2 to 7."""
    index = EpisodeIndex(5, spare_steps=3)
    index.append(flags([[0, 0, 1, 0, 0, 0, 0]]))
    state = index.state_dict()
    state["lanes"][0, 3] = tail
    with pytest.raises(ValueError, match="oldest step of lane 0"):
        index.load_state_dict(state)
    assert index.tails.tolist() == [2]


@given(st.data())
def test_a_state_of_another_number_of_spare_steps(data):
    """As rows of a directory have that are loaded into memory, and the other way round."""
    num_envs, places = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    one, other = (
        EpisodeIndex(num_envs * places, num_envs, spare_steps=data.draw(st.integers(0, places)))
        for _ in "ab"
    )
    for _ in range(3):
        shape = num_envs, data.draw(st.integers(1, 4))
        size = shape[0] * shape[1]
        done = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        one.append(torch.tensor(done).view(shape))
    if data.draw(st.booleans()):
        one.evict(one.host_steps - data.draw(st.integers(0, places)))
    if data.draw(st.booleans()):
        one.end_episodes([data.draw(st.integers(0, num_envs - 1))])
    other.load_state_dict(one.state_dict())
    other.validate()
    ranks = torch.arange(len(one))
    slots, moved = one.slots_by_age(ranks), other.slots_by_age(ranks)
    for ask in ("steps", "behind", "ahead", "is_finished", "is_whole", "is_end"):
        assert torch.equal(getattr(one, ask)(slots), getattr(other, ask)(moved))
    assert torch.equal(one.is_open, other.is_open)
    assert torch.equal(one.cursors, other.cursors)
