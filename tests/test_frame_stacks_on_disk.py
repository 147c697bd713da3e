"""Stacks of frames in a directory: rows that are evicted lend their frames as long as they are needed.

What must hold of rows in directories of whatever kind is tried in `test_disk_*.py`, and that they are the
stacks that were written in `test_frame_stacks_equal.py`.
"""

import warnings

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from trl_storages import EpisodeReplayStorage, FrameStack, ReplayStorage, UniformReplayStorage

pytestmark = [pytest.mark.requirement("frame-stack"), pytest.mark.requirement("persistence")]

SPACES = Box(0, 255, (4, 3, 3), np.uint8), Discrete(2)
PADDINGS = pytest.mark.parametrize("padding", ["same", "constant"])


def make(path, size=12, padding="same", recipe=UniformReplayStorage, **options):
    stack = {"observation": FrameStack(4, padding=padding)}
    options = {"batch_size": 8, "seed": 0, "share_next": True, **options}
    return recipe(*SPACES, storage_size=size, path=path, frame_stack=stack, **options)


class Life:
    """An environment whose frames are of its number of steps, beside all rows that it led to."""

    def __init__(self, padding="same"):
        self.padding, self.number, self.rows = padding, 0, []
        self.reset()

    def reset(self, number=None):
        number = self.number if number is None else number
        frame = np.full((3, 3), number, np.uint8)
        before = frame if self.padding == "same" else np.zeros_like(frame)
        self.stack = np.stack([before, before, before, frame])

    def step(self, *storages, done=False):
        self.number += 1
        after = np.concatenate([self.stack[1:], np.full((1, 3, 3), self.number, np.uint8)])
        for storage in storages:
            storage.record(self.stack, 1, float(self.number), done, False, {}, after)
        self.rows.append((self.stack, after))
        self.stack = after
        if done:
            self.reset(self.number + 50)

    def assert_held(self, storage, num_rows):
        storage.validate()
        assert len(storage) == num_rows
        found = storage[:]
        for place, key in enumerate(["observation", ("next", "observation")]):
            rows = np.stack([row[place] for row in self.rows[-num_rows:]])
            assert np.array_equal(found[key].numpy(), rows), key


def abandon(storage):
    storage.storage.directory.abandon()


@PADDINGS
@pytest.mark.parametrize("num_steps", [3, 13, 14, 29, 40, 41])
def test_goes_on_within_an_episode(tmp_path, padding, num_steps):
    life, storage = Life(padding), make(tmp_path, padding=padding)
    for step in range(num_steps):
        life.step(storage, done=step in (5, 6, 30))
    storage.close()
    storage = make(tmp_path, padding=padding)
    life.assert_held(storage, min(num_steps, 12))
    life.step(storage)
    life.assert_held(storage, min(num_steps + 1, 12))
    abandon(storage)
    life.assert_held(make(tmp_path, padding=padding), min(num_steps + 1, 12))


def test_an_environment_that_was_reset_to_where_it_was(tmp_path):
    """Its newest frame is what the last row led to; the frames before tell that it was reset."""
    life, storage = Life(), make(tmp_path)
    for _ in range(5):
        life.step(storage)
    storage.close()
    storage = make(tmp_path)
    life.reset()
    life.step(storage)
    life.assert_held(storage, 6)
    assert storage.episodes.behind(storage.episodes.live_slots()).tolist() == [0, 4, 3, 2, 1, 0]


@PADDINGS
@pytest.mark.parametrize("back", [1, 2, 3])
def test_rows_whose_frames_a_power_cut_took_are_not_shown(tmp_path, padding, back):
    life, storage = Life(padding), make(tmp_path, padding=padding)
    for _ in range(20):
        life.step(storage)
    index = storage.episodes
    lost = (index.host_tails.item() - back) % index.ring_steps
    storage.storage.directory.words.marks[lost] = 0
    abandon(storage)
    with pytest.raises(ValueError, match="open it for writing"):
        ReplayStorage.open(tmp_path, mode="r")
    with pytest.warns(RuntimeWarning, match="not whole"):
        again = make(tmp_path, padding=padding)
    life.assert_held(again, 12 - (4 - back))
    life.step(again)
    again.close()
    life.assert_held(ReplayStorage.open(tmp_path, mode="r"), 12 - (4 - back) + 1)


