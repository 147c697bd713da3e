"""What the parts do beside drawing: parameters, prefetching, ensembles, fields, whole episodes."""

import math
import re
from collections import Counter

import gymnasium
import numpy as np
import pytest
import torch
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import PLACES, assemble, library, make, make_for, make_of
from contract.steps import Player, assert_same, ids_of, reward_fn, rows
from scipy import stats
from tensordict import TensorDict
from torchrl.data import RandomSampler
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs

GoalRelabel, HERSampler, NStep = library.GoalRelabel, library.HERSampler, library.NStep
each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
#: One field of each dtype that rows may hold.
DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
]


def assert_batches(one, other):
    """The same entries, bit for bit, but for those that say where rows lie."""
    one, other = (batch.exclude("index", "goal_index", "priority_stamp") for batch in (one, other))
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    assert_same(one, other)


@pytest.mark.requirement("devices")
class TestSeeds:
    @pytest.mark.parametrize(
        "kind",
        [
            *("uniform", "recency", "hindsight"),
            *(
                pytest.param(
                    kind,
                    marks=pytest.mark.xfail(
                        reason="a directory that has wrapped has other slots to draw from",
                        strict=True,
                    ),
                )
                for kind in ("prioritized", "all")
            ),
        ],
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
        batches = []
        for seed in (0, 0, 1):
            storage = make(kind, size=40, seed=seed, batch_size=32)
            Lanes(40).write(storage, [ends([9, 9, 9])])
            torch.manual_seed(seed)
            batches.append(ids_of(storage.sample()).tolist())
        assert batches[0] == batches[1] != batches[2]

    @pytest.mark.parametrize("kind", ["uniform", "all"])
    @pytest.mark.parametrize("prefetch", [1, 3])
    def test_prefetch_draws_the_same(self, prefetch, kind):
        ahead, plain = (make(kind, size=40, batch_size=8, prefetch=n) for n in (prefetch, 0))
        for storage in (ahead, plain):
            Lanes(40).write(storage, [ends([9, 9, 9])])
        for _ in range(12):
            assert_batches(ahead.sample(), plain.sample())
        ahead.shutdown()


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
        for strategy in ("final", "FUTURE", {"final": 0.5, "current": 0.5}, "random"):
            storage.strategy = strategy
            names = [strategy.lower()] if isinstance(strategy, str) else [*strategy]
            batch = storage.sample()
            batch = batch[batch["her_mask"]]
            for step, goal in zip(
                lanes.of(batch), lanes.reaching(batch["desired_goal"]), strict=True
            ):
                assert any(goal in lanes.goals(step, name) for name in names)

    def test_alpha_and_beta(self):
        storage, lanes = self.make("prioritized", beta=1.0)
        batch = storage.sample()
        storage.update_tensordict_priority(batch, batch["next", "reward"].abs() + 0.1)
        storage.beta = 0.0
        assert (storage.sample()["priority_weight"] == 1).all()
        storage.beta = 1.0
        assert (storage.sample()["priority_weight"] < 1).any()
        storage.alpha = 0.0
        assert (storage.sample()["priority_weight"] == 1).all()
        counts = Counter(number for _ in range(30) for number in ids_of(storage.sample()).tolist())
        assert stats.chisquare([counts[step.id] for step in lanes.live()]).pvalue > 1e-4

    def test_eta_and_c_min(self):
        storage, lanes = self.make("recency", eta=0.9, c_min=3)
        for eta, c_min, size in ((0.9, 3, 3), (0.9, 8, 8), (1.0, 3, 27), (0.99, 1, 1)):
            storage.eta, storage.c_min = eta, c_min
            storage.sampler.begin_phase(1)
            assert set(lanes.of(storage.sample(600))) == set(lanes.newest(size))

    def test_the_reward_function(self):
        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        storage = assemble(40, sampler=HERSampler(num_goals=math.inf), transform=relabel)
        Lanes(40).write(storage, [ends([5, 9])])
        relabel.reward_fn = lambda achieved, goal, _: torch.full((len(goal),), 7.0)
        assert (storage.sample()["next", "reward"] == 7).all()


@pytest.mark.requirement("ensembles")
class TestEnsembles:
    def members(self, **parts):
        storages = [assemble(40, seed=seed, **parts) for seed in (1, 2)]
        lanes = [Lanes(40), Lanes(40)]
        lanes[1].players = [Player(5)]
        lanes[0].write(storages[0], [ends([5, 5, 5])])
        # Another environment, in the first lane of its own storage.
        steps = Player(5).play([9, 9])
        storages[1].extend(rows(steps))
        return storages, [lanes[0].live(), steps]

    @pytest.mark.parametrize(
        ("shares", "batch_size", "counts"),
        [
            ((0.5, 0.5), 9, [5, 4]),
            ((0.9, 0.1), 20, [18, 2]),
            (None, 8, [4, 4]),
            ((0, 1), 6, [0, 6]),
        ],
    )
    def test_shares_are_exact_and_spread_evenly(self, shares, batch_size, counts):
        """As in RLPD: of a fixed part of the batch each storage draws what it would draw alone."""
        storages, steps = self.members()
        alone = [
            ids_of(storage.sample(max(n, 1))).tolist()
            for storage, n in zip(self.members()[0], counts, strict=True)
        ]
        ensemble = library.ReplayStorageEnsemble(*storages, shares=shares, batch_size=batch_size)
        assert len(ensemble) == sum(map(len, steps))
        batch = ensemble.sample()
        found = ids_of(batch)
        number = (found >= 1 << 20).long()
        assert torch.equal(batch["buffer_ids"], number)
        assert torch.bincount(number, minlength=2).tolist() == counts
        due = torch.arange(1, batch_size + 1) * counts[1] / batch_size
        assert (number.cumsum(0) - due).abs().max() <= 1
        for i, expected in enumerate(alone):
            assert found[number == i].tolist() == expected[: counts[i]]

    def test_each_is_seen_through_its_own_transforms(self):
        offline = assemble(40, transform=NStep(3, 0.5))
        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        online = assemble(40, sampler=HERSampler("final", math.inf), transform=[relabel, NStep(1)])
        Lanes(40).write(offline, [ends([9, 9])])
        lanes = Lanes(40)
        lanes.write(online, [ends([9, 9])])
        batch = library.ReplayStorageEnsemble(offline, online, batch_size=40).sample()
        is_online = batch["buffer_ids"] == 1
        assert torch.equal(batch["her_mask"], is_online)
        assert (batch["steps_to_next_obs"][is_online] == 1).all()
        assert (batch["steps_to_next_obs"][~is_online] == 3).any()
        part = batch[is_online]
        assert lanes.reaching(part["desired_goal"]) == [
            lanes.onward(step)[-1] for step in lanes.of(part)
        ]
        assert (batch[~is_online]["desired_goal"][:, 1] == -1).all()

    def test_priorities_go_back_to_where_their_rows_are(self):
        per = [library.PERSampler(40, alpha=1.0, beta=1.0, eps=1e-9) for _ in range(2)]
        storages, lanes = [assemble(40, sampler=sampler) for sampler in per], Lanes(40)
        lanes.write(storages[0], [ends([5, 5, 5])])
        storages[1].extend(rows(lanes.live()))
        ensemble = library.ReplayStorageEnsemble(*storages, batch_size=400)
        batch = ensemble.sample()
        steps, numbers = lanes.of(batch), batch["buffer_ids"]
        priority = torch.tensor([1.0 + step.id % 5 for step in steps]) + 3.0 * numbers
        ensemble.update_tensordict_priority(batch, priority)
        batch = ensemble.sample()
        raw = (
            torch.tensor([1.0 + step.id % 5 for step in lanes.of(batch)])
            + 3.0 * batch["buffer_ids"]
        )
        # Each row's chance in its own storage, times its number of rows; the largest weight is 1.
        means = torch.tensor(
            [sum(1.0 + step.id % 5 for step in lanes.live()) / 15 + 3.0 * n for n in (0, 1)]
        )
        weight = means[batch["buffer_ids"]] / raw
        torch.testing.assert_close(batch["priority_weight"], weight / weight.max())

    @pytest.mark.parametrize("normalize", ["batch", "storage", "none"])
    @pytest.mark.parametrize("windowed", [False, True])
    def test_weights_are_of_all_of_the_batch(self, normalize, windowed):
        """Uniform draws weigh 1; by priority (N P)^-beta, within a window of its rows alone."""
        per = library.PERSampler(40, alpha=0.7, beta=0.6, eps=1e-9, normalize=normalize)
        sampler = library.ERESampler(0.9, c_min=6, base=per) if windowed else per
        storages, lanes = [assemble(40), assemble(40, sampler=sampler)], Lanes(40)
        lanes.write(storages[0], [ends([5, 5, 5])])
        steps = lanes.live()
        index = storages[1].extend(rows(steps))
        storages[1].update_priority(index, torch.arange(1.0, 16.0))
        raw = {step: number**0.7 for number, step in enumerate(steps, start=1)}
        if windowed:
            sampler.begin_phase(1)
            raw = {step: raw[step] for step in lanes.newest(6)}
        batch = library.ReplayStorageEnsemble(*storages, batch_size=64).sample()
        mean = sum(raw.values()) / len(raw)
        weight = torch.tensor(
            [
                (mean / raw[step]) ** 0.6 if number else 1.0
                for step, number in zip(lanes.of(batch), batch["buffer_ids"], strict=True)
            ]
        )
        expected = weight / weight.max()
        torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-4, atol=1e-6)

    def test_batches_explain_and_one_generator(self):
        drawn = []
        for seed in (5, 5, 6):
            storages, _ = self.members()
            ensemble = library.ReplayStorageEnsemble(
                *storages, batch_size=8, generator=torch.Generator().manual_seed(seed)
            )
            batches = [*ensemble.batches(2, 6, epochs=2)]
            assert [batch.shape for batch in batches] == [(6,)] * 4
            said = ensemble.explain(batches[-1])
            assert torch.equal(said["storage"], batches[-1]["buffer_ids"])
            assert len(said["step"]) == 6
            drawn.append(torch.cat([ids_of(batch) for batch in batches]).tolist())
        assert drawn[0] == drawn[1] != drawn[2]

    @pytest.mark.requirement("live-parameters")
    def test_shares_may_change(self):
        storages, _ = self.members()
        ensemble = library.ReplayStorageEnsemble(*storages, batch_size=10)
        for shares in ((0.1, 0.9), (0.7, 0.3)):
            ensemble.shares = shares
            counts = torch.bincount(ensemble.sample()["buffer_ids"], minlength=2)
            assert counts.tolist() == [round(10 * share) for share in shares]
        for wrong in ((0.5,), (0.6, 0.6), (-1, 2), "half", None):
            with pytest.raises((TypeError, ValueError)):
                ensemble.shares = wrong
        assert ensemble.can_sample()

    def test_sequences_stay_whole(self):
        storages, _ = self.members(sample_unit=library.EpisodeSequence(2, burn_in=1))
        ensemble = library.ReplayStorageEnsemble(*storages, shares=(0.25, 0.75), batch_size=8)
        batch = ensemble.sample().reshape(8, 3)
        assert (batch["buffer_ids"] == batch["buffer_ids"][:, :1]).all()
        assert batch["buffer_ids"][:, 0].tolist().count(0) == 2
        assert (batch["sequence_id"] == torch.arange(8).unsqueeze(1)).all()


