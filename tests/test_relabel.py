"""GoalRelabel: what a relabelled row looks like, and what stays untouched."""

import pytest
import torch
from goal_data import HISTORIES, achieved_goals, distance_reward, goal_transitions, write
from oracles import RingOracle
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import HERSampler
from trl_storages.transforms import GoalRelabel
from trl_storages.writing import EpisodeWriter

RELABELLED = [
    "desired_goal",
    ("next", "desired_goal"),
    ("next", "reward"),
]
FLAGS = [("next", "done"), ("next", "terminated"), ("next", "truncated")]


def make_buffer(relabel, capacity=20, num_envs=1, storage_type=PackedStorage, **kwargs):
    return ReplayStorage(
        storage=storage_type(capacity),
        writer=EpisodeWriter(num_envs),
        sampler=HERSampler(**kwargs),
        transform=relabel,
        generator=torch.Generator().manual_seed(7),
    )


def filled(relabel, name="lanes of unequal fill", **kwargs):
    """A buffer with one of the histories in it, and its live rows by slot."""
    history = HISTORIES[name]
    buffer = make_buffer(relabel, history.capacity, history.num_envs, **kwargs)
    return buffer, history.write(buffer).live()


def stored(batch, live):
    """The rows of the batch as they were written."""
    rows = [live[slot] for slot in batch["index"].tolist()]
    return goal_transitions(
        torch.tensor([row.lane for row in rows]),
        torch.tensor([row.step for row in rows]),
        torch.tensor([row.done for row in rows]),
    )


