"""ERESampler and ReturnImprovementEta: which rows are in reach, against the plain-Python ring."""

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from damages import damaged_states
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from oracles import RingOracle
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler, SchedulerList, StepScheduler

from trl_storages.ring import EpisodeIndex
from trl_storages.rows import PackedStorage
from trl_storages.samplers.base import UniformSampler
from trl_storages.samplers.emphasis import ERESampler
from trl_storages.samplers.hindsight import HERSampler
from trl_storages.samplers.return_improvement import ReturnImprovementEta
from trl_storages.writing import EpisodeWriter


class Rows(SimpleNamespace):
    """As much of a storage as samplers without priorities see: a length and an episode index."""

    def __len__(self):
        return len(self.episodes)


class Ring:
    """An episode index and the model of it, written alike."""

    def __init__(self, capacity, num_envs=1):
        self.storage = Rows(episodes=EpisodeIndex(capacity, num_envs))
        self.model = RingOracle(capacity, num_envs)

    def write(self, num_steps, lanes=None):
        num_lanes = self.model.num_envs if lanes is None else len(lanes)
        done = torch.zeros(num_lanes, num_steps, dtype=torch.bool)
        self.storage.episodes.append(done, lanes=lanes)
        self.model.append(done.tolist(), lanes=lanes)

    def newest(self, count):
        return {self.model.slot(row) for row in self.model.by_age()[:count]}

    def draws(self, sampler, batch_size=1000):
        index, info = sampler.sample(self.storage, batch_size)
        assert index.shape == (batch_size,)
        assert index.dtype is torch.int64
        assert info == {}
        return index


def window_of(num_rows, eta, k, num_updates, c_min):
    """The paper's formula, cut to what is there."""
    return min(math.floor(max(num_rows * eta ** (k * 1000 / num_updates), c_min)), num_rows)


def make_buffer(sampler, capacity=100, num_envs=1, storage=PackedStorage, **kwargs):
    return TensorDictReplayBuffer(
        storage=storage(capacity),
        sampler=sampler,
        writer=EpisodeWriter(num_envs),
        batch_size=kwargs.pop("batch_size", 64),
        generator=torch.Generator().manual_seed(kwargs.pop("seed", 0)),
        **kwargs,
    )


def transitions(num_steps, first=0):
    step = torch.arange(first, first + num_steps)
    return TensorDict({"step": step, "next": {"done": (step % 7 == 6).unsqueeze(-1)}}, [num_steps])


# The window


@pytest.mark.requirement("ere-window")
@given(data=st.data())
def test_exactly_the_newest_rows_are_drawn(data):
    num_envs = data.draw(st.integers(1, 3), "lanes")
    ring = Ring(data.draw(st.integers(num_envs, 14), "capacity"), num_envs)
    lanes = st.lists(st.integers(0, num_envs - 1), min_size=1, unique=True)
    for _ in range(data.draw(st.integers(1, 4), "writes")):
        ring.write(data.draw(st.integers(1, 9), "steps"), data.draw(st.none() | lanes, "written"))
    eta = data.draw(st.sampled_from([0.99, 0.997, 0.999, 0.9999, 1.0]), "eta")
    c_min = data.draw(st.integers(1, 15), "c_min")
    num_updates = data.draw(st.integers(1, 6), "K")

    sampler = ERESampler(eta, c_min)
    sampler.begin_phase(num_updates)
    num_rows = len(ring.storage)
    for k in range(1, num_updates + 1):
        window = window_of(num_rows, eta, k, num_updates, c_min)
        # 14 rows at most: one is missed with a probability below 14 * (13 / 14)^600 < 1e-17.
        assert set(ring.draws(sampler, 600).tolist()) == ring.newest(window)