# Fields


@pytest.mark.requirement("nested-dtypes")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_at_every_level_bit_for_bit(place, dtype):
    def values(*shape):
        number = torch.arange(math.prod(shape)).reshape(shape)
        return number % 3 == 1 if dtype is torch.bool else (number % 100 + 1).to(dtype)

    data, seen = rows(Player().play([4, 5], 2)), values(12, 2, 3)
    data["deep", "seen"], data["next", "deep", "seen"] = seen[:-1], seen[1:]
    data["scalar"], data["next", "only"] = values(11), values(11, 5)
    storage = assemble(20, place=place, on_gap="ignore")
    index = storage.extend(data)
    assert_same(storage[index], data)
    batch = storage.sample(40)
    order = {number: at for at, number in enumerate(ids_of(data).tolist())}
    assert_same(batch, data[[order[number] for number in ids_of(batch).tolist()]])
    history = storage[:]
    assert_same(history, data)
    assert_same(storage[3:7], data[3:7])


@pytest.mark.requirement("her-info")
def test_infos_and_further_fields_reach_the_reward_function(place):
    env = gymnasium.make("BitFlipping-v0", n_bits=3)
    seen = []

    def reward(achieved, desired, infos):
        seen.append({key: value.shape for key, value in infos.items()})
        assert (infos["weight"][:, 0] == achieved.sum(-1) * 2).all()
        return infos["weight"] * 3

    storage = make_for(
        env,
        "hindsight",
        place=place,
        reward_fn=reward,
        info_keys=("weight",),
        extra_fields={"state": (torch.float64, (2, 2)), ("next", "reward"): (torch.float64, (1,))},
        num_goals=math.inf,
    )
    before, _ = env.reset(seed=0)
    for number in range(20):
        after, *outcome, info = env.step(number % 3)
        weight = np.float32([after["achieved_goal"].sum() * 2])
        info = {**info, "weight": weight, "state": np.full((2, 2), number, np.float64)}
        storage.record(before, number % 3, *outcome, info, after)
        before = env.reset()[0] if outcome[1] or outcome[2] else after
    batch = storage.sample(30)
    assert seen == [{"weight": torch.Size([30, 1])}]
    assert batch["state"].dtype is batch["next", "reward"].dtype is torch.float64
    assert batch["state"].shape == (30, 2, 2)
    assert torch.equal(batch["next", "reward"], 3 * batch["weight"].double())


