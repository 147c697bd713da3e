"""An agent learns from what is drawn: bits are flipped with hindsight, and not without."""

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import library, make_for
from gymnasium.vector import AutoresetMode
from torch import nn

BITS, ENVS, GAMMA = 8, 8, 0.98
ALL = {"n_step": 3, "discount": GAMMA, "alpha": 0.6, "eta": 0.999, "c_min": 1000}


def as_input(seen):
    return torch.cat([torch.as_tensor(seen[key]) for key in ("observation", "desired_goal")], -1)


class Agent:
    """A small DQN with everything that goes on: networks, optimizer, storage, environments."""

    def __init__(self, num_goals=4, size=20_000, **options):
        self.envs = gymnasium.make_vec(
            "BitFlipping-v0",
            ENVS,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
            n_bits=BITS,
        )
        self.storage = make_for(
            self.envs,
            "hindsight",
            size=size,
            batch_size=128,
            reward_fn=library.gym_reward(gymnasium.make("BitFlipping-v0", n_bits=BITS)),
            terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1),
            num_goals=num_goals,
            **options,
        )
        torch.manual_seed(0)
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * BITS, 128), nn.ReLU(), nn.Linear(128, BITS))
            for _ in range(2)
        )
        q, target = self.networks
        target.load_state_dict(q.state_dict())
        self.optimizer = torch.optim.Adam(q.parameters(), 1e-3)

    def train(self, num_steps, seed=0):
        """Goes on; returns the share of the last episodes that it solves."""
        (q, target), storage, envs = self.networks, self.storage, self.envs
        random, (before, _) = np.random.default_rng(seed), envs.reset(seed=seed)
        storage.end_episodes()
        solved = []
        for step in range(num_steps):
            with torch.no_grad():
                greedy = q(as_input(before)).argmax(-1).numpy()
            explore = random.random(ENVS) < max(0.1, 1 - 2 * step / num_steps)
            actions = np.where(explore, random.integers(0, BITS, ENVS), greedy)
            after, reward, terminated, truncated, infos = envs.step(actions)
            storage.record(before, actions, reward, terminated, truncated, infos, after)
            done = terminated | truncated
            solved += terminated[done].tolist()
            before = envs.reset(options={"reset_mask": done})[0] if done.any() else after
            if storage.write_count <= 50 * ENVS:
                continue
            batch = storage.sample()
            with torch.no_grad():
                seen = as_input(batch["next"])
                value = target(seen).gather(1, q(seen).argmax(-1, keepdim=True))
                onward = GAMMA ** batch.get("steps_to_next_obs", 1)
                goal = batch["next", "reward"] + onward * value * ~batch["next", "terminated"]
            error = q(as_input(batch)).gather(1, batch["action"].reshape(-1, 1)) - goal
            weight = batch.get("priority_weight", 1)
            (weight * error.squeeze(-1).square()).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            storage.update_tensordict_priority(batch, error.detach().abs())
            for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.05)
        return np.mean(solved[-200:])

    def predictions(self):
        bits = torch.arange(2 ** (2 * BITS)).unsqueeze(1) >> torch.arange(2 * BITS) & 1
        with torch.no_grad():
            return self.networks[0](bits.float())


@pytest.mark.requirement("bit-flip")
def test_bits_are_flipped_with_hindsight_and_not_without():
    assert Agent(4).train(1000) > 0.8
    assert Agent(0).train(1000) < 0.2


@pytest.mark.requirement("hpne")
def test_all_parts_together_learn_too():
    assert Agent(**ALL).train(1000) > 0.8


@pytest.mark.requirement("save-load")
@pytest.mark.parametrize("size", [20_000, 240], ids=["filling", "wrapped"])
@pytest.mark.parametrize("form", ["directory", "state_dict"])
def test_training_goes_on_as_if_nothing_had_been(tmp_path, form, size):
    first, second = Agent(size=size, **ALL), Agent(size=size, **ALL)
    first.train(80)
    saved = [first.networks.state_dict(), first.optimizer.state_dict()]
    if form == "directory":
        first.storage.dumps(tmp_path / "rows")
    else:
        saved.append(first.storage.state_dict())
    torch.save(saved, tmp_path / "saved.pt")
    at_saving = first.predictions()
    first.train(40, seed=2)
    networks, optimizer, *rows = torch.load(tmp_path / "saved.pt")
    second.networks.load_state_dict(networks)
    second.optimizer.load_state_dict(optimizer)
    second.storage.load_state_dict(*rows) if rows else second.storage.loads(tmp_path / "rows")
    assert torch.equal(second.predictions(), at_saving)
    second.train(40, seed=2)
    assert torch.equal(second.predictions(), first.predictions())
    assert not torch.equal(second.predictions(), at_saving)
    assert (second.storage[:] == first.storage[:]).all()
    second.storage.validate()
