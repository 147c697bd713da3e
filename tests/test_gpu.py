"""On a real GPU: the recipes as a loop uses them, and draws in a captured graph."""

import numpy as np
import pytest
import torch
from goal_data import distance_reward, goal_transitions
from gymnasium import spaces
from on_gpu import assert_equal_on, noise_of_the_cpu, waiting_raises
from oracles import RingOracle
from torchrl.envs.transforms import Compose

from trl_storages import (
    EpisodeReplayStorage,
    EpisodeSequence,
    EpisodeWriter,
    EREReplayStorage,
    ERESampler,
    FrameStack,
    GoalRelabel,
    HERReplayStorage,
    HERSampler,
    NStep,
    NStepReplayStorage,
    PackedStorage,
    PERSampler,
    PrioritizedReplayStorage,
    ReplayStorage,
    UniformReplayStorage,
)

pytestmark = [pytest.mark.gpu, pytest.mark.requirement("devices")]

DEVICE = torch.device("cuda:0")
LANES, SIZE = 2, 60
FLAT = spaces.Box(-np.inf, np.inf, (4,), np.float32)
PIXELS = spaces.Box(0, 255, (4, 6, 6), np.uint8)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), FLAT))


def near(achieved_goal, desired_goal, transition):
    return -(achieved_goal - desired_goal).abs().sum(-1)


def goals(**options):
    return HERReplayStorage(GOALS, spaces.Discrete(9), reward_fn=near, **options)


def plain(kind, space=FLAT, **own):
    return lambda **options: kind(space, spaces.Discrete(9), **own, **options)


STACK = {"observation": FrameStack(4, 0)}
RECIPES = {
    "uniform": plain(UniformReplayStorage),
    "n-step": plain(NStepReplayStorage),
    "prioritized": plain(PrioritizedReplayStorage),
    "recency": plain(EREReplayStorage),
    "episodes": plain(EpisodeReplayStorage),
    "hindsight": goals,
    "all": lambda **options: goals(n_step=3, alpha=0.6, eta=0.997, c_min=10, **options),
    "shared": plain(NStepReplayStorage, share_next=True),
    "stacks": plain(NStepReplayStorage, PIXELS, frame_stack=STACK),
    "shared stacks": plain(PrioritizedReplayStorage, PIXELS, frame_stack=STACK, share_next=True),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


class Loop:
    """A stream of steps of a vector environment that resets in the next step, for `record`."""

    def __init__(self, recipe):
        self.goals = recipe in ("hindsight", "all")
        self.pixels = "stacks" in recipe
        self.step, self.random = 0, np.random.default_rng(0)
        self.observation = None

    def frame(self):
        return self.random.integers(0, 255, (LANES, 1, 6, 6)).astype(np.uint8)

    def reset(self):
        if self.pixels:
            return np.repeat(self.frame(), 4, 1)
        if self.goals:
            return {key: self.random.normal(size=(LANES, 4)).astype(np.float32) for key in GOALS}
        return self.random.normal(size=(LANES, 4)).astype(np.float32)

    def next(self):
        if self.pixels:
            return np.concatenate([self.observation[:, 1:], self.frame()], 1)
        return self.reset()

    def record(self, num_steps, *storages):
        for _ in range(num_steps):
            if self.observation is None:
                self.observation = self.reset()
            after = self.next()
            self.step += 1
            ends = np.full(LANES, self.step % 7 == 0)
            action, reward = self.random.integers(0, 9, LANES), self.random.normal(size=LANES)
            none = np.zeros(LANES, bool)
            for storage in storages:
                storage.record(self.observation, action, reward, ends, none, {}, after)
            self.observation = None if ends.any() else after


def make(recipe, device, **options):
    return RECIPES[recipe](
        storage_size=SIZE,
        num_envs=LANES,
        autoreset_mode="Disabled",
        batch_size=16,
        device=device,
        seed=0,
        **options,
    )


def leaves(batch):
    return dict(batch.items(True, True))


def learn(storage, batch):
    batch["td_error"] = (batch["index"] % 5 + 0.5).float()
    storage.update_tensordict_priority(batch)


def assert_same_batches(monkeypatch, expected, storage):
    batches = []
    for one in (expected, storage):
        drawn = []
        with noise_of_the_cpu(monkeypatch, 3):
            for _ in range(3):
                batch = one.sample()
                drawn.append(leaves(batch.clone()))
                learn(one, batch)
        batches.append(drawn)
    for one, other in zip(*batches, strict=True):
        assert_equal_on(other, one)


@each_recipe
@pytest.mark.parametrize("num_steps", [20, 80])
@pytest.mark.parametrize("on_disk", [False, True], ids=["there", "in a directory"])
def test_recorded_and_drawn(recipe, num_steps, on_disk, monkeypatch, tmp_path):
    """The batches of the CPU, for rows on the GPU and for those of a directory that are sent there."""
    expected, storage = (
        make(recipe, device, path=tmp_path / device if on_disk else None)
        for device in ("cpu", "cuda")
    )
    Loop(recipe).record(num_steps, expected, storage)
    assert_same_batches(monkeypatch, expected, storage)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "episodes"])
