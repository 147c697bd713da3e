"""Goals of other rows, beside a list of rows: masks, windows, every storage."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

from trl_storages import EpisodeWriter, FrameStack, GoalRelabel, PackedStorage, ReplayStorage
from trl_storages.keys import goal_entries
from trl_storages.rows import RowView, stored_fields

NUM_STEPS, CAPACITY, EPISODE = 45, 30, 7
GOAL, NEXT_GOAL, ACHIEVED = "desired_goal", ("next", "desired_goal"), ("next", "achieved_goal")
GOALS = GOAL, NEXT_GOAL
PIXELS, NEXT_PIXELS = "pixels", ("next", "pixels")


def history(width):
    """Rows of one lane: what an action led to is what the next row of its episode begins with."""
    step = torch.arange(NUM_STEPS)
    place, flag = step % EPISODE, (step % EPISODE == EPISODE - 1).unsqueeze(1)

    def seen(at, number):
        back = number.unsqueeze(1) - torch.arange(2, -1, -1).minimum(at.unsqueeze(1))
        frames = (back * 3).to(torch.uint8)
        return {
            "observation": number.float().unsqueeze(1).expand(-1, width) + 0.5,
            "achieved_goal": torch.stack([number, -number, number * 2], 1).float(),
            "pixels": frames.unsqueeze(2).expand(-1, -1, 4).contiguous(),
        }

    # An episode's last state is none that another begins with.
    number = step + step // EPISODE
    root, after = seen(place, number), seen(place + 1, number + 1)
    wanted = torch.stack([1000 + step, step, step], 1).float()
    outcome = {"reward": step.float().unsqueeze(1), "done": flag, "terminated": flag}
    following = {**after, "desired_goal": wanted + 0.25, **outcome, "coarse": wanted.double()}
    return TensorDict(
        {
            **root,
            "desired_goal": wanted,
            "coarse": wanted.double() - 0.25,
            "picture": 255 - root["pixels"],
            "action": step,
            "next": TensorDict(following, [NUM_STEPS]),
        },
        [NUM_STEPS],
    )


STORAGES = {
    "short rows": {},
    "long rows": {"width": 1500},
    "shared": {"share_next": True},
    "long and shared": {"width": 1500, "share_next": True},
    "stacks": {"is_stacked": True},
    "shared stacks": {"is_stacked": True, "share_next": True},
    "TorchRL's": {"kind": LazyTensorStorage},
}


def make(width=2, share_next=False, is_stacked=False, kind=PackedStorage):
    """A storage whose oldest rows were overwritten, and all that was written to it, by slot."""
    rows, options = history(width), {}
    if is_stacked:
        pixels = (torch.uint8, (3, 4), FrameStack(3))
        fields = {key: (rows[key].dtype, rows[key].shape[1:]) for key in rows.keys(True, True)}
        options["fields"] = {**fields, PIXELS: pixels, NEXT_PIXELS: pixels}
    if kind is PackedStorage:
        options["share_next"] = share_next
    storage = ReplayStorage(storage=kind(CAPACITY, **options), writer=EpisodeWriter())
    for piece in rows.split([11, 20, 14]):
        storage.extend(piece)
    by_slot = torch.cat([rows[CAPACITY:], rows[NUM_STEPS - CAPACITY : CAPACITY]])
    return storage.storage, by_slot


@pytest.fixture(params=["numba", "torch"])
def backend(request, monkeypatch):
    monkeypatch.setenv("TRL_STORAGES_BACKEND", request.param)


@pytest.fixture(params=STORAGES)
def stored(request, backend):
    return make(**STORAGES[request.param])


def drawn(seed, size=40):
    """Rows, rows that lend to them, and whether they do."""
    generator = torch.Generator().manual_seed(seed)
    slots, lenders = torch.randint(CAPACITY, (2, size), generator=generator)
    return slots, lenders, torch.rand(size, generator=generator) < 0.6


def view(storage, slots):
    return RowView(stored_fields(storage, slots), {"index": slots})


def lend(seen, lenders, mask, *, goal=GOAL, achieved="achieved_goal"):
    """Shows rows with what other rows achieved where a mask holds."""
    for key, drawn in zip(goal_entries(goal), (lenders, mask), strict=True):
        seen[key] = drawn
    GoalRelabel(None, goal_key=goal, achieved_goal_key=achieved).replay(seen)


def expected(rows, slots, lenders, mask, *, source=ACHIEVED, keys=GOALS):
    """What is seen of rows `[B]` or `[n, B]`, one by one."""
    wanted = rows[slots].clone()
    for at in torch.cartesian_prod(*map(torch.arange, slots.shape)).view(-1, slots.ndim):
        if mask[at[-1]]:
            for key in keys:
                wanted[key][tuple(at)] = rows[lenders[at[-1]]][source].to(rows[key].dtype)
    return wanted


def assert_same(batch, wanted):
    drawn = {"index", *goal_entries(GOAL), *goal_entries("coarse"), *goal_entries("picture")}
    assert {*batch.keys(True, True)} - drawn == {*wanted.keys(True, True)}
    for key in wanted.keys(True, True):
        assert batch[key].dtype is wanted[key].dtype, key
        assert torch.equal(batch[key], wanted[key]), key


def test_rows_with_what_is_lent(stored):
    storage, rows = stored
    slots, lenders, mask = drawn(0)
    seen = view(storage, slots)
    lend(seen, lenders, mask)
    window = torch.stack([slots, (slots + 1) % CAPACITY])
    for further in (seen.at(window), seen.at(slots)):
        wanted = expected(rows, further.slots, lenders, mask)
        for key in (*GOALS, "action", ACHIEVED, PIXELS):
            assert torch.equal(further[key], wanted[key]), key
    batch = seen.tensordict()
    assert_same(batch, expected(rows, slots, lenders, mask))
    batch.apply_(torch.zeros_like)
    assert_same(view(storage, slots).tensordict(), rows[slots])


def test_what_follows_is_lent_too(stored):
    storage, rows = stored
    slots, lenders, mask = drawn(1)
    last = (slots + 2) % CAPACITY
    seen = view(storage, slots)
    lend(seen, lenders, mask)
    seen.follow(last, reason="rows were folded")
    wanted = expected(rows, slots, lenders, mask)
    wanted["next"] = expected(rows, last, lenders, mask)["next"]
    assert torch.equal(seen[NEXT_GOAL], wanted[NEXT_GOAL])
    assert_same(seen.tensordict(), wanted)


def test_two_goals(stored):
    """One that rows do not hold is the desired one, as it was drawn, where none was drawn for it."""
    storage, rows = stored
    slots, lenders, mask = drawn(2)
    _, others, again = drawn(3)
    seen = view(storage, slots)
    lend(seen, lenders, mask)
    lend(seen, others, again, goal="second")
    wanted = expected(rows, slots, lenders, mask)
    seconds = wanted.clone()
    for key in GOALS:
        seconds[key][again] = rows[others[again]][ACHIEVED]
    wanted["second"], wanted["next", "second"] = seconds[GOAL], seconds[NEXT_GOAL]
    seen["second_index"] = seen["second_mask"] = torch.zeros(40)
    batch = seen.tensordict().exclude("second_index", "second_mask")
    assert_same(batch, wanted)


def test_stacks_can_be_lent(stored):
    storage, rows = stored
    slots, lenders, mask = drawn(4)
    seen = view(storage, slots)
    lend(seen, lenders, mask, goal="picture", achieved="pixels")
    wanted = expected(rows, slots, lenders, mask, source=NEXT_PIXELS, keys=["picture"])
    wanted["next", "picture"] = wanted["picture"]
    assert_same(seen.tensordict(), wanted)


def test_another_dtype(stored):
    storage, rows = stored
    slots, lenders, mask = drawn(5)
    seen = view(storage, slots)
    lend(seen, lenders, mask, goal="coarse")
    wanted = expected(rows, slots, lenders, mask, keys=["coarse", ("next", "coarse")])
    assert_same(seen.tensordict(), wanted)


def test_rows_that_were_read_before(stored):
    storage, rows = stored
    slots, lenders, mask = drawn(6)
    seen = view(storage, slots)
    assert torch.equal(seen[GOAL], rows[slots][GOAL])
    lend(seen, lenders, mask)
    assert_same(seen.tensordict(), expected(rows, slots, lenders, mask))


def test_rules_around_a_loan(stored):
    """One before it sees what is stored, one behind it what is lent; lenders are seen as they were."""
    storage, rows = stored
    slots, lenders, mask = drawn(7)
    seen = view(storage, slots)
    seen.define(["before"], lambda some, key: {key: some[GOAL] * 2})
    lend(seen, lenders, mask)
    seen.define([ACHIEVED, GOAL], lambda some, key: {key: some[key] + 1})
    wanted = expected(rows, slots, lenders, mask).set("before", rows[slots][GOAL] * 2)
    for key in (ACHIEVED, GOAL):
        wanted[key] += 1
    assert_same(seen.tensordict(), wanted)
    again = view(storage, slots)
    lend(again, lenders, mask)
    again.define([GOAL], lambda some, key: {key: some[GOAL] + 1})
    wanted = expected(rows, slots, lenders, mask)
    wanted[GOAL] += 1
    assert_same(again.tensordict(), wanted)


def test_nobody_lends(stored):
    storage, rows = stored
    slots, lenders, mask = drawn(8)
    seen = view(storage, slots)
    lend(seen, lenders, torch.zeros_like(mask))
    assert_same(seen.tensordict(), rows[slots])


@pytest.mark.parametrize("achieved", ["observation", "missing"])
def test_what_does_not_fit(stored, achieved):
    storage, _ = stored
    slots, lenders, mask = drawn(9)

    def lent():
        seen = view(storage, slots)
        lend(seen, lenders, mask, achieved=achieved)
        return seen.tensordict()

    with pytest.raises((ValueError, KeyError), match=r"shape \[3\]|no field .*missing"):
        lent()
