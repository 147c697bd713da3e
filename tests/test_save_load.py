"""Policy and storage are saved in the middle of training, and training goes on as if nothing had been."""

import gymnasium
import pytest
import torch
from torchrl.data import Categorical
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from trl_storages import HERReplayStorage, gym_reward

BITS = 5


class Training:
    """A DQN agent with everything that goes on: networks, optimizer, storage, environment."""

    def __init__(self):
        self.env = gymnasium.make("BitFlipping-v0", n_bits=BITS)
        options = {"alpha": 0.6, "eta": 0.99, "c_min": 20, "n_step": 2, "seed": 1}
        self.storage = HERReplayStorage.from_env(
            self.env, reward_fn=gym_reward(self.env), storage_size=60, batch_size=16, **options
        )
        network, keys = MLP(2 * BITS, BITS, num_cells=[16]), ["observation", "desired_goal"]
        kind = {"spec": Categorical(BITS), "action_space": "categorical"}
        self.actor = QValueActor(network, in_keys=keys, **kind)
        self.loss = DQNLoss(self.actor, action_space="categorical", delay_value=True)
        self.loss.make_value_estimator(gamma=0.98)
        self.target = SoftUpdate(self.loss, tau=0.05)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-2)

    def run(self, num_steps, seed):
        """Steps through the environment and learns after each step; it ends within an episode."""
        torch.manual_seed(seed)
        observation, _ = self.env.reset(seed=seed)
        self.storage.end_episodes()
        for _ in range(num_steps):
            action = int(torch.randint(BITS, ()))
            after, *outcome = self.env.step(action)
            self.storage.record(observation, action, *outcome, after)
            observation = self.env.reset()[0] if outcome[1] or outcome[2] else after
            batch = self.storage.sample()
            self.optimizer.zero_grad()
            self.loss(batch)["loss"].backward()
            self.optimizer.step()
            self.target.step()
            self.storage.update_tensordict_priority(batch)

    def predictions(self):
        bits = torch.arange(2 ** (2 * BITS)).unsqueeze(1) >> torch.arange(2 * BITS) & 1
        with torch.no_grad():
            return self.actor(*bits.float().split(BITS, 1))[1]


# TorchRL's losses and updaters warn about defaults of their own that are to change.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.requirement("save-load")
@pytest.mark.parametrize("form", ["directory", "state_dict"])
@pytest.mark.parametrize("num_steps", [33, 107], ids=["filling", "wrapped"])
def test_training_goes_on(tmp_path, form, num_steps):
    first, second = Training(), Training()
    first.run(num_steps, seed=0)
    saved = {"loss": first.loss.state_dict(), "optimizer": first.optimizer.state_dict()}
    if form == "directory":
        first.storage.dumps(tmp_path / "rows")
    else:
        saved["storage"] = first.storage.state_dict()
    torch.save(saved, tmp_path / "saved.pt")
    at_saving = first.predictions()
    first.run(40, seed=2)

    loaded = torch.load(tmp_path / "saved.pt")
    second.loss.load_state_dict(loaded["loss"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    if form == "directory":
        second.storage.loads(tmp_path / "rows")
    else:
        second.storage.load_state_dict(loaded["storage"])
    assert torch.equal(second.predictions(), at_saving)
    second.run(40, seed=2)
    assert torch.equal(second.predictions(), first.predictions())
    assert not torch.equal(second.predictions(), at_saving)
    assert (second.storage[:] == first.storage[:]).all()
    second.storage.validate()