@pytest.mark.requirement("her-rewrite")
class TestRewrite:
    @pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage, LazyMemmapStorage])
    @pytest.mark.parametrize("name", HISTORIES)
    def test_rows_equal_a_plain_loop(self, name, storage_type):
        buffer, live = filled(GoalRelabel(distance_reward), name, storage_type=storage_type)
        batch = buffer.sample(64)
        expected = stored(batch, live)
        for i in range(64):
            if batch["her_mask"][i]:
                goal = achieved_goals([live[batch["goal_index"][i].item()]])[0]
                expected["desired_goal"][i] = goal
                expected["next", "desired_goal"][i] = goal
                achieved = expected["next", "achieved_goal"][i]
                expected["next", "reward"][i] = distance_reward(achieved, goal, None)
        for key in expected.keys(True, True):
            assert torch.equal(batch[key], expected[key])

    def test_rows_that_are_not_drawn_for_it_stay_as_stored(self):
        buffer, live = filled(GoalRelabel(lambda *_: torch.full((40,), 99.0)), num_goals=1)
        batch = buffer.sample(40)
        rest = ~batch["her_mask"]
        assert rest.sum() == 20
        expected = stored(batch, live)
        for key in expected.keys(True, True):
            assert torch.equal(batch[key][rest], expected[key][rest])
        assert (batch["next", "reward"][batch["her_mask"]] == 99).all()

    def test_no_goals_relabel_nothing(self):
        buffer, live = filled(GoalRelabel(distance_reward), num_goals=0)
        batch = buffer.sample(64)
        assert not batch["her_mask"].any()
        expected = stored(batch, live)
        for key in expected.keys(True, True):
            assert torch.equal(batch[key], expected[key])

    @pytest.mark.parametrize("form", ["(B,)", "(B, 1)", "bool", "numpy", "float64"])
    def test_forms_of_the_reward(self, form):
        def reward_fn(achieved_goal, desired_goal, transition):
            reward = (achieved_goal[..., 1] > desired_goal[..., 1]).float()
            return {
                "(B,)": reward,
                "(B, 1)": reward.unsqueeze(-1),
                "bool": reward.bool(),
                "numpy": reward.numpy(),
                "float64": reward.double(),
            }[form]

        buffer, _ = filled(GoalRelabel(reward_fn))
        batch = buffer.sample(50)
        reward, mask = batch["next", "reward"], batch["her_mask"]
        assert (reward.shape, reward.dtype) == ((50, 1), torch.float32)
        further = batch["next", "achieved_goal"][:, 1:2] > batch["desired_goal"][:, 1:2]
        assert torch.equal(reward[mask], further[mask].float())

    def test_the_function_gets_next_achieved_and_drawn_goals(self):
        calls = []

        def reward_fn(achieved_goal, desired_goal, transition):
            calls.append((achieved_goal.clone(), desired_goal.clone(), dict(transition)))
            return distance_reward(achieved_goal, desired_goal, transition)

        buffer, _ = filled(GoalRelabel(reward_fn))
        batch = buffer.sample(50)
        ((achieved, desired, transition),) = calls
        mask = batch["her_mask"]
        assert torch.equal(achieved, batch["next", "achieved_goal"])
        assert torch.equal(desired[mask], batch["desired_goal"][mask])
        assert transition == {}

    @pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage])
    def test_the_storage_is_bit_equal_after_many_samples(self, storage_type):
        def spoil(achieved_goal, desired_goal, transition):
            reward = distance_reward(achieved_goal, desired_goal, transition)
            for tensor in (achieved_goal, desired_goal, *transition.values()):
                tensor.fill_(-9)
            return reward

        relabel = GoalRelabel(
            spoil, terminated_fn=lambda a, *_: a[..., 0] < 9, info_keys=["effort"]
        )
        buffer, live = filled(relabel, storage_type=storage_type)
        slots = torch.tensor(list(live))
        before = buffer.storage.get(slots).clone()
        for _ in range(1000):
            batch = buffer.sample(16)
            for key in (*RELABELLED, *FLAGS):
                batch[key].zero_()
        after = buffer.storage.get(slots)
        for key in before.keys(True, True):
            assert torch.equal(before[key], after[key])

    def test_goals_of_other_names_and_shapes(self):
        names = {"achieved_goal_key": ("image", "now"), "desired_goal_key": ("image", "wanted")}

        def reward_fn(achieved_goal, desired_goal, transition):
            return (achieved_goal == desired_goal).float().mean((-2, -1))

        buffer = make_buffer(GoalRelabel(reward_fn, **names, reward_key=("next", "score")), 6)
        steps = torch.arange(6)
        data = goal_transitions(torch.zeros(6).long(), steps, steps == 5).exclude(
            "achieved_goal", "desired_goal", ("next", "achieved_goal"), ("next", "desired_goal")
        )
        data.rename_key_(("next", "reward"), ("next", "score"))
        for key, offset in (
            (("image", "now"), 0),
            (("next", "image", "now"), 10),
            (("image", "wanted"), 20),
            (("next", "image", "wanted"), 30),
        ):
            data[key] = (steps + offset).to(torch.uint8).view(6, 1, 1).expand(6, 2, 4).clone()
        buffer.extend(data)
        batch = buffer.sample(30)
        mask = batch["her_mask"]
        goal = batch["goal_index"][mask] + 10
        assert batch["image", "wanted"].dtype == torch.uint8
        for key in (("image", "wanted"), ("next", "image", "wanted")):
            assert torch.equal(batch[key][mask], data["next", "image", "now"][goal - 10])
        hits = (batch["index"][mask] == batch["goal_index"][mask]).float()
        assert torch.equal(batch["next", "score"][mask, 0], hits)


@pytest.mark.requirement("her-terminated")
class TestTerminated:
    def reached(self, achieved_goal, desired_goal, transition):
        return (achieved_goal == desired_goal).all(-1)

    def test_flags_stay_as_stored_without_the_function(self):
        buffer, live = filled(GoalRelabel(distance_reward), "wrapped")
        batch = buffer.sample(200)
        expected = stored(batch, live)
        for key in FLAGS:
            assert torch.equal(batch[key], expected[key])

    @pytest.mark.parametrize("column", [False, True], ids=["(B,)", "(B, 1)"])
    def test_flags_are_recomputed_with_it(self, column):
        def terminated_fn(*arguments):
            reached = self.reached(*arguments)
            return reached.unsqueeze(-1) if column else reached

        relabel = GoalRelabel(distance_reward, terminated_fn=terminated_fn)
        buffer, live = filled(relabel, "wrapped", strategy="episode")
        batch = buffer.sample(200)
        expected = stored(batch, live)
        for i in range(200):
            if batch["her_mask"][i]:
                terminated = batch["index"][i] == batch["goal_index"][i]
                expected["next", "terminated"][i] = terminated
                expected["next", "done"][i] = terminated | expected["next", "truncated"][i]
        for key in FLAGS:
            assert batch[key].dtype == torch.bool
            assert torch.equal(batch[key], expected[key])
        # The data has all of it: ends moved away, ends that came, time limits that stayed.
        flags = stored(batch, live)
        assert (flags["next", "terminated"] & ~batch["next", "terminated"]).any()
        assert (~flags["next", "terminated"] & batch["next", "terminated"]).any()
        assert (batch["next", "truncated"] & ~batch["next", "terminated"]).any()

    def test_the_episodes_stay_as_they_are(self):
        relabel = GoalRelabel(distance_reward, terminated_fn=self.reached)
        buffer, live = filled(relabel, "wrapped")
        slots = torch.tensor(list(live))
        before = buffer.episodes.ahead(slots), buffer.episodes.is_finished(slots)
        buffer.sample(200)
        assert torch.equal(buffer.episodes.ahead(slots), before[0])
        assert torch.equal(buffer.episodes.is_finished(slots), before[1])


