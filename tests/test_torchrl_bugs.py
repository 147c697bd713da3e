"""What users of TorchRL 0.14's `HERReplayBuffer` run into, by the same steps, without the bug.

Each test says what TorchRL does there.
"""

import pytest
import torch
from goal_data import achieved_goals, distance_reward, episode_flags, goal_transitions, write
from oracles import RingOracle
from scipy import stats
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from trl_storages.packed import PackedStorage
from trl_storages.replay import ReplayStorage
from trl_storages.samplers import HERSampler
from trl_storages.transforms import GoalRelabel
from trl_storages.writing import EpisodeWriter


def make_buffer(capacity, num_envs=1, seed=0, **kwargs):
    return ReplayStorage(
        storage=PackedStorage(capacity),
        writer=EpisodeWriter(num_envs),
        sampler=HERSampler(**kwargs),
        transform=GoalRelabel(distance_reward),
        generator=torch.Generator().manual_seed(seed),
    )


def test_a_full_buffer_fed_by_extend_and_sampled():
    """TorchRL: "Boolean value of Tensor with more than one value is ambiguous" once it is full."""
    buffer, oracle = make_buffer(100), RingOracle(100)
    for start in range(0, 300, 10):
        write(buffer, oracle, [[step % 7 == 6 for step in range(start, start + 10)]])
        batch = buffer.sample(64)
        assert set(batch["index"].tolist()) <= set(oracle.live())
    assert buffer.is_full


@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_no_goal_of_another_episode_after_wrap_around(strategy):
    """TorchRL, filled by `add`: a third of the goals of `final` and `episode` are another's."""
    buffer, oracle = make_buffer(50, strategy=strategy), RingOracle(50)
    for flag in episode_flags([7, 5, 11, 3] * 5, unfinished=4):
        step = len(oracle.lanes[0])
        row = goal_transitions(torch.tensor(0), torch.tensor(step), torch.tensor(flag))
        buffer.add(row)
        oracle.append([[flag]])
    live, batch = oracle.live(), buffer.sample(256)
    mask = batch["her_mask"]
    assert mask.sum() == 204
    anchors = [live[slot] for slot in batch["index"][mask].tolist()]
    goals = [live[slot] for slot in batch["goal_index"][mask].tolist()]
    assert all(a.episode == g.episode for a, g in zip(anchors, goals, strict=True))
    assert torch.equal(batch["desired_goal"][mask], achieved_goals(goals))


def test_the_terminal_achieved_goal_is_reachable():
    """TorchRL draws root achieved goals, so that of the last state never comes."""
    buffer, oracle = make_buffer(20), RingOracle(20)
    write(buffer, oracle, [episode_flags([5, 5, 5, 5])])
    drawn = {tuple(goal) for goal in buffer.sample(2000)["desired_goal"].tolist()}
    for row in oracle.live().values():
        assert (0.0, float(row.step), 1.0) in drawn  # the next achieved goal of each row
        assert (0.0, float(row.step), 0.0) not in drawn  # the root one of none


def test_no_goal_was_reached_before_the_action():
    """TorchRL: 36 % of `future` goals are what the anchor had achieved already."""
    buffer = make_buffer(20)
    write(buffer, RingOracle(20), [episode_flags([5, 5, 5, 5])])
    batch = buffer.sample(2000)
    same = (batch["achieved_goal"] == batch["desired_goal"]).all(-1)
    assert not same.any()


def test_a_batch_of_one_can_be_relabelled():
    """TorchRL: `int(1 * 0.8)` rows, none ever."""
    buffer = make_buffer(20)
    write(buffer, RingOracle(20), [episode_flags([5, 5, 5, 5])])
    hits = sum(buffer.sample(1)["her_mask"].item() for _ in range(500))
    assert stats.binomtest(hits, 500, 0.8).pvalue > 1e-4


def test_goals_follow_the_generator_of_the_buffer():
    """TorchRL draws the goals from the global generator, whatever the buffer was given."""
    batches = []
    for global_seed in (1, 2):
        buffer = make_buffer(20, seed=3)
        write(buffer, RingOracle(20), [episode_flags([5, 5, 5, 5])])
        torch.manual_seed(global_seed)
        batches.append(buffer.sample(64))
    assert torch.equal(batches[0]["goal_index"], batches[1]["goal_index"])
    assert torch.equal(batches[0]["desired_goal"], batches[1]["desired_goal"])


@pytest.mark.requirement("her-vector")
def test_goals_stay_in_their_environment():
    """TorchRL: with eight environments in one buffer, 86 % of the goals are another one's."""
    buffer, oracle = make_buffer(800, num_envs=8), RingOracle(800, 8)
    for start in range(0, 130, 10):
        done = [[(step + lane) % 9 == 8 for step in range(start, start + 10)] for lane in range(8)]
        write(buffer, oracle, done)
    batch = buffer.sample(1000)
    batch = batch[batch["her_mask"]]
    goal_lanes, row_lanes = batch["desired_goal"][:, 0], batch["achieved_goal"][:, 0]
    assert torch.equal(goal_lanes, row_lanes)


class TestDimensions:
    """TorchRL fails deep inside a sample when the storage has two dimensions."""

    def test_hindsight_without_an_episode_writer(self):
        storage = LazyTensorStorage(10, ndim=2)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=HERSampler(), batch_size=4)
        lanes, steps = torch.meshgrid(torch.arange(2), torch.arange(5), indexing="ij")
        buffer.extend(goal_transitions(lanes, steps, steps == 4))
        with pytest.raises(TypeError, match="PackedStorage"):
            buffer.sample()
