"""Views of drawn rows: what is read and when, what further rows look like, and what they become."""

import gc
import weakref

import pytest
import torch
from goal_data import distance_reward, goal_transitions
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from trl_storages import GoalRelabel, HERSampler, NStep, ReplayStorage, ReplayTransform
from trl_storages.rows import PackedStorage, RowView, stored_fields
from trl_storages.rows.fields import BatchedFields

NUM_ROWS = 12
REWARD, NEXT = ("next", "reward"), ("next", "observation")
SLOTS = torch.tensor([3, 0, 7])
# Long rows are gathered field by field, short ones as a whole.
WIDTHS = {"short rows": 3, "long rows": 5000}


def rows_of(width):
    count = torch.arange(NUM_ROWS, dtype=torch.float32).unsqueeze(1)
    following = {"observation": -count.expand(NUM_ROWS, width), "reward": count / 2}
    root = {"observation": count.expand(NUM_ROWS, width) + 100, "mark": count.to(torch.uint8)}
    return TensorDict({**root, "next": TensorDict(following, [NUM_ROWS])}, [NUM_ROWS])


@pytest.fixture(params=WIDTHS)
def storage(request):
    storage = PackedStorage(NUM_ROWS)
    storage.set(range(NUM_ROWS), rows_of(WIDTHS[request.param]))
    return storage


def view(storage, **drawn):
    return RowView(stored_fields(storage, SLOTS), drawn)


def expected(storage, slots=SLOTS):
    return rows_of(storage.get(SLOTS)["observation"].shape[-1])[slots]


def assert_same(batch, expected):
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    assert batch.batch_size == expected.batch_size
    for key in expected.keys(True, True):
        assert batch[key].dtype == expected[key].dtype
        assert torch.equal(batch[key], expected[key]), key


def doubled(rows, key):
    return {REWARD: rows[REWARD] * 2}


def test_rows_as_they_are_stored(storage):
    rows = view(storage, index=SLOTS.clone())
    assert rows[REWARD].tolist() == [[1.5], [0.0], [3.5]]
    assert "mark" in rows
    assert "goal" not in rows
    assert set(rows.keys()) == {"observation", "mark", NEXT, REWARD, "index"}
    batch = rows.tensordict()
    assert_same(batch, expected(storage).set("index", SLOTS))
    batch.apply_(torch.zeros_like)
    assert_same(storage.get(SLOTS), expected(storage))


def test_an_entry_that_is_not_there(storage):
    with pytest.raises(KeyError, match=r"no field .*goal.*mark"):
        view(storage)["goal"]


def test_what_is_set_is_so_for_these_rows(storage):
    rows = view(storage)
    rows[REWARD], rows["extra"] = torch.full((3, 1), 9.0), torch.zeros(3)
    assert rows[REWARD].tolist() == [[9.0]] * 3
    further = rows.at(SLOTS + 1)
    assert torch.equal(further["mark"], (SLOTS + 1).to(torch.uint8).unsqueeze(1))
    with pytest.raises(RuntimeError, match=r"\('next', 'reward'\) was set for the sampled rows"):
        further[REWARD]
    rows.define([REWARD], doubled)
    with pytest.raises(RuntimeError, match="was set for the sampled rows"):
        rows[REWARD]
    wanted = expected(storage).set(REWARD, torch.full((3, 1), 9.0)).set("extra", torch.zeros(3))
    rows = view(storage)
    rows[REWARD], rows["extra"] = torch.full((3, 1), 9.0), torch.zeros(3)
    assert_same(rows.tensordict(), wanted)


def test_what_is_defined_is_so_for_further_rows_too(storage):
    rows, bonus = view(storage), torch.tensor([[1.0], [2.0], [3.0]])
    rows.define([REWARD], doubled)
    # What is known of each sample broadcasts to its further rows.
    rows.define([REWARD, "bonus"], lambda seen, key: {REWARD: seen[REWARD] + bonus, "bonus": bonus})
    assert rows.is_defined(REWARD)
    assert not rows.is_defined("mark")
    assert rows[REWARD].tolist() == [[4.0], [2.0], [10.0]]
    further = rows.at(torch.stack([SLOTS, SLOTS + 1]))
    assert further.batch_size == (2, 3)
    assert further[REWARD].tolist() == [[[4.0], [2.0], [10.0]], [[5.0], [3.0], [11.0]]]
    wanted = expected(storage).set("bonus", bonus)
    assert_same(rows.tensordict(), wanted.set(REWARD, wanted[REWARD] * 2 + bonus))


