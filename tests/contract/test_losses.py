"""What TorchRL's losses learn towards, from batches as they are, against a loop over stored rows.

The value of a state is a known function of its observation, whatever the action, so that the target of
each loss can be written down: the folded reward, and gamma^m times the value of the last next state
unless that is terminal.
"""

import pytest
import torch
from contract.lanes import HISTORIES, Lanes, ends
from contract.make import assemble, library
from contract.model import assert_folded
from contract.steps import reward_fn, terminated_fn
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate

pytestmark = pytest.mark.requirement("n-step-target")

GAMMA = 0.9


def value(observation):
    """[..., 1]: what every network here says of a state."""
    return 100 + 3 * observation[..., :1] % 16


class Values(nn.Module):
    """Action values that are the same for each action."""

    def __init__(self, num_actions=1):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_actions))

    def forward(self, observation, action=None):
        return value(observation) * self.scale


class Halves(nn.Module):
    """A policy that answers the same in each state."""

    def __init__(self):
        super().__init__()
        self.answer = nn.Parameter(torch.tensor([0.5, 0.1]))

    def forward(self, observation):
        return self.answer.expand(*observation.shape[:-1], -1).split(1, -1)


def dqn():
    network = QValueActor(Values(3), in_keys=["observation"], action_space="categorical")
    return DQNLoss(network, action_space="categorical", delay_value=True)


def sac():
    actor = ProbabilisticActor(
        TensorDictModule(Halves(), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        default_interaction_type="random",
    )
    critic = ValueOperator(Values(), in_keys=["observation", "action"])
    # No reward for entropy, which would need the actions that the loss drew.
    options = {"alpha_init": 1e-12, "fixed_alpha": True, "target_entropy": 0.0}
    return SACLoss(actor, critic, num_qvalue_nets=2, **options)


LOSSES = {"DQN": dqn, "SAC": sac}
each_loss = pytest.mark.parametrize("name", LOSSES)


def targets(name, batch):
    """[B]: what the loss learns towards; its own estimator, listened to."""
    loss = LOSSES[name]()
    loss.make_value_estimator(gamma=GAMMA)
    SoftUpdate(loss, eps=0.9)  # Or the loss warns that its targets are never updated.
    estimator, heard = loss.value_estimator, []
    estimate = estimator.value_estimate

    def listen(*args, **kwargs):
        heard.append(estimate(*args, **kwargs))
        return heard[-1]

    estimator.value_estimate = listen
    batch = batch.clone()
    number = torch.arange(len(batch))
    batch["action"] = number % 3 if name == "DQN" else (number % 9 / 10).unsqueeze(-1)
    loss(batch)
    return heard[-1].reshape(-1)


@each_loss
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_targets_equal_a_plain_loop(name, history, n_step):
    """Terminals, time limits and newest rows, and goals that are reached on the way."""
    relabel = library.GoalRelabel(reward_fn, terminated_fn=terminated_fn, info_keys=["effort"])
    storage = assemble(
        history.size,
        history.lanes,
        sampler=library.HERSampler("future", 1),
        transform=[relabel, library.NStep(n_step, GAMMA)],
    )
    lanes = history.write(storage)
    batch = storage.sample(48)
    assert_folded(batch, lanes, n_step, GAMMA, terminated_fn)
    expected = []
    for row in batch:
        target, m = row["next", "reward"].item(), int(row.get("steps_to_next_obs", 1))
        if not row["next", "terminated"]:
            target += GAMMA**m * value(row["next", "observation"]).item()
        expected.append(target)
    torch.testing.assert_close(targets(name, batch), torch.tensor(expected), rtol=1e-5, atol=1e-2)


@each_loss
def test_by_hand(name):
    """Rewards of 1 in two episodes of three steps, the first ends for good, the second by time."""
    storage, lanes = assemble(6, transform=library.NStep(2, GAMMA)), Lanes(6)
    ones = torch.ones(1, 6, 1)
    lanes.write(storage, [ends([3, 3])], change=lambda data: data.set(("next", "reward"), ones))
    batch = storage.sample(60)
    found = dict(zip(lanes.of(batch), targets(name, batch).tolist(), strict=True))
    after = [value(torch.tensor([step.id + 1.0])).item() for step in lanes.lanes[0]]
    assert [found[step] for step in lanes.lanes[0]] == pytest.approx(
        [
            1.9 + 0.81 * after[1],  # It bootstraps two steps on.
            1.9,  # The second step is terminal.
            1.0,
            1.9 + 0.81 * after[4],
            1.9 + 0.81 * after[5],  # The time limit is no terminal state.
            1.0 + 0.9 * after[5],
        ],
        rel=1e-5,
    )
