"""Policy and storage are saved in the middle of training, and training goes on as if nothing had been."""

from pathlib import Path

import gymnasium
import pytest
import torch
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from trl_storages import HERReplayStorage, gym_reward

BITS = 5


class Training:
    """A DQN agent with everything that goes on: networks, optimizer, storage, environment."""

    def __init__(self) -> None:
        self.env = gymnasium.make("BitFlipping-v0", n_bits=BITS)
        self.storage = HERReplayStorage(
            self.env.observation_space,
            self.env.action_space,
            reward_fn=gym_reward(self.env),
            storage_size=60,
            batch_size=16,
            alpha=0.6,
            eta=0.99,
            c_min=20,
            n_step=2,
            seed=1,
        )
        self.actor = QValueActor(
            MLP(2 * BITS, BITS, num_cells=[16]),
            in_keys=["observation", "desired_goal"],
            spec=Categorical(BITS),
            action_space="categorical",
        )
        self.loss = DQNLoss(self.actor, action_space="categorical", delay_value=True)
        self.loss.make_value_estimator(gamma=0.98)
        self.target = SoftUpdate(self.loss, tau=0.05)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-2)

    def run(self, num_steps: int, seed: int) -> None:
        """Steps through the environment and learns after each step; it ends within an episode."""
        torch.manual_seed(seed)
        observation, _ = self.env.reset(seed=seed)
        for _ in range(num_steps):
            action = int(torch.randint(BITS, ()))
            after, reward, terminated, truncated, info = self.env.step(action)
            self.storage.record(observation, action, reward, terminated, truncated, info, after)
            observation = self.env.reset()[0] if terminated or truncated else after
            self.update()
        # The next run begins another episode.
        self.storage.end_episodes()

    def update(self) -> None:
        batch = self.storage.sample()
        loss = self.loss(batch)["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.target.step()
        self.storage.update_tensordict_priority(batch)

    def predictions(self) -> torch.Tensor:
        bits = torch.arange(2 ** (2 * BITS)).unsqueeze(1) >> torch.arange(2 * BITS) & 1
        before, goal = bits.float().split(BITS, 1)
        with torch.no_grad():
            return self.actor(before, goal)[0], self.actor(before, goal)[1]

    def save(self, path: Path, form: str) -> None:
        parts = {"loss": self.loss.state_dict(), "optimizer": self.optimizer.state_dict()}
        if form == "directory":
            self.storage.dumps(path / "storage")
        else:
            parts["storage"] = self.storage.state_dict()
        torch.save(parts, path / "parts.pt")

    def load(self, path: Path, form: str) -> None:
        parts = torch.load(path / "parts.pt", weights_only=False)
        self.loss.load_state_dict(parts["loss"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if form == "directory":
            self.storage.loads(path / "storage")
        else:
            self.storage.load_state_dict(parts["storage"])


# TorchRL's losses and updaters warn about defaults of their own that are to change.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.requirement("save-load")
@pytest.mark.parametrize("form", ["directory", "state_dict"])
@pytest.mark.parametrize("num_steps", [33, 107], ids=["filling", "wrapped"])
def test_training_goes_on(tmp_path, form, num_steps):
    first = Training()
    first.run(num_steps, seed=0)
    first.save(tmp_path, form)
    at_saving = first.predictions()
    first.run(40, seed=2)

    second = Training()
    second.load(tmp_path, form)
    loaded = second.predictions()
    second.run(40, seed=2)

    assert all(torch.equal(a, b) for a, b in zip(loaded, at_saving, strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(second.predictions(), first.predictions(), strict=True)
    )
    # It did learn meanwhile, or equality would say nothing.
    assert not torch.equal(second.predictions()[1], at_saving[1])
    for own, other in zip(
        nn.Module.parameters(second.loss), nn.Module.parameters(first.loss), strict=True
    ):
        assert torch.equal(own, other)
    assert (second.storage[:] == first.storage[:]).all()
    second.storage.validate()