class TestFrameStacks:
    """Stacks of three frames [3, 2], of which each frame is stored once."""

    def play(self, lengths, history):
        """[N] rows whose stacks begin with frames of `history`: "same" or "own"."""
        number, blocks = 0, []
        for length in lengths:
            frames = torch.arange(number, number + length + 1).float()
            past = frames[:1].expand(2) if history == "same" else frames[:1] + 0.5 * torch.rand(2)
            frames = torch.cat([past, frames]).unsqueeze(1).expand(-1, 2)
            stacks = frames.unfold(0, 3, 1).transpose(1, 2)
            done = torch.arange(length).unsqueeze(1) == length - 1
            block = {
                "observation": stacks[:-1],
                "action": torch.zeros(length, 2),
                "effort": torch.zeros(length, 1, dtype=torch.float64),
                "next": {
                    "observation": stacks[1:],
                    "reward": torch.ones(length, 1),
                    "done": done,
                    "terminated": done.clone(),
                    "truncated": torch.zeros_like(done),
                },
            }
            blocks.append(TensorDict(block, [length]).clone())
            number += length + 1
        return torch.cat(blocks)

    @pytest.mark.requirement("stored-once")
    @pytest.mark.parametrize(
        "history",
        [
            "same",
            pytest.param(
                "own",
                marks=pytest.mark.xfail(reason="stacks must begin by one rule", strict=True),
            ),
        ],
    )
    def test_whole_stacks_are_read_also_over_n_steps(self, place, history):
        storage = make("n-step", place=place, layout="frames", size=24)
        data = self.play([4, 1, 7, 5, 3, 2, 9], history)
        for block in data.split(5):
            storage.extend(block)
        batch, first = storage.sample(200), len(data) - 24
        newest = data["observation"][:, -1, 0].tolist()
        assert len(storage) == 24
        assert batch["observation"].shape == (200, 3, 2)
        for row in batch:
            at = newest.index(row["observation"][-1, 0].item())
            assert at >= first
            assert torch.equal(row["observation"], data["observation"][at])
            last = at + row["steps_to_next_obs"].item() - 1
            assert torch.equal(row["next", "observation"], data["next", "observation"][last])

    LAYOUTS = {
        # Several channels a frame, as DrQ-v2 and CatFrames join them.
        "first": ((6, 2, 2), 0, lambda frames: np.concatenate(frames[-3:], 0)),
        "a new first": ((3, 2, 2), 0, lambda frames: np.stack([f[0] for f in frames[-3:]], 0)),
        "last": ((2, 2, 3), -1, lambda frames: np.stack([f[0] for f in frames[-3:]], -1)),
        "middle": ((2, 3, 2), 1, lambda frames: np.stack([f[0] for f in frames[-3:]], 1)),
    }

    def loop(self, lane, stacked):
        """Yields the steps of one environment: (observation, done, next observation)."""
        random, number = np.random.default_rng(lane), lane * 1000
        while True:
            frames = [random.integers(0, 255, (2, 2, 2), np.uint8)] * 3
            for _ in range(length := int(random.integers(1, 8))):
                before = {"pixels": stacked(frames), "number": np.array([number])}
                frames = [*frames, random.integers(0, 255, (2, 2, 2), np.uint8)]
                number += 1
                after = {"pixels": stacked(frames), "number": np.array([number])}
                yield before, len(frames) == length + 3, after
            number += 1

    @pytest.mark.requirement("stored-once")
    @pytest.mark.parametrize("name", LAYOUTS)
    @pytest.mark.parametrize("num_envs", [1, 2])
    def test_stacks_of_a_loop_along_any_dimension(self, place, name, num_envs):
        """Also over n steps, and where the storage wraps."""
        shape, dim, stacked = self.LAYOUTS[name]
        pixels = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        number = gymnasium.spaces.Box(0, 9999, (1,), np.int64)
        storage = make_of(
            gymnasium.spaces.Dict({"pixels": pixels, "number": number}),
            gymnasium.spaces.Discrete(3),
            "n-step",
            place=place,
            storage_size=30,
            num_envs=num_envs,
            frame_stack={"pixels": library.FrameStack(3, dim)},
            autoreset_mode="Disabled",
        )
        loops, written = [self.loop(lane, stacked) for lane in range(num_envs)], {}
        for _ in range(45):
            steps = [next(loop) for loop in loops]
            for before, _, after in steps:
                written |= {int(seen["number"][0]): seen["pixels"] for seen in (before, after)}
            before, after = (
                {key: np.stack([step[at][key] for step in steps]) for key in ("pixels", "number")}
                for at in (0, 2)
            )
            done = np.array([step[1] for step in steps])
            zeros = np.zeros(num_envs, np.int64)
            values = [before, zeros, zeros * 1.0, done, done & False, {}, after]
            if num_envs == 1:
                before, after = ({key: seen[key][0] for key in seen} for seen in (before, after))
                values = [before, 0, 0.0, bool(done[0]), False, {}, after]
            storage.record(*values)
        assert len(storage) == 30
        batch = storage.sample(100)
        for branch in (batch, batch["next"], storage[:], storage[:]["next"]):
            wanted = [written[int(number)] for number in branch["number"]]
            assert torch.equal(branch["pixels"], torch.from_numpy(np.stack(wanted)))
        ahead = batch["next", "number"] - batch["number"]
        assert torch.equal(ahead, batch["steps_to_next_obs"])

    @pytest.mark.requirement("refused-is-unchanged")
    def test_a_next_stack_that_is_not_moved_by_one_frame_is_refused(self):
        storage = make(layout="frames", size=24)
        data = self.play([4], "same")
        data["next", "observation"][2, 0] += 9
        with pytest.raises(ValueError, match="observation"):
            storage.extend(data)
        assert len(storage) == 0


