"""HERSampler: which row each goal comes from, against the plain-Python ring."""

from collections import Counter, defaultdict

import pytest
import torch
from goal_data import HISTORIES, AsDrawn, achieved_goals, distance_reward, write
from hypothesis import given
from hypothesis import strategies as st
from oracles import RingOracle
from scipy import stats
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs.transforms import Compose

from trl_storages.functional.draws import kinds_of_batch
from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import HERSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

STRATEGIES = ["future", "final", "episode", "random"]
ROWS = {strategy: pytest.mark.requirement(f"her-{strategy}") for strategy in STRATEGIES}
each_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=mark) for name, mark in ROWS.items()]
)
each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)


def make_buffer(capacity, num_envs=1, strategy="future", num_goals=4, seed=0, **kwargs):
    return ReplayStorage(
        storage=kwargs.pop("storage", None) or PackedStorage(capacity),
        writer=EpisodeWriter(num_envs),
        sampler=HERSampler(strategy, num_goals, base=kwargs.pop("base", None)),
        transform=kwargs.pop("transform", None) or GoalRelabel(distance_reward),
        generator=torch.Generator().manual_seed(seed),
        **kwargs,
    )


def draws(buffer, num_rows, batch_size=1000):
    """The (anchor slot, goal slot) of relabelled rows, and the batches they came in."""
    pairs, batches = [], []
    while len(pairs) < num_rows:
        batch = buffer.sample(batch_size)
        mask = batch["her_mask"]
        anchors, goals = batch["index"][mask].tolist(), batch["goal_index"][mask].tolist()
        pairs += zip(anchors, goals, strict=True)
        batches.append(batch)
    return pairs, batches


def assert_uniform(pairs, oracle, strategy):
    """Each anchor's goals are exactly those the model names, and equally frequent."""
    live = oracle.live()
    seen = defaultdict(Counter)
    for anchor, goal in pairs:
        seen[anchor][goal] += 1
    assert set(seen) == set(live)
    statistic, freedom = 0.0, 0
    for anchor, counts in seen.items():
        candidates = [oracle.slot(row) for row in oracle.goals(live[anchor], strategy)]
        assert set(counts) == set(candidates)  # none that must not be drawn, none left out
        expected = counts.total() / len(candidates)
        statistic += sum((counts[slot] - expected) ** 2 / expected for slot in candidates)
        freedom += len(candidates) - 1
    if freedom:
        assert stats.chi2.sf(statistic, freedom) > 1e-4


class TestGoals:
    @each_strategy
    @each_history
    def test_drawn_uniformly_from_the_rows_allowed(self, history, strategy):
        buffer = make_buffer(history.capacity, history.num_envs, strategy)
        oracle = history.write(buffer)
        # About 60 draws for every pair of rows that there can be.
        pairs, _ = draws(buffer, 60 * len(oracle.live()) ** 2)
        assert_uniform(pairs, oracle, strategy)

    @each_strategy
    @each_history
    def test_the_goal_is_the_next_achieved_goal_of_its_row(self, history, strategy):
        buffer = make_buffer(history.capacity, history.num_envs, strategy)
        live = history.write(buffer).live()
        batch = buffer.sample(500)
        mask = batch["her_mask"]
        goal_rows = [live[slot] for slot in batch["goal_index"][mask].tolist()]
        assert torch.equal(batch["desired_goal"][mask], achieved_goals(goal_rows))
        assert torch.equal(batch["next", "desired_goal"][mask], achieved_goals(goal_rows))

    @each_strategy
    def test_over_stock_storages(self, strategy):
        history = HISTORIES["lanes"]
        storage = LazyTensorStorage(history.capacity)
        buffer = make_buffer(history.capacity, history.num_envs, strategy, storage=storage)
        oracle = history.write(buffer)
        pairs, _ = draws(buffer, 60 * len(oracle.live()) ** 2)
        assert_uniform(pairs, oracle, strategy)

    def test_in_a_stock_buffer(self):
        """Its info reaches the batch, though no transform of a stock buffer can see it."""
        history = HISTORIES["wrapped"]
        buffer = TensorDictReplayBuffer(
            storage=PackedStorage(history.capacity),
            writer=EpisodeWriter(),
            sampler=HERSampler("future", 4),
            batch_size=64,
        )
        oracle = history.write(buffer)
        live, batch = oracle.live(), buffer.sample()
        for anchor, goal in zip(batch["index"].tolist(), batch["goal_index"].tolist(), strict=True):
            assert live[goal] in oracle.goals(live[anchor], "future")


