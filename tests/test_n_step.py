"""NStep: folded transitions against a plain loop, and the targets that TorchRL's losses make of them."""

from unittest import mock

import numpy as np
import pytest
import torch
from goal_data import HISTORIES, AsDrawn, achieved_goals, distance_reward, goal_transitions, write
from hypothesis import given
from hypothesis import strategies as st
from in_pairs import in_pairs
from n_step_oracle import assert_folded, fold
from oracles import RingOracle
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage
from torchrl.envs.transforms import Compose, RewardScaling

from trl_storages import (
    EpisodeWriter,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    ReplayStorage,
    ReplayTransform,
)
from trl_storages.sample_units import EpisodeSequence

STORAGES = [PackedStorage, LazyTensorStorage, LazyMemmapStorage]
each_storage = pytest.mark.parametrize("storage_type", STORAGES)
INFO_KEYS = ["effort", ("next", "observation")]


def make_buffer(
    transform, capacity=30, num_envs=1, storage_type=PackedStorage, on_gap="warn", **kwargs
):
    return ReplayStorage(
        storage=storage_type(capacity),
        writer=EpisodeWriter(num_envs, on_gap=on_gap),
        transform=transform,
        generator=torch.Generator().manual_seed(3),
        **kwargs,
    )


def filled(transform, name, **kwargs):
    """A buffer with one of the histories in it, and the model of what must be there."""
    history = HISTORIES[name]
    buffer = make_buffer(transform, history.capacity, history.num_envs, **kwargs)
    return buffer, history.write(buffer)


def onward(oracle, live, slot):
    """The row in a slot and those after it in its episode."""
    row = live[slot]
    return [other for other in oracle.episode(row) if other.step >= row.step]


def folds(oracle, batch, n_steps, gamma, **functions):
    """What the model says of each row of a batch, with the goal that it was given."""
    live, expected = oracle.live(), []
    goals = batch.get("goal_index", batch["index"]).tolist()
    relabelled = batch.get("her_mask", torch.zeros(len(goals), dtype=torch.bool)).tolist()
    for slot, goal, mask in zip(batch["index"].tolist(), goals, relabelled, strict=True):
        options = {"goal": achieved_goals([live[goal]])[0], **functions} if mask else {}
        expected.append(fold(onward(oracle, live, slot), n_steps, gamma, **options))
    return expected


def effort_reward(achieved_goal, desired_goal, transition):
    reward = distance_reward(achieved_goal, desired_goal, None)
    pushed = transition["effort"].squeeze(-1).float() - transition["next", "observation"][:, 0]
    return reward + pushed / 16


def reached(achieved_goal, desired_goal, transition):
    """At the goal itself, and at every fifth state besides."""
    at_goal = (achieved_goal == desired_goal).all(-1)
    return at_goal | (transition["next", "observation"][:, 0] % 5 == 0)


