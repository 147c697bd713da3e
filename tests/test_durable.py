"""Storages in a directory, taken up again where they were left."""

import copy
import pickle
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from disk import acts
from disk.history import History
from disk.power import check_priorities
from disk.rows import found, is_torn, make, priority_of, transitions, without_ends, write
from goal_data import AsDrawn
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict
from torchrl.data import RoundRobinWriter, TensorDictReplayBuffer

from trl_storages import (
    EpisodeWriter,
    ERESampler,
    HERSampler,
    NStepReplayStorage,
    PackedStorage,
    PERSampler,
    PrioritizedReplayStorage,
    ReplayStorage,
    UniformReplayStorage,
)
from trl_storages.disk import Directory
from trl_storages.disk.description import Description


def assert_same(first, second):
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in first.keys(True, True):
        assert torch.equal(first[key], second[key]), key


@pytest.mark.requirement("persistence")
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("blocks", [[1], [3, 2], [5] * 9, [30]])
class TestReopening:
    def test_episodes_and_counters(self, tmp_path, num_envs, blocks):
        storage = make(tmp_path, num_envs)
        for size in blocks:
            write(storage, size)
        storage.close()
        again = make(tmp_path, num_envs)
        assert found(again) == found(storage)
        check_priorities(again)
        assert len(again) == len(storage)
        assert again.writer._write_count == sum(blocks) * num_envs
        assert torch.equal(again.episodes.cursors, storage.episodes.cursors)
        assert_same(again.episodes.episodes(), storage.episodes.episodes())
        write(again, 4)
        found(again)
        check_priorities(again)

    def test_draws_go_on(self, tmp_path, num_envs, blocks):
        def build():
            sampler = HERSampler(base=ERESampler(0.9, 2, base=PERSampler(24)))
            return ReplayStorage(
                storage=PackedStorage(24, scratch_dir=tmp_path),
                writer=EpisodeWriter(num_envs),
                sampler=sampler,
                transform=AsDrawn(),
                generator=torch.Generator().manual_seed(3),
                batch_size=7,
            )

        storage = build()
        for size in blocks:
            write(storage, size)
            batch = storage.sample()
            batch["td_error"] = priority_of(batch["serial"], 0)
            storage.update_tensordict_priority(batch)
        storage.close()
        again = build()
        for _ in range(100):
            assert_same(
                storage.sample().exclude("priority_stamp"), again.sample().exclude("priority_stamp")
            )
        assert torch.equal(storage.sampler.base.base.priorities, again.sampler.base.base.priorities)


def test_lanes_of_unequal_fill(tmp_path):
    storage = make(tmp_path, 4, 40)
    for step in range(25):
        write(storage, 1 + step % 3, [step % 4, (step + 1 + step % 2) % 4])
    expected = storage.episodes.episodes()
    storage.close()
    again = make(tmp_path, 4, 40)
    assert found(again) == found(storage)
    assert_same(again.episodes.episodes(), expected)


def test_a_killed_interpreter_keeps_what_was_not_flushed(tmp_path):
    storage = make(tmp_path)
    write(storage, 9)
    expected = found(storage)
    del storage  # without close
    assert found(make(tmp_path)) == expected


def test_priorities(tmp_path):
    storage = make(tmp_path)
    write(storage, 30)
    batch = storage.sample()
    batch["td_error"] = priority_of(batch["serial"], 0)
    storage.update_tensordict_priority(batch)
    expected = storage.sampler.priorities
    storage.storage.directory.abandon()
    again = make(tmp_path)
    assert torch.equal(again.sampler.priorities, expected)
    assert again.sampler.default_priority == batch["td_error"].max()
    write(again, 2)
    again.sampler.validate()
    assert (again.sampler.priorities == expected).sum() >= 22
    again.empty()
    write(again, 3)
    assert again.sampler.default_priority == 1
    again.close()
    assert make(tmp_path).sampler.priorities.isfinite().sum() == 3


def steps_of_an_episode(first, num_steps):
    """Steps of one lane, none of which ends its episode."""
    steps = torch.arange(first, first + num_steps)
    return transitions(without_ends(num_steps), steps, torch.zeros_like(steps))