def test_what_further_rows_need_is_gathered_together(storage):
    """Through rules as well, but for what was set or defined in the place of it."""
    rows, asked = view(storage), []
    rows.define(
        [REWARD], lambda seen, _: {REWARD: seen[REWARD] + seen[NEXT][..., :1]}, reads=[REWARD, NEXT]
    )
    rows.define(
        ["both"], lambda seen, key: {key: seen[REWARD] * seen["mark"]}, reads=[REWARD, "mark"]
    )
    rows["mark"] = torch.ones(3, 1)
    window = torch.stack([SLOTS, SLOTS + 1])
    if isinstance(storage, PackedStorage):
        read = storage.read
        storage.read = lambda slots, keys, *following: asked.append({*keys}) or read(slots, keys)
    further = rows.at(window, ["both", "observation"])
    wanted = expected(storage, window)
    assert torch.equal(further["both"], (wanted[REWARD] + wanted[NEXT][..., :1]) * wanted["mark"])
    assert torch.equal(further["observation"], wanted["observation"])
    if isinstance(storage, PackedStorage):
        assert asked == [{REWARD, NEXT, "mark", "observation"}]


def test_what_is_set_or_defined_last_stays(storage):
    """A rule for several entries, asked for one of them, leaves the others to those that came later."""
    rows = view(storage)
    rows.define(
        [REWARD, "mark", "bonus"], lambda seen, key: dict.fromkeys((REWARD, "mark", "bonus"), 7)
    )
    rows["mark"] = torch.ones(3, 1)
    rows.define([REWARD], lambda seen, key: {REWARD: seen[REWARD] + 1})
    assert (rows["bonus"], rows["mark"].tolist(), rows[REWARD]) == (7, [[1]] * 3, 8)


def test_a_rule_is_not_applied_before_it_is_asked_for(storage):
    def fail(seen, key):
        raise AssertionError

    rows = view(storage)
    rows.define([REWARD], fail)
    rows["extra"] = rows["mark"] * 2
    rows[REWARD] = torch.zeros(3, 1)
    assert rows.tensordict()[REWARD].tolist() == [[0.0]] * 3


def test_what_follows_is_that_of_other_rows(storage):
    rows = view(storage)
    rows.define([REWARD], doubled)
    assert rows[REWARD].tolist() == [[3.0], [0.0], [7.0]]
    rows.follow(SLOTS + 2, reason="rows were folded")
    assert rows[REWARD].tolist() == [[5.0], [2.0], [9.0]]
    with pytest.raises(RuntimeError, match="rows were folded"):
        rows.at(SLOTS)
    with pytest.raises(RuntimeError, match="rows were folded"):
        rows.follow(SLOTS, reason="again")
    wanted, later = expected(storage), expected(storage, SLOTS + 2)
    wanted["next"] = later["next"].set("reward", later[REWARD] * 2)
    assert_same(rows.tensordict(), wanted)


def test_what_is_defined_after_that_sees_the_other_rows_too(storage):
    rows = view(storage)
    rows.define([REWARD], doubled)
    rows.follow(SLOTS + 2, reason="rows were folded")
    rows.define(
        [REWARD, "bonus"],
        lambda seen, key: {REWARD: seen[REWARD] + seen["mark"], "bonus": seen[REWARD]},
    )
    followed = expected(storage, SLOTS + 2)[REWARD] * 2
    assert torch.equal(rows[REWARD], followed + expected(storage)["mark"])
    assert torch.equal(rows.tensordict()["bonus"], followed)


def test_what_was_set_cannot_follow(storage):
    rows = view(storage)
    rows["next", "bonus"] = torch.zeros(3, 1)
    with pytest.raises(KeyError, match=r"\('next', 'bonus'\).*behind NStep"):
        rows.follow(SLOTS, reason="rows were folded")