@pytest.mark.requirement("n-step")
class TestFold:
    @in_pairs(name=[*HISTORIES], storage_type=STORAGES, n_steps=[1, 2, 3, 5, 40])
    def test_equals_a_plain_loop(self, name, storage_type, n_steps):
        buffer, oracle = filled(NStep(n_steps, 0.9), name, storage_type=storage_type)
        batch = buffer.sample(64)
        assert_folded(batch, folds(oracle, batch, n_steps, 0.9))

    def test_by_hand(self):
        """Rewards 1, 2, 4, 8 of one episode, at discount 1/2, and the next state of the last row."""
        buffer = make_buffer(NStep(3, 0.5))
        steps = torch.arange(4)
        data = goal_transitions(torch.zeros(4).long(), steps, steps == 3)
        data["next", "reward"] = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
        buffer.extend(data)
        batch = buffer.sample(200)
        rows = {}
        for i, slot in enumerate(batch["index"].tolist()):
            rows[slot] = (
                batch["next", "reward"][i].item(),
                batch["next", "observation"][i, 0].item(),
                batch["next", "done"][i].item(),
                batch["steps_to_next_obs"][i].item(),
            )
        assert rows == {
            0: (3.0, 3.0, False, 3),
            1: (6.0, 4.0, True, 3),
            2: (8.0, 4.0, True, 2),
            3: (8.0, 4.0, True, 1),
        }

    def test_changed_between_samples(self):
        n_step = NStep(3, 0.9)
        buffer, oracle = filled(n_step, "wrapped")
        for n_steps, gamma in ((3, 0.9), (7, 0.9), (1, 0.9), (2, 1.0), (2, 0.0)):
            n_step.n_step, n_step.discount = n_steps, gamma
            batch = buffer.sample(50)
            assert_folded(batch, folds(oracle, batch, n_steps, gamma))

    def test_changed_while_a_batch_is_drawn(self):
        """As by another thread, in which another storage has the same transform."""
        n_step = NStep(8, 0.9)
        buffer, oracle = filled(n_step, "wrapped")
        ring = buffer.episodes.ring

        def windows(*args):
            n_step.n_step = 2
            return type(ring).windows(ring, *args)

        with mock.patch.object(ring, "windows", windows):
            batch = buffer.sample(50)
        assert n_step.n_step == 2
        assert_folded(batch, folds(oracle, batch, 8, 0.9))

    def test_a_cut_ends_the_window(self):
        """Rows of another trajectory follow without a done, as from a collector's other worker."""
        buffer, oracle = make_buffer(NStep(4, 0.9), capacity=14), RingOracle(14)
        done = [step in (3, 9) for step in range(18)]
        trajectory = torch.tensor([0] * 4 + [1] * 2 + [2] * 4 + [5] * 3 + [6] * 5)
        steps = torch.arange(18)
        data = goal_transitions(torch.zeros(18).long(), steps, torch.tensor(done))
        data["collector", "traj_ids"] = trajectory
        cut = [False, *(trajectory[1:] != trajectory[:-1]).tolist()]
        for start in range(0, 18, 6):
            buffer.extend(data[start : start + 6])
            block = slice(start, start + 6)
            oracle.append([done[block]], [cut[block]])
            batch = buffer.sample(60)
            assert_folded(batch, folds(oracle, batch, 4, 0.9))

    def test_the_newest_row_ends_the_window(self):
        """An episode that grows row by row: all of it is seen at once, nothing is held back."""
        buffer, oracle = make_buffer(NStep(3, 0.9), capacity=8), RingOracle(8)
        for _ in range(20):
            write(buffer, oracle, [[False]])
            batch = buffer.sample(60)
            assert set(batch["index"].tolist()) == set(oracle.live())
            assert_folded(batch, folds(oracle, batch, 3, 0.9))

    def test_the_storage_and_the_root_stay(self):
        buffer, oracle = filled(NStep(4, 0.9), "lanes")
        slots = torch.tensor(list(oracle.live()))
        before = buffer.storage.get(slots).clone()
        for _ in range(50):
            batch = buffer.sample(32)
            for leaf in batch.values(True, True):
                leaf.zero_()
        after = buffer.storage.get(slots)
        for key in before.keys(True, True):
            assert torch.equal(before[key], after[key])

    def test_sequences_are_folded_row_by_row(self):
        unit = EpisodeSequence(4, burn_in=2)
        buffer, oracle = filled(NStep(3, 0.9), "lanes", sample_unit=unit)
        batch = buffer.sample(10)
        assert batch.shape == (60,)
        assert_folded(batch, folds(oracle, batch, 3, 0.9))

    def test_rewards_in_double_precision(self):
        buffer, steps = make_buffer(NStep(5, 0.99)), torch.arange(20)
        data = goal_transitions(torch.zeros(20).long(), steps, steps < 0)
        data["next", "reward"] = torch.rand(20, 1, dtype=torch.float64) * 1e9
        buffer.extend(data)
        batch = buffer.sample(30)
        for slot, reward in zip(
            batch["index"].tolist(), batch["next", "reward"].tolist(), strict=True
        ):
            window = data["next", "reward"][slot : slot + 5, 0].tolist()
            assert reward == pytest.approx([sum(0.99**i * r for i, r in enumerate(window))], 1e-14)

    def test_further_entries_under_next_and_other_names(self):
        names = {
            "reward_key": ("next", "scores", "mine"),
            "terminated_key": ("next", "dead"),
            "steps_to_next_obs_key": ("info", "steps"),
        }
        buffer, steps = make_buffer(NStep(3, 0.5, **names), on_gap="ignore"), torch.arange(6)
        next_entries = {
            "scores": {"mine": steps.float().unsqueeze(-1), "theirs": steps.unsqueeze(-1)},
            "image": steps.to(torch.uint8).view(6, 1, 1).expand(6, 2, 2).clone(),
            "done": (steps == 4).unsqueeze(-1),
            "dead": (steps == 4).unsqueeze(-1),
            "clock": steps,
        }
        buffer.extend(TensorDict({"image": next_entries["image"] + 9, "next": next_entries}, [6]))
        batch = buffer.sample(50)
        slot = batch["index"]
        length = torch.where(slot == 5, 1, (5 - slot).clamp(max=3))
        last = slot + length - 1
        assert torch.equal(batch["info", "steps"], length.unsqueeze(-1))
        for key in (("scores", "theirs"), "image", "done", "dead", "clock"):
            assert torch.equal(batch["next"][key], TensorDict(next_entries, [6])[key][last])
        assert torch.equal(batch["image"], next_entries["image"][slot] + 9)
        expected = [
            sum(0.5**i * (s + i) for i in range(m))
            for s, m in zip(slot.tolist(), length.tolist(), strict=True)
        ]
        assert batch["next", "scores", "mine"].squeeze(-1).tolist() == expected

    @each_storage
    def test_one_further_row_of_observations_is_read(self, storage_type, monkeypatch):
        """Of the rows in between only the rewards, however long the window."""
        from trl_storages.rows import fields, row_view

        buffer, _ = filled(NStep(10, 0.9), "wrapped", storage_type=storage_type)
        reads, read_fields = [], fields.read_fields
        name = "gather" if storage_type is PackedStorage else "get"
        gathers, gather = [], getattr(storage_type, name)

        def spy(storage, slots, wanted, device):
            reads.append(([*wanted], tuple(slots.shape)))
            return read_fields(storage, slots, wanted, device)

        def gather_and_note(storage, *slots):
            gathers.extend(tuple(each.shape) for each in slots[:2])
            return gather(storage, *slots)

        for module in (fields, row_view):
            monkeypatch.setattr(module, "read_fields", spy)
        monkeypatch.setattr(storage_type, name, gather_and_note)
        buffer.sample(16)
        assert reads == [([("next", "reward")], (10, 16))]
        # The sampled rows, and the last of each window.
        assert gathers == [(16,), (16,)]


