"""Any writes at all, in any way and place: what is drawn is what the plain-Python lanes say."""

import random

import pytest
import torch
from contract.lanes import Lanes, assert_folded
from contract.make import library, make
from contract.steps import record, rows, terminated_fn

STRATEGIES = ["future", "final", "episode", "random", "current"]


class Play:
    """Writes steps of lanes in ways that follow from a seed."""

    def __init__(self, seed, **options):
        self.random = random.Random(seed)
        lanes = self.random.randint(1, 3)
        size = lanes * self.random.randint(2, 9)
        self.storage = make("all", lanes=lanes, size=size, batch_size=12, seed=seed, **options)
        self.lanes = Lanes(size, lanes)

    def flags(self, num_lanes, num_steps):
        share = self.random.choice([0.0, 0.1, 0.4])
        return [[self.random.random() < share for _ in range(num_steps)] for _ in range(num_lanes)]

    def write(self):
        every = range(len(self.lanes.lanes))
        if self.random.random() < 0.2:
            self.lanes.end_episodes(self.storage)
        match self.random.choice(["extend", "some lanes", "add", "record"]):
            case "some lanes" if len(every) > 1:
                named = self.random.sample(every, self.random.randint(1, len(every)))
                flags = self.flags(len(named), self.random.randint(1, 12))
                self.lanes.write(self.storage, flags, named)
            case "add":
                for _ in range(self.random.randint(1, 4)):
                    step = self.lanes.steps(self.flags(len(every), 1))[:, 0]
                    self.storage.add(step if len(every) > 1 else step[0])
            case "record":
                for _ in range(self.random.randint(1, 4)):
                    self.lanes.steps(self.flags(len(every), 1))
                    record(self.storage, [lane[-1] for lane in self.lanes.lanes])
            case _:
                self.lanes.write(self.storage, self.flags(len(every), self.random.randint(1, 12)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.requirement("hpne")
@pytest.mark.requirement("her-vector")
def test_goals_n_steps_and_priorities(place, seed):
    play = Play(seed, place=place, terminated_fn=terminated_fn, beta=1.0)
    storage, lanes, raw, largest = play.storage, play.lanes, {}, 0.0
    for _ in range(5):
        play.write()
        storage.validate()
        storage.n_step, storage.strategy = play.random.randint(1, 5), play.random.choice(STRATEGIES)
        storage.eta, storage.c_min = play.random.choice([(1.0, 1), (0.99, 3)])
        # The largest that was reported so far.
        raw = {step: raw.get(step, largest or 1.0) for step in lanes.live()}
        batch = storage.sample()
        steps = lanes.of(batch)
        assert len(storage) == len(lanes.live())
        assert set(steps) <= set(lanes.live())
        assert_folded(batch, lanes, storage.n_step, storage.discount, terminated_fn)
        new = batch["her_mask"]
        for step, goal, is_new in zip(steps, batch["desired_goal"], new, strict=True):
            if is_new:
                [reached] = lanes.reaching(goal.unsqueeze(0))
                assert reached in lanes.goals(step, storage.strategy)
        drawn = torch.tensor([raw[step] for step in steps])
        weight = (drawn.min() / drawn) ** storage.alpha
        torch.testing.assert_close(batch["priority_weight"], weight, rtol=1e-4, atol=1e-5)
        error = torch.tensor([play.random.random() + 0.1 for _ in steps])
        storage.update_tensordict_priority(batch, error)
        raw |= zip(steps, error.tolist(), strict=True)
        largest = max(largest, error.max().item())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.requirement("sequence-boundaries")
@pytest.mark.requirement("episodes")
def test_sequences_and_whole_episodes(place, seed):
    boundary = ["pad", "fit", "cross"][seed % 3]
    unit = library.EpisodeSequence(1 + seed % 4, seed % 3, seed % 2, boundary=boundary)
    play = Play(seed + 100, place=place, sample_unit=unit, num_goals=0, n_step=1)
    storage, lanes = play.storage, play.lanes
    for _ in range(4):
        play.write()
        storage.validate()
        for line in storage.sample().reshape(12, unit.num_steps):
            anchor = lanes.of(storage[line["anchor_index"][:1]])[0]
            expected, valid = lanes.window(
                anchor, unit.burn_in, unit.length + unit.bootstrap, boundary
            )
            assert lanes.of(line) == expected
            assert line["validity_mask"].tolist() == valid
        finished = {
            step.id: lanes.onward(step)
            for step in lanes.live()
            if step.id == step.first and lanes.onward(step)[-1].end
        }
        if finished:
            batch = storage.sample_episodes(5)
            for episode in batch:
                found = lanes.of(episode[episode["collector", "mask"]])
                assert found == finished[found[0].id]
        history = lanes.of(storage[:])
        assert sorted(history) == sorted(lanes.live())
        assert storage[:]["next", "reward"].tolist() == rows(history)["next", "reward"].tolist()