@pytest.mark.requirement("ere-window")
@pytest.mark.parametrize("storage", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize("num_rows", [60, 100, 101, 130, 200, 263])
def test_ages_stay_below_the_window_around_the_wrap(num_rows, storage):
    eta, num_updates, stored = 0.999, 20, min(num_rows, 100)
    buffer = make_buffer(ERESampler(eta, c_min=10), storage=storage, batch_size=1500)
    for first in range(0, num_rows, 13):
        buffer.extend(transitions(min(13, num_rows - first), first))
    buffer.sampler.begin_phase(num_updates)
    for k in range(1, num_updates + 1):
        ages = num_rows - 1 - buffer.sample()["step"]
        assert ages.min() == 0
        assert ages.max() == window_of(stored, eta, k, num_updates, 10) - 1


@pytest.mark.requirement("ere-window")
def test_draws_are_uniform_in_the_window():
    ring = Ring(97, num_envs=2)
    ring.write(60)
    ring.write(5, lanes=[1])
    sampler = ERESampler(0.9, c_min=20)
    sampler.begin_phase(1)
    window = sorted(ring.newest(20))
    index = torch.cat([ring.draws(sampler) for _ in range(50)])
    counts = torch.bincount(index, minlength=97)
    assert counts.sum() == counts[window].sum() == 50_000
    assert stats.chisquare(counts[window]).pvalue > 1e-3


@pytest.mark.requirement("ere-window")
def test_fewer_rows_than_c_min_are_drawn_uniformly():
    ring = Ring(1000)
    ring.write(30)
    sampler = ERESampler(eta=0.9, c_min=31)
    index = torch.cat([ring.draws(sampler) for _ in range(50)])
    assert stats.chisquare(torch.bincount(index, minlength=30)).pvalue > 1e-3


@pytest.mark.requirement("ere-window")
def test_capacity_as_the_reference():
    ring = Ring(101)
    ring.write(40)
    sampler = ERESampler(0.5 ** (1 / 1000), c_min=1, reference="capacity")
    sampler.begin_phase(1)
    # Half of the capacity is more than there is.
    assert set(ring.draws(sampler).tolist()) == set(range(40))
    ring.write(20)
    assert set(ring.draws(sampler).tolist()) == set(range(10, 60))


@pytest.mark.requirement("ere-window")
def test_hindsight_over_emphasis():
    ring = Ring(50)
    ring.write(70)
    sampler = HERSampler(base=ERESampler(0.9, c_min=5))
    sampler.base.begin_phase(1)
    index, info = sampler.sample(ring.storage, 500)
    assert set(index.tolist()) == ring.newest(5)
    assert set(info) == {"goal_index", "her_mask"}


# Phases


def windows(sampler, num_rows, num_draws):
    """The window of each of the next draws."""
    ring = Ring(num_rows)
    ring.write(num_rows)
    sizes = []
    for _ in range(num_draws):
        ring.draws(sampler, 1)
        sizes.append(int(sampler.window(ring.storage.episodes)))
    return sizes


def test_begin_phase_starts_over_and_the_last_window_stays():
    sampler = ERESampler(0.5 ** (2 / 1000), c_min=1)
    sampler.begin_phase(2)
    assert windows(sampler, 65, 4) == [32, 16, 16, 16]
    sampler.begin_phase(1)
    assert windows(sampler, 65, 1) == [16]


@pytest.mark.parametrize("num_updates", [0, -3, 2.5, True])
def test_a_phase_has_at_least_one_update(num_updates):
    sampler = ERESampler()
    sampler.begin_phase(7)
    message = "num_updates must be an integer of at least 1, got"
    with pytest.raises((TypeError, ValueError), match=message):
        sampler.begin_phase(num_updates)
    assert sampler.num_updates == 7


def test_a_write_starts_a_phase_once_the_updates_are_made():
    sampler = ERESampler(updates_per_phase=3)
    buffer = make_buffer(sampler)
    seen = []
    for draws in (3, 2, 2, 1):
        buffer.extend(transitions(5))
        for _ in range(draws):
            buffer.sample()
            seen.append(sampler.update)
    # The third write finds two updates of three made, and lets the phase go on.
    assert seen == [1, 2, 3, 1, 2, 3, 4, 1]
    assert sampler.num_updates == 3


def test_a_write_leaves_a_phase_that_was_begun_by_hand():
    sampler = ERESampler(updates_per_phase=3)
    buffer = make_buffer(sampler)
    buffer.add(transitions(1)[0])
    sampler.begin_phase(2)
    for expected in (1, 2, 1):
        buffer.sample()
        assert sampler.update == expected
        buffer.add(transitions(1)[0])
    assert sampler.num_updates == 3


def test_without_a_length_phases_take_as_many_updates_as_the_one_before():
    sampler = ERESampler()
    sampler.extend(torch.arange(3))
    assert sampler.num_updates == 1000
    ring = Ring(4)
    ring.write(4)
    for draws, expected in ((1000, 1000), (1300, 1300), (1300, 1300)):
        for _ in range(draws):
            ring.draws(sampler, 1)
        sampler.extend(torch.arange(3))
        assert sampler.num_updates == expected
        assert sampler.update == 0


def test_a_step_before_each_update_still_narrows_the_window():
    sampler = ERESampler(0.99, c_min=1, updates_per_phase=4)
    buffer = make_buffer(sampler)
    buffer.extend(transitions(99))
    sizes = []
    for _ in range(8):
        buffer.add(transitions(1)[0])
        buffer.sample()
        sizes.append(int(sampler.window(buffer.storage.episodes)))
    # 100 * 0.99^250 = 8.1, and so on: four windows, and the four again.
    assert sizes == [8, 1, 1, 1, 8, 1, 1, 1]


def test_emptying_ends_the_phase():
    buffer = make_buffer(ERESampler(updates_per_phase=3))
    buffer.extend(transitions(5))
    buffer.sample()
    buffer.empty()
    assert (buffer.sampler.update, buffer.sampler.num_updates) == (0, 0)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()


# Parameters


@pytest.mark.requirement("live-parameters")
def test_new_parameters_hold_from_the_next_draw():
    sampler = ERESampler(1.0, c_min=1)
    sampler.begin_phase(1)
    assert windows(sampler, 65, 1) == [65]
    sampler.eta = 0.5 ** (1 / 1000)
    assert windows(sampler, 65, 1) == [32]
    sampler.c_min = 40
    assert windows(sampler, 65, 1) == [40]
    sampler.reference = "capacity"
    assert windows(sampler, 65, 1) == [40]


@pytest.mark.requirement("live-parameters")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("eta", 0.0, r"eta must be in \(0, 1\], got 0.0"),
        ("eta", 1.01, r"eta must be in \(0, 1\], got 1.01"),
        ("eta", -0.5, r"eta must be in \(0, 1\]"),
        ("eta", float("nan"), r"eta must be in \(0, 1\], got nan"),
        ("c_min", 0, "c_min must be an integer of at least 1, got 0"),
        ("c_min", 1.5, "c_min must be an integer of at least 1, got 1.5"),
        ("updates_per_phase", 0, "updates_per_phase must be an integer of at least 1, got 0"),
        ("reference", "rows", "reference must be one of"),
    ],
)
def test_nonsense_raises_and_changes_nothing(name, value, message):
    with pytest.raises(ValueError, match=message):
        ERESampler(**{name: value})
    sampler = ERESampler()
    before = getattr(sampler, name)
    with pytest.raises(ValueError, match=message):
        setattr(sampler, name, value)
    assert getattr(sampler, name) == before


