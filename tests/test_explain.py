"""ReplayStorage.explain: what it says of each sample, against the plain-Python ring."""

import pytest
import torch
from goal_data import HISTORIES, distance_reward, episode_flags, write
from oracles import RingOracle
from tensordict import TensorDict

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.sample_units import EpisodeSequence
from trl_storages.samplers import HERSampler, PERSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
BASIC = ["slot", "lane", "age", "episode", "step", "length"]
GOALS = ["relabelled", "goal_slot", "goal_age", "goal_same_episode", "goal_offset"]


def make_storage(capacity, num_envs=1, **kwargs):
    return ReplayStorage(
        storage=PackedStorage(capacity),
        writer=EpisodeWriter(num_envs),
        generator=torch.Generator().manual_seed(4),
        **kwargs,
    )


class TestColumns:
    @each_history
    def test_of_any_history(self, history):
        storage = make_storage(history.capacity, history.num_envs)
        oracle = history.write(storage)
        live, by_age = oracle.live(), oracle.by_age()
        batch = storage.sample(40)
        said = storage.explain(batch)
        assert list(said.columns) == BASIC
        assert len(said) == 40
        assert torch.equal(said["slot"], batch["index"])
        for i, slot in enumerate(batch["index"].tolist()):
            row = live[slot]
            assert said["lane"][i] == row.lane
            assert said["age"][i] == by_age.index(row)
            assert said["step"][i] == oracle.behind(row)
            assert said["length"][i] == len(oracle.episode(row))
            for j, other in enumerate(batch["index"].tolist()):
                same = live[other].episode == row.episode
                assert (said["episode"][i] == said["episode"][j]) == same

    @each_history
    @pytest.mark.parametrize("strategy", ["future", "random"])
    def test_goals(self, history, strategy):
        storage = make_storage(
            history.capacity,
            history.num_envs,
            sampler=HERSampler(strategy),
            transform=GoalRelabel(distance_reward),
        )
        oracle = history.write(storage)
        live, by_age = oracle.live(), oracle.by_age()
        batch = storage.sample(40)
        said = storage.explain(batch)
        assert list(said.columns) == BASIC + GOALS
        assert torch.equal(said["relabelled"], batch["her_mask"])
        assert torch.equal(said["goal_slot"], batch["goal_index"])
        for i, (slot, goal) in enumerate(
            zip(batch["index"].tolist(), batch["goal_index"].tolist(), strict=True)
        ):
            row, goal = live[slot], live[goal]
            same = row.episode == goal.episode
            assert said["goal_age"][i] == by_age.index(goal)
            assert said["goal_same_episode"][i] == same
            assert said["goal_offset"][i] == (goal.step - row.step if same else 0)

    def test_steps_and_weights(self):
        storage = make_storage(20, sampler=PERSampler(20), transform=NStep(3, 0.9))
        oracle = RingOracle(20)
        write(storage, oracle, [episode_flags([5, 4], 3)])
        batch = storage.sample(30)
        said = storage.explain(batch)
        assert list(said.columns) == [*BASIC, "steps", "weight"]
        assert torch.equal(said["weight"], batch["priority_weight"])
        live = oracle.live()
        expected = [min(3, oracle.ahead(live[slot]) + 1) for slot in batch["index"].tolist()]
        assert said["steps"].tolist() == expected

    def test_a_sequence_is_explained_row_by_row(self):
        storage = make_storage(20, sample_unit=EpisodeSequence(3, bootstrap=1))
        write(storage, RingOracle(20), [episode_flags([5, 4], 3)])
        batch = storage.sample(6)
        said = storage.explain(batch)
        assert len(said) == 24
        assert torch.equal(said["valid"], batch["validity_mask"])
        assert torch.equal(said["slot"], batch["index"])

    def test_padded_episodes(self):
        storage = make_storage(20)
        write(storage, RingOracle(20), [episode_flags([5, 4])])
        batch = storage.sample_episodes(6)
        said = storage.explain(batch)
        assert len(said) == batch.numel()
        assert torch.equal(said["valid"], batch["collector", "mask"].flatten())
        whole = said["step"][said["valid"]]
        assert whole.tolist() == [
            step for n in said["length"].view(6, -1)[:, 0] for step in range(n)
        ]

    def test_ages_are_those_of_now(self):
        storage, oracle = make_storage(20), RingOracle(20)
        write(storage, oracle, [episode_flags([5])])
        batch = storage.sample(8)
        before = storage.explain(batch)
        write(storage, oracle, [[False] * 3])
        assert torch.equal(storage.explain(batch)["age"], before["age"] + 3)

    @pytest.mark.parametrize("given", [["index"], ["index", "goal_index"], ["index", "her_mask"]])
    def test_a_batch_that_lacks_entries(self, given):
        storage = make_storage(20, sampler=HERSampler(), transform=GoalRelabel(distance_reward))
        write(storage, RingOracle(20), [episode_flags([5])])
        batch = storage.sample(8).select(*given)
        said = storage.explain(batch)
        assert list(said.columns) == BASIC + (GOALS if "goal_index" in given else [])
        assert str(said)

    def test_nothing_is_changed(self):
        storage = make_storage(20, sampler=HERSampler(), transform=GoalRelabel(distance_reward))
        write(storage, RingOracle(20), [episode_flags([5])])
        batch, state = storage.sample(8), storage.state_dict()
        copy = batch.clone()
        state["_storage"]["_storage"] = state["_storage"]["_storage"].clone()
        said = storage.explain(batch)
        for column in said.columns.values():
            column.zero_()
        assert storage.state_dict()["_storage"]["_storage"].equal(state["_storage"]["_storage"])
        for name, tensor in storage.episodes.state_dict().items():
            assert torch.equal(tensor, state["_writer"]["episodes"][name])
        assert (batch == copy).all()