# Whole episodes, slices, what is emptied


@pytest.mark.requirement("episodes")
@each_history
def test_whole_episodes_are_drawn_uniformly(history):
    storage = assemble(history.size, history.lanes)
    lanes = history.write(storage)
    whole = {
        step.id: lanes.onward(step)
        for step in lanes.live()
        if step.id == step.first and lanes.onward(step)[-1].end
    }
    if not whole:
        with pytest.raises(RuntimeError, match="finished"):
            storage.sample_episodes(3)
        return
    batch = storage.sample_episodes(60 * len(whole))
    mask = batch["collector", "mask"]
    counts = Counter(ids_of(batch)[:, 0].tolist())
    assert set(counts) == set(whole)
    assert len(whole) == 1 or stats.chisquare([*counts.values()]).pvalue > 1e-4
    assert batch.shape == (60 * len(whole), max(map(len, whole.values())))
    for episode, is_there in zip(batch, mask, strict=True):
        expected = rows(whole[int(ids_of(episode)[0])])
        assert int(is_there.sum()) == len(expected)
        assert_same(episode[: len(expected)], expected)
        padding = episode.exclude("index", ("collector", "mask"))[len(expected) :]
        assert not any(value.any() for value in padding.values(True, True))


@pytest.mark.requirement("slices")
class TestSlices:
    @each_history
    def test_in_time_order(self, history):
        storage = assemble(history.size, history.lanes)
        lanes = history.write(storage)
        found = ids_of(storage[:]).tolist()
        assert sorted(found) == sorted(step.id for step in lanes.live())
        for lane in range(history.lanes):
            expected = [step.id for step in lanes.live_of(lane)]
            assert [number for number in found if number in expected] == expected
        assert ids_of(storage[2:5]).tolist() == found[2:5]
        assert ids_of(storage[-3:]).tolist() == found[-3:]

    def test_a_slice_may_be_written_elsewhere(self):
        history = HISTORIES["wrapped"]
        storage, other = assemble(history.size), assemble(history.size)
        history.write(storage)
        other.extend(storage[:])
        assert_same(other[:], storage[:])

    @pytest.mark.xfail(reason="rows are never changed", strict=True, raises=AttributeError)
    def test_fields_of_the_step_may_be_rewritten(self, place):
        """Rewards of a learned model; never flags or observations."""
        storage, lanes = assemble(24, 2, place=place), Lanes(24, 2)
        index = lanes.write(storage, [ends([4], 3)] * 2).flatten()
        before = storage[index]
        reward = torch.arange(3.0).unsqueeze(1)
        effort = torch.rand(3, 1).double()
        storage.rewrite(index[2:5], {("next", "reward"): reward, "effort": effort})
        expected = before.clone()
        expected["next", "reward"][2:5], expected["effort"][2:5] = reward, effort
        assert_same(storage[index], expected)
        for key in ("observation", ("next", "done"), ("next", "achieved_goal"), "unknown"):
            value = before.get(key, reward)[2:5]
            with pytest.raises((ValueError, KeyError)):
                storage.rewrite(index[2:5], {key: value})
        with pytest.raises(ValueError, match="reward"):
            storage.rewrite(index[2:5], {("next", "reward"): reward[:2]})
        assert_same(storage[index], expected)


