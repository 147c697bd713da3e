"""What TorchRL's losses learn towards, from batches as they are, against a loop over stored rows.

The value of a state is a known function of its observation, whatever the action, so that the target
of each loss can be written down: the folded reward, and γ^m times the value of the last next state
unless that is terminal.
"""

import pytest
import torch
from goal_data import HISTORIES, goal_transitions
from in_pairs import in_pairs
from n_step_oracle import fold
from oracles import RingOracle
from tensordict.nn import TensorDictModule
from tensordict.nn.probabilistic import InteractionType
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.transforms import MultiStepTransform
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import DDPGLoss, DQNLoss, SACLoss, SoftUpdate, TD3Loss

from trl_storages import EpisodeWriter, NStep, PackedStorage, ReplayStorage

pytestmark = pytest.mark.requirement("n-step-target")

GAMMA = 0.9


def value(observation):
    """[..., 1]: what every network here says of a state, from an observation [..., 4]."""
    return 100 + 3 * observation[..., :1] - 7 * observation[..., 1:2]


class Values(nn.Module):
    """Action values that are the same for each action, with a parameter for the loss to hold."""

    def __init__(self, num_actions=1):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_actions))

    def forward(self, observation, action=None):
        return value(observation) * self.scale


class Push(nn.Module):
    """A policy that answers the same in each state: `size` numbers."""

    def __init__(self, *answer):
        super().__init__()
        self.answer = nn.Parameter(torch.tensor(answer))

    def forward(self, observation):
        return self.answer.expand(*observation.shape[:-1], -1)


def continuous_actor():
    return TensorDictModule(Push(0.5), in_keys=["observation"], out_keys=["action"])


def critic():
    return ValueOperator(Values(), in_keys=["observation", "action"])


def dqn(**options):
    network = QValueActor(Values(3), in_keys=["observation"], action_space="categorical")
    return DQNLoss(network, action_space="categorical", delay_value=True, **options)


def ddpg():
    return DDPGLoss(continuous_actor(), critic(), delay_value=True)


def td3():
    return TD3Loss(continuous_actor(), critic(), bounds=(-1, 1), num_qvalue_nets=2)


