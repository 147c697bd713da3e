"""What users of TorchRL 0.14's `HERReplayBuffer` run into, by the same steps, without the bug.

Each test says what TorchRL does there.
"""

import pytest
import torch
from contract.lanes import Lanes, ends
from contract.make import make
from contract.steps import rows
from scipy import stats
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from trl_storages import HERSampler


def filled(size=20, **options):
    """A storage with four episodes of five steps, and what it holds."""
    storage, lanes = make("hindsight", size=size, **options), Lanes(size)
    lanes.write(storage, [ends([5, 5, 5, 5])])
    return storage, lanes


def test_a_full_buffer_fed_by_extend_and_sampled():
    """TorchRL: "Boolean value of Tensor with more than one value is ambiguous" once it is full."""
    storage, lanes = make("hindsight", size=100), Lanes(100)
    for start in range(0, 300, 10):
        lanes.write(storage, [[step % 7 == 6 for step in range(start, start + 10)]])
        assert {*lanes.of(storage.sample(64))} <= {*lanes.live()}
    assert storage.is_full


@pytest.mark.parametrize("strategy", ["final", "episode", "future"])
def test_no_goal_of_another_episode_after_wrap_around(strategy):
    """TorchRL, filled by `add`: a third of the goals of `final` and `episode` are another's."""
    storage, lanes = make("hindsight", size=50, strategy=strategy), Lanes(50)
    for flag in ends([7, 5, 11, 3] * 5, unfinished=4):
        storage.add(lanes.steps([[flag]])[0, 0])
    batch = storage.sample(256)
    batch = batch[batch["her_mask"]]
    assert len(batch) == 204
    goals = lanes.reaching(batch["desired_goal"])
    assert all(a.first == g.first for a, g in zip(lanes.of(batch), goals, strict=True))


def test_goals_are_what_steps_led_to():
    """TorchRL draws root achieved goals: 36 % were reached before, and the last one never comes."""
    storage, lanes = filled()
    batch = storage.sample(2000)
    assert not (batch["achieved_goal"] == batch["desired_goal"]).all(-1).any()
    goals = lanes.reaching(batch["desired_goal"][batch["her_mask"]])
    assert {*goals} == {*lanes.live()}


def test_a_batch_of_one_can_be_relabelled():
    """TorchRL: `int(1 * 0.8)` rows, none ever."""
    storage, _ = filled()
    hits = sum(storage.sample(1)["her_mask"].item() for _ in range(500))
    assert stats.binomtest(hits, 500, 0.8).pvalue > 1e-4


def test_goals_follow_the_generator_of_the_buffer():
    """TorchRL draws the goals from the global generator, whatever the buffer was given."""
    batches = []
    for global_seed in (1, 2):
        storage, _ = filled(seed=3)
        torch.manual_seed(global_seed)
        batches.append(storage.sample(64))
    assert torch.equal(batches[0]["desired_goal"], batches[1]["desired_goal"])


@pytest.mark.requirement("her-vector")
def test_goals_stay_in_their_environment():
    """TorchRL: with eight environments in one buffer, 86 % of the goals are another one's."""
    storage, lanes = make("hindsight", size=800, lanes=8), Lanes(800, 8)
    for start in range(0, 130, 10):
        steps = range(start, start + 10)
        lanes.write(storage, [[(step + lane) % 9 == 8 for step in steps] for lane in range(8)])
    batch = storage.sample(1000)
    batch = batch[batch["her_mask"]]
    goals = lanes.reaching(batch["desired_goal"])
    assert [goal.lane for goal in goals] == [step.lane for step in lanes.of(batch)]


def test_hindsight_without_an_episode_writer():
    """TorchRL fails deep inside a sample when the storage has two dimensions."""
    storage = LazyTensorStorage(10, ndim=2)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=HERSampler(), batch_size=4)
    buffer.extend(rows(Lanes(10).players[0].play([5, 5])).view(2, 5))
    with pytest.raises(TypeError, match="PackedStorage"):
        buffer.sample()