@pytest.mark.requirement("clear")
class TestEmpty:
    @pytest.mark.parametrize("kind", ["uniform", "all"])
    def test_everything_is_as_in_a_fresh_storage(self, place, kind):
        fresh, emptied = (make(kind, place=place, lanes=2, size=24, batch_size=8) for _ in range(2))
        Lanes(24, 2).write(emptied, [ends([4, 4], 9)] * 2)
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

    @pytest.mark.parametrize("keep_steps", [1, 3, 99])
    def test_the_last_steps_of_each_lane_stay(self, place, keep_steps):
        history = HISTORIES["unequal fill"]
        storage = assemble(history.size, history.lanes, place=place)
        lanes = history.write(storage)
        storage.empty(keep_steps=keep_steps)
        kept = [step for lane in (0, 1) for step in lanes.live_of(lane)[-keep_steps:]]
        assert sorted(ids_of(storage[:]).tolist()) == sorted(step.id for step in kept)
        lanes.write(storage, [[False, False]] * 2)
        assert len(storage) == min(len(kept) + 4, 24)


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


@pytest.mark.requirement("can-sample")
def test_what_a_storage_says_while_it_fills():
    storage = make(lanes=2, size=8, batch_size=4)
    lanes = Lanes(8, 2)
    for num_steps in range(1, 7):
        lanes.write(storage, [[False]] * 2)
        assert len(storage) == min(2 * num_steps, 8)
        assert storage.is_full == (num_steps >= 4)
        assert storage.write_count == 2 * num_steps
        assert storage.can_sample()