flags = st.sampled_from([False, False, False, True])


@st.composite
def writes(draw):
    """Capacity, lanes, and blocks of (done, cut, lanes)."""
    num_envs = draw(st.integers(1, 3))
    capacity = num_envs * draw(st.integers(1, 9)) + draw(st.integers(0, num_envs - 1))
    blocks = []
    for _ in range(draw(st.integers(1, 5))):
        lanes = draw(
            st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
        )
        size = draw(st.integers(1, 12))
        rows = st.lists(
            st.lists(flags, min_size=size, max_size=size),
            min_size=len(lanes),
            max_size=len(lanes),
        )
        blocks.append((draw(rows), draw(rows), lanes))
    return capacity, num_envs, blocks


def write_with_cuts(buffer, oracle, done, cut, lanes, trajectories):
    """Writes a block in which some rows begin another trajectory; `trajectories` counts them."""
    steps = torch.tensor(
        [[len(oracle.lanes[lane]) + s for s in range(len(done[0]))] for lane in lanes]
    )
    lane_column = torch.tensor(lanes).unsqueeze(1).expand_as(steps)
    data = goal_transitions(lane_column, steps, torch.tensor(done))
    numbers = torch.empty_like(steps)
    for i, lane in enumerate(lanes):
        for s in range(len(done[i])):
            trajectories[lane] += cut[i][s]
            numbers[i, s] = trajectories[lane]
    data["collector", "traj_ids"] = numbers
    oracle.append(done, cut, lanes)
    buffer.writer.extend(data, lanes=lanes)