def test_functions_of_batches(storage):
    rows = view(storage, index=SLOTS.clone())
    rows.define([REWARD], doubled)
    rows.transform(lambda batch: batch.set(REWARD, batch[REWARD] + 1))
    assert rows[REWARD].tolist() == [[4.0], [1.0], [8.0]]
    assert set(rows.keys()) == {"observation", "mark", NEXT, REWARD, "index"}
    with pytest.raises(RuntimeError, match="cannot show further rows"):
        rows.at(SLOTS)
    with pytest.raises(KeyError, match=r"no field .*goal"):
        rows["goal"]
    rows["extra"] = torch.ones(3)
    assert rows.tensordict()["extra"].tolist() == [1.0] * 3


def test_only_what_is_wanted_is_read():
    class Counting(PackedStorage):
        def __init__(self, *args):
            super().__init__(*args)
            self.fields, self.batches = [], 0

        def read(self, slots, keys, following=None):
            self.fields += keys
            return super().read(slots, keys, following)

        def gather(self, *slots):
            self.batches += 1
            return super().gather(*slots)

    storage = Counting(NUM_ROWS)
    storage.set(range(NUM_ROWS), rows_of(5000))
    rows = view(storage)
    rows.at(SLOTS)[REWARD]
    rows.follow(SLOTS, reason="rows were folded")
    rows[REWARD] = torch.zeros(3, 1)
    rows.tensordict()
    # Of the sampled rows nothing under next, nothing twice, and nothing that is replaced.
    assert sorted(map(str, storage.fields)) == sorted(
        map(str, [REWARD, "observation", "mark", NEXT])
    )
    assert not storage.batches


def test_entries_of_a_batch():
    batch = TensorDict({"a": torch.ones(2)}, [2])
    fields = BatchedFields(None, SLOTS, SLOTS.device)
    fields.batch = batch
    assert fields.names() == ("a",)
    assert fields["a"] is batch["a"]
    assert fields.tensordict({}) is batch


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("has_next_goal", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_rows_are_freed_with_their_batch(n_step, has_next_goal, ends):
    """Batch after batch would take new memory, if they waited for the garbage collector."""
    seen = []

    class Watch(ReplayTransform):
        def replay(self, rows):
            seen.append(weakref.ref(rows))
            rows.define(["mark"], lambda some, key: {key: rows["action"] + 1})

    def reached(achieved_goal, desired_goal, transition):
        return (achieved_goal == desired_goal).all(-1)

    relabel = GoalRelabel(distance_reward, terminated_fn=reached if ends else None)
    storage = ReplayStorage(
        storage=PackedStorage(40),
        sampler=HERSampler(),
        transform=Compose(relabel, NStep(n_step), Watch()),
        batch_size=16,
    )
    steps = torch.arange(20)
    rows = goal_transitions(torch.zeros_like(steps), steps, steps % 5 == 4)
    storage.extend(rows if has_next_goal else rows.exclude(("next", "desired_goal")))
    gc.disable()
    try:
        batch = storage.sample()
        assert ("next", "desired_goal") in batch.keys(True)
        del batch
        assert seen.pop()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("n_step", [1, 3])
def test_what_comes_before_the_goals_sees_the_stored_ones(n_step, is_set):
    """Whether it is computed at once, or when the drawn goals have been copied into the batch."""

    def stored_goals(seen, key):
        return {key: seen["desired_goal"] + 1}

    class Before(ReplayTransform):
        def replay(self, rows):
            if is_set:
                rows["before"] = stored_goals(rows, "before")["before"]
            else:
                rows.define(["before"], stored_goals)

    storage = ReplayStorage(
        storage=PackedStorage(40),
        sampler=HERSampler(),
        transform=Compose(Before(), GoalRelabel(distance_reward), NStep(n_step)),
        batch_size=64,
    )
    steps = torch.arange(20)
    storage.extend(goal_transitions(torch.zeros_like(steps), steps, steps % 5 == 4))
    batch = storage.sample()
    stored = storage[batch["index"]]
    torch.testing.assert_close(batch["before"], stored["desired_goal"] + 1)
    goals = storage[batch["goal_index"]]["next", "achieved_goal"]
    mask = batch["her_mask"].unsqueeze(1)
    assert mask.any()
    assert not mask.all()
    torch.testing.assert_close(
        batch["desired_goal"], torch.where(mask, goals, stored["desired_goal"])
    )
