"""The parts of this package in TorchRL's buffers, and TorchRL's parts in a ReplayStorage."""

from collections import Counter

import pytest
import torch
from goal_data import HISTORIES, AsDrawn, distance_reward, episode_flags, write
from oracles import RingOracle
from scipy import stats
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.envs.transforms import Compose

from trl_storages.replay import ReplayStorage
from trl_storages.rows import PackedStorage
from trl_storages.samplers import ERESampler, HERSampler, PERSampler, UniformSampler
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.writing import EpisodeWriter

STORAGES = [PackedStorage, LazyTensorStorage, LazyMemmapStorage]
SAMPLERS = {
    "uniform": lambda capacity: UniformSampler(),
    "recency": lambda capacity: ERESampler(0.999, c_min=5),
    "priorities": lambda capacity: PERSampler(capacity),
    "hindsight": lambda capacity: HERSampler(),
    "hindsight over recency": lambda capacity: HERSampler(base=ERESampler(0.999, c_min=5)),
    "hindsight over priorities": lambda capacity: HERSampler(base=PERSampler(capacity)),
}
each_storage = pytest.mark.parametrize("storage_type", STORAGES)
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
each_wrapped_history = pytest.mark.parametrize(
    "history", [HISTORIES["wrapped"], HISTORIES["lanes of unequal fill"]], ids=["one lane", "lanes"]
)
each_history = pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)


def make(kind, history, sampler, storage_type=PackedStorage, **kwargs):
    kwargs.setdefault("writer", EpisodeWriter(history.num_envs))
    return kind(
        storage=storage_type(history.capacity),
        sampler=sampler,
        generator=torch.Generator().manual_seed(0),
        **kwargs,
    )


class TestInAStockBuffer:
    @each_wrapped_history
    @each_storage
    @each_sampler
    def test_rows_are_drawn_that_live(self, history, storage_type, sampler):
        buffer = make(TensorDictReplayBuffer, history, sampler(history.capacity), storage_type)
        live = history.write(buffer).live()
        for _ in range(3):
            batch = buffer.sample(64)
            drawn = [live[slot] for slot in batch["index"].tolist()]
            assert batch["observation"][:, 1].tolist() == [row.lane for row in drawn]
            assert batch["action"].tolist() == [row.payload * 10 + row.lane for row in drawn]

    @each_history
    def test_uniformly(self, history):
        """Where TorchRL's own sampler takes lanes of unequal fill for rows."""
        buffer = make(TensorDictReplayBuffer, history, UniformSampler())
        live = history.write(buffer).live()
        counts = Counter(buffer.sample(100 * len(live))["index"].tolist())
        assert set(counts) == set(live)
        if len(live) > 1:
            assert stats.chisquare(list(counts.values())).pvalue > 1e-4

    @each_sampler
    def test_prefetch(self, sampler):
        history = HISTORIES["lanes"]
        buffer = make(
            TensorDictReplayBuffer, history, sampler(history.capacity), prefetch=2, batch_size=64
        )
        live = history.write(buffer).live()
        for _ in range(5):
            assert set(buffer.sample()["index"].tolist()) <= set(live)
        buffer.shutdown()

    @each_sampler
    def test_without_tensordicts_around_it(self, sampler):
        """A plain ReplayBuffer hands the sampler's entries out beside the batch."""
        history = HISTORIES["wrapped"]
        buffer = make(ReplayBuffer, history, sampler(history.capacity))
        live = history.write(buffer).live()
        batch, info = buffer.sample(64, return_info=True)
        assert [live[slot].payload * 10 for slot in info["index"].tolist()] == batch[
            "action"
        ].tolist()

    @each_storage
    @pytest.mark.parametrize("wrap", [lambda sampler: sampler, lambda it: ERESampler(1.0, base=it)])
    def test_the_loop_of_prioritized_replay(self, storage_type, wrap):
        history = HISTORIES["wrapped"]
        per = PERSampler(history.capacity, alpha=1.0, beta=1.0)
        buffer = make(TensorDictReplayBuffer, history, wrap(per), storage_type)
        live = history.write(buffer).live()
        for _ in range(20):
            batch = buffer.sample(64)
            # A stock buffer passes priorities on to prioritized samplers only, not through others.
            per.update_priority(
                batch["index"], (batch["index"] + 1).float(), storage=buffer.storage
            )
        slots = torch.tensor(sorted(live))
        assert torch.equal(per.priorities[slots], (slots + 1).float())
        drawn = Counter(buffer.sample(20_000)["index"].tolist())
        expected = (slots + 1) / (slots + 1).sum() * 20_000
        assert stats.chisquare([drawn[slot] for slot in slots.tolist()], expected).pvalue > 1e-4

    def test_update_tensordict_priority(self):
        history = HISTORIES["wrapped"]
        buffer = make(TensorDictReplayBuffer, history, PERSampler(history.capacity))
        history.write(buffer)
        batch = buffer.sample(64)
        batch["td_error"] = (batch["index"] + 1).float()
        buffer.update_tensordict_priority(batch)
        drawn = batch["index"].unique()
        assert torch.equal(buffer.sampler.priorities[drawn], (drawn + 1).float())

    @pytest.mark.native
    @each_storage
    def test_in_the_prioritized_buffer_s_place(self, storage_type):
        """What a loop over TensorDictPrioritizedReplayBuffer does, it does over ours."""
        history = HISTORIES["just full"]
        sampler = PERSampler(13, alpha=0.7, beta=0.5, normalize="storage")
        ours = ReplayStorage(storage=storage_type(13), sampler=sampler)
        stock = TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=LazyTensorStorage(13)
        )
        weights = []
        for buffer in (ours, stock):
            history.write(buffer)
            for _ in range(30):
                batch = buffer.sample(64)
                batch["td_error"] = (batch["index"] + 1).float()
                buffer.update_tensordict_priority(batch)
            batch = buffer.sample(2000)
            pairs = zip(batch["index"].tolist(), batch["priority_weight"].tolist(), strict=True)
            weights.append(dict(pairs))
        assert weights[0].keys() == weights[1].keys() == set(range(13))
        for slot, weight in weights[0].items():
            assert weight == pytest.approx(weights[1][slot], rel=1e-5)

    @each_storage
    def test_a_stock_writer(self, storage_type):
        """Without episodes there are still uniform draws, priorities and packed rows."""
        for sampler in (UniformSampler(), PERSampler(17), RandomSampler()):
            history = HISTORIES["wrapped"]
            writer = TensorDictRoundRobinWriter()
            buffer = make(TensorDictReplayBuffer, history, sampler, storage_type, writer=writer)
            live = history.write(buffer).live()
            assert set(buffer.sample(2000)["index"].tolist()) == set(live)

    def test_a_storage_without_tensors(self):
        with pytest.raises(TypeError, match=r"LazyTensorStorage.*ListStorage"):
            TensorDictReplayBuffer(storage=ListStorage(8), writer=EpisodeWriter())