# Parts beside the storage


@pytest.mark.requirement("goal-wrapper")
class TestFlattenGoal:
    PARTS = ["observation", "achieved_goal", "desired_goal"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
    @pytest.mark.parametrize("with_space", [False, True])
    def test_one_vector_and_back(self, dtype, with_space):
        parts = TensorDict(
            {
                "desired_goal": torch.arange(5, 7).to(dtype).expand(4, 2),
                "achieved_goal": torch.arange(3, 5).to(dtype).expand(4, 2),
                "observation": torch.arange(0, 3).to(dtype).expand(4, 3),
            },
            [4],
        )
        space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(0, 9, parts[key].shape[1:]) for key in self.PARTS}
        )
        flat = library.FlattenGoal().flatten(parts.clone())
        assert torch.equal(flat, torch.arange(7).to(dtype).expand(4, 7))
        transform = library.FlattenGoal(space if with_space else None)
        if not with_space:
            with pytest.raises(RuntimeError):
                transform.unflatten(flat)
            transform.flatten(parts.clone())
        assert_same(TensorDict(transform.unflatten(flat), [4]), parts)
        with pytest.raises(ValueError, match="6"):
            transform.unflatten(flat[:, :6])

    @pytest.mark.parametrize("del_keys", [False, True])
    def test_of_a_batch_it_joins_the_drawn_goals(self, del_keys):
        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        flatten = library.FlattenGoal(del_keys=del_keys)
        batches = []
        for transform in ([relabel], [relabel, flatten]):
            storage = assemble(20, sampler=HERSampler(), transform=transform)
            Lanes(20).write(storage, [ends([6, 6])])
            batches.append(storage.sample(20))
        for plain, flat in zip(batches, [batches[1], batches[1]["next"]], strict=True):
            plain = batches[0] if flat is batches[1] else batches[0]["next"]
            wanted = torch.cat([plain[key] for key in self.PARTS], -1)
            torch.testing.assert_close(flat["observation_vector"], wanted, equal_nan=True)
            assert ("desired_goal" in flat.keys()) is not del_keys  # noqa: SIM118

    @pytest.mark.parametrize("del_keys", [False, True])
    def test_as_a_transform_of_an_environment(self, del_keys):
        base = GymEnv("BitFlipping-v0", n_bits=4, categorical_action_encoding=True)
        env = TransformedEnv(base, library.FlattenGoal(del_keys=del_keys))
        check_env_specs(env)
        rollout = env.rollout(3)
        for branch in (rollout, rollout["next"]):
            assert branch["observation_vector"].shape[-1] == 12
            assert ("desired_goal" in branch.keys()) is not del_keys  # noqa: SIM118
            if not del_keys:
                wanted = torch.cat([branch[key] for key in self.PARTS], -1)
                assert torch.equal(branch["observation_vector"], wanted)

    @pytest.mark.parametrize(
        "changes",
        [
            {"observation": torch.zeros(4, 3).double()},
            {"desired_goal": torch.zeros(4, 5)},
            {"observation": torch.zeros(4, 3, 3)},
            {"achieved_goal": None},
        ],
        ids=["another kind", "goals of two shapes", "an image", "no goal"],
    )
    def test_parts_that_make_no_vector(self, changes):
        parts = {key: torch.zeros(4, 2) for key in self.PARTS} | changes
        parts = {key: value for key, value in parts.items() if value is not None}
        with pytest.raises((KeyError, TypeError, ValueError)):
            library.FlattenGoal()(TensorDict(parts, [4]))


