"""Rows are recorded, extended and drawn on streams: against plain loops, and by an agent that learns."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose, RewardScaling
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from trl_storages.index import EpisodeIndex
from trl_storages.recorder import Recorder
from trl_storages.samplers import ERESampler, HERSampler, PERSampler
from trl_storages.storage import ReplayStorage
from trl_storages.transforms import GoalRelabel, NStep
from trl_storages.streams import DeviceRows, Layout
from trl_storages.streams.packed import PackedStorage

LENGTH, LANES, GAMMA = 17, 2, 0.9


def history(num_steps, start=0):
    """Returns steps `[LANES, S]` of episodes of `LENGTH`; root and next values differ, and reward too."""
    steps = torch.arange(start, start + num_steps).expand(LANES, -1)
    episode, lane = steps // LENGTH, torch.arange(LANES)[:, None]

    def seen(shift):
        place = torch.stack([episode, (steps % LENGTH + shift) // 2, lane + 0 * steps], -1).float()
        observation = (steps + episode + shift)[..., None] + 1000.0 * lane[..., None]
        return {
            "observation": observation.expand(-1, -1, 4),
            "achieved_goal": place,
            "desired_goal": torch.full_like(place, -1.0),
        }

    done = (steps % LENGTH == LENGTH - 1)[..., None]
    flags = {"done": done, "truncated": done, "terminated": torch.zeros_like(done)}
    reward = (steps[..., None] * 0.37 + lane[..., None]) % 1.3
    root = {**seen(0), "action": torch.zeros(LANES, num_steps, 2)}
    data = TensorDict({**root, "next": {**seen(1), **flags, "reward": reward}}, [LANES, num_steps])
    return data.clone()


def reward_of(achieved, goal, infos):
    return -((achieved - goal).abs().sum(-1) > 0.5).float()


def is_reached(achieved, goal, infos):
    return (achieved - goal).abs().sum(-1) < 0.5


def steps_of(storage, batch):
    """Returns which steps of their lanes were drawn, as long as they are there."""
    return storage.episodes.steps_of(batch["index"])


def on_device(storage, data):
    """Puts rows where those of a GPU are, on the CPU."""
    layout = Layout({key: (it.dtype, it.shape[2:]) for key, it in data.items(True, True)})
    storage.episodes = EpisodeIndex(storage.max_size, LANES)
    storage.rows = DeviceRows(layout, storage.episodes, torch.device("cpu"))
    storage.layout = layout
    return storage


@pytest.mark.parametrize("n_step", [1, 2, 5])
@pytest.mark.parametrize("terminated_fn", [None, is_reached], ids=["stored", "reached"])
@pytest.mark.parametrize("form", ["host", "device"])
def test_hindsight_and_n_step_are_what_a_loop_says(n_step, terminated_fn, form):
    data, rows = history(1000), PackedStorage(600, num_envs=LANES)
    relabel = GoalRelabel(reward_of, terminated_fn=terminated_fn)
    storage = ReplayStorage(
        storage=on_device(rows, data) if form == "device" else rows,
        sampler=HERSampler(),
        transform=Compose(relabel, NStep(n_step, GAMMA)),
        batch_size=500,
        generator=torch.Generator().manual_seed(1),
    )
    for first in range(0, 1000, 90):
        storage.extend(data[:, first : first + 90])
    batch, after = storage.sample(), data["next"]
    for i in range(len(batch)):
        lane, t = divmod(int(batch["index"][i]), 300)
        t, goal_row = int(steps_of(storage, batch)[i]), int(batch["goal_index"][i]) % 300
        [g] = [step for step in range(700, 1000) if step % 300 == goal_row]
        drawn = bool(batch["her_mask"][i])
        assert not drawn or (t <= g and t // LENGTH == g // LENGTH)
        goal = after["achieved_goal"][lane, g] if drawn else data["desired_goal"][lane, t]
        total, m, hit = 0.0, 0, False
        while True:
            achieved = after["achieved_goal"][lane, t + m]
            stored = float(after["reward"][lane, t + m])
            total += GAMMA**m * (float(reward_of(achieved, goal, {})) if drawn else stored)
            hit = drawn and terminated_fn is not None and bool(is_reached(achieved, goal, {}))
            m += 1
            if hit or after["done"][lane, t + m - 1] or m == n_step or t + m == 1000:
                break
        last = data[lane, t + m - 1]
        assert int(batch["steps_to_next_obs"][i]) == m
        assert float(batch["next", "reward"][i]) == pytest.approx(total, abs=1e-5)
        assert bool(batch["next", "terminated"][i]) == hit
        assert bool(batch["next", "done"][i]) == (hit or bool(last["next", "done"]))
        assert (batch["next", "truncated"][i] == last["next", "truncated"]).all()
        assert (batch["desired_goal"][i] == goal).all()
        assert (batch["next", "desired_goal"][i] == goal).all()
        assert (batch["observation"][i] == data["observation"][lane, t]).all()
        assert (batch["next", "observation"][i] == last["next", "observation"]).all()
        assert (batch["next", "achieved_goal"][i] == last["next", "achieved_goal"]).all()


def test_priorities_and_recency_pull_what_was_written():
    storage = ReplayStorage(
        storage=PackedStorage(200, num_envs=LANES),
        sampler=ERESampler(0.99, 20, updates_per_phase=10, base=PERSampler(200)),
        batch_size=64,
    )
    for first in range(0, 600, 30):
        storage.extend(history(30, first))
        for _ in range(3):
            batch = storage.sample()
            assert (steps_of(storage, batch) >= first + 30 - 100).all()
            storage.update_tensordict_priority(batch.set("td_error", torch.rand(64)))
    storage.empty(keep_steps=5)
    assert set(steps_of(storage, storage.sample(500)).tolist()) == set(range(595, 600))


def test_a_priority_of_a_replaced_row_is_skipped():
    storage = ReplayStorage(
        storage=PackedStorage(8, num_envs=LANES), sampler=PERSampler(8, eps=1e-9)
    )
    storage.extend(history(4))
    batch = storage.sample(64).set("td_error", torch.zeros(64))
    storage.extend(history(2, 4))
    storage.update_tensordict_priority(batch)
    assert set(steps_of(storage, storage.sample(500)).tolist()) == {4, 5}


def test_transforms_stand_behind_n_step():
    scaled = Compose(NStep(3, GAMMA), RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]))
    storage = ReplayStorage(storage=PackedStorage(100, num_envs=LANES), transform=scaled)
    storage.extend(history(40))
    assert (storage.sample(5)["next", "reward"] >= 0).all()
    storage = ReplayStorage(
        storage=PackedStorage(100, num_envs=LANES),
        transform=Compose(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]), NStep(3, GAMMA)),
    )
    storage.extend(history(40))
    with pytest.raises(RuntimeError, match="behind NStep"):
        storage.sample(5)


def arguments_of(step):
    """Returns a step as a loop over environments has it."""
    after = step["next"]
    seen = "observation", "achieved_goal", "desired_goal"
    flags = (after[key][:, 0].numpy() for key in ("reward", "terminated", "truncated"))
    before, behind = ({key: part[key].numpy() for key in seen} for part in (step, after))
    return before, step["action"].numpy(), *flags, {}, behind


def test_recorded_steps_are_those_that_are_extended():
    data = history(50)
    extended, recorded = (
        ReplayStorage(
            storage=PackedStorage(60, num_envs=LANES),
            recorder=Recorder(LANES, autoreset_mode="Disabled"),
        )
        for _ in range(2)
    )
    extended.extend(data)
    recorded.extend(data[:, :1])
    for step in range(1, 50):
        recorded.record(*arguments_of(data[:, step]))
    slots = extended.episodes.live_slots()
    rows = [it._storage.get(slots) for it in (extended, recorded)]
    assert (rows[0] == rows[1]).all()


def test_a_gap_is_cut_with_one_warning():
    storage = ReplayStorage(storage=PackedStorage(100, num_envs=LANES), transform=NStep(3, GAMMA))
    data = history(40)
    storage.extend(data[:, :5])
    with pytest.warns(UserWarning, match="is cut there"):
        storage.extend(data[:, 6:12])
    batch = storage.sample(200)
    steps = steps_of(storage, batch)
    ends = steps + batch["steps_to_next_obs"].squeeze(-1)
    assert not ((steps < 5) & (ends > 5)).any()


def test_an_agent_learns_from_a_collector():
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
    env.set_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    actor = QValueActor(
        TensorDictModule(net, ["observation"], ["action_value"]), spec=env.action_spec
    )
    greedy = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=2000)
    loss = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss.make_value_estimator(gamma=0.98)
    updater, optimizer = SoftUpdate(loss, tau=0.05), torch.optim.Adam(loss.parameters(), 2e-3)
    storage = ReplayStorage(storage=PackedStorage(4000), transform=NStep(3, 0.98), batch_size=128)
    collector = Collector(
        env,
        TensorDictSequential(actor, greedy),
        frames_per_batch=20,
        total_frames=4000,
        auto_register_policy_transforms=False,
    )
    lengths = []
    for data in collector:
        lengths += data["next", "step_count"][data["next", "done"]].tolist()
        storage.extend(data)
        greedy.step(20)
        for _ in range(4):
            loss(storage.sample())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            updater.step()
    collector.shutdown()
    assert len(storage) == 4000
    assert np.mean(lengths[:20]) < 40 < 80 < np.mean(lengths[-10:])
