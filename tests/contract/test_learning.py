"""An agent learns from what is drawn: bits are flipped with hindsight, and not without."""

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import library, make_for
from gymnasium.vector import AutoresetMode
from torch import nn

BITS, ENVS, GAMMA = 8, 8, 0.98


def as_input(seen):
    return torch.cat([torch.as_tensor(seen[key]) for key in ("observation", "desired_goal")], -1)


def success_rate(num_goals, num_steps, **options):
    """Trains a small DQN; returns the share of the last episodes that it solves."""
    torch.manual_seed(0)
    envs = gymnasium.make_vec(
        "BitFlipping-v0",
        ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
        n_bits=BITS,
    )
    storage = make_for(
        envs,
        "hindsight",
        size=20_000,
        batch_size=128,
        reward_fn=library.gym_reward(gymnasium.make("BitFlipping-v0", n_bits=BITS)),
        terminated_fn=lambda achieved, desired, _: (achieved == desired).all(-1),
        num_goals=num_goals,
        **options,
    )
    q, target = (
        nn.Sequential(nn.Linear(2 * BITS, 128), nn.ReLU(), nn.Linear(128, BITS)) for _ in range(2)
    )
    target.load_state_dict(q.state_dict())
    optimizer, random = torch.optim.Adam(q.parameters(), 1e-3), np.random.default_rng(0)
    before, _ = envs.reset(seed=0)
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
        if step < 50:
            continue
        batch = storage.sample()
        with torch.no_grad():
            seen = as_input(batch["next"])
            value = target(seen).gather(1, q(seen).argmax(-1, keepdim=True))
            onward = GAMMA ** batch["steps_to_next_obs"] if "steps_to_next_obs" in batch else GAMMA
            goal = batch["next", "reward"] + onward * value * ~batch["next", "terminated"]
        error = q(as_input(batch)).gather(1, batch["action"].reshape(-1, 1)) - goal
        weight = batch.get("priority_weight", 1)
        (weight * error.squeeze(-1).square()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        storage.update_tensordict_priority(batch, error.detach().abs())
        for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.05)
    envs.close()
    return np.mean(solved[-200:])


@pytest.mark.requirement("bit-flip")
def test_bits_are_flipped_with_hindsight_and_not_without():
    assert success_rate(4, 1000) > 0.8
    assert success_rate(0, 1000) < 0.2


@pytest.mark.requirement("hpne")
def test_all_parts_together_learn_too():
    options = {"n_step": 3, "discount": GAMMA, "alpha": 0.6, "eta": 0.999, "c_min": 1000}
    assert success_rate(4, 1000, **options) > 0.8