@pytest.mark.requirement("n-step")
@pytest.mark.requirement("her-n-step")
@given(
    written=writes(),
    n_steps=st.integers(1, 6),
    gamma=st.floats(0, 1),
    strategy=st.sampled_from(["future", "final", "episode", "random"]),
    ends=st.booleans(),
)
def test_any_writes_at_all(written, n_steps, gamma, strategy, ends):
    capacity, num_envs, blocks = written
    functions = {"reward_fn": effort_reward, "terminated_fn": reached if ends else None}
    relabel = GoalRelabel(**functions, info_keys=INFO_KEYS)
    buffer = make_buffer(
        Compose(relabel, NStep(n_steps, gamma)), capacity, num_envs, sampler=HERSampler(strategy)
    )
    oracle, trajectories = RingOracle(capacity, num_envs), [0] * num_envs
    for done, cut, lanes in blocks:
        write_with_cuts(buffer, oracle, done, cut, lanes, trajectories)
        batch = buffer.sample(12)
        expected = folds(oracle, batch, n_steps, gamma, **functions, info_keys=INFO_KEYS)
        assert_folded(batch.exclude("collector"), expected)


@pytest.mark.requirement("her-n-step")
class TestHindsight:
    @in_pairs(name=[*HISTORIES], storage_type=STORAGES, ends=[False, True])
    def test_one_goal_for_the_window(self, name, storage_type, ends):
        functions = {"reward_fn": effort_reward, "terminated_fn": reached if ends else None}
        transform = Compose(
            GoalRelabel(**functions, info_keys=INFO_KEYS),
            NStep(4, 0.9),
        )
        sampler = HERSampler("future", 2)
        buffer, oracle = filled(transform, name, storage_type=storage_type, sampler=sampler)
        batch = buffer.sample(60)
        assert batch["her_mask"].sum() == 40
        assert_folded(batch, folds(oracle, batch, 4, 0.9, **functions, info_keys=INFO_KEYS))

    def test_by_hand(self):
        """Six steps along a line; the goal of each is the last state, 0 is paid there and -1 before."""
        position = torch.arange(7.0).unsqueeze(-1)
        done = torch.arange(6).unsqueeze(-1) == 5
        data = TensorDict(
            {
                "achieved_goal": position[:-1],
                "desired_goal": torch.full((6, 1), 99.0),
                "next": {
                    "achieved_goal": position[1:],
                    "desired_goal": torch.full((6, 1), 99.0),
                    "reward": torch.full((6, 1), -1.0),
                    "done": done,
                    "terminated": torch.zeros(6, 1, dtype=torch.bool),
                    "truncated": done,
                },
            },
            [6],
        )
        relabel = GoalRelabel(
            lambda achieved, desired, _: -(achieved != desired).any(-1).float(),
            terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1),
        )
        transform = Compose(relabel, NStep(3, 0.5))
        buffer = make_buffer(transform, sampler=HERSampler("final", float("inf")))
        buffer.extend(data)
        batch = buffer.sample(100)
        # -1 - 1/2 - 1/4 before the goal is in reach; -1 - 1/2 + 0 where the third step reaches it.
        expected = {
            0: (-1.75, 3.0, 3, False),
            1: (-1.75, 4.0, 3, False),
            2: (-1.75, 5.0, 3, False),
            3: (-1.5, 6.0, 3, True),
            4: (-1.0, 6.0, 2, True),
            5: (0.0, 6.0, 1, True),
        }
        for i, slot in enumerate(batch["index"].tolist()):
            row = batch[i]["next"]
            got = (row["reward"], row["achieved_goal"], batch["steps_to_next_obs"][i])
            assert tuple(value.item() for value in got) == expected[slot][:3]
            assert row["terminated"].item() == row["done"].item() == expected[slot][3]
            assert row["desired_goal"].item() == batch["desired_goal"][i].item() == 6.0

    def test_the_window_ends_where_the_goal_is_reached(self):
        """Not where the stored episode had ended, if that was elsewhere."""
        relabel = GoalRelabel(
            distance_reward,
            terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1),
        )
        sampler = HERSampler("future", float("inf"))
        buffer, oracle = filled(Compose(relabel, NStep(3, 0.9)), "wrapped", sampler=sampler)
        live, batch = oracle.live(), buffer.sample(300)
        ended, went_on = 0, 0
        for i, slot in enumerate(batch["index"].tolist()):
            to_goal = live[batch["goal_index"][i].item()].step - live[slot].step + 1
            available = len(onward(oracle, live, slot))
            assert batch["steps_to_next_obs"][i].item() == min(3, to_goal, available)
            assert batch["next", "terminated"][i].item() == (to_goal <= 3)
            ended += to_goal < min(3, available)
            went_on += to_goal > 3
        assert ended > 20
        assert went_on > 20

    def test_both_agree_for_one_step(self):
        relabel = GoalRelabel(effort_reward, terminated_fn=reached, info_keys=INFO_KEYS)
        batches = []
        for transform in (relabel, Compose(relabel, NStep(1, 0.9))):
            buffer, _ = filled(transform, "lanes", sampler=HERSampler())
            batches.append(buffer.sample(40))
        one, other = batches
        assert (other["steps_to_next_obs"] == 1).all()
        for key in one.keys(True, True):
            assert torch.equal(one[key], other[key])

    def test_sequences_have_one_goal_each(self):
        unit = EpisodeSequence(3)
        transform = Compose(GoalRelabel(distance_reward), NStep(3, 0.9))
        buffer, oracle = filled(transform, "wrapped", sampler=HERSampler(), sample_unit=unit)
        batch = buffer.sample(10)
        assert_folded(batch, folds(oracle, batch, 3, 0.9, reward_fn=distance_reward))
        goals = batch["goal_index"].view(10, 3)
        assert (goals[batch["her_mask"].view(10, 3)[:, 0]].diff() == 0).all()

    def test_rows_without_a_next_desired_goal(self):
        transform = Compose(GoalRelabel(distance_reward), NStep(3, 0.9))
        buffer, steps = make_buffer(transform, sampler=HERSampler()), torch.arange(12)
        data = goal_transitions(torch.zeros(12).long(), steps, steps % 6 == 5)
        buffer.extend(data.exclude(("next", "desired_goal")))
        batch = buffer.sample(20)
        assert torch.equal(batch["next", "desired_goal"], batch["desired_goal"])
        last = batch["index"] + batch["steps_to_next_obs"].squeeze(-1) - 1
        assert torch.equal(batch["next", "observation"], data["next", "observation"][last])

    def test_user_functions_see_flat_batches(self):
        shapes = []

        def reward_fn(achieved_goal, desired_goal, transition):
            shapes.append((achieved_goal.shape, desired_goal.shape, transition["effort"].shape))
            return distance_reward(achieved_goal, desired_goal, None)

        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        buffer, _ = filled(Compose(relabel, NStep(4, 0.9)), "lanes", sampler=HERSampler())
        buffer.sample(10)
        # Ten windows of four rows, all judged at once.
        assert shapes == [((40, 3), (40, 3), (40, 1))]


