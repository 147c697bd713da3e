"""Mixtures of goals, geometric goals, and two goals for one batch."""

import enum
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from goal_data import HISTORIES, AsDrawn, achieved_goals, distance_reward, write
from hypothesis import given
from hypothesis import strategies as st
from oracles import RingOracle
from scipy import stats
from torchrl.envs.transforms import Compose

from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    ERESampler,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)
from trl_storages.functional.draws import (
    geometric_steps,
    kinds_by_chance,
    kinds_of_batch,
    num_of_each,
)
from trl_storages.kernels.tables import GOAL_KINDS, GOAL_STRATEGIES

MIXTURE = {"future": 0.5, "random": 0.3, "current": 0.2}
EACH = dict.fromkeys(GOAL_STRATEGIES, 1 / 6)


def make_buffer(history, sampler, transform=None, unit=None):
    buffer = ReplayStorage(
        storage=PackedStorage(history.capacity),
        writer=EpisodeWriter(history.num_envs),
        sampler=sampler,
        transform=AsDrawn() if transform is None else transform,
        sample_unit=unit,
        generator=torch.Generator().manual_seed(0),
    )
    return buffer, history.write(buffer)


def noise_of(size, seed=0):
    noise = torch.empty(size, dtype=torch.int64)
    return noise.random_(generator=torch.Generator().manual_seed(seed))


class TestCounts:
    def test_by_hand(self):
        assert num_of_each(10, [0.5, 0.3, 0.2]) == [5, 3, 2]
        assert num_of_each(7, [0.5, 0.3, 0.2]) == [4, 2, 1]  # 3.5, 2.1, 1.4
        assert num_of_each(2, [1 / 3, 1 / 3, 1 / 3]) == [1, 1, 0]
        assert kinds_of_batch(10, 4, [1, 4], [0.75, 0.25]) == [0, 1, 1, 4, 1, 0, 1, 1, 4, 1]
        assert kinds_of_batch(3, math.inf, [3], [1.0]) == [3, 3, 3]
        assert kinds_of_batch(3, 0, [3], [1.0]) == [0, 0, 0]

    @given(
        st.integers(2, 300),
        st.one_of(st.integers(0, 9), st.just(math.inf)),
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
    )
    def test_exact_and_spread_evenly(self, size, num_goals, parts):
        kinds, shares = range(1, len(parts) + 1), [part / sum(parts) for part in parts]
        found = kinds_of_batch(size, num_goals, kinds, shares)
        relabelled = [kind for kind in found if kind]
        exact = [Fraction(part * len(relabelled), sum(parts)) for part in parts]
        if num_goals < math.inf:
            assert len(relabelled) == size * num_goals // (num_goals + 1)
        counts = Counter(relabelled)
        assert all(abs(counts[kind] - part) < 1 for kind, part in zip(kinds, exact, strict=True))
        # Of any part of the batch each kind has its share, to within one goal of each kind.
        for kind, part in zip(kinds, parts, strict=True):
            for end in range(len(relabelled)):
                seen = relabelled[:end].count(kind)
                assert abs(seen - end * part / sum(parts)) <= len(parts)

    @pytest.mark.parametrize("size", [2, 7, 256])
    @pytest.mark.parametrize("num_goals", [1, 4, math.inf])
    def test_of_batches(self, size, num_goals):
        buffer, _ = make_buffer(HISTORIES["lanes"], HERSampler(MIXTURE, num_goals))
        kinds = buffer.sampler._kinds(noise_of(size), *buffer.sampler._mixture[1:]).tolist()
        assert kinds == kinds_of_batch(size, num_goals, [1, 4, 6], [0.5, 0.3, 0.2])
        mask = buffer.sample(size)["her_mask"]
        assert mask.tolist() == [kind > 0 for kind in kinds]

    def test_a_batch_of_one_is_drawn_by_chance(self):
        kinds = kinds_by_chance(noise_of(60_000), 4, [1, 4, 6], [0.5, 0.3, 0.2])
        counts = torch.bincount(kinds.long(), minlength=7)[[0, 1, 4, 6]].tolist()
        expected = [60_000 * share for share in (0.2, 0.4, 0.24, 0.16)]
        assert stats.chisquare(counts, expected).pvalue > 1e-4
        for num_goals in (1e300, math.inf):
            assert (kinds_by_chance(noise_of(100), num_goals, [2], [1.0]) == 2).all()