@pytest.mark.requirement("her-final")
def test_final_is_the_true_last_state():
    """Four rows by hand: the goal is what the last action led to, not what it started from."""
    buffer = make_buffer(4, strategy="final")
    oracle = RingOracle(4)
    write(buffer, oracle, [[False, False, False, True]])
    batch = buffer.sample(100)
    assert batch["desired_goal"][batch["her_mask"]].unique(dim=0).tolist() == [[0.0, 3.0, 1.0]]


@pytest.mark.requirement("her-future")
def test_future_includes_the_outcome_of_the_transition_itself():
    buffer = make_buffer(4, strategy="future")
    write(buffer, RingOracle(4), [[False, False, False, True]])
    batch = buffer.sample(1000)
    last = batch["her_mask"] & (batch["index"] == 3)
    assert batch["desired_goal"][last].unique(dim=0).tolist() == [[0.0, 3.0, 1.0]]
    own = batch["her_mask"] & (batch["index"] == batch["goal_index"])
    assert set(batch["index"][own].tolist()) == {0, 1, 2, 3}


@pytest.mark.requirement("her-unfinished")
@each_strategy
def test_an_unfinished_episode_is_relabelled_with_what_was_seen(strategy):
    """While a third episode grows row by row over the ring of ten."""
    buffer, oracle = make_buffer(10, strategy=strategy), RingOracle(10)
    write(buffer, oracle, [[False, False, True] * 2])
    for _ in range(14):
        write(buffer, oracle, [[False]])
        pairs, _ = draws(buffer, 300, batch_size=300)
        live = oracle.live()
        for anchor, goal in pairs:
            assert live[goal] in oracle.goals(live[anchor], strategy)
        newest = oracle.by_age()[0]
        reached = {goal for anchor, goal in pairs if anchor == oracle.slot(newest)}
        if strategy in ("future", "final"):
            assert reached <= {oracle.slot(newest)}


flags = st.sampled_from([False, False, True])


@st.composite
def histories(draw):
    """Any writes at all: capacity, lanes, the lanes of each write, its steps and its ends."""
    num_envs = draw(st.integers(1, 3))
    capacity = num_envs * draw(st.integers(1, 9)) + draw(st.integers(0, num_envs - 1))
    blocks = []
    for _ in range(draw(st.integers(1, 6))):
        lanes = draw(
            st.none()
            | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
        )
        size = draw(st.integers(1, 12))
        row = st.lists(flags, min_size=size, max_size=size)
        num_lanes = len(lanes or range(num_envs))
        blocks.append((draw(st.lists(row, min_size=num_lanes, max_size=num_lanes)), lanes))
    return capacity, num_envs, blocks


@pytest.mark.requirement("her-overwrite")
@given(history=histories(), strategy=st.sampled_from(STRATEGIES), seed=st.integers(0, 2**32))
def test_the_goal_never_leaves_the_episode(history, strategy, seed):
    capacity, num_envs, blocks = history
    buffer, oracle = (
        make_buffer(capacity, num_envs, strategy, seed=seed),
        RingOracle(capacity, num_envs),
    )
    for done, lanes in blocks:
        write(buffer, oracle, done, lanes)
        batch = buffer.sample(50)
        live = oracle.live()
        assert set(batch["index"].tolist()) <= set(live)
        mask = batch["her_mask"]
        goals = [live[slot] for slot in batch["goal_index"][mask].tolist()]
        for anchor, goal in zip(batch["index"][mask].tolist(), goals, strict=True):
            assert goal in oracle.goals(live[anchor], strategy)
        assert torch.equal(batch["desired_goal"][mask], achieved_goals(goals))


