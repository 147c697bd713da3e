"""A snapshot sees each part of a storage change."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from snapshots import assert_unchanged, snapshot
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler

from trl_storages import HERReplayStorage
from trl_storages.replay import ReplayStorage
from trl_storages.writing import EpisodeWriter

GOALS = spaces.Dict(
    {
        key: spaces.Box(-np.inf, np.inf, (2,), np.float32)
        for key in ("observation", "achieved_goal", "desired_goal")
    }
)


def written(**options):
    storage = HERReplayStorage(
        GOALS, spaces.Discrete(3), reward_fn=lambda a, *_: a[..., 0], storage_size=8, batch_size=4,
        alpha=0.6, eta=0.9, n_step=2, seed=1, autoreset_mode="NextStep", **options,
    )  # fmt: skip
    for step in range(3):
        record(storage, step)
    return storage


def record(storage, step, done=False):
    at = {key: np.full(2, step, np.float32) for key in GOALS}
    storage.record(at, 1, 0.5, done, False, {}, {key: value + 1 for key, value in at.items()})


CHANGES = {
    "rows": lambda it: it.storage.rows[7].fill_(1),
    "index.lanes": lambda it: it.episodes.end_episodes(),
    "index.host": lambda it: record(it, 3),
    "writer._write_count": lambda it: record(it, 3),
    "sampler.plain._strategy": lambda it: setattr(it.sampler, "strategy", "final"),
    "sampler.base.counts.update": lambda it: it.sample(),
    "sampler.base.base.state.priorities": lambda it: it.update_priority(
        torch.tensor([1]), torch.tensor([3.0])
    ),
    "sampler.base.base.stamps": lambda it: record(it, 3),
    "transforms[1].plain.discount": lambda it: setattr(it._transform[1], "discount", 0.1),
    "recorder.ended": lambda it: record(it, 3, done=True),
    "generator": lambda it: it.sample(),
    "default generator": lambda _: torch.rand(1),
    "batch_size": lambda it: setattr(it, "_batch_size", 5),
    "files": lambda it: (it.storage.scratch_dir / "new").touch(),
    "files.storage.1.rows": lambda it: record(it, 3),
    "files.storage.json": lambda it: (it.storage.scratch_dir / "storage.json").write_text(""),
}


@pytest.mark.parametrize("part", CHANGES)
def test_every_part_is_seen_to_change(part, tmp_path):
    storage = written(path=tmp_path / "rows")
    before = snapshot(storage)
    assert_unchanged(before, storage)
    CHANGES[part](storage)
    with pytest.raises(AssertionError, match=f"'{part}".replace("[", "\\[")):
        assert_unchanged(before, storage)


def test_batches_drawn_ahead_are_seen_to_change():
    storage = written(prefetch=2)
    storage.sample()
    before = snapshot(storage)
    storage.sample()
    with pytest.raises(AssertionError, match="drawn ahead"):
        assert_unchanged(before, storage)


@pytest.mark.native
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_over_stock_parts(kind):
    storage = ReplayStorage(
        storage=kind(8), sampler=PrioritizedSampler(8, 0.6, 0.4), writer=EpisodeWriter()
    )
    record(storage, 0)
    before = snapshot(storage)
    storage.update_priority(torch.tensor([0]), torch.tensor([3.0]))
    with pytest.raises(AssertionError, match="trees"):
        assert_unchanged(before, storage)
    storage.storage._storage["observation"][5] = 0  # the memory of unwritten rows holds anything
    before = snapshot(storage)
    storage.storage._storage["observation"][5] = 1
    with pytest.raises(AssertionError, match=r"rows\.observation"):
        assert_unchanged(before, storage)
