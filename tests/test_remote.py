"""A storage in a Ray actor: other processes write, sample and report priorities, and nothing mixes."""

import gc
import os
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from mktestdocs import check_md_file
from ray_workers import Worker, priority_of
from tally_env import TallyEnv, check_batch, check_rows, reward
from tensordict import TensorDict
from torchrl.data import RayReplayBuffer

from trl_storages import (
    EpisodeWriter,
    GoalRelabel,
    HERReplayStorage,
    HERSampler,
    PackedStorage,
    ReplayStorage,
)
from trl_storages.buffer.remote import in_actor

ray = pytest.importorskip("ray", reason="holds storages that several machines share")

ROOT = Path(__file__).parents[1]
SPACES = TallyEnv.observation_space, TallyEnv.action_space
OPTIONS = {"reward_fn": reward, "storage_size": 60, "batch_size": 32, "alpha": 0.6, "seed": 0}


def steps(number: int, num_steps: int, first: int = 0) -> TensorDict:
    """[T] steps of one episode of the environment of that number."""
    step = torch.arange(first, first + num_steps)
    here = torch.stack([torch.full_like(step, number), torch.zeros_like(step), step], 1)
    names = "observation", "achieved_goal", "desired_goal"
    before, after = (
        dict(zip(names, (there, there, torch.zeros_like(there)), strict=True))
        for there in (here, here + torch.tensor([0, 0, 1]))
    )
    flags = dict.fromkeys(("done", "terminated", "truncated"), torch.zeros_like(step) > 0)
    after |= {key: flag.unsqueeze(1) for key, flag in flags.items()}
    after["reward"] = -torch.ones(num_steps, 1)
    return TensorDict({**before, "action": torch.zeros_like(step), "next": after}, [num_steps])


def actor(**options) -> HERReplayStorage:
    """What Ray makes in the actor's process."""
    return in_actor(HERReplayStorage)(*SPACES, delayed_init=False, **{**OPTIONS, **options})


def check_rows_of(storage, **options) -> None:
    """Checks the rows of a storage in an actor, here."""
    here = HERReplayStorage(*SPACES, **{**OPTIONS, **options})
    here.load_state_dict(storage.state_dict())
    check_rows(here)


class TestInTheActor:
    """What an actor does, in this process."""

    def test_sample_sends_one_block_and_where_each_tensor_is(self):
        storage = actor()
        storage.extend(steps(1, 40))
        message = pickle.dumps(storage.sample())
        here = pickle.loads(message)
        num_leaves = len([*here.keys(True, True)])
        data = sum(leaf.nbytes for leaf in here.values(True, True))
        assert len(message) < data + 80 * num_leaves + 600
        check_batch(here)
        here["td_error"] = torch.rand(32)
        storage.update_tensordict_priority(pickle.loads(pickle.dumps(here)))
        assert (storage.sampler.base.priorities[here["index"]] < 1).all()
        assert len(pickle.dumps(storage)) < 1000

    def test_batches_of_unknown_origin_are_episodes_of_their_own(self):
        storage = actor()
        for number, first in ((1, 0), (2, 0), (1, 4)):
            storage.extend(steps(number, 4, first))
        check_rows_of(storage)
        assert storage.episodes.table()["length"].tolist() == [4, 4, 4]

    def test_processes_with_lanes_of_their_own_go_on(self):
        storage = actor(num_envs=2)
        for first in (0, 3, 6):
            for lane in (0, 1):
                storage.extend(steps(lane + 1, 3, first), lanes=[lane])
        check_rows_of(storage, num_envs=2)
        assert storage.episodes.table()["length"].tolist() == [9, 9]

    @pytest.mark.parametrize("method", ["add", "record"])
    def test_single_steps_do_not_say_whose_they_are(self, method):
        storage = actor()
        with pytest.raises(RuntimeError, match="from any process"):
            getattr(storage, method)(steps(1, 1)[0])
        assert not len(storage)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Actors are other processes, which the package need not be installed for.
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        with warnings.catch_warnings():
            # Ray does not wait for the processes that it ends, and Python complains.
            warnings.simplefilter("ignore", ResourceWarning)
            ray.shutdown()
            gc.collect()


@pytest.fixture(scope="module")
def workers(local_ray) -> list:
    """Two processes, each of which may write and sample at once."""
    return [ray.remote(num_cpus=0, max_concurrency=2)(Worker).remote() for _ in range(2)]


ON_RAY = {"service_backend": "ray", "service_backend_options": {"remote_config": {"num_cpus": 0}}}


@pytest.mark.slow
def test_two_write_and_two_sample(workers):
    options = {**OPTIONS, "storage_size": 300, "num_envs": 2, "eta": 0.99, "c_min": 50}
    replay = HERReplayStorage(*SPACES, **options, **ON_RAY)
    assert isinstance(replay, RayReplayBuffer)
    ray.get([worker.write.remote(replay, lane, 1) for lane, worker in enumerate(workers)])
    busy = [worker.write.remote(replay, lane, 40) for lane, worker in enumerate(workers)]
    busy += [worker.sample.remote(replay, 30) for worker in workers]
    ray.get(busy)
    slots = torch.cat(ray.get([worker.sample.remote(replay, 10) for worker in workers])).unique()
    assert len(replay) == 300
    assert replay.write_count == 2 * 41 * 7
    # What is there is loaded here, to look at all of it.
    here = HERReplayStorage(*SPACES, **options)
    here.load_state_dict(replay.state_dict())
    check_rows(here)
    assert len(here.episodes.table()) < 300 / 3.5  # Their mean length is 4: none was cut.
    assert len(slots) > 100
    here.sample()
    assert torch.equal(here.sampler.base.base.priorities[slots], priority_of(here[slots]))
    replay.shutdown()


@pytest.mark.slow
def test_a_handle_and_its_clients_have_the_methods_and_parameters(workers):
    parts = {
        "storage": partial(PackedStorage, 100),
        "writer": partial(EpisodeWriter, 1),
        "sampler": partial(HERSampler, "final", num_goals=4),
        "transform_factory": partial(GoalRelabel, reward),
    }
    replay = ReplayStorage(**parts, batch_size=64, **ON_RAY)
    ray.get([worker.collect.remote(replay, 100, 2) for worker in workers])
    for caller in (replay, replay.client()):
        assert caller.can_sample()
        check_batch(caller.sample())
        assert caller.sample_episodes(3).shape[0] == 3
        caller.num_goals = 2
        assert caller.num_goals == 2
        with pytest.raises(AttributeError, match="no component of this ReplayStorage has 'beta'"):
            caller.beta = 0.5
        with pytest.raises(AttributeError, match="num_goal"):
            caller.num_goal = 2
    with pytest.raises(ValueError, match="num_goals must be"):
        replay.num_goals = -1
    assert replay.client().num_goals == 2
    replay.shutdown()


# TorchRL's collectors and losses warn about options of their own that are to change.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_guide_runs(local_ray):
    check_md_file(ROOT / "tutorials" / "several_machines.md", memory=True)
