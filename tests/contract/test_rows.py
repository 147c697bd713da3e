"""Rows read back as they were written, however they come in."""

import numpy as np
import pytest
import torch
from contract.make import LAYOUTS, assemble, library, make
from contract.steps import Player, assert_same, ids_of, record, rows, write
from gymnasium.spaces import Box, Discrete

pytestmark = pytest.mark.requirement("stored-once")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_rows_read_back_bit_for_bit(place, layout, lanes):
    if place == "device" and layout.startswith("compressed"):
        pytest.skip("compressed frames are on the host")
    storage = make(place=place, layout=layout, lanes=lanes, size=10 * lanes)
    players = [Player(lane) for lane in range(lanes)]
    written = [player.play([4, 1, 3], unfinished=1) for player in players]
    write(storage, written, layout)
    for end in ("", "terminated", ""):
        steps = [player.step(end) for player in players]
        record(storage, steps, layout)
        written = [[*lane, step] for lane, step in zip(written, steps, strict=True)]
    kept = {step.id: step for lane in written for step in lane[-10:]}
    assert len(storage) == len(kept)
    assert storage.is_full
    history = storage[:]
    ids = ids_of(history).tolist()
    assert sorted(ids) == sorted(kept)
    assert_same(history, rows([kept[number] for number in ids], layout))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert_same(storage[nothing], rows([], layout))
    for look_up in (storage.__getitem__, storage.episodes.num_after):
        with pytest.raises(IndexError, match="slot"):
            look_up(torch.tensor([3, 10 * lanes]))
    batch = storage.sample(50)
    assert torch.equal(storage.episodes.is_done(batch["index"]), batch["next", "done"][:, 0])
    assert_same(batch, rows([kept[number] for number in ids_of(batch).tolist()], layout))


def test_too_few_entries_are_said_once(place):
    """Episodes of one step need two entries each, which there are unless `max_entries` says less."""
    make(place=place, size=2, max_entries=7)  # the least
    storage, player = make("prioritized", place=place, size=1000, max_entries=1200), Player()
    with torch.inference_mode():
        storage.extend(rows(player.play([50] * 18)))
    storage.sample(1)
    steps = player.play([1] * 2000)
    storage.extend(rows(steps[:1100]))
    with pytest.warns(UserWarning, match="max_entries"):  # before anything else is stored
        storage.extend(rows(steps[1100:]))
    storage.validate()
    assert 400 < len(storage) < 1000
    assert {*ids_of(storage.sample(4000)).tolist()} == {*ids_of(storage[:]).tolist()}
    assert_same(storage[:], rows(steps[-len(storage) :]))
    if place != "device":
        whole = make(place=place, size=196)
        for block in rows(steps[:260]).split(65):
            whole.extend(block)
        assert_same(whole[:], rows(steps[64:260]))
        assert whole.episodes.table()["length"].tolist() == [1] * 196


def test_the_flag_that_ends_episodes_need_not_be_a_field(place):
    data = rows(Player().play([2, 3]))
    data["is_over"] = data["next"].pop("done")[:, 0]
    stored = [key for key in data.keys(True, True) if key != "is_over"]
    writer = library.EpisodeWriter(done_key="is_over", keys=stored)
    storage = assemble(20, place=place, writer=writer)
    storage.extend(data)
    assert storage.episodes.table()["length"].tolist() == [2, 3]


def test_a_step_of_a_loop_lacks_what_only_batches_tell():
    storage, data = assemble(20), rows(Player().play([4])).exclude(("next", "effort"))
    data.set(("next", "cost"), torch.ones(4, requires_grad=True))
    for is_first in (True, False):
        with torch.inference_mode(is_first):
            storage.extend(data)
    with pytest.raises(KeyError, match=r"cost[\s\S]*extend"):
        record(storage, [Player().step()])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("reward", [0.7, np.float32(-1.7), np.array(2.9)], ids=repr)
def test_rewards_that_their_field_cannot_hold_raise(dtype, reward):
    fields = {("next", "reward"): (dtype, [1])}
    storage = library.UniformReplayStorage(Box(0, 9, [1]), Discrete(2), extra_fields=fields)
    with pytest.raises(TypeError, match="rewards must be"):
        storage.record(np.zeros(1, "f"), 0, reward, False, False, {}, np.ones(1, "f"))
    storage.record(np.zeros(1, "f"), 0, True, False, False, {}, np.ones(1, "f"))
    assert storage["next", "reward"].tolist() == [[True]]
