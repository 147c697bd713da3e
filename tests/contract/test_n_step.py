"""n-step returns, alone and with hindsight, against a plain loop over the rows of an episode."""

import math

import pytest
import torch
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import PLACES, assemble, library, make
from contract.model import assert_folded
from contract.steps import Player, assert_same, ids_of, reward_fn, rows, terminated_fn
from tensordict import TensorDict

GoalRelabel, HERSampler, NStep = library.GoalRelabel, library.HERSampler, library.NStep

each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


@pytest.mark.requirement("n-step")
class TestAlone:
    @each_history
    @pytest.mark.parametrize("n_step", [1, 2, 3, 40])
    @pytest.mark.parametrize("place", PLACES)
    def test_equals_a_plain_loop(self, history, n_step, place):
        storage = assemble(history.size, history.lanes, place=place, transform=NStep(n_step, 0.9))
        lanes = history.write(storage)
        assert_folded(storage.sample(50), lanes, n_step, 0.9)

    def test_by_hand(self):
        """Rewards 1, 2, 4, 8 of one episode, at discount 1/2."""
        storage, lanes = assemble(8, transform=NStep(3, 0.5)), Lanes(8)
        reward = torch.tensor([[[1.0], [2.0], [4.0], [8.0]]])
        lanes.write(storage, [ends([4])], change=lambda data: data.set(("next", "reward"), reward))
        batch, first = storage.sample(100), lanes.lanes[0][0].id
        keys = [("next", "reward"), ("next", "done"), "steps_to_next_obs"]
        found = {
            step.id - first: (
                *(batch[key][i].item() for key in keys),
                int(batch["next", "observation"][i, 0]) - first,
            )
            for i, step in enumerate(lanes.of(batch))
        }
        assert found == {
            0: (3.0, False, 3, 3),
            1: (6.0, True, 3, 4),
            2: (8.0, True, 2, 4),
            3: (8.0, True, 1, 4),
        }


@pytest.mark.requirement("her-n-step")
class TestHindsight:
    def test_by_hand(self):
        """Six steps along a line to the goal of all: 0 is paid there, and -1 before."""
        relabel = GoalRelabel(
            lambda achieved, desired, _: -(achieved != desired).any(-1).float(),
            terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1),
        )
        sampler = HERSampler("final", float("inf"))
        storage = assemble(20, sampler=sampler, transform=[relabel, NStep(3, 0.5)])
        lanes = Lanes(20)
        lanes.write(storage, [ends([6])])
        batch = storage.sample(100)
        expected = [
            *[(-1.75, 3, False)] * 3,
            (-1.5, 3, True),  # -1 - 1/2 + 0
            (-1.0, 2, True),
            (0.0, 1, True),
        ]
        keys = [("next", "reward"), "steps_to_next_obs", ("next", "terminated")]
        for i, step in enumerate(lanes.of(batch)):
            found = tuple(batch[key][i].item() for key in keys)
            assert found == expected[lanes.lanes[0].index(step)]


@pytest.mark.requirement("hpne")
@pytest.mark.parametrize("name", ["filling", "wrapped", "step by step", "longer than the storage"])
def test_hindsight_priorities_recency_and_n_steps_at_once(name):
    history = HISTORIES[name]
    per = library.PERSampler(history.size, alpha=0.5, beta=1.0, eps=1e-9)
    recency = library.ERESampler(0.9, c_min=6, base=per)
    relabel = GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=["effort"])
    storage = assemble(
        history.size,
        history.lanes,
        sampler=HERSampler({"future": 0.5, "final": 0.5}, 4, base=recency),
        transform=[relabel, NStep(3, 0.9)],
    )
    lanes = history.write(storage)
    raw = dict.fromkeys(lanes.live(), 1.0)
    for _ in range(4):
        recency.begin_phase(1)
        batch = storage.sample(50)
        steps = lanes.of(batch)
        assert set(steps) <= set(lanes.newest(6))
        assert int(batch["her_mask"].sum()) == 40
        assert_folded(batch, lanes, 3, 0.9, terminated_fn)
        drawn = torch.tensor([raw[step] for step in steps])
        torch.testing.assert_close(batch["priority_weight"], (drawn.min() / drawn).sqrt())
        priority = torch.tensor([1.0 + step.id % 4 for step in steps])
        storage.update_tensordict_priority(batch, priority)
        raw |= zip(steps, priority.tolist(), strict=True)