@pytest.mark.requirement("her-rewrite")
class TestRelabel:
    def filled(self, function, ends_fn=None):
        relabel = GoalRelabel(function, terminated_fn=ends_fn)
        storage, lanes = assemble(20, sampler=HERSampler(), transform=relabel), Lanes(20)
        lanes.write(storage, [ends([6, 6, 6], 2)])
        return storage, relabel

    @pytest.mark.parametrize(
        "form",
        [
            lambda reward: reward.unsqueeze(-1),
            lambda reward: reward.double(),
            lambda reward: reward.numpy(),
            lambda reward: reward.clone().requires_grad_(),
        ],
    )
    def test_forms_of_a_reward(self, form):
        def reward(achieved, desired, _):
            assert achieved.shape == desired.shape == (len(achieved), 2)
            return -(achieved - desired)[:, 0] / 4

        batches = [
            self.filled(f)[0].sample(30) for f in (reward, lambda *goals: form(reward(*goals)))
        ]
        assert_batches(*batches)

    def test_the_storage_stays_bit_for_bit(self):
        storage, _ = self.filled(
            lambda achieved, *_: torch.ones(len(achieved)), lambda a, d, _: a[:, 0] > 4
        )
        before = storage[:]
        for _ in range(200):
            for leaf in storage.sample(30).values(True, True):
                leaf.zero_()
        assert_same(storage[:], before)

    WRONG = {
        "a number": lambda *_: 0.0,
        "one for all": lambda *_: torch.zeros(1),
        "one each of three": lambda *_: torch.zeros(3),
        "two for each": lambda achieved, *_: torch.zeros(len(achieved), 2),
        "each for each": lambda achieved, *_: torch.zeros(len(achieved), len(achieved)),
        "nothing": lambda *_: None,
        "a word": lambda *_: "much",
        "an error": lambda *_: [][0],
    }

    @pytest.mark.requirement("refused-is-unchanged")
    @pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
    @pytest.mark.parametrize("name", ["reward_fn", "terminated_fn"])
    def test_functions_that_are_wrong(self, name, wrong):
        def right(achieved, *_):
            return torch.zeros(len(achieved))

        storage, relabel = self.filled(right)
        before = storage[:]
        setattr(relabel, name, wrong)
        with pytest.raises((TypeError, ValueError, IndexError)):
            storage.sample(15)
        setattr(relabel, name, right if name == "reward_fn" else None)
        assert len(storage.sample(15)) == 15
        assert_same(storage[:], before)

    @pytest.mark.parametrize(
        "parts",
        [
            {"sampler": HERSampler()},
            {"transform": GoalRelabel(reward_fn)},
            {"sampler": HERSampler(), "transform": [NStep(3), GoalRelabel(reward_fn)]},
            {"sampler": HERSampler(goal_key="other"), "transform": GoalRelabel(reward_fn)},
            {"sampler": HERSampler(), "transform": GoalRelabel(reward_fn, info_keys=["force"])},
        ],
        ids=["goals that nobody writes", "no goals", "folded first", "other goals", "no such info"],
    )
    def test_parts_that_do_not_fit_together(self, parts):
        storage = assemble(20, **parts)
        Lanes(20).write(storage, [ends([6, 6])])
        with pytest.raises((KeyError, RuntimeError, ValueError)):
            storage.sample(8)