class TestTheSeam:
    """An episode goes on after reopening if the environment did, and only then."""

    def test_goes_on(self, tmp_path):
        storage = make(tmp_path)
        storage.extend(steps_of_an_episode(0, 5))
        storage.close()
        again = make(tmp_path)
        again.extend(steps_of_an_episode(5, 3))
        assert again.episodes.episodes()["length"].tolist() == [8]

    def test_after_a_reset(self, tmp_path):
        storage = make(tmp_path)
        storage.extend(steps_of_an_episode(0, 5))
        storage.close()
        again = make(tmp_path)
        again.extend(steps_of_an_episode(50, 3))
        assert again.episodes.episodes()["length"].tolist() == [5, 3]
        again.close()
        assert make(tmp_path).episodes.episodes()["length"].tolist() == [5, 3]

    def test_ended_by_hand(self, tmp_path):
        storage = make(tmp_path)
        storage.extend(steps_of_an_episode(0, 5))
        storage.end_episodes()
        storage.close()
        again = make(tmp_path)
        again.extend(steps_of_an_episode(5, 3))
        assert again.episodes.episodes()["length"].tolist() == [5, 3]

    def test_trajectories_of_collectors(self, tmp_path):
        storage = make(tmp_path)
        data = steps_of_an_episode(0, 6)
        data["collector", "traj_ids"] = torch.tensor([4, 4, 4, 4, 9, 9])
        storage.extend(data)
        storage.close()
        again = make(tmp_path)
        assert again.writer._lanes.trajectory.tolist() == [9]
        data = steps_of_an_episode(6, 2)
        again.extend(data.set(("collector", "traj_ids"), torch.tensor([9, 9])))
        assert again.episodes.episodes()["length"].tolist() == [4, 4]


def test_as_many_lanes_as_can_be_opened_again(tmp_path):
    most = 2**18
    storage = make(tmp_path / "rows")
    write(storage, 1)
    storage.close()
    many = replace(
        Description.read(tmp_path / "rows"),
        num_rows=most,
        num_lanes=most,
        flushed=[2**40] * most,
        tails=[2**40] * most,
        progress={"ended": [False] * most},
    )
    many.write(tmp_path / "rows")
    assert Description.read(tmp_path / "rows") == many
    path = tmp_path / "more"
    storage = PackedStorage(most + 1, scratch_dir=path, fields={"done": (torch.bool, (1,))})
    with pytest.raises(ValueError, match=r"at most 262,144 lanes .*, got 262,145"):
        ReplayStorage(storage=storage, writer=EpisodeWriter(most + 1))
    assert not path.exists()


def test_clearing(tmp_path):
    storage = make(tmp_path, 4)
    write(storage, 9)
    storage.empty(keep_steps=2)
    lengths, rows = storage.episodes.episodes(), storage[:]
    storage.close()
    again = make(tmp_path, 4)
    again.validate()
    assert_same(again[:], rows)
    assert_same(again.episodes.episodes(), lengths)
    again.empty()
    again.close()
    once_more = make(tmp_path, 4)
    assert len(once_more) == 0
    write(once_more, 3)
    once_more.validate()
    # Steps never start again.
    assert once_more[:]["observation"][:, 0].tolist() == [9] * 4 + [10] * 4 + [11] * 4


def test_rows_are_never_changed_in_place(tmp_path):
    storage = make(tmp_path)
    write(storage, 30)
    expected = storage[:]
    slots = storage.episodes.slots_by_age(torch.arange(3))
    for change in (
        lambda: storage.__setitem__("observation", expected["observation"] + 100),
        lambda: storage.storage.set(slots, storage[slots], set_cursor=False),
    ):
        with pytest.raises(RuntimeError, match="never changed in place"):
            change()
    assert_same(storage[:], expected)


def test_states_loaded_into_a_directory(tmp_path):
    source = ReplayStorage(
        storage=PackedStorage(24), writer=EpisodeWriter(), sampler=PERSampler(24), batch_size=8
    )
    write(source, 30)
    target = make(tmp_path / "state")
    write(target, 3)
    target.load_state_dict(source.state_dict())
    source.dumps(tmp_path / "dump")
    other = make(tmp_path / "loaded")
    other.loads(tmp_path / "dump")
    for storage, path in ((target, "state"), (other, "loaded")):
        storage.close()
        again = make(tmp_path / path)
        found(again)
        assert_same(again[:], source[:])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_reads_what_is_written(tmp_path, copied):
    storage = make(tmp_path)
    write(storage, 30)
    rows, whole = copied(storage.storage), copied(storage)
    assert_same(whole[:], storage[:])
    write(storage, 5)
    assert_same(whole[:], storage[:])
    rows.refresh()
    assert torch.equal(rows.episodes.num_steps_written, storage.episodes.num_steps_written)
    assert not is_torn(whole.sample()).any()
    for act in (
        lambda: write(whole, 1),
        whole.empty,
        whole.end_episodes,
        lambda: whole.load_state_dict(storage.state_dict()),
        lambda: rows.set([0], storage[:1]),
    ):
        with pytest.raises(RuntimeError, match="reading"):
            act()