class TestPrinted:
    def example(self):
        """Slots 0..4 and 5..6 are two episodes, 7 the first row of a third."""
        storage = make_storage(8)
        write(storage, RingOracle(8), [episode_flags([5, 2], 1)])
        batch = TensorDict(
            {
                "index": torch.tensor([1, 7, 6]),
                "her_mask": torch.tensor([True, False, True]),
                "goal_index": torch.tensor([4, 7, 2]),
                "priority_weight": torch.tensor([0.25, 1.0, 0.123456]),
                "steps_to_next_obs": torch.tensor([[3], [1], [1]]),
            },
            [3],
        )
        return storage.explain(batch)

    def test_as_a_table(self):
        assert str(self.example()) == (
            "3 samples of 8 rows stored, 2 of them with a goal that was reached\n"
            "slot  lane  age  episode  step  length  steps  weight                          goal\n"
            "   1     0    6        0     1       5      3    0.25       +3 steps, slot 4, age 3\n"
            "   7     0    0        2     0       1      1       1                           own\n"
            "   6     0    1        1     1       2      1   0.123  other episode, slot 2, age 5"
        )

    def test_the_first_rows_of_a_long_one(self):
        storage = make_storage(8)
        write(storage, RingOracle(8), [episode_flags([5, 2], 1)])
        lines = str(storage.explain(storage.sample(256))).split("\n")
        assert lines[0] == "256 samples of 8 rows stored"
        assert len(lines) == 13
        assert len({len(line) for line in lines[1:-1]}) == 1
        assert lines[-1] == "... 246 more"
        exactly = str(storage.explain(storage.sample(10)))
        assert "more" not in exactly

    def test_in_a_notebook(self):
        html = self.example()._repr_html_()
        assert html.startswith("<p>3 samples of 8 rows stored")
        assert html.count("<tr>") == 4
        assert html.count("<td>") == 27
        assert "<td>+3 steps, slot 4, age 3</td>" in html

    def test_an_unknown_column(self):
        with pytest.raises(KeyError, match=r"speed.*slot"):
            self.example()["speed"]


class TestErrors:
    def test_no_index(self):
        storage = make_storage(8)
        write(storage, RingOracle(8), [[False] * 3])
        with pytest.raises(KeyError, match=r"index.*action"):
            storage.explain(storage.sample(3).exclude("index"))

    def test_rows_that_are_gone(self):
        storage = make_storage(8)
        write(storage, RingOracle(8), [[False] * 6])
        batch = storage.sample(30)
        storage.empty(keep_steps=2)
        with pytest.raises(ValueError, match=r"slots .*hold\s+none"):
            storage.explain(batch)
