"""Hindsight, n-step returns, priorities and recency in one storage: every guarantee at once.

A state machine writes, samples, reports priorities, begins phases, changes parameters and clears; a
plain-Python model says after each step which rows may be drawn, with which weights, for which goals,
and what they must look like.
"""

import math
import random
from collections import Counter

import pytest
import torch
from goal_data import distance_reward, goal_transitions
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from n_step_oracle import as_written, assert_folded, fold
from oracles import RingOracle
from scipy import stats
from torchrl.data import LazyTensorStorage
from torchrl.envs.transforms import Compose

from trl_storages import (
    EpisodeWriter,
    ERESampler,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    PERSampler,
    ReplayStorage,
)

pytestmark = pytest.mark.requirement("hpne")

EPS = 1e-3
INFO_KEYS = ["effort"]


# Of which part, its name, what it may become, and what it must not.
PARAMETERS = [
    ("ere", "eta", [0.99, 0.999, 0.9995, 1.0], 1.5),
    ("ere", "c_min", [1, 2, 12], 0),
    ("ere", "updates_per_phase", [None, 1, 3], -1),
    ("per", "alpha", [0.0, 0.6, 1.0], -1.0),
    ("per", "beta", [0.0, 0.4, 1.0], math.nan),
    ("per", "normalize", ["batch", "storage", "none"], "sum"),
    ("her", "strategy", ["future", "final", "episode", "random"], "past"),
    ("her", "num_goals", [0, 1, 4, math.inf], -1),
    ("n_step", "n_step", [1, 2, 3, 5], 0),
    ("n_step", "discount", [0.0, 0.9, 1.0], 1.5),
]


def reward_fn(achieved_goal, desired_goal, transition):
    return distance_reward(achieved_goal, desired_goal, None) + transition["effort"][:, 0].float()


def terminated_fn(achieved_goal, desired_goal, transition):
    """At the goal, and at every seventh state besides."""
    return (achieved_goal == desired_goal).all(-1) | (transition["effort"][:, 0] // 100 % 7 == 3)


def make_buffer(capacity, num_envs, storage_type=PackedStorage, seed=0):
    """All four in one line each; the parts are returned to be turned while it runs."""
    per = PERSampler(capacity, alpha=0.6, beta=0.4, eps=EPS)
    ere = ERESampler(0.999, c_min=2, base=per)
    her = HERSampler("future", 4, base=ere)
    relabel = GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=INFO_KEYS)
    n_step = NStep(3, 0.9)
    buffer = ReplayStorage(
        storage=storage_type(capacity),
        writer=EpisodeWriter(num_envs, on_gap="ignore"),
        sampler=her,
        transform=Compose(relabel, n_step),
        generator=torch.Generator().manual_seed(seed),
    )
    return buffer, per, ere, her, relabel, n_step


# Hypothesis chooses what is done, and the seed of how: draws for every flag would leave it short of
# steps.
seeds = st.integers(0, 2**16).map(random.Random)