@pytest.mark.requirement("ere-eta")
def test_torchrls_linear_scheduler_walks_the_closed_form():
    buffer = make_buffer(ERESampler(eta=0.994))
    scheduler = LinearScheduler(buffer, "eta", final_value=1.0, num_steps=10)
    for step in range(1, 15):
        scheduler.step()
        assert type(buffer.sampler.eta) is float
        assert buffer.sampler.eta == pytest.approx(0.994 + 0.006 * min(step / 10, 1), abs=1e-15)
    assert buffer.sampler.eta == 1.0


@pytest.mark.requirement("ere-eta")
def test_a_scheduler_that_leaves_the_range_is_stopped():
    sampler = ERESampler(eta=0.9)
    with pytest.raises(ValueError, match="eta must be in"):
        StepScheduler(sampler, "eta", gamma=1.2).step()
    assert sampler.eta == 0.9


# What stands underneath


def test_bases_that_know_no_window_are_refused():
    for base in (RandomSampler(), SamplerWithoutReplacement(), HERSampler(), "uniform"):
        with pytest.raises(TypeError, match=f"within a window.* got {type(base).__name__}"):
            ERESampler(base=base)


class Listener(UniformSampler):
    """Writes down what it is told."""

    def __init__(self):
        self.heard = []

    def add(self, index):
        self.heard.append(("add", index))

    def extend(self, index):
        self.heard.append(("extend", index))

    def mark_update(self, index, *, storage=None):
        self.heard.append(("mark_update", index))

    def _empty(self):
        self.heard.append(("empty", None))


