"""What a user meets in the first days, beside what the guides show."""

from enum import Enum

import gymnasium
import numpy as np
import pytest
import torch
from contract.make import library, make
from gymnasium.spaces import Box, Discrete
from torchrl.data import Composite, Unbounded
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from trl_storages.datasets import from_arrays

Strategy = Enum("Strategy", {"FUTURE": 0})


def one(value):
    return np.full(1, value, np.float32)


def filled(name="Uniform", num_steps=6, infos=None, **options):
    spaces, options = (Box(-9, 9, (1,)), Discrete(2)), {"storage_size": 20, **options}
    storage = getattr(library, f"{name}ReplayStorage")(*spaces, **{"batch_size": 4, **options})
    for at in range(num_steps):
        storage.record(one(at), 0, 1.0, False, at == num_steps - 1, infos or {}, one(at + 1))
    return storage


@pytest.mark.parametrize("options", [{}, {"n_step": 3, "alpha": 0.5}])
def test_torchs_default_device_may_be_another(options):
    with torch.device("meta"):
        storage = filled(**options, discount=0.8)
        storage.extend(storage[0:2])
        batch = storage.sample()
        storage.update_priority([1], batch["index"][0])
        storage.explain(batch)
        storage.sample_episodes(2)
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"cpu"}


@pytest.mark.parametrize("name", ["alpha", "beta", "eps", "eta"])
def test_schedulers_reach_the_samplers_below(name):
    storage = make("all")
    scheduler = LinearScheduler(storage, name, final_value=1.0, num_steps=1)
    scheduler.step()
    assert getattr(storage, name) == 1


def test_an_info_and_its_next_value():
    field = torch.float32, [1]
    storage = filled(
        extra_fields={"state": field, ("next", "state"): field},
        infos={"state": one(5), "next": {"state": one(6)}},
    )
    assert storage[0]["state"] == 5
    assert storage[0]["next", "state"] == 6
    with pytest.raises(KeyError, match=r"next\.state"):
        storage.record(one(0), 0, 1.0, False, False, {"state": one(5)}, one(0))


AGENTS = {"agent_0": 0.0, "agent_1": 1.0}
NO_NUMBERS = {
    "rewards by agent": ({"rewards": AGENTS}, TypeError, r"'agent_1'.*extend\(\)"),
    "flags by agent": ({"terminateds": AGENTS}, TypeError, r"'agent_1'.*extend\(\)"),
    "an array of objects": ({"observations": np.array([None])}, TypeError, "numbers.*object"),
    "a tuple of shapes": ({"observations": (one(0), np.ones(2))}, ValueError, "have one shape"),
}


@pytest.mark.parametrize("is_preset", [True, False])
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_steps_that_are_no_arrays_of_numbers_raise(name, is_preset):
    change, kind, answer = NO_NUMBERS[name]
    storage = library.ReplayStorage(storage=library.PackedStorage(20))
    if is_preset:
        num_envs = 2 if "terminateds" in change else 1  # which the flags are counted for
        storage = library.UniformReplayStorage(Box(-9, 9, (1,)), Discrete(2), num_envs=num_envs)
    step = {"observations": one(0), "actions": 0, "rewards": 0.0, "terminateds": False}
    step |= {"truncateds": False, "infos": {}, "next_observations": one(1)}
    with pytest.raises(kind, match=answer):
        storage.record(**{**step, **change})
    assert len(storage) == 0


def test_an_environment_that_resets_itself():
    env = gymnasium.wrappers.Autoreset(gymnasium.make("BitFlipping-v0", n_bits=3))
    storage, (before, _) = library.UniformReplayStorage.from_env(env), env.reset(seed=0)
    for _ in range(20):
        after, *rest, info = env.step(0)
        storage.record(before, 0, *rest, info, after)
        before = after
    assert (storage.episodes.table()["length"] <= 3).all()


def test_agents_keep_the_batch_sizes_of_their_specs():
    spec = Composite(agents=Composite(observation=Unbounded((2, 3)), shape=(2,)))
    rows = library.UniformReplayStorage(spec, Discrete(2))[:]
    assert rows["agents"].batch_size == rows["next", "agents"].batch_size == (0, 2)


def test_lanes_in_several_dimensions():
    storage = filled(num_envs=6, num_steps=0, storage_size=60)
    steps = filled(num_steps=4)[:].exclude("index")
    assert storage.extend(torch.stack([steps] * 6).reshape(2, 3, 4)).shape == (2, 3, 4)
    assert storage.extend(steps[0].expand(2, 3)).tolist() == [[4, 14, 24], [34, 44, 54]]


def test_other_files_beside_a_dump(tmp_path):
    other = tmp_path / "agent.pt"
    filled().dumps(tmp_path)
    other.touch()
    filled().dumps(tmp_path)
    library.ReplayStorage.open(tmp_path).close(keep=False)
    assert [*tmp_path.iterdir()] == [other]


@pytest.mark.parametrize("strategy", ["Future", Strategy.FUTURE, {Strategy.FUTURE: 1.0}])
def test_strategies_in_any_case_and_of_an_enumeration(strategy):
    assert library.HERSampler(strategy).strategy in ("future", {"future": 1.0})


def test_a_refused_attempt_leaves_the_directory_free(tmp_path):
    with pytest.raises(ValueError, match="batch_size") as kept:
        filled(path=tmp_path / "rows", batch_size=0)
    filled(path=tmp_path / "rows").close()
    data = {"obs": np.zeros(4), "acts": np.zeros(4), "rews": np.zeros(4), "dones": np.ones(4)}
    with pytest.raises(ValueError, match="with one environment"):
        from_arrays(data, path=tmp_path / "data", num_envs=2)
    assert kept.value
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["Uniform", "Prioritized", "ERE"])
def test_n_step_of_every_preset_can_be_set(name):
    storage = filled(name, discount=0.5)
    assert "steps_to_next_obs" not in storage.sample()
    storage.n_step, storage.discount = 6, 1.0
    batch = storage.sample(50)
    assert torch.equal(batch["next", "reward"], batch["steps_to_next_obs"].float())
    assert (batch["next", "observation"] == 6).all()
    storage.n_step = 1
    assert (storage.sample()["next", "reward"] == 1).all()


def test_num_envs_of_a_storage_of_components():
    storage = library.ReplayStorage(storage=library.PackedStorage(40), num_envs=4)
    assert storage.episodes.num_envs == storage.writer.num_envs == 4
    writer = library.EpisodeWriter(2)
    with pytest.raises(ValueError, match=r"num_envs must be that of the writer, 2, got 4"):
        library.ReplayStorage(storage=library.PackedStorage(40), num_envs=4, writer=writer)


def test_storage_size_is_rounded_up():
    storage = make("prioritized", lanes=3, size=100)
    assert storage.storage.max_size == 102


def test_small_things():
    storage = filled()
    storage.rewrite([0], {("next", "reward"): np.full((1, 1), 7, np.float32)})
    assert storage[0]["next", "reward"] == 7
    storage.end_episodes([])
    with pytest.raises(RuntimeError, match="empty"):
        library.ReplayStorage(storage=library.PackedStorage(9))[:]