class FullCombination(RuleBasedStateMachine):
    """The storage beside a model of each guarantee."""

    num_envs = 1
    storage_type = PackedStorage

    @initialize(steps_per_lane=st.sampled_from([1, 2, 5, 9, 14]), luck=seeds)
    def make(self, steps_per_lane, luck):
        capacity = self.num_envs * steps_per_lane + luck.randrange(self.num_envs)
        self.buffer, self.per, self.ere, self.her, self.relabel, self.n_step = make_buffer(
            capacity, self.num_envs, self.storage_type, luck.randrange(100)
        )
        self.oracle = RingOracle(capacity, self.num_envs)
        self.num_written = 0
        self.cut_next = [False] * self.num_envs
        # Priorities: raw, by slot, and the largest reported so far.
        self.priorities, self.largest = {}, None
        # Phases: updates made in this one, and its length.
        self.update = self.num_updates = 0
        self.batches = []
        self.write(2 * steps_per_lane, luck)

    # Writing

    def some_lanes(self, luck):
        """All lanes as None, or at least one of them in any order."""
        return luck.choice(
            [None, luck.sample(range(self.num_envs), luck.randint(1, self.num_envs))]
        )

    @rule(num_steps=st.integers(1, 12), luck=seeds)
    def write(self, num_steps, luck):
        lanes = self.some_lanes(luck)
        chosen = list(range(self.num_envs)) if lanes is None else lanes
        share = luck.choice([0.0, 0.1, 0.5])
        done = [[luck.random() < share for _ in range(num_steps)] for _ in chosen]
        numbers = [[self.num_written + step for step in range(num_steps)] for _ in chosen]
        self.num_written += num_steps
        cut = [[self.cut_next[lane]] + [False] * (num_steps - 1) for lane in chosen]
        for lane in chosen:
            self.cut_next[lane] = False
        slots = self.oracle.append(done, cut, chosen, numbers)
        lane_of = torch.tensor(chosen).unsqueeze(1).expand(-1, num_steps)
        rows = goal_transitions(lane_of, torch.tensor(numbers), torch.tensor(done))
        if lanes is None:
            self.buffer.extend(rows[0] if self.num_envs == 1 else rows)
        else:
            self.buffer.writer.extend(rows, lanes=lanes)
        for slot in {slot for lane_slots in slots for slot in lane_slots}:
            self.priorities[slot] = 1.0 if self.largest is None else self.largest
        if self.update >= self.num_updates:
            self.begin_next_phase()
        self.sample_and_check()

    def begin_next_phase(self):
        self.num_updates = self.ere.updates_per_phase or max(1000, self.update)
        self.update = 0

    @rule(luck=seeds)
    def end_episodes(self, luck):
        lanes = self.some_lanes(luck)
        self.buffer.end_episodes(lanes)
        for lane in range(self.num_envs) if lanes is None else lanes:
            self.cut_next[lane] = True

    @rule(keep=st.sampled_from([0, 1, 3, 20]))
    def clear(self, keep):
        self.buffer.empty(keep_steps=keep)
        if not keep or not self.oracle.live():
            self.cut_next = [False] * self.num_envs
        self.oracle.clear(keep)
        self.priorities = dict.fromkeys(self.oracle.live(), 1.0)
        self.largest = None
        self.batches.clear()
        self.update = self.num_updates = 0
        if self.oracle.live():
            self.begin_next_phase()
        self.sample_and_check()

    # Sampling

    def sample_and_check(self, batch_size=8):
        """Samples, holds the batch against every guarantee, and keeps it."""
        live = self.oracle.live()
        if not live:
            with pytest.raises(RuntimeError, match="empty"):
                self.buffer.sample(batch_size)
            return
        if not self.num_updates:
            self.begin_next_phase()
        self.update += 1
        batch = self.buffer.sample(batch_size)
        self.check_recency_and_weights(batch)
        self.check_goals(batch)
        self.check_folds(batch)
        rows = [live[slot] for slot in batch["index"].tolist()]
        self.batches = [*self.batches[-2:], (batch, rows)]

    @rule(num_updates=st.integers(1, 4), luck=seeds)
    def train(self, num_updates, luck):
        for _ in range(num_updates):
            self.sample_and_check(luck.choice([1, 2, 9, 16]))
            if self.batches:
                self.report_priorities(luck)

    def newest(self):
        """The slots of the window of the current update."""
        by_age = [self.oracle.slot(row) for row in self.oracle.by_age()]
        k = min(self.update, self.num_updates)
        share = self.ere.eta ** (k * 1000 / self.num_updates)
        return by_age[: max(math.floor(len(by_age) * share), self.ere.c_min)]

    def check_recency_and_weights(self, batch):
        window = self.newest()
        assert set(batch["index"].tolist()) <= set(window)
        alpha, beta, normalize = self.per.alpha, self.per.beta, self.per.normalize
        drawn = [(self.priorities[slot] + EPS) ** alpha for slot in batch["index"].tolist()]
        there = [(self.priorities[slot] + EPS) ** alpha for slot in window]
        tops = {"batch": min(drawn), "storage": min(there), "none": sum(there) / len(there)}
        weights = [(tops[normalize] / share) ** beta for share in drawn]
        assert batch["priority_weight"].tolist() == pytest.approx(weights, rel=1e-4)

    def check_goals(self, batch):
        size, mask, live = len(batch), batch["her_mask"], self.oracle.live()
        k = self.her.num_goals
        if k == math.inf:
            assert mask.all()
        elif size > 1 or not k:
            assert mask.sum().item() == math.floor(size * k / (k + 1))
        anchors, goals = batch["index"].tolist(), batch["goal_index"].tolist()
        for anchor, goal, relabelled in zip(anchors, goals, mask.tolist(), strict=True):
            if relabelled:
                assert live[goal] in self.oracle.goals(live[anchor], self.her.strategy)
            else:
                assert goal == anchor

    def check_folds(self, batch):
        live, expected = self.oracle.live(), []
        functions = {"reward_fn": reward_fn, "terminated_fn": self.relabel.terminated_fn}
        anchors, goals = batch["index"].tolist(), batch["goal_index"].tolist()
        for slot, goal, mask in zip(anchors, goals, batch["her_mask"].tolist(), strict=True):
            row, options = live[slot], {}
            if mask:
                achieved = as_written(live[goal])["next", "achieved_goal"]
                options = {"goal": achieved, "info_keys": INFO_KEYS, **functions}
            onward = [other for other in self.oracle.episode(row) if other.step >= row.step]
            expected.append(fold(onward, self.n_step.n_step, self.n_step.discount, **options))
        assert_folded(batch, expected)

    # Priorities

    def report_priorities(self, luck, bad=None):
        """Of any of the last batches, some of whose rows may be gone."""
        batch, rows = luck.choice(self.batches)
        live, slots = self.oracle.live(), batch["index"].tolist()
        errors = [luck.choice([0.0, luck.uniform(0, 1), luck.uniform(0, 100)]) for _ in rows]
        batch["td_error"] = torch.tensor(errors)
        errors = batch["td_error"].tolist()  # in single precision
        if bad is not None:
            batch["td_error"][luck.randrange(len(rows))] = bad
            with pytest.raises(ValueError, match="finite and at least 0"):
                self.buffer.update_tensordict_priority(batch)
            return
        self.buffer.update_tensordict_priority(batch)
        for slot, row, error in zip(slots, rows, errors, strict=True):
            if live.get(slot) == row:
                self.priorities[slot] = error
                # A largest priority of 0 is as if there had been none.
                self.largest = max(self.largest or 0.0, error) or None

    @precondition(lambda self: self.batches)
    @rule(luck=seeds, bad=st.sampled_from([math.nan, math.inf, -1.0]))
    def report_a_bad_priority(self, luck, bad):
        """Nothing changes: the invariant compares all priorities with the model's."""
        self.report_priorities(luck, bad)

    # Phases and parameters

    @rule(num_updates=st.integers(1, 4))
    def begin_phase(self, num_updates):
        self.ere.begin_phase(num_updates)
        self.update, self.num_updates = 0, num_updates
        self.sample_and_check()

    @rule(luck=seeds)
    def change_parameters(self, luck):
        for name_of_part, name, values, nonsense in luck.sample(PARAMETERS, luck.randint(1, 5)):
            part, value = getattr(self, name_of_part), luck.choice(values)
            setattr(part, name, value)
            with pytest.raises(ValueError, match=name):
                setattr(part, name, nonsense)
            assert getattr(part, name) == value
        self.relabel.terminated_fn = luck.choice([None, terminated_fn])
        self.sample_and_check()

    @invariant()
    def structures_hold(self):
        if not hasattr(self, "buffer"):
            return
        self.buffer.validate()
        self.per.validate()
        assert len(self.buffer.episodes) == len(self.oracle.live())
        assert (self.ere.update, self.ere.num_updates) == (self.update, self.num_updates)
        stored = enumerate(self.per.priorities.tolist())
        assert {slot: it for slot, it in stored if math.isfinite(it)} == self.priorities