def test_the_base_hears_of_writes_and_gets_the_window():
    base = Listener()
    sampler = ERESampler(0.5, c_min=2, base=base)
    generator = torch.Generator().manual_seed(1)
    sampler._rng = generator
    assert base._rng is generator
    sampler.add(3)
    sampler.extend([4])
    sampler.mark_update(5)
    sampler._empty()
    assert base.heard == [("add", 3), ("extend", [4]), ("mark_update", 5), ("empty", None)]
    ring = Ring(9)
    ring.write(9)
    sampler.begin_phase(1)
    assert set(ring.draws(sampler).tolist()) == {7, 8}


def test_a_storage_without_an_index_says_which_writer_it_needs():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), sampler=ERESampler())
    buffer.extend(transitions(3))
    with pytest.raises(RuntimeError, match="EpisodeWriter"):
        buffer.sample(2)


# Saving


def continued(buffer):
    return [buffer.sample()["index"].tolist() for _ in range(100)]


@pytest.mark.requirement("persistence")
def test_a_saved_buffer_goes_on_with_the_same_draws(tmp_path):
    def make(**kwargs):
        return make_buffer(ERESampler(updates_per_phase=30, **kwargs), seed=3)

    buffer = make(eta=0.999, c_min=4)
    buffer.extend(transitions(150))
    for _ in range(17):
        buffer.sample()
    buffer.sampler.eta = 0.998
    state = buffer.state_dict()
    buffer.dumps(tmp_path)
    expected = continued(buffer)

    loaded = make()
    loaded.extend(transitions(1))
    loaded.load_state_dict(state)
    assert (loaded.sampler.eta, loaded.sampler.c_min, loaded.sampler.update) == (0.998, 4, 17)
    assert continued(loaded) == expected

    loaded = make()
    loaded.loads(tmp_path)
    assert continued(loaded) == expected


def test_a_state_that_lacks_an_entry_is_refused():
    state = ERESampler().state_dict()
    del state["c_min"]
    with pytest.raises(KeyError, match="c_min"):
        ERESampler().load_state_dict(state)


def test_pickling_keeps_the_phase():
    sampler = ERESampler(0.9, updates_per_phase=4)
    sampler._rng = torch.Generator()
    sampler.begin_phase(9)
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict()
    assert copy._rng is None


class EmphasisMachine(RuleBasedStateMachine):
    """Writes, draws, phases, parameters, clears and saves, against phases counted by hand."""

    @initialize(num_envs=st.sampled_from([1, 3]), capacity=st.integers(3, 12))
    def make(self, num_envs, capacity):
        self.num_envs, self.capacity = num_envs, capacity
        self.buffer = self.new_buffer(seed=capacity)
        self.model = RingOracle(capacity, num_envs)
        self.eta, self.c_min, self.length = 0.999, 2, None
        self.k = self.num_updates = 0

    def new_buffer(self, seed):
        return make_buffer(
            ERESampler(0.999, c_min=2),
            capacity=self.capacity,
            num_envs=self.num_envs,
            batch_size=400,
            seed=seed,
        )

    @property
    def sampler(self):
        return self.buffer.sampler

    def begin(self, num_updates):
        self.k, self.num_updates = 0, num_updates

    def begin_next(self):
        self.begin(self.length or max(1000, self.k))

    @rule(num_steps=st.integers(1, 6), data=st.data())
    def write(self, num_steps, data):
        lanes = None
        if self.num_envs > 1:
            lanes = data.draw(
                st.none() | st.lists(st.integers(0, self.num_envs - 1), min_size=1, unique=True)
            )
        num_lanes = self.num_envs if lanes is None else len(lanes)
        rows = transitions(num_lanes * num_steps)
        done = rows["next", "done"].view(num_lanes, num_steps)
        self.model.append(done.tolist(), lanes=lanes)
        rows = rows if self.num_envs == 1 else rows.view(num_lanes, num_steps)
        self.buffer.writer.extend(rows, lanes=lanes)
        self.sampler.extend(torch.arange(num_steps))
        if self.k >= self.num_updates:
            self.begin_next()

    @precondition(lambda self: self.model.live())
    @rule()
    def draw(self):
        if not self.num_updates:
            self.begin_next()
        self.k += 1
        newest = [self.model.slot(row) for row in self.model.by_age()]
        k = min(self.k, self.num_updates)
        window = window_of(len(newest), self.eta, k, self.num_updates, self.c_min)
        # One of 12 rows is missed with a probability below 12 * (11 / 12)^400 < 1e-14.
        assert set(self.buffer.sample()["index"].tolist()) == set(newest[:window])

    @precondition(lambda self: not self.model.live())
    @rule()
    def draw_from_nothing(self):
        with pytest.raises(RuntimeError, match="empty"):
            self.buffer.sample()

    @rule(num_updates=st.integers(1, 5))
    def begin_phase(self, num_updates):
        self.sampler.begin_phase(num_updates)
        self.begin(num_updates)

    @rule(
        eta=st.sampled_from([0.99, 0.999, 0.9999, 1.0]),
        c_min=st.integers(1, 13),
        length=st.none() | st.integers(1, 4),
    )
    def set_parameters(self, eta, c_min, length):
        self.sampler.eta, self.eta = eta, eta
        self.sampler.c_min, self.c_min = c_min, c_min
        self.sampler.updates_per_phase, self.length = length, length

    @rule()
    def clear(self):
        self.buffer.empty()
        self.model.clear()
        self.begin(0)

    @rule()
    def save_and_load(self):
        loaded = self.new_buffer(seed=0)
        if self.model.live():
            # A storage learns its fields from the first write.
            loaded.writer.extend(transitions(self.num_envs))
            loaded.load_state_dict(self.buffer.state_dict())
        else:
            loaded.sampler.load_state_dict(self.sampler.state_dict())
        self.buffer = loaded