@pytest.mark.requirement("her-vector")
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("name", [name for name, h in HISTORIES.items() if h.num_envs > 1])
def test_lanes_are_as_separate_single_lane_storages(name, strategy):
    history = HISTORIES[name]
    buffer = make_buffer(history.capacity, history.num_envs, strategy)
    history.write(buffer)
    places = history.capacity // history.num_envs
    alone = [RingOracle(places) for _ in range(history.num_envs)]
    for done, lanes in history.blocks:
        for row, lane in zip(done, lanes or range(history.num_envs), strict=True):
            alone[lane].append([row])
    expected = {
        (lane, row.step, goal.step)
        for lane, oracle in enumerate(alone)
        for row in oracle.live().values()
        for goal in oracle.goals(row, strategy)
    }
    seen = set()
    for batch in draws(buffer, 40 * sum(len(oracle.live()) for oracle in alone) ** 2)[1]:
        batch = batch[batch["her_mask"]]
        goal_lanes, goal_steps, _ = batch["desired_goal"].unbind(-1)
        row_lanes, row_steps, _ = batch["achieved_goal"].unbind(-1)
        assert torch.equal(goal_lanes, row_lanes)
        seen |= set(zip(row_lanes.tolist(), row_steps.tolist(), goal_steps.tolist(), strict=True))
    assert seen == expected


@pytest.mark.requirement("her-ratio")
class TestRatio:
    @pytest.mark.parametrize("num_goals", [0, 1, 2, 4, 9])
    def test_exactly_that_many_rows(self, num_goals):
        buffer = make_buffer(40, num_goals=num_goals)
        write(buffer, RingOracle(40), [[False] * 40])
        for batch_size in [*range(2, 41), 255, 256]:
            batch = buffer.sample(batch_size)
            relabelled = batch_size * num_goals // (num_goals + 1)
            assert batch["her_mask"].dtype == torch.bool
            assert batch["her_mask"].shape == (batch_size,)
            assert batch["her_mask"].sum() == relabelled
            rest = ~batch["her_mask"]
            assert torch.equal(batch["goal_index"][rest], batch["index"][rest])

    @pytest.mark.parametrize("num_goals", [0, 1, 4, 300, float("inf")])
    def test_every_part_of_a_split_batch_keeps_the_ratio(self, num_goals):
        """To within one row, wherever the batch is split; of any k + 1 neighbours k are relabelled."""
        buffer = make_buffer(40, num_goals=num_goals)
        write(buffer, RingOracle(40), [[False] * 40])
        mask = buffer.sample(256)["her_mask"]
        share = 1.0 if num_goals == float("inf") else num_goals / (num_goals + 1)
        sums = torch.cat([torch.zeros(1), mask.cumsum(0)])
        for size in range(1, 257):
            parts = sums[size:] - sums[:-size]
            assert ((parts - size * share).abs() < 1).all()

    @pytest.mark.parametrize("num_goals", [0, 1, 4])
    def test_a_batch_of_one_is_relabelled_with_that_probability(self, num_goals):
        """The floor would be 0 for ever; a coin with the same ratio stands in for it."""
        buffer = make_buffer(8, num_goals=num_goals)
        write(buffer, RingOracle(8), [[False] * 8])
        hits = sum(buffer.sample(1)["her_mask"].item() for _ in range(500))
        if num_goals == 0:
            assert hits == 0
        else:
            assert stats.binomtest(hits, 500, num_goals / (num_goals + 1)).pvalue > 1e-4

    def test_every_row_is_relabelled_as_often(self):
        """Which places of a batch are relabelled is fixed, but the anchors are independent."""
        history = HISTORIES["lanes of unequal fill"]
        buffer = make_buffer(history.capacity, history.num_envs)
        oracle = history.write(buffer)
        pairs, _ = draws(buffer, 20_000)
        counts = Counter(anchor for anchor, _ in pairs)
        assert set(counts) == set(oracle.live())
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4

    def test_changed_between_samples(self):
        buffer = make_buffer(8, num_goals=4)
        oracle = RingOracle(8)
        write(buffer, oracle, [[False] * 7])
        buffer.sampler.num_goals = 1
        assert buffer.sample(10)["her_mask"].sum() == 5
        buffer.sampler.strategy = "final"
        batch = buffer.sample(10)
        assert set(batch["goal_index"][batch["her_mask"]].tolist()) == {6}

    def test_changed_while_a_batch_is_drawn(self, monkeypatch):
        """As by the loop that a batch is drawn ahead for."""
        batches = []
        for changed in (False, True):
            buffer = make_buffer(8, strategy="geometric", seed=3)
            write(buffer, RingOracle(8), [[False] * 7])

            def of_batch(*args, sampler=buffer.sampler, changed=changed):
                found = kinds_of_batch(*args)
                sampler.strategy = "final" if changed else "geometric"
                return found

            monkeypatch.setattr("trl_storages.samplers.hindsight.kinds_of_batch", of_batch)
            batches.append(buffer.sample(10)["goal_index"])
        assert torch.equal(*batches)