# Numerics


def rewarded(reward, done, **options):
    """A storage of one lane with these rewards [N], and the index of each row."""
    storage, lanes = assemble(len(reward), **options), Lanes(len(reward))
    block = reward.reshape(1, -1, 1)
    lanes.write(storage, [done], change=lambda data: data.set(("next", "reward"), block))
    return storage, lanes


def summed(reward, n_step, discount, done):
    """The n-step return of each row as plain numbers."""
    out = []
    for first in range(len(reward)):
        total = 0.0
        for i, number in enumerate(reward[first : first + n_step].tolist()):
            total += discount**i * float(number)
            if done[first + i]:
                break
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.requirement("numerics")
class TestNumerics:
    DONE = ends([7], 5)

    def folded(self, reward, n_step, discount):
        storage, lanes = rewarded(reward, self.DONE, transform=NStep(n_step, discount))
        batch = storage.sample(400)
        drawn = lanes.of(batch)
        return batch["next", "reward"][[drawn.index(step) for step in lanes.live()]].squeeze(-1)

    @pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS], ids=str)
    @pytest.mark.parametrize(("n_step", "discount"), [(3, 0.9), (200, 0.5), (4, 0.0)])
    def test_every_dtype(self, dtype, n_step, discount):
        """Floating rewards keep theirs; sums of wide integers need float64, of others float32."""
        number = torch.arange(12)
        reward = number % 3 == 1 if dtype is torch.bool else (number % 100 + 1).to(dtype)
        found = self.folded(reward, n_step, discount)
        wide = torch.float64 if dtype.itemsize > 2 else torch.float32
        assert found.dtype is (dtype if dtype.is_floating_point else wide)
        exact = summed(reward, n_step, discount, self.DONE).to(found.dtype)
        # Rounded once: exact but for the order of sums.
        rtol = 1e-6 if found.dtype.itemsize > 2 else 0
        torch.testing.assert_close(found, exact, rtol=rtol, atol=0)

    def test_the_default_dtype_of_the_moment(self):
        found = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                found.append(self.folded(torch.ones(12, dtype=torch.int8), 3, 0.9).dtype)
            finally:
                torch.set_default_dtype(torch.float32)
        assert found == [torch.float32, torch.float64]

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_what_lies_outside_of_a_window_takes_no_part(self, dtype, bad):
        reward = torch.ones(12, dtype=dtype)
        reward[[7, 11]] = bad
        found = self.folded(reward, 3, 0.5)
        exact = summed(reward, 3, 0.5, self.DONE).to(dtype)
        torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
        assert found.isfinite().tolist() == [True] * 7 + [False, True, False, False, False]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, *FLOATS], ids=str)
    def test_relabelled_rewards_keep_a_floating_dtype_or_hold_both(self, dtype):
        relabel = GoalRelabel(lambda achieved, desired, _: torch.full((len(achieved),), -0.5))
        sampler = HERSampler("final", 1)
        storage, _ = rewarded(
            torch.ones(12).to(dtype), self.DONE, sampler=sampler, transform=[relabel]
        )
        batch = storage.sample(40)
        mask = batch["her_mask"]
        if dtype.is_floating_point:
            assert batch["next", "reward"].dtype is dtype
        assert (batch["next", "reward"][mask] == -0.5).all()
        assert (batch["next", "reward"][~mask] == 1).all()