class FourLanes(FullCombination):
    num_envs = 4


class OverStockStorage(FullCombination):
    num_envs = 2
    storage_type = LazyTensorStorage


TestOneLane = FullCombination.TestCase
TestOneLane.settings = settings(max_examples=30, stateful_step_count=30)
TestFourLanes = FourLanes.TestCase
TestFourLanes.settings = settings(max_examples=30, stateful_step_count=30)
TestOverStockStorage = OverStockStorage.TestCase
TestOverStockStorage.settings = settings(max_examples=10, stateful_step_count=30)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_draws_are_in_proportion_to_priorities_within_the_window(num_envs):
    """Whatever is done with the rows afterwards: chi-square over the anchors of some batches."""
    capacity, num_steps = 10 * num_envs, 13
    buffer, per, ere, *_ = make_buffer(capacity, num_envs)
    steps = torch.arange(num_steps).expand(num_envs, num_steps)
    lanes = torch.arange(num_envs).unsqueeze(1).expand(num_envs, num_steps)
    rows = goal_transitions(lanes, steps, steps % 5 == 4)
    buffer.extend(rows[0] if num_envs == 1 else rows)
    slots = torch.arange(capacity)
    per.update_priority(slots, 1.0 + slots % 4)
    window = buffer.episodes.slots_by_age(torch.arange(6 * num_envs)).tolist()
    ere.begin_phase(1)
    ere.eta, ere.c_min = 0.99, len(window)
    counts = Counter()
    for _ in range(50):
        counts.update(buffer.sample(512)["index"].tolist())
    assert set(counts) == set(window)
    likely = [(1.0 + slot % 4 + EPS) ** 0.6 for slot in window]
    expected = [counts.total() * share / sum(likely) for share in likely]
    assert stats.chisquare([counts[slot] for slot in window], expected).pvalue > 1e-4
