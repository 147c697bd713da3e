"""Uniform sampling: every live row as likely as any other, and no row that was never written."""

import pytest
import torch
from goal_data import HISTORIES, write
from oracles import RingOracle
from scipy import stats
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import UniformSampler
from trl_storages.writing import EpisodeWriter

pytestmark = pytest.mark.requirement("uniform-ring")


def make_buffer(capacity, num_envs=1, storage_type=PackedStorage, **kwargs):
    return ReplayStorage(
        storage=storage_type(capacity),
        writer=EpisodeWriter(num_envs),
        generator=torch.Generator().manual_seed(11),
        **kwargs,
    )


def counts(buffer, num_draws, batch_size=10_000):
    """How often each slot was drawn; draws of slots only, to make a million of them cheap."""
    drawn = torch.zeros(buffer.storage.max_size, dtype=torch.int64)
    for _ in range(num_draws // batch_size):
        index, _ = buffer.sampler.sample(buffer.storage, batch_size)
        drawn += torch.bincount(index, minlength=drawn.shape[0])
    return drawn


@pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage])
def test_a_full_ring(storage_type):
    buffer = make_buffer(1000, storage_type=storage_type)
    write(buffer, RingOracle(1000), [[False] * 1700])
    assert stats.chisquare(counts(buffer, 1_000_000)).pvalue > 1e-4


@pytest.mark.parametrize("storage_type", [PackedStorage, LazyTensorStorage])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_exactly_the_live_rows(history, storage_type):
    buffer = make_buffer(history.capacity, history.num_envs, storage_type)
    live = sorted(history.write(buffer).live())
    drawn = counts(buffer, 20_000)
    assert drawn.nonzero().squeeze(1).tolist() == live
    if len(live) > 1:
        assert stats.chisquare(drawn[live]).pvalue > 1e-4


def test_while_it_fills():
    buffer, oracle = make_buffer(12, num_envs=3), RingOracle(12, 3)
    for lanes in ([1], [0, 2], [1], [1], [0, 1, 2], [2], [2], [2]):
        write(buffer, oracle, [[False]] * len(lanes), lanes)
        batch = buffer.sample(200)
        assert set(batch["index"].tolist()) == set(oracle.live())
        live = oracle.live()
        steps = torch.tensor([live[slot].step for slot in batch["index"].tolist()])
        assert torch.equal(batch["observation"][:, 0], steps.float())


def test_lanes_of_very_unequal_fill():
    """One lane wrapped often, one holds a single row: each row is as likely as any other."""
    buffer, oracle = make_buffer(90, num_envs=3), RingOracle(90, 3)
    write(buffer, oracle, [[False]] * 3)
    write(buffer, oracle, [[False] * 100], [2])
    write(buffer, oracle, [[False] * 11], [0])
    live = sorted(oracle.live())
    drawn = counts(buffer, 200_000)
    assert drawn.nonzero().squeeze(1).tolist() == live
    assert stats.chisquare(drawn[live]).pvalue > 1e-4


def test_stock_samplers_over_packed_rows_draw_live_rows_only():
    """TorchRL's own sampler draws below the length, which unequal lanes reach beyond."""
    history = HISTORIES["a lane wrapped, the others not"]
    buffer = make_buffer(history.capacity, history.num_envs, sampler=RandomSampler())
    live = sorted(history.write(buffer).live())
    assert sorted(set(buffer.sample(2000)["index"].tolist())) == live


def test_over_a_stock_writer():
    """Without an episode index the rows are those below the length, as in TorchRL."""
    buffer = TensorDictReplayBuffer(storage=PackedStorage(10), sampler=UniformSampler())
    write(buffer, RingOracle(10), [[False] * 6])
    assert sorted(set(buffer.sample(500)["index"].tolist())) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("emptied", [False, True])
def test_an_empty_storage_says_what_is_missing(emptied):
    buffer = make_buffer(10)
    if emptied:
        write(buffer, RingOracle(10), [[False] * 6])
        buffer.empty()
    with pytest.raises(RuntimeError, match="write transitions"):
        buffer.sample(4)


def test_draws_follow_the_generator_of_the_buffer():
    batches = []
    for seed in (0, 1):
        buffer = make_buffer(50)
        write(buffer, RingOracle(50), [[False] * 50])
        torch.manual_seed(seed)
        batches.append(buffer.sample(64)["index"])
    assert torch.equal(*batches)
    buffer.set_rng(torch.Generator().manual_seed(99))
    assert not torch.equal(buffer.sample(64)["index"], batches[0])