class TestGenerator:
    def make(self, seed):
        buffer = make_buffer(20, seed=seed)
        write(buffer, RingOracle(20), [[False, False, True] * 6])
        return buffer

    def test_same_seed_same_draws(self):
        first, second, other = self.make(1), self.make(1), self.make(2)
        torch.manual_seed(0)
        batch = first.sample(64)
        torch.manual_seed(1)  # the global generator plays no part
        again, different = second.sample(64), other.sample(64)
        for key in ("index", "goal_index", "her_mask", "desired_goal"):
            assert torch.equal(batch[key], again[key])
        assert not torch.equal(batch["index"], different["index"])
        assert not torch.equal(batch["goal_index"], different["goal_index"])

    def test_the_global_generator_is_left_alone(self):
        buffer = self.make(1)
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        buffer.sample(64)
        assert torch.equal(torch.rand(3), expected)

    def test_without_one_the_global_generator_draws(self):
        buffer = ReplayStorage(
            storage=PackedStorage(20),
            writer=EpisodeWriter(),
            sampler=HERSampler(),
            transform=GoalRelabel(distance_reward),
        )
        write(buffer, RingOracle(20), [[False, False, True] * 6])
        batches = []
        for _ in range(2):
            torch.manual_seed(5)
            batches.append(buffer.sample(64))
        assert torch.equal(batches[0]["goal_index"], batches[1]["goal_index"])


class TestErrors:
    def test_unknown_strategy(self):
        with pytest.raises(ValueError, match=r"future.*final.*episode.*random") as caught:
            HERSampler("past")
        assert "past" in str(caught.value)

    @pytest.mark.parametrize("num_goals", [-1, -4])
    def test_negative_num_goals(self, num_goals):
        with pytest.raises(ValueError, match=f"num_goals.*{num_goals}"):
            HERSampler("future", num_goals)

    def test_live_attributes_are_checked_and_kept(self):
        sampler = HERSampler("final", 3)
        with pytest.raises(ValueError, match="past"):
            sampler.strategy = "past"
        with pytest.raises(ValueError, match="-2"):
            sampler.num_goals = -2
        assert (sampler.strategy, sampler.num_goals) == ("final", 3)

    def test_sampling_before_the_first_write(self):
        with pytest.raises(RuntimeError, match=r"empty|[Nn]o |nothing"):
            make_buffer(8).sample(4)

    def test_sampling_after_it_was_emptied(self):
        buffer = make_buffer(8)
        write(buffer, RingOracle(8), [[False] * 5])
        buffer.empty()
        with pytest.raises(RuntimeError, match=r"empty|[Nn]o |nothing"):
            buffer.sample(4)

    def test_without_the_episode_writer(self):
        buffer = TensorDictReplayBuffer(
            storage=PackedStorage(8), sampler=HERSampler(), batch_size=4
        )
        write(buffer, RingOracle(8), [[False] * 5])
        with pytest.raises(RuntimeError, match="EpisodeWriter"):
            buffer.sample()

    def test_over_another_sampler(self):
        buffer = make_buffer(8, base=RandomSampler())
        write(buffer, RingOracle(8), [[False] * 8])
        assert buffer.sample(10)["her_mask"].sum() == 8


