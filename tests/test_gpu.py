"""On a real GPU: the recipes as a loop uses them draw what they draw on the CPU, and wait for nothing."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gymnasium import spaces

from trl_storages import (
    EREReplayStorage,
    HERReplayStorage,
    NStepReplayStorage,
    PrioritizedReplayStorage,
    RandomCrop,
    UniformReplayStorage,
)

pytestmark = [pytest.mark.gpu, pytest.mark.requirement("devices")]

LANES, SIZE = 2, 60
FLAT = spaces.Box(-np.inf, np.inf, (4,), np.float32)
PIXELS = spaces.Box(0, 255, (4, 6, 6), np.uint8)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), FLAT))


def near(achieved_goal, desired_goal, transition):
    return -(achieved_goal - desired_goal).abs().sum(-1)


#: Class, space, further options.
RECIPES = {
    "uniform": (UniformReplayStorage, FLAT, {}),
    "n-step": (NStepReplayStorage, FLAT, {}),
    "prioritized": (PrioritizedReplayStorage, FLAT, {}),
    "recency": (EREReplayStorage, FLAT, {}),
    "hindsight": (HERReplayStorage, GOALS, {"reward_fn": near}),
    "all": (
        HERReplayStorage,
        GOALS,
        {"reward_fn": near, "n_step": 3, "alpha": 0.6, "eta": 0.997, "c_min": 10},
    ),
    "crops": (UniformReplayStorage, PIXELS, {"transform": RandomCrop(["observation"], 2)}),
    "stacks": (PrioritizedReplayStorage, PIXELS, {"frame_stack": 4, "n_step": 3}),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def make(recipe, device, **options):
    kind, space, own = RECIPES[recipe]
    return kind(
        *(space, spaces.Discrete(9)),
        storage_size=SIZE,
        num_envs=LANES,
        autoreset_mode="Disabled",
        batch_size=16,
        device=device,
        seed=0,
        **own,
        **options,
    )


def play(recipe, num_steps, *storages):
    """Records episodes of seven steps."""
    random, seen = np.random.default_rng(0), None
    space = RECIPES[recipe][1]

    def observe():
        if space is GOALS:
            return {key: random.normal(size=(LANES, 4)).astype(np.float32) for key in GOALS}
        if space is FLAT:
            return random.normal(size=(LANES, 4)).astype(np.float32)
        frame = random.integers(0, 255, (LANES, 1, 6, 6)).astype(np.uint8)
        return np.repeat(frame, 4, 1) if seen is None else np.concatenate([seen[:, 1:], frame], 1)

    for step in range(1, num_steps + 1):
        seen = observe() if seen is None else seen
        after, ends = observe(), np.full(LANES, step % 7 == 0)
        action, reward = random.integers(0, 9, LANES), random.normal(size=LANES)
        for storage in storages:
            storage.record(seen, action, reward, ends, ends & False, {}, after)
        seen = None if ends.any() else after


def learn(storage, batch):
    batch["td_error"] = (batch["index"] % 5 + 0.5).float()
    storage.update_tensordict_priority(batch)


def assert_same_batches(expected, storage):
    """To the last bit, but for floating point, whose powers and roots a GPU rounds in its way."""
    for _ in range(3):
        one, other = expected.sample(), storage.sample()
        for key, value in one.items(True, True):
            assert other[key].is_cuda, key
            torch.testing.assert_close(other[key].cpu(), value, rtol=1e-6, atol=1e-7)
        learn(expected, one)
        learn(storage, other)


@contextmanager
def waiting_raises():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that this mode of torch is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_recipe
@pytest.mark.parametrize("num_steps", [20, 80])
def test_recorded_and_drawn(recipe, num_steps):
    expected, storage = (make(recipe, device) for device in ("cpu", "cuda"))
    play(recipe, num_steps, expected, storage)
    assert_same_batches(expected, storage)


@pytest.mark.parametrize("recipe", ["uniform", "n-step", "recency", "hindsight", "crops"])
def test_draws_do_not_wait(recipe):
    storage = make(recipe, "cuda")
    play(recipe, 20, storage)
    storage.sample()
    with waiting_raises():
        for _ in range(3):
            storage.sample()


@each_recipe
@pytest.mark.parametrize("to", ["cpu", "cuda"])
def test_dumps_move_between_devices(recipe, to, tmp_path):
    saved, loaded = make(recipe, "cuda" if to == "cpu" else "cpu"), make(recipe, to)
    play(recipe, 50, saved)
    saved.dumps(tmp_path / "dump")
    loaded.loads(tmp_path / "dump")
    loaded.validate()
    for key, value in saved[:].items(True, True):
        assert torch.equal(loaded[:][key].cpu(), value.cpu()), key
    assert_same_batches(*((loaded, saved) if to == "cpu" else (saved, loaded)))


@each_recipe
def test_drawn_ahead(recipe):
    storage = make(recipe, "cuda", prefetch=2)
    play(recipe, 20, storage)
    for _ in range(20):
        batch = storage.sample()
        rows = storage[batch["index"].reshape(-1)]
        assert torch.equal(batch["action"].reshape(rows["action"].shape), rows["action"])
        learn(storage, batch)