class TestStockPartsInAReplayStorage:
    @each_wrapped_history
    @each_storage
    @pytest.mark.parametrize(
        "sampler", [HERSampler, lambda: HERSampler(base=ERESampler(0.999, c_min=5))]
    )
    def test_hindsight_over_n_steps_on_any_storage(self, history, storage_type, sampler):
        """Goals, rewards and next rows are the model's, whatever the rows lie in."""
        buffer = make(
            ReplayStorage,
            history,
            sampler(),
            storage_type,
            transform=Compose(GoalRelabel(distance_reward), NStep(3, 0.5)),
        )
        oracle = history.write(buffer)
        live = oracle.live()
        batch = buffer.sample(64)
        for sample in batch:
            row, goal_row = live[int(sample["index"])], live[int(sample["goal_index"])]
            window = [other for other in oracle.episode(row) if other.step >= row.step][:3]
            assert sample["steps_to_next_obs"] == len(window)
            assert sample["next", "observation"][0] == window[-1].payload + 1
            assert sample["next", "done"] == window[-1].done
            if sample["her_mask"]:
                assert goal_row in oracle.goals(row, "future")
                expected = torch.tensor([goal_row.lane, goal_row.payload, 1.0])
                assert torch.equal(sample["desired_goal"], expected)

    def test_without_replacement(self):
        history = HISTORIES["just full"]
        buffer = make(ReplayStorage, history, SamplerWithoutReplacement())
        history.write(buffer)
        batches = [batch["index"] for batch in buffer.batches(3, 5)]
        assert sorted(torch.cat(batches).tolist()) == list(range(13))

    def test_hindsight_without_replacement(self):
        """The last batch of an epoch is smaller, and relabelled by the same ratio."""
        history = HISTORIES["just full"]
        sampler = HERSampler(num_goals=1, base=SamplerWithoutReplacement())
        buffer = make(ReplayStorage, history, sampler, transform=GoalRelabel(distance_reward))
        history.write(buffer)
        batches = list(buffer.batches(3, 5))
        assert [len(batch) for batch in batches] == [5, 5, 3]
        assert [int(batch["her_mask"].sum()) for batch in batches] == [2, 2, 1]

    def test_an_iteration_ends_with_the_epoch(self):
        for sampler in (SamplerWithoutReplacement(), HERSampler(base=SamplerWithoutReplacement())):
            history = HISTORIES["just full"]
            buffer = make(
                ReplayStorage,
                history,
                sampler,
                batch_size=5,
                transform=AsDrawn(),
            )
            history.write(buffer)
            for _ in range(2):
                assert sorted(torch.cat([batch["index"] for batch in buffer]).tolist()) == list(
                    range(13)
                )

    @pytest.mark.native
    def test_stock_priorities(self):
        history = HISTORIES["just full"]
        sampler = HERSampler(base=PrioritizedSampler(13, 1.0, 1.0))
        buffer = make(ReplayStorage, history, sampler, transform=GoalRelabel(distance_reward))
        history.write(buffer)
        batch = buffer.sample(64)
        assert {"priority_weight", "goal_index"} <= set(batch.keys())

    def test_hindsight_over_slices(self):
        with pytest.raises(TypeError, match="EpisodeSequence"):
            HERSampler(base=SliceSampler(num_slices=2))

    @each_storage
    def test_samplers_take_turns(self, storage_type):
        """A sampler that comes later takes in the rows that are there."""
        history = HISTORIES["lanes"]
        buffer = make(ReplayStorage, history, RandomSampler(), storage_type, transform=AsDrawn())
        live = history.write(buffer).live()
        for sampler in (PERSampler(26), UniformSampler(), ERESampler(0.999), HERSampler()):
            buffer.set_sampler(sampler)
            assert set(buffer.sample(2000)["index"].tolist()) == set(live)


def test_a_storage_shared_by_two_buffers():
    """Both see the rows and the episodes; the one that writes has the writer."""
    storage = PackedStorage(20)
    first = ReplayStorage(storage=storage, batch_size=8)
    second = ReplayStorage(
        storage=storage,
        sampler=HERSampler(),
        transform=GoalRelabel(distance_reward),
        batch_size=8,
    )
    write(first, RingOracle(20), [episode_flags([4, 3])])
    assert second.episodes is first.episodes
    assert len(second) == 7
    assert set(second.sample(500)["index"].tolist()) == set(range(7))