class TestSomebodyWritesTheGoals:
    """A mask that claims goals nobody wrote would be believed."""

    WITHOUT = r"HERSampler draws must be written by a transform, got .*GoalRelabel\(reward_fn\)"

    def storage(self, sampler, **options):
        storage = ReplayStorage(storage=PackedStorage(30), sampler=sampler, batch_size=8, **options)
        HISTORIES["before wrap-around"].write(storage)
        return storage

    @pytest.mark.parametrize("prefetch", [None, 2])
    @pytest.mark.parametrize("transform", [None, NStep(3, 0.5), lambda batch: batch])
    @pytest.mark.parametrize(
        "wrap", [lambda it: it, lambda it: HERSampler(num_goals=0, goal_key="other", base=it)]
    )
    def test_otherwise_nothing_is_drawn(self, transform, wrap, prefetch):
        generator = torch.Generator().manual_seed(3)
        options = {"transform": transform, "prefetch": prefetch, "generator": generator}
        storage, state = self.storage(wrap(HERSampler()), **options), generator.get_state()
        with pytest.raises(RuntimeError, match=self.WITHOUT):
            storage.sample()
        assert torch.equal(generator.get_state(), state)
        storage.shutdown()

    @pytest.mark.parametrize(
        "add",
        [
            lambda storage, relabel: storage.append_transform(relabel),
            lambda storage, relabel: storage.insert_transform(0, relabel),
            lambda storage, relabel: storage.append_transform(
                Compose(Compose(relabel), NStep(2, 0.9))
            ),
        ],
        ids=["appended", "inserted", "within others"],
    )
    def test_a_transform_that_comes_later(self, add):
        storage, relabel = self.storage(HERSampler()), GoalRelabel(distance_reward)
        with pytest.raises(RuntimeError, match=self.WITHOUT):
            storage.sample()
        add(storage, relabel)
        assert storage.sample()["her_mask"].sum() == 6

    def test_a_sampler_that_comes_later(self):
        storage = self.storage(None)
        storage.sample()
        storage.set_sampler(HERSampler())
        with pytest.raises(RuntimeError, match=self.WITHOUT):
            storage.sample()

    def test_no_goals_need_nobody(self):
        sampler = HERSampler(num_goals=0)
        storage = self.storage(sampler)
        assert not storage.sample()["her_mask"].any()
        sampler.num_goals = 1
        with pytest.raises(RuntimeError, match=self.WITHOUT):
            storage.sample()

    def test_a_transform_of_one_s_own(self):
        """It says that it makes use of them."""
        assert self.storage(HERSampler(), transform=AsDrawn()).sample()["her_mask"].sum() == 6

    def test_episodes_have_no_drawn_goals(self):
        assert not self.storage(HERSampler()).sample_episodes(2).get("her_mask", None)

    def test_a_stock_buffer_hands_out_what_was_drawn(self):
        buffer = TensorDictReplayBuffer(
            storage=PackedStorage(30), writer=EpisodeWriter(), sampler=HERSampler(), batch_size=8
        )
        HISTORIES["before wrap-around"].write(buffer)
        batch = buffer.sample()
        assert batch["her_mask"].sum() == 6
        assert {"goal_index", "her_mask"} <= set(batch.keys())