@pytest.mark.requirement("her-info")
class TestInfo:
    @pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage])
    def test_named_fields_reach_the_functions_row_by_row(self, storage_type):
        seen = []

        def reward_fn(achieved_goal, desired_goal, transition):
            seen.append(dict(transition))
            return -transition["effort"]

        def terminated_fn(achieved_goal, desired_goal, transition):
            return transition["next", "observation"][..., 0] > 5

        info_keys = ["effort", "action", ("next", "observation")]
        relabel = GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=info_keys)
        buffer, live = filled(relabel, "lanes", storage_type=storage_type)
        batch = buffer.sample(60)
        expected = stored(batch, live)
        assert list(seen[0]) == info_keys
        mask = batch["her_mask"]
        for key in info_keys:
            assert torch.equal(seen[0][key], expected[key])
        effort = expected["effort"][mask].float()
        assert torch.equal(batch["next", "reward"][mask], -effort)
        late = expected["next", "observation"][:, :1] > 5
        assert torch.equal(batch["next", "terminated"][mask], late[mask])

    def test_a_missing_field_is_named(self):
        buffer, _ = filled(GoalRelabel(distance_reward, info_keys=["velocity"]))
        with pytest.raises(KeyError, match=r"velocity[\s\S]*effort"):
            buffer.sample(8)


class TestAudit:
    def test_a_function_that_agrees(self):
        relabel = GoalRelabel(distance_reward)
        buffer = self.with_equal_goals(relabel)
        for storage in (buffer, buffer.storage):
            audit = relabel.audit(storage)
            assert audit.passed
            assert audit.num_rows == 20
            assert "20" in str(audit)

    def test_a_function_that_differs_says_where(self):
        def reward_fn(achieved_goal, desired_goal, transition):
            reward = distance_reward(achieved_goal, desired_goal, transition)
            return torch.where(achieved_goal[..., 1] == 12, reward + 3, reward)

        relabel = GoalRelabel(reward_fn)
        buffer = self.with_equal_goals(relabel)
        audit = relabel.audit(buffer)
        assert not audit.passed
        assert audit.slots.tolist() == [12]
        assert torch.allclose(audit.computed - audit.stored, torch.tensor([3.0]))
        assert "slot 12" in str(audit)

    def test_only_the_newest_rows(self):
        relabel = GoalRelabel(lambda achieved, *_: torch.zeros(achieved.shape[0]))
        buffer = self.with_equal_goals(relabel)
        audit = relabel.audit(buffer, num_rows=3)
        assert audit.num_rows == 3
        assert sorted(audit.slots.tolist()) == [17, 18, 19]

    def test_with_info_keys(self):
        def reward_fn(achieved_goal, desired_goal, transition):
            assert transition["effort"].shape == (20, 1)
            return distance_reward(achieved_goal, desired_goal, transition)

        relabel = GoalRelabel(reward_fn, info_keys=["effort"])
        assert relabel.audit(self.with_equal_goals(relabel)).passed

    def test_without_rows(self):
        relabel = GoalRelabel(distance_reward)
        with pytest.raises(RuntimeError, match="no rows"):
            relabel.audit(make_buffer(relabel))

    def with_equal_goals(self, relabel):
        """Twenty rows whose desired goal is the same before and after the step."""
        buffer, steps = make_buffer(relabel), torch.arange(20)
        data = goal_transitions(torch.zeros(20).long(), steps, steps % 6 == 5)
        data["next", "desired_goal"] = data["desired_goal"].clone()
        buffer.extend(data)
        return buffer