def sac():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.push = Push(0.5, 0.1)

        def forward(self, observation):
            return self.push(observation).split(1, -1)

    actor = ProbabilisticActor(
        TensorDictModule(Halves(), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        default_interaction_type=InteractionType.RANDOM,
    )
    # No reward for entropy: it would need the actions that the loss drew.
    return SACLoss(
        actor, critic(), num_qvalue_nets=2, alpha_init=1e-12, fixed_alpha=True, target_entropy=0.0
    )


LOSSES = {
    "DQN": dqn,
    "double DQN": lambda: dqn(double_dqn=True),
    "DDPG": ddpg,
    "TD3": td3,
    "SAC": sac,
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def targets(loss, batch):
    """[B]: what the loss learns towards; its own computation, listened to."""
    loss.make_value_estimator(gamma=GAMMA)
    SoftUpdate(loss, eps=0.9)  # or the loss warns that its target networks are never updated
    estimator, heard = loss.value_estimator, []
    estimate = estimator.value_estimate

    def listen(*args, **kwargs):
        heard.append(estimate(*args, **kwargs))
        return heard[-1]

    estimator.value_estimate = listen
    loss(batch.clone())
    return heard[-1].reshape(-1)


def with_actions(data, name):
    """The same rows with actions of the kind that the loss knows."""
    steps = data["observation"][..., 0]
    data["action"] = steps.long() % 3 if "DQN" in name else (steps / 100).unsqueeze(-1)
    return data


def expected_targets(oracle, batch, n_steps):
    live, expected = oracle.live(), []
    for slot in batch["index"].tolist():
        row = live[slot]
        onward = [other for other in oracle.episode(row) if other.step >= row.step]
        folded, length = fold(onward, n_steps, GAMMA)
        target = folded["next", "reward"].item()
        if not folded["next", "terminated"]:
            target += GAMMA**length * value(folded["next", "observation"]).item()
        expected.append(target)
    return torch.tensor(expected)


def make_buffer(capacity, n_steps, num_envs=1):
    return ReplayStorage(
        storage=PackedStorage(capacity),
        writer=EpisodeWriter(num_envs),
        transform=NStep(n_steps, GAMMA),
        generator=torch.Generator().manual_seed(1),
        batch_size=64,
    )


class Renamed:
    """A buffer that gives what `goal_data` writes the actions of a loss."""

    def __init__(self, buffer, name):
        self.buffer, self.name, self.writer = buffer, name, self

    def extend(self, data, lanes=None):
        data = with_actions(data.clone(), self.name)
        if lanes is None:
            self.buffer.extend(data)
        else:
            self.buffer.writer.extend(data, lanes=lanes)


@in_pairs(name=[*LOSSES], history=[*HISTORIES], n_steps=[1, 3])
def test_targets_equal_a_plain_loop(name, history, n_steps):
    """Terminals, time limits and newest rows are in each history, wrap-around in most."""
    history = HISTORIES[history]
    buffer = make_buffer(history.capacity, n_steps, history.num_envs)
    oracle = history.write(Renamed(buffer, name))
    batch = buffer.sample()
    got = targets(LOSSES[name](), batch)
    # The rewards of the test data reach 10^3.
    torch.testing.assert_close(got, expected_targets(oracle, batch, n_steps), rtol=1e-5, atol=1e-2)


@each_loss
def test_targets_at_cuts(name):
    buffer, oracle, steps = make_buffer(30, 3), RingOracle(30), torch.arange(20)
    trajectory = torch.tensor([4] * 6 + [9] * 5 + [2] * 9)
    cut = [False, *(trajectory[1:] != trajectory[:-1]).tolist()]
    data = with_actions(goal_transitions(torch.zeros(20).long(), steps, steps < 0), name)
    data["collector", "traj_ids"] = trajectory
    buffer.extend(data)
    oracle.append([[False] * 20], [cut])
    batch = buffer.sample()
    got = targets(LOSSES[name](), batch)
    torch.testing.assert_close(got, expected_targets(oracle, batch, 3), rtol=1e-5, atol=1e-2)


@each_loss
def test_by_hand(name):
    """Rewards of 1 in two episodes of three steps, the first ends for good, the second by time."""
    buffer, steps = make_buffer(6, 2), torch.arange(6)
    data = with_actions(goal_transitions(torch.zeros(6).long(), steps, steps % 3 == 2), name)
    data["next", "reward"] = torch.ones(6, 1)
    assert data["next", "terminated"].flatten().tolist() == [0, 0, 1, 0, 0, 0]
    assert data["next", "truncated"].flatten().tolist() == [0, 0, 0, 0, 0, 1]
    buffer.extend(data)
    batch = buffer.sample()
    got = dict(zip(batch["index"].tolist(), targets(LOSSES[name](), batch).tolist(), strict=True))
    # The value of the state after step s is 100 + 3 (s + 1).
    assert got == pytest.approx(
        {
            0: 1.9 + 0.81 * 106,  # bootstraps two steps on
            1: 1.9,  # the second step is terminal
            2: 1.0,
            3: 1.9 + 0.81 * 115,
            4: 1.9 + 0.81 * 118,  # the time limit is no terminal state
            5: 1.0 + 0.9 * 118,
        },
        rel=1e-5,
    )


class TestMultiStepTransform:
    """TorchRL's own n-step transform, on the same ten rows in two episodes of five."""

    def rows(self):
        steps = torch.arange(10)
        data = with_actions(goal_transitions(torch.zeros(10).long(), steps, steps % 5 == 4), "DQN")
        data["next", "terminated"] = data["next", "done"].clone()
        data["next", "reward"] = torch.ones(10, 1)
        return data

    def first_steps(self, batch):
        return set(batch["observation"][:, 0].long().tolist())

    def test_it_bootstraps_past_terminals_and_holds_the_newest_rows_back(self):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20),
            transform=MultiStepTransform(3, GAMMA),
            batch_size=256,
        )
        buffer.extend(self.rows())
        batch = buffer.sample()
        assert self.first_steps(batch) == set(range(7))
        near = batch["observation"][:, 0] == 3
        # Two steps before the end: the loss adds the value of a state that nothing follows.
        assert not batch["next", "terminated"][near].any()
        got = targets(LOSSES["DQN"](), batch)
        assert (got[near] > 50).all()

    def test_here_neither_happens(self):
        buffer = make_buffer(20, 3)
        buffer.extend(self.rows())
        batch = buffer.sample(256)
        assert self.first_steps(batch) == set(range(10))
        for step in (3, 8):
            near = batch["observation"][:, 0] == step
            assert batch["next", "terminated"][near].all()
            got = targets(LOSSES["DQN"](), batch)
            assert torch.allclose(got[near], torch.tensor(1 + GAMMA))