def test_a_closed_directory_whose_frames_are_damaged_says_so(tmp_path):
    life, storage = Life(), make(tmp_path)
    for _ in range(20):
        life.step(storage)
    index, words = storage.episodes, storage.storage.directory.words
    storage.close()
    words.rows[(index.host_tails.item() - 2) % index.ring_steps] += 1
    with pytest.raises(ValueError, match="damaged"):
        ReplayStorage.open(tmp_path, check=True)
    words.marks[(index.host_tails.item() - 2) % index.ring_steps, 0] = 0
    with pytest.raises(ValueError, match="damaged"):
        ReplayStorage.open(tmp_path)


def test_damaged_frames_of_evicted_rows_are_found(tmp_path):
    life, storage = Life(), make(tmp_path)
    for _ in range(20):
        life.step(storage)
    index, reader = storage.episodes, ReplayStorage.open(tmp_path, mode="r")
    storage.storage.rows[(index.host_tails.item() - 3) % index.ring_steps, 1] += 1
    for held in (storage, reader):
        with pytest.raises(RuntimeError, match=r"1 rows in .* do not match"):
            held.validate()


def test_frames_before_the_beginning_of_an_episode_may_be_gone(tmp_path):
    life, storage = Life(), make(tmp_path)
    for step in range(20):
        life.step(storage, done=step == 7)
    index = storage.episodes
    for back in (1, 2, 3):
        storage.storage.directory.words.marks[(index.host_tails.item() - back) % 15] = 0
    abandon(storage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        life.assert_held(make(tmp_path), 12)


@pytest.mark.parametrize("num_steps", [25, 26, 27, 28, 29, 60])
@pytest.mark.parametrize("written", [0, 1, 17])
def test_more_than_there_is_room_for_at_once(tmp_path, written, num_steps):
    life, storage = Life(), make(tmp_path)
    for _ in range(written):
        life.step(storage)
    reader = ReplayStorage.open(tmp_path, mode="r", batch_size=4)
    write_at_once(life, storage, num_steps)
    assert reader.sample().batch_size == (4,)
    for held in (storage, reader):
        life.assert_held(held, 12)
    abandon(storage)
    life.assert_held(make(tmp_path), 12)


def write_at_once(life, storage, num_steps, done_at=None):
    for step in range(num_steps):
        life.step(done=step == done_at)
    steps = zip(*life.rows[-num_steps:], strict=True)
    stack, after = (torch.from_numpy(np.stack(it)) for it in steps)
    done = (torch.arange(num_steps) == done_at)[:, None] if done_at else torch.zeros(num_steps, 1)
    outcome = {"done": done.bool(), "terminated": done.bool()}
    outcome["truncated"] = torch.zeros(num_steps, 1, dtype=torch.bool)
    reward = life.number - torch.arange(num_steps)[:, None].flip(0).float()
    following = {"observation": after, "reward": reward, **outcome}
    action = torch.zeros(num_steps, dtype=torch.int64)
    rows = {"observation": stack, "action": action, "next": following}
    storage.extend(TensorDict(rows, [num_steps]))


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("num_lost", [1, 3])
@pytest.mark.parametrize("begun", [1, 2, 3, 4])
def test_rows_that_only_lent_their_frames_come_back_whole(tmp_path, begun, num_lost, share_next):
    """Of a write of more steps than there is room for, of which a power cut took the newest ones.

    The rows before those that found room count then, where they are of an episode that is all there.
    """
    life, storage = Life(), make(tmp_path, share_next=share_next)
    write_at_once(life, storage, 20)
    write_at_once(life, storage, 30, done_at=30 - 12 - begun - 1)
    words, cursor = storage.storage.directory.words, storage.episodes.host_steps.item()
    words.marks[(cursor - 1 - torch.arange(num_lost)) % storage.episodes.ring_steps] = 0
    abandon(storage)
    with pytest.warns(RuntimeWarning, match="not whole"):
        again = make(tmp_path, share_next=share_next)
    found = len(again)
    assert found >= 12 - num_lost - share_next
    del life.rows[len(life.rows) - num_lost - share_next :]
    life.assert_held(again, found)
    newest = life.number - num_lost - share_next
    rewards = again[:]["next", "reward"].squeeze(-1)
    assert rewards.tolist() == list(range(newest - found + 1, newest + 1))


@PADDINGS
def test_what_was_kept_in_memory_goes_on_in_a_directory(tmp_path, padding):
    """The episode began before all steps that there are, and its frames are there."""
    life, memory = Life(padding), make(None, padding=padding, recipe=EpisodeReplayStorage)
    for _ in range(15):
        life.step(memory)
    memory.empty(keep_steps=5)
    storage = make(tmp_path, padding=padding, recipe=EpisodeReplayStorage)
    storage.load_state_dict(memory.state_dict())
    life.assert_held(storage, 5)
    for _ in range(3):
        life.step(memory, storage)
    life.step(memory, storage, done=True)
    storage.close()
    storage = make(tmp_path, padding=padding, recipe=EpisodeReplayStorage)
    for held in (memory, storage, ReplayStorage.open(tmp_path, mode="r")):
        life.assert_held(held, 9)
        # Of the episode the beginning is lost for good.
        assert not held.episodes.is_whole(held.episodes.live_slots()).any()
    back = make(None, padding=padding, recipe=EpisodeReplayStorage)
    back.load_state_dict(storage.state_dict())
    life.assert_held(back, 9)


@pytest.mark.parametrize("size", [2, 12])
def test_priorities_of_rows_with_frames_are_loaded(tmp_path, size):
    """Also where a lane has more spare steps than others."""
    life, storage = Life(), make(tmp_path, size, alpha=0.6)
    for _ in range(5):
        life.step(storage)
    batch = storage.sample()
    batch["td_error"] = 1 + batch["index"].float()
    storage.update_tensordict_priority(batch)
    memory = make(None, size, alpha=0.6)
    memory.load_state_dict(storage.state_dict())
    life.assert_held(memory, min(size, 5))
    ranks = torch.arange(len(memory))
    before, after = (
        it.sampler.priorities[it.episodes.slots_by_age(ranks)] for it in (storage, memory)
    )
    assert torch.equal(before, after)
    state = storage.state_dict()
    saved = state["_sampler"]
    saved["priorities"] = torch.cat([saved["priorities"], saved["priorities"]])
    with pytest.raises(ValueError, match="slots"):
        memory.load_state_dict(state)
    life.assert_held(memory, min(size, 5))


@pytest.mark.parametrize("keep_steps", [0, 1, 4])
def test_rows_that_were_forgotten_lend_their_frames(tmp_path, keep_steps):
    life, storage = Life(), make(tmp_path)
    for _ in range(9):
        life.step(storage)
    storage.empty(keep_steps=keep_steps)
    if not keep_steps:
        life.reset(99)
    for _ in range(2):
        life.step(storage)
    reader = ReplayStorage.open(tmp_path, mode="r")
    storage.close()
    for held in (make(tmp_path), reader):
        life.assert_held(held, keep_steps + 2)


def test_frames_in_memory_that_processes_share():
    life, storage = Life(), make(None)
    life.step(storage)
    storage.storage.share_memory_()
    for _ in range(15):
        life.step(storage)
    life.assert_held(storage, 12)
