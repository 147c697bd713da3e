"""What a storage does beside drawing: seeds, parameters, prefetching, slices, whole episodes."""

import math
import threading
from collections import Counter
from functools import partial

import pytest
import torch
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import PLACES, assemble, library, make
from contract.steps import Player, assert_batches, assert_same, ids_of, record, reward_fn, rows
from scipy import stats
from torchrl.data import RandomSampler
from torchrl.envs.transforms import Transform

GoalRelabel, HERSampler, NStep = library.GoalRelabel, library.HERSampler, library.NStep
each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)


@pytest.mark.requirement("devices")
class TestSeeds:
    @pytest.mark.parametrize(
        "kind", ["uniform", "n-step", "recency", "hindsight", "prioritized", "all"]
    )
    def test_the_same_batches_in_every_place(self, kind):
        """Of one seed, also after priorities were handed back."""
        drawn = []
        for where in PLACES:
            storage = make(kind, place=where, lanes=2, size=24, batch_size=16, seed=3)
            lanes, batches = Lanes(24, 2), []
            for _ in range(4):
                lanes.write(storage, [ends([4], 3), ends([2, 2], 3)])
                batch = storage.sample()
                storage.update_tensordict_priority(batch, batch["next", "reward"].abs())
                batches.append(batch)
            drawn.append(torch.stack(batches))
        for batches in drawn[1:]:
            assert_batches(batches, drawn[0])

    @pytest.mark.parametrize("kind", ["uniform", "all"])
    def test_another_seed_draws_others(self, kind):
        """Whatever the global generator does."""
        batches = []
        for number, seed in enumerate((0, 0, 1)):
            storage = make(kind, size=40, seed=seed, batch_size=32)
            Lanes(40).write(storage, [ends([9, 9, 9])])
            torch.manual_seed(number)
            batch = storage.sample()
            batches.append([ids_of(batch).tolist(), batch["desired_goal"].tolist()])
        assert batches[0] == batches[1]
        assert all(one != other for one, other in zip(*batches[1:], strict=True))

    @pytest.mark.parametrize("kind", ["uniform", "all"])
    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_prefetch_draws_the_same(self, prefetch, kind):
        """Whole episodes too, which wait for the batches that are drawn ahead."""
        ahead, plain = (make(kind, size=40, batch_size=8, prefetch=n) for n in (prefetch, 0))
        for storage in (ahead, plain):
            Lanes(40).write(storage, [ends([9, 9, 9])])
        batches = []
        for number in range(24):
            batches += [plain.sample() for _ in range(1 + prefetch - len(batches))]
            assert_batches(ahead.sample(), batches.pop(0))
            if number % 3:
                assert_batches(ahead.sample_episodes(2), plain.sample_episodes(2))
        ahead.shutdown()

    def test_generator_and_sampler_that_are_set_replace_prefetched_batches(self):
        storage, batches = make(size=40, batch_size=8, prefetch=2), []
        Lanes(40).write(storage, [ends([9, 9, 9])])
        storage.sample()
        for _ in range(2):
            storage.set_rng(torch.Generator().manual_seed(0))
            batches.append(storage.sample())
        assert_batches(*batches)
        storage.set_sampler(library.PERSampler(40))
        assert "priority_weight" in storage.sample()
        storage.shutdown()


@pytest.mark.requirement("live-parameters")
class TestLiveParameters:
    """What is set between two samples holds from the next one on."""

    def make(self, kind, **options):
        storage, lanes = make(kind, size=40, batch_size=200, **options), Lanes(40)
        lanes.write(storage, [ends([5, 9, 3, 6], 4)])
        return storage, lanes

    def test_num_goals(self):
        storage, _ = self.make("all")
        for num_goals in (4, 0, 1, math.inf, 9):
            storage.num_goals = num_goals
            share = 1 if num_goals == math.inf else num_goals / (num_goals + 1)
            assert int(storage.sample()["her_mask"].sum()) == math.floor(200 * share)
            assert storage.num_goals == num_goals

    def test_strategy(self):
        storage, lanes = self.make("hindsight")
        for strategy in ("final", "future", {"final": 0.5, "current": 0.5}, "random"):
            storage.strategy = strategy
            names = [strategy] if isinstance(strategy, str) else [*strategy]
            batch = storage.sample()
            batch = batch[batch["her_mask"]]
            for step, goal in zip(
                lanes.of(batch), lanes.reaching(batch["desired_goal"]), strict=True
            ):
                assert any(goal in lanes.goals(step, name) for name in names)

    def test_eta_and_c_min(self):
        storage, lanes = self.make("recency", eta=0.9, c_min=3)
        for eta, c_min, size in ((0.9, 3, 3), (0.9, 8, 8), (1.0, 3, 27), (0.99, 1, 1)):
            storage.eta, storage.c_min = eta, c_min
            storage.sampler.begin_phase(1)
            assert set(lanes.of(storage.sample(600))) == set(lanes.newest(size))