@pytest.mark.requirement("n-step")
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("relabels", [False, True])
def test_several_rewards_are_folded_over_one_window(place, n_step, relabels):
    costs = {}

    def with_costs(data):
        data["next", "cost"] = data["action"][..., 0] % 7  # [1, T]
        costs.update(zip(ids_of(data)[0].tolist(), data["next", "cost"][0].tolist(), strict=True))
        return data

    fold = NStep(n_step, 0.5, reward_key=[("next", "reward"), ("next", "cost")])
    relabel = GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=["effort"])
    parts = {"sampler": HERSampler(), "transform": [relabel, fold]}
    parts = parts if relabels else {"transform": fold}
    storage, lanes = assemble(40, place=place, **parts), Lanes(40)
    lanes.write(storage, [ends([5, 9], 6)], change=with_costs)
    batch = storage.sample(40)
    counts = (
        batch.get("steps_to_next_obs", torch.ones(len(batch), dtype=torch.int64)).flatten().tolist()
    )
    assert max(counts) == n_step
    expected = [
        sum(0.5**at * costs[number + at] for at in range(count))
        for number, count in zip(ids_of(batch).tolist(), counts, strict=True)
    ]
    torch.testing.assert_close(batch["next", "cost"], torch.tensor(expected))
    ends_of = terminated_fn if relabels else None
    assert_folded(batch, lanes, n_step, 0.5, ends_of)


def test_presets_fold_several_rewards_and_keep_them_in_a_state(place):
    keys = [("next", "reward"), ("next", "effort")]
    storage = make("all", place=place, reward_key=keys)
    storage.extend(rows(Player().play([6])))
    batch = storage.sample(20)
    assert (batch["next", "effort"] > storage[batch["index"]]["next", "effort"]).any()
    other = make("all", place=place, reward_key=keys)
    other.load_state_dict(storage.state_dict())
    assert_same(other.sample(20), storage.sample(20))


@pytest.mark.parametrize("reward_key", [[], ["reward"], [("next", "reward")] * 2, [5], 5])
def test_reward_keys_that_are_no_different_keys_under_next_raise(reward_key):
    with pytest.raises((TypeError, ValueError), match="reward_key"):
        NStep(reward_key=reward_key)


@pytest.mark.requirement("many-agents")
@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_each_agents_rewards_are_folded_with_the_roots_done(n_step):
    key, length, num_agents = ("next", "agents", "reward"), 30, 3
    random = torch.Generator().manual_seed(0)
    rewards = torch.rand(2, length, num_agents, 1, generator=random)
    seen = torch.rand(2, length + 1, num_agents, 4, generator=random)

    def with_agents(data):
        data["agents"] = TensorDict({"observation": seen[:, :-1]}, [2, length, num_agents])
        after = {"observation": seen[:, 1:], "reward": rewards}
        data["next", "agents"] = TensorDict(after, [2, length, num_agents])
        return data

    transform = NStep(n_step, 0.9, reward_key=key)
    storage, lanes = assemble(60, 2, transform=transform), Lanes(60, 2)
    lanes.write(storage, [ends([5, 9], 16), ends([11, 2, 7], 10)], change=with_agents)
    batch = storage.sample(40)
    assert batch[key].shape == (40, num_agents, 1)
    assert ("steps_to_next_obs" in batch) == (n_step > 1)
    assert batch["agents"].batch_size == (40, num_agents)
    assert batch["next", "agents"].batch_size == (40, num_agents)
    for i, step in enumerate(lanes.of(batch)):
        at = lanes.lanes[step.lane].index(step)
        window = lanes.onward(step)[:n_step]
        last = at + len(window) - 1
        total = sum(0.9**k * rewards[step.lane, at + k] for k in range(len(window)))
        torch.testing.assert_close(batch[key][i], total)
        assert torch.equal(batch["agents", "observation"][i], seen[step.lane, at])
        assert torch.equal(batch["next", "agents", "observation"][i], seen[step.lane, last + 1])
        if n_step > 1:
            assert (batch["steps_to_next_obs"][i] == len(window)).all()