class TestLaws:
    @pytest.mark.parametrize("discount", [0.5, 0.9, 0.99])
    def test_geometric_steps(self, discount):
        steps = geometric_steps(noise_of(50_000), discount).clamp(max=20).long()
        counts = torch.bincount(steps, minlength=21).tolist()
        law = [(1 - discount) * discount**k for k in range(20)] + [discount**20]
        assert stats.chisquare(counts, [50_000 * share for share in law]).pvalue > 1e-4

    def test_the_ends_of_the_discount(self):
        assert not geometric_steps(noise_of(10), 0).any()
        assert geometric_steps(noise_of(10), 1).isposinf().all()
        lowest_and_highest = torch.tensor([0, 2**63 - 1])
        assert geometric_steps(lowest_and_highest, 1 - 2**-53).tolist() == [0, math.inf]

    @pytest.mark.requirement("goal-geometric")
    @pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
    def test_offsets_are_cut_to_the_episode(self, history):
        sampler = HERSampler("geometric", math.inf, discount=0.6)
        buffer, oracle = make_buffer(history, sampler)
        live, statistic, freedom = oracle.live(), 0.0, 0
        batch = buffer.sample(2000 * len(live))
        pairs = Counter(zip(batch["index"].tolist(), batch["goal_index"].tolist(), strict=True))
        anchors = Counter(batch["index"].tolist())
        for slot, row in live.items():
            *before, last = oracle.goals(row, "future")
            law = {oracle.slot(other): 0.4 * 0.6**k for k, other in enumerate(before)}
            law[oracle.slot(last)] = 0.6 ** len(before)
            assert {goal for anchor, goal in pairs if anchor == slot} <= set(law)
            for goal, share in law.items():
                expected = share * anchors[slot]
                statistic += (pairs[slot, goal] - expected) ** 2 / expected
            freedom += len(law) - 1
        assert not freedom or stats.chi2.sf(statistic, freedom) > 1e-4

    @pytest.mark.requirement("goal-mixtures")
    @pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
    def test_each_goal_of_a_mixture_is_of_its_kind(self, history):
        buffer, oracle = make_buffer(history, HERSampler(EACH, 5, discount=0.5))
        names, live = {kind: name for name, kind in GOAL_KINDS.items()}, oracle.live()
        for size in (1, 2, 6, 600):
            batch = buffer.sample(size)
            kinds = buffer.sampler._kinds(noise_of(size), *buffer.sampler._mixture[1:]).tolist()
            anchors, goals = batch["index"].tolist(), batch["goal_index"].tolist()
            for kind, anchor, goal in zip(kinds, anchors, goals, strict=True):
                # How a single one is drawn is up to its noise.
                allowed = [live[anchor]] if not kind else oracle.goals(live[anchor], names[kind])
                assert size == 1 or live[goal] in allowed

    @pytest.mark.requirement("goal-current")
    def test_current_goals_are_what_the_transition_led_to(self):
        relabel = GoalRelabel(distance_reward)
        buffer, oracle = make_buffer(HISTORIES["lanes"], HERSampler("current"), relabel)
        batch, live = buffer.sample(100), oracle.live()
        mask = batch["her_mask"]
        assert int(mask.sum()) == 80
        reached = achieved_goals([live[slot] for slot in batch["index"][mask].tolist()])
        assert torch.equal(batch["desired_goal"][mask], reached)


@pytest.mark.requirement("goal-mixtures")
@pytest.mark.parametrize("unit", [None, EpisodeSequence(3, burn_in=1)], ids=["rows", "sequences"])
def test_mixtures_through_everything_else(unit):
    """Over priorities and windows of recent rows, through sequences and n-step returns."""
    history = HISTORIES["wrapped"]
    base = ERESampler(0.99, c_min=3, base=PERSampler(history.capacity))
    transform = Compose(GoalRelabel(distance_reward), NStep(2, 0.9))
    buffer, oracle = make_buffer(history, HERSampler(EACH, base=base), transform, unit)
    live = oracle.live()
    for size in (1, 5, 40):
        batch = buffer.sample(size)
        mask = batch["her_mask"]
        goal_rows = [live[slot] for slot in batch["goal_index"][mask].tolist()]
        if goal_rows:
            assert torch.equal(batch["desired_goal"][mask], achieved_goals(goal_rows))
            assert torch.equal(batch["next", "desired_goal"][mask], achieved_goals(goal_rows))
        explained = buffer.explain(batch)
        assert torch.equal(explained["relabelled"], mask)
        batch["td_error"] = torch.rand(len(batch))
        buffer.update_tensordict_priority(batch)


