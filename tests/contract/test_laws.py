"""What is drawn, and how often: seeded chi-square tests, or exact."""

import copy
import math
from collections import Counter, defaultdict
from itertools import permutations

import numpy as np
import pytest
import torch
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import PLACES, assemble, library, make
from contract.model import folded
from contract.steps import ids_of, reward_fn, rows
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from torchrl.data.replay_buffers.scheduler import LinearScheduler

EpisodeSequence, GoalRelabel = library.EpisodeSequence, library.GoalRelabel
ERESampler, HERSampler = library.ERESampler, library.HERSampler
PERSampler, UniformSampler = library.PERSampler, library.UniformSampler

each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
each_boundary = pytest.mark.parametrize("boundary", ["pad", "fit", "cross"])
STRATEGIES = ["future", "final", "episode", "random", "current"]


def filled(history, **parts):
    """A storage with a history in it, and what it must hold."""
    storage = assemble(history.size, history.lanes, **parts)
    return storage, history.write(storage)


def counted(storage, lanes, num_draws, batch_size=5000):
    """How often each step was drawn."""
    drawn = Counter()
    for _ in range(-(-num_draws // batch_size)):
        drawn.update(ids_of(storage.sample(batch_size)).tolist())
    live = {step.id: step for step in lanes.live()}
    return Counter({live[number]: count for number, count in drawn.items()})


def assert_law(counts, law):
    """Chi-square of counts against unnormalised probabilities, both by the same keys."""
    assert set(counts) == set(law)
    if len(law) > 1:
        total, scale = counts.total(), sum(law.values())
        expected = [total * share / scale for share in law.values()]
        assert stats.chisquare([counts[key] for key in law], expected).pvalue > 1e-4


def assert_uniform(counts, steps):
    assert_law(counts, dict.fromkeys(steps, 1))


@pytest.mark.requirement("uniform-ring")
class TestUniform:
    def test_full_ring_is_uniform(self):
        storage, lanes = assemble(1000), Lanes(1000)
        lanes.write(storage, [ends([50] * 34)])
        assert_uniform(counted(storage, lanes, 1_000_000, 20_000), lanes.live())

    @each_history
    def test_only_stored_transitions_are_sampled(self, history):
        storage, lanes = filled(history)
        assert_uniform(counted(storage, lanes, 20_000), lanes.live())


@pytest.mark.requirement("uniform-ring")
class TestEpochs:
    @pytest.mark.parametrize(
        ("history", "batch_size"),
        [("unequal fill", 1), ("unequal fill", 5), ("unequal fill", 16), ("one lane wrapped", 4)],
    )
    def test_each_transition_is_sampled_once_per_epoch(self, history, batch_size):
        sampler = UniformSampler(without_replacement=True)
        storage, lanes = filled(HISTORIES[history], sampler=sampler)
        size, drawn = len(lanes.live()), []
        while len(drawn) < 3 * size:
            drawn += (steps := lanes.of(storage.sample(batch_size)))
            assert len(steps) == batch_size
        orders = [drawn[size * epoch : size * (epoch + 1)] for epoch in range(3)]
        assert [Counter(order) for order in orders] == [Counter(lanes.live())] * 3
        assert orders[0] != orders[1] != orders[2]

    def test_epoch_contains_transitions_stored_when_it_began(self):
        storage, lanes = assemble(10, sampler=UniformSampler(without_replacement=True)), Lanes(10)
        lanes.write(storage, [ends([4, 6])])
        first = lanes.of(storage.sample(4))
        lanes.write(storage, [ends([], 2)])
        rest = set(lanes.live()[:-2]) - set(first)
        assert Counter(lanes.of(storage.sample(len(rest)))) == Counter(rest)

    @pytest.mark.parametrize("other", ["memory", "directory", "device"])
    def test_loaded_epoch_continues(self, place, other):
        if other not in PLACES or (place == "device") != (other == "device"):
            pytest.skip("a device is a setting of the process")
        saved, loaded = (
            assemble(24, 2, place=where, sampler=UniformSampler(without_replacement=True))
            for where in (place, other)
        )
        lanes = HISTORIES["unequal fill"].write(saved)
        drawn = lanes.of(saved.sample(5))
        loaded.load_state_dict(saved.state_dict())
        rest = len(lanes.live()) - 5
        expected = lanes.of(saved.sample(rest))
        assert lanes.of(loaded.sample(rest)) == expected
        assert Counter(drawn + expected) == Counter(lanes.live())
        loaded.sample(5)
        loaded.storage.load_state_dict(saved.storage.state_dict())  # other rows: another epoch
        assert Counter(lanes.of(loaded.sample(rest + 5))) == Counter(lanes.live())

    def test_more_rows_than_there_were_are_never_drawn(self):
        sampler = UniformSampler(without_replacement=True)
        storage, lanes = assemble(20, 2, sampler=sampler), Lanes(20, 2)
        lanes.write(storage, [ends([4, 6], 4)], [1])
        storage.sample(3)
        state = sampler.state_dict()
        sampler.load_state_dict({**state, "drawn": 10})
        for wrong in ({"drawn": 11}, {"tails": [5, 4]}):
            with pytest.raises(ValueError, match="epoch"):
                sampler.load_state_dict({**state, **wrong})
        # Of steps that were not written yet, or of other lanes, no epoch goes on.
        for tails, cursors in (([0, 9], [0, 19]), ([0, 4, 0], [0, 14, 0])):
            sampler.load_state_dict({**state, "tails": tails, "cursors": cursors})
            assert Counter(lanes.of(storage.sample(10))) == Counter(lanes.live())

    @pytest.mark.parametrize(("is_drawing", "num_rows"), [(True, 9), (False, 3), (False, 9)])
    def test_emptied_storage_begins_an_epoch(self, place, is_drawing, num_rows):
        sampler = UniformSampler(without_replacement=True)
        storage, lanes = assemble(10, place=place, sampler=sampler), Lanes(10)
        lanes.write(storage, [ends([4])])
        storage.sample(2)
        storage.set_sampler(sampler if is_drawing else UniformSampler())
        storage.empty()
        storage.set_sampler(sampler)
        sampler.load_state_dict(sampler.state_dict())
        lanes = Lanes(10)
        lanes.write(storage, [ends([num_rows])])
        assert Counter(lanes.of(storage.sample(num_rows))) == Counter(lanes.live())

    def test_orders_of_an_epoch_are_equally_likely(self):
        storage, lanes = assemble(3, sampler=UniformSampler(without_replacement=True)), Lanes(3)
        lanes.write(storage, [ends([], 3)])
        orders = Counter(tuple(ids_of(storage.sample(3)).tolist()) for _ in range(600))
        assert_law(orders, dict.fromkeys(permutations(step.id for step in lanes.live()), 1))


# Goals


def relabelling(sampler):
    return {"sampler": sampler, "transform": GoalRelabel(reward_fn, info_keys=["effort"])}


def relabelled(storage, lanes, num_rows):
    """(step, step whose outcome is its goal) of relabelled rows, of goals and rewards that fit."""
    pairs = []
    while len(pairs) < num_rows:
        batch = storage.sample(2000)
        rest = batch[~batch["her_mask"]]
        batch = batch[batch["her_mask"]]
        assert torch.equal(batch["desired_goal"], batch["next", "desired_goal"])
        assert (rest["desired_goal"][:, 1] == -1).all()
        reward = reward_fn(batch["next", "achieved_goal"], batch["desired_goal"], batch["next"])
        assert torch.equal(batch["next", "reward"], reward.unsqueeze(-1))
        pairs += zip(lanes.of(batch), lanes.reaching(batch["desired_goal"]), strict=True)
    return pairs


def assert_goals(pairs, law_of):
    """Each step's goals have the law that is named for it: {step: share}."""
    seen, statistic, freedom = defaultdict(Counter), 0.0, 0
    for anchor, goal in pairs:
        seen[anchor][goal] += 1
    for anchor, counts in seen.items():
        law = law_of(anchor)
        assert set(counts) <= set(law)
        scale = counts.total() / sum(law.values())
        statistic += sum((counts[goal] - p * scale) ** 2 / (p * scale) for goal, p in law.items())
        freedom += len(law) - 1
    assert not freedom or stats.chi2.sf(statistic, freedom) > 1e-4


class TestGoals:
    @each_history
    @pytest.mark.parametrize(
        "strategy",
        [pytest.param(s, marks=pytest.mark.requirement(f"her-{s}")) for s in STRATEGIES[:-1]]
        + [pytest.param("current", marks=pytest.mark.requirement("goal-current"))],
    )
    def test_goals_are_uniform_over_the_steps_of_the_strategy(self, history, strategy):
        storage, lanes = filled(history, **relabelling(HERSampler(strategy, float("inf"))))
        pairs = relabelled(storage, lanes, 30 * len(lanes.live()) ** 2)
        assert {anchor for anchor, _ in pairs} == set(lanes.live())
        assert_goals(pairs, lambda step: dict.fromkeys(lanes.goals(step, strategy), 1))

    @pytest.mark.requirement("goal-geometric")
    @each_history
    @pytest.mark.parametrize("discount", [0.6, 0, 1])
    def test_geometric_offsets_are_cut_to_the_episode(self, history, discount):
        sampler = HERSampler("geometric", float("inf"), discount=discount)
        storage, lanes = filled(history, **relabelling(sampler))

        def law_of(step):
            *before, last = lanes.onward(step)
            law = {other: (1 - discount) * discount**k for k, other in enumerate(before)}
            law[last] = discount ** len(before)
            return {other: share for other, share in law.items() if share}

        assert_goals(relabelled(storage, lanes, 500 * len(lanes.live())), law_of)

    @pytest.mark.requirement("her-final")
    def test_final_by_hand(self):
        storage, lanes = assemble(4, **relabelling(HERSampler("final"))), Lanes(4)
        lanes.write(storage, [[False, False, False, True]])
        batch = storage.sample(100)
        # What the last action led to, not what it began with.
        assert batch["desired_goal"][batch["her_mask"]].unique(dim=0).tolist() == [[4.0, 1.0]]

    @pytest.mark.requirement("her-ratio")
    @pytest.mark.parametrize("num_goals", [0, 1, 2, 4, 300, float("inf")])
    def test_relabelled_transitions_have_exact_counts_evenly_spread(self, num_goals):
        storage, lanes = assemble(40, **relabelling(HERSampler("future", num_goals))), Lanes(40)
        lanes.write(storage, [ends([], 40)])
        part = 1 if num_goals == float("inf") else num_goals / (num_goals + 1)
        for size in [*range(2, 20), 255, 256]:
            mask = storage.sample(size)["her_mask"]
            assert int(mask.sum()) == int(size * part + 1e-9)
            so_far = torch.cat([torch.zeros(1), mask.cumsum(0)])
            places = torch.arange(size + 1)
            for begin in range(0, size, 7):
                due = (places[begin:] - begin) * part
                assert ((so_far[begin:] - so_far[begin]) - due).abs().max() <= 1
        batches = torch.cat([storage.sample(1)["her_mask"] for _ in range(200)])
        assert abs(batches.float().mean() - part) < 0.1

    @pytest.mark.requirement("goal-mixtures")
    @pytest.mark.parametrize("last", ["final", "geometric"])
    def test_mixture_has_exact_counts(self, last):
        """By largest remainder, of which any part of the batch has its share."""
        sampler = HERSampler({"future": 0.5, last: 0.3, "current": 0.2}, 4, discount=1)
        # So many that no future goal is by chance one of the others.
        storage, lanes = assemble(100_000, **relabelling(sampler)), Lanes(100_000)
        lanes.write(storage, [ends([], 100_000)])
        for size, counts in ((125, [50, 30, 20]), (9, [4, 2, 1]), (256, [102, 61, 41])):
            batch = storage.sample(size)
            mask, goal = batch["her_mask"], batch["desired_goal"][:, 0]
            is_final, is_own = goal == 100_000, goal == batch["next", "achieved_goal"][:, 0]
            kinds = [mask & ~is_final & ~is_own, mask & is_final, mask & is_own]
            assert [int(kind.sum()) for kind in kinds] == counts
            for kind, count in zip(kinds, counts, strict=True):
                due = torch.arange(1, size + 1) * count / size
                assert (kind.cumsum(0) - due).abs().max() <= len(kinds)

    @pytest.mark.requirement("goal-mixtures")
    def test_a_mixture_for_a_batch_of_one_is_drawn_by_chance(self):
        sampler = HERSampler({"final": 0.75, "current": 0.25}, float("inf"))
        storage, lanes = assemble(4000, **relabelling(sampler)), Lanes(4000)
        lanes.write(storage, [ends([], 4000)])
        goals = [storage.sample(1)["desired_goal"][0, 0].item() for _ in range(800)]
        num_final = sum(goal == 4000 for goal in goals)
        assert stats.binomtest(num_final, 800, 0.75).pvalue > 1e-4

    @pytest.mark.requirement("two-goals")
    def test_two_goals_in_one_batch(self):
        base = HERSampler("final", float("inf"))
        sampler = HERSampler("current", 1, goal_key="actor_goal", base=base)
        relabel = [
            GoalRelabel(None, goal_key="actor_goal"),
            GoalRelabel(reward_fn, info_keys=["effort"]),
        ]
        assert ["actor_goal" in repr(it) for it in (sampler, base, *relabel)] == [True, False] * 2
        storage, lanes = filled(HISTORIES["lanes"], sampler=sampler, transform=relabel)
        batch = storage.sample(64)
        is_own = batch["actor_goal"][:, 1] == -1
        assert int(is_own.sum()) == 32
        stored, new = rows(lanes.of(batch))["desired_goal"], batch[~is_own]
        assert torch.equal(batch["actor_goal"][is_own], stored[is_own])
        for key, strategy, it in (("desired_goal", "final", batch), ("actor_goal", "current", new)):
            assert torch.equal(batch[key], batch["next", key])
            wanted = [lanes.goals(step, strategy) for step in lanes.of(it)]
            assert [[goal] for goal in lanes.reaching(it[key])] == wanted
        reward = reward_fn(batch["next", "achieved_goal"], batch["desired_goal"], batch["next"])
        assert torch.equal(batch["next", "reward"], reward.unsqueeze(-1))


# Priorities


def assert_priorities(storage, lanes, raw, alpha, beta=1.0, normalize="batch"):
    """Draws and weights are those of these raw priorities, {step: p}."""
    counts = Counter()
    scale = {"storage": min(raw.values()), "none": None}
    for _ in range(4):
        batch = storage.sample(max(2500, 25 * len(raw)))
        steps = lanes.of(batch)
        counts.update(steps)
        drawn = torch.tensor([raw[step] for step in steps], dtype=torch.float64)
        least = scale.get(normalize, drawn.min().item())
        mean = sum(p**alpha for p in raw.values()) / len(raw)
        top = mean if least is None else least**alpha
        expected = ((top / drawn**alpha) ** beta).float()
        torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-4, atol=1e-6)
    assert_law(counts, {step: p**alpha for step, p in raw.items()})


@pytest.mark.requirement("per-draws")
class TestPriorities:
    @pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
    @pytest.mark.parametrize("alpha", [0.5, 1.0, 0.0])
    def test_probabilities_are_powers_of_priorities(self, alpha, normalize):
        sampler = PERSampler(24, alpha=alpha, beta=0.7, eps=1e-9, normalize=normalize)
        history = HISTORIES["unequal fill"]
        storage = assemble(history.size, history.lanes, sampler=sampler)
        lanes = history.write(storage)
        raw = self.report(storage, lanes, lambda step: 0.5 + step.id % 4)
        saved = storage.storage.state_dict()
        self.report(storage, lanes, lambda step: 0.1)
        storage.storage.load_state_dict(saved)  # rows alone, with their priorities
        assert_priorities(storage, lanes, raw, alpha, 0.7, normalize)

    def report(self, storage, lanes, priority):
        """Gives every live row a priority, as a learner would; returns them."""
        left = set(lanes.live())
        while left:
            batch = storage.sample(100)
            steps = lanes.of(batch)
            batch["td_error"] = torch.tensor([priority(step) for step in steps])
            storage.update_tensordict_priority(batch)
            left -= set(steps)
        return {step: priority(step) for step in lanes.live()}

    @pytest.mark.requirement("per-new")
    def test_emptied_storage_discards_priorities(self):
        storage, lanes = assemble(8, sampler=PERSampler(8, alpha=0.5, beta=1.0, eps=1e-9)), Lanes(8)
        index = lanes.write(storage, [ends([4])])[0]
        storage.update_priority(index, torch.full((4,), 100.0))
        storage.load_state_dict(storage.state_dict())
        late = storage.sample(8).set("td_error", torch.full((8,), 9.0))
        storage.empty()
        lanes = Lanes(8)
        index = lanes.write(storage, [ends([4])])[0]
        storage.update_tensordict_priority(late)  # of rows that are gone
        storage.update_priority(index[:1], torch.tensor([4.0]))
        # No priority was set before this one: it is the largest.
        first, *others = lanes.live()
        assert_priorities(storage, lanes, {first: 4.0, **dict.fromkeys(others, 1.0)}, 0.5)

    @pytest.mark.requirement("per-new")
    def test_new_rows_get_the_largest_so_far(self):
        storage, lanes = assemble(8, sampler=PERSampler(8, alpha=0.5, beta=1.0, eps=1e-9)), Lanes(8)
        index = lanes.write(storage, [ends([], 1)])[0]
        storage.update_priority(index, 0.25)
        assert storage.sampler.priorities[0] == 0.25
        storage.update_priority(index, 0.5)
        index = torch.cat([index, lanes.write(storage, [ends([3])])[0]])
        assert_priorities(storage, lanes, dict.fromkeys(lanes.live(), 0.5), 0.5)
        storage.update_priority(index, torch.tensor([9.0, 4.0, 1.0, 2.0]))
        first = dict(zip(lanes.live(), [9.0, 4.0, 1.0, 2.0], strict=True))
        lanes.write(storage, [ends([], 2)])
        assert storage.sampler.priorities.tolist() == [9, 4, 1, 2, 9, 9, math.inf, math.inf]
        assert_priorities(storage, lanes, {s: first.get(s, 9.0) for s in lanes.live()}, 0.5)
        # The largest so far is evicted, and stays the largest so far.
        lanes.write(storage, [ends([], 3)])
        index = lanes.write(storage, [ends([], 3)])[0]
        assert_priorities(storage, lanes, dict.fromkeys(lanes.live(), 9.0), 0.5)
        storage.update_priority(index, torch.tensor([1.0, 2.0, 3.0]))
        last = dict(zip(lanes.live()[-3:], [1.0, 2.0, 3.0], strict=True))
        assert_priorities(storage, lanes, {s: last.get(s, 9.0) for s in lanes.live()}, 0.5)

    @pytest.mark.parametrize(
        "change", [copy.deepcopy, lambda it: it.share(), lambda it: setattr(it, "alpha", 0.5)]
    )
    def test_the_largest_so_far_may_be_of_no_row(self, change):
        storage, lanes = assemble(8, sampler=PERSampler(8, alpha=1.0, beta=1.0, eps=1e-9)), Lanes(8)
        index = lanes.write(storage, [ends([4])])[0]
        for priority in (9.0, 2.0):
            storage.update_priority(index, priority)
        storage = change(storage) or storage
        raw = dict.fromkeys(lanes.live(), 2.0)
        lanes.write(storage, [ends([2])])
        raw = {step: raw.get(step, 9.0) for step in lanes.live()}
        assert_priorities(storage, lanes, raw, storage.alpha)

    @pytest.mark.requirement("per-update")
    def test_last_priority_of_duplicate_slots_counts(self):
        storage, lanes = assemble(8, sampler=PERSampler(8, alpha=1.0, beta=1.0, eps=1e-9)), Lanes(8)
        lanes.write(storage, [ends([4])])
        batch = storage.sample(40)
        batch["td_error"] = torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.2
        storage.update_tensordict_priority(batch)
        raw = dict(zip(lanes.of(batch), batch["td_error"].tolist(), strict=True))
        assert_priorities(storage, lanes, raw, 1.0)

    @pytest.mark.requirement("per-update")
    def test_priorities_of_overwritten_transitions_are_skipped(self):
        storage, lanes = assemble(6, sampler=PERSampler(6, alpha=1.0, beta=1.0, eps=1e-9)), Lanes(6)
        lanes.write(storage, [ends([6])])
        batch = storage.sample(60)
        lanes.write(storage, [ends([], 3)])
        batch["td_error"] = torch.full((60,), 0.25)
        storage.update_tensordict_priority(batch)
        kept = lanes.lanes[0][:6]
        raw = {step: 0.25 if step in kept else 1.0 for step in lanes.live()}
        assert_priorities(storage, lanes, raw, 1.0)
        batch = storage.sample(60)
        batch["td_error"] = torch.full((60,), 0.5)
        lanes.write(storage, [ends([], 6)])
        storage.update_tensordict_priority(batch)  # all of them
        assert_priorities(storage, lanes, dict.fromkeys(lanes.live(), 1.0), 1.0)

    def test_transition_with_priority_zero_is_sampled(self):
        storage, lanes = assemble(2, sampler=PERSampler(2, alpha=1.0, beta=1.0, eps=0.5)), Lanes(2)
        index = lanes.write(storage, [ends([2])])[0]
        storage.update_priority(index, torch.tensor([0.0, 0.5]))
        assert_priorities(storage, lanes, dict(zip(lanes.live(), [0.5, 1.0], strict=True)), 1.0)
        storage.sampler.eps = 0.25
        assert_priorities(storage, lanes, dict(zip(lanes.live(), [0.25, 0.75], strict=True)), 1.0)

    def test_rows_may_be_written_with_a_priority(self):
        storage, lanes = make("prioritized", size=8, alpha=1.0, beta=1.0), Lanes(8)
        error = torch.tensor([[[1.0], [2.0], [3.0]]])
        lanes.write(storage, [ends([3])], change=lambda data: data.set("td_error", error))
        raw = dict(zip(lanes.live(), [1.0, 2.0, 3.0], strict=True))
        assert_priorities(storage, lanes, raw, 1.0)
        lanes.write(storage, [ends([1])])
        assert_priorities(storage, lanes, {**raw, lanes.live()[-1]: 3.0}, 1.0)

    @pytest.mark.requirement("per-new")
    @pytest.mark.parametrize("num_rows", [0, 1, 7])
    def test_rows_that_were_written_while_another_sampler_drew(self, num_rows):
        per = PERSampler(8, alpha=1.0, beta=1.0, eps=1e-9)
        storage, lanes = assemble(8, sampler=per), Lanes(8)
        index = lanes.write(storage, [ends([3])])[0]
        storage.update_priority(index, torch.tensor([4.0, 2.0, 3.0]))
        raw = dict(zip(lanes.live(), [4.0, 2.0, 3.0], strict=True))
        storage.set_sampler(UniformSampler())
        if num_rows:
            lanes.write(storage, [ends([num_rows])])
        storage.sample(4)
        storage.set_sampler(per)
        assert_priorities(storage, lanes, {s: raw.get(s, 4.0) for s in lanes.live()}, 1.0)

    @pytest.mark.requirement("live-parameters")
    def test_alpha_and_beta_may_go_to_zero_and_come_back(self):
        storage, lanes = assemble(8, sampler=PERSampler(8, alpha=0.7, beta=1.0, eps=1e-9)), Lanes(8)
        index = lanes.write(storage, [ends([3])])[0]
        storage.update_priority(index, torch.tensor([4.0, 2.0, 3.0]))
        raw = dict(zip(lanes.live(), [4.0, 2.0, 3.0], strict=True))
        for alpha, beta in ((0.0, 1.0), (0.7, 0.0), (1.5, 1.0)):
            storage.alpha, storage.beta = alpha, beta
            assert_priorities(storage, lanes, raw, alpha, beta)

    @pytest.mark.requirement("per-beta")
    def test_beta_anneals_to_exactly_one_and_stays(self):
        storage, lanes = assemble(8, sampler=PERSampler(8, alpha=1.0, beta=0.4, eps=1e-9)), Lanes(8)
        index = lanes.write(storage, [ends([2])])[0]
        storage.update_priority(index, torch.tensor([1.0, 4.0]))
        raw = dict(zip(lanes.live(), [1.0, 4.0], strict=True))
        scheduler = LinearScheduler(storage, "beta", final_value=1.0, num_steps=3)
        for beta in (0.6, 0.8, 1.0, 1.0):
            scheduler.step()
            assert storage.beta == pytest.approx(beta)
            assert_priorities(storage, lanes, raw, 1.0, beta)
        assert storage.beta == 1

    @pytest.mark.requirement("per-update")
    def test_many_updates_keep_the_law(self):
        storage, lanes = assemble(50, 2, sampler=PERSampler(50, alpha=0.7, beta=0.5)), Lanes(50, 2)
        random, raw = torch.Generator().manual_seed(1), {}
        largest = 1.0
        for turn in range(150):
            if turn % 3 == 0:
                lanes.write(storage, [[turn % 9 == 0, False]] * 2)
            raw = {step: raw.get(step, largest) for step in lanes.live()}
            batch = storage.sample(32)
            batch["td_error"] = torch.rand(32, generator=random) * 3 + 0.1
            storage.update_tensordict_priority(batch)
            raw |= zip(lanes.of(batch), batch["td_error"].tolist(), strict=True)
            largest = max(largest, batch["td_error"].max().item())
        assert_priorities(storage, lanes, raw, 0.7, 0.5)


# Recency


def window(num_rows, eta, k, num_updates, c_min):
    return int(min(max(num_rows * eta ** (k * 1000 / num_updates), c_min), num_rows))


@pytest.mark.requirement("ere-window")
class TestRecency:
    @each_history
    def test_exactly_the_newest_of_each_lane_in_every_update(self, history):
        sampler = ERESampler(0.999, c_min=3)
        storage, lanes = filled(history, sampler=sampler)
        for num_updates in (1, 4, 7):
            sampler.begin_phase(num_updates)
            for k in range(1, num_updates + 1):
                size = window(len(lanes.live()), 0.999, k, num_updates, 3)
                assert set(lanes.of(storage.sample(600))) == set(lanes.newest(size))
            # The last window stays.
            assert set(lanes.of(storage.sample(600))) == set(lanes.newest(size))

    @pytest.mark.parametrize("num_steps", [9, 30, 45])
    def test_lanes_of_equal_fill(self, num_steps):
        """Before and after they wrap."""
        sampler = ERESampler(0.9, c_min=1)
        storage, lanes = assemble(90, 3, sampler=sampler), Lanes(90, 3)
        flags = [ends([length] * 9)[:num_steps] for length in (5, 7, 11)]
        lanes.write(storage, [lane[: num_steps // 2] for lane in flags])
        lanes.write(storage, [lane[num_steps // 2 :] for lane in flags])
        for count in (3, 12, 27):
            sampler.c_min = count
            sampler.begin_phase(1)
            assert_uniform(counted(storage, lanes, 5000), lanes.newest(count))

    def test_fewer_rows_than_c_min_are_drawn_uniformly(self):
        storage, lanes = assemble(1000, sampler=ERESampler(0.9, c_min=31)), Lanes(1000)
        lanes.write(storage, [ends([30])])
        assert_uniform(counted(storage, lanes, 20_000), lanes.live())

    def test_capacity_as_the_reference(self):
        sampler = ERESampler((50.01 / 101) ** (1 / 1000), c_min=1, reference="capacity")
        storage, lanes = assemble(101, sampler=sampler), Lanes(101)
        for num_rows, size in ((40, 40), (20, 50)):
            lanes.write(storage, [ends([], num_rows)])
            sampler.begin_phase(1)
            assert set(lanes.of(storage.sample(1500))) == set(lanes.newest(size))

    def test_a_write_starts_the_next_phase(self):
        """A step before each update still goes through the windows."""
        storage, lanes = (
            assemble(100, sampler=ERESampler(0.99, c_min=1, updates_per_phase=4)),
            Lanes(100),
        )
        lanes.write(storage, [ends([], 99)])
        sizes = []
        for _ in range(8):
            lanes.write(storage, [[False]])
            steps = lanes.of(storage.sample(400))
            sizes.append(len(set(steps)))
        # 100 * 0.99^250 = 8.1, and so on.
        assert sizes == [8, 1, 1, 1] * 2

    def test_a_phase_without_a_length_is_as_long_as_the_one_before(self):
        """At least 1000 updates; the first write after them begins the next."""
        sampler = ERESampler(0.9, c_min=1)
        storage, lanes = assemble(100, sampler=sampler), Lanes(100)
        lanes.write(storage, [ends([], 100)])
        for num_updates in (1000, 1200):
            for update in range(num_updates):
                size = window(100, 0.9, update + 1, 1000, 1)
                batch = storage.sample(1)
                assert lanes.of(batch)[0] in lanes.newest(size)
                if update == 500:
                    lanes.write(storage, [[False]])
            lanes.write(storage, [[False]])
        sampler.begin_phase(1)
        assert set(lanes.of(storage.sample(50))) == set(lanes.newest(1))
        # Nor does one go on in other rows.
        sampler.begin_phase(5)
        storage.set_sampler(UniformSampler())
        storage.empty()
        Lanes(100).write(storage, [ends([], 3000)])
        storage.set_sampler(sampler)
        storage.sample(1)
        assert (sampler.update, sampler.num_updates) == (1, 1000)

    @pytest.mark.requirement("ere-per")
    @pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
    @pytest.mark.parametrize(("size", "num_lanes", "window"), [(40, 2, 12), (1920, 4, 960)])
    def test_priorities_within_the_window(self, normalize, size, num_lanes, window):
        per = PERSampler(size, alpha=0.6, beta=0.8, eps=1e-9, normalize=normalize)
        sampler = ERESampler(0.9, c_min=window, base=per)
        storage, lanes = assemble(size, num_lanes, sampler=sampler), Lanes(size, num_lanes)
        index = lanes.write(storage, [ends([9, 8] * (size // num_lanes // 20), 6)] * num_lanes)
        # Older rows have lower ones.
        raw = {s: 0.5 + s.id % 5 + s.id % 1024 / 100 for lane in lanes.lanes for s in lane}
        # The last ones are of rows that gave way at once.
        index, priority = index.flatten().flip(0), torch.tensor([*raw.values()]).flip(0)
        storage.update_priority(index, priority)
        assert torch.equal(per.priorities[index[index >= 0]], priority[index >= 0])
        sampler.begin_phase(1)
        raw = {step: raw[step] for step in lanes.newest(window)}
        assert_priorities(storage, lanes, raw, 0.6, 0.8, normalize)
        storage.empty(keep_steps=4)
        assert sampler.update == 0
        lanes.empty(keep_steps=4)
        lanes.write(storage, [ends([], 6)], [0])
        sampler.begin_phase(1)
        batch = storage.sample(400)
        assert (batch["priority_weight"] == 1).all()  # all alike
        assert set(lanes.of(batch)) == set(lanes.newest(window))
        assert per.priorities.min() == 1  # as if none had been reported
        storage.update_priority(live := storage.episodes.live_slots(), 2.0)
        assert (per.priorities[live] == 2).all()


@pytest.mark.requirement("ere-eta")
class TestEta:
    def test_the_adaptive_rule_by_hand(self):
        """Mean slopes of three returns are half of the last less the first; they shrink by a half."""
        storage = assemble(10, sampler=ERESampler(eta=0.5))
        scheduler = library.ReturnImprovementEta(storage, num_returns=3, decay=0.5)
        trace = [
            (0.0, 0.0),  # No slope yet.
            (1.0, 0.0),
            (4.0, 1.0),  # g = 2, hi = 2.
            (2.0, 0.5),  # g = 0.5, hi = 1.
            (2.0, -1.0),  # g = -1, lo = 1; hi = 0.5.
            (0.0, -1.0),  # g = -1, no steeper than before: lo = 0.5, hi = 0.25.
            (2.0, 0.0),  # g = 0; lo = 0.25, hi = 0.125.
            (0.25, 1.0),  # g = 0.125, no steeper: hi = 0.0625; lo = 0.125.
            (1.875, -1.0),  # g = -0.0625, lo = 0.0625; hi = 0.03125.
            (0.28125, 1.0),  # g = 0.015625, hi = 0.015625.
        ]
        for value, slope in trace:
            scheduler.step(value)
            assert storage.eta == pytest.approx(1 - 0.5 * (slope + 1) / 2), value

    @given(st.lists(st.integers(-100, 100), min_size=4, max_size=30))
    def test_the_adaptive_rule_is_a_loop(self, returns):
        storage = assemble(10, sampler=ERESampler(eta=0.5))
        scheduler = library.ReturnImprovementEta(storage, num_returns=4, decay=0.5)
        rise, fall = -math.inf, 0.0
        for end, value in enumerate(returns, start=1):
            scheduler.step(value)
            slope = 0.0
            if end >= 4:
                slope = np.gradient(returns[end - 4 : end]).mean()
                rise = slope if slope > rise else 0.5 * rise
                fall = -slope if -slope > fall else 0.5 * fall
                slope = slope / rise if slope > 0 else slope / (fall or 1)
            assert storage.eta == pytest.approx(1 - 0.5 * (np.clip(slope, -1, 1) + 1) / 2)

    @given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=12))
    @example([1e308, -1e308, 1e308])
    def test_eta_stays_within_its_bounds(self, returns):
        storage = assemble(10, sampler=ERESampler(eta=0.1))
        scheduler = library.ReturnImprovementEta(storage, num_returns=3)
        for value in returns:
            scheduler.step(value)
            assert 0.1 <= storage.eta <= 1

    def test_saved_scheduler_continues(self):
        returns, etas = [1.0, 4.0, 2.0, 2.0, 1.0, 5.0, 3.0], []
        for saved_after in (None, 4):
            storage = assemble(10, sampler=ERESampler(eta=0.5))
            scheduler = library.ReturnImprovementEta(storage, num_returns=3)
            for number, value in enumerate(returns):
                if number == saved_after:
                    state = scheduler.state_dict()
                    scheduler = library.ReturnImprovementEta(storage, num_returns=3)
                    scheduler.load_state_dict(state)
                scheduler.step(value)
            etas.append(storage.eta)
        assert etas[0] == etas[1]

    def test_scheduler_sets_eta_of_wrapped_samplers(self):
        storage = assemble(10, **relabelling(HERSampler(base=ERESampler(eta=0.5))))
        scheduler = library.ReturnImprovementEta(storage, num_returns=2)
        scheduler.step([0.0, 1.0])
        assert storage.eta == 0.5
        with pytest.raises((ValueError, AttributeError, TypeError)):
            library.ReturnImprovementEta(assemble(10))

    def test_a_flat_history_is_between(self):
        storage = assemble(10, sampler=ERESampler(eta=0.9))
        scheduler = library.ReturnImprovementEta(storage)
        for _ in range(50):
            scheduler.step(3.0)
            assert storage.eta == pytest.approx(0.95)
        for bad in (float("nan"), float("inf"), [1.0, float("nan")]):
            with pytest.raises(ValueError, match="finite"):
                scheduler.step(bad)
            assert storage.eta == pytest.approx(0.95)
        scheduler.step([1.0] * 20)
        assert 0.9 <= storage.eta <= 1


# Sequences


@pytest.mark.requirement("sequences")
@pytest.mark.requirement("sequence-boundaries")
class TestSequences:
    @pytest.mark.parametrize(
        ("boundary", "rows", "valid"),
        [
            ("pad", ["3444", "5567", "5678"], ["1100", "0111", "1111"]),
            # Of steps 3 and 4 alone, both are there to learn from; 5 .. 8 are as many as asked for.
            ("fit", ["3344", "5678", "5678"], ["0110", "1111", "1111"]),
            ("cross", ["3456", "4567", "5678"], ["1111", "1111", "1111"]),
        ],
    )
    def test_by_hand(self, boundary, rows, valid):
        unit = EpisodeSequence(2, burn_in=1, bootstrap=1, boundary=boundary)
        storage, lanes = assemble(6, sample_unit=unit), Lanes(6)
        # Steps 0 .. 8 with an end at step 4, of which 3 .. 8 are live.
        lanes.write(storage, [ends([5], 4)])
        numbers, seen = [step.id for step in lanes.lanes[0]], {}
        for line in storage.sample(100).reshape(100, 4):
            anchor = numbers.index(ids_of(storage[line["anchor_index"][:1]]).item())
            found = "".join(str(numbers.index(number)) for number in ids_of(line).tolist())
            seen[anchor] = found, "".join(str(int(flag)) for flag in line["validity_mask"])
        assert [seen[anchor] for anchor in (4, 5, 6)] == [*zip(rows, valid, strict=True)]

    @pytest.mark.requirement("per-sequence")
    @each_boundary
    @pytest.mark.parametrize("given", ["one a sequence", "one a row", "one a learning row"])
    def test_priorities_are_of_sequences(self, boundary, given):
        unit = EpisodeSequence(3, burn_in=1, bootstrap=1, boundary=boundary)
        sampler = PERSampler(12, alpha=1.0, beta=1.0, eps=1e-9)
        storage, lanes = assemble(12, sampler=sampler, sample_unit=unit), Lanes(12)
        lanes.write(storage, [ends([6, 6, 4], 2)])
        raw = dict.fromkeys(lanes.live(), 1.0)
        batch = storage.sample(40).reshape(40, 5)
        error = torch.rand(40, 5, generator=torch.Generator().manual_seed(3)) + 0.1
        learnt = batch["validity_mask"] & batch["learning_mask"]
        mixed = library.sequence_priority(error, mask=learnt)
        if given == "one a learning row":
            storage.update_tensordict_priority(batch[learnt], error[learnt])
        else:
            storage.update_tensordict_priority(batch, error if given == "one a row" else mixed)
        anchors = lanes.of(storage[batch["anchor_index"][:, 0]])
        priority = mixed if given == "one a sequence" else torch.where(learnt, error, 0).amax(1)
        raw |= zip(anchors, priority.tolist(), strict=True)
        # Each step has the weight of its anchor; draws of anchors follow the priorities.
        drawn = storage.sample(4000).reshape(4000, 5)
        anchors = lanes.of(storage[drawn["anchor_index"][:, 0]])
        assert_law(Counter(anchors), raw)
        weight = torch.tensor([min(raw.values()) / raw[anchor] for anchor in anchors])
        expected = weight.unsqueeze(1).expand(-1, 5)
        torch.testing.assert_close(drawn["priority_weight"], expected, rtol=1e-4, atol=1e-6)

    @each_boundary
    @pytest.mark.parametrize(("bootstrap", "n_step"), [(0, 1), (2, 1), (3, 3), (1, 3)])
    def test_targets_are_those_of_a_loop(self, boundary, bootstrap, n_step):
        """The value of a state is read off the sequence itself, where it is there."""
        unit = EpisodeSequence(3, burn_in=2, bootstrap=bootstrap, boundary=boundary)
        transform = library.NStep(n_step, 0.5)
        storage, lanes = assemble(30, sample_unit=unit, transform=transform), Lanes(30)
        lanes.write(storage, [ends([5, 1, 2, 7, 3], 6)])
        batch = storage.sample(40).reshape(40, -1)
        values = torch.rand(40, 3 + bootstrap, generator=torch.Generator().manual_seed(0))
        # What is not there does not count, whatever the network says of it.
        values[~batch["validity_mask"][:, 2:]] = torch.nan
        target, mask = unit.targets(batch, values, discount=0.5)
        for line, value, found, known in zip(batch, values, target, mask, strict=True):
            steps, valid = lanes.of(line)[2:], line["validity_mask"][2:].tolist()
            for at in range(3):
                window = lanes.onward(steps[at])[:n_step]
                (row,), (m,) = folded([window], 0.5)
                is_over = bool(row["next", "terminated"])
                # Values of those steps of the sequence that come right behind the window.
                after = [
                    value[n].item()
                    for n in range(at + 1, len(steps))
                    if valid[n] and steps[n].id == steps[at].id + m
                    if steps[n].first == steps[at].first
                ]
                assert bool(known[at]) == (valid[at] and (is_over or bool(after)))
                if known[at]:
                    expected = row["next", "reward"].item()
                    expected += 0 if is_over else 0.5**m * after[0]
                    assert found[at].item() == pytest.approx(expected)

    def test_targets_do_not_bootstrap_from_reached_goals(self):
        """As where `terminated_fn` says so in the middle of an episode."""
        unit = EpisodeSequence(2, bootstrap=1)
        storage, lanes = assemble(30, sample_unit=unit), Lanes(30)
        lanes.write(storage, [ends([], 20)])
        batch = storage.sample(10).reshape(10, 3)
        batch["next", "terminated"][:, 0] = True
        target, mask = unit.targets(batch, torch.full((10, 3), 7.0), discount=0.5)
        assert mask[:, 0].all()
        assert torch.equal(target[:, 0], batch["next", "reward"][:, 0, 0])
        known, reward = mask[:, 1], batch["next", "reward"][:, 1, 0]
        assert known.any()
        assert torch.equal(target[:, 1][known], (reward + 3.5)[known])
        lacking, values = batch.exclude("is_init"), torch.zeros(10, 3)
        wrong = [(it, values, 0.5) for it in (batch.view(-1)[1:], lacking, [batch])]
        for it, value, discount in (*wrong, (batch, values[:, :2], 0.5), (batch, values, 1.5)):
            with pytest.raises((ValueError, KeyError, TypeError), match=r"must be|has no"):
                unit.targets(it, value, discount=discount)

    @pytest.mark.requirement("per-sequence")
    def test_the_mix_of_r2d2(self):
        mixed = library.sequence_priority(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), eta=0.9)
        assert mixed.tolist() == pytest.approx([0.925])