class TestWhatIsWorkedOut:
    """What lies under `next` of the sampled rows is left alone, if nobody sees it."""

    @pytest.mark.parametrize("ends", [None, reached])
    @pytest.mark.parametrize("with_goals", [False, True])
    @pytest.mark.parametrize("unit", [None, EpisodeSequence(3, burn_in=1)])
    def test_collating_makes_no_difference(self, ends, with_goals, unit):
        batches = []
        for collate in (None, lambda batch: batch.clone()):
            transform = NStep(3, discount=0.5)
            if with_goals:
                relabel = GoalRelabel(effort_reward, terminated_fn=ends, info_keys=INFO_KEYS)
                transform = Compose(relabel, transform)
            sampler = HERSampler() if with_goals else None
            options = {"sampler": sampler, "sample_unit": unit, "collate_fn": collate}
            buffer, _ = filled(transform, "wrapped", **options)
            batches.append(buffer.sample(40))
        assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
        assert (batches[0] == batches[1]).all()

    @pytest.mark.parametrize(
        "transform",
        [
            Compose(NStep(1), AsDrawn()),
            Compose(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]), AsDrawn()),
            Compose(
                GoalRelabel(distance_reward), RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])
            ),
            Compose(GoalRelabel(distance_reward), NStep(1)),
            Compose(GoalRelabel(distance_reward)),
        ],
        ids=str,
    )
    def test_whoever_looks_finds_it(self, transform):
        buffer, _ = filled(transform, "wrapped", sampler=HERSampler())
        assert "reward" in buffer.sample(8)["next"]

    @pytest.mark.parametrize(("key", "sizes"), [(("next", "reward"), [40]), ("score", [40, 8])])
    def test_a_reward_at_the_root_is_worked_out_for_the_sampled_rows(self, key, sizes):
        asked = []

        def reward_fn(achieved_goal, desired_goal, transition):
            asked.append(len(achieved_goal))
            return distance_reward(achieved_goal, desired_goal, None)

        storage = ReplayStorage(
            storage=PackedStorage(20),
            sampler=HERSampler(),
            transform=Compose(GoalRelabel(reward_fn, reward_key=key), NStep(5)),
        )
        steps = torch.arange(10)
        rows = goal_transitions(torch.zeros_like(steps), steps, steps == 9)
        storage.extend(rows.set("score", rows["next", "reward"].clone()))
        storage.sample(8)
        assert asked == (sizes if key != "score" else sizes[1:])


