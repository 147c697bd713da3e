"""`PackedStorage` as it is used: parts of long writes, room, stacks, values rewritten."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from trl_storages import EpisodeWriter, FrameStack, PackedStorage
from trl_storages.streams import Block, DeviceRows

F32 = torch.float32
FIELDS = {
    "observation": (F32, (2,)),
    ("next", "observation"): (F32, (2,)),
    ("next", "reward"): (F32, (1,)),
    ("next", "done"): (torch.bool, (1,)),
}


def write(storage, num_steps, length, start=0):
    """Writes steps of one lane with their number as the reward, in episodes of a length."""
    words = np.zeros((num_steps, storage.layout.row_words), np.int64)
    views, steps = (
        storage.layout.views(torch.from_numpy(words)),
        torch.arange(start, start + num_steps),
    )
    done = steps % length == length - 1
    views["observation"][:] = (steps + steps // length)[:, None]
    views["next", "observation"][:] = (steps + steps // length + 1)[:, None]
    views["next", "reward"][:], views["next", "done"][:] = steps[:, None], done[:, None]
    offsets, cut = np.array([0, num_steps]), np.zeros(num_steps, bool)
    return storage.append(
        Block(np.zeros(1, np.int64), offsets, words, done.numpy(), cut), cuts_gaps=True
    )


def rewards(storage, slots):
    return storage.get(slots)["next", "reward"].squeeze(-1).tolist()


def test_a_write_longer_than_the_lane_keeps_its_end():
    storage = PackedStorage(100, fields=FIELDS)
    slots, gaps = write(storage, 250, 10)
    assert (slots[:150] == -1).all()
    assert gaps == 0
    assert rewards(storage, slots[150:]) == list(range(150, 250))
    assert rewards(storage, storage.episodes.live_slots()) == list(range(150, 250))
    with pytest.raises(IndexError, match="live rows"):
        storage.get(torch.tensor([3, 100]))


def test_all_rows_fit_whatever_they_are():
    storage = PackedStorage(1000, fields=FIELDS)
    for start in range(0, 3000, 100):
        write(storage, 100, 1, start)
    assert len(storage) == 1000


def test_too_few_entries_are_said_once():
    storage = PackedStorage(1000, fields=FIELDS, max_entries=1200)
    write(storage, 900, 50)
    with pytest.warns(UserWarning, match="max_entries"):
        write(storage, 2100, 1, 900)
    write(storage, 1000, 1, 3000)
    storage.episodes.validate()
    assert 400 < len(storage) <= 1000
    live = storage.episodes.live_slots()
    assert rewards(storage, live) == list(range(4000 - len(live), 4000))


@pytest.mark.parametrize("form", ["host", "device"])
def test_values_of_the_step_are_rewritten(form):
    storage = PackedStorage(100, fields=FIELDS)
    if form == "device":
        storage.rows = DeviceRows(storage.layout, storage.episodes, torch.device("cpu"))
    slots, _ = write(storage, 20, 10)
    before = storage.get(slots)
    index = slots[[3, 5, 3]]
    storage.rewrite(index, {("next", "reward"): torch.tensor([[7.0], [8.0], [9.0]])})
    after = storage.get(slots)
    assert after["next", "reward"][[3, 5]].tolist() == [[9.0], [8.0]]
    before["next", "reward"][[3, 5]] = after["next", "reward"][[3, 5]]
    assert (before == after).all()
    for key, value, error in (
        ("observation", torch.zeros(3, 2), ValueError),
        (("next", "done"), torch.zeros(3, 1, dtype=torch.bool), ValueError),
        (("next", "reward"), torch.zeros(3, 1, dtype=torch.float64), ValueError),
        (("next", "reward"), torch.zeros(2, 1), ValueError),
        ("speed", torch.zeros(3, 1), KeyError),
    ):
        with pytest.raises(error):
            storage.rewrite(index, {("next", "reward"): torch.zeros(3, 1), key: value})
    assert (storage.get(slots) == after).all()


def test_a_first_write_that_is_refused_for_its_stacks_fixes_no_layout():
    stack = FrameStack(3)
    fields = {
        "pixels": (torch.uint8, (3, 8), stack),
        ("next", "pixels"): (torch.uint8, (3, 8), stack),
    }
    storage = PackedStorage(10, fields={**fields, ("next", "done"): None})
    frames = torch.arange(3 * 8, dtype=torch.uint8).view(3, 8).expand(2, 3, 8)
    after = {"pixels": frames, "done": torch.zeros(2, 1, dtype=torch.bool)}
    writer = EpisodeWriter()
    writer.register_storage(storage)
    with pytest.raises(ValueError, match="moved by one frame"):
        writer.extend(TensorDict({"pixels": frames, "next": after}, [2]))
    assert not len(storage)
    assert not storage.initialized


def test_no_rows_are_read_as_none():
    stack = (F32, (3, 2), FrameStack(3))
    storage = PackedStorage(
        20, fields={**FIELDS, "observation": stack, ("next", "observation"): stack}
    )
    assert storage.get(torch.zeros(0, dtype=torch.int64))["observation"].shape == (0, 3, 2)
