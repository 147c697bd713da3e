"""Transforms of users: they see rows, those ahead and others, before n steps are folded or behind."""

import pytest
import torch
from contract.lanes import HISTORIES
from contract.make import assemble, library
from contract.steps import assert_same
from torchrl.envs.transforms import Compose

NStep = library.NStep


def drawn(*transforms, place="memory", **parts):
    """A batch that is drawn through these transforms."""
    history = HISTORIES["lanes"]
    storage = assemble(history.size, history.lanes, place=place, transform=[*transforms], **parts)
    history.write(storage)
    return storage.sample(64)


def own(function):
    """A transform of a function of rows, which prepares nothing."""

    class Own(library.ReplayTransform):
        def replay(self, rows):
            function(rows)

    return Own()


def halve(rows):
    rows.steps["next", "reward"] = rows.steps["next", "reward"] / 2


def test_rewards_before_n_steps_and_behind(place):
    folded = drawn(NStep(3, 0.9), place=place)["next", "reward"] / 2
    for transforms in ([own(halve), NStep(3, 0.9)], [NStep(3, 0.9), own(halve)]):
        torch.testing.assert_close(drawn(*transforms, place=place)["next", "reward"], folded)


def test_flags_that_end_the_window(place):
    def end(rows):
        for key in ("terminated", "done"):
            rows.steps["next", key] = torch.ones_like(rows.steps["next", key])
        rows.steps["action"] = rows.steps["action"] + 1  # of which nothing is folded

    batch, plain = drawn(own(end), NStep(3, 0.9), place=place), drawn(place=place)
    assert (batch["steps_to_next_obs"] == 1).all()
    assert (batch["next", "terminated"] & batch["next", "done"]).all()
    kept = [("next", "observation"), ("next", "achieved_goal"), ("next", "reward"), "observation"]
    kept.append("action")
    assert_same(batch.select(*kept), plain.select(*kept))


def test_further_rows(place):
    def first_of_episode(rows):
        first = rows.episodes.shift(rows.slots, -rows.episodes.num_before(rows.slots))
        rows["first"] = rows.at(first)["observation"]

    batch, plain = drawn(own(first_of_episode), place=place), drawn(place=place)
    assert (batch["first"][:, 0] <= plain["observation"][:, 0]).all()
    begins = batch["first"][:, 0] == plain["observation"][:, 0]
    assert 0 < begins.sum() < 64
    assert_same(batch.exclude("first"), plain)


WRONG = {
    "rewards of the rows, not of their windows": (
        lambda rows: rows.__setitem__(("next", "reward"), rows["next", "reward"] / 2),
        RuntimeError,
        "rows.steps",
    ),
    "another number of values": (
        lambda rows: rows.__setitem__("more", torch.zeros(3)),
        ValueError,
        "more",
    ),
    "no tensor": (lambda rows: rows.__setitem__("more", 3.0), TypeError, "more"),
    "no such field": (lambda rows: rows["nothing"], KeyError, "observation"),
    "invalid slots": (lambda rows: rows.at(torch.tensor([10**6])), IndexError, "valid"),
    "slots that are none": (lambda rows: rows.at([0, 1]), TypeError, "int64"),
    "a window once rows are read": (lambda rows: rows.widen(3), RuntimeError, "NStep"),
}


@pytest.mark.requirement("refused-is-unchanged")
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_raise(name):
    function, error, named = WRONG[name]
    with pytest.raises(error, match=named):
        drawn(own(function), NStep(3, 0.9))


def test_a_function_that_returns_nothing_raises():
    with pytest.raises(TypeError, match="result of a transform"):
        drawn(lambda batch: None)


def test_transforms_of_a_nested_compose_and_later_ones_apply():
    history = HISTORIES["lanes"]
    storage = assemble(history.size, history.lanes, transform=[Compose(own(halve)), own(halve)])
    history.write(storage)

    def assert_scaled(factor):
        batch = storage.sample(64)
        torch.testing.assert_close(
            batch["next", "reward"], storage[batch["index"]]["next", "reward"] * factor
        )

    assert_scaled(1 / 4)
    storage.transform.append(Compose(own(halve)))
    assert_scaled(1 / 8)
    storage.transform.transforms[0] = own(lambda rows: None)
    assert_scaled(1 / 4)


def test_two_windows_raise():
    with pytest.raises(RuntimeError, match="one NStep"):
        drawn(NStep(2), NStep(3))


class Shifted(library.ReplayTransform):
    """Adds what it has learned to rewards, in a buffer whose name says nothing."""

    def __init__(self, size=1):
        super().__init__()
        self.register_buffer("tensor", torch.zeros(size))

    def replay(self, rows):
        rows.steps["next", "reward"] = rows.steps["next", "reward"] + self.tensor[0]


@pytest.mark.requirement("persistence")
def test_what_a_transform_has_learned_is_saved(place, tmp_path):
    storage, other = (
        assemble(30, place=place, transform=Shifted(), batch_size=8) for _ in range(2)
    )
    HISTORIES["filling"].write(storage)
    storage.transform[0].tensor[:] = 3
    storage.dumps(tmp_path)
    other.loads(tmp_path)
    assert_same(other.sample(), storage.sample())


def test_a_state_that_is_too_large_for_a_dump_is_refused(tmp_path):
    storage = assemble(30, transform=Shifted(3_000_000), batch_size=8)
    HISTORIES["filling"].write(storage)
    with pytest.raises(ValueError, match="MiB"):
        storage.dumps(tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_a_state_that_is_too_large_for_a_directory_is_reported(tmp_path):
    storage = assemble(
        storage=library.PackedStorage(30, path=tmp_path / "rows"), transform=Shifted(3_000_000)
    )
    HISTORIES["filling"].write(storage)
    for store in storage.flush, storage.close:
        with pytest.warns(UserWarning, match="8 MiB"):
            store()
    assert_same(library.ReplayStorage.open(tmp_path / "rows", mode="r")[:], storage[:])