@pytest.mark.requirement("episodes")
@each_history
def test_whole_episodes_are_drawn_uniformly(history):
    storage = assemble(history.size, history.lanes)
    lanes = history.write(storage)
    whole = lanes.whole_episodes()
    if not whole:
        with pytest.raises(RuntimeError, match="complete episode"):
            storage.sample_episodes(3)
        return
    counts = Counter(ids_of(storage.sample_episodes(60 * len(whole)))[:, 0].tolist())
    assert set(counts) == set(whole)
    assert len(whole) == 1 or stats.chisquare([*counts.values()]).pvalue > 1e-4
    for _ in range(9):  # most are cut
        lanes.end_episodes(storage)
        lanes.write(storage, [[False]] * history.lanes)
    if whole := lanes.whole_episodes():
        assert {int(ids_of(storage.sample_episodes(1))[0, 0]) for _ in range(99)} == {*whole}


@pytest.mark.requirement("slices")
class TestSlices:
    def test_fields_of_the_step_may_be_rewritten(self, place):
        """Rewards of a learned model; never flags or observations."""
        storage, lanes = assemble(24, 2, place=place), Lanes(24, 2)
        index = lanes.write(storage, [ends([4], 3)] * 2).flatten()
        before = storage[index]
        reward = torch.arange(3.0).unsqueeze(1)
        effort = torch.rand(3, 1).double()
        if place == "directory":
            with pytest.raises(TypeError, match="directory"):
                storage.rewrite(index[2:5], {("next", "reward"): reward})
            assert_same(storage[index], before)
            return
        # Of rows that are named twice the last value counts.
        twice = index[[2, 2, 3, 4]]
        storage.rewrite(twice, {("next", "reward"): torch.cat([reward[1:2], reward])})
        storage.rewrite(index[2:5], {("next", "effort"): effort})
        expected = storage[index]  # a clone of tensordict's has no -0.0
        expected["next", "reward"][2:5], expected["next", "effort"][2:5] = reward, effort
        assert_same(storage[index], expected)
        storage.rewrite(index[2:5].tolist(), {("next", "effort"): effort})
        for mask in (index == index[2], index[2:5].double()):
            with pytest.raises(TypeError, match="integers"):
                storage.rewrite(mask, {("next", "effort"): effort})
        for key in ("observation", ("next", "done"), ("next", "achieved_goal"), "unknown"):
            value = before.get(key, reward)[2:5]
            with pytest.raises((ValueError, KeyError)):
                storage.rewrite(index[2:5], {key: value})
        for wrong in (reward[:2], reward.double()):
            with pytest.raises(ValueError, match="reward"):
                storage.rewrite(
                    index[2:5], {("next", "effort"): effort + 1, ("next", "reward"): wrong}
                )
        assert_same(storage[index], expected)

    def test_update_if_present_skips_overwritten_transitions(self, place):
        storage, lanes = assemble(24, 2, place=place, batch_size=50), Lanes(24, 2)
        lanes.write(storage, [ends([8], 4)] * 2)
        batch, key = storage.sample(), ("next", "effort")
        patch = {key: batch[key] + 1}
        handle = {"index": batch["index"], "generation": batch["index_generation"]}
        lanes.write(storage, [ends([6])] * 2)
        before = storage[:]
        if place == "directory":
            with pytest.raises(TypeError, match="directory"):
                storage.update_if_present(**handle, patch=patch)
            assert_same(storage[:], before)
            return
        for wrong in (patch | {"observation": batch["observation"]}, {"unknown": batch[key]}):
            with pytest.raises((KeyError, ValueError)):
                storage.update_if_present(**handle, patch=wrong)
        with pytest.raises(NotImplementedError, match="version_key"):
            storage.update_if_present(
                **handle, patch=patch, version_key=("next", "reward"), version=1
            )
        assert_same(storage[:], before)
        updated = storage.update_if_present(**handle, patch=patch).updated
        present = torch.isin(ids_of(batch), ids_of(before))
        assert torch.equal(updated.cpu(), present.cpu())
        assert 0 < updated.sum() < 50
        is_new = torch.isin(ids_of(before), ids_of(batch[updated]))
        expected = before[key] + is_new.unsqueeze(1).to(before[key])
        assert torch.equal(storage[:][key], expected)
        storage.empty()
        assert not storage.update_if_present(**handle, patch=patch).updated.any()
        assert (storage.writer.generations_of(torch.tensor([0, -1])) == -1).all()