class TestErrors:
    """Whatever a user's function does, storage and buffer stay as they were."""

    def check(self, relabel, error, match):
        buffer, live = filled(relabel)
        slots = torch.tensor(list(live))
        before = buffer.storage.get(slots).clone()
        with pytest.raises(error, match=match):
            buffer.sample(15)
        after = buffer.storage.get(slots)
        for key in before.keys(True, True):
            assert torch.equal(before[key], after[key])
        relabel.reward_fn, relabel.terminated_fn = distance_reward, None
        assert len(buffer.sample(15)) == 15  # it goes on: no lock is held

    @pytest.mark.parametrize(
        "shape", [(), (1,), (15, 3), (15, 15), (12,), (1, 15)], ids=lambda shape: str(shape)
    )
    def test_reward_of_the_wrong_shape(self, shape):
        relabel = GoalRelabel(lambda *_: torch.zeros(shape))
        self.check(relabel, ValueError, r"reward_fn.*\[15\].*\[15, 1\]")

    def test_terminated_of_the_wrong_shape(self):
        relabel = GoalRelabel(distance_reward, terminated_fn=lambda *_: torch.zeros(3).bool())
        self.check(relabel, ValueError, r"terminated_fn.*\[15\].*\[3\]")

    @pytest.mark.parametrize("returned", [torch.float32, torch.int64, torch.uint8])
    def test_a_terminated_fn_that_returns_a_reward_or_a_distance(self, returned):
        relabel = GoalRelabel(
            distance_reward, terminated_fn=lambda *_: -torch.ones(15).to(returned)
        )
        self.check(relabel, TypeError, f"terminated_fn must return bool, got {returned}: compare")

    @pytest.mark.parametrize("result", [None, "much"])
    def test_a_reward_that_is_no_number(self, result):
        relabel = GoalRelabel(lambda *_: result)
        self.check(relabel, (TypeError, ValueError), "reward_fn")

    def test_a_function_that_raises(self):
        def reward_fn(*_):
            raise ZeroDivisionError("of the user")

        self.check(GoalRelabel(reward_fn), ZeroDivisionError, "of the user")

    def test_a_function_that_is_none(self):
        with pytest.raises(TypeError, match="reward_fn"):
            GoalRelabel(None)
        with pytest.raises(TypeError, match="terminated_fn"):
            GoalRelabel(distance_reward, terminated_fn=3)

    @pytest.mark.parametrize(
        "key", ["desired_goal", ("next", "achieved_goal"), ("next", "reward")], ids=str
    )
    def test_goal_keys_absent(self, key):
        buffer, steps = make_buffer(GoalRelabel(distance_reward)), torch.arange(5)
        data = goal_transitions(torch.zeros(5).long(), steps, steps == 4)
        buffer.extend(data.exclude(key))
        name = key if isinstance(key, str) else key[-1]
        with pytest.raises(KeyError, match=rf"{name}[\s\S]*observation"):
            buffer.sample(4)

    def test_without_a_hindsight_sampler(self):
        buffer = ReplayStorage(storage=PackedStorage(8), transform=GoalRelabel(distance_reward))
        write(buffer, RingOracle(8), [[False] * 5])
        with pytest.raises(KeyError, match="HERSampler"):
            buffer.sample(4)

    def test_goals_of_different_shapes(self):
        buffer, steps = make_buffer(GoalRelabel(distance_reward)), torch.arange(5)
        data = goal_transitions(torch.zeros(5).long(), steps, steps == 4)
        data["next", "achieved_goal"] = torch.zeros(5, 2)
        buffer.extend(data)
        with pytest.raises(ValueError, match=r"achieved.*\[3\].*\[2\]"):
            buffer.sample(4)

    def test_outside_of_a_replay_storage(self):
        with pytest.raises(RuntimeError, match="ReplayStorage"):
            GoalRelabel(distance_reward)(
                goal_transitions(*[torch.zeros(1).long()] * 2, torch.zeros(1).bool())
            )