TestEmphasisMachine = EmphasisMachine.TestCase
TestEmphasisMachine.settings = settings(max_examples=40, stateful_step_count=25)
TestEmphasisMachine = pytest.mark.requirement("ere-window")(TestEmphasisMachine)


# Devices


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("reference", ["stored", "capacity"])
def test_sampling_never_waits_for_the_gpu(gpu, num_envs, reference):
    class Storage(SimpleNamespace):
        def __len__(self):
            return 4 * num_envs

    storage = Storage(episodes=EpisodeIndex(30, num_envs, device=gpu))
    storage.episodes.append(torch.zeros(num_envs, 4, dtype=torch.bool, device=gpu))
    index, _ = ERESampler(0.99, c_min=2, reference=reference).sample(storage, 8)
    assert index.device == gpu
    assert index.dtype is torch.int64


# The adaptive rule


@pytest.mark.requirement("ere-eta")
def test_eta_follows_a_trace_by_hand():
    sampler = ERESampler(eta=0.5)
    scheduler = ReturnImprovementEta(sampler, num_returns=3, decay=0.5)
    assert sampler.eta == 0.5
    # Three returns: the slope is half the difference of the last and the first.
    trace = [
        (0.0, 0.75),  # no slope yet: s = 0, half way between 0.5 and 1
        (1.0, 0.75),
        (4.0, 0.5),  # slope 2, the steepest: s = 1
        (2.0, 0.625),  # slope 0.5 against hi = 1: s = 0.5
        (0.0, 1.0),  # slope -2, the steepest fall: s = -1
        (1.0, 0.875),  # slope -0.5 against lo = 1: s = -0.5
        (0.0, 0.75),  # slope 0
        (2.0, 0.5),  # slope 0.5 above hi, which four episodes have shrunk to 0.0625
    ]
    for value, eta in trace:
        scheduler.step(value)
        assert sampler.eta == eta
    assert scheduler.improvement == 1.0


@pytest.mark.requirement("ere-eta")
def test_the_default_rule_looks_at_twenty_returns():
    sampler = ERESampler(eta=0.99)
    scheduler = ReturnImprovementEta(sampler)
    scheduler.step(torch.arange(19.0))
    assert sampler.eta == pytest.approx(0.995, abs=1e-15)
    scheduler.step(19.0)  # slope 1, the steepest
    assert sampler.eta == 0.99
    # The window is 1, 2, .. 19, 9: its gradient ends in (9 - 18) / 2 and 9 - 19, and 18 ones.
    slope = (18 - 4.5 - 10) / 20
    scheduler.step(9.0)
    assert sampler.eta == pytest.approx(1 - 0.01 * (1 + slope / 0.9999) / 2, abs=1e-15)


@pytest.mark.requirement("ere-eta")
@pytest.mark.parametrize("returns", [[], [5.0], [5.0] * 19, [5.0] * 60, [0.0] * 60])
def test_no_history_and_a_flat_one_give_the_middle(returns):
    sampler = ERESampler(eta=0.5)
    ReturnImprovementEta(sampler).step(returns)
    assert sampler.eta == 0.75