@pytest.mark.requirement("clear")
class TestEmpty:
    @pytest.mark.parametrize("kind", ["uniform", "all"])
    def test_everything_is_as_in_a_fresh_storage(self, place, kind):
        fresh, emptied = (make(kind, place=place, lanes=2, size=24, batch_size=8) for _ in range(2))
        Lanes(24, 2).write(emptied, [ends([4, 4], 9)] * 2)
        for _ in range(9):
            emptied.empty()
        assert len(emptied) == emptied.write_count == 0
        batches = []
        for storage in (fresh, emptied):
            Lanes(24, 2).write(storage, [ends([4], 3)] * 2)
            batch = storage.sample()
            storage.update_tensordict_priority(batch, batch["next", "reward"].abs())
            batches.append([batch, storage.sample()])
        for one, other in zip(*batches, strict=True):
            assert_batches(one, other)


def test_priorities_of_as_many_agents_as_transitions_are_reduced():
    storage = make("prioritized", batch_size=4)
    storage.extend(rows(Player().play([4])))
    batch, priority = storage.sample(), torch.arange(16.0).reshape(4, 4, 1)
    storage.update_tensordict_priority(batch, priority)
    expected = dict(
        zip(batch["index"].tolist(), [3.0, 7.0, 11.0, 15.0], strict=True)
    )  # last counts
    assert storage.sampler.priorities[[*expected]].tolist() == [*expected.values()]


def test_priorities_of_padding_are_skipped():
    storage = make("prioritized", size=40)
    Lanes(40).write(storage, [ends([2, 4])])
    while (batch := storage.sample_episodes(2))["collector", "mask"].all():
        pass
    mask = batch["collector", "mask"]
    storage.update_tensordict_priority(batch, torch.where(mask, 5.0, math.nan))
    slots = batch["index"][mask].unique()
    assert (storage.sampler.priorities[slots] == 5).all()


@pytest.mark.requirement("generation")
@pytest.mark.parametrize(("num_batches", "epochs"), [(5, 1), (2, 3), (0, 2), (3, 0)])
def test_batches(num_batches, epochs):
    storages = [make(size=40, batch_size=8) for _ in range(2)]
    for storage in storages:
        Lanes(40).write(storage, [ends([9, 9])])
    found = [*storages[0].batches(num_batches, 6, epochs=epochs)]
    assert [batch.shape for batch in found] == [(6,)] * (num_batches * epochs)
    for batch in found:
        assert_batches(batch, storages[1].sample(6))


def test_rows_that_do_not_come():
    """For those that come, see the readers."""
    (cancelled := threading.Event()).set()
    storage = make()
    for error, options in (
        (TimeoutError, {"timeout": 0}),
        (RuntimeError, {"cancel_event": cancelled}),
    ):
        with pytest.raises(error):
            storage.sample(wait=True, **options)
        assert not storage.wait_until_sampleable(2, **options)
    storage.shutdown()
    for sample in (
        *(storage.wait_until_sampleable, storage.sample, partial(storage.sample_episodes, 1)),
        library.ReplayStorageEnsemble(storage, batch_size=2).sample,
    ):
        with pytest.raises(RuntimeError, match="shut down"):
            sample()