class TestAudit:
    def audited(self, function):
        relabel = GoalRelabel(function, info_keys=["effort"])
        storage, lanes = assemble(20, transform=relabel, sampler=HERSampler()), Lanes(20)
        lanes.write(storage, [ends([6, 6, 6], 2)])
        return relabel.audit(storage), lanes

    def test_a_function_that_agrees(self):
        audit, _ = self.audited(reward_fn)
        assert audit.passed
        assert audit.num_rows == 20

    def test_a_function_that_differs_says_where(self):
        def wrong(achieved, desired, infos):
            more = 3 * (achieved[..., 0] == 9) - 100 * (achieved[..., 0] == 12)
            return reward_fn(achieved, desired, infos) + more

        audit, _ = self.audited(wrong)
        assert not audit.passed
        assert sorted((audit.computed - audit.stored).tolist()) == [-100.0, 3.0]
        # The worst first.
        differences = [float(number) for number in re.findall(r"computed (-?[\d.]+)", str(audit))]
        assert differences[0] < 0 < differences[1]


class TestGymReward:
    ACHIEVED = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    DESIRED = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])

    @pytest.mark.parametrize("of", [gymnasium.make, GymEnv], ids=["gymnasium", "TorchRL"])
    def test_rewards_are_the_environments(self, of):
        more = {"categorical_action_encoding": True} if of is GymEnv else {}
        env = of("BitFlipping-v0", n_bits=2, **more)
        assert library.gym_reward(env)(self.ACHIEVED, self.DESIRED, {}).tolist() == [0, -1, 0]
        storage = make_for(env, "hindsight", reward_fn=library.gym_reward(env))
        assert storage.num_goals == 4

    def test_infos_arrive_as_arrays(self):
        class Env:
            def compute_reward(self, achieved_goal, desired_goal, info):
                assert isinstance(info["weight"], np.ndarray)
                return info["weight"] * (achieved_goal == desired_goal).all(-1)

        weight = torch.tensor([2.0, 3.0, 4.0])
        reward = library.gym_reward(Env())(self.ACHIEVED, self.DESIRED, {"weight": weight})
        assert reward.tolist() == [2.0, 0.0, 4.0]

    def test_an_environment_without_goals_or_several_at_once(self):
        several = SerialEnv(2, lambda: GymEnv("BitFlipping-v0", n_bits=2))
        for env in (gymnasium.make("CartPole-v1"), several):
            with pytest.raises(TypeError):
                library.gym_reward(env)


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

    def test_rows_that_are_live_are_drawn(self, place):
        storage, lanes = assemble(24, 2, place=place, sampler=self.Drawing()), Lanes(24, 2)
        index = lanes.write(storage, [ends([4], 3)] * 2)
        storage.sampler.index = index.flatten()[[3, 1, 1]]
        assert lanes.of(storage.sample(3)) == [lanes.lanes[0][at] for at in (3, 1, 1)]

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param(10**9, id="beyond"),
            *(
                pytest.param(
                    *wrong,
                    marks=pytest.mark.xfail(reason="it is not checked", strict=True),
                    id=name,
                )
                for name, wrong in {"negative": [-1], "free": [None]}.items()
            ),
        ],
    )
    def test_others_raise(self, place, wrong):
        storage, lanes = assemble(24, 2, place=place, sampler=self.Drawing()), Lanes(24, 2)
        index = lanes.write(storage, [ends([4], 3)] * 2).flatten()
        if wrong is None:
            wrong = next(slot for slot in range(24) if slot not in index.tolist())
        storage.sampler.index = torch.cat([index[:2], torch.tensor([wrong])])
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            storage.sample(3)
        storage.sampler.index = index[:3]
        assert len(storage.sample(3)) == 3