@pytest.mark.requirement("ere-eta")
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=60))
def test_eta_stays_in_its_range_however_returns_are_batched(returns):
    one, many = (ERESampler(eta=0.9) for _ in range(2))
    scheduler = ReturnImprovementEta(one, num_returns=4)
    for value in returns:
        scheduler.step(value)
        assert 0.9 <= one.eta <= 1.0
    ReturnImprovementEta(many, num_returns=4).step(returns)
    if returns:
        assert one.eta == many.eta


@pytest.mark.requirement("ere-eta")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_returns_that_are_not_finite_raise_and_change_nothing(wrong):
    sampler = ERESampler(eta=0.5)
    scheduler = ReturnImprovementEta(sampler, num_returns=2)
    scheduler.step([0.0, 1.0])
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="episode_returns must be finite"):
        scheduler.step([2.0, wrong])
    assert scheduler.state_dict() == before
    assert sampler.eta == 0.5


def test_schedulers_step_together_and_eta_then_stays():
    buffer = make_buffer(ERESampler(eta=0.5))
    scheduler = ReturnImprovementEta(buffer, num_returns=2)
    scheduler.step([0.0, 1.0, 1.0])
    SchedulerList([scheduler]).step()
    assert buffer.sampler.eta == 0.75


@pytest.mark.requirement("persistence")
def test_a_saved_rule_goes_on_alike():
    returns = [0.0, 3.0, 1.0, 4.0, 1.0, 5.0]
    sampler = ERESampler(eta=0.9)
    scheduler = ReturnImprovementEta(sampler, num_returns=3, decay=0.9)
    scheduler.step(returns)
    state = scheduler.state_dict()
    other = ERESampler(eta=0.7)
    loaded = ReturnImprovementEta(other)
    loaded.load_state_dict(state)
    assert loaded.state_dict() == state
    for value in (9.0, 2.0, 6.0):
        scheduler.step(value)
        loaded.step(value)
        assert other.eta == sampler.eta
    # The saved state is a copy.
    assert state["returns"] == [4.0, 1.0, 5.0]
    del state["decay"]
    with pytest.raises(KeyError, match="decay"):
        loaded.load_state_dict(state)


@pytest.mark.requirement("refused-is-unchanged")
def test_a_damaged_state_of_a_schedule_is_refused():
    scheduler = ReturnImprovementEta(ERESampler(eta=0.5), num_returns=3)
    scheduler.step([1.0, 2.0, 4.0])
    before, tried = scheduler.state_dict(), 0
    returns = [1.0, math.nan, 4.0], [1.0] * 4, [1.0, "x"]
    damaged = [(f"returns {it}", {**before, "returns": it}) for it in returns]
    for name, state in (*damaged_states(before), *damaged):
        # What may well be so: fewer returns, and slopes of any size.
        entry, _, damage = name.partition(": ")
        if (entry, damage) in {
            ("returns", "shorter"),
            ("steepest_rise", "negative"),
            *((entry, "huge") for entry in ("steepest_rise", "steepest_fall")),
            ("improvement", "negative"),
        }:
            continue
        tried += 1
        with pytest.raises((KeyError, TypeError, ValueError), match="the saved"):
            scheduler.load_state_dict(state)
        assert scheduler.state_dict() == before, name
    assert tried > 30


def test_a_schedule_in_files(tmp_path):
    """Also before its first slope, which is none."""
    first, second = (ReturnImprovementEta(ERESampler(eta=0.5), num_returns=3) for _ in range(2))
    for returns in ([], [1.0, 2.0, 4.0]):
        first.step(returns)
        first.dumps(tmp_path)
        second.loads(tmp_path)
        assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_returns": 1}, "num_returns must be an integer of at least 2, got 1"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"decay": 1.5}, r"decay must be in \(0, 1\], got 1.5"),
    ],
)
def test_rules_out_of_range_raise(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ReturnImprovementEta(ERESampler(), **kwargs)


def test_a_sampler_without_eta_is_refused():
    for sampler in (RandomSampler(), HERSampler()):
        with pytest.raises(ValueError, match="eta"):
            ReturnImprovementEta(sampler)


def test_the_rule_finds_the_emphasis_under_other_samplers():
    emphasis = ERESampler(eta=0.5)
    scheduler = ReturnImprovementEta(make_buffer(HERSampler(base=emphasis)), num_returns=2)
    scheduler.step([1.0, 0.0])
    assert emphasis.eta == 1.0