@pytest.mark.requirement("generation")
@pytest.mark.parametrize(("prefetch", "has_goals"), [(0, False), (3, False), (0, True)])
def test_an_iteration_ends_with_the_epoch(prefetch, has_goals):
    """Also within a batch, of which the first row alone is of the old one."""
    sampler, transform = library.UniformSampler(without_replacement=True), None
    if has_goals:
        sampler, transform = HERSampler(base=sampler), GoalRelabel(lambda goal, *_: goal[:, 0])
    storage = assemble(40, batch_size=4, sampler=sampler, transform=transform, prefetch=prefetch)
    lanes = Lanes(40)
    lanes.write(storage, [ends([5, 3])])
    for _ in range(3):
        epoch = [step for _, it in zip(range(9), storage, strict=False) for step in lanes.of(it)]
        assert Counter(epoch) == dict.fromkeys(lanes.live(), 1)
    storage.synchronize()
    lanes.write(storage, [ends([], 1)])
    while len(batches := [*storage]) != 3:
        assert len(batches) == 2  # drawn ahead, of before
    storage.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        storage.sample()


def test_an_iteration_ends_if_all_other_transitions_of_the_epoch_are_evicted():
    storage = assemble(10, batch_size=4, sampler=library.UniformSampler(without_replacement=True))
    player = Player()
    storage.extend(rows(player.play([10])))
    batches = iter(storage)
    for _ in range(2):
        next(batches)
        storage.extend(rows(player.play([10])))
    assert next(batches, None) is None


class Tripled(Transform):
    """Rewards are stored times three, and drawn as they were."""

    def _call(self, data):
        return data.set(("next", "reward"), data["next", "reward"] / 3)

    forward = _call

    def _inv_call(self, data):
        return data.set(("next", "reward"), data["next", "reward"] * 3)


@pytest.mark.parametrize("way", ["extend", "add", "record"])
@pytest.mark.parametrize("is_appended", [False, True])
def test_what_is_written_goes_through_the_inverse_of_transforms(way, is_appended, place):
    transform = None if is_appended else Tripled()
    storage, player = make(place=place, transform=transform, batch_size=32), Player()
    if is_appended:
        storage.append_transform(Tripled())
    steps = player.play([4])
    for step in steps:
        if way == "record":
            record(storage, [step], "goals")
        else:
            data = rows([step])
            storage.add(data[0]) if way == "add" else storage.extend(data)
    expected = rows(steps)
    reward = expected["next", "reward"]
    assert torch.equal(storage[:]["next", "reward"], reward * 3)
    drawn, ids = storage.sample(), ids_of(expected).tolist()
    at = [ids.index(number) for number in ids_of(drawn).tolist()]
    torch.testing.assert_close(drawn["next", "reward"], reward[at])


def test_explain():
    history = HISTORIES["lanes"]
    relabel = GoalRelabel(reward_fn, info_keys=["effort"])
    storage = assemble(
        history.size, history.lanes, sampler=HERSampler("final"), transform=[relabel, NStep(2)]
    )
    lanes = history.write(storage)
    batch = storage.sample(40)
    said, steps = storage.explain(batch), lanes.of(batch)
    assert len(said) == 40
    assert said["lane"].tolist() == [step.lane for step in steps]
    assert said["step"].tolist() == [lanes.episode(step).index(step) for step in steps]
    assert said["length"].tolist() == [len(lanes.episode(step)) for step in steps]
    assert torch.equal(said["relabelled"], batch["her_mask"])
    assert torch.equal(said["steps"], batch["steps_to_next_obs"].squeeze(-1))
    for offset, mask, step in zip(said["goal_offset"], batch["her_mask"], steps, strict=True):
        assert offset == (len(lanes.onward(step)) - 1 if mask else 0)


@pytest.mark.requirement("nothing-crosses")
class TestOwnSampler:
    class Drawing(RandomSampler):
        """Draws what it is told."""

        def sample(self, storage, batch_size):
            return self.index, {}

    @pytest.mark.parametrize("wrong", [10**9, -1, None], ids=["beyond", "negative", "free"])
    def test_slots_are_of_live_rows(self, place, wrong):
        storage, lanes = assemble(24, 2, place=place, sampler=self.Drawing()), Lanes(24, 2)
        index = lanes.write(storage, [ends([4], 3)] * 2).flatten()
        if wrong is None:
            wrong = next(slot for slot in range(24) if slot not in index.tolist())
        storage.sampler.index = torch.cat([index[:2], torch.tensor([wrong])])
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            storage.sample(3)
        storage.sampler.index = index[[3, 1, 1]]
        assert lanes.of(storage.sample(3)) == [lanes.lanes[0][at] for at in (3, 1, 1)]