@pytest.mark.requirement("two-goals")
@pytest.mark.parametrize("n_steps", [1, 3])
def test_two_goals(n_steps):
    """Value goals with their rewards, and actor goals beside them."""
    values = HERSampler(MIXTURE, math.inf)
    sampler = HERSampler("geometric", math.inf, goal_key="actor_goal", base=values)
    parts = [GoalRelabel(None, goal_key="actor_goal"), GoalRelabel(distance_reward)]
    buffer, oracle = make_buffer(HISTORIES["lanes"], sampler, Compose(*parts, NStep(n_steps, 0.9)))
    live, batch = oracle.live(), buffer.sample(64)
    assert (batch["goal_index"] != batch["actor_goal_index"]).any()
    for index, mask, goal in (
        ("goal_index", "her_mask", "desired_goal"),
        ("actor_goal_index", "actor_goal_mask", "actor_goal"),
    ):
        assert batch[mask].all()
        reached = achieved_goals([live[slot] for slot in batch[index].tolist()])
        assert torch.equal(batch[goal], reached)
        assert torch.equal(batch["next", goal], reached)
    if n_steps == 1:
        rewards = distance_reward(batch["next", "achieved_goal"], batch["desired_goal"], None)
        assert torch.equal(batch["next", "reward"].squeeze(-1), rewards)
    explained = buffer.explain(batch)
    assert torch.equal(explained["actor_goal_slot"], batch["actor_goal_index"])


@pytest.mark.requirement("two-goals")
def test_a_second_goal_that_is_not_drawn_is_the_desired_one():
    sampler = HERSampler(goal_key="actor_goal", num_goals=1)
    buffer = ReplayStorage(
        storage=PackedStorage(4),
        sampler=sampler,
        transform=GoalRelabel(None, goal_key="actor_goal"),
        generator=torch.Generator().manual_seed(0),
    )
    write(buffer, RingOracle(4), [[False, False, True, False]])
    batch = buffer.sample(20)
    stays = ~batch["actor_goal_mask"]
    assert int(stays.sum()) == 10
    assert torch.equal(batch["actor_goal"][stays], batch["desired_goal"][stays])
    assert torch.equal(batch["next", "actor_goal"][stays], batch["next", "desired_goal"][stays])
    assert not torch.equal(batch["actor_goal"], batch["desired_goal"])


def test_goals_that_nobody_writes_are_refused_by_key():
    sampler = HERSampler(goal_key="actor_goal", base=HERSampler())
    buffer, _ = make_buffer(HISTORIES["lanes"], sampler, GoalRelabel(distance_reward))
    with pytest.raises(RuntimeError, match=r"GoalRelabel\(None, goal_key='actor_goal'\)"):
        buffer.sample(4)
    buffer.append_transform(GoalRelabel(None, goal_key="actor_goal"))
    assert "actor_goal" in buffer.sample(4)


class Selection(enum.Enum):
    FUTURE = 0
    FINAL = 1


class Named(str, enum.Enum):
    RANDOM = "random"


@pytest.mark.parametrize("strategy", ["FUTURE", "Future", Selection.FUTURE])
def test_names_in_any_case_and_members_of_enums(strategy):
    assert HERSampler(strategy).strategy == "future"
    assert HERSampler({strategy: 0.5, Named.RANDOM: 0.5}).strategy == {"future": 0.5, "random": 0.5}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"future": 0.5, "random": 0.3}, r"must add up to 1, got .*0\.8"),
        ({}, "must add up to 1"),
        ({"future": 0.5, "past": 0.5}, "must be one of .*'geometric', 'current'.*, got 'past'"),
        ("past", "strategy must be one of"),
        ({"future": -0.5, "random": 1.5}, r"strategy\['future'\] must be"),
    ],
)
def test_wrong_mixtures(strategy, message):
    sampler = HERSampler("final")
    with pytest.raises(ValueError, match=message):
        sampler.strategy = strategy
    assert sampler.strategy == "final"


def test_the_state_holds_the_mixture():
    sampler = HERSampler(MIXTURE, math.inf)
    sampler.discount = 0.8
    other = HERSampler()
    other.load_state_dict(sampler.state_dict())
    assert (other.strategy, other.num_goals, other.discount) == (MIXTURE, math.inf, 0.8)
    state = {**sampler.state_dict(), "strategy": {"future": 0.5}}
    with pytest.raises((KeyError, TypeError, ValueError), match="strategy"):
        other.load_state_dict(state)
    assert "discount" not in repr(sampler)
    assert "discount=0.8, goal_key='g'" in repr(HERSampler("geometric", discount=0.8, goal_key="g"))
