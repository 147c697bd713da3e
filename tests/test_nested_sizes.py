"""Nested TensorDicts keep their batch sizes, as TorchRL's storages keep them."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import Compose

from trl_storages import (
    EpisodeSequence,
    EpisodeWriter,
    GoalRelabel,
    HERSampler,
    NStep,
    PackedStorage,
    ReplayStorage,
)
from trl_storages.rows import Layout

pytestmark = [
    pytest.mark.requirement("many-agents"),
    # These rows are not those of a game.
    pytest.mark.filterwarnings("ignore:a row does not begin with the observation"),
]


def rows(*size):
    """Transitions of three agents, of which each has two arms."""

    def agents(value):
        arms = TensorDict({"force": torch.full((*size, 3, 2, 5), value)}, [*size, 3, 2])
        return TensorDict(
            {"observation": torch.full((*size, 3, 4), value), "arms": arms}, [*size, 3]
        )

    done = torch.zeros(*size, 1, dtype=torch.bool)
    done[..., -1, :] = True
    goals = torch.rand(*size, 2)
    return TensorDict(
        {
            "agents": agents(1.0),
            "desired_goal": goals,
            # Of one batch size with the rows.
            "camera": {"image": torch.zeros(*size, 3, 3)},
            "next": {
                "agents": agents(2.0),
                "achieved_goal": goals + 1,
                "desired_goal": goals,
                "reward": torch.ones(*size, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        size,
    )


def check(batch, *size):
    assert batch.batch_size == torch.Size(size)
    for part in (batch, batch["next"]):
        assert part["agents"].batch_size == torch.Size([*size, 3])
        assert part["agents", "arms"].batch_size == torch.Size([*size, 3, 2])
        assert part.batch_size == torch.Size(size)
    assert batch["camera"].batch_size == torch.Size(size)


def reward_fn(achieved, desired, transition):
    return torch.zeros(len(achieved))


WAYS = {
    "as stored": {},
    "n steps": {"transform": NStep(3)},
    "goals": {"sampler": HERSampler(), "transform": GoalRelabel(reward_fn)},
    "all": {"sampler": HERSampler(), "transform": Compose(GoalRelabel(reward_fn), NStep(3))},
    "ahead": {"prefetch": 1},
}


@pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("way", WAYS)
def test_in_batches(storage_type, way):
    storage = ReplayStorage(storage=storage_type(20), batch_size=16, **WAYS[way])
    storage.extend(rows(12))
    check(storage.sample(), 16)
    check(storage.sample().reshape(4, 4), 4, 4)


@pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage])
def test_in_everything_else(storage_type):
    storage = ReplayStorage(storage=storage_type(40), writer=EpisodeWriter(2), batch_size=6)
    storage.extend(rows(2, 12))
    storage.add(rows(2))
    check(storage[:], 26)
    check(storage[3], *[])
    # So many that a longest one is among them.
    check(storage.sample_episodes(30), 30, 12)
    check(next(iter(storage.batches(1))), 6)
    unit = EpisodeSequence(3)
    storage = ReplayStorage(storage=storage_type(40), sample_unit=unit, batch_size=6)
    storage.extend(rows(12))
    check(storage.sample().reshape(-1, 3), 6, 3)


def test_the_keys_of_a_writer_and_steps_one_by_one():
    keys = ["agents", "desired_goal", "camera", "next"]
    for options in ({}, {"keys": keys}):
        storage = ReplayStorage(
            storage=PackedStorage(20), writer=EpisodeWriter(**options), batch_size=6
        )
        for _ in range(3):
            storage.add(rows(1)[0])
        check(storage.sample(), 6)


def test_in_a_stock_buffer():
    buffer = TensorDictReplayBuffer(storage=PackedStorage(20), batch_size=16)
    buffer.extend(rows(12))
    check(buffer.sample(), 16)
    check(buffer[2:5], 3)
    check(buffer[:], 12)


def test_after_copies_saves_and_on_disk(tmp_path):
    storage = ReplayStorage(storage=PackedStorage(20), batch_size=16)
    storage.extend(rows(12))
    others = [ReplayStorage(storage=PackedStorage(20), batch_size=16) for _ in range(2)]
    others[0].load_state_dict(storage.state_dict())
    storage.dumps(tmp_path / "dump")
    others[1].loads(tmp_path / "dump")
    for other in (*others, pickle.loads(pickle.dumps(storage))):
        check(other.sample(), 16)

    written = ReplayStorage(storage=PackedStorage(20, scratch_dir=tmp_path / "rows"))
    written.extend(rows(12))
    reader = ReplayStorage.open(tmp_path / "rows", mode="r", batch_size=16)
    check(reader.sample(), 16)
    reader.close()
    written.close()
    again = ReplayStorage.open(tmp_path / "rows", batch_size=16)
    check(again.sample(), 16)
    again.close()


def test_the_layout_says_them():
    layout = Layout({("a", "b"): (torch.float32, (3, 2))}, ((("a",), torch.Size([3])),))
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.nested == layout.nested
    assert again.tensordict(torch.zeros(7, 3, dtype=torch.int64))["a"].batch_size == (7, 3)