class Clip(ReplayTransform):
    """Shows rewards between -bound and bound, those of further rows too."""

    def __init__(self, bound):
        super().__init__()
        self.bound, self.seen = bound, []

    def replay(self, rows):
        self.seen.append(rows["next", "reward"])
        rows.define([("next", "reward")], self.clip)

    def clip(self, rows, key):
        return {("next", "reward"): rows["next", "reward"].clamp(-self.bound, self.bound)}


class TestTransformsOfOnesOwn:
    def test_further_rows_are_seen_through_it(self):
        buffer, oracle = filled(Compose(Clip(0.0), NStep(4, 0.9)), "wrapped")
        batch = buffer.sample(40)
        assert (batch["next", "reward"] == 0).all()
        expected = folds(oracle, batch, 4, 0.9)
        for transition, _ in expected:
            transition["next", "reward"] = torch.zeros(1)
        assert_folded(batch, expected)

    def test_each_sees_what_those_before_it_did(self):
        """The clipping gets the rewards for the new goals, though folding would overwrite them."""
        clip = Clip(1e9)
        relabel = GoalRelabel(distance_reward)
        transform = Compose(relabel, Compose(clip, NStep(3, 0.9)))
        buffer, oracle = filled(transform, "lanes", sampler=HERSampler())
        batch = buffer.sample(30)
        assert_folded(batch, folds(oracle, batch, 3, 0.9, reward_fn=distance_reward))
        live = oracle.live()
        for i in batch["her_mask"].nonzero().squeeze(1).tolist():
            row, goal = live[batch["index"][i].item()], live[batch["goal_index"][i].item()]
            reward = distance_reward(achieved_goals([row]), achieved_goals([goal]), None)
            assert torch.equal(clip.seen[0][i], reward)