def test_stock_writers_may_not_make_a_directory(tmp_path):
    buffer = TensorDictReplayBuffer(
        storage=PackedStorage(24, scratch_dir=tmp_path / "rows"), writer=RoundRobinWriter()
    )
    with pytest.raises(RuntimeError, match="EpisodeWriter"):
        buffer.extend(steps_of_an_episode(0, 10))
    assert not (tmp_path / "rows").exists()


def test_stock_writers_may_not_spoil_episodes(tmp_path):
    storage = make(tmp_path)
    write(storage, 3)
    storage.close()
    rows = PackedStorage(24, scratch_dir=tmp_path)
    buffer = TensorDictReplayBuffer(storage=rows, writer=RoundRobinWriter())
    with pytest.raises(RuntimeError, match="EpisodeWriter"):
        buffer.extend(steps_of_an_episode(0, 2))
    buffer.storage.close()
    found(make(tmp_path))


SPACES = Box(-1, 1, (3,)), Discrete(2)


@pytest.mark.parametrize(
    "kind", [UniformReplayStorage, PrioritizedReplayStorage, NStepReplayStorage]
)
def test_ready_made_storages_go_on(tmp_path, kind):
    def build():
        return kind(*SPACES, storage_size=50, batch_size=8, path=tmp_path / "rows", seed=0)

    storage = build()
    for step in range(70):
        seen = np.full(3, step + 10 * (step // 9), np.float32)
        storage.record(seen, 1, step / 2, step % 9 == 8, False, {}, seen + 1)
    storage.close()
    again = build()
    assert len(again) == 50
    again.validate()
    assert_same(
        storage.sample().exclude("priority_stamp"), again.sample().exclude("priority_stamp")
    )
    again.record(seen + 1, 1, 0.0, True, False, {}, seen + 2)
    assert again[-1:]["observation"][0, 0] == seen[0] + 1
    assert again.episodes.episodes()["length"][-1] == 70 % 9 + 1
    with pytest.raises(TypeError, match="path="):
        kind.open(tmp_path / "rows")


def test_an_index_of_many_rows_is_rebuilt_at_once(tmp_path):
    size = 1_000_000
    storage = ReplayStorage(storage=PackedStorage(size, scratch_dir=tmp_path), batch_size=8)
    steps = torch.arange(size + 5)
    storage.extend(
        TensorDict({"step": steps, "next": {"done": (steps % 50 == 49)[:, None]}}, [size + 5])
    )
    storage.storage.directory.abandon()
    begin = time.process_time()
    again = PackedStorage(size, scratch_dir=tmp_path)
    # Far below what a loop over rows would take; the benchmark has the figure.
    assert time.process_time() - begin < 5
    assert len(again) == size
    assert torch.equal(again.episodes.cursors, storage.episodes.cursors)
    slots = torch.randint(size, (1000,), generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(
        again.episodes.extent(slots), storage.episodes.extent(slots), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_closed_storages_still_show_their_rows(tmp_path):
    storage = make(tmp_path)
    write(storage, 9)
    storage.close()
    storage.close()
    assert not is_torn(storage.sample()).any()
    with pytest.raises(RuntimeError, match="closed"):
        write(storage, 1)
    make(tmp_path).close(keep=False)
    assert not tmp_path.exists()


def test_in_memory_there_is_nothing_to_do():
    storage = ReplayStorage(storage=PackedStorage(8), batch_size=4)
    write(storage, 3)
    storage.flush()
    storage.close()
    write(storage, 3)
    with pytest.raises(RuntimeError, match="path="):
        storage.loader()


def test_a_closed_storage_stays_as_it_was(tmp_path):
    storage, history = make(tmp_path, 1, 12), History(1, 12)
    act = acts.write(history, 30)
    act.do(storage)
    state = storage.state_dict()
    storage.close()
    storage.close()
    for change in (
        storage.empty,
        lambda: storage.empty(keep_steps=3),
        storage.end_episodes,
        lambda: acts.write(act.after, 1).do(storage),
        lambda: storage.load_state_dict(state),
        lambda: storage.close(keep=False),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            change()
        assert found(storage) == act.after.live
        assert not is_torn(storage.sample()).any()
    storage = make(tmp_path, 1, 12)
    assert found(storage) == act.after.live


def test_a_write_that_failed_is_undone(tmp_path):
    storage, history = make(tmp_path, 1, 12), History(1, 12)
    act = acts.write(history, 5)
    act.do(storage)
    with mock.patch.object(Directory, "seal", side_effect=MemoryError), pytest.raises(MemoryError):
        acts.write(act.after, 3).do(storage)
    assert found(storage) == act.after.live
    act = acts.write(act.after, 2)
    act.do(storage)
    storage.close()
    assert found(make(tmp_path, 1, 12)) == act.after.live