def test_draws_do_not_wait(recipe):
    storage = make(recipe, DEVICE)
    Loop(recipe).record(20, storage)
    learn(storage, storage.sample())
    with waiting_raises():
        for _ in range(3):
            learn(storage, storage.sample())


@each_recipe
@pytest.mark.parametrize("to", ["cpu", "cuda"])
def test_dumps_move_between_devices(recipe, to, tmp_path, monkeypatch):
    saved = make(recipe, "cuda" if to == "cpu" else "cpu")
    Loop(recipe).record(50, saved)
    saved.dumps(tmp_path / "dump")
    loaded = make(recipe, to)
    loaded.loads(tmp_path / "dump")
    loaded.validate()
    for key, value in leaves(saved[:]).items():
        assert torch.equal(loaded[:][key].cpu(), value.cpu()), key
    pair = (loaded, saved) if to == "cpu" else (saved, loaded)
    assert_same_batches(monkeypatch, *pair)


@each_recipe
def test_drawn_ahead(recipe):
    storage = make(recipe, DEVICE, prefetch=2)
    loop = Loop(recipe)
    loop.record(20, storage)
    for _ in range(20):
        batch = storage.sample()
        rows = storage[batch["index"].reshape(-1)]
        action = batch["action"].reshape(rows["action"].shape)
        assert torch.equal(action, rows["action"])
        learn(storage, batch)


def of_parts(num_envs, unit=None):
    return ReplayStorage(
        storage=PackedStorage(SIZE, device=DEVICE),
        writer=EpisodeWriter(num_envs, on_gap="ignore"),
        sampler=HERSampler(base=ERESampler(0.997, 10, base=PERSampler(SIZE))),
        transform=Compose(GoalRelabel(distance_reward), NStep(3, 0.9)),
        sample_unit=unit,
        batch_size=64,
        generator=torch.Generator(DEVICE).manual_seed(0),
    )


@pytest.mark.parametrize("unit", [None, EpisodeSequence(2, burn_in=1)], ids=["rows", "sequences"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_captured_graph_follows_the_storage(num_envs, unit):
    """Replays of one graph draw from the rows that are stored by then, while they grow and wrap."""
    storage, model = of_parts(num_envs, unit), RingOracle(SIZE, num_envs)

    def write(num_steps):
        first = len(model.lanes[0])
        steps = torch.arange(first, first + num_steps).expand(num_envs, -1)
        done = steps % 5 == 4
        lanes = torch.arange(num_envs).unsqueeze(1).expand_as(steps)
        data = goal_transitions(lanes, steps, done)
        storage.extend(data if num_envs > 1 else data[0])
        model.append(done.tolist(), None)

    write(7)
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            storage.sample()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(storage._rng)
    with torch.cuda.graph(graph):
        batch = storage.sample()
    for _ in range(15):
        write(4)
        seen = set()
        for _ in range(8):
            graph.replay()
            live = model.live()
            slots = batch["index"].reshape(-1).tolist()
            drawn = batch["observation"].reshape(-1, 4).tolist()
            for slot, (step, lane, *_) in zip(slots, drawn, strict=True):
                assert (live[slot].step, live[slot].lane) == (step, lane)
            seen.update(slots)
            at = batch["goal_index"].reshape(-1).tolist()
            for slot, goal in zip(slots, at, strict=True):
                assert live[goal].lane == live[slot].lane
                assert live[goal].step // 5 == live[slot].step // 5
        newest = {slot for slot, row in live.items() if row.step >= len(model.lanes[0]) - 2}
        assert newest & seen