class TestErrors:
    @pytest.mark.parametrize("n_steps", [0, -1, 1.5, "3", None, True])
    def test_n_steps_out_of_range(self, n_steps):
        with pytest.raises((TypeError, ValueError), match=r"n_step must be .* at least 1, got"):
            NStep(n_steps)

    @pytest.mark.parametrize("name", ["reward_key", "terminated_key"])
    def test_keys_that_are_not_under_next(self, name):
        with pytest.raises(ValueError, match=f"{name} must lie under 'next', got 'score'"):
            NStep(**{name: "score"})

    @pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
    def test_gamma_out_of_range(self, gamma):
        with pytest.raises(ValueError, match=r"discount must be in \[0, 1\], got"):
            NStep(3, gamma)

    @pytest.mark.requirement("live-parameters")
    def test_live_attributes_are_checked_and_kept(self):
        n_step = NStep(3, 0.9)
        with pytest.raises(ValueError, match="-2"):
            n_step.n_step = -2
        with pytest.raises(ValueError, match="7"):
            n_step.discount = 7
        assert (n_step.n_step, n_step.discount) == (3, 0.9)
        n_step.n_step = np.int64(4)  # as schedulers set it
        assert type(n_step.n_step) is int
        n_step.n_step = 3
        assert repr(n_step) == "NStep(n_step=3, discount=0.9)"

    def test_no_reward(self):
        buffer, steps = make_buffer(NStep()), torch.arange(5)
        buffer.extend(goal_transitions(0 * steps, steps, steps == 4).exclude(("next", "reward")))
        with pytest.raises(KeyError, match=r"reward[\s\S]*observation"):
            buffer.sample(4)

    def test_a_reward_without_a_dimension_of_its_own(self):
        buffer, steps = make_buffer(NStep()), torch.arange(5)
        data = goal_transitions(0 * steps, steps, steps == 4)
        data["next", "reward"] = torch.zeros(5)
        buffer.extend(data)
        with pytest.raises(ValueError, match=r"such as \[4, 1\], got \[4\]: store reward.unsq"):
            buffer.sample(4)

    def test_rows_that_were_folded_before_they_were_written(self):
        buffer, steps = make_buffer(NStep()), torch.arange(5)
        data = goal_transitions(0 * steps, steps, steps == 4)
        data["steps_to_next_obs"] = torch.full((5, 1), 3)
        buffer.extend(data)
        with pytest.raises(ValueError, match="store single steps"):
            buffer.sample(4)

    def test_before_the_relabelling(self):
        transform = Compose(NStep(3, 0.9), GoalRelabel(distance_reward))
        buffer, _ = filled(transform, "lanes", sampler=HERSampler())
        with pytest.raises(RuntimeError, match=r"Compose\(GoalRelabel\(...\), NStep\(...\)\)"):
            buffer.sample(8)

    def test_behind_a_transform_of_the_sampled_rows_only(self):
        scaling = RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])
        buffer, _ = filled(Compose(scaling, NStep(3, 0.9)), "lanes")
        with pytest.raises(RuntimeError, match="RewardScaling has changed the sampled rows"):
            buffer.sample(8)
        buffer, oracle = filled(Compose(NStep(3, 0.9), scaling), "lanes")
        batch = buffer.sample(8)
        batch["next", "reward"] /= 2
        assert_folded(batch, folds(oracle, batch, 3, 0.9))

    def test_without_the_episode_writer(self):
        from torchrl.data import RoundRobinWriter

        buffer = ReplayStorage(
            storage=PackedStorage(8), writer=RoundRobinWriter(), transform=NStep()
        )
        steps = torch.arange(5)
        buffer.extend(goal_transitions(steps, steps, steps == 4))
        with pytest.raises(RuntimeError, match="EpisodeWriter"):
            buffer.sample(4)

    def test_outside_of_a_replay_storage(self):
        with pytest.raises(RuntimeError, match="ReplayStorage"):
            NStep()(goal_transitions(*[torch.zeros(1).long()] * 2, torch.zeros(1).bool()))
